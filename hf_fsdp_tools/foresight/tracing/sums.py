"""Sums of gradients that autograd makes in place, which it does not for tensors without data."""

import sys
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def is_sum_in_place(first: Any, second: Any, *rest: object) -> bool:
    """Whether an addition without gradients would be autograd's sum of two gradients, in the memory of the first.

    Autograd adds to the gradient that came first where nothing else holds it or its memory, and both are plain tensors
    (`can_accumulate_inplace` in torch's `input_buffer.cpp`). To be called from a dispatch mode with its arguments;
    `holders_of_a_sum` must have been called before, outside of it.
    """
    if torch.is_grad_enabled() or rest or not isinstance(second, torch.Tensor):
        return False
    return first.shape == second.shape and _holders(first) == holders_of_a_sum()


def _holders(tensor: torch.Tensor) -> tuple[int, int, int]:
    """How many hold a tensor, its memory, and its Python object."""
    storage = tensor.untyped_storage()
    return tensor._use_count(), torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(tensor)  # type: ignore[attr-defined]


@cache
def holders_of_a_sum() -> tuple[int, int, int]:
    """How many hold the first of two gradients, its memory and its object where autograd alone does; on this torch."""
    found: list[tuple[int, int, int]] = []

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.add.Tensor:
                observe(*args)
            return func(*args, **(kwargs or {}))

    def observe(first: Any, second: Any, *rest: object) -> None:
        found.append(_holders(first))

    leaf = torch.ones(2, 2, device="meta", requires_grad=True)
    with torch.enable_grad():
        shared = leaf * 2
        total = shared.sin() * shared.cos()
    with Watch():  # type: ignore[no-untyped-call]  # torch's own
        torch.autograd.backward(total, torch.ones_like(total))
    return found[0]
