"""An adapter merged into a quantised base: what it changes is quantised again, the rest copied."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch

from hf_fsdp_tools.distributed.agreement import all_ranks
from hf_fsdp_tools.errors import CheckpointError, ConfigError
from hf_fsdp_tools.loading.conversion import map_saving, persistent_tensors
from hf_fsdp_tools.loading.formats.stored import QuantizedTensor, Stored, StoredTensor
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.loading.io.files import STAGING_BYTES, Reader
from hf_fsdp_tools.loading.io.transfer import transfer_of
from hf_fsdp_tools.loading.quantized.dequantize import Slab, dequantize
from hf_fsdp_tools.loading.regions import View
from hf_fsdp_tools.loading.symbolic import PieceTensor
from hf_fsdp_tools.saving.layout import Layout, Place, lay_out
from hf_fsdp_tools.saving.material import ExportSource
from hf_fsdp_tools.streaming.outgoing import SavedTensor
from hf_fsdp_tools.text import listed


def keep_format(
    material: ExportSource, stored: CheckpointIndex, max_shard_size: int | str, *, carry_heads: bool
) -> tuple[ExportSource, Layout]:
    """The same material with the stored tensors that are copied, and the layout of the stored format.

    `stored` has the base's tensors as they are. No rank communicates.

    Raises:
        ConfigError: nothing is quantised; what the adapter changes is stored in a format that takes data, or would
            have another shape; the model's class saves it under other names.
    """
    match, state, saved = material.match, persistent_tensors(material.model), map_saving(material.model)
    tensors, groups = match.index.tensors, match.load_map.groups
    if match.dequantized is None:
        raise ConfigError(
            f"keep_stored_format (--keep-stored-format): the base {stored.name!r} is not quantised. Leave it out: the "
            "result has the base's own dtypes."
        )
    changed = {key for key, tensor in state.items() if id(tensor) not in material.loaded}
    replaced = {name for key in changed & groups.keys() for name, _ in groups[key].members}

    def is_written(key: str, sources: frozenset[str]) -> bool:
        if key in tensors or not changed.isdisjoint(sources):
            return not changed.isdisjoint(sources)
        made_of = (groups[material.loaded[id(state[source])]].members for source in sources)  # a head that was tied
        return any(name in replaced for members in made_of for name, _ in members)

    written = {key: tensor for key, tensor in saved.items() if is_written(key, tensor.sources)}
    quantized = _quantized(tensors, written, stored.name)
    parts = [part for tensor in quantized.values() for part in tensor.stored.values()]
    gone = {part.key for part in parts} | written.keys() | (set() if carry_heads else match.stored_heads.tensors.keys())
    for name in (name for key in match.unexpected_keys for name in match.load_map.unexpected_keys.get(key, ())):
        gone |= {name, *(part.key for part in tensors[name].parts)}
    copied = {key: tensor for key, tensor in stored.tensors.items() if key not in gone}
    if other := sorted((replaced - written.keys()) | (copied.keys() & changed)):
        raise ConfigError(
            f"{type(material.model).__name__} saves {listed(other)} of {stored.name!r} under other names than stored "
            "ones. Merge without keep_stored_format (--keep-stored-format)."
        )
    looks = _looks(copied, written, quantized, tensors)
    material = _with_copied(material, copied)
    heads = match.heads.tensors.values() if match.heads is not None and carry_heads else ()
    num_parameters = sum(math.prod(tensor.shape) for tensor in (*material.model.parameters(), *heads))
    saving = {key: SavedTensor.of(look, None) for key, look in sorted(looks.items())}
    return material, lay_out(saving, max_shard_size, num_parameters)


def _quantized(
    tensors: Mapping[str, Stored], written: Mapping[str, PieceTensor], name: str
) -> dict[str, QuantizedTensor]:
    """Which tensors that are written anew are quantised in the files: by floats alone, and of the same shape."""
    quantized = {key: t for key in written if isinstance(t := tensors.get(key), QuantizedTensor)}
    if other := [key for key, tensor in quantized.items() if not tensor.form.codec.encodes]:
        raise ConfigError(
            f"{name!r} does not hold {listed(other)} in a format into which an adapter can be merged back. Merge into "
            "floats, without keep_stored_format (--keep-stored-format); then quantise those with the library of the "
            "format, which takes data for it."
        )
    if wrong := [key for key, tensor in quantized.items() if tensor.shape != written[key].shape]:
        raise ConfigError(
            f"{listed(wrong)} of {name!r} cannot be kept as stored: with the adapter they have another shape. "
            "Merge without keep_stored_format (--keep-stored-format)."
        )
    return quantized


def _with_copied(material: ExportSource, copied: Mapping[str, Stored]) -> ExportSource:
    """The same with stored tensors next to those of the model, whose config says again how they are quantised."""
    match = material.match
    blanks = {key: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for key, tensor in copied.items()}
    pieces = {key: PieceTensor.stored(tensor, tensor.dtype) for key, tensor in copied.items()}
    index = replace(match.index, tensors=MappingProxyType({**match.index.tensors, **copied}))
    if material.quantization is not None:
        material.model.config.quantization_config = dict(material.quantization)
    return replace(
        material,
        match=replace(match, index=index, loaded={**match.loaded, **pieces}),
        loaded={**material.loaded, **{id(blank): key for key, blank in blanks.items()}},
        copied=blanks,
    )


def _looks(
    copied: Mapping[str, Stored],
    written: Mapping[str, PieceTensor],
    quantized: Mapping[str, QuantizedTensor],
    tensors: Mapping[str, Stored],
) -> dict[str, PieceTensor]:
    """Shape and dtype of each tensor of the result, copied or written in its stored format."""
    looks = {key: PieceTensor.named(key, tensor.shape, tensor.dtype) for key, tensor in copied.items()}
    for key, tensor in written.items():
        own = quantized.get(key)
        for part in own.stored.values() if own else ():
            looks[part.key] = PieceTensor(part.shape, part.dtype, None, tensor.sources)
        if own is None:
            dtype = tensors[key].dtype if key in tensors else tensor.dtype
            looks[key] = PieceTensor(tensor.shape, dtype, None, tensor.sources)
    return looks


class Requantizer:
    """Quantises merged tensors again, and compares what was written with them."""

    def __init__(self, material: ExportSource, places: Mapping[str, Place]) -> None:
        self._tensors, self._places = material.match.index.tensors, places
        self._written: list[tuple[QuantizedTensor, torch.Tensor]] = []
        self.errors: dict[str, float] = {}
        """What quantising changed on this rank, by the name of the plain weight: its norm over that of the merged
        weight, as a loader sees them."""

    def all_errors(self) -> dict[str, float]:
        """The errors on all ranks; every rank must call."""
        every = all_ranks(self.errors, "adding up what was written")
        return dict(sorted((key, error) for each in every for key, error in each.items()))

    def stored(self, merged: Mapping[str, torch.Tensor], reader: Reader) -> dict[str, torch.Tensor]:
        """What is stored in place of merged tensors (by hub key), by stored key; of unchanged ones, what is there."""
        found: dict[str, torch.Tensor] = {}
        for key, floats in merged.items():
            tensor = self._tensors.get(key)
            if not isinstance(tensor, QuantizedTensor):
                found[key] = floats
                continue
            if not bool(torch.isfinite(floats).all()):
                raise CheckpointError(f"{key!r} holds values that are infinite or NaN with the adapter merged into it.")
            parts = (tensor.values, tensor.stored["scale"])
            if all(torch.equal(_floats(tensor, floats.dtype, reader, n), floats[:n]) for n in (1, len(floats))):
                results = [_read(part, reader) for part in parts]
            else:
                results = tensor.form.codec.encode(floats.flatten(0, -2), *parts)
                self._written.append((tensor, floats))
            found |= {part.key: result for part, result in zip(parts, results, strict=True)}
        return found

    def compare(self, folder: Path, reader: Reader) -> None:
        """Read what was written to a folder since the last call, and note how far it is from what was merged."""

        def there(part: StoredTensor) -> StoredTensor:
            place = self._places[part.key]
            return replace(part, file=folder / place.file, offset=place.offset)

        for tensor, floats in self._written:
            written = replace(tensor, stored={name: there(part) for name, part in tensor.stored.items()})
            read = _floats(written, floats.dtype, reader)
            norms = [float(torch.linalg.vector_norm(t, dtype=torch.float32)) for t in (read.sub_(floats), floats)]
            self.errors[tensor.key] = norms[0] / norms[1] if norms[1] else 0.0
        self._written.clear()


def _read(part: StoredTensor, reader: Reader) -> torch.Tensor:
    memory = torch.empty(part.shape, dtype=part.dtype)
    reader.read([transfer_of(part, View.whole(part.shape), memory)])
    return memory


def _floats(tensor: QuantizedTensor, dtype: torch.dtype, reader: Reader, first: int | None = None) -> torch.Tensor:
    """The dequantised tensor, or its first rows."""
    length = (tensor.shape[0] if first is None else first, *tensor.shape[1:])
    memory = torch.empty(length, dtype=dtype)
    dequantize([Slab(tensor, View.whole(length, tensor.strides), memory)], reader, staging_bytes=STAGING_BYTES)
    return memory
