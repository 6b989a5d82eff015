"""Resuming runs no code of the checkpoint, whoever wrote it."""

import io
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from hf_fsdp_tools import CheckpointError, from_pretrained, make_accelerator
from hf_fsdp_tools.loading.formats.dcp import METADATA, parse_dcp
from hf_fsdp_tools.saving.manifest import MANIFEST
from tests._checkpoints import make_checkpoint
from tests._dist import run_ranks

ROWS = [{"input_ids": row, "labels": row} for row in torch.arange(96).view(8, 12) % 9 + 3]


class Runs:
    """Unpickled, it writes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return Path.touch, (self.file,)


def of_metadata(folder: Path, marker: Path) -> None:
    (folder / METADATA).write_bytes(pickle.dumps(Runs(marker)))


def of_a_value(folder: Path, marker: Path) -> None:
    """A value that is no tensor lies elsewhere now, where unpickling it runs code."""
    metadata = pickle.loads((folder / METADATA).read_bytes())
    content = io.BytesIO()
    torch.save(Runs(marker), content)
    keys = [key for key, entry in metadata.state_dict_metadata.items() if isinstance(entry, BytesStorageMetadata)]
    index = next(index for index in metadata.storage_data if index.fqn == keys[0])
    metadata.storage_data[index] = _StorageInfo("more.distcp", 0, len(content.getvalue()))
    (folder / "more.distcp").write_bytes(content.getvalue())
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


def of_a_file_outside(folder: Path, marker: Path) -> None:
    of_a_value(folder, marker)
    metadata = pickle.loads((folder / METADATA).read_bytes())
    place = next(place for place in metadata.storage_data.values() if place.relative_path == "more.distcp")
    place.relative_path = f"../{folder.name}/more.distcp"
    (folder / METADATA).write_bytes(pickle.dumps(metadata))


def attacked(good: Path, name: str, attack: Any, marker: Path) -> Path:
    """A copy of a saved state, made by rank 0, with its optimizer replaced, and without the list of its files."""
    bad = good.with_name(name)
    if dist.get_rank() == 0:
        attack(shutil.copytree(good, bad) / "optimizer_0", marker)
        (bad / MANIFEST).unlink()
    dist.barrier()
    return bad


def states(source: Path, out: Path) -> None:
    """`load_state` of Accelerate's; the Trainer checks its checkpoints by the same function."""
    accelerator = make_accelerator(cpu=True)
    model = from_pretrained(source, accelerator=accelerator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    ids = torch.stack([row["input_ids"] for row in ROWS])
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    good = accelerator.save_state(out / "good")
    before = [parameter.detach().full_tensor().clone() for parameter in model.parameters()]
    for attack in (of_metadata, of_a_value, of_a_file_outside):
        bad = attacked(Path(good), f"bad-{attack.__name__}", attack, out / f"{attack.__name__}.ran")
        with pytest.raises(
            CheckpointError, match=r"nothing that DCP writes|could run code|expected a file of the folder"
        ):
            accelerator.load_state(bad)
        assert not list(out.glob("*.ran")), attack
        assert all(torch.equal(a, p.full_tensor()) for a, p in zip(before, model.parameters(), strict=True))
    accelerator.load_state(good)


def test_no_state_runs_code_when_it_is_resumed(tmp_path: Path) -> None:
    source = make_checkpoint("llama", tmp_path / "llama")
    run_ranks(states, 2, source, tmp_path)


def test_metadata_cannot_change_classes_of_the_process(tmp_path: Path) -> None:
    """A pickle's BUILD with a state of slots sets attributes on whatever it was given, classes too."""
    record = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    for name in (b"cpathlib\nPosixPath\n", record):
        (tmp_path / METADATA).write_bytes(b"\x80\x02" + name + b"(N}U\x03oddctorch\nSize\nstb.")
        with pytest.raises(CheckpointError, match="sets attributes of"):
            parse_dcp(tmp_path)
