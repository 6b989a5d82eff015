"""Transfers between files and memory: exact bytes both ways, few calls, and clear errors."""

import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_fsdp_tools import CheckpointError
from hf_fsdp_tools.loading.io import durable, files
from hf_fsdp_tools.loading.io.files import MAX_GAP_BYTES
from hf_fsdp_tools.loading.report import _resident
from tests._transfers import read_transfers
from tests.api import MemoryWatch, Reader, Transfer, row_major_strides, write_transfers

MIB = 2**20


def whole(file: Path, tensor: torch.Tensor, memory: torch.Tensor, offset: int = 0) -> Transfer:
    return Transfer(file=file, start=offset, dtype=tensor.dtype, strides=row_major_strides(tensor.shape), memory=memory)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@st.composite
def cases(draw: Callable[..., Any]) -> list[tuple[torch.Tensor, torch.Tensor, torch.dtype, bool]]:
    """(stored tensor, some strided view of it, dtype in memory, whether memory has gaps) of a few tensors."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(1, 9), max_size=3))
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8]))
        tensor = (torch.arange(math.prod(shape)).reshape(shape) % 251).to(dtype)
        view = tensor
        for _ in range(draw(st.integers(0, 3)) if shape else 0):
            dim = draw(st.integers(0, view.dim() - 1))
            start = draw(st.integers(0, view.shape[dim] - 1))
            step = draw(st.sampled_from([1, 1, 2]))
            view = view[(slice(None),) * dim + (slice(start, None, step),)]
            view = view.permute(draw(st.permutations(range(view.dim()))))
        wider = draw(st.sampled_from([torch.float32, torch.bfloat16])) if dtype.is_floating_point else dtype
        found.append((tensor, view, draw(st.sampled_from([dtype, wider])), draw(st.booleans())))
    return found


@settings(max_examples=120)
@given(tensors=cases(), odd=st.integers(0, 7), staging=st.sampled_from([1024, MIB]))
def test_any_view_travels_both_ways(tmp_path: Path, tensors: list[Any], odd: int, staging: int) -> None:
    """Unaligned data, casts, strides on both sides, buffers smaller than a tensor; writing touches nothing else."""
    file, copy = tmp_path / "stored.bin", tmp_path / "copy.bin"
    content = b"x" * odd
    transfers, expected, begins = [], [], []
    for tensor, view, dtype, gaps in tensors:
        memory = torch.zeros([2 * n for n in view.shape] if gaps else view.shape, dtype=dtype)
        memory = memory[tuple(slice(0, n) for n in view.shape)]
        start = len(content) + view.storage_offset() * tensor.element_size()
        begins.append(len(content))
        transfers.append(Transfer(file=file, start=start, dtype=tensor.dtype, strides=view.stride(), memory=memory))
        expected.append(view.to(dtype))
        content += raw(tensor)
    file.write_bytes(content)
    read_transfers(transfers, staging_bytes=staging)
    for transfer, values in zip(transfers, expected, strict=True):
        assert torch.equal(transfer.memory, values)

    copy.write_bytes(b"\xaa" * len(content))
    write_transfers([replace(t, file=copy) for t in transfers], staging_bytes=staging)
    reference = torch.full((len(content),), 0xAA, dtype=torch.uint8)
    for transfer, values, begin in zip(transfers, expected, begins, strict=True):
        size = max(t.numel() for t, *_ in tensors) * 8  # aligned scratch, then only this tensor's own bytes
        tensor = next(t for (t, v, *_), e in zip(tensors, expected, strict=True) if e is values)
        span = slice(begin, begin + tensor.numel() * tensor.element_size())
        scratch = torch.zeros(size, dtype=torch.uint8)[: span.stop - span.start]
        scratch.copy_(reference[span])
        typed = scratch.view(tensor.dtype)
        first = (transfer.start - begin) // tensor.element_size()
        typed.as_strided(values.shape, transfer.strides, first).copy_(values)
        reference[span] = scratch
    assert copy.read_bytes() == reference.numpy().tobytes()


def test_the_same_bytes_are_read_straight_into_memory_and_neighbours_in_one_call(tmp_path: Path) -> None:
    tensors = [torch.randn(100, 30) for _ in range(50)]
    file = tmp_path / "stored.bin"
    file.write_bytes(b"".join(raw(t) for t in tensors))
    memory = [torch.zeros(100, 30) for _ in tensors]
    transfers = [whole(file, t, m, i * 12000) for i, (t, m) in enumerate(zip(tensors, memory, strict=True))]
    stats = read_transfers(reversed(transfers), staging_bytes=MIB)
    assert all(torch.equal(t, m) for t, m in zip(tensors, memory, strict=True))
    assert (stats.num_bytes, stats.calls, stats.staging_bytes) == (600_000, 1, 0)


@pytest.mark.parametrize(("columns", "calls", "num_bytes"), [(4096, 256, 2 * 256 * 4096), (8192 - 64, 4, None)])
def test_columns_are_read_without_waste_or_a_call_per_row(
    tmp_path: Path, columns: int, calls: int, num_bytes: Any
) -> None:
    """Large gaps are skipped, small ones read through."""
    tensor = torch.randn(256, 8192).to(torch.bfloat16)
    file = tmp_path / "stored.bin"
    file.write_bytes(raw(tensor))
    memory = torch.zeros(256, columns, dtype=torch.bfloat16)
    transfer = Transfer(file=file, start=0, dtype=tensor.dtype, strides=(8192, 1), memory=memory)
    stats = read_transfers([transfer], staging_bytes=64 * MIB)
    assert torch.equal(memory, tensor[:, :columns])
    assert stats.calls <= calls
    assert stats.num_bytes <= (num_bytes or memory.nbytes + 256 * MAX_GAP_BYTES)


def test_large_requests_may_be_short_and_are_begun_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with small ones, which the system joins; and a system without such a call is no error."""
    begun: list[tuple[int, int]] = []
    monkeypatch.setattr(files, "begin_sync", lambda descriptor, *part: begun.append(part))
    file, large, small = tmp_path / "stored.bin", torch.ones(3 * MIB), torch.ones(4)
    file.write_bytes(bytes(large.nbytes + 16 + small.nbytes))
    write_transfers([whole(file, large, large), whole(file, small, small, large.nbytes + 16)], staging_bytes=MIB)
    assert sorted(begun) == [(0, 8 * MIB), (8 * MIB, 4 * MIB)]
    with open(file, "r+b") as stream:
        durable.begin_sync(stream.fileno(), 0, 8 * MIB)
        monkeypatch.setattr(durable, "_BEGIN", None)
        durable.begin_sync(stream.fileno(), 0, 8 * MIB)
    assert durable._BEGIN is None and file.read_bytes()[: large.nbytes] == raw(large)
    monkeypatch.undo()
    monkeypatch.setattr(files, "_REQUEST_BYTES", 1024)
    tensor = torch.randn(100, 30)
    file = tmp_path / "stored.bin"
    file.write_bytes(raw(tensor))
    memory, arrived = torch.zeros(100, 30), []
    with Reader(staging_bytes=MIB, side=None, on_bytes=arrived.append) as reader:
        stats = reader.read([whole(file, tensor, memory)])
    assert torch.equal(tensor, memory)
    assert stats.calls == 12 and sum(arrived) == 12000 and max(arrived) == 1024
    tensor = torch.randn(100)
    file = tmp_path / "stored.bin"
    file.write_bytes(raw(tensor))
    real = os.preadv

    def third(descriptor: int, buffers: list[memoryview], position: int) -> int:
        return real(descriptor, [buffers[0][: max(1, len(buffers[0]) // 3)]], position)

    monkeypatch.setattr(files.os, "preadv", third)
    first, second = torch.zeros(60), torch.zeros(40)
    parts = [whole(file, first, first), whole(file, second, second, 240)]
    stats = read_transfers(parts, staging_bytes=MIB)
    assert torch.equal(torch.cat([first, second]), tensor)
    assert stats.calls > 6


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="this system takes no advice about reading")
def test_read_ahead_is_off_so_that_neighbours_stay_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advice: list[tuple[int, int, int]] = []
    monkeypatch.setattr(files.os, "posix_fadvise", lambda descriptor, *rest: advice.append(rest))
    file = tmp_path / "stored.bin"
    file.write_bytes(raw(torch.ones(4)))
    read_transfers([whole(file, torch.ones(4), torch.zeros(4))], staging_bytes=MIB)
    write_transfers([whole(file, torch.ones(4), torch.ones(4))], staging_bytes=MIB)
    with Reader(staging_bytes=MIB, side=None, read_ahead=True) as reader:
        reader.read([whole(file, torch.ones(4), torch.zeros(4))])
    assert advice == [(0, 0, os.POSIX_FADV_RANDOM)]


def test_errors_name_the_file_and_a_cure_and_end_the_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"Cannot open .*absent\.bin.*Check path"):
        read_transfers([whole(tmp_path / "absent.bin", torch.zeros(4), torch.zeros(4))], staging_bytes=MIB)
    file = tmp_path / "full.bin"
    file.write_bytes(bytes(4000))
    monkeypatch.setattr(files, "_REQUEST_BYTES", 4)
    broken = Mock(side_effect=OSError(5, "Input/output error"))
    monkeypatch.setattr(files.os, "preadv", broken)
    reader = Reader(staging_bytes=MIB, side=None, in_flight=4)
    with reader, pytest.raises(CheckpointError, match="Input/output error"):
        reader.read([whole(file, torch.zeros(1000), torch.zeros(1000))])
    assert broken.call_count <= 4
    monkeypatch.setattr(files.os, "pwritev", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(CheckpointError, match=r"Cannot write .*full\.bin', where .* are free: .*No space.*and space"):
        write_transfers([whole(file, torch.zeros(4), torch.zeros(4))], staging_bytes=MIB)


def test_memory_watch_reads_the_resident_size_and_takes_the_mark_only_where_it_rose(tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tpython\nVmPeak:\t  9000 kB\nVmHWM:\t  5000 kB\nVmRSS:\t  4000 kB\nRssAnon:\t  1 kB\n")
    assert _resident(status) == (4000 * 1024, 5000 * 1024)
    assert _resident(tmp_path / "absent") == (0, 0)
    if sys.platform == "linux":
        assert all(size > MIB for size in _resident())
    # Not that of an earlier peak; and nothing where there is less than at the start.
    for later, above in (((70, 90), 80), ((70, 50), 60), ((5, 50), 0)):
        with patch("hf_fsdp_tools.loading.report._resident", side_effect=[(10, 50), later]):
            assert MemoryWatch().above(0) == above
