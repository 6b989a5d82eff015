"""How a checkpoint is cut into files."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hf_fsdp_tools import ConfigError, ParallelDims, RanksError, save_pretrained
from hf_fsdp_tools.saving.layout import plan_layout
from hf_fsdp_tools.steps import make_wrap_plan, shard_model
from tests._checkpoints import make_model
from tests._dist import fake_ranks


def model() -> nn.Module:
    parts = {name: nn.Linear(100, 10 if name != "large" else 100, bias=False) for name in ("a", "b", "large", "z")}
    return nn.ModuleDict(parts)


def test_what_is_no_size_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    for size in ("", "GB", "5 parsecs"):
        with pytest.raises(ConfigError, match=r"max_shard_size=.* is no size of a file: "):
            save_pretrained(model(), tmp_path / "saved", max_shard_size=size)
    assert not (tmp_path / "saved").exists()


def test_a_cast_is_of_floats_alone_and_shards_without_their_group_are_not_saved(tmp_path: Path) -> None:
    module = nn.BatchNorm1d(3)
    dtypes = {key: place.element for key, place in plan_layout(module, torch.bfloat16, "5GB").places.items()}
    assert dtypes.pop("num_batches_tracked") == torch.int64
    assert set(dtypes.values()) == {torch.bfloat16}
    fake_ranks(2)
    sharded = make_model("llama")
    shard_model(sharded, make_wrap_plan(sharded), mesh=ParallelDims().build_mesh("cpu"))
    dist.destroy_process_group()
    with pytest.raises(RanksError, match=r"sharded over 2 processes, whose process group has ended .* Save before"):
        save_pretrained(sharded, tmp_path)
    assert not any(tmp_path.iterdir())
