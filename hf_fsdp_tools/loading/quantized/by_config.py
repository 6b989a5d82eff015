"""The stored tensors that a quantization_config promises, for a model of whose checkpoint no file is at hand."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.quantizers.base import get_keys_to_not_convert

from hf_fsdp_tools.errors import CheckpointError, ConfigError, FSDPToolsError
from hf_fsdp_tools.loading.conversion import map_parts
from hf_fsdp_tools.loading.formats.stored import StoredTensor
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.loading.quantized.keep import keep_stored
from hf_fsdp_tools.loading.quantized.recognize import OF_LINEAR
from hf_fsdp_tools.modeling.arguments import as_dtype
from hf_fsdp_tools.modeling.packed import packed_parameters, stored_quantization
from hf_fsdp_tools.modeling.patterns import matched
from hf_fsdp_tools.text import first_line

Shape = tuple[int, ...]
Format = Callable[[Shape], Mapping[str, tuple[torch.dtype, Shape]]]
"""The shape of a plain tensor to dtypes and shapes of what is stored of it, by names: what follows the name of the
plain tensor or, after a ".", the last part of the name."""

Choice = Callable[[str, nn.Module], Format | None]
"""(name in the checkpoint, linear layer or module of experts) to the format of its weights; None: plain."""


def keep_by_config(model: nn.Module, *, has_values: bool = False) -> None:
    """Keep weights of a plain model on meta as stored, as `keep_stored` does, without its checkpoint's files; where
    some are kept already, leave it as it is.

    Raises:
        ConfigError: it stands for a model that `has_values`, which are floats; its config does not say how the
            checkpoint is quantised, or names a method or format whose weights cannot stay as they are.
    """
    if packed_parameters(model):
        return
    if has_values:
        raise ConfigError("dequantize=False: this model has floats. Give its checkpoint's name, or its config.")
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
        choose = _METHODS[method](model, config)
        formats = {fqn: choose(fqn.rpartition(".")[0], module) for fqn, module in _matrices(model)}
        tensors = {tensor.key: tensor for tensor in _stored(model, formats)}
    except FSDPToolsError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"dequantize=False: the quantization_config of {method} cannot be read ({type(error).__name__}: "
            f"{first_line(error)}). Use the config.json that belongs to the checkpoint."
        ) from error
    if not any(formats.values()):
        raise _refused(f"no weight of {type(model).__name__} ({method})")
    try:
        keep_stored(model, CheckpointIndex(name=type(model).__name__, tensors=tensors, header_bytes=0))
    except CheckpointError as error:  # such a checkpoint cannot be
        raise _refused(
            f"{type(model).__name__}, into whose layers {method} as the config has it does not fit,"
        ) from error


def _refused(what: str) -> ConfigError:
    return ConfigError(f"dequantize=False: {what} cannot be kept as stored. Leave dequantize out.")


def _matrices(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the fqns of weights of linear layers, and of stacks of experts, with their modules."""
    for fqn, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield f"{fqn}.weight", module
        elif fqn.endswith("experts"):
            stacks = (name for name, weight in module._parameters.items() if weight is not None and weight.dim() == 3)
            yield from ((f"{fqn}.{name}", module) for name in stacks)


def _stored(model: nn.Module, formats: Mapping[str, Format | None]) -> Iterator[StoredTensor]:
    """Yield the tensors of the checkpoint; what is made of several parameters has the format of either."""
    for key, tensor in map_parts(model).items():
        found = next((made for source in tensor.sources if (made := formats.get(source)) is not None), None)
        parts = {"": (tensor.dtype, tuple(tensor.shape))} if found is None else found(tuple(tensor.shape))
        for name, (dtype, shape) in parts.items():
            stored = f"{key.rpartition('.')[0] if name.startswith('.') else key}{name}"
            size = math.prod(shape) * dtype.itemsize
            yield StoredTensor(key=stored, file=Path(), dtype=dtype, shape=shape, offset=0, num_bytes=size)


def _blocks(shape: Shape, high: int, wide: int) -> Shape:
    """How many blocks of so many rows and columns (0: all) each matrix has."""
    *outer, rows, columns = shape
    return *outer, -(-rows // (high or rows)), -(-columns // (wide or columns))


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


def _fp8(model: nn.Module, config: Mapping[str, Any]) -> Choice:
    """Fine-grained FP8 as transformers' `FP8Linear` and `FP8Experts` have it; by `expert_dtype`, experts of 4 bits."""
    left_out = _left_out(model, config, usual=False)
    scales = torch.float8_e8m0fnu if config.get("scale_fmt") == "ue8m0" else torch.float32
    size = config.get("weight_block_size")
    block = None if size is None else (int(size[0]), int(size[1]))

    def in_8_bits(shape: Shape) -> dict[str, tuple[torch.dtype, Shape]]:
        counts = _blocks(shape, *block) if block else ()
        return {"": (torch.float8_e4m3fn, shape), "_scale_inv": (scales, counts)}

    def in_4_bits(shape: Shape) -> dict[str, tuple[torch.dtype, Shape]]:
        return {"": (torch.int8, (*shape[:-1], shape[-1] // 2)), ".scale": (scales, _blocks(shape, 1, 32))}

    def choose(fqn: str, module: nn.Module) -> Format | None:
        if _is_named(fqn, left_out):
            return None
        return in_4_bits if config.get("expert_dtype") == "fp4" and not isinstance(module, nn.Linear) else in_8_bits

    return choose


def _mxfp4(model: nn.Module, config: Mapping[str, Any]) -> Choice:
    """Experts of gpt-oss, in blocks of 32 that lie along the rows of the transposed weight."""
    left_out = _left_out(model, config, usual=False)

    def experts(shape: Shape) -> dict[str, tuple[torch.dtype, Shape]]:
        *outer, rows, columns = shape
        blocks = (*outer, columns, rows // 32)
        return {"_blocks": (torch.uint8, (*blocks, 16)), "_scales": (torch.uint8, blocks)}

    def choose(fqn: str, module: nn.Module) -> Format | None:
        return None if isinstance(module, nn.Linear) or _is_named(fqn, left_out) else experts

    return choose


def _in_words(model: nn.Module, config: Mapping[str, Any]) -> Choice:
    """Integers of AutoAWQ and GPTQModel: [in, out] with scales and zero points for groups along `in`; packed along
    `out`, of GPTQ the values along `in`."""
    method, bits = str(config["quant_method"]), int(config.get("bits") or 4)
    is_awq = method == "awq"
    kind = str(config.get("checkpoint_format") or config.get("version") or ("gemm" if is_awq else "gptq")).lower()
    size = int(config.get("group_size") or 128)
    if bits not in OF_LINEAR[method].get(kind, ()) or (config.get("desc_act") and size > 0):
        ordered = ", ordered by activation" * bool(config.get("desc_act"))
        raise _refused(f"{bits} bits of {method} ({kind}{ordered})")
    left_out, packed = _left_out(model, config, usual=True), 32 // bits

    def linear(shape: Shape) -> dict[str, tuple[torch.dtype, Shape]]:
        rows, columns = shape
        groups = -(-columns // size) if size > 0 else 1
        values = (columns, rows // packed) if is_awq else (columns // packed, rows)
        scales = {".scales": (torch.float16, (groups, rows)), ".qzeros": (torch.int32, (groups, rows // packed))}
        return {".qweight": (torch.int32, values), **scales}

    def choose(fqn: str, module: nn.Module) -> Format | None:
        return None if _is_named(fqn, left_out) else linear

    return choose


def _compressed(model: nn.Module, config: Mapping[str, Any]) -> Choice:
    """The first group of compressed-tensors whose targets match a layer that is not ignored; experts are asked for as
    the layers that they are in the checkpoint."""
    groups = [
        (list(group.get("targets") or ()), _of_group(config, group, group["weights"]))
        for group in (config.get("config_groups") or {}).values()
        if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping)
    ]
    ignored = list(config.get("ignore") or ())

    def choose(fqn: str, module: nn.Module) -> Format | None:
        names = [fqn]
        if not isinstance(module, nn.Linear):
            names = [f"{fqn}.0.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
        kinds = [kind.__name__ for kind in type(module).__mro__] if isinstance(module, nn.Linear) else ["Linear"]
        if all(_matches(name, kinds, ignored) for name in names):
            return None
        return next((made for targets, made in groups if any(_matches(n, kinds, targets) for n in names)), None)

    return choose


def _of_group(config: Mapping[str, Any], group: Mapping[str, Any], weights: Mapping[str, Any]) -> Format:
    kind, strategy = group.get("format") or config.get("format"), weights.get("strategy")
    bits = int(weights.get("num_bits") or 0)
    if kind == "nvfp4-pack-quantized":
        return _nvfp4
    blocks: dict[Any, tuple[int, int]] = {"channel": (1, 0), "group": (1, int(weights.get("group_size") or 0))}
    if strategy == "block":
        high, wide = str(weights["block_structure"]).strip("[]()").replace("x", ",").split(",")
        blocks["block"] = int(high), int(wide)
    is_packed = kind == "pack-quantized" and bits in (4, 8)
    is_plain = kind in ("float-quantized", "int-quantized", "naive-quantized") and bits == 8
    is_ordered = weights.get("actorder") not in (None, "static", "weight")
    if not (is_packed or is_plain) or strategy not in ("tensor", *blocks) or is_ordered:
        raise _refused(f"{bits} bits of compressed-tensors ({kind}, {strategy}, actorder {weights.get('actorder')})")
    of_scales = as_dtype(str(weights.get("scale_dtype") or "bfloat16").removeprefix("torch.")) or torch.bfloat16
    of_values = torch.float8_e4m3fn if weights.get("type") == "float" else torch.int8
    has_zeros = not weights.get("symmetric", True)

    def stored(shape: Shape) -> dict[str, tuple[torch.dtype, Shape]]:
        counts = (1,) if strategy == "tensor" else _blocks(shape, *blocks[strategy])
        parts = {"": (of_values, shape), "_scale": (of_scales, counts), "_zero_point": (of_values, counts)}
        if is_packed:  # zero points along the rows
            *outer, rows, columns = shape
            values, zeros = (*outer, rows, columns * bits // 32), (*outer, -(-rows * bits // 32), counts[-1])
            parts = {"_packed": (torch.int32, values), "_scale": parts["_scale"], "_zero_point": (torch.int32, zeros)}
        return {name: part for name, part in parts.items() if has_zeros or name != "_zero_point"}

    return stored


def _nvfp4(shape: Shape) -> dict[str, tuple[torch.dtype, Shape]]:
    values, scales = (*shape[:-1], shape[-1] // 2), _blocks(shape, 1, 16)
    return {
        "_packed": (torch.uint8, values),
        "_scale": (torch.float8_e4m3fn, scales),
        "_global_scale": (torch.float32, (1,)),
    }


def _matches(name: str, kinds: Collection[str], targets: Collection[str]) -> bool:
    """Whether targets of compressed-tensors name a layer, by its name, a pattern or its class."""
    patterns = (target.removeprefix("re:") for target in targets if target.startswith("re:"))
    return name in targets or not {*kinds}.isdisjoint(targets) or any(matched(each, name) for each in patterns)


_METHODS: Mapping[str, Callable[[nn.Module, Mapping[str, Any]], Choice]] = {
    "awq": _in_words,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "gptq": _in_words,
    "mxfp4": _mxfp4,
    "mxfp8": _fp8,
}
