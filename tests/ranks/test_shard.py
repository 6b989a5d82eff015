"""A sharded model computes what the plain one does, and refuses what would hang or be wrong."""

import copy
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_fsdp_tools import (
    ConfigError,
    Float8Policy,
    Muon,
    ParallelDims,
    WrapPolicy,
    describe_sharding,
    diagnose,
    from_pretrained,
    make_accelerator,
    save_pretrained,
)
from hf_fsdp_tools.errors import MeshError, WrapPlanError
from hf_fsdp_tools.sharding import placement
from hf_fsdp_tools.steps import WrapPlan, build_meta_model, load_weights, make_wrap_plan, shard_model
from tests._checkpoints import assert_same_model, full, make_checkpoint, make_model, plain_model, randomize, refusal
from tests._dist import run_cases, run_ranks
from tests._training import train
from tests.api import (
    Held,
    ModuleTree,
    all_ranks,
    allocate,
    float8_layers,
    hand_over,
    initialize_missing,
    patched,
    sharding_of,
)

SMALL = patch.multiple(placement, _MOST_PADDING_BYTES=0, _LEAST_RUN=0)  # so that a small model will do


def _batches(ranks: int) -> torch.Tensor:
    """One batch of token ids per rank, the same on every rank."""
    return torch.randint(3, 131, (ranks, 2, 9), generator=torch.Generator().manual_seed(1))


@SMALL
def inference_first(folder):
    """FSDP2 alone stops in training; for dimensions other than 0, in inference mode itself."""
    for kind in ("mixtral", "tied"):
        model, plain = make_model(kind), make_model(kind)
        for each in (model, plain):
            each.config._experts_implementation = "eager"  # the grouped matrix product refuses these awkward sizes
        shard_model(model, make_wrap_plan(model))
        assert any(p.placements[0].dim for p in model.parameters()) == (kind == "mixtral")
        batches = _batches(3)
        batch = batches[dist.get_rank()]
        with torch.inference_mode():
            torch.testing.assert_close(model(input_ids=batch).logits, plain(input_ids=batch).logits)
        model(input_ids=batch, labels=batch).loss.backward()
        for each in batches:
            (plain(input_ids=each, labels=each).loss / 3).backward()
        for name, parameter in model.named_parameters():
            expected = plain.get_parameter(name).grad
            torch.testing.assert_close(full(parameter.grad), expected, rtol=1e-4, atol=1e-6, msg=f"{kind} {name}")


class Awkward(nn.Module):
    """Parameters of any stride, and sequences whose members are called one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(8, 40), nn.ReLU(), nn.Linear(40, 8))
        self.stacks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3))
        self.transposed = nn.Parameter(torch.randn(8, 6).t())
        self.sliced = nn.Parameter(torch.randn(6, 16)[:, ::2])
        self.expanded = nn.Parameter(torch.randn(1, 8).expand(6, 8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.stem, *(layer for stack in self.stacks for layer in stack)):
            x = layer(x)
        return x @ (self.transposed + self.sliced + self.expanded).t()


def awkward_parameters_train_or_are_refused_by_name(folder) -> None:
    torch.manual_seed(0)
    plain = Awkward()
    model = copy.deepcopy(plain)
    shard_model(model, make_wrap_plan(model, policy=WrapPolicy(min_unit_params=100, floor_params=0)))
    for each in (plain, model):
        each(torch.ones(2, 8)).sum().backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(full(model.get_parameter(name)), parameter.detach())
        if parameter.requires_grad:
            torch.testing.assert_close(full(model.get_parameter(name).grad), parameter.grad)
    plain.waves = nn.Linear(8, 8, dtype=torch.complex64)
    with pytest.raises(
        ConfigError, match=r"2 trained parameter.*complex.*: waves\.weight, waves\.bias\. .*view_as_real"
    ):
        shard_model(plain, make_wrap_plan(plain))
    plain.waves = nn.Identity()
    plain.other = nn.Parameter(plain.transposed.data.t())
    with pytest.raises(ConfigError, match=r"(transposed|other) and (transposed|other) are views of the same memory"):
        shard_model(plain, make_wrap_plan(plain))


def alone(folder):
    model = make_model("llama")
    plan = make_wrap_plan(model)
    shard_model(model, plan, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    assert sharding_of(nn.Sequential(model)).plan is plan, "found below a wrapper too"
    batch = _batches(1)[0]
    model(input_ids=batch, labels=batch).loss.backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    with torch.no_grad():
        model(input_ids=batch)
    assert {p.dtype for p in model.parameters()} == {torch.float32}, "masters are back after an evaluation"
    other = make_model("gpt2")
    with pytest.raises(WrapPlanError, match=r"does not fit GPT2LMHeadModel.*model\.layers"):
        shard_model(other, plan)
    assert sharding_of(other) is None
    with pytest.raises(MeshError, match=r"dp_replicate_size 2 .* 1 processes"):
        ParallelDims(dp_replicate_size=2).build_mesh("cpu")
    assert re.search(r"weights +float32, 183\.7 kB on this rank(.|\n)*computation +bfloat16", describe_sharding(model))


def half_of_the_ranks_can_shard_a_model(folder):
    """Two models on two halves of the ranks, with different plans; and plans that differ within a half."""
    rank = dist.get_rank()
    halves = init_device_mesh("cpu", (2, 2), mesh_dim_names=("half", "shard"))
    model = make_model("llama")
    plan = make_wrap_plan(model, policy=WrapPolicy(group_tail=rank < 2))
    shard_model(model, plan, mesh=halves["shard"])
    assert torch.equal(full(model.lm_head.weight), make_model("llama").lm_head.weight)
    if rank < 2:  # the others are in no call
        other = make_model("llama")
        with pytest.raises(ConfigError, match=r"plan\.digest is .* on rank 1\. Give the same"):
            shard_model(other, make_wrap_plan(other, policy=WrapPolicy(group_tail=rank == 0)), mesh=halves["shard"])


CODE = """
from transformers import LlamaForCausalLM
class ToyForCausalLM(LlamaForCausalLM):
    pass
"""


def code_of_the_user_is_saved_with_the_model(folder):
    """The saved folder opens with plain transformers, by the code that came with the checkpoint."""
    config = LlamaConfig.from_pretrained(folder)
    config.auto_map = {"AutoModelForCausalLM": "modeling_toy.ToyForCausalLM"}
    custom = folder.with_name("custom")
    if dist.get_rank() == 0:
        shutil.copytree(folder, custom)
        config.save_pretrained(custom)
        (custom / "modeling_toy.py").write_text(CODE)
    dist.barrier()
    model = from_pretrained(custom, trust_remote_code=True)
    assert type(model).__mro__[2].__name__ == "ToyForCausalLM"
    saved = folder.with_name("saved")
    save_pretrained(model, saved)
    assert (saved / "modeling_toy.py").read_text().strip() == CODE.strip()
    assert not list(saved.glob("_fsdp*.py"))
    sys.modules.pop("transformers_modules", None)
    again = AutoModelForCausalLM.from_pretrained(saved, trust_remote_code=True)
    assert type(again).__name__ == "ToyForCausalLM"
    assert torch.equal(again.lm_head.weight, full(model.lm_head.weight))


# ---- fused experts on more ranks than there are experts: split along another dimension, and all else as ever ----


@SMALL
def load_train_and_save(folder):
    """6 experts on 4 ranks: 2, 2, 2 and 0 of them, padded by a third, were dimension 0 split."""
    folder, accelerator = folder.with_name("six experts"), make_accelerator()
    if dist.get_rank() == 0:
        config = make_model("mixtral").config
        config.num_local_experts = 6
        randomize(AutoModelForCausalLM.from_config(config)).save_pretrained(folder)
    dist.barrier()
    model = from_pretrained(folder, attn_implementation="eager")
    model.config._experts_implementation = "eager"  # the grouped matrix product refuses these awkward sizes
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    plain.config._experts_implementation = "eager"
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.placements[-1] == Shard(2) and experts.down_proj.placements[-1] == Shard(1)
    here = sum(parameter.to_local().numel() for parameter in model.parameters())
    assert here < 1.2 / 4 * sum(parameter.numel() for parameter in plain.parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(full(parameter), plain.get_parameter(name)), name
    assert not [f for f in diagnose(model).findings if f.code == "padded-shards"]
    batches = torch.randint(3, 131, (2, dist.get_world_size(), 9), generator=torch.Generator().manual_seed(1))
    line = "split along dimension 2, having too few rows for 4 ranks: model.layers.{0..1}.mlp.experts.gate_up_proj"
    assert line in describe_sharding(model)
    # Two ranks read 3 experts each with the rows of both; what one of them cannot read stops all.
    together = load_weights(model, folder)
    with patched(LEAST_RUN=0):
        apart = load_weights(model, folder)
    assert together.share_bytes == apart.share_bytes and together.bytes_read < apart.bytes_read
    failing = patch("os.preadv", side_effect=OSError(5, "a bad disk"))
    with failing if dist.get_rank() == 1 else nullcontext():
        message = refusal(lambda: load_weights(model, folder, staging_bytes=2**20))
    assert "a bad disk" in message and len(set(all_ranks(message))) == 1
    load_weights(model, folder)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9))
    rows = [{"input_ids": batch, "labels": batch} for batch in batches[:, dist.get_rank(), None]]
    train(model, optimizer, rows, accelerator=accelerator, clip=0.1)
    rows = [{"input_ids": batch, "labels": batch} for batch in batches]
    train(plain, torch.optim.SGD(plain.parameters(), lr=1.0, momentum=0.9), rows, clip=0.1)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(full(parameter), plain.get_parameter(name), rtol=1e-4, atol=2e-5, msg=name)
    save_pretrained(model, folder / "saved")
    for name, tensor in AutoModelForCausalLM.from_pretrained(folder / "saved").state_dict().items():
        assert torch.equal(full(model.get_parameter(name)), tensor), name


@SMALL
def padding_of_other_peoples_sharding_is_found(folder) -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    model.experts = nn.Parameter(torch.zeros(2, 24, 10))
    fine = copy.deepcopy(model)
    fully_shard(model)
    with patch.object(placement, "_MOST_PADDING_BYTES", 4000):  # 480 elements of padding are 1920 bytes
        assert not [f for f in diagnose(model).findings if f.code == "padded-shards"]
    findings = [f for f in diagnose(model).findings if f.code == "padded-shards"]
    fully_shard(fine, shard_placement_fn=lambda p: Shard(1) if p.dim() == 3 else None)
    assert not [f for f in diagnose(fine).findings if f.code == "padded-shards"]
    (text,) = map(str, findings)
    assert set(all_ranks(text)) == {text}
    # 480 elements become 960 of 544
    assert "warning: padded-shards" in text and "carries 1.9 times its bytes" in text and "experts have too few" in text


# ---- where shards live ----


@contextmanager
def mesh_elsewhere() -> Iterator[None]:
    """A block in which every mesh is of another device than the shards."""
    # DTensor estimates transfers by the devices of a machine, which it asks of `torch.<device type>` (torch 2.15).
    here = SimpleNamespace(device_count=lambda: 2)
    with (
        patch.object(DeviceMesh, "device_type", property(lambda mesh: "meta")),
        patch.object(torch, "meta", here, create=True),
    ):
        yield


def hsdp() -> DeviceMesh:
    return init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "dp_shard"))


def stays_where_it_is(folder: Path) -> None:
    model: Any = build_meta_model(folder)
    shard_model(model, make_wrap_plan(model), mesh=hsdp())
    with mesh_elsewhere():
        allocate(model, device=torch.device("cpu"))
        assert {p.device.type for p in model.parameters()} == {"cpu"}
        assert {b.device.type for b in model.buffers()} == {"meta"}, "only shards are offloaded"
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = torch.empty_like(buffer, device="cpu")
        names = {name for name, _ in model.named_parameters()}
        initialize_missing(model, missing_keys=names, seed=3)
    alone = build_meta_model(folder)
    allocate(alone, device=torch.device("cpu"))
    initialize_missing(alone, missing_keys=names, seed=3)
    assert_same_model(model, alone)

    plain = plain_model("llama", folder)
    for assign in (False, True):
        with mesh_elsewhere():
            model.load_state_dict({k: v.clone() for k, v in plain.state_dict().items()}, assign=assign)
        assert_same_model(model, plain)
        parameter = model.lm_head.weight
        held = Held.of(parameter).memory.untyped_storage().nbytes()
        assert held <= parameter.nbytes // 2 + parameter[0].nbytes, "not a view of the whole tensor"
        torch.nn.init.zeros_(parameter)

    state = torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(1))
    whole = torch.nn.Parameter(torch.zeros_like(state))
    optimizer = torch.optim.Adagrad([whole])
    optimizer.state[whole]["sum"].copy_(state)
    with mesh_elsewhere():
        hand_over(optimizer, {whole: model.lm_head.weight})
    assert torch.equal(optimizer.state[model.lm_head.weight]["sum"].full_tensor(), state)


def pinned_once(folder: Path) -> None:
    """FSDP2 finds each shard in pinned memory of the length that it gathers from, and copies none."""
    made: list[torch.Tensor] = []

    def pinned_empty(shape: Any, dtype: torch.dtype) -> torch.Tensor:
        made.append(torch.empty(tuple(shape), dtype=dtype))
        return made[-1]

    def is_pinned(tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in {t.untyped_storage().data_ptr() for t in made}

    def new_zeros(tensor: torch.Tensor, *shape: Any) -> torch.Tensor:
        assert tensor.is_meta, "a shard is copied to be padded"
        return torch.zeros(*shape, dtype=tensor.dtype, device="meta")

    with (
        patched(pinned_empty=pinned_empty),
        patch.object(torch.Tensor, "is_pinned", is_pinned),
        patch.object(torch.Tensor, "pin_memory", lambda tensor: pytest.fail("a shard is copied into pinned memory")),
        patch.object(torch.Tensor, "new_zeros", new_zeros),
    ):
        model: Any = build_meta_model(folder)
        policy = CPUOffloadPolicy(pin_memory=True)
        for layer in model.model.layers:
            fully_shard(layer, offload_policy=policy)
        fully_shard(model, offload_policy=policy)
        load_weights(model, folder, progress=False)
        kept = {name: Held.of(p).memory.data_ptr() for name, p in model.named_parameters()}
        model._get_fsdp_state()._lazy_init()
        assert {name: Held.of(p).memory.data_ptr() for name, p in model.named_parameters()} == kept
    assert all(is_pinned(Held.of(p).memory) for p in model.parameters())
    assert len(made) == len(list(model.parameters())), "each shard once"
    assert sum(t.nbytes for t in made) == sum(-(-p.shape[0] // 2) * p.nbytes // p.shape[0] for p in model.parameters())
    assert_same_model(model, plain_model("llama", folder))


# ---- blocks that the user names ----


class Alpha(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.second(self.first(hidden).relu())


class Beta(Alpha):
    """The same under another name, so that nothing repeats."""


class Strange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.alpha, self.beta, self.head = nn.Embedding(64, 32), Alpha(), Beta(), nn.Linear(32, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.beta(self.alpha(self.table(ids))))


def blocks_of_a_stranger(folder: Path) -> None:
    torch.manual_seed(0)
    model, policy = Strange(), WrapPolicy(block_types=("Alpha", "Beta"))
    plan = make_wrap_plan(model, policy=policy)
    assert plan.blocks == ("alpha", "beta") and WrapPlan.from_json(plan.to_json()) == plan
    shard_model(model, plan, mesh=ParallelDims().build_mesh("cpu"))
    layers = {f"{block}.{layer}" for block in plan.blocks for layer in ("first", "second")}
    assert set(float8_layers(ModuleTree(model), Float8Policy())) == layers
    optimizer = Muon(model, lr=0.1)
    assert {name.removesuffix(".weight") for name in optimizer.matrices.matrices} == layers
    model(torch.arange(8)[None] + dist.get_rank()).sum().backward()
    optimizer.step()


def on_two(folder) -> None:
    with patch("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder.with_name("modules"))):
        run_cases([
            awkward_parameters_train_or_are_refused_by_name, code_of_the_user_is_saved_with_the_model,
            stays_where_it_is, pinned_once, blocks_of_a_stranger,
        ], folder)  # fmt: skip


def on_four(folder) -> None:
    run_cases(
        [half_of_the_ranks_can_shard_a_model, padding_of_other_peoples_sharding_is_found, load_train_and_save], folder
    )


@pytest.mark.parametrize(("ranks", "cases"), [(1, alone), (2, on_two), (3, inference_first), (4, on_four)])
def test_a_sharded_model_computes_what_the_plain_one_does(ranks, cases, tmp_path):
    run_ranks(cases, ranks, make_checkpoint("llama", tmp_path / "model"))
