"""Transfers between files and memory: exact bytes both ways, few calls, clear errors, bounded and available memory; the
road to an accelerator and copies from it, on a stand-in whose copies are late."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_fsdp_tools import CheckpointError
from hf_fsdp_tools.saving import copies
from hf_fsdp_tools.saving.copies import host_copies
from tests._late import POISON, LateSideStream, Machine
from tests._transfers import read_transfers
from tests.api import Reader, Transfer, Writer, available_bytes, row_major_strides, write_transfers

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
    file, content = tmp_path / "stored.bin", b"x" * odd
    transfers, expected = [], []
    for tensor, view, dtype, gaps in tensors:
        memory = torch.zeros([2 * n for n in view.shape] if gaps else view.shape, dtype=dtype)
        memory = memory[tuple(slice(0, n) for n in view.shape)]
        start = len(content) + view.storage_offset() * tensor.element_size()
        transfers.append(Transfer(file=file, start=start, dtype=tensor.dtype, strides=view.stride(), memory=memory))
        expected.append(view.to(dtype))
        content += raw(tensor)
    file.write_bytes(content)
    for is_zero in (False, True):
        read_transfers(transfers, staging_bytes=staging)
        for transfer, values in zip(transfers, expected, strict=True):
            assert torch.equal(transfer.memory, values * (not is_zero))
            transfer.memory.copy_(values * is_zero)
        write_transfers(transfers, staging_bytes=staging)
    assert file.read_bytes() == content, "what was zero for a while is as it was, and all around it"


def test_the_same_bytes_are_read_straight_into_memory_and_neighbours_in_one_call(tmp_path: Path) -> None:
    tensors = [torch.randn(100, 30) for _ in range(50)]
    file = tmp_path / "stored.bin"
    file.write_bytes(b"".join(raw(t) for t in tensors))
    memory = [torch.zeros(100, 30) for _ in tensors]
    transfers = [whole(file, t, m, i * 12000) for i, (t, m) in enumerate(zip(tensors, memory, strict=True))]
    stats = read_transfers(reversed(transfers), staging_bytes=MIB)
    assert all(torch.equal(t, m) for t, m in zip(tensors, memory, strict=True))
    assert (stats.num_bytes, stats.calls, stats.staging_bytes) == (600_000, 1, 0)


def test_short_reads_go_on_and_bytes_are_told_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, real = torch.randn(100), os.preadv
    file = tmp_path / "stored.bin"
    file.write_bytes(raw(tensor))

    def third(descriptor: int, buffers: list[memoryview], position: int) -> int:
        return real(descriptor, [buffers[0][: max(1, len(buffers[0]) // 3)]], position)

    monkeypatch.setattr(os, "preadv", third)
    first, second, arrived = torch.zeros(60), torch.zeros(40), []
    with Reader(staging_bytes=MIB, side=None, on_bytes=arrived.append) as reader:
        stats = reader.read([whole(file, first, first), whole(file, second, second, 240)])
    assert torch.equal(torch.cat([first, second]), tensor)
    assert stats.calls > 6 and sum(arrived) == 400


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 1000 * 1024),
        ({"memory.max": "900000", "memory.current": "800000", "memory.stat": "inactive_file 50000"}, 150_000),
        ({"memory.max": "max", "memory.current": "8", "memory.stat": "anon 1"}, 1000 * 1024),
    ],
)
def test_what_is_available_is_the_least_of_machine_and_container(tmp_path: Path, files: Any, expected: int) -> None:
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    with patch("psutil.virtual_memory", lambda: Mock(available=1000 * 1024)):
        assert available_bytes(tmp_path) == expected


def test_copies_are_written_in_the_order_of_the_file(tmp_path: Path) -> None:
    memory = torch.arange(48.0).reshape(6, 8)
    (file := tmp_path / "f").write_bytes(bytes(192))
    turned, expected = Transfer(file=file, start=0, dtype=memory.dtype, strides=(1, 6), memory=memory), raw(memory.t())
    copied = copies.copied_transfers([turned])
    memory.zero_()
    write_transfers(copied, staging_bytes=MIB)
    assert file.read_bytes() == expected


def test_errors_name_the_file_and_a_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = whole(tmp_path / "absent.bin", torch.zeros(1000), torch.zeros(1000))
    with pytest.raises(CheckpointError, match=r"Cannot open .*absent\.bin.*Check path"):
        read_transfers([part], staging_bytes=MIB)
    part.file.write_bytes(bytes(4000))
    monkeypatch.setattr(os, "preadv", Mock(side_effect=OSError(5, "Input/output error")))
    with pytest.raises(CheckpointError, match="Input/output error"):
        read_transfers([part], staging_bytes=MIB)


KIB, IN_FLIGHT, OWN = 2**10, 4, 1  # of devices 0 and 1


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

        monkeypatch.setattr(os, "preadv", preadv)
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
        assert machine.pinned_alive == machine.copies_under_way == 0
    rounded = [tensor.to(of_memory).to(of_file) for tensor in tensors]
    assert copy.read_bytes() == b"".join(t.view(-1).view(torch.uint8).numpy().tobytes() for t in rounded)


def test_what_was_queued_before_comes_first(tmp_path: Path) -> None:
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


def test_what_an_accelerator_holds_is_copied_when_the_call_returns() -> None:
    """On a stand-in whose copies are late: same dtype and another, any strides, 0-d, empty, and some on the host."""
    with Machine(seed=1) as machine, patch.object(copies, "_BUFFER_BYTES", 512):
        on_device = [
            machine.tensor(40, 30, dtype=torch.float32),
            machine.tensor(40, 30, dtype=torch.bfloat16).t(),
            machine.tensor(64, 30, dtype=torch.float32)[::2],
            machine.tensor(100, dtype=torch.int64),
            machine.tensor(1, dtype=torch.float32)[0],
            machine.tensor(0, 3, dtype=torch.float32),
        ]
        sources = [*on_device, torch.zeros(7, 5)]
        generator = torch.Generator().manual_seed(1)
        for tensor in sources:
            machine.raw(tensor).copy_(torch.randint(-99, 99, tensor.shape, generator=generator))
        dtypes = [torch.bfloat16 if tensor.is_floating_point() else tensor.dtype for tensor in sources]
        for wanted in (dtypes, [tensor.dtype for tensor in sources]):
            expected = [machine.raw(t).to(dtype).clone() for t, dtype in zip(sources, wanted, strict=True)]
            queued = machine.raw(on_device[0]).clone() + 1  # by the program, and not done yet
            machine.stream(1).add(partial(machine.raw(on_device[0]).copy_, queued), late_s=0.02)
            expected[0] = queued.to(wanted[0])
            machine.set_device(1)
            with patch.object(copies, "side_stream_for", lambda _: LateSideStream(machine, 1)):
                made = host_copies(list(zip(sources, wanted, strict=True)))
            for tensor in sources:
                machine.raw(tensor).fill_(1)  # the next step
            assert [copy.dtype for copy in made] == wanted and all(copy.is_contiguous() for copy in made)
            assert all(map(torch.equal, made, expected))
            assert set(machine.pinned_bytes) == {512} and machine.pinned_alive == machine.copies_under_way == 0
            for tensor, values in zip(sources, expected, strict=True):
                machine.raw(tensor).copy_(values)
        assert machine.named.count(0) == 0, "nothing was made on device 0"
