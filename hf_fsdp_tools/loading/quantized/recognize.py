"""Find the quantised weights of a checkpoint by names, dtypes and shapes; values with scales are a `QuantizedTensor`.

It has the name of the plain weight, so that whatever comes after sees a plain checkpoint; nothing is read.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.loading.conversion import LoadMap
from hf_fsdp_tools.loading.formats.stored import QuantizedTensor, Stored, StoredTensor
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.modeling.codecs.base import FP8, DoesNotFit
from hf_fsdp_tools.modeling.codecs.table import CODECS
from hf_fsdp_tools.text import dtype_name, listed_lines, quoted

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
    tensors: tuple[QuantizedTensor, ...]
    """The quantised weights."""
    other_blocks: tuple[str, ...]
    """Those whose scales lie on other blocks than the config says; they are read by their scales, as in transformers.
    """

    @property
    def stored_bytes(self) -> int:
        """Bytes of values and scales in the files."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    @property
    def num_values(self) -> int:
        """Values that they stand for."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors)

    def of(self, used: Iterable[Stored]) -> "Dequantized | None":
        """The same where these stored tensors alone are read, of which some stay as they are; None where all do."""
        rest = tuple(tensor for tensor in used if isinstance(tensor, QuantizedTensor))
        return replace(self, tensors=rest) if rest else None


def method_of(quantization: Mapping[str, Any] | None) -> str | None:
    """The name of the method in a quantisation config."""
    return None if quantization is None else str(quantization.get("quant_method"))


def with_floats(
    index: CheckpointIndex, quantization: Mapping[str, Any] | None, model_keys: Collection[str]
) -> tuple[CheckpointIndex, Dequantized | None]:
    """An index in which quantised weights look like plain ones, and what they are; (the same index, None) without any.

    Methods are known by their tensors; a config that names a method without rules leaves all as it is.
    """
    config, method = quantization or {}, method_of(quantization)
    _refuse_transforms(index, config)
    codecs = [c for c in CODECS if method in c.methods or (method is None and not c.needs_config)]
    if not codecs:
        return index, None
    stored = {key: tensor for key, tensor in index.tensors.items() if isinstance(tensor, StoredTensor)}
    quantized: list[QuantizedTensor] = []
    bare, problems, other_blocks = list[StoredTensor](), list[str](), list[str]()
    for key, values in stored.items():
        try:
            found = next((f for c in codecs if (f := c.find(values, stored, config))), None)
            form = None if found is None else found.form()
        except DoesNotFit as error:
            problems.append(f"{values.file}: {key!r} {_looks(values)}: {error}")
            continue
        if found is not None and form is not None:
            quantized.append(QuantizedTensor(key=found.key, form=form, stored=found.stored, groups=found.groups))
            other_blocks += [found.key] * found.has_other_blocks
        elif values.dtype in FP8 and len(values.shape) > 1:
            bare.append(values)
    used = {part.key for tensor in quantized for part in tensor.parts}
    if quantized or method is not None:
        problems += [f"{t.file}: {t.key!r} {_looks(t)} has no scales next to it" for t in bare if t.key not in used]
        problems += _left_over(stored, used, codecs)
    if problems:
        raise CheckpointError(
            f"{index.name!r} holds quantised weights ({method or 'by their names'}) that cannot be dequantised:\n"
            f"{listed_lines(problems)}\nDownload or quantise the checkpoint again, or use the config that belongs to "
            "it."
        )
    if not quantized:
        return index, None
    unknown = _OF_ACTIVATIONS - {key.rpartition(".")[2] for key in model_keys}
    plain = {k: t for k, t in index.tensors.items() if k not in used and k.rpartition(".")[2] not in unknown}
    floats = {tensor.key: tensor for tensor in quantized}
    dequantized = Dequantized(
        method=method or Counter(tensor.form.codec.method for tensor in quantized).most_common(1)[0][0],
        tensors=tuple(floats.values()),
        other_blocks=tuple(other_blocks),
    )
    return replace(index, tensors=MappingProxyType(dict(sorted((plain | floats).items())))), dequantized


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
        key: replace(tensor, form=replace(tensor.form, codec=tensor.form.codec.converted()))
        for key, tensor in index.tensors.items()
        if key in taken and isinstance(tensor, QuantizedTensor)
    }
    return replace(index, tensors=MappingProxyType({**index.tensors, **changed})) if changed else index


def _left_over(stored: Mapping[str, StoredTensor], used: Collection[str], codecs: Collection[Any]) -> Iterator[str]:
    """Yield scales that belong to no values."""
    asked = [codec for codec in CODECS if codec in codecs or not codec.needs_config]
    ends = {end: of for codec in asked for end, of in codec.scales_of.items()}
    for key, tensor in stored.items():
        end, of = next(((end, of) for end, of in ends.items() if key.endswith(end)), ("", ""))
        base = key.removesuffix(end) + of
        if not end or key in used or f"{base}_packed" in stored:  # packed: refused by its values
            continue
        values = stored.get(base)
        if values is None or (values.dtype.itemsize > 1 and of[0] != "."):
            kind = "no such tensor" if values is None else _looks(values)
            yield f"{tensor.file}: {key!r} holds scales, but what it scales, {base!r}, is {kind}"


def _looks(tensor: StoredTensor) -> str:
    return f"({dtype_name(tensor.dtype)} {list(tensor.shape)})"
