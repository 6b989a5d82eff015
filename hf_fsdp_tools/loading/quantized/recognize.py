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
    if method is not None and not any(method in codec.methods for codec in CODECS):
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
        method=method or Counter(t.form.codec.method for t in finder.quantized).most_common(1)[0][0],
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
        key: replace(tensor, form=replace(tensor.form, codec=tensor.form.codec.converted()))
        for key, tensor in index.tensors.items()
        if key in taken and isinstance(tensor, QuantizedTensor)
    }
    return replace(index, tensors=MappingProxyType({**index.tensors, **changed})) if changed else index


class _Finder:
    """The quantised weights among stored tensors, and what is wrong with some."""

    def __init__(self, tensors: Mapping[str, Stored], method: str | None, config: Mapping[str, Any]) -> None:
        self._tensors = {key: t for key, t in tensors.items() if isinstance(t, StoredTensor)}
        self._codecs = [c for c in CODECS if method in c.methods or (method is None and not c.needs_config)]
        self._config = config
        self.quantized: list[QuantizedTensor] = []
        self.used: set[str] = set()
        self.problems: list[str] = []
        self.other_blocks: list[str] = []
        bare: list[StoredTensor] = []
        for key, values in self._tensors.items():
            try:
                found = next((f for c in self._codecs if (f := c.find(values, self._tensors, config))), None)
                form = None if found is None else found.form()
            except DoesNotFit as error:
                self.problems.append(f"{values.file}: {key!r} {_looks(values)}: {error}")
                continue
            if found is not None and form is not None:
                tensor = QuantizedTensor(key=found.key, form=form, stored=found.stored, groups=found.groups)
                self.quantized.append(tensor)
                self.used.update(part.key for part in tensor.parts)
                self.other_blocks += [found.key] * found.has_other_blocks
            elif values.dtype in FP8 and len(values.shape) > 1:
                bare.append(values)
        if self.quantized or method is not None:
            self.problems += [
                f"{t.file}: {t.key!r} {_looks(t)} has no scales next to it" for t in bare if t.key not in self.used
            ]
            self.problems += self._left_over()

    def _left_over(self) -> Iterator[str]:
        """Yield scales that belong to no values."""
        codecs = [codec for codec in CODECS if codec in self._codecs or not codec.needs_config]
        ends = {end: of for codec in codecs for end, of in codec.scales_of.items()}
        for key, tensor in self._tensors.items():
            end, of = next(((end, of) for end, of in ends.items() if key.endswith(end)), ("", ""))
            base = key.removesuffix(end) + of
            if not end or key in self.used or f"{base}_packed" in self._tensors:  # packed: refused by its values
                continue
            values = self._tensors.get(base)
            if values is None or (values.dtype.itemsize > 1 and of[0] != "."):
                kind = "no such tensor" if values is None else _looks(values)
                yield f"{tensor.file}: {key!r} holds scales, but what it scales, {base!r}, is {kind}"


def _looks(tensor: StoredTensor) -> str:
    return f"({dtype_name(tensor.dtype)} {list(tensor.shape)})"
