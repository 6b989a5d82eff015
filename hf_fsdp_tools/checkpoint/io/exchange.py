"""Reading together: ranks each read distinct, contiguous parts of what any of them wants, once, and pass the bytes on.

What all want is cut into segments, in file order. In each round every rank reads one segment, and then each sends every other
the bytes that it wants out of it. The next segments are read while these are sent. So a rank gets what it wants in file order
(see ``arrivals``).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from hf_fsdp_tools.checkpoint.io.arrivals import Arrivals
from hf_fsdp_tools.checkpoint.io.reader import (
    MAX_GAP_BYTES,
    Pace,
    TransferStats,
    opened,
)
from hf_fsdp_tools.checkpoint.io.spans import (
    FILE_STEP,
    clipped,
    cut_points,
    merged,
    num_bytes,
    places,
)
from hf_fsdp_tools.checkpoint.io.transfer import Batch, Transfer, cut_batches
from hf_fsdp_tools.checkpoint.io.watch import ReadThreads
from hf_fsdp_tools.distributed.agreement import all_ranks, rank_and_size
from hf_fsdp_tools.distributed.mesh import rank_on_node

__all__ = ["Together", "groups_of", "read_together", "spans_of"]

_BATCH_PART = 8  # of the staging memory, for bytes that wait for the rest of their batch; there may be two such batches
_MAX_BATCH_BYTES = 8 * 2**20  # as large as the reader's own buffers

_SHARED = (
    1.5  # nodes that want a byte, on average, from which on it is passed on between them (assumed; replicas are 2)
)


@dataclass(frozen=True, kw_only=True)
class Together:
    """How a joint read went on this rank."""

    stats: TransferStats
    """What it read and staged."""

    failure: Exception | None
    """What went wrong on this rank. All ranks of the group have stopped, those where nothing went wrong too."""

    def result(self) -> TransferStats:
        """The figures, or the failure raised."""
        if self.failure is not None:
            raise self.failure
        return self.stats


def read_together(
    transfers: Sequence[Transfer],
    *,
    files: Sequence[Path],
    staging_bytes: int,
    pace: Pace,
    on_bytes: Callable[[int], object],
) -> Together:
    """Fill the memory of every rank's transfers; each byte is read by one rank of a group (see ``groups_of``).

    Every rank of the default process group must call. The ranks gather what each wants, make a gloo group for each group
    of ranks, and in each round tell each other whether all is well and exchange bytes through host memory. A failure of
    this rank is returned, not raised: the caller shares it among all ranks.

    Args:
        transfers: What this rank wants.
        files: All files of the checkpoint, in the same order on every rank; folders may differ between nodes.
        staging_bytes: Upper bound of this rank's buffers together.
        pace: How to read.
        on_bytes: As in ``read_transfers``.
    """
    buffer_bytes = min(staging_bytes // _BATCH_PART, _MAX_BATCH_BYTES)
    batches = list(cut_batches(transfers, staging_bytes=buffer_bytes, max_gap_bytes=MAX_GAP_BYTES))
    rank, _ = rank_and_size()
    gathered = all_ranks((rank - rank_on_node()[0], spans_of(batches, files)))
    wanted = [spans for _, spans in gathered]
    groups = groups_of([node for node, _ in gathered], wanted)
    made = [dist.new_group(list(ranks), backend="gloo") for ranks in groups]
    own = next(i for i, ranks in enumerate(groups) if rank in ranks)
    try:
        rounds = _Rounds(
            group=made[own],
            wanted=[wanted[r] for r in groups[own]],
            files=files,
            space=staging_bytes - 2 * buffer_bytes,
            pace=pace,
        )
        return rounds.run(Arrivals(batches, files, on_bytes))
    finally:
        dist.destroy_process_group(made[own])


def spans_of(batches: Sequence[Batch], files: Sequence[Path]) -> torch.Tensor:
    """The bytes of the batches, as a set (see ``spans``)."""
    base = {file: number * FILE_STEP for number, file in enumerate(files)}
    pairs = [(base[batch.file] + batch.start, base[batch.file] + batch.stop) for batch in batches]
    return merged(torch.tensor(pairs, dtype=torch.int64, device="cpu").reshape(-1, 2))


def groups_of(nodes: Sequence[int], wanted: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """The ranks that read together: those of a node, or all of them where nodes want the same bytes (HSDP's replicas).

    Args:
        nodes: A number for the node of each rank.
        wanted: What each rank wants.
    """
    groups = [tuple(r for r, other in enumerate(nodes) if other == node) for node in dict.fromkeys(nodes)]
    unions = [merged(torch.cat([wanted[r] for r in ranks])) for ranks in groups]
    everything = num_bytes(merged(torch.cat(unions)))
    if sum(num_bytes(union) for union in unions) >= _SHARED * max(1, everything):
        return [tuple(range(len(nodes)))]
    return groups


class _Rounds:
    """The rounds of one group of ranks."""

    def __init__(
        self,
        *,
        group: dist.ProcessGroup,
        wanted: Sequence[torch.Tensor],
        files: Sequence[Path],
        space: int,
        pace: Pace,
    ) -> None:
        self._group, self._wanted, self._files, self._pace = group, wanted, files, pace
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._union = merged(torch.cat(list(wanted)), max_gap_bytes=pace.max_gap_bytes)
        # At worst all ranks want all of a round: two segments being read, one sent to and one received from each rank.
        total, most = num_bytes(self._union), max(1, space // (2 + 2 * self._size)) * self._size
        self._count = -(-total // most)
        self._segment_bytes = -(-total // max(1, self._count * self._size))  # alike, so that no rank idles at the end
        self._points = cut_points(self._union, self._segment_bytes)
        self._buffers = [
            torch.empty(0, dtype=torch.uint8, device="cpu") for _ in range(4)
        ]  # two to read into, to send, to receive
        self._num_bytes = self._calls = 0

    def run(self, arrivals: Arrivals) -> Together:
        """All rounds. Whatever fails on a rank, all learn of it in the next round and leave."""
        failure: Exception | None = None
        ahead: list[Future[int]] = []
        with ExitStack() as stack:
            try:
                wanted = sorted({self._files[i] for i in (self._union[:, 0] // FILE_STEP).tolist()})
                read = stack.enter_context(opened(wanted, read_ahead=True))
                pool = stack.enter_context(ReadThreads(self._pace.threads))
                start = partial(self._start, pool=pool, read=read)
                ahead = start(0)
            except Exception as error:
                failure = error
            for number in range(self._count):
                try:
                    for request in ahead:
                        self._calls += request.result()
                    ahead = start(number + 1) if failure is None else []
                except Exception as error:
                    failure = failure or error
                if self._any_failed(failure):
                    break
                received = self._exchange(number)
                try:
                    for start_of_part, part in received:
                        arrivals.take(start_of_part, part)
                except Exception as error:
                    failure = error
            for request in ahead:
                request.cancel()  # after a failure the rest is of no use
        buffers = sum(buffer.numel() for buffer in self._buffers)
        stats = TransferStats(
            num_bytes=self._num_bytes, calls=self._calls, staging_bytes=buffers + arrivals.staging_bytes
        )
        return Together(stats=stats, failure=failure)

    def _segments(self, number: int) -> list[tuple[int, int]]:
        """The segment of each rank in a round; empty ones at the end."""
        last = len(self._points) - 1
        index = [min(number * self._size + r, last) for r in range(self._size)]
        return [(self._points[i], self._points[min(i + 1, last)]) for i in index]

    def _start(
        self, number: int, *, pool: ReadThreads, read: Callable[[Path, int, torch.Tensor], int]
    ) -> list[Future[int]]:
        """Begin to read this rank's segment of a round into the buffer of that round."""
        spans = clipped(self._union, *self._segments(number)[self._rank])
        buffer = self._buffer(number % 2, num_bytes(spans))
        request_bytes = max(2**18, -(-self._segment_bytes // self._pace.threads))
        requests: list[Future[int]] = []
        at = 0
        for start, stop in spans.tolist():
            for position in range(start, stop, request_bytes):
                size = min(request_bytes, stop - position)
                file, offset = divmod(position, FILE_STEP)
                requests.append(pool.submit(read, self._files[file], offset, buffer[at : at + size]))
                at += size
        self._num_bytes += at
        return requests

    def _any_failed(self, failure: Exception | None) -> bool:
        status = torch.tensor([failure is not None], dtype=torch.int32, device="cpu")
        dist.all_reduce(status, dist.ReduceOp.MAX, group=self._group)
        return bool(status.item())

    def _exchange(self, number: int) -> list[tuple[int, torch.Tensor]]:
        """Send every rank what it wants of this rank's segment; what this rank wants of all, with its positions."""
        segments = self._segments(number)
        own = clipped(self._union, *segments[self._rank])
        parts = [places(clipped(spans, *segments[self._rank]), own) for spans in self._wanted]
        filled, kept = self._buffers[number % 2], parts[self._rank]
        parts[self._rank] = []  # stays where it is
        sizes = [sum(size for _, size in part) for part in parts]
        outgoing = self._buffer(2, sum(sizes))
        at = 0
        for begin, size in (place for part in parts for place in part):
            outgoing[at : at + size] = filled[begin : begin + size]
            at += size
        coming = [clipped(self._wanted[self._rank], *segment) for segment in segments]
        expected = [0 if r == self._rank else num_bytes(spans) for r, spans in enumerate(coming)]
        incoming = self._buffer(3, sum(expected))
        dist.all_to_all_single(incoming, outgoing, expected, sizes, group=self._group)
        received: list[tuple[int, torch.Tensor]] = []
        at = 0
        for source, spans in enumerate(coming):
            for i, (start, stop) in enumerate(spans.tolist()):
                if source == self._rank:
                    received.append((start, filled[kept[i][0] : kept[i][0] + kept[i][1]]))
                else:
                    received.append((start, incoming[at : at + stop - start]))
                    at += stop - start
        return received

    def _buffer(self, index: int, size: int) -> torch.Tensor:
        """The beginning of a buffer, which grows when it must."""
        if self._buffers[index].numel() < size:
            self._buffers[index] = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._buffers[index][:size]
