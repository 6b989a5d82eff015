"""4-bit weights of bitsandbytes: plain values are packed while they are read, stored ones are read into their shards.

A block of the flattened weight depends on nothing outside it, so the shards together are, bit for bit, what
bitsandbytes makes of the whole weight; scales are joined before they are quantised too, which subtracts their mean.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.distributed.agreement import agreed
from hf_fsdp_tools.distributed.shards import Box, LocalBoxes, keep_part, local_boxes_of, local_parts
from hf_fsdp_tools.errors import CheckpointError, ConfigError
from hf_fsdp_tools.loading.conversion import LoadMap
from hf_fsdp_tools.loading.formats.stored import Stored, StoredTensor
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.loading.io.files import Reader, TransferStats
from hf_fsdp_tools.loading.io.transfer import Place, Transfer, reads_of, whole_place
from hf_fsdp_tools.loading.quantized.dequantize import Bounds, batches, dequantize, work_in_windows
from hf_fsdp_tools.loading.regions import row_major_strides
from hf_fsdp_tools.loading.symbolic import PieceTensor
from hf_fsdp_tools.modeling.four_bits import NESTED_BLOCKSIZE, weights_4bit
from hf_fsdp_tools.modeling.packed_weight import PackedForm, part_name
from hf_fsdp_tools.text import dtype_name, listed_lines


@dataclass(frozen=True, kw_only=True)
class Weights4Bit:
    """What fills 4-bit weights next to stored bytes, by the fqns of the plain weights."""

    forms: Mapping[str, PackedForm]
    plain: Mapping[str, PieceTensor] = field(default_factory=dict)
    """The stored weights that are packed while they are read, of shape (out_features, in_features)."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """The key of the text that says how stored weights are packed."""

    @property
    def filled(self) -> set[str]:
        """The fqns of parts that no stored tensor fills."""
        made = {part for fqn in self.plain for part in self.forms[fqn].parts(fqn)}
        return made | {part_name(fqn, "offset") for fqn in self.texts if "offset" in self.forms[fqn].scales}

    def text_bytes(self, index: CheckpointIndex) -> int:
        """Bytes of all texts."""
        return sum(index.tensors[key].num_bytes for key in self.texts.values())


def match_4bit(
    model: nn.Module, state: Mapping[str, torch.Tensor], load_map: LoadMap, index: CheckpointIndex
) -> tuple[CheckpointIndex, LoadMap, Weights4Bit]:
    """Index and load map (of plain parameters) in which stored bytes fill 4-bit weights, and what else fills these."""
    quantizer: Any = getattr(model, "hf_quantizer", None)
    is_stored = bool(getattr(quantizer, "pre_quantized", False))
    plain: dict[str, PieceTensor] = {}
    texts: dict[str, str] = {}
    bytes_of: dict[str, StoredTensor] = {}
    pieces = dict(load_map.tensors)
    problems: list[str] = []
    forms = weights_4bit(model)
    for fqn, form in forms.items():
        if isinstance(state[part_name(fqn, "packed")], LocalBoxes):
            raise ConfigError(f"{fqn!r} is a 4-bit weight that FSDP2 does not shard. Shard the model with shard_model.")
        tensor = pieces.pop(fqn, None)
        if tensor is None:
            problems.append(f"{fqn!r} is not in the checkpoint, and a 4-bit weight cannot be initialised anew")
        elif is_stored:
            own, problem = _stored_parts(fqn, form, state, load_map, index)
            problems += problem
            for part, stored in own.items():
                bytes_of[stored.key] = stored
                pieces[part] = PieceTensor.stored(stored, torch.uint8)
            texts[fqn] = f"{_source_of(fqn, load_map)}.quant_state.bitsandbytes__{form.rule}"
            if texts[fqn] not in index.tensors and not problem:
                problems.append(f"{fqn!r}: {texts[fqn]!r} is missing")
        else:
            turned: Any = tensor.t() if form.is_transposed and tensor.dim() == 2 else tensor
            plain[fqn] = turned
            problems += _not_plain(fqn, form, plain[fqn], index)
    if problems:
        raise CheckpointError(
            f"{index.name!r} does not hold the 4-bit weights that the config asks for:\n{listed_lines(problems)}\n"
            "Use the config and the quantization_config that belong to the checkpoint, or leave these layers out "
            "with llm_int8_skip_modules."
        )
    prefixes = tuple(f"{_source_of(fqn, load_map)}." for fqn in texts)
    unexpected = {k: v for k, v in load_map.unexpected_keys.items() if not k.startswith(prefixes or ("\0",))}
    tensors: dict[str, Stored] = {**index.tensors, **bytes_of}
    index = replace(index, tensors=MappingProxyType(tensors))
    load_map = replace(load_map, tensors=pieces, unexpected_keys=unexpected)
    return index, load_map, Weights4Bit(forms=forms, plain=plain, texts=texts)


def _source_of(fqn: str, load_map: LoadMap) -> str:
    """The stored key of a packed weight."""
    return load_map.groups[fqn].members[0][0]


def _stored_parts(
    fqn: str,
    form: PackedForm,
    state: Mapping[str, torch.Tensor],
    load_map: LoadMap,
    index: CheckpointIndex,
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Stored values and scales as bytes, by the fqns of the parts that they fill; or what is wrong with them."""
    source, parts = _source_of(fqn, load_map), {}
    is_alone = len(load_map.groups[fqn].members) == 1 and load_map.groups[fqn].transform is None
    for name, part in form.parts(fqn).items():
        if name == part_name(fqn, "offset"):  # the text has it
            continue
        shape = tuple(state[name].shape)
        stored, look = index.tensors.get(part.key(source)), part.look(shape)
        if not is_alone or not isinstance(stored, StoredTensor) or (stored.dtype, stored.shape) != look:
            found = f"{dtype_name(stored.dtype)} {list(stored.shape)}" if stored else "nothing"
            expected = f"{dtype_name(look[0])} {list(look[1])}"
            return {}, [f"{part.key(source)!r}: expected {expected} of a packed weight, found {found}"]
        parts[name] = replace(stored, dtype=torch.uint8, shape=shape)
    return parts, []


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
class Share:
    """This rank's part of a weight that is packed while it is read."""

    form: PackedForm
    plain: PieceTensor
    parts: Mapping[str, torch.Tensor]
    """The parameters and buffers of bytes, by the rule's names; "packed" has the values."""
    itemsize: float
    """Bytes in which one value is stored."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole weight."""
        return int(self.parts["packed"].shape[0])

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's values as they are stored."""
        blocks = sum(box.length[0] for box, _ in local_boxes_of(self.parts["packed"]))
        return round(blocks * self.form.flat_block * self.itemsize)

    @property
    def device(self) -> torch.device:
        """The device on which values are packed: the mesh's, also where shards are offloaded to the CPU."""
        sharded = self.parts["packed"]
        return torch.device(sharded.device_mesh.device_type) if isinstance(sharded, DTensor) else sharded.device


def shares_of(weights: Weights4Bit, state: Mapping[str, torch.Tensor], index: CheckpointIndex) -> list[Share]:
    """This rank's part of the weights to pack, whose tensors are `state`; in the same order on every rank."""
    return [
        Share(
            form=(form := weights.forms[fqn]),
            plain=plain,
            parts={name: state[part_name(fqn, name)] for name in ("packed", *form.scales)},
            itemsize=index.stored_bytes(min(plain.sources)),
        )
        for fqn, plain in weights.plain.items()
    ]


def quantize_weights(
    weights: Sequence[Share], index: CheckpointIndex, reader: Reader, *, doing: str, staging_bytes: int
) -> TransferStats:
    """Pack weights into their shards, with their scales.

    Every rank must call. The ranks exchange errors, and add up the scales of some weights at a time.
    """
    stats = TransferStats()
    device = weights[0].device
    bounds = Bounds.of(device, staging_bytes)
    # The scales of one batch of weights are joined together; the batches are the same on every rank.
    for batch in batches(weights, bounds.scale_bytes, lambda share: 4 * share.num_blocks):
        scales = [torch.zeros(share.num_blocks, dtype=torch.float32, device=device) for share in batch]
        with agreed(doing):
            stats += _pack(batch, scales, index, reader, staging_bytes)
        for share, own in zip(batch, scales, strict=True):
            _join_scales(own, share.parts["packed"])
            for name, whole in _parts_of_scales(own, share.form).items():
                keep_part(share.parts[name], whole)
    return stats


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Whole blocks that are packed at a time."""

    share: Share
    scales: torch.Tensor
    """Scales of the whole weight."""
    start: int
    """First block."""
    stop: int
    memory: torch.Tensor
    """The bytes of these blocks, or some columns of them, in the shard."""
    columns: slice

    @property
    def numel(self) -> int:
        return (self.stop - self.start) * self.share.form.flat_block

    @property
    def dtype(self) -> torch.dtype:
        return self.share.form.dtype


def _pack(
    weights: Sequence[Share],
    scales: Sequence[torch.Tensor],
    index: CheckpointIndex,
    reader: Reader,
    staging_bytes: int,
) -> TransferStats:
    """Read and pack this rank's blocks of some weights: packed bytes go to the shards, scales to `scales`.

    Packing stays on the calling thread and its stream: bitsandbytes packs on the device's default stream.
    """
    device = scales[0].device
    bounds = Bounds.of(device, staging_bytes)
    dequantized = TransferStats()

    def begin(window: Sequence[_Part]) -> tuple[list[tuple[_Part, torch.Tensor]], list[Transfer]]:
        nonlocal dequantized
        values = torch.empty(sum(part.numel for part in window), dtype=window[0].dtype, device=device)
        placed = list(zip(window, torch.split(values, [part.numel for part in window]), strict=True))
        transfers, quantized = reads_of((place for part, region in placed for place in _places_of(part, region)), index)
        dequantized += dequantize(quantized, reader, staging_bytes=staging_bytes)
        return placed, transfers

    parts = _parts_of(weights, scales, bounds.part_values)
    windows = batches(parts, bounds.window_bytes, lambda p: p.numel * p.dtype.itemsize, lambda p: p.dtype)
    stats = work_in_windows(windows, reader, begin=begin, work=lambda arrived: _pack_part(*arrived))
    return stats + dequantized


def _parts_of(weights: Sequence[Share], scales: Sequence[torch.Tensor], many: int) -> Iterator[_Part]:
    """Yield this rank's blocks in parts of at most `many` values."""
    for share, own in zip(weights, scales, strict=True):
        step = max(1, many // share.form.flat_block)
        for box, memory in local_parts(share.parts["packed"]):
            (begin, _), (length, _) = box.start, box.length
            for at in range(0, length, step):
                some = memory[at : at + step]
                start, stop = begin + at, begin + at + len(some)
                yield _Part(share=share, scales=own, start=start, stop=stop, memory=some, columns=box.slices[1])


def _places_of(part: _Part, region: torch.Tensor) -> Iterator[Place]:
    """Yield the boxes of a run of the flattened weight: the rest of a row, whole rows, the beginning of a row."""
    block, columns = part.share.form.flat_block, part.share.form.columns
    first, stop = part.start * block, part.stop * block
    at = first
    while at < stop:
        row, column = divmod(at, columns)
        rows = 1 if column else max(1, (stop - at) // columns)
        box = Box(start=(row, column), length=(rows, min(columns - column, stop - at)))
        local = region[at - first :].as_strided(box.length, row_major_strides(box.length))
        yield local, part.share.plain, box
        at += box.numel


def _pack_part(part: _Part, values: torch.Tensor) -> None:
    """Pack whole blocks into the shard, and keep their scales."""
    from bitsandbytes.functional import quantize_4bit

    form = part.share.form
    packed, state = quantize_4bit(values, blocksize=form.flat_block, quant_type=form.rule, quant_storage=torch.uint8)
    part.scales[part.start : part.stop] = state.absmax
    part.memory.copy_(packed.view(part.stop - part.start, -1)[:, part.columns])


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


def read_texts(
    weights: Weights4Bit, state: Mapping[str, torch.Tensor], index: CheckpointIndex, reader: Reader
) -> TransferStats:
    """Read what says how stored weights are packed, which must be what the model has; it has the offsets of scales."""
    from bitsandbytes.utils import unpack_tensor_to_dict

    memory = {
        fqn: torch.empty(index.tensors[key].shape, dtype=index.tensors[key].dtype) for fqn, key in weights.texts.items()
    }
    places = [whole_place(tensor, index.tensors[weights.texts[fqn]]) for fqn, tensor in memory.items()]
    stats = reader.read(reads_of(places, index)[0])
    for fqn, tensor in memory.items():
        form = weights.forms[fqn]
        wanted: dict[str, Any] = {
            "quant_type": form.rule, "blocksize": form.flat_block, "shape": [form.rows, form.columns]
        }  # fmt: skip
        if "offset" in form.scales:
            wanted["nested_blocksize"] = NESTED_BLOCKSIZE
        try:
            text: dict[str, Any] = unpack_tensor_to_dict(tensor)
            found = {name: text[name] for name in wanted}
            found["shape"] = list(found["shape"])
            offset = float(text["nested_offset"]) if "offset" in form.scales else None
            if not math.isfinite(offset or 0):
                raise ValueError(f"nested_offset is {offset}")
            nested = local_parts(state[part_name(fqn, "nested scale")]) if "offset" in form.scales else ()
            if not all(part.contiguous().view(torch.float32).isfinite().all() for _, part in nested):
                raise ValueError("nested_absmax holds values that are not finite")
        except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{index.name!r}: {weights.texts[fqn]!r} does not say how a weight is packed "
                f"({type(error).__name__}: {error}). Download or save the checkpoint again."
            ) from error
        if found != wanted:
            raise CheckpointError(
                f"{index.name!r}: {weights.texts[fqn]!r} belongs to a weight with {found}, expected {wanted}. Use the "
                "config that belongs to the checkpoint."
            )
        if offset is not None:
            keep_part(state[part_name(fqn, "offset")], torch.tensor([[offset]]).view(torch.uint8))
    return stats
