import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint import filesystem, load, save

from hf_fsdp_tools import CheckpointError
from tests.api import ThreadedWriter, using_format


def test_files_are_written_at_a_time_and_any_error_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    values = {str(n): torch.arange(n, 100.0) for n in range(7)}
    save(values, storage_writer=ThreadedWriter(tmp_path / "whole"), no_dist=True)
    assert len(list((tmp_path / "whole").glob("*.distcp"))) == 3
    found = {name: torch.zeros_like(value) for name, value in values.items()}
    load(found, checkpoint_id=tmp_path / "whole", no_dist=True)
    assert all(torch.equal(found[name], value) for name, value in values.items())

    write = filesystem._write_item

    def fail(transforms, stream, data, item, *rest):
        if item.index.fqn == "5":
            raise OSError("No space left on device")
        return write(transforms, stream, data, item, *rest)

    monkeypatch.setattr(filesystem, "_write_item", fail)
    plugin = SimpleNamespace(state_dict_type=None, state_dict_config=None, optim_state_dict_config=None)
    said = r"failed on 1 rank\(s\) in '.*/full', where .* of .* are free. Check space and .*\n.*No space left"
    with pytest.raises(CheckpointError, match=said), using_format(plugin, None, tmp_path / "full"):
        save(values, storage_writer=ThreadedWriter(tmp_path / "full"), no_dist=True)
