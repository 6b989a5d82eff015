"""Buckets on their way between the ranks: what a rank gets, while the next bucket travels already."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, rank_and_size
from hf_fsdp_tools.distributed.cpu_backend import has_cpu_backend
from hf_fsdp_tools.distributed.shards import Box, Held, memory_view
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.streaming.held import Part
from hf_fsdp_tools.streaming.routes import APART_BYTES, EVERY, Arrival, Bucket, Holders, Spread, holders_of
from hf_fsdp_tools.text import first_line

HeldParts = Mapping[str, Sequence[Part]]
"""This rank's parts of tensors, by name; all that it holds, whoever else holds it too."""

_SETTLE = timedelta(seconds=10)
"""How long a pass that ends early waits for what is on its way. (assumed)"""


class Exchange:
    """What travels together, on its way: between two ranks as one message for each dtype, but for large values
    (`APART_BYTES`), which travel by themselves."""

    def __init__(
        self, arrivals: Iterable[Arrival], held: HeldParts, device: torch.device, *, rank: int | None = None
    ) -> None:
        """Begin to send and to receive; nothing is waited for. Every rank must call, in the same order of buckets, with
        what it gets or sends anything of, and its own parts of that."""
        rank, self._arrived = rank_and_size()[0] if rank is None else rank, dict[str, torch.Tensor]()
        sent, received, shared = (defaultdict[tuple[int, torch.dtype, int], list[torch.Tensor]](list) for _ in range(3))
        for arrival in arrivals:
            if is_there := arrival.to in (rank, EVERY):
                self._arrived[arrival.key] = torch.empty(arrival.box.length, dtype=arrival.dtype, device=device)
            for box, source in arrival.parts(rank):
                if source == rank:
                    part = next(p for p in held[arrival.name] if p.box.intersect(box) == box).within(box)
                if is_there:
                    inside = box.start_in(arrival.box)
                    values = memory_view(self._arrived[arrival.key], inside, box.length)
                    if source == rank:
                        values.copy_(part.data)
                    if source == rank == arrival.to:
                        continue
                    messages, other = shared if arrival.to == EVERY else received, source
                else:
                    values, messages, other = part.data.to(device=device, dtype=arrival.dtype), sent, arrival.to
                messages[other, arrival.dtype, len(messages) if values.nbytes >= APART_BYTES else -1].append(values)
        self._memory: list[tuple[torch.Tensor, list[torch.Tensor]]] = []  # kept until it is sent, or received
        self._works: list[dist.Work] = []
        operations: list[dist.P2POp] = []
        for messages in (sent, received, shared):
            for (other, dtype, _), places in messages.items():
                memory, is_own = places[0].contiguous(), messages is sent or other == rank
                if len(places) > 1 and is_own:
                    memory = torch.cat([place.reshape(-1) for place in places])
                elif len(places) > 1:
                    memory = torch.empty(sum(place.numel() for place in places), dtype=dtype, device=device)
                self._memory.append((memory, [] if is_own else places))
                content = memory.reshape(-1).view(torch.uint8)  # backends do not know every dtype
                if messages is shared:
                    self._works.append(dist.broadcast(content, other, async_op=True))
                else:
                    operations.append(dist.P2POp(dist.isend if is_own else dist.irecv, content, other))
        if operations:
            self._works += dist.batch_isend_irecv(operations)

    def finish(self) -> dict[str, torch.Tensor]:
        """What this rank got, by key, once it is complete."""
        for work in self._works:
            work.wait()
        for memory, places in self._memory:
            if places and memory.data_ptr() != places[0].data_ptr():  # otherwise the place itself, which is contiguous
                parts = torch.split(memory.reshape(-1), [place.numel() for place in places])
                for place, values in zip(places, parts, strict=True):
                    place.copy_(values.view(place.shape))
        arrived, self._arrived, self._memory, self._works = self._arrived, {}, [], []
        return arrived

    def settle(self) -> None:
        """Let what is on its way arrive, or a rank that is lost be noticed: cut off, it would reach the next pass."""
        with suppress(RuntimeError):  # an error that says more is on its way too
            for work in self._works:
                work.wait(_SETTLE)


def connect(device: torch.device) -> None:
    """Have NCCL's communicator of all ranks, which ranks that send nothing would not make. Every rank must call."""
    if device.type != "cpu" and dist.is_initialized():
        dist.all_reduce(torch.zeros(1, device=device))


def holders_among(tensors: Mapping[str, torch.Tensor]) -> dict[str, Holders]:
    """Which ranks hold what of model tensors. Every rank must call: some tensors alone know their own boxes."""
    own = {key: [box for box, _ in Held.of(t).boxes] for key, t in tensors.items() if not Held.of(t).is_derived}
    every = all_ranks(own, "planning what is sent") if own else []
    return holders_of(tensors, rank_and_size()[1], {key: [each[key] for each in every] for key in own})


def gather_to_first(tensor: torch.Tensor, *, staging_bytes: int) -> torch.Tensor | None:
    """The whole of a sharded (or plain) tensor on the host of rank 0; None on every other rank.

    Every rank of the default process group must call. At most `staging_bytes` travel at a time, so that no other rank
    holds more than its shard and one such part: between CPUs, by gloo as a rule; in a group that has no backend for
    them (`has_cpu_backend`), between devices.
    """
    own = Held.of(tensor)
    device = own.device if own.mesh and dist.is_initialized() and not has_cpu_backend() else torch.device("cpu")
    whole = torch.empty(tensor.shape, dtype=tensor.dtype) if rank_and_size()[0] == 0 else None
    held = [Part(name="", box=box, data=memory, dtype=tensor.dtype) for box, memory in own.parts()]
    holders = Spread(holders_among({"": tensor})[""])
    for slab in Box.whole(tensor.shape).slabs(staging_bytes, tensor.element_size()):
        arrived = Exchange([Arrival(0, "", "", slab, tensor.dtype, holders)], {"": held}, device).finish()
        if whole is not None:
            whole[slab.slices].copy_(arrived[""])
    return whole


def deliver(
    buckets: Sequence[Bucket],
    held: Iterator[HeldParts],
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
    connect(device)
    flying: list[Exchange] = []
    try:
        for i, (bucket, parts) in enumerate(zip(buckets, held, strict=True)):
            if flying and buckets[i - 1].most_bytes + bucket.most_bytes > bucket_bytes:
                yield _finished(flying.pop(), doing)
            _meet(failed(), doing)
            flying.append(Exchange(bucket.arrivals, parts, device))
            if len(flying) > 1:
                yield _finished(flying.pop(0), doing)
        while flying:
            yield _finished(flying.pop(), doing)
        _meet(failed(), doing)
    finally:
        for exchange in flying:
            exchange.settle()


def _meet(error: Exception | None, doing: str) -> None:
    with agreed(doing):
        if error is not None:
            raise error


def _finished(exchange: Exchange, doing: str) -> dict[str, torch.Tensor]:
    try:
        return exchange.finish()
    except RuntimeError as error:  # of a backend, that does not say which rank is lost
        _meet(CheckpointError(f"A bucket of weights did not arrive: {first_line(error)}."), doing)
        raise
