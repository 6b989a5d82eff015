"""Read and work on a bounded number of values at a time: while one window is worked on, the next one is read."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch

from hf_fsdp_tools.loading.io.files import Reader, TransferStats
from hf_fsdp_tools.loading.io.transfer import Transfer

P = TypeVar("P")
T = TypeVar("T")

WORK_BYTES = 32
"""Bytes of host memory that packing or dequantising one value takes on a CPU, intermediate tensors included. (assumed)
"""


class Bounds(NamedTuple):
    """How much is worked on at a time."""

    scale_bytes: int
    """Scales that are joined together."""

    window_bytes: int
    """Values that are read together; one such window is worked on while the next one is read."""

    part_values: int
    """Values that one call takes."""

    @classmethod
    def of(cls, device: torch.device, staging_bytes: int) -> "Bounds":
        """On a CPU, half of `staging_bytes` in all; buffers for reading take the other half.

        An accelerator's memory will hold a training: a window keeps 16 reads of 16 MiB in flight, and the scales of
        eight ranks' windows are joined together. (assumed)
        """
        if device.type != "cpu":
            return cls(scale_bytes=2**28, window_bytes=2**28, part_values=2**26)
        return cls(staging_bytes // 8, staging_bytes // 16, staging_bytes // (4 * WORK_BYTES))


def batches(
    items: Iterable[T],
    num_bytes: int,
    size_of: Callable[[T], int],
    kind_of: Callable[[T], object] = lambda item: None,
) -> Iterator[list[T]]:
    """Yield neighbours of one kind that together take at most `num_bytes`, or single items."""
    group: list[T] = []
    held = 0
    for item in items:
        size = size_of(item)
        if group and (held + size > num_bytes or kind_of(group[0]) != kind_of(item)):
            yield group
            group, held = [], 0
        group.append(item)
        held += size
    if group:
        yield group


def work_in_windows(
    windows: Iterable[Sequence[T]],
    reader: Reader,
    *,
    begin: Callable[[Sequence[T]], tuple[list[P], list[Transfer]]],
    work: Callable[[P], object],
) -> TransferStats:
    """Read windows one after the other, and work on each while the next one is read; what reading cost."""
    stats = TransferStats()
    arrived: list[P] = []

    def work_on_arrived() -> None:
        while arrived:  # each part is forgotten, and its memory freed, when it is done
            work(arrived.pop(0))

    for window in windows:
        parts, transfers = begin(window)
        wait = reader.begin(transfers)
        try:
            work_on_arrived()
        finally:
            stats += wait()
        arrived = parts
    work_on_arrived()
    return stats
