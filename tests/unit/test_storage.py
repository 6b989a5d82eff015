"""Storage that does not answer is named, with file, position and seconds; what answers is not."""

import os
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest

from hf_fsdp_tools.distributed import storage
from hf_fsdp_tools.distributed.storage import progress_made, watched


class Over(Exception):
    """The end of a rehearsal."""


class Rehearsal:
    """The watch on a clock that nobody waits for."""

    def __init__(self) -> None:
        self.now, self.end, self.at = 0.0, 0.0, lambda: None

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now > self.end:
            raise Over
        self.at()

    def run(self, end: float, at: Callable[[], object] = lambda: None) -> list[str]:
        """What is warned of up to that time; `at` is called before each look."""
        self.end, self.at = end, at
        with warnings.catch_warnings(record=True) as told, pytest.raises(Over):
            warnings.simplefilter("always")
            storage._watch()
        return [str(warning.message) for warning in told]


@pytest.fixture
def rehearsal(monkeypatch: pytest.MonkeyPatch) -> Rehearsal:
    monkeypatch.setattr(storage, "time", clock := Rehearsal())
    monkeypatch.setattr(storage, "_watcher", Mock(is_alive=lambda: True))  # no thread: `run` is it
    return clock


def test_a_call_that_does_not_end_is_named_again_after_twice_the_time(rehearsal: Rehearsal) -> None:
    with watched(Path("weights"), 1234):
        told = rehearsal.run(200)
    said = [f"weights: no answer at byte 1,234 for {seconds} s" for seconds in (30, 60, 120)]
    assert [text.split(";")[0] for text in told] == said
    assert all("still waiting. Check the storage" in text for text in told)


def test_short_calls_are_not_named_however_many(rehearsal: Rehearsal) -> None:
    """Two of 20 s at a time, for ten minutes."""
    with ExitStack() as stack:

        def begin_anew() -> None:
            if rehearsal.now % 20 == 0:
                stack.close()
                stack.enter_context(watched(Path("weights")))
                stack.enter_context(watched(Path("within")))

        begin_anew()
        assert rehearsal.run(600, begin_anew) == []


def progress_seen_by_another_thread() -> int:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(progress_made).result()


def test_bytes_of_any_library_and_watched_blocks_are_progress() -> None:
    before = progress_made()
    with watched(Path(os.devnull)):
        pass
    assert progress_made() > before
    before = progress_seen_by_another_thread()
    with tempfile.TemporaryFile() as file:
        file.write(bytes(2**21))
    assert progress_seen_by_another_thread() >= before + 2
