"""4 bits of bitsandbytes: the flattened weight, two codes to a byte, in blocks that share a scale; each block is a row.

Under double quantisation the scales are bytes, less their mean, with scales of their own.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_fsdp_tools.modeling.codecs.base import Codec, Scales, Shape
from hf_fsdp_tools.modeling.packed_weight import PackedForm, PackedPart

NESTED_BLOCKSIZE = 256
"""Scales per scale of their own under double quantisation (source: `functional.quantize_4bit` of bitsandbytes 0.50)."""


@dataclass(frozen=True, kw_only=True)
class FourBits(Codec):
    """Codes of `kind`, "nf4" or "fp4". Which layers have them says transformers (`modeling.four_bits`)."""

    kind: str
    block: int = 64
    is_nested: bool = False
    storage: torch.dtype = torch.uint8
    """The dtype that bytes pass for."""

    def layout(self, shape: Shape) -> PackedForm:
        f32, rows = torch.float32, shape[-2] * shape[-1] // self.block
        scale = PackedPart(name=".weight.absmax", dtype=f32, ndim=1, block=(1, self.block))
        scales = {"scale": scale}
        if self.is_nested:
            every: Any = {"dtype": f32, "block": (rows, self.block), "is_whole": True}
            scales = {
                "scale": replace(scale, dtype=torch.uint8),
                "nested scale": replace(scale, name=".weight.nested_absmax", block=(NESTED_BLOCKSIZE, self.block)),
                "code": PackedPart(name=".weight.nested_quant_map", ndim=1, elements=256, **every),  # of each byte
                "offset": PackedPart(name=".weight.offset", ndim=0, **every),
            }
        packed = (1, 2 * self.storage.itemsize)
        values = PackedPart(name="", dtype=self.storage, ndim=2, block=packed, is_column=True)
        return replace(self._form(shape, values, scales), flat_block=self.block)

    def decode(self, values: Tensor, scales: Scales, dtype: torch.dtype) -> Tensor:
        """By bitsandbytes' own kernel; of double quantisation, its scales before (`functional.dequantize_4bit`)."""
        import bitsandbytes  # noqa: F401  # registers the kernels

        scale = scales["scale"]
        if "nested scale" in scales:
            scale = scales["code"][0][scale.int()] * scales["nested scale"] + scales["offset"]
        bytes_ = values.view(torch.uint8)
        rows, block = bytes_.shape[0], 2 * bytes_.shape[1]
        ops: Any = torch.ops.bitsandbytes
        floats: Tensor = ops.dequantize_4bit(
            bytes_.reshape(-1, 1), scale.reshape(-1), block, self.kind, (rows, block), dtype
        )
        return floats
