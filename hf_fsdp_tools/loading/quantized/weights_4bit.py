"""Which part of the 4-bit weights a rank holds, and which stored tensors fill it; nothing is read here."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.distributed.shards import LocalBoxes, local_boxes_of, local_tensor, memory_view
from hf_fsdp_tools.errors import CheckpointError, ConfigError
from hf_fsdp_tools.loading.conversion import LoadMap
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.loading.symbolic import PieceTensor
from hf_fsdp_tools.modeling.linear4bit import Packing, packing_of
from hf_fsdp_tools.text import dtype_name, listed_lines


@dataclass(frozen=True, kw_only=True)
class Weights4Bit:
    """A model's 4-bit weights of bitsandbytes, by their keys."""

    layers: Mapping[str, Any]
    """The layers."""
    plain: Mapping[str, PieceTensor]
    """The stored weights that are packed while they are read, of shape (out_features, in_features)."""
    scales: Mapping[str, Mapping[str, str]]
    """Stored key of each scale tensor by bitsandbytes' name, where the checkpoint holds packed weights."""

    def scale_bytes(self, index: CheckpointIndex) -> int:
        """Bytes of all stored scales."""
        return sum(index.tensors[name].num_bytes for stored in self.scales.values() for name in stored.values())


def part_packed(
    layers: Mapping[str, Any], state: Mapping[str, torch.Tensor], load_map: LoadMap, index: CheckpointIndex
) -> tuple[LoadMap, Weights4Bit]:
    """Part the 4-bit weights of these layers that are packed while loading from a load map."""
    plain: dict[str, PieceTensor] = {}
    scales: dict[str, Mapping[str, str]] = {}
    problems: list[str] = []
    for key, module in layers.items():
        if isinstance(state[key], LocalBoxes):
            raise ConfigError(f"{key!r} is a 4-bit weight that FSDP2 does not shard. Shard the model with shard_model.")
        packing, tensor = packing_of(module), load_map.tensors.get(key)
        if tensor is None:
            problems.append(f"{key!r} is not in the checkpoint, and a 4-bit weight cannot be initialised anew")
        elif packing.is_stored:
            scales[key] = _scales_of(key, load_map, index)
            problems += _stored_otherwise(key, packing, tensor, tuple(state[key].shape), index, bool(scales[key]))
        else:
            plain[key] = _transposed(tensor) if packing.is_transposed and tensor.dim() == 2 else tensor
            problems += _not_plain(key, packing, plain[key], index)
    if problems:
        raise CheckpointError(
            f"{index.name!r} does not hold the 4-bit weights that the config asks for:\n{listed_lines(problems)}\n"
            "Use the config and the quantization_config that belong to the checkpoint, or leave these layers out "
            "with llm_int8_skip_modules."
        )
    prefixes = tuple(f"{key}." for key in scales)
    known = {name for stored in scales.values() for name in stored.values()}
    unexpected = {k: v for k, v in load_map.unexpected_keys.items() if k not in known and not k.startswith(prefixes)}
    rest = {key: tensor for key, tensor in load_map.tensors.items() if key not in plain}
    parted = replace(load_map, tensors=rest, unexpected_keys=unexpected)
    return parted, Weights4Bit(layers=layers, plain=plain, scales=scales)


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
        yield (
            f"{key!r}: expected {_dtype_names({packing.storage})} {list(shape)} with scales beside it, found "
            f"{_dtype_names(dtypes)} {list(tensor.shape)} {'with' if has_scales else 'without'} scales"
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


# ---- this rank's part ----


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
    """This rank's shard of a weight that is packed while it is read."""

    module: Any
    packing: Packing
    plain: PieceTensor
    sharded: torch.Tensor
    """The packed parameter."""
    spans: tuple[Span, ...]
    itemsize: float
    """Bytes in which one value is stored."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the shard's values as they are stored."""
        return round(sum(min(2 * s.memory.numel(), self.packing.numel) for s in self.spans) * self.itemsize)

    @property
    def read_bytes(self) -> int:
        """Bytes to read: whole blocks, also where a shard holds a part of a block."""
        return round(sum(span.stop - span.start for span in self.spans) * self.itemsize)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for the scales; 0 on a GPU."""
        is_on_host = compute_device(self.sharded).type == "cpu"
        return self.packing.num_blocks * (1 if self.packing.is_nested else 4) if is_on_host else 0


def shares_of_packed(
    weights_4bit: Weights4Bit, state: Mapping[str, torch.Tensor], index: CheckpointIndex
) -> list[PackedWeight]:
    """This rank's shards of the weights to pack, whose tensors are `state`; in the same order on every rank."""
    shares = []
    for key, plain in weights_4bit.plain.items():
        module = weights_4bit.layers[key]
        packing = packing_of(module)
        share = PackedWeight(
            module=module,
            packing=packing,
            plain=plain,
            sharded=state[key],
            spans=tuple(_spans_of(state[key], packing)),
            itemsize=index.stored_bytes(min(plain.sources)),
        )
        shares.append(share)
    return shares


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
