"""Find the quantised weights of a checkpoint by names, dtypes and shapes; values with scales are a `QuantizedTensor`.

It has the name of the plain weight, so that whatever comes after sees a plain checkpoint; nothing is read.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.loading.conversion import LoadMap
from hf_fsdp_tools.loading.formats.stored import QuantizedTensor, Stored, StoredTensor
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.modeling.packed_weight import PackedForm, PackedPart
from hf_fsdp_tools.text import dtype_name, listed_lines, quoted

_FINE_GRAINED, _MXFP4, _COMPRESSED = ("fp8", "mxfp8"), ("mxfp4",), ("compressed-tensors",)
OF_LINEAR: Mapping[str, Mapping[str, Mapping[float, str]]] = {
    "awq": {"gemm": {4: "awq int4"}},
    "gptq": {"gptq": {4: "gptq int4", 8: "gptq int8"}, "gptq_v2": {4: "packed int4", 8: "packed int8"}},
}
"""How methods quantise linear layers: rules by their formats, and the bits of integers."""

_DO_ONCE = "make a plain checkpoint of it once (transformers' model.dequantize() and save_pretrained)"
BY_ACTIVATION = f"orders its columns by activation, so that no block of columns has one scale; {_DO_ONCE}"
"""What is said of columns that lie in groups of another order than the file's."""

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = (torch.float32, torch.bfloat16, torch.float16)
_EXPONENTS = (torch.uint8, torch.float8_e8m0fnu)

_OF_ACTIVATIONS = frozenset(
    {f"{of}_scale" for of in ("activation", "input", "output", "k", "v", "q", "kv", "k_cache", "v_cache")}
    | {f"{of}_zero_point" for of in ("input", "output", "k", "v", "q")}
    | {"input_global_scale", "qscale_act", "weight_shape"}
)
"""How names end of tensors that say how to quantise activations, or repeat a shape: training in floats needs none."""


@dataclass(frozen=True, kw_only=True)
class Dequantized:
    """What is dequantised while a checkpoint is loaded."""

    method: str
    """The method that the config names; else the one that the tensors show."""
    stored_bytes: int
    """Bytes of the quantised values and their scales in the files."""
    num_values: int
    """Values that they stand for."""
    other_blocks: tuple[str, ...] = ()
    """Weights whose scales lie on other blocks than the config says; they are read by their scales, as in transformers.
    """

    def of(self, used: Iterable[Stored]) -> "Dequantized | None":
        """The same where these stored tensors alone are read, of which some stay as they are; None where all do."""
        rest = [tensor for tensor in used if isinstance(tensor, QuantizedTensor)]
        return replace(self, stored_bytes=_bytes_of(rest), num_values=_values_of(rest)) if rest else None


def _bytes_of(tensors: Iterable[QuantizedTensor]) -> int:
    return sum(tensor.num_bytes for tensor in tensors)


def _values_of(tensors: Iterable[QuantizedTensor]) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors)


def method_of(quantization: Mapping[str, Any] | None) -> str | None:
    """The name of the method in a quantisation config."""
    return None if quantization is None else str(quantization.get("quant_method"))


def with_floats(
    index: CheckpointIndex, quantization: Mapping[str, Any] | None, model_keys: Collection[str]
) -> tuple[CheckpointIndex, Dequantized | None]:
    """An index in which quantised weights look like plain ones, and what they are; (the same index, None) without any.

    Methods are known by their tensors; a config that names a method without rules leaves all as it is.
    """
    _refuse_transforms(index, quantization or {})
    method = method_of(quantization)
    if method is not None and method not in (*_FINE_GRAINED, *_MXFP4, *_COMPRESSED, *OF_LINEAR):
        return index, None
    finder = _Finder(index.tensors, method, quantization or {})
    tensors_by_key = {tensor.key: tensor for tensor in finder.quantized}
    if not tensors_by_key and not finder.problems:
        return index, None
    if finder.problems:
        raise CheckpointError(
            f"{index.name!r} holds quantised weights ({method or 'by their names'}) that cannot be dequantised:\n"
            f"{listed_lines(finder.problems)}\nDownload or quantise the checkpoint again, or use the config that "
            "belongs to it."
        )
    known = {key.rpartition(".")[2] for key in model_keys}
    plain = {
        key: tensor
        for key, tensor in index.tensors.items()
        if key not in finder.used and (key.rpartition(".")[2] not in _OF_ACTIVATIONS - known)
    }
    tensors = dict(sorted((plain | tensors_by_key).items()))
    dequantized = Dequantized(
        method=method or Counter(map(_method_by_rule, finder.quantized)).most_common(1)[0][0],
        other_blocks=tuple(finder.other_blocks),
        stored_bytes=_bytes_of(tensors_by_key.values()),
        num_values=_values_of(tensors_by_key.values()),
    )
    return replace(index, tensors=MappingProxyType(tensors)), dequantized


def _refuse_transforms(index: CheckpointIndex, quantization: Mapping[str, Any]) -> None:
    """Refuse weights that are right with rotated activations alone: neither transformers nor this package rotates."""
    for key, value in quantization.items():
        groups = value.get("config_groups", value) if isinstance(value, Mapping) else value
        if groups and any(word in key.lower() for word in ("transform", "rotat", "hadamard")):
            raise CheckpointError(
                f"The quantization_config of {index.name!r} has {key} ({quoted(value)}): it was rotated, and "
                "activations must be while it runs, which is not done here. Give the one before it was quantised."
            )


def scaled_as_converted(index: CheckpointIndex, load_map: LoadMap) -> CheckpointIndex:
    """The index with the rule that transformers has for weights which a conversion of the model takes.

    It multiplies fused experts of compressed-tensors by their scales in float32, others in the scales' dtype.
    """
    taken = {key for group in load_map.groups.values() if group.transform is not None for key, _ in group.members}
    changed = {
        key: replace(tensor, form=replace(tensor.form, rule="scaled in fp32"))
        for key, tensor in index.tensors.items()
        if key in taken and isinstance(tensor, QuantizedTensor) and tensor.form.rule == "scaled"
        if tensor.values.dtype in _FP8
    }
    return replace(index, tensors=MappingProxyType({**index.tensors, **changed})) if changed else index


class _DoesNotFit(Exception):
    """Values and scales that do not belong together; says why."""


class _Finder:
    """The quantised weights among stored tensors, and what is wrong with some."""

    def __init__(self, tensors: Mapping[str, Stored], method: str | None, config: Mapping[str, Any]) -> None:
        self._tensors = {key: t for key, t in tensors.items() if isinstance(t, StoredTensor)}
        self._method, self._config = method, config
        self.quantized: list[QuantizedTensor] = []
        self.used: set[str] = set()
        self.problems: list[str] = []
        self.other_blocks: list[str] = []
        bare: list[StoredTensor] = []
        for key, values in self._tensors.items():
            try:
                tensor = self._made_of(key, values)
            except _DoesNotFit as error:
                self.problems.append(f"{values.file}: {key!r} {_looks(values)}: {error}")
                continue
            if tensor is not None:
                self.quantized.append(tensor)
                self.used.update(part.key for part in tensor.parts)
            elif values.dtype in _FP8 and len(values.shape) > 1:
                bare.append(values)
        if self.quantized or self._method is not None:
            self.problems += [
                f"{t.file}: {t.key!r} {_looks(t)} has no scales next to it" for t in bare if t.key not in self.used
            ]
            self.problems += self._left_over()

    def _left_over(self) -> Iterator[str]:
        """Yield scales that belong to no values."""
        of_linear = (".scales", ".qzeros") if self._method in OF_LINEAR else ()
        for key, tensor in self._tensors.items():
            if key in self.used or not key.endswith(("weight_scale_inv", "weight_scale", "_proj_scales", *of_linear)):
                continue
            base = key.removesuffix("_scale_inv").removesuffix("_scale").removesuffix("_scales")
            if key.endswith(of_linear):
                base = f"{key.rpartition('.')[0]}.qweight"
            if f"{base}_packed" in self._tensors:  # of a format without a rule, which is refused by its values
                continue
            values = self._tensors.get(base)
            if values is None or (values.dtype.itemsize > 1 and not key.endswith(of_linear)):
                kind = "no such tensor" if values is None else _looks(values)
                yield f"{tensor.file}: {key!r} holds scales, but what it scales, {base!r}, is {kind}"

    def _made_of(self, key: str, values: StoredTensor) -> QuantizedTensor | None:
        """The quantised weight whose values are this tensor; None for any other tensor."""
        module, _, name = key.rpartition(".")
        if name.endswith("_blocks") and values.dtype == torch.uint8 and self._method in (None, *_MXFP4):
            scales = self._tensors.get(f"{key.removesuffix('_blocks')}_scales")
            return self._mxfp4(values, scales)
        if name == "weight_packed" and self._method in _COMPRESSED:
            make = {torch.int32: self._packed, torch.uint8: self._nvfp4}.get(values.dtype)
            return None if make is None else make(values, f"{module}.weight")
        if name == "qweight" and self._method in OF_LINEAR and values.dtype == torch.int32:
            return self._of_linear(values, module)
        if values.dtype not in (*_FP8, torch.int8):
            return None
        if self._method in (None, *_FINE_GRAINED):
            names = [f"{key}_scale_inv"] + [f"{module}.{n}" for n in ("scale", "qscale_weight") if name == "weight"]
            scales = next((self._tensors[n] for n in names if n in self._tensors), None)
            if scales is not None:
                return self._fine_grained(values, scales)
        if self._method in (None, *_COMPRESSED) and name == "weight":
            scales = self._tensors.get(f"{key}_scale")
            if scales is not None:
                return self._compressed(values, scales, self._tensors.get(f"{key}_zero_point"))
        return None

    def _fine_grained(self, values: StoredTensor, scales: StoredTensor) -> QuantizedTensor:
        """Values times the scale of their block; 4-bit values lie two to a byte."""
        packed = 2 if values.dtype == torch.int8 else 1
        _expect(scales, (*_SCALES, *_EXPONENTS))
        block = _block("weight_block_size", self._config.get("weight_block_size"))
        shape = _shape(values, packed)
        own = _block_of(shape, scales, block, packed)
        counts = [[-(-n // size) for n, size in zip(shape[-2:], each, strict=True)] for each in (own, block) if each]
        if counts[0] == counts[-1] and any(n > 1 and a != b for n, a, b in zip(counts[0], own, block, strict=False)):
            self.other_blocks.append(values.key)
        beside = {"scale": Beside(scales, own)}
        return quantized_tensor(values.key, "scaled in fp32", shape, values, beside, packed=packed)

    def _compressed(
        self, values: StoredTensor, scales: StoredTensor, zero_points: StoredTensor | None
    ) -> QuantizedTensor:
        """8-bit values of compressed-tensors, with scales per tensor, channel, group or block."""
        _expect(scales, _SCALES)
        sizes = (weights.get("block_structure") for _, weights in _groups(self._config))
        block = next((_block("block_structure", size) for size in sizes if size), ())
        block = _block_of(values.shape, scales, block, 1, config_first=True)
        beside = {"scale": Beside(scales, block)}
        if zero_points is not None:
            _expect(zero_points, (values.dtype,))
            if zero_points.shape != scales.shape:
                raise _DoesNotFit(f"its zero points are {list(zero_points.shape)}, its scales {list(scales.shape)}")
            beside["zero point"] = Beside(zero_points, block)
        return quantized_tensor(values.key, "scaled", values.shape, values, beside)

    def _packed(self, values: StoredTensor, key: str) -> QuantizedTensor | None:
        """Integers, several to an int32, with scales per channel or group; zero points are packed along the rows."""
        bits, scales = _bits_of_packed(self._config), self._tensors.get(f"{key}_scale")
        if bits is None:
            return None
        if scales is None:
            raise _DoesNotFit("it has no scales next to it")
        if f"{key}_g_idx" in self._tensors:
            raise _DoesNotFit(f"{key + '_g_idx'!r} {BY_ACTIVATION}")
        _expect(scales, _SCALES)
        packed = 32 // bits
        shape = _shape(values, packed)
        high, wide = _block_of(shape, scales, (), packed)
        beside = {"scale": Beside(scales, (high, wide))}
        zero_points = self._tensors.get(f"{key}_zero_point")
        if zero_points is not None:
            _expect(zero_points, (torch.int32,))
            if high > 1 or zero_points.shape != (-(-shape[0] // packed), -(-shape[1] // wide)):
                raise _DoesNotFit(
                    f"its zero points {zero_points.key!r} are {list(zero_points.shape)}, its scales "
                    f"{list(scales.shape)}; expected one word for each {packed} rows of them"
                )
            beside["zero point"] = Beside(zero_points, (packed, wide), bits)
        return quantized_tensor(key, f"packed int{bits}", shape, values, beside, packed=packed)

    def _of_linear(self, values: StoredTensor, module: str) -> QuantizedTensor:
        """Integers of GPTQ or AWQ: a weight as [in, out], with scales and zero points for groups along `in`.

        GPTQ packs the integers along `in`, AWQ along `out`; both pack the zero points along `out`.
        """
        config, is_awq = self._config, self._method == "awq"
        named = (str(config[name]).lower() for name in ("checkpoint_format", "version", "format") if config.get(name))
        kind = "llm-awq" if config.get("backend") == "llm-awq" else next(named, "gemm" if is_awq else "gptq")
        rules = OF_LINEAR[str(self._method)].get(kind)
        if rules is None:
            known = " or ".join(OF_LINEAR[str(self._method)])
            raise _DoesNotFit(f"the config's format is {quoted(kind)}, expected {known}; {_DO_ONCE}")
        scales, zeros = self._beside(module, "scales", _SCALES), self._beside(module, "qzeros", (torch.int32,))
        groups = self._beside(module, "g_idx", (torch.int32,)) if f"{module}.g_idx" in self._tensors else None
        shapes = {t.key: list(t.shape) for t in (values, scales, zeros, *([groups] if groups else []))}
        if not all(len(t.shape) == 2 and all(t.shape) for t in (values, scales, zeros)):
            raise _DoesNotFit(f"expected three matrices, none empty, found {shapes}")
        bits = 32 * zeros.shape[1] / scales.shape[1]
        if bits not in rules:
            known = " or ".join(map(str, rules))
            raise _DoesNotFit(f"{shapes} mean integers of {bits:g} bits, expected {known}; {_DO_ONCE}")
        packed = 32 // int(bits)
        rows, columns = values.shape
        rows, columns = (rows, columns * packed) if is_awq else (rows * packed, columns)
        if scales.shape != (zeros.shape[0], columns) or (groups is not None and groups.shape != (rows,)):
            raise _DoesNotFit(f"{shapes} are not of one matrix of [{rows}, {columns}] integers of {bits:g} bits")
        size = config.get("group_size") or 0
        if type(size) is not int or size < -1:
            raise _DoesNotFit(f"the config's group_size is {quoted(size)}, expected -1 or a number above 0")
        block = (rows if size < 0 else size, 1)
        high, _ = _block_of((rows, columns), scales, block if size else (), 1, config_first=True)
        if config.get("desc_act") and not is_awq and high < rows:
            raise _DoesNotFit(f"the config's desc_act {BY_ACTIVATION}")
        beside = {"scale": Beside(scales, (high, 1)), "zero point": Beside(zeros, (high, packed))}
        return quantized_tensor(
            f"{module}.weight",
            rules[bits],
            (columns, rows),
            values,
            beside,
            packed=packed,
            is_down=not is_awq,
            is_transposed=True,
            groups=groups,
        )

    def _beside(self, module: str, name: str, dtypes: Iterable[torch.dtype]) -> StoredTensor:
        """The tensor of that name next to others of the module."""
        tensor = self._tensors.get(f"{module}.{name}")
        if tensor is None:
            raise _DoesNotFit(f"it has no {f'{module}.{name}'!r} next to it")
        _expect(tensor, dtypes)
        return tensor

    def _nvfp4(self, values: StoredTensor, key: str) -> QuantizedTensor | None:
        """4-bit floats of compressed-tensors, with 8-bit scales per group and a float32 scale of the weight."""
        scales, of_weight = self._tensors.get(f"{key}_scale"), self._tensors.get(f"{key}_global_scale")
        if scales is None or scales.dtype != torch.float8_e4m3fn:  # another format
            return None
        if of_weight is None:
            raise _DoesNotFit(f"it has no {key + '_global_scale'!r} next to it")
        _expect(of_weight, (torch.float32,))
        if of_weight.shape != (1,):
            raise _DoesNotFit(f"{of_weight.key!r} next to it is {list(of_weight.shape)}, expected one number, [1]")
        shape, stored = _shape(values, 2), {"scale": scales, "global scale": of_weight}
        beside = {name: Beside(each, _block_of(shape, each, (), 2)) for name, each in stored.items()}
        return quantized_tensor(key, "nvfp4", shape, values, beside, packed=2)

    def _mxfp4(self, values: StoredTensor, scales: StoredTensor | None) -> QuantizedTensor | None:
        """Experts of gpt-oss: [experts, rows, blocks, bytes of a block], transposed once they are dequantised."""
        if scales is None:
            if self._method in _MXFP4:
                raise _DoesNotFit("it has no scales next to it")
            return None
        _expect(scales, (torch.uint8,))
        if len(values.shape) != 4 or scales.shape != values.shape[:-1]:
            raise _DoesNotFit(
                f"expected blocks [experts, rows, blocks, bytes] with scales [experts, rows, blocks], found scales "
                f"{list(scales.shape)}"
            )
        experts, rows, blocks, size = values.shape
        key, shape = values.key.removesuffix("_blocks"), (experts, 2 * blocks * size, rows)
        beside = {"scale": Beside(scales, (1, 2 * size))}
        return quantized_tensor(key, "mxfp4", shape, values, beside, packed=2, of_block=size, is_transposed=True)


def _block_of(
    shape: tuple[int, ...],
    scales: StoredTensor,
    config_block: tuple[int, ...],
    packed: int,
    *,
    config_first: bool = False,
) -> tuple[int, int]:
    """Rows and columns of a weight that share a scale: by the number of scales, as in transformers, else as the config
    says.

    With `config_first` (compressed-tensors), the config decides where it fits.
    """
    if len(shape) < 2:
        raise _DoesNotFit("expected a matrix, or a stack of matrices")
    *outer, rows, columns = shape
    count, counts = math.prod(outer), _row_major(scales).shape
    if math.prod(counts) == 1:
        return count * rows, columns
    if len(counts) == 1 and outer and counts[0] == count:  # a scale for each matrix
        return rows, columns
    down, across = counts[-2:] if len(counts) > 1 else (0, 0)
    is_complete = down > 0 and across > 0 and math.prod(counts[:-2]) == count
    high, wide = config_block or (0, 0)
    config_fits = high > 0 and (-(-rows // high), -(-columns // wide)) == (down, across)
    is_even = is_complete and not rows % down and not columns % across and not columns // across % packed
    if is_even and not (config_first and config_fits):
        return rows // down, columns // across
    if is_complete and config_fits and not (outer and rows % high) and not wide % packed:
        return high, wide
    raise _DoesNotFit(
        f"its scales {scales.key!r} {list(counts)} lie on no blocks of it"
        + (f", nor on blocks of {high} x {wide} as the config says" if config_block else "")
    )


def _method_by_rule(tensor: QuantizedTensor) -> str:
    """The name of the method of a quantised weight in a checkpoint whose config names none."""
    if tensor.form.rule == "scaled in fp32":
        return "fp8" if tensor.packed == 1 else "fp4"
    return "mxfp4" if tensor.form.rule == "mxfp4" else "compressed-tensors"


def _shape(values: StoredTensor, packed: int) -> tuple[int, ...]:
    """The shape of the plain weight, of which a stored element holds so many values of a row."""
    return (*values.shape[:-1], values.shape[-1] * packed) if values.shape else ()


class Beside(NamedTuple):
    """Scales or the like of a quantised weight."""

    stored: StoredTensor
    block: tuple[int, int]
    bits: int = 0


def quantized_tensor(
    key: str,
    rule: str,
    shape: tuple[int, ...],
    values: StoredTensor,
    beside: Mapping[str, Beside],
    *,
    packed: int = 1,
    is_down: bool = False,
    of_block: int = 1,
    is_transposed: bool = False,
    groups: StoredTensor | None = None,
) -> QuantizedTensor:
    """A quantised weight of that many values in a stored element, of a row or (`is_down`) of a column; `of_block`:
    elements of a block that has a dimension of its own."""

    def part(stored: StoredTensor, block: tuple[int, int], bits: int = 0, elements: int = 1) -> PackedPart:
        name = stored.key.removeprefix(key) if stored.key.startswith(key) else f".{stored.key.rpartition('.')[2]}"
        ndim = len(_row_major(stored).shape)
        return PackedPart(name=name, dtype=stored.dtype, ndim=ndim, block=block, bits=bits, elements=elements)

    form = PackedForm(
        shape=shape,
        dtype=torch.bfloat16,
        rule=rule,
        is_transposed=is_transposed,
        values=part(values, (packed, 1), 32 // packed)
        if is_down
        else part(values, (1, packed * of_block), 0, of_block),
        scales={name: part(*each) for name, each in beside.items()},
    )
    stored = {"packed": values} | {name: each.stored for name, each in beside.items()}
    return QuantizedTensor(key=key, form=form, stored=stored, groups=groups)


def _row_major(tensor: StoredTensor) -> StoredTensor:
    if tensor.strides is not None:
        raise _DoesNotFit(f"{tensor.key!r} is stored transposed; save it as safetensors")
    return tensor


def _expect(tensor: StoredTensor, dtypes: Iterable[torch.dtype]) -> None:
    if tensor.dtype not in dtypes:
        names = " or ".join(dtype_name(dtype) for dtype in dtypes)
        raise _DoesNotFit(f"{tensor.key!r} next to it holds {dtype_name(tensor.dtype)}, expected {names}")


def _looks(tensor: StoredTensor) -> str:
    return f"({dtype_name(tensor.dtype)} {list(tensor.shape)})"


def _bits_of_packed(config: Mapping[str, Any]) -> int | None:
    """Bits of the integers that a config of compressed-tensors packs; None where it names none, several, or bits that
    run on from word to word."""
    bits = [
        weights.get("num_bits")
        for group, weights in _groups(config)
        if (group.get("format") or config.get("format")) == "pack-quantized"
    ]
    return bits[0] if bits and bits[0] in (4, 8) and all(each == bits[0] for each in bits) else None


def _groups(config: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """The groups of a config of compressed-tensors that quantise weights, each with what it says of them."""
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise _DoesNotFit(f"the config's config_groups is {quoted(groups)}, expected groups by name")
    inside = [(group, group.get("weights")) for group in groups.values() if isinstance(group, Mapping)]
    return [(group, weights) for group, weights in inside if isinstance(weights, Mapping)]


def _block(name: str, value: Any) -> tuple[int, ...]:
    """The rows and columns of a block, of which the config says the size; empty where it says none."""
    if not value:
        return ()
    size = [int(n) if n.isdigit() else 0 for n in value.split("x")] if isinstance(value, str) else value
    if isinstance(size, (list, tuple)) and len(size) == 2 and all(type(n) is int and n > 0 for n in size):
        return tuple(size)
    raise _DoesNotFit(f"the config's {name} is {quoted(value)}, expected two numbers above 0")
