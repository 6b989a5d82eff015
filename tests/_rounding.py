"""Comparisons below fp32: no bound is a figure of one processor."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from hf_fsdp_tools.proof.rounding import SHARES, summed_in_parts
from tests.api import MULTIPLE

OF_A_NUMBER = 2**-11
"""How far a number may be in any case, relatively: an eighth of a rounding in bf16, since losses are means of values
that were rounded. (All draws may be near by chance; a count of tokens in bf16 is four times as far.)"""


def with_rounding(run: Callable[[], Any], exact: Callable[[], Any] | None = None) -> tuple[Any, Any]:
    """What `run` gives of the plain model, and how far another right result may be from each tensor and number of it.

    `run` begins from the same state each time; it runs once as it is, and once for each of `SHARES`; where the other
    result rounds at other places, as FSDP does beside autocast, `exact` is the same in fp32, as far as that is, too. A
    distance is that of the largest difference in a tensor; a number, which has no largest, may be twice as far, and
    `OF_A_NUMBER` in any case. In a list of numbers, one for each step, a later one may be as far as any before it.
    """
    plain, others = run(), []
    for share in SHARES:
        with summed_in_parts(share):
            others.append(run())
    others += [exact()] if exact is not None else []
    return plain, _allowed(plain, others)


def _allowed(plain: Any, others: list[Any]) -> Any:
    if isinstance(plain, dict):
        return {key: _allowed(value, [other[key] for other in others]) for key, value in plain.items()}
    if isinstance(plain, list | tuple):
        each = [_allowed(value, [other[i] for other in others]) for i, value in enumerate(plain)]
        return [*accumulate(each, max)] if isinstance(plain[0], float) else each
    far = max(float((torch.as_tensor(other) - torch.as_tensor(plain)).abs().max()) for other in others)
    is_number = not isinstance(plain, torch.Tensor) or not plain.dim()
    return max(2 * MULTIPLE * far, abs(float(plain)) * OF_A_NUMBER) if is_number else MULTIPLE * far


def assert_within(found: Any, run: Callable[[], Any], exact: Callable[[], Any] | None = None) -> None:
    """Tensors and numbers are as near to those that `run` gives of the plain model as its own rounding explains."""
    assert_near(found, *with_rounding(run, exact))


def assert_near(found: Any, plain: Any, allowed: Any, what: str = "") -> None:
    """The same with what `with_rounding` gave; all of one structure of dictionaries and lists."""
    if isinstance(plain, dict | list | tuple):
        keys = plain if isinstance(plain, dict) else range(len(plain))
        assert len(found) == len(plain) > 0, what
        for key in keys:
            assert_near(found[key], plain[key], allowed[key], f"{what} {key}")
    else:
        difference = (torch.as_tensor(found).double() - torch.as_tensor(plain).double()).abs()
        assert difference.max() <= allowed, f"{what}: {difference.max():.2e} apart; rounding explains {allowed:.2e}"
