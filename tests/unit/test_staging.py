"""Staging buffers: bounded, in turn, and never given out while somebody copies from them; the road to an accelerator,
on a stand-in whose copies are late."""

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_fsdp_tools import CheckpointError
from hf_fsdp_tools.loading.io import files
from hf_fsdp_tools.loading.io.files import Writer
from hf_fsdp_tools.loading.io.staging import Ring, buffer_sizes
from tests._late import POISON, LateSideStream, Machine
from tests.api import Reader, Transfer, row_major_strides

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


def whole(machine: Machine, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: machine.tensor(*tensor.shape, dtype=dtype)


def every_other_row(machine: Machine, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: machine.tensor(2 * tensor.shape[0], *tensor.shape[1:], dtype=dtype)[::2]


CASES: dict[str, Any] = {
    # what of it, tensors, shape, stored dtype, dtype in memory
    "large runs": (whole, 12, (64, 300), torch.bfloat16, torch.bfloat16),
    "many small runs": (whole, 400, (7, 5), torch.bfloat16, torch.bfloat16),
    "cast": (whole, 12, (64, 300), torch.float32, torch.bfloat16),
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
        reader.read(places(large, few, whole(machine, torch.bfloat16)))
        assert machine.done == ["copy"] * 3
        machine.done.clear()
        stats = reader.read(places(small, many, whole(machine, torch.bfloat16)))
        assert machine.done == ["copy", "copy_each"] and stats.calls == 1


def test_what_was_queued_before_comes_first_and_host_memory_does_not_travel(tmp_path: Path) -> None:
    """The memory of a shard may be in use: here the program still writes to it."""
    file, tensors = stored(tmp_path, 4, (64, 300), torch.bfloat16)
    with devices() as (machine, side), Reader(staging_bytes=MIB, side=side, in_flight=IN_FLIGHT) as reader:
        for _ in range(2):
            transfers = places(file, tensors, whole(machine, torch.bfloat16))
            for transfer in transfers:
                memory = machine.raw(transfer.memory)
                machine.stream(OWN).add(memory.zero_, late_s=0.02)
            reader.read(transfers)
            machine.stream(OWN).mark().synchronize()
            assert all(torch.equal(t.memory, tensor) for t, tensor in zip(transfers, tensors, strict=True))
    file, tensors = stored(tmp_path, 20, (64, 300), torch.float32)
    with devices() as (machine, side), Reader(staging_bytes=MIB, side=side, in_flight=IN_FLIGHT) as reader:
        transfers = places(file, tensors, lambda tensor: torch.empty(tensor.shape, dtype=torch.bfloat16))
        transfers[::5] = places(file, tensors, whole(machine, torch.bfloat16))[::5]
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
                transfers = places(file, tensors, whole(machine, torch.bfloat16))
                assert reader.read(transfers).staging_bytes <= 96 * KIB
        assert len(threads) <= IN_FLIGHT and opened == [file]
        assert len(machine.pinned_bytes) <= buffer_sizes(96 * KIB, IN_FLIGHT, pinned=True)[0]
        assert sum(machine.pinned_bytes) <= 96 * KIB and machine.pinned_alive == 0


@pytest.mark.parametrize("fails", [False, True])
def test_everything_dies_without_the_collector(fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor memory does not make Python's collector run, so pinned memory in a cycle would stay for long."""
    file, tensors = stored(tmp_path, 12, (64, 300), torch.bfloat16)
    with devices() as (machine, side):
        transfers = places(file, tensors, whole(machine, torch.bfloat16))
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
        transfers = places(file, tensors, whole(machine, torch.bfloat16))
        reader = Reader(staging_bytes=96 * KIB, side=side, in_flight=IN_FLIGHT)
        with reader, pytest.raises(RuntimeError, match="the kernel is not there"):
            reader.begin(transfers)()
        assert machine.copies_under_way == 0 and "copy" in machine.done
        # nor where nobody waits for what was begun
        with Reader(staging_bytes=96 * KIB, side=side, in_flight=IN_FLIGHT) as reader:
            reader.begin(transfers)
        assert machine.copies_under_way == 0
