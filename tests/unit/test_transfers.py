"""Transfers between files and memory: exact bytes both ways, few calls, and clear errors; staging buffers are bounded,
in turn, and never given out while somebody copies from them; the road to an accelerator, on a stand-in whose copies are
late."""

import gc
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from hf_fsdp_tools.loading.report import _resident
from tests._late import POISON, LateSideStream, Machine
from tests._transfers import read_transfers
from tests.api import (
    MAX_GAP_BYTES,
    MemoryWatch,
    Reader,
    Ring,
    Transfer,
    Writer,
    buffer_sizes,
    row_major_strides,
    write_transfers,
)

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


KIB, MIB = 2**10, 2**20
OWN = 1  # of devices 0 and 1
IN_FLIGHT = 4


class Copy:
    """Stands for an event of a stream: done once it was waited for."""

    def __init__(self, name: str, waited: list[str]) -> None:
        self.name, self.waited = name, waited

    def query(self) -> bool:
        return self.name in self.waited

    def synchronize(self) -> None:
        self.waited.append(self.name)


def test_a_buffer_comes_back_after_its_copy_and_counts_if_there_is_memory() -> None:
    waited: list[str] = []
    made: list[torch.Tensor] = []

    def make() -> torch.Tensor:
        made.append(torch.empty(4))
        return made[-1]

    ring = Ring(make, 2)
    given = []
    for name in "abcde":
        given.append(ring.take())
        ring.give_back(given[-1], Copy(name, waited))
    assert [id(b) for b in given] == [id(made[i % 2]) for i in range(5)] and len(made) == 2
    assert waited == ["a", "b", "c"]  # one copy runs while the other buffer is filled
    answers = iter([MemoryError("no memory"), torch.empty(4)])

    def make() -> torch.Tensor:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    ring = Ring(make, 1)
    with pytest.raises(MemoryError, match="no memory"):
        ring.take()
    assert ring.made == 0
    assert ring.take().shape == (4,)  # and not the error of an empty queue


@pytest.mark.parametrize("staging_bytes", [MIB, files.STAGING_BYTES_PINNED])
@pytest.mark.parametrize(("pinned", "in_flight"), [(False, 16), (True, 1), (True, 16)])
def test_buffers_are_as_many_as_threads_and_within_the_bound(staging_bytes: int, pinned: bool, in_flight: int) -> None:
    count, size = buffer_sizes(staging_bytes, in_flight, pinned=pinned)
    assert count * size <= staging_bytes and count >= in_flight and size >= 2 * KIB
    assert count > in_flight or not pinned, "what is copied from is not read into"
    assert size & (size - 1) == 0 or not pinned, "PyTorch would round it up beyond the bound"


@contextmanager
def devices(late_s: float = 1e-3) -> Iterator[tuple[Machine, LateSideStream]]:
    with Machine(late_s=late_s) as machine:
        machine.set_device(OWN)
        yield machine, LateSideStream(machine, OWN)


def stored(folder: Path, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Path, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for _ in range(count)]
    file = folder / f"stored-{count}-{shape}-{dtype}"
    file.write_bytes(b"".join(t.view(-1).view(torch.uint8).numpy().tobytes() for t in tensors))
    return file, tensors


def places(file: Path, tensors: list[torch.Tensor], make: Callable[[torch.Tensor], torch.Tensor]) -> list[Transfer]:
    """A transfer of each tensor to new memory, which holds the same number of its first columns."""
    begins = [sum(t.nbytes for t in tensors[:i]) for i in range(len(tensors))]
    return [
        Transfer(file=file, start=begin, dtype=t.dtype, strides=row_major_strides(t.shape), memory=make(t))
        for begin, t in zip(begins, tensors, strict=True)
    ]


def all_of_it(machine: Machine, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: machine.tensor(*tensor.shape, dtype=dtype)


def every_other_row(machine: Machine, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: machine.tensor(2 * tensor.shape[0], *tensor.shape[1:], dtype=dtype)[::2]


CASES: dict[str, Any] = {
    # what of it, tensors, shape, stored dtype, dtype in memory
    "large runs": (all_of_it, 12, (64, 300), torch.bfloat16, torch.bfloat16),
    "many small runs": (all_of_it, 400, (7, 5), torch.bfloat16, torch.bfloat16),
    "cast": (all_of_it, 12, (64, 300), torch.float32, torch.bfloat16),
    "gaps in memory": (every_other_row, 12, (64, 30), torch.bfloat16, torch.bfloat16),
}


@pytest.mark.parametrize("case", CASES)
def test_bytes_arrive_and_come_back_however_late(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads refuse buffers that a copy still reads, and poison them before they fill them."""
    make, count, shape, of_file, of_memory = CASES[case]
    file, tensors = stored(tmp_path, count, shape, of_file)
    copy, real = tmp_path / "copy", os.preadv
    copy.write_bytes(bytes(file.stat().st_size))
    with devices() as (machine, side):

        def preadv(descriptor: int, buffers: list[memoryview], position: int) -> int:
            for buffer in buffers:
                assert not machine.is_read(buffer), "a buffer is refilled while a copy reads it"
                buffer[:] = bytes([POISON]) * len(buffer)
            return real(descriptor, buffers, position)

        monkeypatch.setattr(files.os, "preadv", preadv)
        transfers = places(file, tensors, make(machine, of_memory))
        with Reader(staging_bytes=96 * KIB, side=side, in_flight=IN_FLIGHT) as reader:
            stats = reader.read(transfers)
        for transfer, tensor in zip(transfers, tensors, strict=True):
            assert torch.equal(transfer.memory, tensor.to(of_memory))
        assert 0 < stats.staging_bytes <= 96 * KIB and stats.num_bytes == file.stat().st_size
        again = [
            Transfer(file=copy, start=t.start, dtype=t.dtype, strides=t.strides, memory=t.memory) for t in transfers
        ]
        with Writer(staging_bytes=96 * KIB, side=side, in_flight=IN_FLIGHT) as writer:
            writer.begin(again)()
        assert set(machine.named) == {OWN}, "a call on another device makes a context there"
    rounded = [tensor.to(of_memory).to(of_file) for tensor in tensors]
    assert copy.read_bytes() == b"".join(t.view(-1).view(torch.uint8).numpy().tobytes() for t in rounded)


def test_columns_are_cast_by_the_device_from_buffers_that_hold_the_gaps_too(tmp_path: Path) -> None:
    file, (tensor,) = stored(tmp_path, 1, (64, 3000), torch.float32)
    with devices() as (machine, side):
        memory = machine.tensor(64, 1000, dtype=torch.bfloat16)
        transfer = Transfer(file=file, start=4000, dtype=torch.float32, strides=(3000, 1), memory=memory)
        for read_ahead, calls in ((True, 2), (False, 64)):
            memory.fill_(0)
            with Reader(staging_bytes=4 * MIB, side=side, in_flight=1, read_ahead=read_ahead) as reader:
                stats = reader.read([transfer])
            assert torch.equal(memory, tensor[:, 1000:2000].bfloat16())
            assert stats.calls <= calls, "gaps of 8 kB are read through where the page cache has them anyway"


def test_few_large_runs_are_copied_straight_and_many_small_ones_by_one_copy_and_one_kernel(tmp_path: Path) -> None:
    large, few = stored(tmp_path, 3, (64, 256), torch.bfloat16)
    small, many = stored(tmp_path, 200, (16, 8), torch.bfloat16)
    with devices() as (machine, side), Reader(staging_bytes=2 * MIB, side=side, in_flight=1) as reader:
        reader.read(places(large, few, all_of_it(machine, torch.bfloat16)))
        assert machine.done == ["copy"] * 3
        machine.done.clear()
        stats = reader.read(places(small, many, all_of_it(machine, torch.bfloat16)))
        assert machine.done == ["copy", "copy_each"] and stats.calls == 1


def test_what_was_queued_before_comes_first_and_host_memory_does_not_travel(tmp_path: Path) -> None:
    """The memory of a shard may be in use: here the program still writes to it."""
    file, tensors = stored(tmp_path, 4, (64, 300), torch.bfloat16)
    with devices() as (machine, side), Reader(staging_bytes=MIB, side=side, in_flight=IN_FLIGHT) as reader:
        for _ in range(2):
            transfers = places(file, tensors, all_of_it(machine, torch.bfloat16))
            for transfer in transfers:
                memory = machine.raw(transfer.memory)
                machine.stream(OWN).add(memory.zero_, late_s=0.02)
            reader.read(transfers)
            machine.stream(OWN).mark().synchronize()
            assert all(torch.equal(t.memory, tensor) for t, tensor in zip(transfers, tensors, strict=True))
    file, tensors = stored(tmp_path, 20, (64, 300), torch.float32)
    with devices() as (machine, side), Reader(staging_bytes=MIB, side=side, in_flight=IN_FLIGHT) as reader:
        transfers = places(file, tensors, lambda tensor: torch.empty(tensor.shape, dtype=torch.bfloat16))
        transfers[::5] = places(file, tensors, all_of_it(machine, torch.bfloat16))[::5]
        reader.read(transfers)
        assert all(torch.equal(t.memory, tensor.bfloat16()) for t, tensor in zip(transfers, tensors, strict=True))
        assert machine.done.count("copy") == machine.done.count("copy_each") <= 4


def test_one_set_of_threads_and_buffers_serves_a_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, tensors = stored(tmp_path, 12, (64, 300), torch.bfloat16)
    threads, real, opened = set(), os.preadv, []

    def preadv(*args: Any) -> int:
        threads.add(threading.get_ident())
        return real(*args)

    open_file = os.open
    monkeypatch.setattr(files.os, "preadv", preadv)
    monkeypatch.setattr(files.os, "open", lambda *args: opened.append(args[0]) or open_file(*args))
    with devices() as (machine, side):
        with Reader(staging_bytes=96 * KIB, side=side, in_flight=IN_FLIGHT) as reader:
            for _ in range(10):
                transfers = places(file, tensors, all_of_it(machine, torch.bfloat16))
                assert reader.read(transfers).staging_bytes <= 96 * KIB
        assert len(threads) <= IN_FLIGHT and opened == [file]
        assert len(machine.pinned_bytes) <= buffer_sizes(96 * KIB, IN_FLIGHT, pinned=True)[0]
        assert sum(machine.pinned_bytes) <= 96 * KIB and machine.pinned_alive == 0


@pytest.mark.parametrize("fails", [False, True])
def test_everything_dies_without_the_collector(fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor memory does not make Python's collector run, so pinned memory in a cycle would stay for long."""
    file, tensors = stored(tmp_path, 12, (64, 300), torch.bfloat16)
    with devices() as (machine, side):
        transfers = places(file, tensors, all_of_it(machine, torch.bfloat16))
        if fails:
            with open(file, "r+b") as stream:
                stream.truncate(file.stat().st_size // 2)
        gc.collect()
        gc.disable()
        try:
            reader = Reader(staging_bytes=96 * KIB, side=side, in_flight=IN_FLIGHT)
            with reader:
                if fails:
                    with pytest.raises(CheckpointError, match="shrank"):
                        reader.read(transfers)
                else:
                    reader.read(transfers)
            assert machine.pinned_bytes and machine.pinned_alive == 0
            known = weakref.ref(reader), weakref.ref(reader._staging)
            del reader
            assert [each() for each in known] == [None, None]
        finally:
            gc.enable()


def test_copies_are_waited_for_when_scattering_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory, pinned or of shards, must not be freed under a copy."""
    file, tensors = stored(tmp_path, 8, (64, 300), torch.float32)

    class Failing(LateSideStream):
        def copy_each(self, to: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
            super().copy_each(to[:1], sources[:1])
            raise RuntimeError("the kernel is not there")

    with devices(late_s=0.02) as (machine, _):
        side = Failing(machine, OWN)
        transfers = places(file, tensors, all_of_it(machine, torch.bfloat16))
        reader = Reader(staging_bytes=96 * KIB, side=side, in_flight=IN_FLIGHT)
        with reader, pytest.raises(RuntimeError, match="the kernel is not there"):
            reader.begin(transfers)()
        assert machine.copies_under_way == 0 and "copy" in machine.done
        # nor where nobody waits for what was begun
        with Reader(staging_bytes=96 * KIB, side=side, in_flight=IN_FLIGHT) as reader:
            reader.begin(transfers)
        assert machine.copies_under_way == 0
