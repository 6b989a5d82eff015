"""The tensors of the checkpoint in order, each as a rank has it: one box of its own, or whole."""

from collections.abc import Iterator, Mapping

import torch

from hf_fsdp_tools.distributed.agreement import rank_and_size
from hf_fsdp_tools.distributed.shards import Box
from hf_fsdp_tools.streaming.live import BUCKET_BYTES, LiveWeights


def pieces(
    weights: LiveWeights, boxes: Mapping[str, Box | None], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor's name, in order, with this rank's box of it, on the device of the mesh.

    `boxes` are what this rank gives of its own shards, without communication; of None it gives an empty tensor. What
    they lack arrives whole on every rank, in buckets. Every rank must iterate to the end, with boxes of the same names.
    """
    whole = {name: Box.whole(t.symbol.shape) for name, t in weights.tensors.items() if name not in boxes}
    buckets = weights.exchange(dict.fromkeys(range(rank_and_size()[1]), whole), bucket_bytes)
    arriving = (pair for bucket in buckets for pair in bucket.items())
    held = weights.held_of([[name] for name in weights.tensors if name in boxes])
    for name, tensor in weights.tensors.items():
        if name not in boxes:
            yield name, tensor.as_stored(next(arriving)[1])
            continue
        parts, box = next(held)[name], boxes[name]
        if box is None:
            yield name, torch.empty(0, dtype=tensor.element, device=weights.device)
        else:
            yield name, next(part for part in parts if part.box == box).values().to(weights.device)
    for _ in arriving:  # every rank enters the last round
        raise AssertionError("a tensor arrived that nobody waits for")
