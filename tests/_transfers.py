"""Reading transfers at once, beside the package's `write_transfers`; and what a load reads at a time."""

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest

from hf_fsdp_tools.loading.quantized.dequantize import WORK_BYTES
from tests.api import Reader, Transfer, TransferStats, side_stream_for


def read_transfers(transfers: Iterable[Transfer], *, staging_bytes: int) -> TransferStats:
    """Fill the memory of every transfer from its file, once, as a load does."""
    transfers = list(transfers)
    side = side_stream_for(transfer.memory for transfer in transfers)
    with Reader(staging_bytes=staging_bytes, side=side) as reader:
        return reader.read(transfers)


class Windows:
    """What a load reads and computes at a time: wraps `Reader.begin`, and by `computing` the function that takes the
    values of a window."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.parts: list[int] = []
        self.windows: list[int] = []
        self.order: list[str] = []
        begin = Reader.begin

        def reading(reader: Reader, transfers: Any) -> Any:
            self.order.append("read")
            self.windows.append(sum(t.memory.numel() * t.memory.itemsize for t in transfers))
            return begin(reader, transfers)

        monkeypatch.setattr(Reader, "begin", reading)

    def computing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(values: Any, *args: Any, **options: Any) -> Any:
            self.order.append("compute")
            self.parts.append(values.numel())
            return function(values, *args, **options)

        return counted

    def are_bounded(self, first: int, read_bytes: int) -> None:
        """At 1 MiB of staging; and one window is read while the one before is computed."""
        assert max(self.parts) * WORK_BYTES <= 2**18 and max(self.windows[1:]) <= read_bytes
        assert any(a == b == "read" for a, b in pairwise(self.order[first:])), "before the window is computed"
