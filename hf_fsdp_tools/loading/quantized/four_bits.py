"""4-bit weights of bitsandbytes: plain values are packed while they are read, stored ones are read into their shards.

A block of the flattened weight depends on nothing outside it, so the shards together are, bit for bit, what
bitsandbytes makes of the whole weight; scales are joined before they are quantised too, which subtracts their mean.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.distributed.agreement import agreed
from hf_fsdp_tools.distributed.shards import Box, Held
from hf_fsdp_tools.errors import CheckpointError, ConfigError, library_errors
from hf_fsdp_tools.loading.conversion import LoadMap
from hf_fsdp_tools.loading.formats.stored import Stored, StoredTensor
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.loading.io.files import Reader, TransferStats
from hf_fsdp_tools.loading.io.transfer import Transfer
from hf_fsdp_tools.loading.quantized.dequantize import (
    Bounds,
    Place,
    batches,
    dequantize,
    reads_of,
    whole_place,
    work_in_windows,
)
from hf_fsdp_tools.loading.regions import row_major_strides
from hf_fsdp_tools.loading.symbolic import PieceTensor
from hf_fsdp_tools.modeling.codecs.bitsandbytes import NESTED_BLOCKSIZE
from hf_fsdp_tools.modeling.four_bits import weights_4bit
from hf_fsdp_tools.modeling.packed_weight import PackedForm, part_name
from hf_fsdp_tools.text import dtype_name, listed_lines


@dataclass(frozen=True, kw_only=True)
class Weights4Bit:
    """What fills 4-bit weights next to stored bytes, by the fqns of the plain weights."""

    forms: Mapping[str, PackedForm] = field(default_factory=dict)
    plain: Mapping[str, PieceTensor] = field(default_factory=dict)
    """The stored weights that are packed while they are read, of shape (out_features, in_features)."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """The key of the text that says how stored weights are packed."""

    @property
    def filled(self) -> set[str]:
        """The fqns of parts that no stored tensor fills."""
        made = {part for fqn in self.plain for part in self.forms[fqn].parts(fqn)}
        return made | {part_name(fqn, "offset") for fqn in self.texts if "offset" in self.forms[fqn].scales}

    def shares(self, state: Mapping[str, torch.Tensor], index: CheckpointIndex) -> "PackJobs":
        """This rank's part, of a model whose tensors are `state`."""
        packed = [
            PackJob(
                form=(form := self.forms[fqn]),
                plain=plain,
                parts={name: state[part_name(fqn, name)] for name in ("packed", *form.scales)},
                itemsize=index.stored_bytes(min(plain.sources)),
            )
            for fqn, plain in self.plain.items()
        ]
        return PackJobs(weights=self, state=state, index=index, packed=packed)


def match_4bit(
    model: nn.Module, state: Mapping[str, torch.Tensor], load_map: LoadMap, index: CheckpointIndex
) -> tuple[CheckpointIndex, LoadMap, Weights4Bit]:
    """Index and load map (of plain parameters) in which stored bytes fill 4-bit weights, and what else fills these."""
    is_stored = bool(getattr(getattr(model, "hf_quantizer", None), "pre_quantized", False))
    plain: dict[str, PieceTensor] = {}
    texts: dict[str, str] = {}
    tensors: dict[str, Stored] = dict(index.tensors)
    pieces = dict(load_map.tensors)
    problems: list[str] = []
    forms = weights_4bit(model)
    for fqn, form in forms.items():
        if not Held.of(state[part_name(fqn, "packed")]).is_derived:
            raise ConfigError(f"{fqn!r} is a 4-bit weight that FSDP2 does not shard. Shard the model with shard_model.")
        tensor: Any = pieces.pop(fqn, None)
        if tensor is None:
            problems.append(f"{fqn!r} is not in the checkpoint, and a 4-bit weight cannot be initialised anew")
        elif not is_stored:
            plain[fqn] = tensor.t() if form.is_transposed and tensor.dim() == 2 else tensor
            problems += _not_plain(fqn, form, plain[fqn], index)
        else:
            source = load_map.groups[fqn].members[0][0]
            texts[fqn] = f"{source}.quant_state.bitsandbytes__{form.codec.kind}"
            bytes_of, problem = _stored_parts(fqn, form, state, load_map, index)
            if texts[fqn] not in index.tensors and not problem:
                problem = f"{fqn!r}: {texts[fqn]!r} is missing"
            problems += [problem] if problem else []
            tensors |= {stored.key: stored for stored in bytes_of.values()}
            pieces |= {part: PieceTensor.stored(stored, torch.uint8) for part, stored in bytes_of.items()}
    if problems:
        raise CheckpointError(
            f"{index.name!r} does not hold the 4-bit weights that the config asks for:\n{listed_lines(problems)}\n"
            "Use the config and the quantization_config that belong to the checkpoint, or leave these layers out "
            "with llm_int8_skip_modules."
        )
    beside = tuple(text.partition("quant_state.")[0] for text in texts.values())
    unexpected = {key: stored for key, stored in load_map.unexpected_keys.items() if not key.startswith(beside)}
    index = replace(index, tensors=MappingProxyType(tensors))
    load_map = replace(load_map, tensors=pieces, unexpected_keys=unexpected)
    return index, load_map, Weights4Bit(forms=forms, plain=plain, texts=texts)


def _stored_parts(
    fqn: str, form: PackedForm, state: Mapping[str, torch.Tensor], load_map: LoadMap, index: CheckpointIndex
) -> tuple[dict[str, StoredTensor], str]:
    """Stored values and scales as bytes, by the fqns of the parts that they fill; or what is wrong with them."""
    group, parts = load_map.groups[fqn], {}
    for name, part in form.parts(fqn).items():
        if name == part_name(fqn, "offset"):  # the text has it
            continue
        key, shape = part.key(group.members[0][0]), tuple(state[name].shape)
        stored, (dtype, expected) = index.tensors.get(key), part.look(shape)
        is_alone = len(group.members) == 1 and group.transform is None
        if not is_alone or not isinstance(stored, StoredTensor) or (stored.dtype, stored.shape) != (dtype, expected):
            found = f"{dtype_name(stored.dtype)} {list(stored.shape)}" if stored else "nothing"
            return {}, f"{key!r}: expected {dtype_name(dtype)} {list(expected)} of a packed weight, found {found}"
        parts[name] = replace(stored, dtype=torch.uint8, shape=shape)
    return parts, ""


def _not_plain(fqn: str, form: PackedForm, tensor: PieceTensor, index: CheckpointIndex) -> Iterator[str]:
    """Yield why a stored plain weight cannot be packed shard by shard."""
    dtypes = {index.source_dtype(source) for source in tensor.sources}
    if tensor.shape != (form.rows, form.columns) or not all(d.is_floating_point and d.itemsize > 1 for d in dtypes):
        names = " and ".join(sorted(dtype_name(dtype) for dtype in dtypes))
        yield (
            f"{fqn!r}: expected 16 or 32-bit floating-point values of shape {[form.rows, form.columns]}, found "
            f"{names} {list(tensor.shape)}"
        )
    elif tensor.pieces is None:
        yield f"{fqn!r} is computed while it is loaded (from {len(tensor.sources)} tensors), so no file has its blocks"


# ---- this rank's part ----


@dataclass(frozen=True, kw_only=True)
class PackJob:
    """This rank's part of a weight that is packed while it is read."""

    form: PackedForm
    plain: PieceTensor
    parts: Mapping[str, torch.Tensor]
    """The parameters and buffers of bytes, by the codec's names; "packed" has the values."""
    itemsize: float
    """Bytes in which one value is stored."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole weight."""
        return int(self.parts["packed"].shape[0])

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's values as they are stored."""
        blocks = sum(box.length[0] for box, _ in Held.of(self.parts["packed"]).boxes)
        return round(blocks * self.form.flat_block * self.itemsize)

    @property
    def device(self) -> torch.device:
        """The device on which values are packed: the mesh's, also where shards are offloaded to the CPU."""
        return Held.of(self.parts["packed"]).device


@dataclass(frozen=True, kw_only=True)
class PackJobs:
    """This rank's part of all such weights; in the same order on every rank."""

    weights: Weights4Bit
    state: Mapping[str, torch.Tensor]
    index: CheckpointIndex
    packed: list[PackJob]

    @property
    def num_bytes(self) -> int:
        """Bytes to read."""
        texts = sum(self.index.tensors[key].num_bytes for key in self.weights.texts.values())
        return texts + sum(share.num_bytes for share in self.packed)

    @property
    def device(self) -> torch.device:
        """The device on which values are packed; the CPU where there are none."""
        return self.packed[0].device if self.packed else torch.device("cpu")

    def read(self, reader: Reader) -> TransferStats:
        """Read what says how stored weights are packed, which must be what the model has, and the offsets of scales."""
        weights, state, index = self.weights, self.state, self.index
        if not weights.texts:
            return TransferStats()
        from bitsandbytes.utils import unpack_tensor_to_dict

        again = "Download or save the checkpoint again."
        stored = {fqn: index.tensors[key] for fqn, key in weights.texts.items()}
        memory = {fqn: torch.empty(text.shape, dtype=text.dtype) for fqn, text in stored.items()}
        stats = reader.read(reads_of((whole_place(text, stored[fqn]) for fqn, text in memory.items()), index)[0])
        for fqn, text in memory.items():
            form, name = weights.forms[fqn], f"{index.name!r}: {weights.texts[fqn]!r}"
            wanted = {"quant_type": form.codec.kind, "blocksize": form.flat_block, "shape": [form.rows, form.columns]}
            wanted |= {"nested_blocksize": NESTED_BLOCKSIZE} if "offset" in form.scales else {}
            with library_errors(f"{name} does not say how a weight is packed", again):
                said: dict[str, Any] = unpack_tensor_to_dict(text)
                found = {key: list(said[key]) if key == "shape" else said[key] for key in wanted}
                offset = torch.tensor([[float(said.get("nested_offset", math.nan))]])
            if found != wanted:
                raise CheckpointError(
                    f"{name} belongs to a weight with {found}, expected {wanted}. Use the config that belongs to the "
                    "checkpoint."
                )
            if "offset" in form.scales:
                nested = Held.of(state[part_name(fqn, "nested scale")]).parts()
                floats = [offset, *(part.contiguous().view(torch.float32) for _, part in nested)]
                if not all(bool(each.isfinite().all()) for each in floats):
                    raise CheckpointError(
                        f"{name}: its nested_offset or nested_absmax holds values that are not finite. {again}"
                    )
                Held.of(state[part_name(fqn, "offset")]).fill(offset.view(torch.uint8))
        return stats

    def pack(self, reader: Reader, *, doing: str, staging_bytes: int) -> TransferStats:
        """Pack plain weights into their shards, with their scales.

        Every rank must call. The ranks exchange errors, and add up the scales of some weights at a time. Packing stays
        on the calling thread and its stream: bitsandbytes packs on the device's default stream.
        """
        stats = [TransferStats()]
        device = self.device
        bounds = Bounds.of(device, staging_bytes)

        def transfers_of(places: Iterable[Place]) -> list[Transfer]:
            transfers, quantized = reads_of(places, self.index)
            stats.append(dequantize(quantized, reader, staging_bytes=staging_bytes))
            return transfers

        # The scales of one batch of weights are joined together; the batches are the same on every rank.
        for batch in batches(self.packed, bounds.scale_bytes, lambda share: 4 * share.num_blocks):
            scales = [torch.zeros(share.num_blocks, dtype=torch.float32, device=device) for share in batch]
            blocks = (
                _Blocks(share=share, start=start, memory=memory, columns=columns, scales=own, transfers_of=transfers_of)
                for share, own in zip(batch, scales, strict=True)
                for start, memory, columns in _runs_of(share, bounds.part_values)
            )
            with agreed(doing):
                stats.append(work_in_windows(blocks, reader, bounds.window_bytes))
            for share, own in zip(batch, scales, strict=True):
                _join_scales(own, share.parts["packed"])
                for name, whole in _parts_of_scales(own, share.form).items():
                    Held.of(share.parts[name]).fill(whole)
        return sum(stats[1:], stats[0])


def _runs_of(share: PackJob, many: int) -> Iterator[tuple[int, torch.Tensor, slice]]:
    """Yield runs of at most `many` values of this rank's blocks: the first block, and the bytes of all of them in the
    shard, of which it may have some columns."""
    step = max(1, many // share.form.flat_block)
    for box, memory in Held.of(share.parts["packed"]).parts():
        for at in range(0, box.length[0], step):
            yield box.start[0] + at, memory[at : at + step], box.slices[1]


@dataclass(kw_only=True)
class _Blocks:
    """Whole blocks that are packed at a time (`Work`)."""

    share: PackJob
    start: int
    """The first block."""
    memory: torch.Tensor
    """The bytes of these blocks, or some columns of them, in the shard."""
    columns: slice
    scales: torch.Tensor
    """Scales of the whole weight."""
    transfers_of: Callable[[Iterable[Place]], list[Transfer]]

    @property
    def num_bytes(self) -> int:
        return len(self.memory) * self.share.form.flat_block * self.share.form.dtype.itemsize

    def begin(self) -> list[Transfer]:
        form = self.share.form
        self.values = torch.empty(len(self.memory) * form.flat_block, dtype=form.dtype, device=self.scales.device)
        return self.transfers_of(_places_of(self.share, self.start * form.flat_block, self.values))

    def finish(self) -> None:
        """Pack the blocks into the shard, and keep their scales."""
        from bitsandbytes.functional import quantize_4bit

        form, count = self.share.form, len(self.memory)
        packed, state = quantize_4bit(
            self.values, blocksize=form.flat_block, quant_type=form.codec.kind, quant_storage=torch.uint8
        )
        self.scales[self.start : self.start + count] = state.absmax
        self.memory.copy_(packed.view(count, -1)[:, self.columns])


def _places_of(share: PackJob, first: int, values: torch.Tensor) -> Iterator[Place]:
    """Yield the boxes of a run of the flattened weight: the rest of a row, whole rows, the beginning of a row."""
    columns, at, stop = share.form.columns, first, first + len(values)
    while at < stop:
        row, column = divmod(at, columns)
        rows = 1 if column else max(1, (stop - at) // columns)
        box = Box(start=(row, column), length=(rows, min(columns - column, stop - at)))
        yield values[at - first :].as_strided(box.length, row_major_strides(box.length)), share.plain, box
        at += box.numel


def _join_scales(scales: torch.Tensor, sharded: torch.Tensor) -> None:
    """Join every rank's scales of one weight, in place, by an all-reduce: zeros stand for blocks of other ranks."""
    if not isinstance(sharded, DTensor):
        return
    bits = scales.view(torch.int32)  # scales are not negative, so their bits are in their order; NaN comes last
    for axis, placement in enumerate(sharded.placements):
        if not placement.is_replicate() and sharded.device_mesh.size(axis) > 1:
            dist.all_reduce(bits, op=dist.ReduceOp.MAX, group=sharded.device_mesh.get_group(axis))


def _parts_of_scales(scales: torch.Tensor, form: PackedForm) -> dict[str, torch.Tensor]:
    """The bytes of a whole weight's parts next to its values, by name, as `quantize_4bit` of bitsandbytes 0.50."""
    from bitsandbytes.functional import quantize_blockwise

    def as_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
        return tensor.contiguous().view(rows, -1).view(torch.uint8)

    if "offset" not in form.scales:
        return {"scale": as_rows(scales, len(scales))}
    offset = scales.mean()
    nested, of_scales = quantize_blockwise(scales - offset, blocksize=NESTED_BLOCKSIZE)
    return {
        "scale": as_rows(nested, len(nested)),
        "nested scale": as_rows(of_scales.absmax, len(of_scales.absmax)),
        "code": as_rows(of_scales.code, 1),
        "offset": as_rows(offset, 1),
    }
