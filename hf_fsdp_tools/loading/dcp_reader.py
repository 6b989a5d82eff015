"""Read a DCP folder in a store for torch: each rank the bytes of its shards, whatever number of ranks has saved it."""

import io
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from hf_fsdp_tools.accelerator import side_stream_for
from hf_fsdp_tools.distributed.shards import Box
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.loading.formats.dcp import parse_dcp
from hf_fsdp_tools.loading.formats.stored import Stored
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.loading.io.files import STAGING_BYTES, STAGING_BYTES_PINNED, Reader
from hf_fsdp_tools.loading.quantized.dequantize import Place, reads_of
from hf_fsdp_tools.loading.symbolic import PieceTensor
from hf_fsdp_tools.modeling.module_tree import replaced
from hf_fsdp_tools.stores import at_hand, fetch_whole, stored_object

_HEAD_BYTES, _TAIL_BYTES = 2048, 4096
"""Bytes at the ends of an archive of `torch.save` within which it says where its data lies; beyond them each read is a
request. torch 2.13 reads the last 4,096. (assumed)"""


def from_stores() -> AbstractContextManager[None]:
    """A block in which torch's `FileSystemReader` reads the stubs of DCP folders in stores by ranges, and others as
    always; who makes it (Accelerate) takes it from `torch.distributed.checkpoint`."""
    return replaced(torch.distributed.checkpoint, FileSystemReader=_RangeReader)


def _bytes_of(file: Path, place: Any) -> bytes:
    if (found := stored_object(file)) is not None:
        return found.read(place.offset, place.offset + place.length)
    with file.open("rb") as stream:
        stream.seek(place.offset)
        return stream.read(place.length)


def _target(item: ReadItem, planner: LoadPlanner, tensors: Mapping[str, Stored]) -> Place:
    """What an item of a plan fills, and with which part of which stored tensor."""
    target, key = planner.resolve_tensor(item).detach(), item.storage_index.fqn
    chunk = item.storage_index.offset or (0,) * target.dim()
    start = tuple(a + b for a, b in zip(chunk, item.storage_offsets, strict=True))
    box = Box(start=start, length=tuple(item.lengths))
    if tuple(target.shape) != box.length:
        raise CheckpointError(f"{key!r}: expected {list(target.shape)}, found {list(box.length)}.")
    return target, PieceTensor.stored(tensors[key], target.dtype), box


class _RangeReader(FileSystemReader):
    """torch's reader, whose plan for a folder in a store is carried out by the reader of checkpoints."""

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the plan says; no rank communicates."""
        folder = Path(self.path)
        places = {item.storage_index: self.storage_data[item.storage_index] for item in plan.items}
        files = {folder / place.relative_path for place in places.values()}
        there = {file: found for file in files if (found := stored_object(file)) is not None}
        memories = [planner.resolve_tensor(item) for item in plan.items if item.type != LoadItemType.BYTE_IO]
        # compressed, by a writer of somebody's own; or made of several tensors, as states of 8 bits
        is_other = any(place.transform_descriptors for place in places.values())
        if is_other or any(type(memory) not in (torch.Tensor, torch.nn.Parameter) for memory in memories):
            fetch_whole(files)
            return super().read_data(plan, planner)
        ends = []
        for place in places.values():
            file, start, stop = folder / place.relative_path, place.offset, place.offset + place.length
            ends += [(file, start, min(stop, start + _HEAD_BYTES)), (file, max(start, stop - _TAIL_BYTES), stop)]
        tensors = {tensor.key: tensor for _, tensor in parse_dcp(folder)[0]}
        index = CheckpointIndex(name=str(folder), tensors=tensors, header_bytes=0)
        in_bytes = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        others = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        with at_hand(ends):
            for item in in_bytes:
                place = places[item.storage_index]
                planner.load_bytes(item, io.BytesIO(_bytes_of(folder / place.relative_path, place)))
            targets = [_target(item, planner, tensors) for item in others]
            side = side_stream_for([memory for memory, _, _ in targets])
            staging_bytes = STAGING_BYTES if side is None else STAGING_BYTES_PINNED
            try:
                with Reader(staging_bytes=staging_bytes, side=side) as reader:
                    reader.read(reads_of(targets, index)[0])
            finally:
                if side is not None:
                    side.release()
        for found in there.values():
            if found.version_now() != found.version:
                raise CheckpointError(f"{found.url}: was replaced or removed while it was read. Load another state.")
        for item in others:
            planner.commit_tensor(item, planner.resolve_tensor(item))
        done: Future[None] = Future()
        done.set_result(None)
        return done
