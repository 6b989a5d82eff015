"""Notes of what a block of a test calls: functions of others, and operators of PyTorch."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@contextmanager
def calls_of(owner: Any, name: str, note: Callable[..., Any] = lambda *_: None) -> Iterator[list[Any]]:
    """What `note(result, *args)` says of each call of a function, in their order."""
    seen: list[Any] = []
    own = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        seen.append(note(result, *args))
        return result

    with patch.object(owner, name, call):
        yield seen


class Operators(TorchDispatchMode):
    """The sum of what `count(operator, *args)` says of each operator that runs in a block."""

    def __init__(self, count: Callable[..., int] = lambda *_: 1) -> None:
        super().__init__()
        self.count, self.sum = count, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.sum += self.count(func, *args)
        return func(*args, **(kwargs or {}))


class LiveBytes(TorchDispatchMode):
    """Bytes that operators of a block make and that are not freed, at most; and the shapes of all floats they make."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()
        self.peak = self.largest = 0
        self._live: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(each.untyped_storage()) for each in tree_leaves((args, kwargs)) if type(each) is torch.Tensor}
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if not isinstance(each, torch.Tensor) or each.untyped_storage().nbytes() == 0:
                continue
            storage = each.untyped_storage()
            if each.is_floating_point() and id(storage) not in given:
                self.shapes.add(tuple(each.shape))
            reference = weakref.ref(storage, lambda gone: self._live.pop(gone, None))
            if id(storage) not in given and reference not in self._live:
                self._live[reference] = storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
                self.peak = max(self.peak, sum(self._live.values()))
        return result
