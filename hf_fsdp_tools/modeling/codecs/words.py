"""Integers of GPTQ and AWQ, several to an int32 word: [in, out], with scales and zero points for groups along `in`.

GPTQ packs values along `in`, AWQ along `out`; both pack zero points along `out`. Formulas are those of GPTQModel
(`PackableQuantLinear.dequantize_weight`, and `convert_gptq_v1_to_v2_format_module` for what is added to zero points,
with carries) and AutoAWQ (`dequantize_gemm`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from hf_fsdp_tools.modeling.codecs import base
from hf_fsdp_tools.modeling.codecs.base import Choice, Codec, Config, DoesNotFit, Found, Scales, Shape, Tensors
from hf_fsdp_tools.modeling.packed_weight import PackedForm, PackedPart
from hf_fsdp_tools.text import quoted

_FORMATS: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "awq": {"gemm": (4,)},
    "gptq": {"gptq": (4, 8), "gptq_v2": (4, 8)},
}
"""The bits of integers, by the formats of methods."""


@dataclass(frozen=True, kw_only=True)
class Words(Codec):
    """Linear layers of GPTQ or AWQ."""

    methods: ClassVar[tuple[str, ...]] = ("awq", "gptq")
    scales_of: ClassVar[Mapping[str, str]] = {".scales": ".qweight", ".qzeros": ".qweight"}

    kind: str = "gptq"
    """Its format in the config: "gemm" of AWQ, "gptq" (whose zero points are less by one), or "gptq_v2"."""
    bits: int = 4
    group: int = 0
    """Rows (along `in`) that share a scale; 0: all."""
    scales: torch.dtype = torch.float16

    def layout(self, shape: Shape) -> PackedForm:
        packed, high = 32 // self.bits, self.group or shape[-1]
        values = PackedPart(name=".qweight", dtype=torch.int32, ndim=2, block=(1, packed))
        scales = {
            "scale": PackedPart(name=".scales", dtype=self.scales, ndim=2, block=(high, 1)),
            "zero point": replace(values, name=".qzeros", block=(high, packed)),
        }
        if self.kind != "gemm":
            values = replace(values, block=(packed, 1), bits=self.bits)
        return self._form(shape, values, scales, is_transposed=True)

    def decode(self, values: Tensor, scales: Scales, dtype: torch.dtype) -> Tensor:
        at = (0, 16, 4, 20, 8, 24, 12, 28) if self.kind == "gemm" else range(0, 32, self.bits)
        plus = (0x11111111 if self.bits == 4 else 0x01010101) * (self.kind == "gptq")
        return base.from_words(values, scales, dtype, at=at, plus=plus)

    @classmethod
    def find(cls, values: Any, tensors: Tensors, config: Config) -> Found | None:
        module, _, last = values.key.rpartition(".")
        if last != "qweight" or values.dtype != torch.int32:
            return None
        method, is_awq = str(config["quant_method"]), config["quant_method"] == "awq"
        kind = "llm-awq" if config.get("backend") == "llm-awq" else _kind(config)
        if kind not in _FORMATS[method]:
            known = " or ".join(_FORMATS[method])
            raise DoesNotFit(f"the config's format is {quoted(kind)}, expected {known}; {base.DO_ONCE}")
        scales = base.beside(tensors, f"{module}.scales", base.SCALES)
        zeros = base.beside(tensors, f"{module}.qzeros", (torch.int32,))
        groups = base.beside(tensors, f"{module}.g_idx", (torch.int32,)) if f"{module}.g_idx" in tensors else None
        shapes = {t.key: list(t.shape) for t in (values, scales, zeros, *([groups] if groups else []))}
        if not all(len(t.shape) == 2 and all(t.shape) for t in (values, scales, zeros)):
            raise DoesNotFit(f"expected three matrices, none empty, found {shapes}")
        bits = 32 * zeros.shape[1] / scales.shape[1]
        if bits not in _FORMATS[method][kind]:
            known = " or ".join(map(str, _FORMATS[method][kind]))
            raise DoesNotFit(f"{shapes} mean integers of {bits:g} bits, expected {known}; {base.DO_ONCE}")
        rows, columns = values.shape
        packed = 32 // int(bits)
        rows, columns = (rows, columns * packed) if is_awq else (rows * packed, columns)
        if groups is not None and groups.shape != (rows,):
            raise DoesNotFit(f"{shapes} are not of one matrix of [{rows}, {columns}] integers of {bits:g} bits")
        size = config.get("group_size") or 0
        if type(size) is not int or size < -1:
            raise DoesNotFit(f"the config's group_size is {quoted(size)}, expected -1 or a number above 0")
        said = (rows if size < 0 else size, 1) if size else ()
        high, _ = base.block_of((rows, columns), scales, said, config_first=True)
        if config.get("desc_act") and not is_awq and high < rows:
            raise DoesNotFit(f"the config's desc_act {base.BY_ACTIVATION}")
        return Found(
            key=f"{module}.weight",
            codec=cls(kind=kind, bits=int(bits), group=high, scales=scales.dtype),
            shape=(columns, rows),
            stored={"packed": values, "scale": scales, "zero point": zeros},
            groups=groups,
        )

    @classmethod
    def by_config(cls, model: nn.Module, config: Config) -> Choice:
        method, bits, size = (
            str(config["quant_method"]),
            int(config.get("bits") or 4),
            int(config.get("group_size") or 128),
        )
        kind = _kind(config)
        if bits not in _FORMATS[method].get(kind, ()) or (config.get("desc_act") and size > 0):
            ordered = ", ordered by activation" * bool(config.get("desc_act"))
            raise base.cannot_stay(f"{bits} bits of {method} ({kind}{ordered})")
        codec, names = cls(kind=kind, bits=bits, group=max(0, size)), base.left_out(model, config, usual=True)
        return lambda fqn, module: None if base.is_named(fqn, names) else codec


def _kind(config: Config) -> str:
    named = (str(config[name]).lower() for name in ("checkpoint_format", "version", "format") if config.get(name))
    return next(named, "gemm" if config["quant_method"] == "awq" else "gptq")
