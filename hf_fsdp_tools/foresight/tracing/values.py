"""Values of fake tensors that follow from the batch alone: where images stand, grids, positions, masks.

Code of models for images reads them. Weights and activations have no values; code that reads theirs cannot be followed.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from hf_fsdp_tools.foresight.tracing.kernels import MAKES_NOTHING

_MOST_BYTES = 2**26  # Of a result that is followed: token ids are, masks of long sequences squared not. (assumed)


class Values(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Runs operations whose inputs have values a second time on real tensors, and answers where values are read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._known: Any = WeakTensorKeyDictionary()
        """Fake tensor -> real one; views of one memory are views of one real memory."""
        self._lost: dict[int, torch.UntypedStorage] = {}
        """Real memory into which something unknown was written, by address."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of a tensor; None if they are not known."""
        real = self._known.get(tensor) if isinstance(tensor, FakeTensor) else tensor
        return None if real is None or real.untyped_storage()._cdata in self._lost else real

    def as_fake(self, real: Any) -> Any:
        """Fake tensors with the values of real ones, nested alike; a fake tensor as it is."""
        if isinstance(real, FakeTensor):
            return real
        fake = tree_map_only(torch.Tensor, lambda one: torch.empty(one.shape, dtype=one.dtype), real)
        self._keep(fake, real)
        return fake

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        follows = not is_random and func.overloadpacket.__name__ not in MAKES_NOTHING
        is_known = follows and all(self.of(one) is not None for one in inputs)
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if not is_known:
                return self._shaped_by_a_mask(func, args, kwargs)
            return self.as_fake(self._real(func, args, kwargs))
        if not is_known:
            self._forget(func, args, kwargs)
        elif _new_bytes(result, inputs) <= _MOST_BYTES:
            self._keep(result, self._real(func, args, kwargs))
        return result

    def _real(self, func: Any, args: Any, kwargs: Any) -> Any:
        with _disable_current_modes():
            return func(*tree_map_only(torch.Tensor, self.of, args), **tree_map_only(torch.Tensor, self.of, kwargs))

    def _keep(self, fake: Any, real: Any) -> None:
        for one, value in zip(tree_leaves(fake), tree_leaves(real), strict=True):
            if isinstance(one, FakeTensor):
                self._known[one] = value

    def _forget(self, func: Any, args: Any, kwargs: Any) -> None:
        """What an operation writes without known values is known no longer."""
        if not func._schema.is_mutable:
            return
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        for argument in func._schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                for one in tree_leaves(named.get(argument.name)):
                    if isinstance(one, torch.Tensor) and (real := self.of(one)) is not None:
                        self._lost[real.untyped_storage()._cdata] = real.untyped_storage()

    def _shaped_by_a_mask(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation that chooses elements without values by a mask with values."""
        name = func.overloadpacket.__name__
        if name == "masked_select" and (mask := self.of(args[1])) is not None:
            shape = torch.broadcast_shapes(args[0].shape, args[1].shape)  # type: ignore[no-untyped-call]  # torch's own
            return args[0].new_empty(_count(mask, shape))
        if name == "masked_scatter_backward":
            return args[0].new_empty(args[2])
        if name == "index" and all(one is None or self._chooses(one) for one in args[1]):
            return func(args[0], self._places(args[1]), **kwargs)
        return func(*args, **kwargs)  # it fails again, and names the operation

    def _chooses(self, index: torch.Tensor) -> bool:
        return index.dtype not in (torch.bool, torch.uint8) or self.of(index) is not None

    def _places(self, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Indices with numbers in the place of masks."""
        places: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                places.append(index)
                continue
            mask = self.of(index)
            assert mask is not None
            places += [torch.empty(_count(mask, mask.shape), dtype=torch.int64) for _ in range(mask.dim())]
        return places


class _Lists(TorchFunctionMode):
    """`torch.tensor` of tensors without dimensions takes their values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tensor and args and isinstance(args[0], list | tuple):
            args = (tree_map_only(FakeTensor, lambda one: one.item(), args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


@contextmanager
def followed_values() -> Iterator[Values]:
    """A block, within a `FakeTensorMode`, in which values that follow from the batch can be read."""
    kind: Any = FakeTensor
    plain = kind.tolist

    def tolist(fake: FakeTensor) -> Any:
        real = values.of(fake)
        return plain(fake) if real is None else real.tolist()

    kind.tolist = tolist  # torch's own reads one element after the other: seconds for the tokens of a long sequence
    try:
        with _Lists(), Values() as values:
            yield values
    finally:
        kind.tolist = plain


def _count(mask: torch.Tensor, shape: torch.Size) -> int:
    """How many elements of a shape a real mask chooses."""
    with _disable_current_modes():
        return int(mask.expand(shape).sum())


def _new_bytes(result: Any, inputs: Sequence[torch.Tensor]) -> int:
    """Bytes of results that are new memory."""
    old = {one.untyped_storage()._cdata for one in inputs}
    storages = [one.untyped_storage() for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
    return sum(storage.nbytes() for storage in storages if storage._cdata not in old)
