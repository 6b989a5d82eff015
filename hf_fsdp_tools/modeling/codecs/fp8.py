"""Fine-grained FP8 as transformers and DeepSeek store it: 8-bit floats, or 4-bit ones, with scales of blocks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from hf_fsdp_tools.modeling.codecs import base
from hf_fsdp_tools.modeling.codecs.base import Choice, Codec, Config, Found, Scales, Shape, Tensors
from hf_fsdp_tools.modeling.packed_weight import PackedForm, PackedPart

_SLAB_VALUES = 2**22
"""Values that are quantised at a time. (assumed)"""


@dataclass(frozen=True, kw_only=True)
class FineGrained(Codec):
    """Values times the scale of their block, in float32."""

    methods: ClassVar[tuple[str, ...]] = ("fp8", "mxfp8")
    needs_config: ClassVar[bool] = False
    scales_of: ClassVar[Mapping[str, str]] = {"weight_scale_inv": "weight"}

    values: torch.dtype = torch.float8_e4m3fn
    """int8 holds two values of 4 bits in a byte."""
    scales: torch.dtype = torch.float32
    block: tuple[int, int] = (0, 0)
    """The rows and columns that share a scale; zeros: all."""
    name: str = "_scale_inv"
    scale_dims: int | None = None
    """Dimensions of the stored scales; None: as many as the weight has."""
    is_power: bool = False
    """Whether scales are powers of two, whatever their dtype."""

    @property
    def method(self) -> str:
        return "fp8" if self.values.is_floating_point else "fp4"

    @property
    def encodes(self) -> bool:
        return self.values.is_floating_point

    def layout(self, shape: Shape) -> PackedForm:
        block = self.block[0] or shape[-2], self.block[1] or shape[-1]
        ndim = len(shape) if self.scale_dims is None else self.scale_dims
        packed = 1 if self.values.is_floating_point else 2
        values = PackedPart(name="", dtype=self.values, ndim=len(shape), block=(1, packed))
        scale = PackedPart(name=self.name, dtype=self.scales, ndim=ndim, block=block)
        return self._form(shape, values, {"scale": scale})

    def decode(self, values: Tensor, scales: Scales, dtype: torch.dtype) -> Tensor:
        return in_fp32(values, scales, dtype)

    def encode(self, matrix: Tensor, values: Any, scales: Any) -> list[Tensor]:
        return quantize(matrix, self.block, values, scales, is_power=self.is_power)

    @classmethod
    def find(cls, values: Any, tensors: Tensors, config: Config) -> Found | None:
        module, _, last = values.key.rpartition(".")
        names = ("_scale_inv", *(".scale", ".qscale_weight") * (last == "weight"))
        if values.dtype not in (*base.FP8, torch.int8):
            return None
        near = {name: tensors.get((module if name[0] == "." else values.key) + name) for name in names}
        name, scales = next(((name, each) for name, each in near.items() if each is not None), ("", None))
        if scales is None:
            return None
        base.expect(scales, (*base.SCALES, *base.EXPONENTS))
        packed = 2 if values.dtype == torch.int8 else 1
        said, shape = base.block_in("weight_block_size", config.get("weight_block_size")), base.widened(values, packed)
        block = base.block_of(shape, scales, said, packed)
        counts = [[-(-n // size) for n, size in zip(shape[-2:], each, strict=True)] for each in (block, said or block)]
        different = (n > 1 and a != b for n, a, b in zip(counts[0], block, said, strict=False))
        has_other = counts[0] == counts[1] and any(different)
        codec = cls(
            values=values.dtype,
            scales=scales.dtype,
            block=block,
            name=name,
            scale_dims=len(scales.shape),
            is_power=config.get("scale_fmt") == "ue8m0" or scales.dtype in base.EXPONENTS,
        )
        stored = {"packed": values, "scale": scales}
        return Found(key=values.key, codec=codec, shape=shape, stored=stored, has_other_blocks=has_other)

    @classmethod
    def by_config(cls, model: nn.Module, config: Config) -> Choice:
        """As transformers' `FP8Linear` and `FP8Experts` have it; by `expert_dtype`, experts of 4 bits."""
        names, is_power = base.left_out(model, config), config.get("scale_fmt") == "ue8m0"
        size = config.get("weight_block_size")
        scales = torch.float8_e8m0fnu if is_power else torch.float32
        block = (0, 0) if size is None else (int(size[0]), int(size[1]))
        in_8_bits = cls(scales=scales, block=block, scale_dims=0 if size is None else None, is_power=is_power)
        in_4_bits = cls(values=torch.int8, scales=scales, block=(1, 32), name=".scale", is_power=is_power)

        def choose(fqn: str, module: nn.Module) -> Codec | None:
            if base.is_named(fqn, names):
                return None
            return in_4_bits if config.get("expert_dtype") == "fp4" and not isinstance(module, nn.Linear) else in_8_bits

        return choose


def in_fp32(values: Tensor, scales: Scales, dtype: torch.dtype) -> Tensor:
    """Values, also of 4 bits two to a byte, times the scale in float32."""
    floats: Tensor = Fp8Dequantize(None)._dequantize_one(values, scales["scale"], dtype)
    return floats


def quantize(
    matrix: Tensor, block: tuple[int, int], values: Any, scales: Any, *, is_power: bool = False
) -> list[Tensor]:
    """FP8 values and scales of a matrix, as transformers' `Fp8Quantize` makes them (5.23), in stored dtypes and shapes.

    All is computed in float32, in slabs of rows; scales are rounded to their dtype before values are divided by them.
    `block`: the rows and columns that share a scale. `is_power`: scales are powers of two, rounded up, whatever their
    dtype; they are where they are stored as exponents.
    """
    (high, wide), columns, most = block, matrix.shape[1], torch.finfo(values.dtype).max
    is_exponent = scales.dtype in base.EXPONENTS
    is_power = is_power or is_exponent
    found: list[tuple[Tensor, Tensor]] = []
    for rows in torch.split(matrix, max(1, _SLAB_VALUES // (columns * high)) * high):
        blocks = functional.pad(rows.float(), (0, -columns % wide, 0, -len(rows) % high))
        blocks = blocks.view(-1, high, blocks.shape[1] // wide, wide)
        amax = blocks.abs().amax((1, 3))
        factors = torch.where(amax > most * torch.finfo(torch.float32).tiny, most / amax, 1.0)
        scale = 1.0 / factors
        if is_power:
            mantissa, exponent = torch.frexp(scale)
            scale = (exponent + 127 - (mantissa == 0.5).int() << 23).view(torch.float32)
        else:
            scale = scale.to(scales.dtype).clamp(min=torch.finfo(scales.dtype).tiny).float()
        if is_power or scales.dtype != torch.float32:
            factors = 1.0 / scale
        divided = (blocks * factors[:, None, :, None]).flatten(0, 1).flatten(1)[: len(rows), :columns]
        found.append((divided.clamp(-most, most).to(values.dtype).view(torch.uint8), scale))
    packed, scale = (torch.cat(slabs) for slabs in zip(*found, strict=True))
    stored = scale.to(torch.float8_e8m0fnu).view(scales.dtype) if is_exponent else scale.to(scales.dtype)
    return [packed.view(values.dtype).reshape(values.shape), stored.reshape(scales.shape)]
