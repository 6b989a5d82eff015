"""Combinations of what works together: some in each commit, all others in the nightly tier."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest

Row = tuple[Any, ...]


def in_turn(*axes: Sequence[Any]) -> list[Row]:
    """One combination for each value of the longest axis; of the others each value occurs, one after the other."""
    longest = max(map(len, axes))
    return [tuple(axis[i % len(axis)] for axis in axes) for i in range(longest)]


_AT_ONCE = 16
"""Combinations of one test of the nightly tier: on a busy core more would take longer than a test may."""


def fast_and_nightly(choose: Callable[..., list[Row]], *axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Give a test its argument `combinations`: those that `choose` takes, and, nightly, a part of all others."""
    fast = choose(*axes)
    others = [row for row in product(*axes) if row not in fast]
    parts = [others[start : start + _AT_ONCE] for start in range(0, len(others), _AT_ONCE)]
    nightly = [pytest.param(part, id=f"others {i}", marks=pytest.mark.nightly) for i, part in enumerate(parts)]
    return pytest.mark.parametrize("combinations", [pytest.param(fast, id="fast"), *nightly])
