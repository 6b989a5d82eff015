"""Memory for many tensors: each has its own storage, and it lies in whole large pages."""

import io
import mmap
import sys
from pathlib import Path

import pytest
import torch

from hf_fsdp_tools import host_memory
from hf_fsdp_tools.checkpoint.reader import are_cached
from hf_fsdp_tools.host_memory import empty_on_host

WANTED = [((3, 5), torch.bfloat16), ((0, 7), torch.float32), ((), torch.int64), ((1000, 1000), torch.float32)]


@pytest.mark.parametrize("large_pages", [True, False])
@pytest.mark.parametrize("block_bytes", [1, 256 * 2**20])
def test_every_tensor_has_a_storage_of_its_own(
    monkeypatch: pytest.MonkeyPatch, large_pages: bool, block_bytes: int
) -> None:
    """Of exactly its size, so that saving one does not save its neighbours; and nothing overlaps."""
    monkeypatch.setattr(host_memory, "_BLOCK_BYTES", block_bytes)
    tensors = empty_on_host(WANTED * 2, large_pages=large_pages)
    assert [(tuple(t.shape), t.dtype) for t in tensors] == WANTED * 2
    for i, tensor in enumerate(tensors):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes and tensor.storage_offset() == 0
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(i)
    assert all((tensor == i).all() for i, tensor in enumerate(tensors))
    file = io.BytesIO()
    torch.save(tensors[0], file)
    assert len(file.getvalue()) < 4096


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no large pages to ask for")
def test_memory_is_asked_for_in_large_pages() -> None:
    tensor = empty_on_host([((3 * 2**20,), torch.float32)])[0]
    assert tensor.data_ptr() % 2**21 == 0
    lines = Path("/proc/self/smaps").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if tensor.data_ptr() in _addresses(line))
    flags = next(line for line in lines[start:] if line.startswith("VmFlags:"))
    assert "hg" in flags.split()


def _addresses(line: str) -> range:
    """Those of the mapping that a line of smaps begins; none for its other lines."""
    head = line.split()[0]
    return range(0) if head.endswith(":") else range(*(int(end, 16) for end in head.split("-")))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what is in the page cache")
def test_what_was_just_written_is_cached(tmp_path: Path) -> None:
    files = [tmp_path / name for name in "abc"]
    for file in files:
        file.write_bytes(bytes(100_000))
    assert are_cached(files)
    assert not are_cached([tmp_path / "absent"])
    assert not are_cached([])
