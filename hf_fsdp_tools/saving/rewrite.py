"""A checkpoint written from another one, part by part, in bounded memory.

A part is one of two things. Tensors that are only moved, on the way in and on the way out, are read slab by slab and
written from there to their places. Tensors that something computes (an adapter is merged, or a conversion does more
than move data) are read whole, together with the tensors that they are computed with, and written whole.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from hf_fsdp_tools.distributed.boxes import Box
from hf_fsdp_tools.distributed.shards import memory_view
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.loading.conversion import convert_group, persistent_tensors, revert_group
from hf_fsdp_tools.loading.fill import read_into
from hf_fsdp_tools.loading.io.files import Reader, TransferStats, Writer
from hf_fsdp_tools.loading.io.transfer import Place as ReadPlace
from hf_fsdp_tools.loading.io.transfer import Transfer, whole_place
from hf_fsdp_tools.loading.regions import Piece
from hf_fsdp_tools.loading.symbolic import PieceTensor
from hf_fsdp_tools.saving.layout import Layout, Place
from hf_fsdp_tools.saving.material import FIT, Material
from hf_fsdp_tools.saving.merged_model import adapted_parameters, connected, merged_tensors, whole_copy
from hf_fsdp_tools.text import listed

STAGING_BYTES = 64 * 2**20
"""Bound of the staging buffers of one process: the default of loading and saving."""

_PART_BYTES = 64 * 2**20
"""Bytes of tensors that a process moves at a time: enough to keep 16 threads busy with 8 MiB each for a moment, and
little beside what importing torch takes. (assumed)"""


_COMPUTING = 4
"""How much longer a byte takes that is computed than one that is moved, for dealing parts out. (assumed)"""

Part = tuple[list[tuple[str, Box]], bool]
"""What one process makes at a time: boxes of tensors of the model, by key, and whether they are computed together."""


class Rewrite:
    """How a checkpoint is made of its material; the same on every rank. Nothing but the places of chunks is read."""

    def __init__(self, material: Material, layout: Layout) -> None:
        self._material, self._layout, self._match = material, layout, material.match
        self._state = persistent_tensors(material.model)
        loaded = (key for key in self._match.loaded if key not in material.of_adapter)
        self._loaded = {id(self._match.state[key]): key for key in loaded}
        """The key in `match.loaded` of each tensor that is read from files, by the identity of the tensor."""
        self._refuse_missing()
        self._moved: dict[str, list[tuple[Place, Piece]]] = {}
        """Every piece of a saved tensor, by the key of the tensor of the model that it is cut from."""
        self._reverted: dict[frozenset[str], dict[str, Place]] = {}
        """The saved tensors that a reverse conversion computes, by the tensors that it takes together."""
        for saved, place in layout.places.items():
            if place.tensor.pieces is None:
                self._reverted.setdefault(place.tensor.sources, {})[saved] = place
            for piece in place.tensor.pieces or ():
                self._moved.setdefault(piece.source, []).append((place, piece))

    def parts_of(self, rank: int, num_ranks: int) -> list[Part]:
        """The parts of one rank: in the order of the files, each goes to the rank that has least to do by then."""
        mine: list[Part] = []
        loads = [0] * num_ranks
        for part in self._parts():
            least = loads.index(min(loads))
            loads[least] += self.num_bytes(part) * (_COMPUTING if part[1] else 1)
            mine += [part] if least == rank else []
        return mine

    def _parts(self) -> Iterator[Part]:
        """Yield all parts, in the order of the files."""
        order: dict[str, tuple[Path, int]] = {}
        for place in self._layout.places.values():
            for key in place.tensor.sources:
                order[key] = min(order.get(key, (place.file, place.offset)), (place.file, place.offset))
        keys = sorted(order, key=order.__getitem__)
        together = self._computed_together(keys)
        slabs: list[tuple[str, Box]] = []
        filled = 0
        for key in keys:
            whole = Box.whole(self._state[key].shape)
            if key in together:
                if key == min(together[key], key=order.__getitem__):
                    yield [(each, Box.whole(self._state[each].shape)) for each in sorted(together[key])], True
                continue
            for box in whole.slabs(_PART_BYTES, self._state[key].dtype.itemsize):
                num_bytes = box.numel * self._state[key].dtype.itemsize
                if slabs and filled + num_bytes > _PART_BYTES:
                    yield slabs, False
                    slabs, filled = [], 0
                slabs.append((key, box))
                filled += num_bytes
        if slabs:
            yield slabs, False

    def num_bytes(self, part: Part) -> int:
        """Bytes of a part in the files that are written."""
        return sum(
            box.numel * (self._moved[key][0][0].dtype if key in self._moved else self._state[key].dtype).itemsize
            for key, box in part[0]
        )

    def write(self, parts: Iterable[Part], folder: Path, *, on_bytes: Callable[[int], object]) -> TransferStats:
        """Read, compute and write parts, one after the other, to the files in a folder; the cost of writing.

        No rank communicates.
        """
        stats, half = TransferStats(), STAGING_BYTES // 2
        with (
            Reader(staging_bytes=half, side=None, read_ahead=True) as reader,
            Writer(staging_bytes=half, side=None, on_bytes=on_bytes) as writer,
        ):
            for part in parts:
                transfers = [replace(t, file=folder / t.file) for t in self._transfers(part, reader)]
                stats += writer.begin(transfers)()
                del transfers  # and with them the memory of this part
        return stats

    # ---- planning ----

    def _refuse_missing(self) -> None:
        """Refuse tensors that have a value nowhere."""
        state, of_adapter = self._match.state, self._material.of_adapter
        absent = {id(tensor) for key, tensor in state.items() if key not in of_adapter} - self._loaded.keys()
        needed = {id(tensor) for tensor in (*self._state.values(), *self._material.merged)}
        if missing := sorted(key for key, tensor in state.items() if id(tensor) in absent & needed):
            raise CheckpointError(
                f"{self._match.index.name!r} does not hold {len(missing)} tensors of "
                f"{type(self._material.model).__name__}: {listed(missing)}. {FIT}"
            )

    def _computed_together(self, keys: Iterable[str]) -> dict[str, set[str]]:
        """Every tensor of the model that is computed, by key, with all tensors that are computed with it."""
        names: dict[int, list[str]] = {}
        converted: dict[str, list[str]] = {}
        for key in keys:
            names.setdefault(id(self._state[key]), []).append(key)
            stored = self._stored(key)
            if stored is not None and stored.pieces is None:
                group = self._match.load_map.groups[self._loaded[id(self._state[key])]]
                converted.setdefault(group.target, []).append(key)
        adapted = [
            [k for p in adapted_parameters(wrapper).values() for k in names.get(id(self._material.merged[p]), ())]
            for wrapper in self._material.wrappers
        ]
        return connected([*adapted, *self._reverted, *converted.values()])

    def _stored(self, key: str) -> PieceTensor | None:
        """The stored elements that a tensor of the model is made of; None where an adapter has its value."""
        loaded = self._loaded.get(id(self._state[key]))
        return None if loaded is None else self._match.loaded[loaded]

    # ---- making ----

    def _transfers(self, part: Part, reader: Reader) -> Iterator[Transfer]:
        """Yield what writes a part, from memory that holds its values."""
        boxes, is_computed = part
        values = self._computed([key for key, _ in boxes], reader) if is_computed else self._read(boxes, reader)
        for (key, box), memory in zip(boxes, values, strict=True):
            for place, piece in self._moved.get(key, ()):
                yield from place.transfers(piece, memory.contiguous(), box, self._state[key].shape)
        whole = {key: value for (key, _), value in zip(boxes, values, strict=True)}
        for sources, places in self._reverted.items():
            if is_computed and sources <= whole.keys():
                results = revert_group(self._material.model, {key: whole[key] for key in sorted(sources)})
                yield from (place.transfer(results[saved]) for saved, place in places.items())

    def _read(self, boxes: Iterable[tuple[str, Box]], reader: Reader) -> list[torch.Tensor]:
        """The boxes of tensors that are only moved."""
        values: list[torch.Tensor] = []
        reads: list[ReadPlace] = []
        for key, box in boxes:
            tensor, stored = self._state[key].detach(), self._stored(key)
            if stored is None:
                values.append(memory_view(tensor, box.start, box.length))
            else:
                values.append(torch.empty(box.length, dtype=tensor.dtype))
                reads.append((values[-1], stored, box))
        read_into(reads, self._match.index, reader, staging_bytes=_PART_BYTES)
        return values

    def _computed(self, keys: Iterable[str], reader: Reader) -> list[torch.Tensor]:
        """Whole tensors of the model, merged or converted."""
        tensors = [self._state[key] for key in keys]
        objects = {id(tensor) for tensor in tensors}
        converted: dict[str, torch.Tensor] = {}

        def value(tensor: torch.Tensor) -> torch.Tensor:
            """A value of its own for a tensor of the base, or of an adapter."""
            key = self._loaded.get(id(tensor))
            if key is None:
                return tensor.detach().clone()
            stored = self._match.loaded[key]
            if stored.pieces is None:
                if key not in converted:
                    converted.update(self._convert(key, tensor.dtype, reader))
                return converted[key]
            memory = torch.empty(tensor.shape, dtype=tensor.dtype)
            place = memory, stored, Box.whole(tensor.shape)
            read_into([place], self._match.index, reader, staging_bytes=_PART_BYTES)
            return memory

        merged: dict[int, torch.Tensor] = {}
        copies: dict[nn.Parameter, nn.Parameter] = {}  # shared: what two adapters change, both change in one place
        for wrapper in self._material.wrappers:
            new = {old: id(self._material.merged[old]) for old in adapted_parameters(wrapper).values()}
            if objects & set(new.values()):
                twin = whole_copy(wrapper, value, copies)
                merged |= {new[old]: whole for old, whole in merged_tensors(wrapper, twin).items()}
        return [merged[id(tensor)] if id(tensor) in merged else value(tensor) for tensor in tensors]

    def _convert(self, key: str, dtype: torch.dtype, reader: Reader) -> dict[str, torch.Tensor]:
        """Run one conversion of whole stored tensors, cast to the model's dtype before as transformers does."""
        group, index = self._match.load_map.groups[key], self._match.index
        whole = {name: torch.empty(index.tensors[name].shape, dtype=dtype) for name, _ in group.members}
        reads = [whole_place(memory, index.tensors[name]) for name, memory in whole.items()]
        read_into(reads, index, reader, staging_bytes=_PART_BYTES)
        return convert_group(self._material.model, group, whole)
