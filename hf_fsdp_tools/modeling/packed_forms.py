"""The forms in which a quantised checkpoint keeps a model's weights, by its quantization_config and without its files.

`loading.quantized.recognize` says the same of the tensors themselves; a test holds the two together.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers.quantizers.base import get_keys_to_not_convert

from hf_fsdp_tools.errors import ConfigError, FSDPToolsError
from hf_fsdp_tools.modeling.arguments import as_dtype
from hf_fsdp_tools.modeling.configs import stored_quantization
from hf_fsdp_tools.modeling.float_rules import RULES
from hf_fsdp_tools.modeling.packed_weight import PackedForm, PackedPart
from hf_fsdp_tools.modeling.patterns import matched
from hf_fsdp_tools.text import first_line, listed


@dataclass(frozen=True, kw_only=True)
class _Scales:
    """What is stored next to the values of a matrix."""

    name: str
    dtype: torch.dtype
    block: tuple[int, int] | None
    """Rows and columns that share one element, 0 and None: all."""
    ndim: int = 2
    bits: int = 0


@dataclass(frozen=True, kw_only=True)
class _Format:
    """How a linear layer's matrix is stored, or each expert's."""

    rule: str
    dtype: torch.dtype
    packed: int = 1
    """Values in one stored element."""
    is_packed_down: bool = False
    """Whether these are of rows that follow each other."""
    name: str = ""
    scales: Mapping[str, _Scales]
    is_even: bool = False
    """Whether blocks are made equally long where their number divides the matrix, as transformers takes FP8's."""
    of_experts: str = ""
    """The rule for fused experts, where it is another one."""
    is_transposed: bool = False
    ndim: int = 2
    bytes_of_block: int = 0
    """Where blocks of values have a dimension of their own."""


Forms = dict[str, tuple[PackedForm, dict[str, tuple[int, ...]]]]
"""By the fqn of the plain parameter: its form, and the shapes of its bytes by their fqns; for `packed.pack`."""

_Choice = Callable[[str, nn.Module], _Format | None]
"""(name in the checkpoint, linear layer or module of experts) to the format of its weights; None: plain."""


def stored_forms(model: nn.Module) -> Forms:
    """The forms that `packed.pack` takes, of a plain model on meta whose config says how the checkpoint is quantised.

    Raises:
        ConfigError: it says nothing, or names a method or format whose weights cannot stay as they are.
    """
    config = stored_quantization(model)
    if not config:
        raise ConfigError(
            f"dequantize=False: the configuration of {type(model).__name__} has no quantization_config, so its "
            "checkpoint holds no quantised weights. Leave dequantize out."
        )
    method = str(config.get("quant_method"))
    if method not in _METHODS:
        raise _refused(f"weights of {method}")
    try:
        found, floating = _found(model, _METHODS[method](model, config))
    except FSDPToolsError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"dequantize=False: the quantization_config of {method} cannot be read ({type(error).__name__}: "
            f"{first_line(error)}). Use the config.json that belongs to the checkpoint."
        ) from error
    if floating or not found:
        raise _refused(f"{listed(floating) or 'no weight'} of {type(model).__name__} ({method})")
    return found


def _found(model: nn.Module, choose: _Choice) -> tuple[Forms, list[str]]:
    """The forms of a model's weights, and the names of those that have none."""
    found: Forms = {}
    floating = []
    for fqn, module, plain in _matrices(model):
        if (stored := choose(fqn.rpartition(".")[0], module)) is None:
            continue
        is_turned = plain.dim() == 3 and getattr(module, "is_transposed", False) and not stored.is_transposed
        if is_turned or (made := _form(stored, fqn, plain)) is None:
            floating.append(fqn)
        else:
            found[fqn] = made
    return found, floating


def _refused(what: str) -> ConfigError:
    return ConfigError(f"dequantize=False: {what} cannot be kept as stored. Leave dequantize out.")


def _matrices(model: nn.Module) -> Iterator[tuple[str, nn.Module, torch.Tensor]]:
    """Yield fqn, module and weight of linear layers, and of the stacks of experts."""
    for fqn, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield f"{fqn}.weight", module, module.weight
        elif fqn.endswith("experts"):
            for name, weight in module._parameters.items():
                if weight is not None and weight.dim() == 3:
                    yield f"{fqn}.{name}", module, weight


def _form(stored: _Format, fqn: str, plain: torch.Tensor) -> tuple[PackedForm, dict[str, tuple[int, ...]]] | None:
    """The form of a parameter and the shapes of its bytes; None where its parts would be cut through a block."""
    *outer, rows, columns = plain.shape
    if stored.is_transposed:
        rows, columns = columns, rows
    is_joined = bool(outer) and fqn.endswith(".gate_up_proj") and stored.ndim == 2
    of_one, across = rows, columns  # of each matrix that the checkpoint stores
    if is_joined:
        of_one, across = (rows, columns // 2) if stored.is_transposed else (rows // 2, columns)
    scales = {}
    for name, each in stored.scales.items():
        high, wide = _block(each.block, of_one, across, stored)
        if (of_one % high and of_one != rows) or (across % wide and across != columns):
            return None
        scales[name] = PackedPart(name=each.name, dtype=each.dtype, ndim=each.ndim, block=(high, wide), bits=each.bits)
    down = stored.packed if stored.is_packed_down else 1
    width = columns * down // stored.packed
    of_values = (down, 1) if down > 1 else (1, stored.bytes_of_block or width * across // columns)
    form = PackedForm(
        shape=tuple(plain.shape),
        dtype=plain.dtype,
        rule=stored.of_experts if outer and stored.of_experts else stored.rule,
        is_transposed=stored.is_transposed,
        values=PackedPart(
            name=stored.name,
            dtype=stored.dtype,
            ndim=stored.ndim,
            block=of_values,
            bits=32 // down if down > 1 else 0,
        ),
        scales=scales,
    )
    shapes = [(*outer, -(-rows // down), width * stored.dtype.itemsize)]
    for part in scales.values():
        high, wide = part.block
        shapes.append((*outer, -(-rows // high), -(-columns // wide) * part.dtype.itemsize))
    return form, dict(zip(form.parts(fqn), shapes, strict=True))


def _block(block: tuple[int, int] | None, rows: int, columns: int, stored: _Format) -> tuple[int, int]:
    high, wide = (block[0] or rows, block[1] or columns) if block else (rows, columns)
    down, across = -(-rows // high), -(-columns // wide)
    is_even = stored.is_even and not rows % down and not columns % across and not columns // across % stored.packed
    return (rows // down, columns // across) if down * across == 1 or is_even else (high, wide)


# ---- methods ----


def _left_out(model: Any, config: Mapping[str, Any], *, usual: bool) -> list[str]:
    """Names of modules that transformers leaves plain; `usual`: also the head where the config names others."""
    named = config.get("modules_to_not_convert")
    kept = list(get_keys_to_not_convert(model)) if named is None or usual else []
    return [*kept, *(named or ()), *(getattr(model, "_keep_in_fp32_modules", None) or ())]


def _is_named(fqn: str, names: Sequence[str]) -> bool:
    """Whether one of these is the name, its end, or a pattern of it or of a module above, as transformers has it; of
    which older versions (5.17) take "mlp.gate" for "mlp.gate_proj"."""
    ends = r"(?:(?<=\.)|(?=\.|$))"
    return any(fqn.endswith(each) or matched(f"(?:{each}){ends}", fqn) for each in names)


def _fp8(model: nn.Module, config: Mapping[str, Any]) -> _Choice:
    """Fine-grained FP8 as transformers' `FP8Linear` and `FP8Experts` have it; by `expert_dtype`, experts of 4 bits."""
    left_out = _left_out(model, config, usual=False)
    dtype = torch.float8_e8m0fnu if config.get("scale_fmt") == "ue8m0" else torch.float32
    size = config.get("weight_block_size")
    block = None if size is None else (int(size[0]), int(size[1]))
    scales = _Scales(name="_scale_inv", dtype=dtype, block=block, ndim=2 if block else 0)
    linear = _Format(rule="scaled in fp32", dtype=torch.float8_e4m3fn, scales={"scale": scales}, is_even=True)
    experts = linear
    if config.get("expert_dtype") == "fp4":
        scales = _Scales(name=".scale", dtype=dtype, block=(1, 32))
        experts = _Format(rule="scaled in fp32", dtype=torch.int8, packed=2, scales={"scale": scales}, is_even=True)

    def choose(fqn: str, module: nn.Module) -> _Format | None:
        if _is_named(fqn, left_out):
            return None
        return linear if isinstance(module, nn.Linear) else experts

    return choose


def _mxfp4(model: nn.Module, config: Mapping[str, Any]) -> _Choice:
    """Experts of gpt-oss, in blocks of 32 that lie along the rows of the transposed weight."""
    left_out = _left_out(model, config, usual=False)
    scales = _Scales(name="_scales", dtype=torch.uint8, block=(1, 32), ndim=3)
    experts = _Format(
        rule="mxfp4", dtype=torch.uint8, packed=2, name="_blocks", scales={"scale": scales},
        is_transposed=True, ndim=4, bytes_of_block=16,
    )  # fmt: skip

    def choose(fqn: str, module: nn.Module) -> _Format | None:
        return None if isinstance(module, nn.Linear) or _is_named(fqn, left_out) else experts

    return choose


def _in_words(model: nn.Module, config: Mapping[str, Any]) -> _Choice:
    """Integers of AutoAWQ and GPTQModel: [in, out] with scales and zero points for groups along `in`; packed along
    `out`, of GPTQ the values along `in`."""
    is_awq, bits = config["quant_method"] == "awq", int(config.get("bits") or 4)
    kind = str(config.get("checkpoint_format") or config.get("version") or ("gemm" if is_awq else "gptq")).lower()
    rules = {"gemm": "awq int{}", "gptq": "gptq int{}", "gptq_v2": "packed int{}"}
    rule = rules.get(kind, "").format(bits)
    size = int(config.get("group_size") or 128)
    if rule not in RULES or is_awq != (kind == "gemm") or (config.get("desc_act") and size > 0):
        ordered = ", ordered by activation" * bool(config.get("desc_act"))
        raise _refused(f"{bits} bits of {config['quant_method']} ({kind}{ordered})")
    left_out = _left_out(model, config, usual=True)

    def choose(fqn: str, module: nn.Module) -> _Format | None:
        if _is_named(fqn, left_out):
            return None
        return _Format(
            rule=rule,
            dtype=torch.int32,
            packed=32 // bits,
            is_packed_down=not is_awq,
            name=".qweight",
            scales={
                "scale": _Scales(name=".scales", dtype=torch.float16, block=(max(0, size), 1)),
                "zero point": _Scales(name=".qzeros", dtype=torch.int32, block=(max(0, size), 32 // bits)),
            },
            is_transposed=True,
        )

    return choose


def _compressed(model: nn.Module, config: Mapping[str, Any]) -> _Choice:
    """The first group of compressed-tensors whose targets match a layer that is not ignored; experts are asked for as
    the layers that they are in the checkpoint."""
    groups = [
        (list(group.get("targets") or ()), _of_group(config, group, group["weights"]))
        for group in (config.get("config_groups") or {}).values()
        if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping)
    ]
    ignored = list(config.get("ignore") or ())

    def choose(fqn: str, module: nn.Module) -> _Format | None:
        names = [fqn]
        if not isinstance(module, nn.Linear):
            names = [f"{fqn}.0.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
        kinds = [kind.__name__ for kind in type(module).__mro__] if isinstance(module, nn.Linear) else ["Linear"]
        if all(_matches(name, kinds, ignored) for name in names):
            return None
        return next((made for targets, made in groups if any(_matches(n, kinds, targets) for n in names)), None)

    return choose


def _of_group(config: Mapping[str, Any], group: Mapping[str, Any], weights: Mapping[str, Any]) -> _Format:
    kind, strategy = group.get("format") or config.get("format"), weights.get("strategy")
    bits = int(weights.get("num_bits") or 0)
    if kind == "nvfp4-pack-quantized":
        of_blocks = _Scales(name="_scale", dtype=torch.float8_e4m3fn, block=(1, 16))
        of_weight = _Scales(name="_global_scale", dtype=torch.float32, block=None, ndim=1)
        scales = {"scale": of_blocks, "global scale": of_weight}
        return _Format(rule="nvfp4", dtype=torch.uint8, packed=2, name="_packed", scales=scales)
    size = weights.get("group_size") or 0
    blocks: dict[Any, Any] = {"tensor": None, "channel": (1, 0), "group": (1, size)}
    if strategy == "block":
        high, wide = str(weights["block_structure"]).strip("[]()").replace("x", ",").split(",")
        blocks["block"] = int(high), int(wide)
    is_packed = kind == "pack-quantized" and bits in (4, 8)
    is_plain = kind in ("float-quantized", "int-quantized", "naive-quantized") and bits == 8
    is_ordered = weights.get("actorder") not in (None, "static", "weight")
    if not (is_packed or is_plain) or strategy not in blocks or is_ordered:
        raise _refused(f"{bits} bits of compressed-tensors ({kind}, {strategy}, actorder {weights.get('actorder')})")
    dtype = as_dtype(str(weights.get("scale_dtype") or "bfloat16").removeprefix("torch.")) or torch.bfloat16
    scale = _Scales(name="_scale", dtype=dtype, block=blocks[strategy], ndim=1 if strategy == "tensor" else 2)
    scales = {"scale": scale}
    has_zeros = not weights.get("symmetric", True)
    if is_packed:
        packed = 32 // bits
        if has_zeros:  # packed down the rows
            block = (packed, (scale.block or (1, 0))[1])
            scales["zero point"] = replace(scale, name="_zero_point", dtype=torch.int32, block=block, bits=bits)
        return _Format(rule=f"packed int{bits}", dtype=torch.int32, packed=packed, name="_packed", scales=scales)
    of_values = torch.float8_e4m3fn if weights.get("type") == "float" else torch.int8
    if has_zeros:
        scales["zero point"] = replace(scale, name="_zero_point", dtype=of_values)
    of_experts = "scaled in fp32" if of_values.is_floating_point else ""
    return _Format(rule="scaled", dtype=of_values, scales=scales, of_experts=of_experts)


def _matches(name: str, kinds: Collection[str], targets: Collection[str]) -> bool:
    """Whether targets of compressed-tensors name a layer, by its name, a pattern or its class."""
    patterns = (target.removeprefix("re:") for target in targets if target.startswith("re:"))
    return name in targets or not {*kinds}.isdisjoint(targets) or any(matched(each, name) for each in patterns)


_METHODS: Mapping[str, Callable[[nn.Module, Mapping[str, Any]], _Choice]] = {
    "awq": _in_words,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "gptq": _in_words,
    "mxfp4": _mxfp4,
    "mxfp8": _fp8,
}
