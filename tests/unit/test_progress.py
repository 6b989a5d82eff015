"""The bar while loading: right total, only where it is wanted."""

import io
from collections.abc import Iterator
from contextlib import redirect_stderr
from typing import Any

import pytest
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
from transformers.utils import logging

from hf_fsdp_tools.loading import report as progress
from hf_fsdp_tools.loading.report import loading_bar


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    monkeypatch.setattr(progress, "_DELAY_S", 0)
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    yield stream
    enable_progress_bars()
    logging.enable_progress_bar()


def shown(stream: io.StringIO, **options: Any) -> str:
    start = len(stream.getvalue())
    options = {"rank": 0, "world_size": 8, "progress": None} | options
    with redirect_stderr(stream), loading_bar(4_000_000_000, **options) as on_bytes:
        for _ in range(4):
            on_bytes(1_000_000_000)
    return stream.getvalue()[start:]


def test_rank_0_shows_bytes_and_speed_on_a_terminal_where_bars_are_not_switched_off(terminal: io.StringIO) -> None:
    text = shown(terminal)
    assert "Loading weights (rank 0 of 8): 100%" in text and "4.00G/4.00G" in text and "B/s" in text
    assert "Loading weights: 100%" in shown(terminal, world_size=1)
    assert shown(terminal, rank=1) == shown(terminal, rank=1, progress=True) == ""
    assert shown(terminal, progress=False) == ""
    logging.disable_progress_bar()
    assert shown(terminal) == "" and "100%" in shown(terminal, progress=True)
    logging.enable_progress_bar()
    disable_progress_bars()
    assert shown(terminal) == ""
    enable_progress_bars()
    assert "100%" in shown(terminal)
    assert shown(io.StringIO()) == "" and "100%" in shown(io.StringIO(), progress=True)
