"""What a stored format of weights is: a class that lays a weight out, finds it among stored tensors, and makes floats.

    values    of the matrix, in 8 bits, or several to an element      codec.layout(shape).values
    scales    of its blocks, zero points and the like                 codec.layout(shape).scales

A codec is a value: it has what the config or the tensors of one weight say (sizes of blocks, bits, dtypes). Its names
of parts are what follows the name of the plain weight or, after a ".", the last part of the name.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.quantizers.base import get_keys_to_not_convert

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.modeling.packed_weight import PackedForm, PackedPart, unpacked
from hf_fsdp_tools.modeling.patterns import matched
from hf_fsdp_tools.text import dtype_name, quoted

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = (torch.float32, torch.bfloat16, torch.float16)
EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)
"""Dtypes of 8-bit floats, of scales, and of scales that are powers of two, stored as exponents."""

DO_ONCE = "make a plain checkpoint of it once (transformers' model.dequantize() and save_pretrained)"
BY_ACTIVATION = f"orders its columns by activation, so that no block of columns has one scale; {DO_ONCE}"
"""What is said of columns that lie in groups of another order than the file's."""

Shape = tuple[int, ...]
Config = Mapping[str, Any]
Tensors = Mapping[str, Any]
"""Stored tensors by name, of which key, file, dtype, shape and strides are looked at."""
Scales = Mapping[str, Tensor]
Choice = Callable[[str, nn.Module], "Codec | None"]
"""(name in the checkpoint, linear layer or module of experts) to the codec of its weights; None: plain."""


class DoesNotFit(Exception):
    """Values and scales that do not belong together; says why."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """A weight that a codec found among stored tensors."""

    key: str
    """The name that the plain tensor would have."""
    codec: "Codec"
    shape: Shape
    stored: Mapping[str, Any]
    """The stored values ("packed") and, by the codec's names, what lies next to them."""
    groups: Any = None
    """What says the group of each row, where a file has it."""
    has_other_blocks: bool = False
    """Whether its scales lie on other blocks than the config says."""

    def form(self) -> PackedForm:
        """The codec's layout of the weight, of which all that is stored must have the shape, in the order of rows."""
        if len(self.shape) < 2:
            raise DoesNotFit("expected a matrix, or a stack of matrices")
        for own in self.stored.values():
            row_major(own)
        form = self.codec.layout(self.shape)
        looks = form.looks(self.key).values()
        for name, part, (_, shape) in zip(self.stored, form.parts("").values(), looks, strict=True):
            own = self.stored[name]
            is_shared = len(self.shape) > 2 and part.block[0] > form.rows  # by several matrices
            if own.shape != shape and not is_shared:
                raise DoesNotFit(f"{own.key!r} next to it is {list(own.shape)}, expected {list(shape)}")
        return form


@dataclass(frozen=True, kw_only=True)
class Codec:
    """One stored format; its fields are what differs between weights that are stored so."""

    methods: ClassVar[tuple[str, ...]] = ()
    """What configs name it."""
    needs_config: ClassVar[bool] = True
    """Whether names, dtypes and shapes alone do not tell it."""
    scales_of: ClassVar[Mapping[str, str]] = {}
    """How names of scales end, and in their place those of values: scales without values are named."""

    def layout(self, shape: Shape) -> PackedForm:
        """How a plain weight of this shape, (…, rows, columns), is stored."""
        raise NotImplementedError  # for each format to answer

    @property
    def method(self) -> str:
        """What it is called where no config names a method."""
        return self.methods[0]

    def converted(self) -> "Codec":
        """The same for values that a conversion of the model takes, of which transformers makes floats as it does."""
        return self

    def decode(self, values: Tensor, scales: Scales, dtype: torch.dtype) -> Tensor:
        """The floats, [rows, values], of stored values, [rows, elements], and of what belongs to the blocks of each row
        by the layout's names, [rows, blocks] each. A value depends on nothing but its own element and scales."""
        raise NotImplementedError  # for each format to answer

    @property
    def encodes(self) -> bool:
        """Whether `encode` makes values and scales of floats alone: in some formats, this takes data."""
        return False

    def encode(self, matrix: Tensor, values: Any, scales: Any) -> list[Tensor]:
        """Values and scales of a matrix, in the dtypes and shapes of these stored tensors."""
        raise NotImplementedError  # for each format to answer

    @classmethod
    def find(cls, values: Any, tensors: Tensors, config: Config) -> Found | None:
        """The weight whose values this tensor has, if it is stored so.

        Raises:
            DoesNotFit: what lies next to it has other dtypes or shapes.
        """
        raise NotImplementedError  # for each format to answer

    @classmethod
    def by_config(cls, model: nn.Module, config: Config) -> Choice:
        """Which layers of a plain model a config means, whose checkpoint is not at hand.

        Raises:
            ConfigError: no such weights can stay as they are stored.
        """
        raise NotImplementedError  # for each format to answer

    def _form(
        self, shape: Shape, values: PackedPart, scales: Mapping[str, PackedPart], *, is_transposed: bool = False
    ) -> PackedForm:
        dtype = torch.bfloat16  # until it is known in which place of a model the weight comes
        return PackedForm(
            shape=shape, dtype=dtype, codec=self, is_transposed=is_transposed, values=values, scales=scales
        )


# ---- what codecs ask of tensors ----


def beside(tensors: Tensors, key: str, dtypes: Iterable[torch.dtype]) -> Any:
    """The stored tensor of this name next to values, which must hold one of these dtypes."""
    if (tensor := tensors.get(key)) is None:
        raise DoesNotFit(f"it has no {key!r} next to it")
    return expect(tensor, dtypes)


def expect(tensor: Any, dtypes: Iterable[torch.dtype]) -> Any:
    """The same tensor, which must hold one of these dtypes."""
    if tensor.dtype not in dtypes:
        names = " or ".join(dtype_name(dtype) for dtype in dtypes)
        raise DoesNotFit(f"{tensor.key!r} next to it holds {dtype_name(tensor.dtype)}, expected {names}")
    return tensor


def row_major(tensor: Any) -> Shape:
    """The shape of a stored tensor that does not lie transposed."""
    if tensor.strides is not None:
        raise DoesNotFit(f"{tensor.key!r} is stored transposed; save it as safetensors")
    return tuple(tensor.shape)


def widened(values: Any, packed: int) -> Shape:
    """The shape of the plain weight, of which a stored element holds so many values of a row."""
    return (*values.shape[:-1], values.shape[-1] * packed) if values.shape else ()


def block_of(
    shape: Shape, scales: Any, config_block: Sequence[int], packed: int = 1, *, config_first: bool = False
) -> tuple[int, int]:
    """Rows and columns of a weight that share a scale: by the number of scales, as in transformers, else as the config
    says.

    With `config_first` (compressed-tensors), the config decides where it fits.
    """
    if len(shape) < 2:
        raise DoesNotFit("expected a matrix, or a stack of matrices")
    *outer, rows, columns = shape
    count, counts = math.prod(outer), row_major(scales)
    if math.prod(counts) == 1:
        return count * rows, columns
    if len(counts) == 1 and outer and counts[0] == count:  # a scale for each matrix
        return rows, columns
    down, across = counts[-2:] if len(counts) > 1 else (0, 0)
    is_complete = down > 0 and across > 0 and math.prod(counts[:-2]) == count
    high, wide = config_block or (0, 0)
    config_fits = high > 0 and (-(-rows // high), -(-columns // wide)) == (down, across)
    is_even = is_complete and not rows % down and not columns % across and not columns // across % packed
    if is_even and not (config_first and config_fits):
        return rows // down, columns // across
    if is_complete and config_fits and not (outer and rows % high) and not wide % packed:
        return high, wide
    raise DoesNotFit(
        f"its scales {scales.key!r} {list(counts)} lie on no blocks of it"
        + (f", nor on blocks of {high} x {wide} as the config says" if config_block else "")
    )


# ---- what codecs ask of configs ----


def block_in(name: str, value: Any) -> tuple[int, ...]:
    """The rows and columns of a block, of which the config says the size; empty where it says none."""
    if not value:
        return ()
    size: Any = value
    if isinstance(value, str):
        size = [int(n) if n.strip().isdigit() else 0 for n in value.strip("[]()").replace("x", ",").split(",")]
    if isinstance(size, (list, tuple)) and len(size) == 2 and all(type(n) is int and n > 0 for n in size):
        return tuple(size)
    raise DoesNotFit(f"the config's {name} is {quoted(value)}, expected two numbers above 0")


def cannot_stay(what: str) -> ConfigError:
    """What is raised for a weight that a config means and that must be dequantised."""
    return ConfigError(f"dequantize=False: {what} cannot be kept as stored. Leave dequantize out.")


def left_out(model: Any, config: Config, *, usual: bool = False) -> list[str]:
    """Names of modules that transformers leaves plain; `usual`: also the head where the config names others."""
    named = config.get("modules_to_not_convert")
    kept = list(get_keys_to_not_convert(model)) if named is None or usual else []
    return [*kept, *(named or ()), *(getattr(model, "_keep_in_fp32_modules", None) or ())]


def is_named(fqn: str, names: Sequence[str]) -> bool:
    """Whether one of these is the name, its end, or a pattern of it or of a module above, as transformers has it; of
    which older versions (5.17) take "mlp.gate" for "mlp.gate_proj"."""
    ends = r"(?:(?<=\.)|(?=\.|$))"
    return any(fqn.endswith(each) or matched(f"(?:{each}){ends}", fqn) for each in names)


# ---- how several codecs make floats ----


def scaled(values: Tensor, scales: Scales, dtype: torch.dtype) -> Tensor:
    """Values of compressed-tensors: less the zero point and times the scale, in the dtype of the scale."""
    scale = scales["scale"]
    floats = values.to(scale.dtype).view(*scale.shape, -1)
    if "zero point" in scales:
        floats = floats - scales["zero point"].to(scale.dtype).unsqueeze(2)
    return (floats * scale.unsqueeze(2)).to(dtype).view(values.shape)


def from_words(values: Tensor, scales: Scales, dtype: torch.dtype, *, at: Sequence[int], plus: int = 0) -> Tensor:
    """Integers side by side in int32 words, at these bits, or one by one; `plus` is added to words of zero points."""
    first_bits = torch.tensor(at, dtype=torch.int32, device=values.device)

    def one_by_one(of: Tensor) -> Tensor:
        return unpacked(of.unsqueeze(2), first_bits, 32 // len(at)).flatten(1) if of.dtype == torch.int32 else of

    near = {name: one_by_one(each + plus) if name == "zero point" else each for name, each in scales.items()}
    return scaled(one_by_one(values), near, dtype)
