"""MXFP4 as gpt-oss stores its experts: 4-bit floats in blocks of 32 that share an exponent, transposed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hf_fsdp_tools.modeling.codecs import base
from hf_fsdp_tools.modeling.codecs.base import Choice, Codec, Config, DoesNotFit, Found, Scales, Shape, Tensors
from hf_fsdp_tools.modeling.packed_weight import PackedForm, PackedPart


@dataclass(frozen=True, kw_only=True)
class Mxfp4(Codec):
    """Blocks [experts, rows, blocks, bytes of a block], whose rows are columns of the weight."""

    methods: ClassVar[tuple[str, ...]] = ("mxfp4",)
    needs_config: ClassVar[bool] = False
    scales_of: ClassVar[Mapping[str, str]] = {"_proj_scales": "_proj"}

    size: int = 16
    """Bytes of a block."""

    def layout(self, shape: Shape) -> PackedForm:
        scale = PackedPart(name="_scales", dtype=torch.uint8, ndim=len(shape), block=(1, 2 * self.size))
        values = replace(scale, name="_blocks", ndim=len(shape) + 1, elements=self.size)
        return self._form(shape, values, {"scale": scale}, is_transposed=True)

    def decode(self, values: Tensor, scales: Scales, dtype: torch.dtype) -> Tensor:
        exponents = scales["scale"].unsqueeze(0)
        blocks = values.view(*exponents.shape, -1)
        floats: Tensor = convert_moe_packed_tensors(blocks, exponents, dtype=dtype)[0].t()
        return floats

    @classmethod
    def find(cls, values: Any, tensors: Tensors, config: Config) -> Found | None:
        if not values.key.endswith("_blocks") or values.dtype != torch.uint8:
            return None
        key = values.key.removesuffix("_blocks")
        scales = tensors.get(f"{key}_scales")
        if scales is None:
            if config:
                raise DoesNotFit("it has no scales next to it")
            return None
        base.expect(scales, (torch.uint8,))
        if len(values.shape) != 4:
            raise DoesNotFit("expected blocks [experts, rows, blocks, bytes]")
        experts, rows, blocks, size = values.shape
        shape = (experts, 2 * blocks * size, rows)
        return Found(key=key, codec=cls(size=size), shape=shape, stored={"packed": values, "scale": scales})

    @classmethod
    def by_config(cls, model: nn.Module, config: Config) -> Choice:
        names, codec = base.left_out(model, config), cls()
        return lambda fqn, module: None if isinstance(module, nn.Linear) or base.is_named(fqn, names) else codec
