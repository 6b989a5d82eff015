"""A tensor that stands in the place of a DTensor's memory, and knows when somebody uses it."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only


class Watched(torch.Tensor):
    """This rank's part of a tensor that a thread steps on, or of which a copy was made: who uses it waits for the
    thread, and the copy is not used any more unless the tensor was only read.

    It stands in `DTensor._local_tensor` and has no memory of its own.
    """

    memory: torch.Tensor
    wait: Callable[[], None]
    of: Any

    @staticmethod
    def __new__(cls, of: Any, wait: Callable[[], None]) -> "Watched":
        """In the place of the memory of a DTensor, until it is touched."""
        local = of._local_tensor
        memory = local.memory if isinstance(local, Watched) else local
        made: Watched = torch.Tensor._make_wrapper_subclass(
            cls, memory.shape, strides=memory.stride(), dtype=memory.dtype, device=memory.device
        )
        made.memory, made.wait, made.of = memory, wait, of  # a weak reference would forbid torch to swap tensors
        of._local_tensor = made
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run what scripts call on the memory; what is asked of the tensor alone, its shape for one, is known."""
        if getattr(func, "__name__", "") == "__get__":
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        args, kwargs = tree_map_only(Watched, Watched.touched, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run an operator on the memory, DTensor's for one."""
        uses = {a.name: Watched.touched if a.alias_info else Watched.read for a in func._schema.arguments}
        args = [tree_map_only(Watched, use, argument) for use, argument in zip(uses.values(), args, strict=False)]
        kwargs = {name: tree_map_only(Watched, uses[name], value) for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)

    def read(self) -> torch.Tensor:
        """The memory, once the thread is done with it, for an operator that neither writes to it nor returns a view."""
        self.wait()
        return self.memory

    def touched(self) -> torch.Tensor:
        """The memory, once the thread is done with it; it is watched no longer."""
        self.wait()
        of, self.of = self.of, None
        if of is not None and of._local_tensor is self:
            of._local_tensor = self.memory
        return self.memory

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.touched().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch's own

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return copy.deepcopy(self.touched(), memo)
