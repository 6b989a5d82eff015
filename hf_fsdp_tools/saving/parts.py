"""A checkpoint made of another one part by part: what one process reads, computes and writes at a time.

A part is one of two things. Tensors that are only moved, on the way in and on the way out, are read into memory slab by
slab and written from there to their places. Tensors that something computes (an adapter is merged, or a conversion does
more than move data) are read whole, together with the tensors that they are computed with, and written whole.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from hf_fsdp_tools.distributed.boxes import Box
from hf_fsdp_tools.distributed.shards import memory_view
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.loading.conversion import convert_group, persistent_tensors, revert_group
from hf_fsdp_tools.loading.io.files import Reader, TransferStats, Writer
from hf_fsdp_tools.loading.io.transfer import Transfer
from hf_fsdp_tools.loading.quantized.dequantize import Place as ReadPlace
from hf_fsdp_tools.loading.quantized.dequantize import read_into, reads_of, whole_place
from hf_fsdp_tools.loading.regions import Piece, row_major_strides
from hf_fsdp_tools.loading.symbolic import PieceTensor
from hf_fsdp_tools.saving.blank import Blank
from hf_fsdp_tools.saving.layout import Layout, Place
from hf_fsdp_tools.saving.merge_adapter import adapted_parameters, merged_tensors, whole_copy
from hf_fsdp_tools.saving.outgoing import is_scattered, transfers_from
from hf_fsdp_tools.text import listed

PART_BYTES = 64 * 2**20
"""Bytes of tensors that a process moves at a time: enough to keep 16 threads busy with 8 MiB each for a moment, and
little beside what importing torch takes. (assumed)"""

_COMPUTING = 4
"""How much longer a byte takes that is computed than one that is moved, for dealing parts out. (assumed)"""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one process makes at a time."""

    slabs: tuple[tuple[str, Box], ...] = ()
    """Tensors of the model, or boxes of them, that are only moved."""

    together: tuple[str, ...] = ()
    """Tensors of the model that are computed together."""

    wrappers: tuple[nn.Module, ...] = ()
    """Adapted modules whose merged parameters are among them."""

    num_bytes: int
    """Bytes that are written."""


@dataclass(frozen=True, kw_only=True)
class Material:
    """A model without values, where the value of each of its tensors comes from, and where it goes."""

    blank: Blank
    """The model, and which files and adapters hold its values."""

    layout: Layout
    """The place of each saved tensor."""

    @cached_property
    def state(self) -> dict[str, torch.Tensor]:
        """The tensors of the model by key."""
        return persistent_tensors(self.blank.model)

    @cached_property
    def loaded(self) -> dict[int, str]:
        """The key in `match.loaded` of each tensor that is read from files, by the identity of the tensor."""
        return {id(self.blank.match.state[key]): key for key in self.blank.match.loaded if key not in self.blank.held}

    @cached_property
    def uses(self) -> dict[str, list[tuple[str, Piece]]]:
        """Every piece of a saved tensor, with the key of the saved tensor, by the key of the tensor it is cut from."""
        found: dict[str, list[tuple[str, Piece]]] = {}
        for saved, place in self.layout.places.items():
            for piece in place.tensor.pieces or ():
                found.setdefault(piece.source, []).append((saved, piece))
        return found

    @cached_property
    def adapted(self) -> dict[nn.Module, frozenset[int]]:
        """The identities of the merged parameters of each adapted module."""
        return {
            w: frozenset(id(self.blank.merged[old]) for _, old in adapted_parameters(w)) for w in self.blank.wrappers
        }

    @cached_property
    def opaque(self) -> dict[frozenset[str], dict[str, Place]]:
        """The saved tensors that a reverse conversion computes, by the tensors of the model that it takes together."""
        found: dict[frozenset[str], dict[str, Place]] = {}
        for saved, place in self.layout.places.items():
            if place.tensor.pieces is None:
                found.setdefault(place.tensor.sources, {})[saved] = place
        return found

    @cached_property
    def opaque_of(self) -> dict[str, list[frozenset[str]]]:
        """The sets of tensors in `opaque` by each tensor in them."""
        found: dict[str, list[frozenset[str]]] = {}
        for sources in self.opaque:
            for key in sources:
                found.setdefault(key, []).append(sources)
        return found

    def stored(self, key: str) -> PieceTensor | None:
        """The stored elements that a tensor of the model is made of; None where an adapter has its value."""
        loaded = self.loaded.get(id(self.state[key]))
        return None if loaded is None else self.blank.match.loaded[loaded]

    def loaded_as(self, key: str) -> str:
        """The key in `match.loaded` of a tensor that is read from files; tied tensors are read under one key."""
        return self.loaded[id(self.state[key])]

    def itemsize(self, key: str) -> int:
        """Bytes of an element of a tensor of the model in the files that are written."""
        saved = next((saved for saved, _ in self.uses.get(key, ())), None)
        return self.state[key].dtype.itemsize if saved is None else self.layout.places[saved].dtype.itemsize

    def writes(self, key: str, memory: torch.Tensor, box: Box) -> Iterator[tuple[str, Transfer]]:
        """Yield the transfers that write a box of a tensor of the model, each with the key of the saved tensor."""
        shape = self.state[key].shape
        for saved, piece in self.uses.get(key, ()):
            place = self.layout.places[saved]
            for transfer in transfers_from(memory.contiguous(), box, shape, piece, place, self.layout.path(place.file)):
                yield saved, transfer

    def files_of(self, part: Part) -> set[Path]:
        """The files to which a part is written."""
        keys = {*part.together, *(key for key, _ in part.slabs)}
        saved = {saved for key in keys for saved, _ in self.uses.get(key, ())}
        saved |= {name for key in keys for sources in self.opaque_of.get(key, ()) for name in self.opaque[sources]}
        return {self.layout.path(self.layout.places[name].file) for name in saved}

    def refuse_missing(self) -> None:
        """Refuse tensors that have a value nowhere."""
        blank, match = self.blank, self.blank.match
        absent = {id(tensor) for key, tensor in match.state.items() if key not in blank.held} - self.loaded.keys()
        needed = {id(tensor) for tensor in self.state.values()} | {id(old) for old in blank.merged}
        if missing := sorted(key for key, tensor in match.state.items() if id(tensor) in absent & needed):
            raise CheckpointError(
                f"{match.index.name!r} does not hold {len(missing)} tensors of {type(blank.model).__name__}: "
                f"{listed(missing)}. Give the class that was trained with --auto-class (auto_class), and the config "
                "that belongs to it with --config (config)."
            )


# ---- planning ----


def plan_parts(material: Material, *, part_bytes: int = PART_BYTES) -> list[Part]:
    """All parts, the same on every rank, in the order of the files. Nothing but the places of chunks is read."""
    order: dict[str, tuple[str, int]] = {}
    for place in material.layout.places.values():
        for key in place.tensor.sources:
            order[key] = min(order.get(key, (place.file, place.offset)), (place.file, place.offset))
    group_of = _groups(material, order)
    parts: list[Part] = []
    slabs: list[tuple[str, Box]] = []
    filled, done = 0, set[str]()
    for key in sorted(order, key=order.__getitem__):
        if key in group_of and key not in done:
            parts.append(_computing(material, group_of[key]))
            done |= group_of[key]
        if key in group_of:
            continue
        for box in _cut(material, key, part_bytes):
            num_bytes = box.numel * material.itemsize(key)
            if slabs and filled + num_bytes > part_bytes:
                parts.append(Part(slabs=tuple(slabs), num_bytes=filled))
                slabs, filled = [], 0
            slabs.append((key, box))
            filled += num_bytes
    return [*parts, Part(slabs=tuple(slabs), num_bytes=filled)] if slabs else parts


def deal(parts: Sequence[Part], number: int) -> list[list[Part]]:
    """The parts of each of so many processes: each part in turn goes to the process that has least to do by then."""
    dealt: list[list[Part]] = [[] for _ in range(number)]
    loads = [0] * number
    for part in parts:
        least = loads.index(min(loads))
        dealt[least].append(part)
        loads[least] += part.num_bytes * (_COMPUTING if part.together else 1)
    return dealt


def _groups(material: Material, keys: Iterable[str]) -> dict[str, set[str]]:
    """Every tensor of the model that is computed, by key, with all tensors that are computed with it."""
    keys_of: dict[int, list[str]] = {}
    for key in keys:
        keys_of.setdefault(id(material.state[key]), []).append(key)
    together = [[key for one in objects for key in keys_of.get(one, ())] for objects in material.adapted.values()]
    together += map(list, material.opaque)
    by_conversion: dict[str, list[str]] = {}
    for key in keys:
        stored = material.stored(key)
        if stored is not None and stored.pieces is None:
            by_conversion.setdefault(material.blank.match.load_map.groups[material.loaded_as(key)].target, []).append(
                key
            )
    together += by_conversion.values()
    group_of: dict[str, set[str]] = {}
    for found in together:
        joined = set(found).union(*(group_of.get(key, ()) for key in found))
        group_of |= dict.fromkeys(joined, joined)
    return group_of


def _computing(material: Material, keys: set[str]) -> Part:
    objects = {id(material.state[key]) for key in keys}
    wrappers = tuple(wrapper for wrapper, merged in material.adapted.items() if merged & objects)
    num_bytes = sum(material.state[key].numel() * material.itemsize(key) for key in keys)
    return Part(together=tuple(sorted(keys)), wrappers=wrappers, num_bytes=num_bytes)


def _cut(material: Material, key: str, part_bytes: int) -> list[Box]:
    """A tensor in boxes of bounded size; whole if a box would be read or written in runs of a few bytes."""
    tensor, whole = material.state[key], Box.whole(material.state[key].shape)
    boxes = list(whole.slabs(part_bytes, tensor.dtype.itemsize))
    if len(boxes) > 1:
        memory, stored = torch.empty(boxes[0].length, dtype=tensor.dtype, device="meta"), material.stored(key)
        reads, _ = reads_of([] if stored is None else [(memory, stored, boxes[0])], material.blank.match.index)
        by_tensor: dict[str, list[Transfer]] = {}
        for saved, transfer in material.writes(key, memory, boxes[0]):
            by_tensor.setdefault(saved, []).append(transfer)
        if any(map(is_scattered, [reads, *by_tensor.values()])):
            return [whole]
    return boxes


# ---- making ----


def make_parts(
    material: Material, parts: Iterable[Part], *, staging_bytes: int, on_bytes: Callable[[int], object]
) -> TransferStats:
    """Read, compute and write parts, one after the other; the cost of writing.

    No rank communicates.
    """
    stats = TransferStats()
    half = staging_bytes // 2
    with (
        Reader(staging_bytes=half, side=None, read_ahead=True) as reader,
        Writer(staging_bytes=half, side=None, on_bytes=on_bytes) as writer,
    ):
        for part in parts:
            transfers = _computed(material, part, reader) if part.together else _moved(material, part, reader)
            stats += writer.begin(transfers)()
            del transfers  # and with them the memory of this part
    return stats


def _moved(material: Material, part: Part, reader: Reader) -> list[Transfer]:
    """The transfers that write tensors which are only moved; their memory has been read."""
    reads: list[ReadPlace] = []
    writes: list[Transfer] = []
    for key, box in part.slabs:
        tensor, stored = material.state[key].detach(), material.stored(key)
        if stored is None:
            memory = memory_view(tensor, box.start, box.length)
        else:
            memory = torch.empty(box.length, dtype=tensor.dtype)
            reads.append((memory, stored, box))
        writes += [transfer for _, transfer in material.writes(key, memory, box)]
    read_into(reads, material.blank.match.index, reader, staging_bytes=PART_BYTES)
    return writes


def _computed(material: Material, part: Part, reader: Reader) -> list[Transfer]:
    """The transfers that write tensors which are computed; their memory holds the results."""
    values = _Values(material, reader)
    copies: dict[nn.Parameter, nn.Parameter] = {}  # shared: what two adapters change, both change in one place
    merged: dict[int, torch.Tensor] = {}
    for wrapper in part.wrappers:
        twin = whole_copy(wrapper, values.of, copies)
        merged |= {id(material.blank.merged[old]): value for old, value in merged_tensors(wrapper, twin)}
    whole = {}
    for key in part.together:
        tensor = material.state[key]
        whole[key] = merged[id(tensor)] if id(tensor) in merged else values.of(tensor)
    writes = [
        transfer for key, value in whole.items() for _, transfer in material.writes(key, value, Box.whole(value.shape))
    ]
    for sources in {sources for key in whole for sources in material.opaque_of.get(key, ())}:
        results = revert_group(material.blank.model, {key: whole[key] for key in sorted(sources)})
        for saved, place in material.opaque[sources].items():
            writes.append(
                Transfer(
                    file=material.layout.path(place.file),
                    start=place.offset,
                    dtype=place.dtype,
                    strides=row_major_strides(place.tensor.shape),
                    memory=results[saved],
                )
            )
    return writes


class _Values:
    """Whole values of tensors of the base, read when they are asked for; results of a conversion are made once."""

    def __init__(self, material: Material, reader: Reader) -> None:
        self._material, self._reader = material, reader
        self._converted: dict[str, torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A value of its own for a tensor of the base, or of an adapter."""
        match = self._material.blank.match
        key = self._material.loaded.get(id(tensor))
        if key is None:
            return tensor.detach().clone()
        stored = match.loaded[key]
        if stored.pieces is None:
            if key not in self._converted:
                self._convert(key, tensor.dtype)
            return self._converted[key]
        memory = torch.empty(tensor.shape, dtype=tensor.dtype)
        read_into([(memory, stored, Box.whole(tensor.shape))], match.index, self._reader, staging_bytes=PART_BYTES)
        return memory

    def _convert(self, key: str, dtype: torch.dtype) -> None:
        """Run one conversion of whole stored tensors, cast to the model's dtype before as transformers does."""
        match = self._material.blank.match
        group, index = match.load_map.groups[key], match.index
        whole = {name: torch.empty(index.tensors[name].shape, dtype=dtype) for name, _ in group.members}
        reads = [whole_place(memory, index.tensors[name]) for name, memory in whole.items()]
        read_into(reads, index, self._reader, staging_bytes=PART_BYTES)
        self._converted |= convert_group(self._material.blank.model, group, whole)
