"""The bar while loading: right total, only where it is wanted."""

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars
from transformers.utils import logging

from hf_fsdp_tools.loading import fill
from hf_fsdp_tools.loading import report as progress
from hf_fsdp_tools.loading.report import loading_bar
from hf_fsdp_tools.steps import build_meta_model, load_weights
from tests._checkpoints import make_checkpoint
from tests.api import CheckpointIndex


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


@pytest.mark.parametrize("kind", ["llama", "mixtral", "gpt2"])
def test_the_bar_ends_at_its_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Every byte is counted once: fused experts, transposed layers, tied weights."""
    totals, arrived = [], []

    @contextmanager
    def bar(num_bytes: int, **_: Any) -> Iterator[Any]:
        totals.append(num_bytes)
        yield arrived.append

    monkeypatch.setattr(fill, "loading_bar", bar)
    folder = make_checkpoint(kind, tmp_path)
    load_weights(build_meta_model(folder), folder)
    assert totals == [sum(arrived)] == [CheckpointIndex.open(folder).num_bytes]
