"""Which dimension of a parameter is split: the padding that FSDP2 would store and send decides."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hf_fsdp_tools import ConfigError
from hf_fsdp_tools.sharding.placement import (
    check_partial_resharding,
    padded_ratio,
    split_dim,
)
from hf_fsdp_tools.steps import WrapPlan
from tests.api import ModuleTree, WrapUnit


@pytest.mark.parametrize(
    ("shape", "ranks", "dim"),
    [
        ((8, 28672, 4096), 8, 0),  # Mixtral's experts: one for each rank
        ((8, 28672, 4096), 64, 1),
        ((8, 28672, 4096), 6, 0),  # padded by a half, but 6 divides neither of the others
        ((128, 2880, 2880), 96, 1),  # two experts for each of 64 ranks and none for the rest
        ((60, 2816, 2048), 64, 0),  # four ranks without an expert cost less than another copy
        ((1, 2**20), 8, 1),  # a gate of one row
        ((2,), 8, 0),  # nothing else to split
        ((), 8, 0),
        ((256, 7168, 2048), 512, 1),  # DeepSeek-V3's down projections: runs of 14 rows, 57 KB
        ((256, 7168, 2048), 2048, 0),  # a column for each rank would be read by 1.8 million requests of 2 bytes
        ((1024, 16384), 4096, 0),  # 405B's k_proj: 1,024 runs of 8 bytes
    ],
)
def test_dim(shape, ranks, dim):
    assert split_dim(shape, math.prod(shape) * 2, ranks) == dim


@given(st.lists(st.integers(0, 300), max_size=4), st.integers(1, 130))
def test_other_dimensions_are_split_evenly_and_only_where_rows_would_be_padded(shape, ranks):
    dim = split_dim(shape, math.prod(shape) * 2**22, ranks)
    if dim:
        assert shape[dim] % ranks == 0 < shape[dim]
        assert padded_ratio(shape[0], ranks) > 1.25
    elif len(shape) > 1 and all(shape) and padded_ratio(shape[0], ranks) > 1.25:
        assert not any(size % ranks == 0 for size in shape[1:])


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(8, 640, 128, device="meta"))


@pytest.mark.parametrize("reshard", [True, False, None, 8])
def test_only_rows_are_resharded_over_fewer_ranks(reshard):
    model = nn.Sequential(nn.Linear(640, 640, device="meta"), nn.Sequential(Experts(), nn.Linear(8, 8, device="meta")))
    tree = ModuleTree(model)
    rest = {"num_params": 1, "num_bytes": 4, "reason": ""}
    inner = WrapUnit(modules=("1.0",), reshard_after_forward=reshard, **rest)
    others = [WrapUnit(modules=(name,), reshard_after_forward=8, **rest) for name in ("1", "0", "")]
    plan = WrapPlan(units=(inner, *others), replicated=(), model_class="Sequential", num_params=1)
    check_partial_resharding(tree, plan, 8)
    if reshard != 8:
        check_partial_resharding(tree, plan, 16)
        return
    said = (
        r"Unit '1\.0' has reshard_after_forward=8, and '1\.0\.down' of shape \(8, 640, 128\) is split along dimension 1"
    )
    with pytest.raises(ConfigError, match=rf"{said}, having too few rows for 16 ranks.*Use True or False"):
        check_partial_resharding(tree, plan, 16)
    kept = WrapPlan(units=plan.units, replicated=("1.0.down",), model_class="Sequential", num_params=1)
    check_partial_resharding(tree, kept, 16)
