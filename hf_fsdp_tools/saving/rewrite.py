"""A checkpoint written from another one, part by part, in bounded memory.

Tensors that are only moved, on the way in and on the way out, are read and written slab by slab. Tensors that something
computes (an adapter is merged, or a conversion does more than move data) are read and written whole, together with the
tensors that they are computed with.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hf_fsdp_tools.distributed.shards import Box, memory_view
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.loading.conversion import persistent_tensors, revert_group
from hf_fsdp_tools.loading.fill import read_converted, read_into
from hf_fsdp_tools.loading.io.files import STAGING_BYTES, Reader, TransferStats, Writer
from hf_fsdp_tools.loading.io.transfer import Place as ReadPlace
from hf_fsdp_tools.loading.io.transfer import Transfer
from hf_fsdp_tools.loading.quantized.dequantize import batches
from hf_fsdp_tools.loading.regions import Piece
from hf_fsdp_tools.loading.symbolic import PieceTensor
from hf_fsdp_tools.saving.layout import Layout, Place
from hf_fsdp_tools.saving.material import FIT, Material
from hf_fsdp_tools.saving.merged_model import adapted_parameters, connected, merge, whole_copies
from hf_fsdp_tools.text import listed

_PART_BYTES = 64 * 2**20
"""Bytes of tensors that a process moves at a time: enough to keep 16 threads busy with 8 MiB each for a moment, and
little beside what importing torch takes. (assumed)"""


@dataclass(frozen=True)
class Part:
    """What one process makes at a time."""

    boxes: list[tuple[str, torch.Tensor, Box]]
    """Boxes of tensors of the model, each with the key and the tensor."""

    is_computed: bool

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        return sum(box.numel * tensor.dtype.itemsize for _, tensor, box in self.boxes)


class Rewrite:
    """How a checkpoint is made of its material; the same on every rank. Nothing but the places of chunks is read."""

    def __init__(self, material: Material, layout: Layout) -> None:
        self._material, self._match = material, material.match
        self._state = persistent_tensors(material.model)
        loaded = (key for key in self._match.loaded if key not in material.of_adapter)
        self._loaded = {id(self._match.state[key]): key for key in loaded}
        """The key in `match.loaded` of each tensor that is read from files, by the identity of the tensor."""
        self._refuse_missing()
        self._moved: dict[str, list[tuple[Place, Piece]]] = defaultdict(list)
        """Every piece of a saved tensor, by the key of the tensor of the model that it is cut from."""
        self._reverted: dict[frozenset[str], dict[str, Place]] = defaultdict(dict)
        """The saved tensors that a reverse conversion computes, by the tensors that it takes together."""
        self._keys: dict[str, None] = {}
        """The tensors of the model, in the order of the files."""
        for saved, place in sorted(layout.places.items(), key=lambda item: (item[1].file, item[1].offset)):
            self._keys |= dict.fromkeys(sorted(place.tensor.sources))
            if place.tensor.pieces is None:
                self._reverted[place.tensor.sources][saved] = place
            for piece in place.tensor.pieces or ():
                self._moved[piece.source].append((place, piece))

    def parts_of(self, rank: int, num_ranks: int) -> list[Part]:
        """The parts of one rank: each goes to the rank that has the fewest bytes by then."""
        mine: list[Part] = []
        loads = [0] * num_ranks
        for part in self._parts():
            least = loads.index(min(loads))
            loads[least] += part.num_bytes
            mine += [part] if least == rank else []
        return mine

    def write(self, parts: Iterable[Part], folder: Path, *, on_bytes: Callable[[int], object]) -> TransferStats:
        """Read, compute and write parts, one after the other, to the files in a folder; the cost of writing.

        No rank communicates.
        """
        stats, half = TransferStats(), STAGING_BYTES // 2
        with (
            Reader(staging_bytes=half, side=None, read_ahead=True) as reader,
            Writer(staging_bytes=half, side=None) as writer,
        ):
            for part in parts:
                transfers = [replace(t, file=folder / t.file) for t in self._transfers(part, reader)]
                stats += writer.begin(transfers)()
                del transfers  # and with them the memory of this part
                on_bytes(part.num_bytes)
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

    def _parts(self) -> Iterator[Part]:
        """Yield all tensors that are computed together, and then what is moved, in slabs."""
        together = self._computed_together()
        for keys in dict.fromkeys(frozenset(together[key]) for key in self._keys if key in together):
            yield Part([(k, self._state[k], Box.whole(self._state[k].shape)) for k in sorted(keys)], is_computed=True)
        moved = ((key, self._state[key]) for key in self._keys if key not in together)
        slabs = (
            (key, tensor, slab)
            for key, tensor in moved
            for slab in Box.whole(tensor.shape).slabs(_PART_BYTES, tensor.dtype.itemsize)
        )
        for boxes in batches(slabs, _PART_BYTES, lambda slab: slab[2].numel * slab[1].dtype.itemsize):
            yield Part(boxes, is_computed=False)

    def _computed_together(self) -> dict[str, set[str]]:
        """Every tensor of the model that is computed, by key, with all tensors that are computed with it."""
        names: dict[int, list[str]] = defaultdict(list)
        converted: dict[str, list[str]] = defaultdict(list)
        for key in self._keys:
            names[id(self._state[key])].append(key)
            stored = self._stored(self._state[key])
            if stored is not None and stored.pieces is None:
                group = self._match.load_map.groups[self._loaded[id(self._state[key])]]
                converted[group.target].append(key)
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
        boxes = [(tensor, box) for _, tensor, box in part.boxes]
        values = (
            self._computed([tensor for tensor, _ in boxes], reader) if part.is_computed else self._read(boxes, reader)
        )
        for (key, tensor, box), memory in zip(part.boxes, values, strict=True):
            for place, piece in self._moved.get(key, ()):
                yield from place.transfers(piece, memory.contiguous(), box, tensor.shape)
        if not part.is_computed:
            return
        whole = {key: value for (key, _, _), value in zip(part.boxes, values, strict=True)}
        for sources, places in self._reverted.items():
            if sources <= whole.keys():
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
                group, dtype = match.load_map.groups[key], tensor.dtype
                converted.update(
                    read_converted(material.model, group, match.index, reader, dtype=dtype, staging_bytes=_PART_BYTES)[
                        0
                    ]
                )
            return converted[key]

        new = {old: id(tensor) for old, tensor in material.merged.items()}
        ids = set(map(id, tensors))
        wrappers = [w for w in material.wrappers if any(new[p] in ids for p in adapted_parameters(w).values())]
        merged = {new[old]: whole for old, whole in merge(whole_copies(wrappers, value)).items()}
        return [merged[id(tensor)] if id(tensor) in merged else value(tensor) for tensor in tensors]
