"""What torch's DCP saves and loads of a DTensor of which this rank holds several boxes."""

from functools import cache
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.distributed.shards import Box, local_boxes_of, local_tensor, memory_view


@cache
def let_dcp_see_boxes() -> None:
    """From now on, let DCP save and load each box of a DTensor of which this rank holds several, in this process.

    torch (2.13) takes a shard for one box from the first to the last index: of fused weights that tensor parallelism
    cuts in two ranges, ranks would overlap, and what is read into them would be wrong. DTensors with one box are left
    to torch.
    """
    names = ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")
    former = {name: getattr(DTensor, name) for name in names}

    def write_items(tensor: DTensor, fqn: str, value: Any) -> Any:
        if len(boxes := local_boxes_of(tensor)) < 2:
            return former["__create_write_items__"](tensor, fqn, value)
        properties = dcp.TensorProperties.create_from_tensor(tensor.to_local())
        chunks = [_chunk(box) for box, _ in boxes]
        return [
            WriteItem(
                index=dcp.MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=tensor.size()),
            )
            for chunk in chunks
        ]

    def chunk_list(tensor: DTensor) -> Any:
        boxes = local_boxes_of(tensor)
        return former["__create_chunk_list__"](tensor) if len(boxes) < 2 else [_chunk(box) for box, _ in boxes]

    def shard(tensor: DTensor, index: dcp.MetadataIndex) -> Any:
        if len(boxes := local_boxes_of(tensor)) < 2:
            return former["__get_tensor_shard__"](tensor, index)
        box, start = next(each for each in boxes if each[0].start == tuple(index.offset or ()))
        return memory_view(local_tensor(tensor), start, box.length)

    for name, own in zip(names, (write_items, chunk_list, shard), strict=True):
        setattr(DTensor, name, own)


def _chunk(box: Box) -> dcp.ChunkStorageMetadata:
    return dcp.ChunkStorageMetadata(offsets=torch.Size(box.start), sizes=torch.Size(box.length))
