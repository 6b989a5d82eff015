"""Muon on shards: torch's own on whole matrices, at its cost, saved and resumed on another number of ranks."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from hf_fsdp_tools import ConfigError, Muon, ParallelDims, WrapPolicy, from_pretrained
from tests._checkpoints import randomize, tiny_config
from tests._dist import run_cases, run_ranks
from tests._noted import calls_of
from tests._training import (
    ShardedTrainer,
    apart,
    arguments,
    full_parameters,
    full_states,
    logged,
    make_rows,
    new_accelerator,
)
from tests.api import Held, check_kind, local_device, matrices_in

STEPS = 2
OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


@pytest.fixture(scope="module")
def checkpoints(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Those of all tests, and one whose words, heads, and fused gates in two ranges, two ranks can share."""
    folder = tmp_path_factory.mktemp("divisible")
    torch.manual_seed(0)
    randomize(AutoModelForCausalLM.from_config(tiny_config("qwen3_moe", 2))).save_pretrained(folder)
    return {**folders, "divisible": folder}


def set_gradients(model: nn.Module, number: int) -> None:
    """Give each parameter a gradient that its name and the number of the step decide."""
    for name, p in model.named_parameters():
        seed = number * 977 + sum(map(ord, name))
        whole = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)).to(p.device, p.dtype)
        p.grad = Held.of(p).cut(whole) if isinstance(p, DTensor) else whole


@cache
def by_torch(folder: Path, dtype: Any = None, **options: Any) -> dict[str, torch.Tensor]:
    """A plain model, on the device of the ranks, after steps of torch's own optimizers."""
    (found,) = run_ranks(stepped_by_torch, 1, folder, dtype, options)
    return found


def stepped_by_torch(folder: Path, dtype: Any, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Muon and AdamW, each matrix a parameter of its own."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder).to(local_device(), dtype)
    own = Muon(model, **{**OPTIONS, **options})
    shared = {"lr", "weight_decay", "nesterov", "adjust_lr_fn"}
    settings = {key: value for key, value in own.param_groups[0].items() if key in shared}
    named = dict(model.named_parameters())
    pieces = matrices_in(model, own.matrices.matrices)
    matrices = {
        (name, i): nn.Parameter(torch.as_strided(named[name].detach(), p.view.length, p.view.strides, p.view.offset))
        for name, parts in pieces.items()
        for i, p in enumerate(parts)
    }
    rest = [p for name, p in named.items() if name not in pieces]
    groups = [
        {"params": [p for p in rest if p.ndim > 1]},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0},
    ]
    optimizers = torch.optim.Muon(matrices.values(), **settings), torch.optim.AdamW(groups, **OPTIONS, fused=True)
    for number in range(STEPS):
        set_gradients(model, number)
        for (name, i), matrix in matrices.items():
            view, gradient = pieces[name][i].view, named[name].grad
            assert gradient is not None
            matrix.grad = torch.as_strided(gradient, view.length, view.strides, view.offset)
        for optimizer in optimizers:
            optimizer.step()
    return full_parameters(model)


TORCHS_RATE = {"adjust_lr_fn": "original", "nesterov": False, "adamw_lr": 1e-2}
LAYOUTS: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "bf16": (2, "llama", {"dtype": torch.bfloat16}, {}),
    "experts": (2, "mixtral", {}, {"bucket_bytes": 10_000}),
    "transposed, at torch's rate": (2, "gpt2", {}, TORCHS_RATE),
    "whole": (2, "llama", {"policy": WrapPolicy(replicate=("*.o_proj.weight", "model.norm.weight"))}, {}),
    "uneven": (3, "deepseek_v3", {}, {"bucket_bytes": 5_000}),
    "replicas": (4, "mixtral", {"mesh": ParallelDims(dp_replicate_size=2, dp_shard_size=2)}, {}),
    "layers": (4, "divisible", {"mesh": ParallelDims(tp_size=2, dp_shard_size=2)}, {}),
    "experts on ranks": (4, "mixtral", {"mesh": ParallelDims(ep_size=2)}, {}),
}
"""(ranks, kind of checkpoint, options of `from_pretrained`, options of Muon)."""


def _sent_bytes(_: Any, operations: list[dist.P2POp]) -> int:
    return sum(each.tensor.nbytes for each in operations if each.op is dist.isend)


def stepped(name: str, folders: dict[str, Path], root: Path) -> dict[str, Any]:
    """The parameters after some steps, the bytes that this rank has sent in the last, and what was said of them."""
    _, kind, options, settings = LAYOUTS[name]
    model = from_pretrained(folders[kind], **options)
    optimizer = Muon(model, **{**OPTIONS, **settings})
    for number in range(STEPS):
        set_gradients(model, number)
        with calls_of(dist, "batch_isend_irecv", _sent_bytes) as sent:
            optimizer.step()
    ownership = optimizer.ownership()
    return {
        "parameters": full_parameters(model),
        "sent": sum(sent),
        "foretold": ownership.sent_bytes[dist.get_rank()],
        "flops": ownership.flops,
        "one way": sum(2 * m.arrival.box.numel for m in ownership.matrices),
        "buckets": len(ownership.buckets),
        "text": repr(optimizer),
    }


NAMES = {ranks: [name for name, layout in LAYOUTS.items() if layout[0] == ranks] for ranks in (2, 3, 4)}


def steps_are_torchs_on_whole_matrices(ranks: int, results: list[dict[str, Any]], checkpoints: dict[str, Path]) -> None:
    """At the cost of one gather and one return."""
    for name in NAMES[ranks]:
        _, kind, options, settings = LAYOUTS[name]
        dtype = options.get("dtype")
        right = by_torch(checkpoints[kind], dtype=dtype, **{k: v for k, v in settings.items() if k != "bucket_bytes"})
        for found in (rank[name] for rank in results):
            assert apart(found["parameters"], right) <= (1e-6 if dtype is None else 2**-9), name
            assert found["sent"] == found["foretold"], name
        one_way = results[0][name]["one way"]
        times = 3 if name == "replicas" else 2  # one way, and back to each shard, which is there twice
        assert sum(rank[name]["sent"] for rank in results) <= times * one_way, name
        flops = results[0][name]["flops"]
        assert max(flops) <= 1.15 * sum(flops) / ranks, name
    if ranks == 2:
        said = results[0]["experts"]
        assert said["buckets"] > 1, "the exchange of one bucket overlaps with another"
        assert "24 of them whole on their rank" in said["text"] and "AdamW  routers" in said["text"]


def in_a_trainer(folders: dict[str, Path], root: Path) -> None:
    """A run of three steps, and one that goes on before the last, whose model the Trainer shards itself."""

    def trainer(model: Any, out: Path) -> Any:
        saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3}
        options = arguments(out, weight_decay=0.1, optim_args="adamw_lr=3e-3", **saving)
        options.optim = "muon"
        return ShardedTrainer(model, options, train_dataset=make_rows(12))

    made = trainer(from_pretrained(folders["tied"], accelerator=new_accelerator()), root / "run")
    made.train()
    going_on = trainer(AutoModelForCausalLM.from_pretrained(folders["tied"]), root / "on")
    going_on.train(resume_from_checkpoint=str(root / "run" / "checkpoint-2"))
    state = full_states(made.model, made.optimizer)
    assert apart(full_states(going_on.model, going_on.optimizer), state) == 0
    assert sum(name.endswith("momentum_buffer") for name in state) == len(made.optimizer.optimizer.matrices.matrices)
    assert isinstance(made.optimizer.optimizer, Muon) and logged(made)[-1] < logged(made)[0]


def goes_on_elsewhere(folders: dict[str, Path], root: Path) -> dict[str, torch.Tensor]:
    """The state of a middle, as another number of ranks reads it."""
    accelerator = new_accelerator()
    model = from_pretrained(folders["mixtral"], accelerator=accelerator)
    model, optimizer = accelerator.prepare(model, Muon(model, **OPTIONS))
    accelerator.load_state(str(root / "state"))
    return full_states(model, optimizer)


def saved_in_a_loop(folders: dict[str, Path], root: Path) -> dict[str, torch.Tensor]:
    """A loop of somebody's: an optimizer of a plain model, which `prepare` shards, and its state."""
    accelerator = new_accelerator()
    plain = AutoModelForCausalLM.from_pretrained(folders["mixtral"])
    model, optimizer = accelerator.prepare(plain, Muon(plain, **OPTIONS))
    for number in range(STEPS):
        set_gradients(model, number)
        optimizer.step()
    accelerator.save_state(str(root / "state"))
    return full_states(model, optimizer)


def refused(folders: dict[str, Path], root: Path) -> None:
    model, plain = (load(folders["llama"]) for load in (from_pretrained, AutoModelForCausalLM.from_pretrained))
    with pytest.raises(ConfigError, match=r"Muon takes a model, .* and no generator: Muon\(model\)"):
        Muon(model.parameters())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Adjust learning rate function other is not supported"):
        Muon(model, adjust_lr_fn="other")
    for given, settings, said in (
        (model, {"optim_args": "momentun=0.9"}, "'momentun' is no option of Muon: did you mean momentum"),
        (plain, {"fsdp": "full_shard", "fsdp_config": {"version": 1}}, "optim 'muon' needs fsdp_version 2"),
    ):
        AcceleratorState._reset_state(reset_partial_state=True)
        options = arguments(root, **settings)
        options.optim = "muon"
        with pytest.raises(ConfigError, match=said):
            ShardedTrainer(given, options, train_dataset=make_rows(4)).train()
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM trains no matrices for Muon\. Adapters go to AdamW"):
        Muon(get_peft_model(AutoModelForCausalLM.from_pretrained(folders["llama"]), LoraConfig(r=2)))


class WithModes(torch.optim.AdamW):
    """Has to be told when training begins, and looks into its state then, as those of schedulefree do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr)
        for group in self.param_groups:
            group["train_mode"] = False

    def train(self, mode: bool = True) -> None:
        for group in self.param_groups:
            group["train_mode"] = mode
            assert all("z" not in self.state[p] for p in group["params"])

    def eval(self) -> None:
        self.train(False)

    def step(self, closure: Any = None) -> Any:
        assert self.param_groups[0]["train_mode"], "not in train mode"
        return super().step(closure)


def steps_of(model: Any, optimizer: Any) -> None:
    getattr(optimizer, "train", lambda: None)()
    for number in range(STEPS):
        set_gradients(model, number)
        optimizer.step()
    getattr(optimizer, "eval", lambda: None)()


def others_step_shards_and_keep_their_state(folders: dict[str, Path], root: Path) -> None:
    """Weights after some steps of another library's optimizer, whose state is saved and read again."""
    accelerator, states, plain = new_accelerator(), [], AutoModelForCausalLM.from_pretrained(folders["tied"])
    plain.to(local_device())
    steps_of(plain, WithModes(plain.parameters(), lr=1e-2))
    for is_first in (True, False):
        model = from_pretrained(folders["tied"], accelerator=accelerator)
        model, optimizer = accelerator.prepare(model, WithModes(model.parameters(), lr=1e-2))
        if is_first:
            steps_of(model, optimizer.optimizer)
        (accelerator.save_state if is_first else accelerator.load_state)(str(root / "modes"))
        states.append(full_states(model, optimizer))
        assert apart(full_parameters(model), full_parameters(plain)) <= 1e-5
        accelerator.free_memory()
    assert apart(*states) == 0


def test_steps_and_states_on_two_and_three_ranks(checkpoints, tmp_path):
    cases = {name: partial(stepped, name) for name in NAMES[2]}
    cases |= {"loop": saved_in_a_loop, "trainer": in_a_trainer, "refused": refused}
    two = run_ranks(run_cases, 2, cases | {"others": others_step_shards_and_keep_their_state}, checkpoints, tmp_path)
    three = run_ranks(
        run_cases, 3, {"uneven": partial(stepped, "uneven"), "on": goes_on_elsewhere}, checkpoints, tmp_path
    )
    steps_are_torchs_on_whole_matrices(2, two, checkpoints)
    steps_are_torchs_on_whole_matrices(3, three, checkpoints)
    right = by_torch(checkpoints["mixtral"], dtype=None)
    for rank in two:
        assert apart({name: rank["loop"][name] for name in right}, right) <= 1e-6
    for rank in three:
        assert apart(rank["on"], two[0]["loop"]) == 0


def test_steps_on_other_layouts(checkpoints, tmp_path):
    pytest.importorskip("transformers.distributed.expert_parallel", reason="transformers 5.21 has it")
    results = run_ranks(run_cases, 4, {name: partial(stepped, name) for name in NAMES[4]}, checkpoints, tmp_path)
    steps_are_torchs_on_whole_matrices(4, results, checkpoints)


def test_optimizers_of_others_that_cannot_step_shards_are_refused():
    for library in ("pytorch_optimizer.optimizer.soap", "galore_torch.adamw"):
        with pytest.raises(ConfigError, match="cannot step sharded parameters"):
            check_kind(type("Own", (torch.optim.Optimizer,), {"__module__": library}))
