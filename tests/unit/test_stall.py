"""A read that does not come back is named, and given up after a while; what it does later spoils nothing."""

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hf_fsdp_tools.checkpoint.io import reader
from hf_fsdp_tools.checkpoint.io import watch as stall
from hf_fsdp_tools.checkpoint.io.reader import read_transfers
from hf_fsdp_tools.checkpoint.io.transfer import Transfer
from hf_fsdp_tools.checkpoint.io.watch import (
    ReadThreads,
    close_unless_read,
    patience,
    patiently,
    reading,
)
from hf_fsdp_tools.checkpoint.regions import View
from hf_fsdp_tools.errors import CheckpointError

FILE = Path("weights")


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """Set at the end, so that no thread stays."""
    event = threading.Event()
    yield event
    event.set()
    deadline = time.monotonic() + 10
    while stall._under_way and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not stall._under_way


def read_until(event: threading.Event, position: int = 0) -> str:
    with reading(FILE, position):
        event.wait()
    return "read"


def test_results_come_in_order_and_errors_as_they_are() -> None:
    with ReadThreads(3) as threads:
        assert list(threads.map(lambda n: n * n, range(20))) == [n * n for n in range(20)]
        with pytest.raises(ZeroDivisionError):
            threads.submit(lambda: 1 // 0).result()
    assert patiently(lambda a, b: a + b, 1, 2) == 3


def test_a_stuck_read_is_warned_of_and_given_up(stuck: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall, "_WARN_S", 0.2)
    monkeypatch.setattr(stall, "_POLL_S", 0.05)
    with (
        patience(1.5),
        pytest.warns(
            UserWarning, match="weights: no answer at byte 1,234 for 0 s; still waiting. It is given up after 2 s"
        ) as told,
        pytest.raises(
            CheckpointError,
            match=r"weights: expected bytes at 1,234, found none for 2 s: the storage .* read_timeout_s",
        ),
        ReadThreads(2) as threads,
    ):
        assert threads.submit(read_until, _set()).result() == "read"
        threads.submit(read_until, stuck, 1234).result()
    assert len(told) == 3, "at 0.2, 0.4 and 0.8 s"


def _set() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def test_slow_reads_are_not_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall, "_POLL_S", 0.02)
    never = threading.Event()

    def slow(_: int) -> None:
        with reading(FILE):
            never.wait(0.2)

    def slower() -> None:
        with reading(FILE):
            never.wait(1.5)

    with patience(0.7), ReadThreads(2) as threads, warnings.catch_warnings():
        warnings.simplefilter("error")
        longest = threads.submit(slower)  # the other thread completes reads all the time
        list(threads.map(slow, range(8)))
        longest.result()


def test_who_waits_inside_a_watched_call_is_as_patient(stuck: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stall, "_POLL_S", 0.05)
    start = time.monotonic()
    with patience(0.3), pytest.raises(CheckpointError, match="found none"):
        patiently(lambda: patiently(read_until, stuck))
    with patience(0.3), pytest.raises(CheckpointError, match="folder: expected bytes"):
        patiently(stuck.wait, file=Path("folder"))
    assert time.monotonic() - start < 5


def test_a_read_that_comes_back_too_late_puts_nothing_anywhere(
    tmp_path: Path, stuck: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory may be freed by then, and the number of the descriptor be another file's."""
    monkeypatch.setattr(stall, "_POLL_S", 0.05)
    file = tmp_path / "data"
    file.write_bytes(torch.arange(4096, dtype=torch.float32).numpy().tobytes())
    used: list[int] = []

    def preadv(descriptor: int, buffers: list[memoryview], position: int) -> int:
        used.append(descriptor)
        stuck.wait()
        return os.readv(descriptor, buffers)

    monkeypatch.setattr(reader.os, "preadv", preadv)
    memory = torch.zeros(4096, dtype=torch.float64)  # through a staging buffer
    view = View(offset=0, length=(4096,), strides=(1,))
    transfer = Transfer(key="x", file=file, offset=0, dtype=torch.float32, stored=view, memory=memory)
    with patience(0.3), pytest.raises(CheckpointError, match="data: expected bytes at 0"):
        read_transfers([transfer], staging_bytes=2**20)
    os.fstat(used[0])  # open still
    stuck.set()
    while stall._under_way:
        time.sleep(0.01)
    time.sleep(0.1)
    assert len(used) == 1 and not memory.any()
    os.close(used[0])


def test_a_descriptor_that_nobody_reads_is_closed(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    close_unless_read(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_large_requests_are_divided() -> None:
    buffers = [memoryview(bytearray(n)) for n in (3, 5, 2)]
    first: Callable[..., list[memoryview]] = reader._first
    assert [len(b) for b in first(buffers, 4)] == [3, 1]
    assert [len(b) for b in first(buffers, 100)] == [3, 5, 2]
