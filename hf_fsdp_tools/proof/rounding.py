"""How far a computation is from itself: the same mathematics, its sums taken in another order.

Ranks add parts of sums that one process adds at once, and processors add in blocks of their own. No figure says for all
of them how far two right results may be apart; the plain model says it, of itself, at the place where it is asked.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

SHARES = (1 / 2, 1 / 3, 3 / 4)
"""Where the sums of another order are cut. (assumed: a single number may be near itself by chance in one draw)"""

MULTIPLE = 4
"""How many times further than the plain model from itself a result may be. (assumed: partial sums of up to eight ranks
are rounded up to three times more often than those of one cut)"""

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default: 0, _aten.bmm.default: 0, _aten.addmm.default: 1, _aten.baddbmm.default: 1}
"""Products of matrices, and where their first factor stands."""
_REST = {_aten.addmm.default: _aten.mm.default, _aten.baddbmm.default: _aten.bmm.default}


class _Cut(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    def __init__(self, share: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.share = share

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        at = _PRODUCTS.get(func)
        if at is None or kwargs or type(args[at]) is not torch.Tensor or not args[at].is_floating_point():
            return func(*args, **(kwargs or {}))
        a, b = args[at : at + 2]
        cut = max(1, round(a.shape[-1] * self.share))
        first = func(*args[:at], a[..., :cut], b[..., :cut, :])
        return first if cut >= a.shape[-1] else first + _REST.get(func, func)(a[..., cut:], b[..., cut:, :])


@contextmanager
def summed_in_parts(share: float) -> Iterator[None]:
    """A block in which each product of matrices is the sum of two, each rounded: of the first `share` of what is summed
    over, and of the rest. In backward passes too, if the block has them; on CPUs."""
    with _Cut(share):
        yield
