"""The machine of acts: what users do with a model, in any order, on shards and on one plain process.

    python -m tests.acts --seed 7                              # one sequence in each layout
    python -m tests.acts --layout "2 ranks" --minutes 10       # new seeds for so long, in a layout
    python -m tests.acts --without "pass" --seed 7             # no act whose name has the word

A sequence is a script of plain lines, drawn by a seed. Each act, of one line or a few, runs on the sharded model, where
each rank has its rows of the batch, and on the plain model of transformers and PEFT, which has all rows. After each act
what a user sees is compared: losses, gradients, weights, the optimizer's states, state dicts, saved files. An act is

    right     both did the same, or both raised an error;
    refused   the package says, on every rank alike, that it does not do this: the plain model does not either;
    wrong     they differ, or ranks do, or a refusal is none that is documented (`REFUSALS`);
    foreign   an error of somebody else, or no answer, where the plain model has none.

A sequence ends at the first act that is wrong or foreign, and prints itself as a script to paste, made shorter while it
still ends so.
"""

import argparse
import copy
import random
import re
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate import ParallelismConfig
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

import hf_fsdp_tools
from hf_fsdp_tools import FSDPPlugin, FSDPToolsError, ParallelDims, WrapPolicy, load_adapter, wait_for_saves
from hf_fsdp_tools.steps import load_weights
from tests._checkpoints import full, randomize, stored_tensors, tiny_config
from tests._dist import hide_gpus, run_ranks
from tests._training import new_accelerator
from tests.api import telling

Tensors = dict[str, torch.Tensor]
Act = tuple[str, ...]
"""The lines of an act."""
ROWS, LR = 4, 1e-2


@dataclass(frozen=True)
class Layout:
    ranks: int
    model_type: str = "llama"
    dims: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    is_adapter: bool = False
    is_tied: bool = False

    @property
    def is_bf16(self) -> bool:
        return "mp_policy" in self.options


BF16 = {"mp_policy": "bf16"}
WHOLE = WrapPolicy(replicate=("model.norm.weight", "model.layers.1.input_layernorm.weight"))
LAYOUTS = {
    "one rank": Layout(1),
    "one rank bf16": Layout(1, options=BF16),
    "one rank lora": Layout(1, "qwen3", is_adapter=True),
    "2 ranks": Layout(2),
    "2 ranks bf16": Layout(2, "qwen3", options=BF16),
    "tied": Layout(2, "qwen3", is_tied=True),
    "tied one rank bf16": Layout(1, "qwen3", options=BF16, is_tied=True),
    "hsdp": Layout(4, dims={"dp_replicate_size": 2}),
    "cp": Layout(2, dims={"cp_size": 2}),
    "tp": Layout(2, dims={"tp_size": 2}),
    "ep": Layout(2, "qwen3_moe", dims={"ep_size": 2}),
    "mixture": Layout(2, "mixtral"),
    "offload": Layout(2, options={"offload_policy": True}),
    "kept": Layout(2, options={"policy": WrapPolicy(reshard_after_forward={"*": False})}),
    "whole": Layout(2, options={"policy": WHOLE}),
    "lora": Layout(2, "qwen3", is_adapter=True),
    "lora bf16": Layout(2, "qwen3", options=BF16, is_adapter=True),
}
REFUSALS = (
    "belong to no prepared model",
    "PEFT cannot merge adapters into layers or experts that ranks share",
    "training would not go on as it was",  # a state of fewer optimizers than are prepared now
)
"""Words of the refusals that are documented."""

# ---- the acts ----

PASS = "loss = model(input_ids=ids({n}), labels=ids({n}), use_cache=False).loss"
BASE = "loss = base(model)(input_ids=ids({n}), use_cache=False).last_hidden_state.pow(2).mean()"
QUIET = "with torch.no_grad(): "
WORDS = "min_new_tokens=3, max_new_tokens=3, do_sample=False"
GENERATE = f"words = model.generate(input_ids=ids({{n}})[:, :4], {WORDS})"
CHANGES = (
    QUIET + "[p.mul_(0.9) for p in model.parameters()]",
    "[p.data.mul_(0.9) for p in model.parameters()]",
    QUIET + "[p.add_(0.01) for name, p in model.named_parameters() if 'norm' in name]",
    QUIET + "[p.mul_(1.1) for name, p in model.named_parameters() if 'embed_tokens' in name or 'lm_head' in name]",
)
FREEZES = tuple(
    f"[p.requires_grad_(False) for name, p in model.named_parameters() if {which}]"
    for which in ("'norm' in name", "'embed_tokens' in name", "'layers.0.' in name", "'lm_head' not in name")
)
OPTIMIZERS = (
    "torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.0)",
    "torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-3, weight_decay=0.0)",
    "torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)",
)
ACCELERATOR = "accelerator = make_accelerator()"
STATE = "kept = {key: value.clone() for key, value in model.state_dict().items()}"


class Rule:
    """Acts of one kind, of which one is drawn; `needs`, `forbids`, `gives` and `takes` are facts about the script."""

    def __init__(self, weight: int, *acts: str | Act, **facts: str) -> None:
        self.weight, self.acts = weight, [(act,) if isinstance(act, str) else act for act in acts]
        sets = (frozenset(facts.get(name, "").split()) for name in ("needs", "forbids", "gives", "takes"))
        self.needs, self.forbids, self.gives, self.takes = sets


PREPARED = tuple(f"model, optimizer = accelerator.prepare(model, {made})" for made in OPTIMIZERS)
RULES = {
    "pass, backward": Rule(8, (PASS, "loss.backward()"), forbids="accelerator"),
    "pass, backward by Accelerate": Rule(8, (PASS, "accelerator.backward(loss)"), needs="accelerator prepared"),
    "pass with gradients": Rule(3, PASS),
    "pass without gradients": Rule(2, QUIET + PASS),
    "base pass, backward": Rule(2, (BASE, "loss.backward()")),
    "base pass with gradients": Rule(2, BASE),
    "base pass without gradients": Rule(1, QUIET + BASE),
    "evaluation": Rule(2, ("model.eval()", QUIET + PASS), ("model.eval()", QUIET + PASS, "model.train()")),
    "mode": Rule(1, "model.eval()", "model.train()"),
    "generate": Rule(2, GENERATE),
    "optimizer": Rule(6, *(f"optimizer = {made}" for made in OPTIMIZERS), forbids="accelerator", gives="optimizer"),
    "accelerator": Rule(2, ACCELERATOR, forbids="accelerator", gives="accelerator"),
    "prepare": Rule(3, "model = accelerator.prepare(model)", needs="accelerator", gives="prepared", forbids="prepared"),
    "prepare both": Rule(4, *PREPARED, needs="accelerator", gives="optimizer prepared", forbids="prepared"),
    "prepare optimizer": Rule(
        3, *(f"optimizer = accelerator.prepare({made})" for made in OPTIMIZERS), needs="accelerator prepared",
        gives="optimizer",
    ),
    "step": Rule(6, "optimizer.step()", needs="optimizer"),
    "step, zero": Rule(4, ("optimizer.step()", "optimizer.zero_grad()"), needs="optimizer"),
    "zero": Rule(2, "model.zero_grad()", "model.zero_grad(set_to_none=False)"),
    "zero by optimizer": Rule(
        2, "optimizer.zero_grad()", "optimizer.zero_grad(set_to_none=False)", needs="optimizer"
    ),
    "clip": Rule(2, "norm = clip_grad_norm_(model.parameters(), 0.5)"),
    "clip by Accelerate": Rule(1, "norm = accelerator.clip_grad_norm_(model.parameters(), 0.5)", needs="prepared"),
    "freeze": Rule(3, *FREEZES),
    "unfreeze": Rule(2, "[p.requires_grad_(True) for p in model.parameters()]", forbids="adapter"),
    "unfreeze adapter": Rule(
        2, "[p.requires_grad_('lora_' in name) for name, p in model.named_parameters()]", needs="adapter"
    ),
    "change": Rule(3, *CHANGES),
    "state dict": Rule(3, STATE, gives="kept"),
    "load state dict": Rule(2, "model.load_state_dict(kept)", needs="kept"),
    "load weights": Rule(1, "load_weights(model)", forbids="adapter"),
    "save": Rule(2, ("save_pretrained(model)", "saved = opened()")),
    "save in the background": Rule(1, "save_pretrained(model, blocking=False)", gives="pending"),
    "open": Rule(2, "saved = opened()", needs="pending"),
    "store state": Rule(2, "store(model, optimizer)", needs="optimizer", gives="stored"),
    "restore state": Rule(3, "restore(model, optimizer)", needs="optimizer stored"),
    "save_state": Rule(2, "accelerator.save_state(folder)", needs="prepared optimizer", gives="saved"),
    "load_state": Rule(3, "accelerator.load_state(folder)", needs="prepared optimizer saved"),
    "copy": Rule(2, "model = copy.deepcopy(model)", forbids="adapter", takes="prepared optimizer saved"),
    "copy adapted": Rule(1, "model = copy.deepcopy(model)", needs="adapter", takes="prepared optimizer saved"),
    "checkpointing": Rule(1, "model.gradient_checkpointing_enable()"),
    "failing pass": Rule(1, PASS.replace("ids({n})", "ids({n}) + 999"), "with failing(model): " + PASS),
    "adapter": Rule(
        2, "model = with_adapter(model)", forbids="adapter", gives="adapter",
        takes="prepared optimizer saved kept stored",
    ),
    "second adapter": Rule(
        1, "add_second(model)", needs="adapter", forbids="second merged", gives="second", takes="kept stored saved"
    ),
    "set adapter": Rule(
        2, "model.set_adapter('second')", "model.set_adapter('default')", needs="second", forbids="merged"
    ),
    "delete adapter": Rule(
        1, ("model.set_adapter('default')", "model.delete_adapter('second')"), needs="second", forbids="merged",
        takes="second kept stored saved",
    ),
    "disabled": Rule(2, "with torch.no_grad(), model.disable_adapter(): " + PASS, needs="adapter", forbids="merged"),
    "disabled, merged": Rule(
        2, "with torch.no_grad(), model.disable_adapter(): " + PASS, needs="merged fp32", takes="merged"
    ),  # PEFT unmerges in the pass, under autocast with a rounded product
    "merge": Rule(1, "model.merge_adapter()", needs="adapter", forbids="merged", gives="merged"),
    "unmerge": Rule(4, "model.unmerge_adapter()", needs="merged", takes="merged"),
}  # fmt: skip


def drawn(layout: Layout, seed: object, without: Sequence[str] = ()) -> list[Act]:
    """A sequence of 6 to 15 acts between one that loads the model, and a training pass that shows what became of it."""
    chance = random.Random(f"{seed}")
    facts = ({"adapter"} if layout.is_adapter else set()) | (set() if layout.is_bf16 else {"fp32"})
    made = chance.choice([("model = load()",)] * 3 + [(ACCELERATOR, "model = load(accelerator)"), ()])
    frozen = chance.choice([(), *((each,) for each in FREEZES)]) if not facts else ()
    acts: list[Act] = [made or (ACCELERATOR, "model = plain_model()", *frozen, "model = accelerator.prepare(model)")]
    facts |= {"accelerator"} if len(made) != 1 else set()
    facts |= {"prepared"} if not made else set()
    rules = {name: each for name, each in RULES.items() if not any(word in name for word in without)}
    for _ in range(chance.randint(6, 15)):
        allowed = [each for each in rules.values() if each.needs <= facts and not each.forbids & facts]
        chosen = chance.choices(allowed, [each.weight for each in allowed])[0]
        facts = (facts - chosen.takes) | chosen.gives
        acts.append(tuple(line.replace("{n}", str(chance.randrange(4))) for line in chance.choice(chosen.acts)))
    last = PASS.replace("{n}", "9")
    backward = "accelerator.backward(loss)" if "prepared" in facts else "loss.backward()"
    step = [("optimizer.step()",)] if "optimizer" in facts else []
    return [*acts, (last, backward), *step, (QUIET + last,), (STATE,)]


# ---- what the lines of acts mean ----


@cache
def words(number: int) -> torch.Tensor:
    return torch.randint(3, 60, (ROWS, 12), generator=torch.Generator().manual_seed(number))


def adapted(model: Any) -> bool:
    return isinstance(model, PeftModel)


def base(model: Any) -> Any:
    return (model.get_base_model() if adapted(model) else model).model


@contextmanager
def failing(model: Any) -> Iterator[None]:
    """A block in which a pass of the model raises an error in its second layer."""

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory, say")

    handle = base(model).layers[1].register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


def opened_folder(folder: Path) -> Tensors:
    """The weights that transformers opens, or those of adapters by their folders."""
    if (folder / "config.json").exists():
        return AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    files = {file.parent for file in folder.rglob("*.safetensors")}
    named = {part.relative_to(folder): stored_tensors(part) for part in sorted(files)}
    return {f"{part} {key}": tensor for part, tensors in named.items() for key, tensor in tensors.items()}


NAMES = (
    "ids", "load", "plain_model", "make_accelerator", "save_pretrained", "opened", "store", "restore", "with_adapter",
    "load_weights", "clip_grad_norm_", "add_second",
)  # fmt: skip


class Side:
    """The names of the lines of acts, for one of the two models."""

    def __init__(self, layout: Layout, files: Path, folder: Path) -> None:
        self.layout, self.files, self.folder, self.count = layout, files, folder, 0
        self.meshes: dict[str, Any] = {}
        self.env: dict[str, Any] = {"torch": torch, "copy": copy, "base": base, "failing": failing, "optimizer": None}
        self.env |= {name: getattr(self, name) for name in NAMES}
        self.env["folder"] = folder / "accelerate"

    def plain_model(self) -> Any:
        model = AutoModelForCausalLM.from_pretrained(self.files / "base", dtype=torch.float32)
        if self.layout.is_adapter:
            model = PeftModel.from_pretrained(model, self.files / "default", is_trainable=True)
        return model.train()

    def add_second(self, model: Any) -> None:
        model.load_adapter(str(self.files / "second"), "second", is_trainable=True, torch_device="cpu")

    def new_folder(self) -> Path:
        self.count += 1
        return self.folder / str(self.count)

    def store(self, model: Any, optimizer: Any) -> None:
        self.stored, alone = self.new_folder(), isinstance(self, Plain)
        state = dict(zip("mo", get_state_dict(model, optimizer), strict=True))
        dcp.save(state, checkpoint_id=self.stored, no_dist=alone)

    def restore(self, model: Any, optimizer: Any) -> None:
        state = dict(zip("mo", get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=self.stored, no_dist=isinstance(self, Plain))
        set_state_dict(model, optimizer, model_state_dict=state["m"], optim_state_dict=state["o"])


class Plain(Side):
    """Of transformers, PEFT and torch, in one process with all rows."""

    clip_grad_norm_ = staticmethod(nn.utils.clip_grad_norm_)

    def ids(self, number: int) -> torch.Tensor:
        return words(number)

    def load(self, accelerator: Any = None) -> Any:
        return self.plain_model()

    def with_adapter(self, model: Any) -> Any:
        return PeftModel.from_pretrained(model, self.files / "default", is_trainable=True).eval()

    def load_weights(self, model: Any) -> None:
        model.load_state_dict(self.load().state_dict())

    def make_accelerator(self) -> "Plain":
        self.prepared: dict[bool, Any] = {}  # the optimizer, then the model
        return self

    def save_pretrained(self, model: Any, blocking: bool = True) -> None:
        folder = self.new_folder()
        model.save_pretrained(folder)  # transformers writes on rank 0 alone
        shared = [opened_folder(folder)]
        dist.broadcast_object_list(shared)
        self.saved = shared[0]

    def opened(self) -> Tensors:
        return self.saved

    # As an Accelerator

    def prepare(self, *objects: Any) -> Any:
        self.prepared |= {isinstance(each, nn.Module): each for each in objects}
        return objects if len(objects) > 1 else objects[0]

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def save_state(self, folder: Path) -> None:
        self.state = copy.deepcopy({is_model: each.state_dict() for is_model, each in self.prepared.items()})

    def load_state(self, folder: Path) -> None:
        for is_model, state in copy.deepcopy(self.state).items():
            self.prepared[is_model].load_state_dict(state)


class Sharded(Side):
    """Of this package, each rank with its rows."""

    clip_grad_norm_ = staticmethod(hf_fsdp_tools.clip_grad_norm_)

    def ids(self, number: int) -> torch.Tensor:
        alike = ParallelDims(**self.layout.dims).ranks_per_row
        return words(number).chunk(dist.get_world_size() // alike)[dist.get_rank() // alike]

    def load(self, accelerator: Any = None) -> Any:
        options, dims = dict(self.layout.options), ParallelDims(**self.layout.dims).resolve(dist.get_world_size())
        options |= {"mesh": dims.build_mesh("cpu")} if accelerator is None else {"accelerator": accelerator}
        files = self.files / ("default" if self.layout.is_adapter else "base")
        options |= {"is_trainable": True} if self.layout.is_adapter else {}
        load_kwargs = {"progress": False}
        model = hf_fsdp_tools.from_pretrained(files, dtype=torch.float32, load_kwargs=load_kwargs, **options).train()
        return model

    def with_adapter(self, model: Any) -> Any:
        return load_adapter(model, self.files / "default", is_trainable=True)

    def load_weights(self, model: Any) -> None:
        load_weights(model, self.files / "base", progress=False)

    def make_accelerator(self) -> Any:
        sizes = dict(self.layout.dims)
        options = {"policy": self.layout.options.get("policy"), "cpu_offload": "offload_policy" in self.layout.options}
        plugin = FSDPPlugin(ep_size=sizes.pop("ep_size", 1), **options)
        shards = dist.get_world_size() // max(sizes.values(), default=1)
        parallelism = ParallelismConfig(**sizes, dp_shard_size=shards) if sizes else None
        precision = "bf16" if self.layout.is_bf16 else "no"
        return new_accelerator(fsdp_plugin=plugin, parallelism_config=parallelism, mixed_precision=precision)

    def save_pretrained(self, model: Any, blocking: bool = True) -> None:
        self.saved = self.new_folder()
        hf_fsdp_tools.save_pretrained(model, self.saved, blocking=blocking)

    def opened(self) -> Tensors:
        wait_for_saves()
        return opened_folder(self.saved)

    def is_seen(self, name: str, parameter: torch.Tensor) -> bool:
        """Whether a user sees this rank's shard, and not what is gathered in its place between two passes."""
        if dist.get_world_size() == 1:
            return parameter.is_leaf and parameter.dtype == torch.float32
        if not self.meshes:  # just loaded
            self.meshes |= {plain_name(name): mesh_of(each) for name, each in self.env["model"].named_parameters()}
        mesh = self.meshes.get(plain_name(name))
        return mesh_of(parameter) == mesh if plain_name(name) in self.meshes else isinstance(parameter, DTensor)


def plain_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".base_layer", "")


def mesh_of(parameter: torch.Tensor) -> Any:
    return parameter.device_mesh if isinstance(parameter, DTensor) else None


# ---- comparing ----


def figures(side: Side, act: Act) -> Iterator[tuple[str, str, torch.Tensor]]:
    """What a user sees of a model after an act, whole: what it is, its name, its value."""
    env = side.env
    states = getattr(env["optimizer"], "state", {})
    for name, parameter in env["model"].named_parameters():
        if isinstance(side, Plain) or side.is_seen(name, parameter):
            yield "weight", name, parameter
            yield "requires_grad", name, torch.tensor(float(parameter.requires_grad))
            if parameter.grad is not None:
                yield "gradient", name, parameter.grad
            for key, value in states.get(parameter, {}).items():
                yield key, name, value
        else:
            yield "hidden", name, torch.zeros(())
    for what in ("kept", "saved"):
        if any(f"{what} = " in line for line in act) and what in env:
            yield from ((what, key, value) for key, value in env[what].items())
    for what in ("loss", "norm", "words"):
        if any(f"{what} = " in line for line in act) and what in env:
            yield what, "", env[what]


def gathered(side: Side, act: Act) -> dict[tuple[str, str], torch.Tensor]:
    """The figures, whole; of all rows."""
    found = {}
    listed = [(what, name, value) for what, name, value in figures(side, act)]
    if isinstance(side, Sharded):
        seen = [(what, name, mesh_of(value) is None) for what, name, value in listed]
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, seen)
        if every.count(seen) != len(every):
            others = sorted({str(key) for each in every for key in {*each}.symmetric_difference(seen)})
            raise ArithmeticError(f"not the same on every rank: {others[:3]}")
    for what, name, value in listed:
        whole = full(value.detach()) if isinstance(value, torch.Tensor) else torch.tensor(float(value))
        if isinstance(side, Sharded) and what in ("loss", "words"):
            whole = of_all_rows(side, whole)
        found[what, name] = whole.clone()
    return found


def of_all_rows(side: Sharded, value: torch.Tensor) -> torch.Tensor:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, value)
    each = every[:: ParallelDims(**side.layout.dims).ranks_per_row]
    return torch.cat(each) if value.dim() else torch.stack(each).mean()


def difference(plain: Side, sharded: Side, act: Act, steps: int) -> str:
    """What differs, or ""."""
    if "model" not in plain.env:
        return ""
    found, expected = gathered(sharded, act), gathered(plain, act)
    hidden = {name for what, name in found if what == "hidden"}
    largest = max((float(v.abs().max()) for (what, _), v in expected.items() if what == "gradient"), default=0.0)
    problems = []
    for what, name in {**expected, **found}:
        if name in hidden and what not in ("kept", "saved"):
            continue
        have, want = found.get((what, name)), expected.get((what, name))
        if have is None or want is None:  # no gradient is as good as one of zeros
            if what in ("kept", "saved") or (what != "step" and (have if want is None else want).any()):
                problems.append(f"{what} of {name} is {'missing' if have is None else 'there alone'}")
        elif have.shape != want.shape or (have.dtype != want.dtype and what not in ("loss", "norm", "step")):
            problems.append(f"{what} of {name}: {have.dtype} {[*have.shape]} and not {want.dtype} {[*want.shape]}")
        else:
            far = (have.double() - want.double()).abs()
            allowed = bound(what, want, largest, steps, is_bf16=plain.layout.is_bf16)
            worst, limit = (far.mean(), allowed[1]) if plain.layout.is_bf16 else (far.max(), allowed[0])
            if not bool(worst <= limit) or not bool(far.max() <= allowed[0]):
                problems.append(f"{what} of {name}: {float(far.max()):.1e} apart, where {allowed[0]:.1e} is allowed")
    return "; ".join(problems[:3]) + (f"; and {len(problems) - 3} more" if len(problems) > 3 else "")


def bound(what: str, value: torch.Tensor, largest: float, steps: int, *, is_bf16: bool) -> tuple[float, float]:
    """How far the largest and the mean difference of a value may be; in bf16 it is rounding that differs (assumed)."""
    size = float(value.double().abs().max()) if value.numel() else 0.0
    size = max(size, 1e-2 * largest) if what == "gradient" else size
    if what in ("requires_grad", "step"):
        return 0.0, 0.0
    if not is_bf16:
        return 1e-4 * size + 1e-7, float("inf")
    if what in ("weight", "kept", "saved"):
        return 1.5 * LR * steps + 1e-6, 0.3 * LR * steps + 1e-6
    if what in ("loss", "norm"):
        return ((0.02 if what == "loss" else 0.05) + 0.02 * steps) * size, float("inf")
    if what == "gradient":
        return (0.3 + 0.2 * steps) * size + 0.05 * largest, float("inf")
    return float("inf"), float("inf")


# ---- one sequence ----


def attempt(side: Side, act: Act) -> BaseException | None:
    in_bf16 = side.layout.is_bf16 and isinstance(side, Plain) and any("ids(" in line for line in act)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if in_bf16 else nullcontext():
        try:
            exec("\n".join(act), side.env)
        except (Exception, CheckpointException) as error:  # DCP's is no Exception
            return error
    return None


def said_of(error: BaseException | None) -> str:
    if error is None:
        return ""
    if isinstance(error, FSDPToolsError):
        return f"{type(error).__name__}: {error}"
    places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
    return f"{type(error).__name__}: {str(error)[:300]} ({' < '.join(places[:-4:-1])})"


def all_said(said: str) -> list[str]:
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, said)
    return every


def outcome(plain: Plain, sharded: Sharded, act: Act, steps: int) -> tuple[str, str]:
    """The kind of an act, and what was said."""
    error = attempt(sharded, act)
    errors = all_said(said_of(error))
    if len({said.split(":")[0] for said in errors}) > 1:
        return "wrong", "ranks do not agree: " + " | ".join(errors)
    kind = "right"
    if isinstance(error, FSDPToolsError):
        kind = "refused" if len({*errors}) == 1 and any(words in errors[0] for words in REFUSALS) else "wrong"
    else:
        of_plain = attempt(plain, act)
        if (error is None) != (of_plain is None):
            kind = "foreign" if error is not None else "wrong"
            errors[0] = errors[0] or f"no error; the plain model has {said_of(of_plain)}"
    if kind in ("right", "refused"):
        try:
            apart = next(filter(None, all_said(difference(plain, sharded, act, steps))), "")
        except ArithmeticError as unequal:
            apart = str(unequal)
        if apart:
            return "wrong", (f"after a refusal ({errors[0][:100]}) " if kind == "refused" else "") + apart
    return kind, errors[0]


def play(layout: Layout, acts: Sequence[Act], files: Path, folder: Path) -> list[tuple[str, str]]:
    """On a rank: what became of each act, until one is wrong or foreign."""
    warnings.simplefilter("ignore")
    disable_progress_bar()
    set_verbosity_error()
    torch.manual_seed(0)
    own = folder / f"plain {dist.get_rank()}"
    plain, sharded, told, steps = Plain(layout, files, own), Sharded(layout, files, folder), [], 0
    for act in acts:
        steps += any("step()" in line for line in act)
        told.append(outcome(plain, sharded, act, steps))
        if told[-1][0] in ("wrong", "foreign"):
            break
    wait_for_saves()
    return told


def make_files(layout: Layout, folder: Path) -> Path:
    """The base and two adapters of a layout's model, in a folder that several layouts share."""
    folder = folder / f"{layout.model_type}{' tied' if layout.is_tied else ''}"
    if folder.exists():
        return folder
    config = telling(tiny_config(layout.model_type, 4))
    config.tie_word_embeddings = layout.is_tied
    randomize(AutoModelForCausalLM.from_config(config)).save_pretrained(folder / "base")
    for number, name in enumerate(("default", "second")):
        torch.manual_seed(number)
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "base"), lora).save_pretrained(folder / name)
    return folder


# ---- many sequences ----


def played(layout: Layout, acts: Sequence[Act], folder: Path) -> list[tuple[str, str]]:
    """What became of the acts, on ranks of their own."""
    files = make_files(layout, folder)
    with tempfile.TemporaryDirectory(dir=folder) as own:
        try:
            return run_ranks(play, layout.ranks, layout, acts, files, Path(own), timeout_s=100)[0]
        except AssertionError as error:
            return [("foreign", f"ranks ended: {error}")]


def signature(told: Sequence[tuple[str, str]]) -> tuple[str, str]:
    """What two failures have alike that are the same one: the kind, and what was said without numbers and names."""
    kind, said = told[-1]
    return kind, re.sub(r" of [\w.]+|\d[\d.e+-]*|;.*", "", said)[:60]


def shortened(layout: Layout, acts: Sequence[Act], told: Sequence[tuple[str, str]], folder: Path) -> list[Act]:
    """The acts without those that a failure does not need."""
    kept, wanted = list(acts[: len(told)]) if len(told) > 1 else list(acts), signature(told)
    for place in range(len(kept) - 1, 0, -1):
        fewer = kept[:place] + kept[place + 1 :]
        again = played(layout, fewer, folder)
        if signature(again) == wanted:
            kept = fewer[: len(again)] if len(again) > 1 else fewer
    return kept


def script(name: str, acts: Sequence[Act], seed: object, said: str) -> str:
    """The acts as plain lines to paste."""
    lines = [f"# seed {seed}: {said}"[:1000], "from tests.acts import replay", f'replay("{name}", """']
    return "\n".join([*lines, *(line for act in acts for line in act), '""")'])


def acts_of(text: str) -> list[Act]:
    return [(line,) for line in text.splitlines() if line.strip()]


def replay(name: str, text: str) -> None:
    """Run a script that was printed, and print what became of each line."""
    hide_gpus()
    acts = acts_of(text)
    with tempfile.TemporaryDirectory() as folder:
        for act, (kind, said) in zip(acts, played(LAYOUTS[name], acts, Path(folder)), strict=False):
            print(f"{kind:<8} {act[0]}\n         {said}" if said else f"{kind:<8} {act[0]}")


def search(names: Sequence[str], seeds: Iterator[object], until: float, without: Sequence[str] = ()) -> list[str]:
    """Play sequences until that time, once at least; print counts by layout; return scripts of what failed."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in names}
    scripts: dict[tuple[str, str], str] = {}
    with tempfile.TemporaryDirectory(prefix="acts-") as folder:
        for seed in seeds:
            for name in names:
                acts = drawn(LAYOUTS[name], f"{name} {seed}", without)
                told = played(LAYOUTS[name], acts, Path(folder))
                counts[name].update(kind for kind, _ in told)
                for act, (kind, said) in zip(acts, told, strict=False):
                    if kind == "refused":
                        print(f"refused, {name} {seed}, {act}: {said[:200]}", flush=True)
                if told[-1][0] in ("wrong", "foreign"):
                    key = signature(told)
                    if (name, *key) in scripts:
                        print(f"again, {name} {seed}: {key}", flush=True)
                        continue
                    fewer = shortened(LAYOUTS[name], acts, told, Path(folder))
                    scripts[name, *key] = script(name, fewer, seed, " ".join(told[-1]))
                    print(scripts[name, *key], flush=True)
            if time.monotonic() > until:
                break
    kinds = ("right", "refused", "wrong", "foreign")
    print(f"{'layout':<20}" + "".join(f"{kind:>9}" for kind in kinds))
    for name, count in counts.items():
        print(f"{name:<20}" + "".join(f"{count[kind]:>9}" for kind in kinds))
    return [*scripts.values()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.acts", description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6)
    parser.add_argument("--layout", action="append", choices=LAYOUTS, help="may be given several times")
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--without", action="append", default=[], metavar="WORD", help="of names of acts to leave out")
    given = parser.parse_args(arguments)
    hide_gpus()
    disable_progress_bar()
    set_verbosity_error()
    until = time.monotonic() + 60 * given.minutes
    seeds = iter(range(given.seed, given.seed + 10**6))
    return 1 if search(given.layout or list(LAYOUTS), seeds, until, given.without) else 0


if __name__ == "__main__":
    raise SystemExit(main())
