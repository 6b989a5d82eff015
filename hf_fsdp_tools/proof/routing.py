"""The experts that a plain model chooses, chosen again by the sharded one in lower precision.

Where weights are divided, partial sums are rounded apart, and of two experts that are nearly alike another one may be
chosen: the outputs of such a token differ as a whole. The choice is compared in fp32; in bf16 it is given, so that what
else is computed can be compared.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

Choices = dict[tuple[str, int], torch.Tensor]
"""Indices of `torch.topk`, by the module that called it and the number of its call there."""


class _Choosing(TorchFunctionMode):
    """Notes what `torch.topk` gives in modules that are called once, or gives what was noted."""

    def __init__(self, given: Mapping[tuple[str, int], torch.Tensor] | None, part: tuple[int, int, int]) -> None:
        super().__init__()
        self.given, self.part, self.noted = given, part, Choices()
        self._running: list[list[Any]] = []  # name and number of calls of topk, of modules inside each other
        self._again: set[str] = set()

    def begin(self, module: nn.Module, args: object, *, name: str) -> None:
        """Note that a module runs; the first one begins the mode, as checkpointed blocks run again in a backward pass,
        during which torch leaves a mode around it."""
        if not self._running:
            self.__enter__()  # type: ignore[no-untyped-call]  # torch's own
        if any(key[0] == name for key in self.noted):
            self._again.add(name)
        self._running.append([name, 0])

    def end(self, module: nn.Module, args: object, output: object) -> None:
        """Note that it has run."""
        self._running.pop()
        if not self._running:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch; in the place of the indices of topk, give those that were noted."""
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or not self._running or not result[1].is_cpu:
            return result
        name, number = self._running[-1]
        self._running[-1][1] += 1
        if self.given is None:
            if name not in self._again:
                self.noted[name, number] = result[1].clone()
            return result
        indices = self.given.get((name, number))
        if indices is not None and indices.shape != result[1].shape:
            indices = self._of_part(indices)
        if indices is None or indices.shape != result[1].shape:
            return result
        dim = (kwargs or {}).get("dim", args[2] if len(args) > 2 else -1)
        return torch.return_types.topk((args[0].gather(dim, indices), indices))

    def _of_part(self, indices: torch.Tensor) -> torch.Tensor:
        """The indices for this rank's part among those of whole rows, with padding at the end."""
        rank, size, length = self.part
        if size == 1 or indices.dim() < 2 or indices.shape[:-1].numel() % length:
            return indices
        rows = indices.reshape(-1, length, indices.shape[-1])
        many = -(-length // size)
        at = torch.arange(rank * many, (rank + 1) * many).clamp(max=length - 1)
        own = rows[:, at]
        return own.flatten(0, 1) if indices.dim() == 2 else own

    def once(self) -> Choices:
        """What was noted of modules that were called once."""
        return {key: indices for key, indices in self.noted.items() if key[0] not in self._again}


@contextmanager
def choices(
    model: nn.Module,
    names: Mapping[str, str],
    given: Mapping[tuple[str, int], torch.Tensor] | None = None,
    part: tuple[int, int, int] = (0, 1, 0),
) -> Iterator[_Choosing]:
    """A block in which a model's choices of experts are noted (`once`), or, of its modules, given.

    Args:
        names: the plain names of the model's modules, by their own.
        part: which of how many parts of rows this rank has, and how many tokens a whole row has.
    """
    mode = _Choosing(given, part)
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if name in names:
                begin = partial(mode.begin, name=names[name])
                stack.callback(module.register_forward_pre_hook(begin, prepend=True).remove)
                stack.callback(module.register_forward_hook(mode.end, always_call=True).remove)
        yield mode
