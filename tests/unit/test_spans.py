"""Sets of bytes: merged, clipped, cut and found in a buffer, against plain Python sets."""

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_fsdp_tools.checkpoint.io.spans import (
    clipped,
    cut_points,
    merged,
    num_bytes,
    places,
)

SPANS = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=12)


def spans_of(pairs: list[tuple[int, int]]) -> torch.Tensor:
    return torch.tensor([(start, start + size) for start, size in pairs], dtype=torch.int64).reshape(-1, 2)


def bytes_of(spans: torch.Tensor) -> list[int]:
    """Every position, in the order of the spans."""
    return [position for start, stop in spans.tolist() for position in range(start, stop)]


@given(SPANS, st.integers(0, 5))
def test_merged_is_sorted_apart_and_closes_gaps(pairs: list[tuple[int, int]], gap: int) -> None:
    spans = spans_of(pairs)
    union = merged(spans)
    assert bytes_of(union) == sorted(set(bytes_of(spans))) and num_bytes(union) == len(set(bytes_of(spans)))
    wide = merged(spans, max_gap_bytes=gap)
    assert all(later[0] - earlier[1] > gap for earlier, later in zip(wide.tolist(), wide.tolist()[1:], strict=False))
    assert set(bytes_of(union)) <= set(bytes_of(wide))
    between = set(bytes_of(wide)) - set(bytes_of(union))
    assert all(any(p + d in set(bytes_of(union)) for d in range(gap + 1)) for p in between)


@given(SPANS, SPANS, st.integers(1, 20))
def test_segments_hold_every_byte_once_and_parts_are_found_in_them(
    pairs: list[tuple[int, int]], others: list[tuple[int, int]], size: int
) -> None:
    wanted = merged(spans_of(pairs))
    union = merged(torch.cat([wanted, spans_of(others)]))
    points = cut_points(union, size)
    segments = [clipped(union, a, b) for a, b in pairwise(points)]
    assert [position for segment in segments for position in bytes_of(segment)] == bytes_of(union)
    assert all(num_bytes(segment) == size for segment in segments[:-1])
    found = []
    for segment, a, b in zip(segments, points, points[1:], strict=False):
        buffer = bytes_of(segment)
        found += [p for at, count in places(clipped(wanted, a, b), segment) for p in buffer[at : at + count]]
    assert found == bytes_of(wanted)
