"""Memory for many tensors: each has its own storage, and it lies in whole large pages."""

import io
import mmap
import resource
from pathlib import Path

import pytest
import torch

from hf_fsdp_tools.sharding import host_memory
from hf_fsdp_tools.sharding.host_memory import FaultIn, empty_on_host

WANTED = [((3, 5), torch.bfloat16), ((0, 7), torch.float32), ((), torch.int64), ((1000, 1000), torch.float32)]


@pytest.mark.parametrize("block_bytes", [1, 256 * 2**20])
def test_every_tensor_has_a_storage_of_its_own(monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    """Of exactly its size, so that saving one does not save its neighbours; and nothing overlaps."""
    monkeypatch.setattr(host_memory, "_BLOCK_BYTES", block_bytes)
    tensors = empty_on_host(WANTED * 2)
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


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no large pages to ask for")
@pytest.mark.parametrize("slow_page_s", [60.0, 0.0])
def test_pages_are_faulted_in_and_contents_stay(monkeypatch: pytest.MonkeyPatch, slow_page_s: float) -> None:
    """Whether large pages come quickly or (second case) each counts as slow, and small ones are taken."""
    monkeypatch.setattr(host_memory, "_SLOW_PAGE_S", slow_page_s)
    first, second = empty_on_host([((3000,), torch.int32), ((4 * 2**20,), torch.float32)])
    first.fill_(7)
    fault_in = FaultIn()
    for memory in (first, second, second[::2], torch.empty(0)):
        fault_in(memory)
    assert (first == 7).all() and not second.any()  # anonymous memory is zero
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    second.fill_(1.0)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 100  # of 4096 small pages
