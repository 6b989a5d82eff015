"""Formats of compressed-tensors: 8-bit values, packed integers, and NVFP4, each with scales of channels, groups or
blocks."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from hf_fsdp_tools.modeling.arguments import as_dtype
from hf_fsdp_tools.modeling.codecs import base
from hf_fsdp_tools.modeling.codecs.base import Choice, Codec, Config, DoesNotFit, Found, Scales, Shape, Tensors
from hf_fsdp_tools.modeling.codecs.fp8 import in_fp32, quantize
from hf_fsdp_tools.modeling.packed_weight import PackedForm, PackedPart
from hf_fsdp_tools.modeling.patterns import matched
from hf_fsdp_tools.text import quoted


class Compressed(Codec):
    """What its formats have in common: a config has groups of layers, each with a format and a strategy."""

    methods: ClassVar[tuple[str, ...]] = ("compressed-tensors",)
    formats: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def of_group(cls, kind: str, weights: Config) -> Self | None:
        """The codec of a group of one of its formats; None where it does not read such weights."""
        raise NotImplementedError  # for each format to answer

    @classmethod
    def by_config(cls, model: nn.Module, config: Config) -> Choice:
        """The first group whose targets match a layer that is not ignored; experts are asked for as the layers that
        they are in the checkpoint."""
        groups = [
            (list(group.get("targets") or ()), _codec_of(_format(group, config), weights))
            for group, weights in _groups(config)
        ]
        ignored = list(config.get("ignore") or ())

        def choose(fqn: str, module: nn.Module) -> Codec | None:
            names = [fqn]
            if not isinstance(module, nn.Linear):
                names = [f"{fqn}.0.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
            kinds = [kind.__name__ for kind in type(module).__mro__] if isinstance(module, nn.Linear) else ["Linear"]
            if all(matches(name, kinds, ignored) for name in names):
                return None
            return next((codec for targets, codec in groups if any(matches(n, kinds, targets) for n in names)), None)

        return choose


@dataclass(frozen=True, kw_only=True)
class Scaled(Compressed):
    """8-bit floats or integers, of which each is multiplied by its scale in the dtype of the scale."""

    needs_config: ClassVar[bool] = False
    scales_of: ClassVar[Mapping[str, str]] = {"weight_scale": "weight"}
    formats: ClassVar[tuple[str, ...]] = ("float-quantized", "int-quantized", "naive-quantized")

    values: torch.dtype = torch.float8_e4m3fn
    scales: torch.dtype = torch.bfloat16
    block: tuple[int, int] = (0, 0)
    scale_dims: int | None = None
    has_zeros: bool = False
    is_converted: bool = False
    """Whether a conversion of the model takes the values: transformers multiplies these in float32."""

    def layout(self, shape: Shape) -> PackedForm:
        block = self.block[0] or shape[-2], self.block[1] or shape[-1]
        ndim = len(shape) if self.scale_dims is None else self.scale_dims
        scales = {"scale": PackedPart(name="_scale", dtype=self.scales, ndim=ndim, block=block)}
        if self.has_zeros:
            scales["zero point"] = replace(scales["scale"], name="_zero_point", dtype=self.values)
        return self._form(shape, PackedPart(name="", dtype=self.values, ndim=len(shape)), scales)

    def decode(self, values: Tensor, scales: Scales, dtype: torch.dtype) -> Tensor:
        return (in_fp32 if self.is_converted else base.scaled)(values, scales, dtype)

    @property
    def encodes(self) -> bool:
        return self.is_converted

    def encode(self, matrix: Tensor, values: Any, scales: Any) -> list[Tensor]:
        return quantize(matrix, self.block, values, scales)

    def converted(self) -> Codec:
        return replace(self, is_converted=True) if self.values in base.FP8 else self

    @classmethod
    def find(cls, values: Any, tensors: Tensors, config: Config) -> Found | None:
        is_weight = values.key.rpartition(".")[2] == "weight" and values.dtype in (*base.FP8, torch.int8)
        if not is_weight or (scales := tensors.get(f"{values.key}_scale")) is None:
            return None
        base.expect(scales, base.SCALES)
        sizes = (weights.get("block_structure") for _, weights in _groups(config))
        said = next((base.block_in("block_structure", size) for size in sizes if size), ())
        block = base.block_of(values.shape, scales, said, config_first=True)
        stored = {"packed": values, "scale": scales}
        if (zeros := tensors.get(f"{values.key}_zero_point")) is not None:
            stored["zero point"] = base.expect(zeros, (values.dtype,))
        codec = cls(
            values=values.dtype,
            scales=scales.dtype,
            block=block,
            scale_dims=len(scales.shape),
            has_zeros=zeros is not None,
        )
        return Found(key=values.key, codec=codec, shape=values.shape, stored=stored)

    @classmethod
    def of_group(cls, kind: str, weights: Config) -> Self | None:
        if int(weights.get("num_bits") or 0) != 8 or (block := _block(weights)) is None:
            return None
        return cls(
            values=torch.float8_e4m3fn if weights.get("type") == "float" else torch.int8,
            scales=_dtype_of_scales(weights),
            block=block,
            scale_dims=1 if weights.get("strategy") == "tensor" else None,
            has_zeros=not weights.get("symmetric", True),
        )


@dataclass(frozen=True, kw_only=True)
class Integers(Compressed):
    """Integers of 4 or 8 bits, several to an int32 along a row; zero points are packed along the rows."""

    formats: ClassVar[tuple[str, ...]] = ("pack-quantized",)

    bits: int = 4
    scales: torch.dtype = torch.bfloat16
    block: tuple[int, int] = (1, 0)
    has_zeros: bool = False

    def layout(self, shape: Shape) -> PackedForm:
        packed, block = 32 // self.bits, (self.block[0] or shape[-2], self.block[1] or shape[-1])
        values = PackedPart(name="_packed", dtype=torch.int32, ndim=len(shape), block=(1, packed))
        scales = {"scale": PackedPart(name="_scale", dtype=self.scales, ndim=len(shape), block=block)}
        if self.has_zeros:
            scales["zero point"] = replace(values, name="_zero_point", block=(packed, block[1]), bits=self.bits)
        return self._form(shape, values, scales)

    def decode(self, values: Tensor, scales: Scales, dtype: torch.dtype) -> Tensor:
        return base.from_words(values, scales, dtype, at=range(0, 32, self.bits))

    @classmethod
    def find(cls, values: Any, tensors: Tensors, config: Config) -> Found | None:
        said = {w.get("num_bits") for group, w in _groups(config) if _format(group, config) in cls.formats}
        bits = next(iter(said)) if len(said) == 1 else 0
        if not values.key.endswith(".weight_packed") or values.dtype != torch.int32 or bits not in (4, 8):
            return None  # integers of other sizes run on from word to word
        key, packed = values.key.removesuffix("_packed"), 32 // bits
        stored = {"packed": values, "scale": (scales := base.beside(tensors, f"{key}_scale", base.SCALES))}
        if f"{key}_g_idx" in tensors:
            raise DoesNotFit(f"{key + '_g_idx'!r} {base.BY_ACTIVATION}")
        shape = base.widened(values, packed)
        block = base.block_of(shape, scales, (), packed)
        if (zeros := tensors.get(f"{key}_zero_point")) is not None:
            stored["zero point"] = base.expect(zeros, (torch.int32,))
            if block[0] > 1:
                raise DoesNotFit(f"its zero points {zeros.key!r} belong to {block[0]} rows together, expected 1")
        codec = cls(bits=bits, scales=scales.dtype, block=block, has_zeros=zeros is not None)
        return Found(key=key, codec=codec, shape=shape, stored=stored)

    @classmethod
    def of_group(cls, kind: str, weights: Config) -> Self | None:
        bits = int(weights.get("num_bits") or 0)
        if bits not in (4, 8) or (block := _block(weights)) is None:
            return None
        return cls(
            bits=bits, scales=_dtype_of_scales(weights), block=block, has_zeros=not weights.get("symmetric", True)
        )


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The 4-bit floats of the OCP Microscaling formats, by their codes; bit 3 is the sign."""


@dataclass(frozen=True, kw_only=True)
class Nvfp4(Compressed):
    """4-bit floats two to a byte: times the 8-bit scale of their group over the weight's own, by way of bfloat16."""

    formats: ClassVar[tuple[str, ...]] = ("nvfp4-pack-quantized",)

    block: tuple[int, int] = (1, 16)

    def layout(self, shape: Shape) -> PackedForm:
        scale = PackedPart(name="_scale", dtype=torch.float8_e4m3fn, ndim=len(shape), block=self.block)
        whole = PackedPart(name="_global_scale", dtype=torch.float32, ndim=1, block=(shape[-2], shape[-1]))
        values = PackedPart(name="_packed", dtype=torch.uint8, ndim=len(shape), block=(1, 2))
        return self._form(shape, values, {"scale": scale, "global scale": whole})

    def decode(self, values: Tensor, scales: Scales, dtype: torch.dtype) -> Tensor:
        table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float32, device=values.device)
        floats = table[torch.stack([values & 15, values >> 4], -1).flatten(1).int()]
        scale = scales["scale"].to(torch.float32) / scales["global scale"]
        floats = floats.view(*scale.shape, -1) * scale.unsqueeze(2)
        return floats.to(torch.bfloat16).to(dtype).flatten(1)

    @classmethod
    def find(cls, values: Any, tensors: Tensors, config: Config) -> Found | None:
        key = values.key.removesuffix("_packed")
        scales = tensors.get(f"{key}_scale")
        is_so = values.key.endswith(".weight_packed") and values.dtype == torch.uint8
        if not is_so or scales is None or scales.dtype != torch.float8_e4m3fn:  # another format
            return None
        of_weight = base.beside(tensors, f"{key}_global_scale", (torch.float32,))
        shape, stored = base.widened(values, 2), {"packed": values, "scale": scales, "global scale": of_weight}
        return Found(key=key, codec=cls(block=base.block_of(shape, scales, (), 2)), shape=shape, stored=stored)

    @classmethod
    def of_group(cls, kind: str, weights: Config) -> Self | None:
        return cls()


def _codec_of(kind: str, weights: Config) -> Codec:
    own = next((codec for codec in Compressed.__subclasses__() if kind in codec.formats), None)
    is_ordered = weights.get("actorder") not in (None, "static", "weight")
    codec = own.of_group(kind, weights) if own is not None and not is_ordered else None
    if codec is None:
        bits, strategy = int(weights.get("num_bits") or 0), weights.get("strategy")
        order = weights.get("actorder")
        raise base.cannot_stay(f"{bits} bits of compressed-tensors ({kind}, {strategy}, actorder {order})")
    return codec


def _groups(config: Config) -> list[tuple[Config, Config]]:
    """The groups of a config that quantise weights, each with what it says of them."""
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise DoesNotFit(f"the config's config_groups is {quoted(groups)}, expected groups by name")
    inside = [(group, group.get("weights")) for group in groups.values() if isinstance(group, Mapping)]
    return [(group, weights) for group, weights in inside if isinstance(weights, Mapping)]


def _format(group: Config, config: Config) -> str:
    return str(group.get("format") or config.get("format"))


def _block(weights: Config) -> tuple[int, int] | None:
    """Rows and columns that share a scale, 0 for all; None where a strategy has no such blocks."""
    strategy, group = weights.get("strategy"), int(weights.get("group_size") or 0)
    if strategy == "block":
        high, wide = base.block_in("block_structure", weights["block_structure"])
        return high, wide
    return {"tensor": (0, 0), "channel": (1, 0), "group": (1, group)}.get(strategy)  # type: ignore[arg-type]


def _dtype_of_scales(weights: Config) -> torch.dtype:
    return as_dtype(str(weights.get("scale_dtype") or "bfloat16").removeprefix("torch.")) or torch.bfloat16


def matches(name: str, kinds: Collection[str], targets: Collection[str]) -> bool:
    """Whether targets of compressed-tensors name a layer, by its name, a pattern or its class."""
    patterns = (target.removeprefix("re:") for target in targets if target.startswith("re:"))
    return name in targets or not {*kinds}.isdisjoint(targets) or any(matched(each, name) for each in patterns)
