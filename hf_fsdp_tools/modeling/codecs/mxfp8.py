"""MXFP8 of the OCP Microscaling formats, as compressed-tensors and ModelOpt write it: 8-bit floats, of which 32 in a
row share an exponent."""

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import translate
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from hf_fsdp_tools.modeling.codecs import base
from hf_fsdp_tools.modeling.codecs.base import Choice, Config, DoesNotFit, Found, Scales, Shape, Tensors
from hf_fsdp_tools.modeling.codecs.compressed import Compressed
from hf_fsdp_tools.modeling.packed_weight import PackedForm, PackedPart
from hf_fsdp_tools.text import quoted

_BLOCK, _MOST = 32, 448.0
"""Values that share a scale; the largest value of E4M3."""

_SLAB_VALUES = 2**22
"""Values that are quantised at a time. (assumed)"""


@dataclass(frozen=True, kw_only=True)
class Mxfp8(Compressed):
    """Values times powers of two, in bfloat16."""

    methods: ClassVar[tuple[str, ...]] = (*Compressed.methods, "modelopt")
    needs_config: ClassVar[bool] = False
    formats: ClassVar[tuple[str, ...]] = ("mxfp8-quantized",)

    scales: torch.dtype = torch.uint8

    def layout(self, shape: Shape) -> PackedForm:
        if shape[-1] % _BLOCK:
            raise DoesNotFit(f"expected rows of whole blocks of {_BLOCK} values")
        scale = PackedPart(name="_scale", dtype=self.scales, ndim=len(shape), block=(1, _BLOCK))
        values = PackedPart(name="", dtype=torch.float8_e4m3fn, ndim=len(shape))
        return self._form(shape, values, {"scale": scale})

    def decode(self, values: Tensor, scales: Scales, dtype: torch.dtype) -> Tensor:
        exponents = scales["scale"].view(torch.uint8).to(torch.int16)
        powers = torch.where(exponents > 0, exponents << 7, 1 << 6).view(torch.bfloat16)  # the lowest is subnormal
        return base.scaled(values, {"scale": powers}, dtype)

    @property
    def encodes(self) -> bool:
        return True

    def encode(self, matrix: Tensor, values: Any, scales: Any) -> list[Tensor]:
        """The power of two of a block is the least by which its largest value is at most E4M3's largest, as ModelOpt's
        and (nearly always) compressed-tensors' are: `ceil(log2(largest / 448))`."""
        found: tuple[list[Tensor], list[Tensor]] = [], []
        for rows in torch.split(matrix, max(1, _SLAB_VALUES // matrix.shape[1])):
            blocks = rows.float().view(len(rows), -1, _BLOCK)
            part, exponents = torch.frexp(blocks.abs().amax(2))  # 448 is 0.875 times 2 to the power of 9
            exponents = (exponents - 9 + (part > 0.875)).clamp(-127, 127)
            near = torch.ldexp(blocks, -exponents.unsqueeze(2)).clamp(-_MOST, _MOST)
            found[0].append(near.to(values.dtype).view(torch.uint8).flatten(1))
            found[1].append((exponents + 127).to(torch.uint8))
        parts = zip(found, (values, scales), strict=True)
        return [torch.cat(each).view(stored.dtype).reshape(stored.shape) for each, stored in parts]

    @classmethod
    def find(cls, values: Any, tensors: Tensors, config: Config) -> Found | None:
        scales = tensors.get(f"{values.key}_scale") if values.key.rpartition(".")[2] == "weight" else None
        if scales is None:
            return None
        if values.dtype != torch.float8_e4m3fn or scales.dtype not in base.EXPONENTS:
            if config.get("quant_method") == "modelopt":
                if (algo := config.get("quant_algo")) != "MXFP8":
                    raise DoesNotFit(f"the config's quant_algo is {quoted(algo)}, expected MXFP8; {base.DO_ONCE}")
                base.expect(scales, base.EXPONENTS)
            return None  # another format of compressed-tensors
        stored = {"packed": values, "scale": scales}
        return Found(key=values.key, codec=cls(scales=scales.dtype), shape=values.shape, stored=stored)

    @classmethod
    def of_group(cls, kind: str, weights: Config) -> Self | None:
        is_known = (weights.get("num_bits"), weights.get("type"), weights.get("group_size")) == (8, "float", _BLOCK)
        return cls() if is_known else None

    @classmethod
    def by_config(cls, model: nn.Module, config: Config) -> Choice:
        """Those of compressed-tensors by its groups; ModelOpt leaves out what patterns of a shell name."""
        if config.get("quant_method") != "modelopt":
            return super().by_config(model, config)
        if config.get("quant_algo") != "MXFP8":
            raise base.cannot_stay(f"{quoted(config.get('quant_algo'))} of ModelOpt")
        weights: Mapping[str, Any] = {"num_bits": 8, "type": "float", "group_size": _BLOCK}
        group = {"format": cls.formats[0], "targets": ["Linear"], "weights": weights}
        ignored = [f"re:{translate(str(name))}" for name in config.get("ignore") or ()]
        return super().by_config(model, {"config_groups": {"all": group}, "ignore": ignored})
