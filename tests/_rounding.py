"""Comparisons below fp32: no bound is a figure of one processor."""

from collections.abc import Callable
from typing import Any

import torch

from hf_fsdp_tools.proof.rounding import with_rounding


def assert_within(found: Any, run: Callable[[], Any], what: str = "") -> None:
    """Tensors and numbers are as near to those that `run` gives of the plain model as its own rounding explains."""
    assert_near(found, *with_rounding(run), what)


def assert_near(found: Any, plain: Any, allowed: Any, what: str = "") -> None:
    """As `assert_within`, with what `with_rounding` gave; all of one structure of dictionaries and lists."""
    if isinstance(plain, dict | list | tuple):
        keys = plain if isinstance(plain, dict) else range(len(plain))
        assert len(found) == len(plain), what
        for key in keys:
            assert_near(found[key], plain[key], allowed[key], f"{what} {key}")
    else:
        difference = (torch.as_tensor(found).double() - torch.as_tensor(plain).double()).abs()
        assert difference.max() <= allowed, f"{what}: {difference.max():.2e} apart; rounding explains {allowed:.2e}"
