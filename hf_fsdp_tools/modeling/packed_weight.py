"""A weight that stays as a checkpoint stores it: its form, and the tensor that code sees in its place.

It is bytes in memory. A `PackedWeight` says shape and dtype of the floats that they stand for, and is dequantised when
it is multiplied, and again in the backward pass: what autograd keeps is the bytes.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from hf_fsdp_tools.errors import ConfigError, warn
from hf_fsdp_tools.modeling.module_tree import replaced
from hf_fsdp_tools.text import first_line


@dataclass(frozen=True, kw_only=True)
class PackedPart:
    """Values, or what belongs to blocks of them, as a checkpoint has them."""

    name: str
    """Its stored name: what follows the name of the plain tensor, or, after a ".", the last parts of the name."""
    dtype: torch.dtype
    """Stored dtype."""
    ndim: int
    """Number of dimensions of the stored tensor."""
    block: tuple[int, int] = (1, 1)
    """Rows and columns of the values that share one element; the last blocks of either direction may be short."""
    bits: int = 0
    """Bits of each value where an element packs one for each row of its block, lowest bits first and offset by half
    their range, as GPTQ's values do; 0 elsewhere."""
    elements: int = 1
    """Elements of a block, which have a dimension of their own where `ndim` says so."""
    is_column: bool = False
    """Whether it is stored as one column."""
    is_whole: bool = False
    """Whether every rank holds it, in a buffer, being a few values for the whole weight."""

    def key(self, plain: str) -> str:
        """The stored name next to that of the plain tensor."""
        return plain.rpartition(".")[0] + self.name if self.name.startswith(".") else plain + self.name

    def look(self, shape: Sequence[int]) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape of the stored tensor, from the shape of its bytes."""
        full = [*shape[:-1], shape[-1] // self.dtype.itemsize]
        if self.is_column:
            return self.dtype, (math.prod(full), 1)
        if self.ndim > len(full):  # blocks of bytes
            full = [*full[:-1], full[-1] // self.elements, self.elements]
        while len(full) > self.ndim:
            assert 1 in (full[-1], full[0]), (shape, self)
            full.pop(-1 if full[-1] == 1 else 0)
        return self.dtype, tuple(full)


@dataclass(frozen=True, kw_only=True)
class PackedForm:
    """How one parameter is packed."""

    shape: tuple[int, ...]
    """Shape of the plain parameter."""
    dtype: torch.dtype
    """Dtype of the plain parameter."""
    codec: Any
    """The `Codec` that makes floats of values and scales."""
    is_transposed: bool
    """Whether the last two dimensions of the plain parameter are those of the stored matrix exchanged."""
    values: PackedPart
    scales: Mapping[str, PackedPart]
    """By the codec's names."""
    flat_block: int = 0
    """Values in a row of the packed matrix where the weight is flattened; 0 where its rows are those of the weight."""
    compute_dtype: torch.dtype | None = None
    """Dtype in which a linear layer computes; None: that of its inputs."""

    @property
    def rows(self) -> int:
        """Rows of a stored matrix."""
        return self.shape[-1 if self.is_transposed else -2]

    @property
    def columns(self) -> int:
        """Values in a row."""
        return self.shape[-2 if self.is_transposed else -1]

    def matrix(self) -> tuple[int, int]:
        """Rows and columns of the packed matrix, of whose blocks the parts hold elements."""
        count = self.rows * self.columns
        return (count // self.flat_block, self.flat_block) if self.flat_block else (self.rows, self.columns)

    def shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        """Shapes of the bytes by the names of `parts`."""
        found = {}
        for key, part in self.parts(name).items():
            down, across = (-(-n // size) for n, size in zip(self.matrix(), part.block, strict=True))
            found[key] = (*self.shape[:-2], down, across * part.elements * part.dtype.itemsize)
        return found

    def looks(self, plain: str) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtypes and shapes of the stored tensors by their names, for the name of the plain one."""
        shapes = self.shapes("").values()
        return {part.key(plain): part.look(s) for part, s in zip(self.parts("").values(), shapes, strict=True)}

    def parts(self, name: str) -> dict[str, PackedPart]:
        """Values and scales by the names of the parameters of bytes, for the plain parameter's name."""
        return {part_name(name, scale): part for scale, part in (("packed", self.values), *self.scales.items())}

    def floats(self, values: torch.Tensor, scales: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The dequantised weight or, of leading dimensions that were indexed, a part of it; contiguous.

        As on reading, it is rounded to the dtype of the plain parameter, and cast to that of computation then. A GPU
        with Triton runs one compiled kernel for a matrix, whose start takes less time than those of a few operators.
        """
        if not self.flat_block and not torch.compiler.is_compiling() and _takes_kernel(values):
            try:
                return _compiled()(self, values, scales, dtype)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # there is no C compiler, say, and what operators raise is raised below
                _give_up_kernel(error)
        return self._floats(values, scales, dtype)

    def _floats(self, values: torch.Tensor, scales: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """The same by operators, so many values at a time; where torch compiles it, all, as nothing is kept between."""
        rows, columns = self.rows, self.columns
        stored = [each.reshape(-1, *each.shape[-2:]) for each in (values, *scales)]
        if self.flat_block:  # by a kernel of its own, which takes no memory next to
            at = torch.arange(values.shape[-2], device=values.device)
            whole = self._floats_of_rows(stored, at, 0).view(*values.shape[:-2], rows, columns)
            return (whole.transpose(-2, -1) if self.is_transposed else whole).to(dtype)
        floats = values.new_empty((*values.shape[:-2], *self.shape[-2:]), dtype=dtype)
        matrices = floats.view(-1, *self.shape[-2:])
        matrices = matrices.transpose(-2, -1) if self.is_transposed else matrices
        most = VALUES_AT_A_TIME if values.device.type == "cpu" else VALUES_AT_A_TIME_ON_ACCELERATORS
        for some, first, stop in self.chunks(len(matrices), floats.numel() if torch.compiler.is_compiling() else most):
            at, place = torch.arange(first, stop, device=values.device), matrices[some, first:stop]
            place.copy_(self._floats_of_rows([each[some] for each in stored], at, first).view(place.shape))
        return floats

    def chunks(self, matrices: int, most: int) -> Iterable[tuple[slice, int, int]]:
        """What is dequantised at a time of so many matrices: some of them, of which rows, from one to another."""
        many = max(1, most // self.columns)
        step = max(1, many // self.rows)
        starts = [(i, first) for i in range(0, matrices, step) for first in range(0, self.rows, many)]
        return [(slice(i, i + step), first, min(first + many, self.rows)) for i, first in starts]

    def _floats_of_rows(self, stored: Sequence[torch.Tensor], at: torch.Tensor, first: int) -> torch.Tensor:
        """The same of some matrices, of each the rows `at`, which follow each other from the first on."""
        values, columns = _part_of_rows(self.values, stored[0], at, first), self.flat_block or self.columns
        of_rows = {}
        for (name, part), each in zip(self.scales.items(), stored[1:], strict=True):
            of_rows[name] = _part_of_rows(part, each, at, first)
            blocks, wide = of_rows[name].shape[-1], part.block[1]
            if blocks > 1 and blocks * wide > columns and not part.is_whole:  # the last block is short
                missing = (blocks * wide - columns) * values.shape[1] // columns
                values = functional.pad(values.view(torch.uint8), (0, missing * values.itemsize)).view(values.dtype)
        floats: torch.Tensor = self.codec.decode(values, of_rows, self.dtype)
        return floats[:, :columns]


def chunks_once(times: Callable[[int], None], *, on_accelerator: bool) -> AbstractContextManager[None]:
    """A block in which the first chunk of each weight stands for all of them, whose number `times` gets before it, and
    1 after it; chunks are as long as on an accelerator, or as on the weight's device."""
    own = PackedForm.chunks

    def first(form: PackedForm, matrices: int, most: int) -> Iterator[tuple[slice, int, int]]:
        found = list(own(form, matrices, VALUES_AT_A_TIME_ON_ACCELERATORS if on_accelerator else most))
        times(len(found))
        yield found[0]
        times(1)

    return replaced(PackedForm, chunks=first)


_is_kernel_possible = find_spec("triton") is not None


def _takes_kernel(values: torch.Tensor) -> bool:
    return values.is_cuda and _is_kernel_possible


def _give_up_kernel(error: Exception) -> None:
    """Dequantise by operators from now on."""
    global _is_kernel_possible
    _is_kernel_possible = False
    warn(
        f"torch cannot compile the kernel that dequantises weights ({first_line(error)}); operators do it, and a step "
        "takes about half as long again. Triton needs a C compiler and Python's headers."
    )


@cache
def _compiled() -> Callable[..., torch.Tensor]:
    """`PackedForm._floats`, compiled; each value is rounded wherever an operator would round it.

    Each shape of a model has a kernel of its own; from the ninth on, torch would run operators without a word.
    """
    run = torch.compile(PackedForm._floats, dynamic=False, options={"emulate_precision_casts": True})
    limited: Callable[..., torch.Tensor] = torch._dynamo.config.patch(recompile_limit=_MOST_KERNELS)(run)
    return limited


_MOST_KERNELS = 64
"""Shapes and codecs of a model's weights. (assumed; a mixture of experts has about 20)"""


def unpacked(words: torch.Tensor, first_bits: torch.Tensor, bits: int) -> torch.Tensor:
    """The signed integers of so many bits that begin at these bits of int32 words, stored less their smallest value."""
    return (((words >> first_bits) & ((1 << bits) - 1)) - (1 << bits - 1)).to(torch.int8)


def part_name(name: str, scale: str) -> str:
    """The name of the parameter that holds the values ("packed") or one kind of scales of a packed parameter."""
    return f"{name}_{scale.replace(' ', '_')}"


VALUES_AT_A_TIME = 2**20
"""Values that are dequantised at a time. Each takes at most 16 bytes meanwhile, all 16 MiB: a CPU's cache. (assumed)"""

VALUES_AT_A_TIME_ON_ACCELERATORS = 2**23
"""The same where an operation must be worth its start, 128 MiB: 10 µs for its values at 2 TB/s. (assumed)"""


def _part_of_rows(part: PackedPart, stored: torch.Tensor, at: torch.Tensor, first: int) -> torch.Tensor:
    """What belongs to these rows of all matrices of bytes, [rows, elements]."""
    high = part.block[0]
    if part.is_whole:
        found = stored.expand(-1, len(at), -1)
    else:
        found = stored.index_select(-2, at // high) if high > 1 else stored[:, first : first + len(at)]
    found = found.view(part.dtype)
    if part.bits:
        found = unpacked(found, (at % high * part.bits).to(found).unsqueeze(1), part.bits)
    return found.flatten(0, 1)


# ---- tensors ----


Factors = tuple[torch.Tensor, torch.Tensor, float]
"""What a low-rank adapter adds to a stack of weights: `scaling * lhs @ rhs`."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a packed weight is, but for its tensors, which are the factors that adapters add, and values and scales."""

    form: PackedForm
    dtype: torch.dtype
    """Dtype of its floats."""
    is_flipped: bool = False
    """Whether the last two dimensions are exchanged."""
    scalings: tuple[float, ...] = ()
    """One for each two factors."""

    def split(self, tensors: Sequence[Any]) -> tuple[list[Factors], Sequence[Any]]:
        """The factors among the tensors, with their scalings; and values and scales."""
        factors = zip(tensors[::2], tensors[1::2], self.scalings, strict=False)
        return list(factors), tensors[2 * len(self.scalings) :]

    def floats(self, tensors: Sequence[Any]) -> torch.Tensor:
        """The dequantised weight, with what adapters add."""
        added, parts = self.split(tensors)
        floats = self.form.floats(parts[0], parts[1:], self.dtype)
        for lhs, rhs, scaling in added:  # of a stack of experts, or of one
            if lhs.dim() == 3 and len(lhs) == 1:  # of a matrix, or a stack of one, to which PEFT adds the product
                floats += (lhs @ rhs * scaling)[0].to(floats.dtype)
                continue
            add = torch.Tensor.baddbmm_ if floats.dim() == 3 else torch.Tensor.addmm_
            add(floats, lhs, rhs, alpha=scaling)
        return floats.transpose(-2, -1) if self.is_flipped else floats


class PackedWeight(torch.Tensor):
    """What a packed parameter looks like to code that computes with it; its floats exist while they are used."""

    look: Look
    tensors: Sequence[Any]
    _is_hf_initialized = True
    """For transformers, which draws no values for it next to those of a module that lacks others."""

    @staticmethod
    def __new__(cls, look: Look, tensors: Sequence[Any]) -> "PackedWeight":
        """A view of gathered bytes (or of shards, of which it tells shape, dtype and device alone)."""
        _, (values, *_) = look.split(tensors)
        shape = [*values.shape[:-2], *look.form.shape[-2:]]
        if look.is_flipped:
            shape[-2:] = reversed(shape[-2:])
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=look.dtype, device=values.device)
        self.look, self.tensors = look, tensors
        return self

    def floats(self) -> torch.Tensor:
        """The dequantised weight, with what adapters add."""
        return self.look.floats(self.tensors)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's names differ
        """Shape, dtype and codec."""
        return f"PackedWeight({tuple(self.shape)}, {self.dtype}, {self.look.form.codec})"

    @classmethod
    def __torch_function__(  # torch annotates an instance method
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Multiply without keeping floats; other operations take the floats, which autograd then may keep."""
        kwargs = kwargs or {}
        if func in _LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if (own := _OWN.get(func)) is not None and (done := own(*args, **kwargs)) is not NotImplemented:
            return done
        name = str(getattr(func, "__name__", ""))
        if args and isinstance(args[0], PackedWeight) and (name in _WRITES or re.fullmatch("[a-z].*[^_]_", name)):
            raise ConfigError(
                f"{args[0]!r} is quantised as stored, and nothing can be added to it ({name}). Leave adapters next to "
                "their base; hf-fsdp export BASE OUT --adapter ADAPTER merges them into floats."
            )
        args, kwargs = tree_map_only(PackedWeight, PackedWeight.floats, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Refuse code that gets past torch's Python functions, which take the floats: this tensor has no memory."""
        raise ConfigError(f"{func} cannot compute with a weight that is quantised as stored. Use dequantize=True.")


class _Product(torch.autograd.Function):
    """The product of activations and a packed weight (out, in), which is dequantised in either direction; or of groups
    of rows, which end at `offs`, and a stack of weights (in, out)."""

    @staticmethod
    def forward(ctx: Any, look: Look, x: torch.Tensor, bias: Any, offs: Any, *tensors: torch.Tensor) -> Any:
        ctx.look, ctx.dtype, ctx.is_folded = look, x.dtype, _is_folded(x)
        weight = look.floats(tensors)
        is_used = any(each.requires_grad for each in tensors[: 2 * len(look.scalings)])
        ctx.save_for_backward(x if is_used else None, offs, *tensors)
        if offs is not None:
            return functional.grouped_mm(x, weight, offs=offs)
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, offs, *tensors = ctx.saved_tensors
        look, of_x, of_bias = ctx.look, None, None
        if ctx.needs_input_grad[1]:
            weight = look.floats(tensors).to(gradient.dtype)
            if offs is not None:
                of_x = functional.grouped_mm(gradient, weight.transpose(-2, -1), offs=offs)
            elif ctx.is_folded:
                of_x = _rows(gradient).mm(weight).view(*gradient.shape[:-1], weight.shape[1])
            else:
                stack = gradient.reshape(-1, *gradient.shape[-2:])
                of_x = stack.bmm(weight.expand(len(stack), *weight.shape)).view(*gradient.shape[:-1], weight.shape[1])
            of_x = of_x.to(ctx.dtype)
            del weight
        if ctx.needs_input_grad[2]:
            of_bias = _rows(gradient).sum(0)
        added, parts = look.split(tensors)
        of_factors: list[torch.Tensor | None] = [None] * (2 * len(added))
        if x is not None:
            of_weight = _of_stored_weight(x.to(gradient.dtype), gradient, offs, look.is_flipped)
            for i, (lhs, rhs, scaling) in enumerate(added):
                of_factors[2 * i] = scaling * (of_weight.to(rhs.dtype) @ rhs.transpose(-2, -1))
                of_factors[2 * i + 1] = scaling * (lhs.transpose(-2, -1) @ of_weight.to(lhs.dtype))
        return None, of_x, of_bias, None, *of_factors, *(None for _ in parts)


def product(x: torch.Tensor, look: Look, tensors: Sequence[Any], bias: Any = None, offs: Any = None) -> torch.Tensor:
    """`functional.linear` with a packed matrix; with `offs`, `functional.grouped_mm` with a stack of such."""
    output: torch.Tensor = _Product.apply(look, x, bias, offs, *tensors)  # type: ignore[no-untyped-call]
    return output


def _of_stored_weight(x: torch.Tensor, gradient: torch.Tensor, offs: Any, is_flipped: bool) -> torch.Tensor:
    """The gradient of the weight as its form has it, whose product is `_Product`'s."""
    if offs is not None:
        of_weight = functional.grouped_mm(x.t(), gradient, offs=offs)
        return of_weight.transpose(-2, -1) if is_flipped else of_weight
    return _rows(x).t().mm(_rows(gradient)) if is_flipped else _rows(gradient).t().mm(_rows(x))


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _is_folded(x: torch.Tensor) -> bool:
    """Whether torch multiplies all rows of an input as one matrix (`should_fold` in its `LinearAlgebra.cpp`); if not,
    the last bit is the same where rows of gradients are multiplied as a stack, too."""
    return all(x.stride(i) == x.stride(i + 1) * x.shape[i + 1] for i in range(x.dim() - 2))


# ---- torch's functions ----


def _index(weight: PackedWeight, index: Any) -> Any:
    is_one = isinstance(index, int) or (isinstance(index, torch.Tensor) and index.dim() == 0 and not index.is_complex())
    if not is_one or len(weight.shape) != 3:
        return NotImplemented
    added, parts = weight.look.split(weight.tensors)
    factors = [each if len(lhs) == 1 else each[index] for lhs, rhs, _ in added for each in (lhs, rhs)]
    return PackedWeight(weight.look, [*factors, *(part[index] for part in parts)])


def _flip(weight: PackedWeight, *dims: int) -> Any:
    last = {len(weight.shape) - 1, len(weight.shape) - 2}
    if dims and {dim % len(weight.shape) for dim in dims} != last:
        return NotImplemented
    return PackedWeight(replace(weight.look, is_flipped=not weight.look.is_flipped), weight.tensors)


def _times(x: Any, weight: Any, bias: Any = None, offs: Any = None) -> Any:
    """The product with a packed weight on the right, and no other."""
    if isinstance(x, PackedWeight) or not isinstance(weight, PackedWeight):
        return NotImplemented
    return product(x, weight.look, weight.tensors, bias, offs)


def _matmul(x: Any, weight: Any, bias: Any = None) -> Any:
    is_matrix = isinstance(weight, PackedWeight) and len(weight.shape) == 2
    return _times(x, _flip(weight), bias) if is_matrix else NotImplemented


def _addmm(bias: Any, x: Any, weight: Any, **factors: Any) -> Any:
    return NotImplemented if factors or bias.dim() != 1 else _matmul(x, weight, bias)


def _grouped(x: Any, weight: Any, *, offs: Any = None, **others: Any) -> Any:
    is_other = offs is None or any(option is not None for option in others.values())
    return NotImplemented if is_other else _times(x, weight, offs=offs)


def _looks() -> Iterator[Any]:
    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_meta", "is_cuda", "layout", "is_leaf"):
        yield getattr(torch.Tensor, name).__get__
    for name in ("size", "dim", "numel", "nelement", "is_floating_point", "is_complex", "element_size", "__len__"):
        yield getattr(torch.Tensor, name)


_LOOKS = frozenset(_looks())
_WRITES = ("__set__", "__setitem__")

_OWN: Mapping[Any, Callable[..., Any]] = {
    torch.Tensor.data.__get__: lambda weight: weight,  # type: ignore[attr-defined]
    functional.linear: _times,
    torch._grouped_mm: _grouped,  # as which torch's own `grouped_mm` comes here
    torch.addmm: _addmm,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.Tensor.__getitem__: _index,
    torch.Tensor.transpose: _flip,
    torch.transpose: _flip,
    torch.Tensor.t: _flip,
    torch.Tensor.mT.__get__: _flip,  # type: ignore[attr-defined]
    torch.Tensor.T.__get__: _flip,  # type: ignore[attr-defined]
}
