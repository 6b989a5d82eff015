"""Dequantise stored weights while they are read: each rank its own values, with the scales of the blocks that it meets.

A rule takes each value with its scale alone, so a part of a block depends on nothing outside it: the shards together
are, bit for bit, what transformers makes of the whole weight.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import NamedTuple, Protocol, TypeVar

import torch

from hf_fsdp_tools.distributed.shards import Box, memory_view
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.loading.formats.stored import QuantizedTensor, Stored
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.loading.io.files import Reader, TransferStats
from hf_fsdp_tools.loading.io.transfer import Transfer, transfer_of
from hf_fsdp_tools.loading.regions import View, row_major_strides, slice_piece
from hf_fsdp_tools.loading.symbolic import PieceTensor
from hf_fsdp_tools.modeling.codecs.base import BY_ACTIVATION
from hf_fsdp_tools.modeling.packed_weight import unpacked

T = TypeVar("T")

WORK_BYTES = 32
"""Bytes of host memory that packing or dequantising one value takes on a CPU, intermediate tensors included. (assumed)
"""


class Bounds(NamedTuple):
    """How much is worked on at a time."""

    scale_bytes: int
    """Scales that are joined together."""
    window_bytes: int
    """Values that are read together; one such window is worked on while the next one is read."""
    part_values: int
    """Values that one call takes."""

    @classmethod
    def of(cls, device: torch.device, staging_bytes: int) -> "Bounds":
        """On a CPU, half of `staging_bytes` in all; buffers for reading take the other half.

        For an accelerator: 16 reads of 16 MiB in flight, and the scales of eight ranks' windows together. (assumed)
        """
        if device.type != "cpu":
            return cls(scale_bytes=2**28, window_bytes=2**28, part_values=2**26)
        return cls(staging_bytes // 8, staging_bytes // 16, staging_bytes // (4 * WORK_BYTES))


def batches(items: Iterable[T], num_bytes: int, size_of: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield neighbours that together take at most `num_bytes`, or single items."""
    group: list[T] = []
    held = 0
    for item in items:
        size = size_of(item)
        if group and held + size > num_bytes:
            yield group
            group, held = [], 0
        group.append(item)
        held += size
    if group:
        yield group


class Work(Protocol):
    """Values that are read, and then worked on."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory for them."""

    def begin(self) -> Iterable[Transfer]:
        """Make memory for them; give the transfers that fill it."""

    def finish(self) -> None:
        """Work on what was read."""


def work_in_windows(works: Iterable[Work], reader: Reader, window_bytes: int) -> TransferStats:
    """Read so many bytes after the other, and work on each while the next ones are read; what reading cost."""
    stats = TransferStats()
    arrived: list[Work] = []

    def finish_arrived() -> None:
        while arrived:  # each is forgotten, and its memory freed, when it is done
            arrived.pop(0).finish()

    for window in batches(works, window_bytes, lambda work: work.num_bytes):
        wait = reader.begin([transfer for work in window for transfer in work.begin()])
        try:
            finish_arrived()
        finally:
            stats += wait()
        arrived = window
    finish_arrived()
    return stats


class Slab:
    """Rows and columns of a quantised matrix that are read and dequantised together, and their place in memory.

    The rows are those of a view. The columns are rounded out to whole blocks, of which only the view's own are read.
    """

    def __init__(self, tensor: QuantizedTensor, view: View, memory: torch.Tensor) -> None:
        """Values go to memory of the lengths of the view, of any strides, dtype and device."""
        self.tensor, self.view, self.memory = tensor, view, memory
        columns = tensor.form.columns
        first_row, self.first = divmod(view.offset, columns)
        dims = [d for d, n in enumerate(view.length) if n > 1]
        self.row_dims = [d for d in dims if not view.strides[d] % columns]
        self.column_dims = [d for d in dims if view.strides[d] % columns]
        self.rows = View(
            offset=first_row,
            length=tuple(view.length[d] for d in self.row_dims),
            strides=tuple(view.strides[d] // columns for d in self.row_dims),
        )
        self.stop = self.first + sum((view.length[d] - 1) * view.strides[d] for d in self.column_dims) + 1
        self.begin_at = self.first // tensor.packed * tensor.packed
        self.end_at = -(-self.stop // tensor.packed) * tensor.packed
        for wide in sorted((part.block[1] for part in tensor.form.scales.values()), reverse=True):
            if self.begin_at // wide != (self.end_at - 1) // wide:
                self.begin_at, self.end_at = self.begin_at // wide * wide, -(-self.end_at // wide) * wide

    def cut(self, many: int) -> Iterator["Slab"]:
        """Yield parts of whole columns and rows, of which each meets at most `many` values; rows are divided first."""
        view, form = self.view, self.tensor.form
        dims = sorted((*self.row_dims, *self.column_dims), key=lambda d: -view.strides[d])
        is_regular = self.stop <= form.columns
        if not dims or (is_regular and self.numel <= many):
            yield copy(self)  # with which what is read for it is forgotten
            return
        # A view that runs on from row to row is halved until each half keeps to the columns that it begins in.
        dim = dims[0] if is_regular else max(self.column_dims, key=lambda d: view.strides[d])
        length = view.length[dim]
        count = max(1, length * many // self.numel) if is_regular else length // 2
        # Cuts between neighbouring rows are cuts between blocks where these are smaller: no scale is read twice.
        is_rows = view.strides[dim] == form.columns
        parts = [form.values, *form.scales.values()]
        high = max((each.block[0] for each in parts if is_rows and each.block[0] <= count), default=1)
        i = 0
        while i < length:
            taken = min(count // high * high - (view.offset // form.columns + i) % high, length - i)
            start = [i if d == dim else 0 for d in range(len(view.length))]
            lengths = [taken if d == dim else n for d, n in enumerate(view.length)]
            yield from Slab(self.tensor, view.crop(start, lengths), self.memory.narrow(dim, i, taken)).cut(many)
            i += taken

    @property
    def stored_bytes(self) -> int:
        """Bytes of the values as they are stored, and their part of the scales."""
        return round(self.memory.numel() * self.tensor.num_bytes / max(1, math.prod(self.tensor.shape)))

    @property
    def numel(self) -> int:
        """Values of the rows and columns."""
        return math.prod(self.rows.length) * (self.end_at - self.begin_at)

    @property
    def num_bytes(self) -> int:
        """Bytes of memory for the stored values."""
        return self.numel // self.tensor.packed * self.tensor.values.dtype.itemsize

    def begin(self) -> Iterator[Transfer]:
        """Make memory for values and scales; yield the transfers that fill it."""
        form, stored, names = self.tensor.form, self.tensor.values, [*self.tensor.form.scales]
        if form.values.bits:
            names.insert(0, "packed")
        else:  # the rows of the values, as bytes
            size, packed, row = stored.dtype.itemsize, self.tensor.packed, self.tensor.elements("packed")
            low, width = self.first // packed, -(-self.stop // packed) - self.first // packed
            held = (self.end_at - self.begin_at) // packed * size
            self.values = torch.empty((*self.rows.length, held), dtype=torch.uint8, device=self.memory.device)
            view = View(
                offset=(self.rows.offset * row + low) * size,
                length=(*self.rows.length, width * size),
                strides=(*(step * row * size for step in self.rows.strides), 1),
            )
            memory = self.values.narrow(-1, low * size - self.begin_at // packed * size, width * size)
            yield transfer_of(replace(stored, dtype=torch.uint8), view, memory)
        self.grids = {name: _ScalesOfRows(self, name) for name in names}
        for grid in self.grids.values():
            yield transfer_of(grid.stored, grid.view, grid.memory)

    def finish(self) -> None:
        """Dequantise what was read into the memory of the part."""
        tensor, memory = self.tensor, self.memory
        of_rows = {name: grid.of_each_row() for name, grid in self.grids.items()}
        if "packed" in of_rows:
            values = of_rows.pop("packed")
        else:
            values = self.values.view(-1, self.values.shape[-1]).view(tensor.values.dtype)
        floats = tensor.form.codec.decode(values, of_rows, memory.dtype).contiguous()
        steps = [0] * memory.dim()
        for d, step in zip(self.row_dims, row_major_strides(self.rows.length), strict=True):
            steps[d] = step * floats.shape[1]
        for d in self.column_dims:
            steps[d] = self.view.strides[d]
        memory.copy_(floats.as_strided(memory.shape, steps, self.first - self.begin_at))


class _ScalesOfRows:
    """The scales of the blocks that a slab meets; or values that are packed down, which lie like such.

    Dimensions of the rows that step by whole blocks are dimensions of the scales too; the others together meet a range
    of rows of blocks.
    """

    def __init__(self, slab: Slab, name: str) -> None:
        tensor, rows = slab.tensor, slab.rows
        part = tensor.form.values if name == "packed" else tensor.form.scales[name]
        (high, wide), columns = part.block, tensor.elements(name)
        self._key, self.stored, self._bits = tensor.key, tensor.stored[name], part.bits
        self._outer = [d for d, step in enumerate(rows.strides) if not step % high]
        inner = [d for d in range(len(rows.strides)) if d not in self._outer]
        index = torch.tensor(rows.offset)
        for d in inner:
            index = index.unsqueeze(-1) + torch.arange(rows.length[d]) * rows.strides[d]
        blocks = torch.div(index, high, rounding_mode="floor")
        first, last = int(blocks.min()), int(blocks.max())
        self._blocks, self._inner = blocks - first, inner
        self._within = index % high
        column, stop = slab.begin_at // wide, min(-(-slab.end_at // wide), columns)
        self.view = View(
            offset=first * columns + column,
            length=(*(rows.length[d] for d in self._outer), last + 1 - first, stop - column),
            strides=(*(rows.strides[d] // high * columns for d in self._outer), columns, 1),
        )
        self.memory = torch.empty(self.view.length, dtype=self.stored.dtype, device=slab.memory.device)

    def of_each_row(self) -> torch.Tensor:
        """The scales of each row of the slab, [rows, blocks]."""
        self._refuse_bad()
        dtype = self.memory.dtype
        stored = self.memory.view(torch.uint8) if dtype.itemsize == 1 else self.memory  # torch picks no 8-bit floats
        scales = stored.index_select(-2, self._blocks.flatten().to(stored.device)).view(dtype)
        if self._bits:
            first_bits = (self._within.flatten() * self._bits).to(scales)
            scales = unpacked(scales, first_bits.unsqueeze(1), self._bits)
        scales = scales.view(*scales.shape[:-2], *self._blocks.shape, scales.shape[-1])
        order = [*self._outer, *self._inner]
        scales = scales.permute(*(order.index(d) for d in range(len(order))), scales.dim() - 1)
        return scales.reshape(-1, scales.shape[-1])

    def _refuse_bad(self) -> None:
        """Refuse scales of which no quantisation gives any: damaged files hold such."""
        if self.stored.dtype == torch.uint8:  # an exponent; 255 is NaN
            bad = self.memory == 255
        elif not self.stored.dtype.is_floating_point:
            return
        else:
            scales = self.memory.to(torch.float32)
            bad = ~torch.isfinite(scales)
            if self.stored.dtype != torch.float8_e4m3fn:  # of which small ones are zero, as are their blocks
                bad |= scales == 0
        if count := int(bad.sum()):
            raise CheckpointError(
                f"{self.stored.file}: {self.stored.key!r} holds {count} scales that are zero, infinite or NaN, so "
                f"{self._key!r} cannot be dequantised. The file is damaged, or its quantisation failed: download or "
                "quantise it again."
            )


Place = tuple[torch.Tensor, PieceTensor, Box]
"""Memory of any strides, and the box of a stored tensor that fills it."""


def whole_place(memory: torch.Tensor, stored: Stored) -> Place:
    """Memory for all of a stored tensor, in the memory's dtype."""
    return memory, PieceTensor.stored(stored, memory.dtype), Box.whole(memory.shape)


def reads_of(places: Iterable[Place], index: CheckpointIndex) -> tuple[list[Transfer], list[Slab]]:
    """What fills memory with boxes of stored tensors: reads as they are, and values to dequantise."""
    transfers: list[Transfer] = []
    slabs: list[Slab] = []
    for memory, tensor, box in places:
        for part in filter(None, (slice_piece(piece, box) for piece in tensor.pieces or ())):
            place = memory_view(memory, part.box.start_in(box), part.view.length)
            source = index.source(part.source)
            if isinstance(source, QuantizedTensor):
                slabs.append(Slab(source, part.view, place))
            else:
                transfers.append(transfer_of(source, part.view, place))
    return transfers, slabs


def dequantize(slabs: Sequence[Slab], reader: Reader, *, staging_bytes: int) -> TransferStats:
    """Read values and scales, and fill the memory of all slabs with floats of its dtype, on its device."""
    if not slabs:
        return TransferStats()
    bounds = Bounds.of(slabs[0].memory.device, staging_bytes)
    cut = (part for slab in slabs if slab.memory.numel() for part in slab.cut(bounds.part_values))
    return work_in_windows(cut, reader, bounds.window_bytes)


def check_order(tensors: Iterable[QuantizedTensor], reader: Reader, *, staging_bytes: int) -> TransferStats:
    """Refuse columns ordered by activation, of which the file says the groups; what reading these cost."""
    stats = TransferStats()
    ordered = ((tensor, tensor.groups) for tensor in tensors if tensor.groups is not None)
    for some in batches(ordered, staging_bytes, lambda pair: pair[1].num_bytes):
        read = [(tensor, stored, torch.empty(stored.shape, dtype=stored.dtype)) for tensor, stored in some]
        stats += reader.read([transfer_of(stored, View.whole(stored.shape), groups) for _, stored, groups in read])
        for tensor, stored, groups in read:
            own = torch.arange(len(groups)) // tensor.form.scales["scale"].block[0]
            if not torch.equal(groups, own.to(groups)):
                raise CheckpointError(f"{stored.file}: {stored.key!r} {BY_ACTIVATION}.")
    return stats
