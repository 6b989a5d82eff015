"""Storage that does not answer is named, with file, position and seconds; what answers is not."""

import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_fsdp_tools.distributed import watch
from hf_fsdp_tools.distributed.watch import watched


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(watch, "_WARN_S", 0.2)
    monkeypatch.setattr(watch, "_POLL_S", 0.02)
    yield
    while watch._watcher.is_alive():  # it ends by itself, or would warn in the next test
        time.sleep(0.01)
    assert not watch._under_way


def test_a_call_that_does_not_end_is_named_again_after_twice_the_time() -> None:
    with pytest.warns(UserWarning, match="weights: no answer at byte 1,234 for 0 s; still waiting. Check the") as told:
        end = threading.Event()
        with watched(Path("weights"), 1234):
            deadline = time.monotonic() + 20
            while len(told) < 2 and not end.wait(0.05) and time.monotonic() < deadline:
                continue
    assert len(told) >= 2


def test_short_calls_are_not_named_however_many(recwarn: pytest.WarningsRecorder) -> None:
    begin = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        while time.monotonic() - begin < 0.5:
            with watched(Path("weights")), watched(Path("within")):
                time.sleep(0.001)
    assert not recwarn.list


def test_the_watch_begins_again_after_it_has_ended() -> None:
    for _ in range(2):
        with pytest.warns(UserWarning, match="slow: no answer") as told, watched(Path("slow")):
            deadline = time.monotonic() + 20
            while not told and time.monotonic() < deadline:
                time.sleep(0.02)
        while watch._watcher.is_alive():
            time.sleep(0.01)
