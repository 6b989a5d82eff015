"""Other formats than the hub's on real ranks: what is loaded equals what was saved, and a rank reads its own share."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModel, AutoModelForSequenceClassification

from hf_fsdp_tools import CheckpointError, from_pretrained
from hf_fsdp_tools.steps import load_weights
from tests._checkpoints import assert_same_model, full, loaded, pickled_copy, plain_model, sharded_meta_model
from tests._dist import run_cases, run_ranks
from tests.ranks.test_load import last_even_dim

KINDS = ("deepseek_v3",)
MORE_KINDS = ("tied", "mixtral")


def saved_by_pickle(folders: dict[str, Path], root: Path) -> None:
    """In files, of which one is transposed: its column slices are short runs, and gaps between them are read
    through."""
    ratios = []
    for name in LEGACY:
        folder = root / "legacy" / name
        kind = name.split()[0]
        model = sharded_meta_model(kind, folder)
        report = load_weights(model, folder, allow_pickle=True, dtype=torch.float32)
        assert_same_model(model, plain_model(kind, folders[kind]), name)
        assert not report.missing_keys and not report.unexpected_keys
        ratios.append(report.read_ratio)
    assert max(ratios[:-1]) <= 1.01 and ratios[-1] < 2.2
    with pytest.raises(CheckpointError, match="allow_pickle=True"):
        from_pretrained(folder)
    model = from_pretrained(folder, allow_pickle=True)
    assert_same_model(model, plain_model("llama", folders["llama"]), "from_pretrained")


LEGACY: dict[str, dict[str, Any]] = {
    "llama": {"files": 3}, "mixtral": {"files": 3}, "llama transposed": {"files": 1, "transpose": True},
}  # fmt: skip


def save_all(kinds: tuple[str, ...], folders: dict[str, Path], root: Path) -> None:
    for kind in kinds:
        model = loaded(kind, folders[kind])
        optimizer = {f"state.{key}": {"exp_avg": full(t) * 2} for key, t in model.state_dict().items()}
        job = {"app": {"model": model.state_dict(), "optim": optimizer}, "step": 3}
        dcp.save(job, checkpoint_id=root / "job" / kind)
    mesh = init_device_mesh("cpu", (3,))
    model = loaded("mixtral", folders["mixtral"], mesh=mesh, shard_placement_fn=last_even_dim)
    dcp.save(model.state_dict(), checkpoint_id=root / "columns")
    dcp.save(loaded("llama", folders["llama"]).state_dict(), checkpoint_id=root / "plain")


def saved_by_dcp(folders: dict[str, Path], root: Path) -> list[float]:
    ratios = []
    for kind, source in [("llama", root / "plain"), *((job.name, job) for job in (root / "job").iterdir())]:
        model = sharded_meta_model(kind, folders[kind])
        report = load_weights(model, source)
        assert_same_model(model, plain_model(kind, folders[kind]), str(source))
        assert not report.missing_keys and not report.unexpected_keys, str(report)
        ratios.append(report.read_ratio)
    return ratios


def saved_in_columns(folders: dict[str, Path], root: Path) -> None:
    model = sharded_meta_model("mixtral", folders["mixtral"], dtype=torch.bfloat16, shard_placement_fn=last_even_dim)
    report = load_weights(model, root / "columns", dtype=torch.float32)
    assert_same_model(model, plain_model("mixtral", folders["mixtral"]), "columns")
    assert report.read_ratio < 1.5, "half the columns of such tiny chunks: the gaps are shorter than a page"


def into_the_base_model_and_another_head(folders: dict[str, Path], root: Path) -> None:
    """The prefix of the base model is found, and what has no place is told."""
    given = {"config": folders["llama"], "output_loading_info": True}
    base, report = from_pretrained(root / "plain", auto_class=AutoModel, **given)
    assert report.unexpected_keys == ("lm_head.weight",) and not report.missing_keys
    assert torch.equal(full(base.norm.weight), plain_model("llama", folders["llama"]).model.norm.weight)
    headed, report = from_pretrained(
        root / "plain", auto_class=AutoModelForSequenceClassification, num_labels=5, **given
    )
    assert report.missing_keys == report.initialized_keys == ("score.weight",)
    assert full(headed.score.weight).std() > 0


WAYS = (saved_by_dcp, saved_in_columns, into_the_base_model_and_another_head, saved_by_pickle)


@pytest.mark.parametrize(
    ("kinds", "ways"), [(KINDS, WAYS), pytest.param(MORE_KINDS, WAYS[:1], marks=pytest.mark.nightly)]
)
def test_folders_of_every_kind_at_another_number_of_ranks(folders, tmp_path: Path, kinds, ways) -> None:
    for name, options in LEGACY.items():
        pickled_copy(folders[name.split()[0]], tmp_path / "legacy" / name, **options)
    run_ranks(save_all, 3, kinds, folders, tmp_path)
    for results in run_ranks(run_cases, 2, ways, folders, tmp_path):
        ratios = [ratio for some in results.values() for ratio in some or ()]
        assert len(ratios) == 1 + len(kinds) and max(ratios) <= 1.01, ratios
