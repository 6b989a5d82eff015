"""How low-precision values and their scales become floats, by the names that stored forms have for the rules.

A rule takes each value with its scale alone, so a part of a block depends on nothing outside it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

Rule = Callable[[torch.Tensor, Mapping[str, torch.Tensor], torch.dtype], torch.Tensor]
"""(stored values, [rows, stored elements]; what belongs to the blocks of each row, [rows, blocks] each; dtype) to the
floats of that dtype, [rows, values]."""


def _scaled_in_fp32(values: torch.Tensor, scales: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Fine-grained FP8, and 4-bit values two to a byte: times the scale in float32."""
    floats: torch.Tensor = Fp8Dequantize(None)._dequantize_one(values, scales["scale"], dtype)
    return floats


def _mxfp4(values: torch.Tensor, scales: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """MXFP4 as gpt-oss stores it: blocks of 32 values that share an exponent."""
    exponents = scales["scale"].unsqueeze(0)
    blocks = values.view(*exponents.shape, -1)
    floats: torch.Tensor = convert_moe_packed_tensors(blocks, exponents, dtype=dtype)[0].t()
    return floats


def _scaled(values: torch.Tensor, scales: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Values of compressed-tensors: less the zero point and times the scale, in the dtype of the scale."""
    scale = scales["scale"]
    floats = values.to(scale.dtype).view(*scale.shape, -1)
    if "zero point" in scales:
        floats = floats - scales["zero point"].to(scale.dtype).unsqueeze(2)
    return (floats * scale.unsqueeze(2)).to(dtype).view(values.shape)


def unpacked(words: torch.Tensor, first_bits: torch.Tensor, bits: int) -> torch.Tensor:
    """The signed integers of so many bits that begin at these bits of int32 words, stored less their smallest value."""
    return (((words >> first_bits) & ((1 << bits) - 1)) - (1 << bits - 1)).to(torch.int8)


def _packed(
    values: torch.Tensor, scales: Mapping[str, torch.Tensor], dtype: torch.dtype, *, at: Sequence[int], plus: int = 0
) -> torch.Tensor:
    """Integers side by side in int32 words, at these bits, or one by one; `plus` is added to words of zero points.

    For compressed-tensors; for GPTQ as in GPTQModel (`PackableQuantLinear.dequantize_weight`, and
    `convert_gptq_v1_to_v2_format_module` for what is added, with carries); for AWQ as in AutoAWQ (`dequantize_gemm`).
    """
    first_bits = torch.tensor(at, dtype=torch.int32, device=values.device)

    def one_by_one(of: torch.Tensor) -> torch.Tensor:
        return unpacked(of.unsqueeze(2), first_bits, 32 // len(at)).flatten(1) if of.dtype == torch.int32 else of

    beside = {name: one_by_one(each + plus) if name == "zero point" else each for name, each in scales.items()}
    return _scaled(one_by_one(values), beside, dtype)


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The 4-bit floats of the OCP Microscaling formats, by their codes; bit 3 is the sign."""


def _nvfp4(values: torch.Tensor, scales: Mapping[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """4-bit floats two to a byte: times the scale of their group over the weight's own, by way of bfloat16."""
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float32, device=values.device)
    floats = table[torch.stack([values & 15, values >> 4], -1).flatten(1).int()]
    scale = scales["scale"].to(torch.float32) / scales["global scale"]
    floats = floats.view(*scale.shape, -1) * scale.unsqueeze(2)
    return floats.to(torch.bfloat16).to(dtype).flatten(1)


def _of_bitsandbytes(
    values: torch.Tensor, scales: Mapping[str, torch.Tensor], dtype: torch.dtype, *, kind: str
) -> torch.Tensor:
    """4-bit codes, two to a byte, by bitsandbytes' own kernel; of double quantisation, its scales before
    (`functional.dequantize_4bit`)."""
    import bitsandbytes  # noqa: F401  # registers the kernels

    scale = scales["scale"]
    if "nested scale" in scales:
        scale = scales["code"][0][scale.int()] * scales["nested scale"] + scales["offset"]
    bytes_ = values.view(torch.uint8)
    rows, block = bytes_.shape[0], 2 * bytes_.shape[1]
    ops: Any = torch.ops.bitsandbytes
    floats: torch.Tensor = ops.dequantize_4bit(
        bytes_.reshape(-1, 1), scale.reshape(-1), block, kind, (rows, block), dtype
    )
    return floats


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "fp4": partial(_of_bitsandbytes, kind="fp4"),
        "mxfp4": _mxfp4,
        "nf4": partial(_of_bitsandbytes, kind="nf4"),
        "nvfp4": _nvfp4,
        "scaled": _scaled,
        "scaled in fp32": _scaled_in_fp32,
        "awq int4": partial(_packed, at=(0, 16, 4, 20, 8, 24, 12, 28)),
        "gptq int4": partial(_packed, at=range(0, 32, 4), plus=0x11111111),
        "gptq int8": partial(_packed, at=range(0, 32, 8), plus=0x01010101),
        "packed int4": partial(_packed, at=range(0, 32, 4)),
        "packed int8": partial(_packed, at=range(0, 32, 8)),
    }
)
"""Rules by the names that `QuantizedTensor` has for them."""
