"""A checkpoint written from another one, part by part, in bounded memory.

Tensors that are only moved, on the way in and on the way out, are read slab by slab and written from there to their
places. Tensors that something computes (an adapter is merged, or a conversion does more than move data) are read whole,
together with the tensors that they are computed with, and written whole.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from hf_fsdp_tools.distributed.boxes import Box
from hf_fsdp_tools.distributed.shards import memory_view
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.loading.conversion import persistent_tensors, revert_group
from hf_fsdp_tools.loading.fill import read_converted, read_into
from hf_fsdp_tools.loading.io.files import STAGING_BYTES, Reader, TransferStats, Writer
from hf_fsdp_tools.loading.io.transfer import Place as ReadPlace
from hf_fsdp_tools.loading.io.transfer import Transfer
from hf_fsdp_tools.loading.quantized.windows import batches
from hf_fsdp_tools.loading.regions import Piece
from hf_fsdp_tools.loading.symbolic import PieceTensor
from hf_fsdp_tools.saving.layout import Layout, Place
from hf_fsdp_tools.saving.material import FIT, Material
from hf_fsdp_tools.saving.merged_model import adapted_parameters, connected, merge, whole_copies
from hf_fsdp_tools.text import listed

_PART_BYTES = 64 * 2**20
"""Bytes of tensors that a process moves at a time: enough to keep 16 threads busy with 8 MiB each for a moment, and
little beside what importing torch takes. (assumed)"""

_COMPUTING = 4
"""How much longer a byte takes that is computed than one that is moved, for dealing parts out. (assumed)"""

Part = list[tuple[str, Box]]
"""What one process makes at a time: boxes of tensors of the model, by key, all of them moved or all computed."""


class Rewrite:
    """How a checkpoint is made of its material; the same on every rank. Nothing but the places of chunks is read."""

    def __init__(self, material: Material, layout: Layout) -> None:
        self._material, self._match = material, material.match
        self._state = persistent_tensors(material.model)
        loaded = (key for key in self._match.loaded if key not in material.of_adapter)
        self._loaded = {id(self._match.state[key]): key for key in loaded}
        """The key in `match.loaded` of each tensor that is read from files, by the identity of the tensor."""
        self._refuse_missing()
        self._moved: dict[str, list[tuple[Place, Piece]]] = {}
        """Every piece of a saved tensor, by the key of the tensor of the model that it is cut from."""
        self._reverted: dict[frozenset[str], dict[str, Place]] = {}
        """The saved tensors that a reverse conversion computes, by the tensors that it takes together."""
        order: dict[str, tuple[Path, int]] = {}
        for saved, place in layout.places.items():
            if place.tensor.pieces is None:
                self._reverted.setdefault(place.tensor.sources, {})[saved] = place
            for piece in place.tensor.pieces or ():
                self._moved.setdefault(piece.source, []).append((place, piece))
            for key in place.tensor.sources:
                order[key] = min(order.get(key, (place.file, place.offset)), (place.file, place.offset))
        self._keys = sorted(order, key=order.__getitem__)
        """The tensors of the model, in the order of the files."""
        self._together = self._computed_together()

    def parts_of(self, rank: int, num_ranks: int) -> list[Part]:
        """The parts of one rank: in the order of the files, each goes to the rank that has least to do by then."""
        mine: list[Part] = []
        loads = [0] * num_ranks
        for steps in batches(self._steps(), _PART_BYTES, self._held_bytes, lambda s: id(self._together.get(s[0][0]))):
            part = [box for step in steps for box in step]
            least = loads.index(min(loads))
            loads[least] += self.num_bytes(part) * (_COMPUTING if part[0][0] in self._together else 1)
            mine += [part] if least == rank else []
        return mine

    def _steps(self) -> Iterator[Part]:
        """Yield the least that can be made at a time: a slab of a tensor, or all tensors that are computed together."""
        done: set[str] = set()
        for key in self._keys:
            whole = Box.whole(self._state[key].shape)
            if key not in self._together:
                yield from ([(key, box)] for box in whole.slabs(_PART_BYTES, self._state[key].dtype.itemsize))
            elif key not in done:
                done |= self._together[key]
                yield [(each, Box.whole(self._state[each].shape)) for each in sorted(self._together[key])]

    def _held_bytes(self, part: Part) -> int:
        """Bytes of a part in memory."""
        return sum(box.numel * self._state[key].dtype.itemsize for key, box in part)

    def num_bytes(self, part: Part) -> int:
        """Bytes of a part in the files that are written."""
        return sum(
            box.numel * (self._moved[key][0][0].dtype if key in self._moved else self._state[key].dtype).itemsize
            for key, box in part
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

    def _computed_together(self) -> dict[str, set[str]]:
        """Every tensor of the model that is computed, by key, with all tensors that are computed with it."""
        names: dict[int, list[str]] = {}
        converted: dict[str, list[str]] = {}
        for key in self._keys:
            tensor = self._state[key]
            names.setdefault(id(tensor), []).append(key)
            stored = self._stored(tensor)
            if stored is not None and stored.pieces is None:
                group = self._match.load_map.groups[self._loaded[id(tensor)]]
                converted.setdefault(group.target, []).append(key)
        adapted = [
            [k for p in adapted_parameters(wrapper).values() for k in names.get(id(self._material.merged[p]), ())]
            for wrapper in self._material.wrappers
        ]
        return connected([*adapted, *self._reverted, *converted.values()])

    def _stored(self, tensor: torch.Tensor) -> PieceTensor | None:
        """The stored elements that a tensor of the model is made of; None where an adapter has its value."""
        loaded = self._loaded.get(id(tensor))
        return None if loaded is None else self._match.loaded[loaded]

    # ---- making ----

    def _transfers(self, part: Part, reader: Reader) -> Iterator[Transfer]:
        """Yield what writes a part, from memory that holds its values."""
        is_computed = part[0][0] in self._together
        if is_computed:
            values = self._computed([self._state[key] for key, _ in part], reader)
        else:
            values = self._read([(self._state[key], box) for key, box in part], reader)
        for (key, box), memory in zip(part, values, strict=True):
            for place, piece in self._moved.get(key, ()):
                yield from place.transfers(piece, memory.contiguous(), box, self._state[key].shape)
        whole = {key: value for (key, _), value in zip(part, values, strict=True)}
        for sources, places in self._reverted.items():
            if is_computed and sources <= whole.keys():
                results = revert_group(self._material.model, {key: whole[key] for key in sorted(sources)})
                yield from (place.transfer(results[saved]) for saved, place in places.items())

    def _read(self, boxes: Iterable[tuple[torch.Tensor, Box]], reader: Reader) -> list[torch.Tensor]:
        """The values of boxes of tensors that no conversion computes."""
        values: list[torch.Tensor] = []
        reads: list[ReadPlace] = []
        for tensor, box in boxes:
            stored = self._stored(tensor)
            if stored is None:
                values.append(memory_view(tensor.detach(), box.start, box.length))
            else:
                values.append(torch.empty(box.length, dtype=tensor.dtype))
                reads.append((values[-1], stored, box))
        read_into(reads, self._match.index, reader, staging_bytes=_PART_BYTES)
        return values

    def _computed(self, tensors: list[torch.Tensor], reader: Reader) -> list[torch.Tensor]:
        """Whole tensors of the model, merged or converted."""
        material, match = self._material, self._match
        converted: dict[str, torch.Tensor] = {}

        def value(tensor: torch.Tensor) -> torch.Tensor:
            """A value of its own for a tensor of the base, or of an adapter."""
            stored = self._stored(tensor)
            if stored is None:
                return tensor.detach().clone()
            if stored.pieces is not None:
                return self._read([(tensor, Box.whole(tensor.shape))], reader)[0]
            key = self._loaded[id(tensor)]
            if key not in converted:
                group = match.load_map.groups[key]
                results, _ = read_converted(
                    material.model, group, match.index, reader, dtype=tensor.dtype, staging_bytes=_PART_BYTES
                )
                converted.update(results)
            return converted[key]

        wanted = {id(tensor) for tensor in tensors}
        new = {old: id(tensor) for old, tensor in material.merged.items()}
        wrappers = [w for w in material.wrappers if any(new[p] in wanted for p in adapted_parameters(w).values())]
        merged = {new[old]: whole for old, whole in merge(whole_copies(wrappers, value)).items()}
        return [merged[id(tensor)] if id(tensor) in merged else value(tensor) for tensor in tensors]
