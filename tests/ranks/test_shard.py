"""A sharded model computes what the plain one does, and refuses what would hang or be wrong."""

import copy
import re
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.distributed.mesh import ParallelDims
from hf_fsdp_tools.errors import ConfigError, MeshError, WrapPlanError
from hf_fsdp_tools.planning.make_plan import make_wrap_plan
from hf_fsdp_tools.planning.policy import HybridPolicy
from hf_fsdp_tools.sharding import placement
from hf_fsdp_tools.sharding.describe import describe_sharding
from hf_fsdp_tools.sharding.shard import shard_model, sharding_of
from tests._checkpoints import full, make_model
from tests._dist import run_ranks
from tests._training import clip_loss, tiny_clip

KINDS = ("llama", "tied", "gpt2", "mixtral", "qwen2_moe")


def _batches(ranks: int) -> torch.Tensor:
    """One batch of token ids per rank, the same on every rank."""
    return torch.randint(3, 131, (ranks, 2, 9), generator=torch.Generator().manual_seed(1))


def _model(kind: str) -> nn.Module:
    model = make_model(kind)
    model.config._experts_implementation = "eager"  # the grouped matrix product refuses these awkward sizes
    return model


def _plain_gradients(kind: str, ranks: int) -> dict[str, torch.Tensor]:
    model = _model(kind)
    for batch in _batches(ranks):
        (model(input_ids=batch, labels=batch).loss / ranks).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _gradients_equal_the_plain_ones(kinds, checkpointing, replicate):
    mesh = ParallelDims(dp_replicate_size=replicate).build_mesh("cpu")
    counts = {}
    for kind in kinds:
        model = _model(kind)
        plan = make_wrap_plan(model)
        same = shard_model(model, plan, mesh=mesh, activation_checkpointing=checkpointing)
        assert same is model
        assert sum(isinstance(m, FSDPModule) for m in model.modules()) == sum(len(u.modules) for u in plan.units)
        model.train(checkpointing)  # transformers checkpoints in training mode only; these models have no dropout
        counts[kind] = _compare_gradients(model, kind)
    return counts


def _compare_gradients(model: nn.Module, kind: str) -> int:
    """How many gradients of a sharded model equal those of the plain one."""
    batch = _batches(dist.get_world_size())[dist.get_rank()]
    model(input_ids=batch, labels=batch).loss.backward()
    expected = _plain_gradients(kind, dist.get_world_size())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(full(parameter.grad), expected[name], rtol=1e-4, atol=1e-6, msg=f"{kind} {name}")
    return len(expected)


@pytest.mark.parametrize(("ranks", "checkpointing"), [(2, False), (3, True)])
def test_gradients_equal_the_plain_ones(ranks, checkpointing):
    kinds = KINDS if not checkpointing else tuple(kind for kind in KINDS if kind != "gpt2")  # gpt2 has dropout
    for counts in run_ranks(_gradients_equal_the_plain_ones, ranks, kinds, checkpointing, 1):
        assert all(count > 5 for count in counts.values())


def _inference_first(kinds, other_dims):
    for kind in kinds:
        model, plain = _model(kind), _model(kind)
        with patch.object(placement, "_MOST_PADDING_BYTES", 0) if other_dims else nullcontext():
            shard_model(model, make_wrap_plan(model), mesh=ParallelDims().build_mesh("cpu"))
        assert any(p.placements[0].dim for p in model.parameters()) == other_dims
        batch = _batches(dist.get_world_size())[dist.get_rank()]
        with torch.inference_mode():
            torch.testing.assert_close(model(input_ids=batch).logits, plain(input_ids=batch).logits)
        assert _compare_gradients(model, kind) > 5


def test_a_model_can_be_trained_after_it_ran_in_inference_mode():
    """FSDP2 alone stops in training; on one rank, and for dimensions other than 0, in inference mode itself."""
    for ranks, kinds in ((1, ("llama",)), (2, ("tied", "llama")), (3, ("mixtral",))):
        run_ranks(_inference_first, ranks, kinds, ranks == 3)


def test_hsdp_gradients_equal_the_plain_ones():
    run_ranks(_gradients_equal_the_plain_ones, 4, ("llama",), False, 2)


def _scalar_parameters_are_averaged(with_hook):
    plain = tiny_clip()
    for _ in range(2):  # two micro-batches: averaging must not be undone by accumulation
        for rank in range(2):
            (clip_loss(plain, rank) / 2).backward()
    model = tiny_clip()
    plan = make_wrap_plan(model)
    assert plan.replicated == ("logit_scale",)
    seen = []
    if with_hook:
        model.logit_scale.register_post_accumulate_grad_hook(seen.append)
    shard_model(model, plan, mesh=ParallelDims().build_mesh("cpu"))
    for _ in range(2):
        clip_loss(model, dist.get_rank()).backward()
    assert len(seen) == 2 * with_hook
    torch.testing.assert_close(model.logit_scale.grad, plain.logit_scale.grad)
    return float(model.logit_scale.grad)


@pytest.mark.parametrize("with_hook", [False, True])
def test_scalar_parameters_stay_whole_and_their_gradients_are_averaged(with_hook):
    """Also where a user's own hook is on the gradient."""
    first, second = run_ranks(_scalar_parameters_are_averaged, 2, with_hook)
    assert first == second != 0


def _ranks_with_different_plans_stop():
    model = make_model("llama")
    policy = HybridPolicy() if dist.get_rank() == 0 else HybridPolicy(group_tail=False)
    with pytest.raises(ConfigError, match=r"different arguments: plan.digest is .* on rank 1. Give the same") as caught:
        shard_model(model, make_wrap_plan(model, policy=policy), mesh=ParallelDims().build_mesh("cpu"))
    assert not isinstance(model, FSDPModule), "stopped before anything was sharded"
    return str(caught.value)


def test_ranks_with_different_plans_stop_with_the_same_message():
    first, second = run_ranks(_ranks_with_different_plans_stop, 2)
    assert first == second


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


def _awkward() -> None:
    torch.manual_seed(0)
    plain = Awkward()
    model = copy.deepcopy(plain)
    shard_model(model, make_wrap_plan(model, policy=HybridPolicy(min_unit_params=100, floor_params=0)))
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


def test_awkward_parameters_train_as_plain_ones_or_are_refused_by_name():
    run_ranks(_awkward, 2)


def _alone():
    model = make_model("llama")
    plan = make_wrap_plan(model)
    shard_model(model, plan, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    assert sharding_of(nn.Sequential(model)).plan is plan, "found below a wrapper too"
    batch = _batches(1)[0]
    model(input_ids=batch, labels=batch).loss.backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    with torch.no_grad():
        model(input_ids=batch)
    assert all(isinstance(p, DTensor) for p in model.parameters()), "sharded again after an evaluation"
    with pytest.raises(ConfigError, match=r"sharded already"):
        shard_model(model, plan)
    other = make_model("gpt2")
    with pytest.raises(WrapPlanError, match=r"does not fit GPT2LMHeadModel.*model\.layers"):
        shard_model(other, plan)
    assert sharding_of(other) is None
    with pytest.raises(MeshError, match=r"dp_replicate_size 2 .* 1 processes"):
        ParallelDims(dp_replicate_size=2).build_mesh("cpu")
    without_reduce_dtype = make_model("llama")
    shard_model(without_reduce_dtype, plan, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    usual = "bfloat16" if torch.__version__ < "2.15" else "in the dtype of the weights"
    assert f"reduction    {usual}" in describe_sharding(without_reduce_dtype)
    return describe_sharding(model)


def test_a_world_of_one_works_and_is_described():
    (text,) = run_ranks(_alone, 1)
    assert re.search(r"weights +float32, 183\.7 kB on this rank", text)
    assert re.search(r"computation +bfloat16", text) and re.search(r"reduction +float32", text)
    assert "LlamaDecoderLayer" in text


def test_degrees_that_make_no_sense_are_refused():
    with pytest.raises(MeshError, match=r"dp_shard_size is 0; it must be a whole number, 1 or more"):
        ParallelDims(dp_shard_size=0)
    assert ParallelDims(dp_replicate_size=2).resolve(8).dp_shard_size == 4
