"""How floats become low-precision values and scales again: inverses of `float_rules`, as each format publishes them.

All is computed in float32; a scale is rounded to its stored dtype before values are divided by it.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch.nn import functional

from hf_fsdp_tools.modeling.float_rules import WORDS

_SLAB_VALUES = 2**22
"""Values that are quantised at a time. (assumed)"""

Parts = dict[str, torch.Tensor]
"""Values ("packed") and scales by the names that the rules have for them."""


def quantize(
    matrix: torch.Tensor, rule: str, stored: Mapping[str, torch.Tensor], block: tuple[int, int], **options: bool
) -> Parts:
    """Values and scales of a matrix of floats, in the dtypes and shapes of what is `stored` in their place.

    `rule` is the name in `float_rules`; `block`, the rows and columns that share a scale. The options:

        is_compressed   of 8 bits, compressed-tensors stores them and not transformers' fine-grained FP8
        is_symmetric    all zero points, which are stored, are the middle of the range
        is_power        scales are powers of two, whatever their dtype
    """
    (rows, columns), (high, wide) = matrix.shape, block
    kind = _compressed if options.get("is_compressed") and rule not in _RULES else _RULES.get(rule, _fine_grained)
    if "global scale" in stored:
        stored = {**stored, "global scale": _global_scale(matrix, stored["global scale"])}
    step = max(1, _SLAB_VALUES // (columns * high)) * high
    found: dict[str, list[torch.Tensor]] = {}
    for first in range(0, rows, step):
        slab = matrix[first : first + step].float()
        down, across = -(-len(slab) // high), -(-columns // wide)
        slab = functional.pad(slab, (0, across * wide - columns, 0, down * high - len(slab)))
        parts = kind(slab.view(down, high, across, wide).transpose(1, 2), stored, options)
        values = parts.pop("packed").transpose(1, 2).reshape(down * high, across * wide)
        found.setdefault("packed", []).append(values[: min(step, rows - first), :columns])
        for name, part in parts.items():
            found.setdefault(name, []).append(part)
    results = {name: _joined(parts) for name, parts in found.items()}
    at, plus = WORDS.get(rule, ((), 0))
    packed = _packed(results["packed"], stored["packed"], at)
    results |= {"packed": packed, **{name: stored[name] for name in stored.keys() - results.keys()}}
    if (zero := results.get("zero point")) is not None and zero.dtype != stored["zero point"].dtype:
        results["zero point"] = _packed(zero, stored["zero point"], at) - plus
    return {name: result.reshape(stored[name].shape) for name, result in results.items()}


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Slabs as one tensor; torch does not join every dtype of 8 bits."""
    dtype = parts[0].dtype
    bits = [part.view(torch.uint8) if dtype.itemsize == 1 else part for part in parts]
    return torch.cat(bits).view(dtype)


# ---- packing ----


def _packed(codes: torch.Tensor, like: torch.Tensor, at: Sequence[int]) -> torch.Tensor:
    """Values as they are stored: one by one, or several to an element of a row or, for as many columns, of a column."""
    if not at and codes.numel() == like.numel():
        return codes
    if not at:
        return (codes[:, ::2] | codes[:, 1::2] << 4).view(like.dtype)
    if like.shape[-1] == codes.shape[-1]:
        return _in_words(codes.t(), at).t()
    return _in_words(codes, at)


def _in_words(codes: torch.Tensor, at: Sequence[int]) -> torch.Tensor:
    """Signed integers as int32 words, each less the smallest one and beginning at its bit; the last word is filled up
    with zeros."""
    unsigned = codes.to(torch.int32) + (1 << 32 // len(at) - 1)
    filled = functional.pad(unsigned, (0, -codes.shape[-1] % len(at)))
    shifts = torch.tensor(at, dtype=torch.int32, device=codes.device)
    return (filled.view(len(codes), -1, len(at)) << shifts).sum(-1).to(torch.int32)


# ---- rules ----


def _fine_grained(blocks: torch.Tensor, stored: Mapping[str, torch.Tensor], options: Mapping[str, bool]) -> Parts:
    """FP8 as transformers' `Fp8Quantize` makes it (5.23), with scales that are powers of two rounded up; FP4, two to a
    byte, by the same rule, as the kernels that DeepSeek publishes with its weights do."""
    values, dtype = stored["packed"].dtype, stored["scale"].dtype
    most = torch.finfo(values).max if values.is_floating_point else _E2M1_MAX
    amax, tiny = _amax(blocks), torch.finfo(torch.float32).tiny
    factors = torch.where(amax > most * tiny, most / amax, 1.0)
    scale = 1.0 / factors
    if is_power := options.get("is_power") or dtype in _EXPONENTS:
        mantissa, exponent = torch.frexp(scale)
        scale = _power(exponent - (mantissa == 0.5).int(), dtype)
    else:
        scale = scale.to(dtype).clamp(min=torch.finfo(dtype).tiny)
    if is_power or dtype != torch.float32:
        factors = 1.0 / _floats(scale)
    scaled = blocks * _spread(factors)
    return {"packed": _nearest(scaled, values), "scale": scale}


def _mxfp4(blocks: torch.Tensor, stored: Mapping[str, torch.Tensor], options: Mapping[str, bool]) -> Parts:
    """The OCP Microscaling Formats specification 1.0 (6.3): the exponent of a block is that of its largest value less
    that of the largest e2m1, 2; what is larger than 6 then saturates."""
    amax = _amax(blocks)
    exponent = torch.where(amax > 0, torch.frexp(amax).exponent - 3, -127)
    scale = _power(exponent, torch.uint8)
    return {"packed": _nearest(blocks / _spread(_floats(scale)), torch.uint8), "scale": scale}


def _compressed(blocks: torch.Tensor, stored: Mapping[str, torch.Tensor], options: Mapping[str, bool]) -> Parts:
    """8 bits of compressed-tensors (0.20), floats by `calculate_qparams` and `quantize`."""
    values, dtype = stored["packed"].dtype, stored["scale"].dtype
    if not values.is_floating_point:
        return _integers(blocks, stored, options, bits=8)
    scale = _not_zero(_amax(blocks) / torch.finfo(values).max, dtype)
    return {"packed": _nearest(blocks / _spread(scale.float()), values), "scale": scale}


def _integers(
    blocks: torch.Tensor, stored: Mapping[str, torch.Tensor], options: Mapping[str, bool], *, bits: int, least: int = 0
) -> Parts:
    """Integers of compressed-tensors (0.20), by `calculate_qparams` of least and largest value, with zero in between,
    and `quantize`; these are also the ranges of GPTQ (`find_params`) and AWQ (`pseudo_quantize_tensor`), whose search
    for better ones needs data. The zero points of the first format of GPTQ begin with 1 (`least`)."""
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1
    if "zero point" not in stored or options.get("is_symmetric"):
        scale = _not_zero(_amax(blocks) / ((high - low) / 2), stored["scale"].dtype)
        zero = torch.zeros_like(scale, dtype=torch.float32)
    else:
        smallest, largest = blocks.amin((2, 3)).clamp(max=0), blocks.amax((2, 3)).clamp(min=0)
        scale = _not_zero((largest - smallest) / (high - low), stored["scale"].dtype)
        zero = (low - smallest / scale.float()).round().clamp(low + least, high)
    codes = (blocks / _spread(scale.float()) + _spread(zero)).round().clamp(low, high).to(torch.int8)
    return {"packed": codes, "scale": scale} | ({"zero point": zero.to(torch.int8)} if "zero point" in stored else {})


def _nvfp4(blocks: torch.Tensor, stored: Mapping[str, torch.Tensor], options: Mapping[str, bool]) -> Parts:
    """NVFP4 of compressed-tensors (0.20), by `calculate_qparams` and `quantize` with a global scale."""
    whole = stored["global scale"]
    scale = (_amax(blocks) / _E2M1_MAX * whole).clamp(max=_E4M3_MAX).to(torch.float8_e4m3fn)
    of_zeros = torch.tensor(0.125).to(torch.float8_e4m3fn).view(torch.uint8)
    bits = scale.view(torch.uint8)
    scale = torch.where(bits == 0, of_zeros, bits).view(torch.float8_e4m3fn)
    return {"packed": _nearest(blocks / _spread(scale.float() / whole), torch.uint8), "scale": scale}


def _global_scale(matrix: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """`generate_gparam` of compressed-tensors (0.20); or what is stored, where it suffices: servers that join q, k and
    v take one scale for the three."""
    amax = matrix.abs().amax().float().clamp(min=torch.finfo(torch.float32).tiny)
    own = torch.nan_to_num(_E4M3_MAX * _E2M1_MAX / amax, posinf=1.0)
    return torch.minimum(stored, own)


_RULES: Mapping[str, Callable[[torch.Tensor, Mapping[str, torch.Tensor], Mapping[str, bool]], Parts]] = {
    "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
    "scaled": _compressed,
    **{name: partial(_integers, bits=32 // len(at), least=int(plus > 0)) for name, (at, plus) in WORDS.items()},
}

# ---- numbers ----

_E2M1_MAX, _E4M3_MAX = 6.0, 448.0

_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)

_BETWEEN = (0.25, 0.75 - 2**-24, 1.25, 1.75 - 2**-23, 2.5, 3.5 - 2**-22, 5.0)
"""The largest float32 that becomes each 4-bit float but the last: what is in the middle goes to the even code."""


def _amax(blocks: torch.Tensor) -> torch.Tensor:
    return torch.maximum(blocks.amax((2, 3)), -blocks.amin((2, 3))).abs()


def _spread(of_blocks: torch.Tensor) -> torch.Tensor:
    return of_blocks[:, :, None, None]


def _not_zero(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scales in their dtype; those of zeros are what compressed-tensors has for them."""
    rounded = scale.to(dtype)
    return torch.where(rounded == 0, torch.finfo(dtype).eps, rounded)


def _power(exponent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Two to the power of an exponent, as a float or as a stored exponent."""
    biased = (exponent + 127).clamp(0, 254)
    if dtype in _EXPONENTS:
        return biased.to(torch.uint8).view(dtype)
    return (biased.to(torch.int32) << 23).view(torch.float32).to(dtype)


def _floats(scale: torch.Tensor) -> torch.Tensor:
    if scale.dtype in _EXPONENTS:
        return scale.view(torch.float8_e8m0fnu).float()
    return scale.float()


def _nearest(scaled: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest 8-bit floats of a dtype, or codes of 4-bit floats (e2m1); what is too large becomes the largest."""
    if dtype.is_floating_point:
        most = torch.finfo(dtype).max
        return scaled.clamp(-most, most).to(dtype)
    codes = torch.bucketize(scaled.abs(), torch.tensor(_BETWEEN, device=scaled.device), out_int32=True)
    return (codes + 8 * torch.signbit(scaled)).to(torch.uint8)
