"""Buckets on their way between the ranks: what a rank gets, while the next bucket travels already."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from hf_fsdp_tools.distributed.agreement import agreed, rank_and_size
from hf_fsdp_tools.distributed.shards import memory_view
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.streaming.held import Part
from hf_fsdp_tools.streaming.routes import EVERY, Bucket, most_of
from hf_fsdp_tools.text import first_line

Held = Mapping[str, Sequence[Part]]
"""This rank's parts of tensors, by name; all that it holds, whoever else holds it too."""

_SETTLE = timedelta(seconds=10)
"""How long a pass that ends early waits for what is on its way. (assumed)"""


class Delivery:
    """A bucket on its way."""

    def __init__(self, bucket: Bucket, held: Held, device: torch.device) -> None:
        """Begin to send and to receive. Every rank must call, in the same order of buckets; nothing is waited for."""
        rank = rank_and_size()[0]
        arrivals = bucket.arrivals_at(rank)
        self._arrived = {
            name: torch.empty(box.length, dtype=dtype, device=device) for name, (box, dtype) in arrivals.items()
        }
        self._sent: list[torch.Tensor] = []  # kept until it is sent
        self._received: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._works: list[dist.Work] = []
        operations: list[dist.P2POp] = []
        for route in bucket.routes:
            place = part = None
            if route.to in (rank, EVERY):
                want = arrivals[route.key][0]
                inside = [a - b for a, b in zip(route.box.start, want.start, strict=True)]
                place = memory_view(self._arrived[route.key], inside, route.box.length)
            if route.source == rank:
                part = next(p for p in held[route.name] if p.box.intersect(route.box) == route.box).within(route.box)
            if place is None:
                if part is not None:
                    self._sent.append(part.data.to(device=device, dtype=part.dtype).contiguous())
                    operations.append(dist.P2POp(dist.isend, _as_bytes(self._sent[-1]), route.to))
                continue
            if part is not None:
                place.copy_(part.data)
            if route.to == rank == route.source:
                continue
            memory = place.contiguous()  # the place itself, where it is contiguous
            self._received.append((place, memory))
            if route.to == EVERY:
                self._works.append(dist.broadcast(_as_bytes(memory), route.source, async_op=True))
            else:
                operations.append(dist.P2POp(dist.irecv, _as_bytes(memory), route.source))
        if operations:
            self._works += dist.batch_isend_irecv(operations)

    def finish(self) -> dict[str, torch.Tensor]:
        """What this rank got of the bucket, once it is complete."""
        for work in self._works:
            work.wait()
        for place, memory in self._received:
            if memory.data_ptr() != place.data_ptr():
                place.copy_(memory)
        self._sent, self._received, self._works = [], [], []
        arrived, self._arrived = self._arrived, {}
        return arrived

    def settle(self) -> None:
        """Let what is on its way arrive, or a rank that is lost be noticed: cut off, it would reach the next pass."""
        with suppress(RuntimeError):  # an error that says more is on its way too
            for work in self._works:
                work.wait(_SETTLE)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor: backends do not know every dtype."""
    return tensor.reshape(-1).view(torch.uint8)


def deliver(
    buckets: Sequence[Bucket],
    held: Iterator[Held],
    device: torch.device,
    bucket_bytes: int,
    failed: Callable[[], Exception | None] = lambda: None,
    doing: str = "sending weights",
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield what this rank gets of each bucket, by name; the next bucket travels meanwhile where the bound holds both.

    `held` gives this rank's parts for each bucket. Every rank must iterate to the end. Before each bucket the ranks
    meet in a round, which names a rank that does not come, and in which the error that one of them has `failed` with
    becomes that of all.
    """
    if device.type != "cpu" and dist.is_initialized():  # ranks that send nothing would not make NCCL's communicator
        dist.all_reduce(torch.zeros(1, device=device))
    flying: list[Delivery] = []
    sizes: list[int] = [most_of(bucket.bytes_of) for bucket in buckets]
    try:
        for i, (bucket, parts) in enumerate(zip(buckets, held, strict=True)):
            if flying and sizes[i - 1] + sizes[i] > bucket_bytes:
                yield _arrived(flying.pop(), doing)
            _meet(failed(), doing)
            flying.append(Delivery(bucket, parts, device))
            if len(flying) > 1:
                yield _arrived(flying.pop(0), doing)
        while flying:
            yield _arrived(flying.pop(), doing)
        _meet(failed(), doing)
    finally:
        for delivery in flying:
            delivery.settle()


def _meet(error: Exception | None, doing: str) -> None:
    with agreed(doing):
        if error is not None:
            raise error


def _arrived(delivery: Delivery, doing: str) -> dict[str, torch.Tensor]:
    try:
        return delivery.finish()
    except RuntimeError as error:  # of a backend, that does not say which rank is lost
        _meet(CheckpointError(f"A bucket of weights did not arrive: {first_line(error)}."), doing)
        raise
