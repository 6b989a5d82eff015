"""Notes of what a block of a test calls: functions of others, and operators of PyTorch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.utils._python_dispatch import TorchDispatchMode


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
