"""Which part of the 4-bit weights a rank holds, and which stored tensors fill it; nothing is read here."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.distributed.shards import LocalBoxes, is_sharded, local_boxes_of, local_tensor, memory_view
from hf_fsdp_tools.errors import CheckpointError, ConfigError
from hf_fsdp_tools.loading.conversion import LoadMap, persistent_tensors
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.loading.symbolic import PieceTensor
from hf_fsdp_tools.modeling.linear4bit import Packing, packed_linears, packing_of
from hf_fsdp_tools.text import dtype_name, listed_lines


@dataclass(frozen=True, kw_only=True)
class Span:
    """The whole blocks of a weight that this rank's shard touches, and the bytes of the shard."""

    start: int
    """Index of the first value in the flattened weight."""

    stop: int
    """Index after the last value."""

    first_byte: int
    """Position of the shard in the bytes of the packed weight."""

    memory: torch.Tensor
    """The bytes of the shard, flat."""


@dataclass(frozen=True, kw_only=True)
class PackedWeight:
    """A weight that is packed while it is read."""

    module: Any
    """Its layer."""

    plain: PieceTensor
    """The stored weight, of shape (out_features, in_features)."""

    sharded: torch.Tensor
    """The packed parameter."""

    spans: tuple[Span, ...]
    """This rank's shard of the weight, as spans of blocks."""

    @property
    def packing(self) -> Packing:
        """How the weight is packed."""
        return packing_of(self.module)


@dataclass(frozen=True, kw_only=True)
class PackedShare:
    """This rank's shards of the 4-bit weights, and how to fill them."""

    weights: tuple[PackedWeight, ...]
    """Weights that are packed while they are read; the same weights in the same order on every rank."""

    scales: tuple[tuple[Any, Mapping[str, str]], ...]
    """(layer, stored key of each scale tensor by bitsandbytes' name) where the checkpoint holds packed weights."""

    num_bytes: int
    """Bytes in stored dtypes: values of the shards, and all stored scales."""

    replicated_bytes: int
    """The part of `num_bytes` that every rank holds."""

    read_bytes: int
    """Bytes to read: whole blocks, also where a shard holds a part of a block."""

    host_bytes: int
    """Bytes of host memory for the scales of the packed weights; 0 on a GPU."""


def part_packed(model: nn.Module, load_map: LoadMap, index: CheckpointIndex) -> tuple[LoadMap, dict[str, PieceTensor]]:
    """Part the 4-bit weights that are packed while loading from a load map."""
    layers = packed_linears(model)
    if not layers:
        return load_map, {}
    state = persistent_tensors(model)
    flat = [key for key in layers if isinstance(state[key], LocalBoxes)]
    if flat:
        raise ConfigError(f"{flat[0]!r} is a 4-bit weight that FSDP2 does not shard. Shard the model with shard_model.")
    plain: dict[str, PieceTensor] = {}
    scales: set[str] = set()
    problems: list[str] = []
    for key, module in layers.items():
        packing, found = packing_of(module), load_map.tensors.get(key)
        if found is None:
            problems.append(f"{key!r} is not in the checkpoint, and a 4-bit weight cannot be initialised anew")
        elif packing.is_stored:
            beside = _scales_of(key, load_map, index)
            problems += _stored_otherwise(key, packing, found, tuple(state[key].shape), index, bool(beside))
            scales.update(beside.values())
        else:
            tensor = _transposed(found) if packing.is_transposed and found.dim() == 2 else found
            problems += _not_plain(key, packing, tensor, index)
            plain[key] = tensor
    if problems:
        raise CheckpointError(
            f"{index.name!r} does not hold the 4-bit weights that the config asks for:\n{listed_lines(problems)}\n"
            "Use the config and the quantization_config that belong to the checkpoint, or leave these layers out "
            "with llm_int8_skip_modules."
        )
    stored = tuple(f"{key}." for key in layers if key not in plain)
    unexpected = (key for key in load_map.unexpected_keys if key not in scales and not key.startswith(stored))
    rest = {key: tensor for key, tensor in load_map.tensors.items() if key not in plain}
    return replace(load_map, tensors=rest, unexpected_keys=frozenset(unexpected)), plain


def share_of_packed(
    model: nn.Module, plain: Mapping[str, PieceTensor], load_map: LoadMap, index: CheckpointIndex
) -> PackedShare:
    """This rank's shards of the 4-bit weights of an allocated model."""
    state = persistent_tensors(model)
    weights: list[PackedWeight] = []
    scales: list[tuple[Any, Mapping[str, str]]] = []
    num_bytes = replicated_bytes = read_bytes = host_bytes = 0
    for key, module in packed_linears(model).items():
        packing = packing_of(module)
        if key not in plain:
            stored = _scales_of(key, load_map, index)
            size = sum(index.tensors[name].num_bytes for name in stored.values())
            num_bytes, replicated_bytes, read_bytes = num_bytes + size, replicated_bytes + size, read_bytes + size
            scales.append((module, stored))
            continue
        spans = tuple(_spans_of(state[key], packing))
        itemsize = index.stored_bytes(min(plain[key].sources))
        own = round(sum(min(2 * span.memory.numel(), packing.numel) for span in spans) * itemsize)
        num_bytes += own
        replicated_bytes += 0 if is_sharded(state[key]) else own
        read_bytes += round(sum(span.stop - span.start for span in spans) * itemsize)
        if compute_device(state[key]).type == "cpu":
            host_bytes += packing.num_blocks * (1 if packing.is_nested else 4)
        weights.append(PackedWeight(module=module, plain=plain[key], sharded=state[key], spans=spans))
    return PackedShare(
        weights=tuple(weights),
        scales=tuple(scales),
        num_bytes=num_bytes,
        replicated_bytes=replicated_bytes,
        read_bytes=read_bytes,
        host_bytes=host_bytes,
    )


def compute_device(sharded: torch.Tensor) -> torch.device:
    """The device on which a layer computes: the mesh's, also where the shard is offloaded to the CPU."""
    return torch.device(sharded.device_mesh.device_type) if isinstance(sharded, DTensor) else sharded.device


def _spans_of(sharded: torch.Tensor, packing: Packing) -> Iterator[Span]:
    local = local_tensor(sharded)
    size, block = packing.storage.itemsize, packing.blocksize
    for box, start in local_boxes_of(sharded):
        first, stop = box.start[0] * size, (box.start[0] + box.length[0]) * size
        yield Span(
            start=2 * first // block * block,
            stop=min(-(-2 * stop // block) * block, packing.numel),
            first_byte=first,
            memory=memory_view(local, start, box.length).view(torch.uint8).view(-1),
        )


def _not_plain(key: str, packing: Packing, tensor: PieceTensor, index: CheckpointIndex) -> Iterator[str]:
    """Yield why a stored plain weight cannot be packed shard by shard."""
    dtypes = {index.source_dtype(source) for source in tensor.sources}
    if tensor.shape != packing.shape or not all(d.is_floating_point and d.itemsize > 1 for d in dtypes):
        yield (
            f"{key!r}: expected 16 or 32-bit floating-point values of shape {list(packing.shape)}, found "
            f"{_dtype_names(dtypes)} {list(tensor.shape)}"
        )
    elif tensor.pieces is None:
        yield f"{key!r} is computed while it is loaded (from {len(tensor.sources)} tensors), so no file has its blocks"


def _stored_otherwise(
    key: str, packing: Packing, tensor: PieceTensor, shape: tuple[int, ...], index: CheckpointIndex, has_scales: bool
) -> Iterator[str]:
    """Yield why a stored packed weight cannot be read into its shards."""
    dtypes = {index.source_dtype(source) for source in tensor.sources}
    if tensor.shape != shape or dtypes != {packing.storage} or not has_scales:
        beside = "with scales" if has_scales else "without scales"
        yield (
            f"{key!r}: expected {_dtype_names({packing.storage})} {list(shape)} with scales beside it, found "
            f"{_dtype_names(dtypes)} {list(tensor.shape)} {beside}"
        )


def _scales_of(key: str, load_map: LoadMap, index: CheckpointIndex) -> dict[str, str]:
    """The stored keys of the scales of a packed weight, by bitsandbytes' names for them."""
    members = load_map.groups[key].members
    prefix = f"{members[0][0]}." if len(members) == 1 else ""
    return {name.removeprefix(prefix): name for name in index.tensors if prefix and name.startswith(prefix)}


def _transposed(tensor: PieceTensor) -> PieceTensor:
    transposed = tensor.t()
    assert isinstance(transposed, PieceTensor)
    return transposed


def _dtype_names(dtypes: set[torch.dtype]) -> str:
    return " and ".join(sorted(dtype_name(dtype) for dtype in dtypes))
