"""Sets of bytes of several files, as sorted pairs of positions that can be merged, cut and sent to other ranks.

A position is the file's number times `FILE_STEP` plus the place in that file, so that one line of numbers holds all files. A
set is an int64 tensor (n, 2) on the CPU: start and stop of each span, sorted, apart from each other.
"""

import torch

__all__ = ["FILE_STEP", "clipped", "cut_points", "merged", "num_bytes", "places"]

FILE_STEP = 2**44
"""Positions per file: 16 TiB, more than a file of weights has."""


def merged(spans: torch.Tensor, *, max_gap_bytes: int = 0) -> torch.Tensor:
    """Any spans as a set: sorted, with those made one that overlap, touch or lie at most so far apart."""
    if not len(spans):
        return spans.new_empty((0, 2))
    spans = spans[spans[:, 0].argsort()]
    reach = spans[:, 1].cummax(0).values
    first = torch.ones(len(spans), dtype=torch.bool, device="cpu")
    first[1:] = spans[1:, 0] > reach[:-1] + max_gap_bytes
    last = torch.cat([first[1:], torch.ones(1, dtype=torch.bool, device="cpu")])
    return torch.stack([spans[first, 0], reach[last]], dim=1)


def num_bytes(spans: torch.Tensor) -> int:
    """How many bytes a set has."""
    return int((spans[:, 1] - spans[:, 0]).sum())


def clipped(spans: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """The part of a set between two positions."""
    first = torch.searchsorted(spans[:, 1].contiguous(), start, right=True)
    last = torch.searchsorted(spans[:, 0].contiguous(), stop)
    return spans[int(first) : int(last)].clamp(start, stop)


def cut_points(spans: torch.Tensor, segment_bytes: int) -> list[int]:
    """Positions that cut a set into segments of so many bytes; the last one may be shorter. One more than segments."""
    if not len(spans):
        return [0]
    ends = (spans[:, 1] - spans[:, 0]).cumsum(0)
    begins = torch.arange(0, int(ends[-1]), segment_bytes, device="cpu")
    index = torch.searchsorted(ends, begins, right=True)
    return [*(spans[index, 1] - (ends[index] - begins)).tolist(), int(spans[-1, 1])]


def places(parts: torch.Tensor, spans: torch.Tensor) -> list[tuple[int, int]]:
    """Where each part of a set begins in a buffer that holds all bytes of the set one after the other, and its length."""
    lengths = spans[:, 1] - spans[:, 0]
    index = torch.searchsorted(spans[:, 0].contiguous(), parts[:, 0].contiguous(), right=True) - 1
    begins = (lengths.cumsum(0) - lengths)[index] + parts[:, 0] - spans[index, 0]
    return list(zip(begins.tolist(), (parts[:, 1] - parts[:, 0]).tolist(), strict=True))
