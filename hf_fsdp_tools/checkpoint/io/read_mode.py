"""Which rank reads what: each its own share, or the ranks of a node together; chosen by measuring the storage."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from hf_fsdp_tools.checkpoint.io.exchange import groups_of, spans_of
from hf_fsdp_tools.checkpoint.io.probe import (
    SLOW_STREAM_BYTES_S,
    Speed,
    measure_flow,
    slowest,
)
from hf_fsdp_tools.checkpoint.io.spans import merged, num_bytes
from hf_fsdp_tools.checkpoint.io.transfer import Transfer, cut_batches
from hf_fsdp_tools.distributed.agreement import all_ranks, rank_and_size
from hf_fsdp_tools.distributed.mesh import rank_on_node
from hf_fsdp_tools.errors import CheckpointError, ConfigError

__all__ = ["ReadChoice", "ReadMode", "choose_read_mode", "refuse_read_mode"]

ReadMode = Literal["rank", "node", "auto"]

_ALONE_BYTES_S = 1.3e9
"""Bytes per second that a core reads into place where storage is no limit (measured: 0.95 to 1.3 GB/s)."""

_TOGETHER_BYTES_S = 0.62e9
"""Bytes per second that a core receives while it also reads and sends (measured: 0.5 to 0.68 GB/s). With both, 4 ranks of HSDP
2 × 2 on 2 cores are expected to gain by reading together up to 1.2 GB/s from all storage; measured, they gain at 0.8, not at 1.6
(`benchmarks/load.py --slow-storage --ranks 4 --replicas 2 --shared-mb-s 400 800 1200 1600`). Other machines: assumed."""

_START_S = 0.02
"""Making a group to pass bytes on in (measured: 10 to 30 ms)."""

_REQUEST_BYTES = 2**19  # of a joint read; about what it makes of its staging memory

_BATCH_BYTES = (
    2 * 2**20
)  # of the batches that are counted here; about what 16 reads in flight have of the staging memory


@dataclass(frozen=True, kw_only=True)
class ReadChoice:
    """How the ranks read; the same on every rank, but for ``probe_bytes``."""

    mode: Literal["rank", "node"]
    """Each rank for itself, or the ranks of a node (or of the job) together."""

    why: str
    """The reason, for people."""

    speed: Speed
    """The slowest of what the ranks measured."""

    probe_bytes: int
    """Bytes that this rank read to find out."""


def refuse_read_mode(mode: str) -> None:
    """Whether the mode exists and can be had here; the same answer on every rank.

    Raises:
        ConfigError: It is none of the three, or torch was built without gloo, through which ranks pass bytes on.
    """
    if mode not in ("rank", "node", "auto"):
        raise ConfigError(f'read_mode is {mode!r}; it must be "rank", "node" or "auto".')
    if mode == "node" and rank_and_size()[1] > 1 and not dist.is_gloo_available():
        raise ConfigError(
            'read_mode="node" passes bytes on through gloo, which this torch lacks. Use read_mode="rank".'
        )


def choose_read_mode(
    transfers: Sequence[Transfer], *, files: Sequence[Path], speed: Speed, mode: ReadMode
) -> ReadChoice:
    """Settle "auto" (see ``load_weights``), the same way on every rank.

    Every rank of the default process group must call; the ranks gather what they measured and, if storage is slow, which
    bytes they want, and what comes when all of them ask at once.

    Args:
        transfers: What this rank wants.
        files: All files of the checkpoint, in the same order on every rank.
        speed: What this rank measured.
        mode: What was asked for.
    """
    probe_bytes = speed.num_bytes
    if rank_and_size()[1] == 1:
        return ReadChoice(mode="rank", why=f"one rank; {speed}", speed=speed, probe_bytes=probe_bytes)
    speed = slowest(all_ranks(speed))
    if mode != "auto":
        return ReadChoice(mode=mode, why=f"as asked; {speed}", speed=speed, probe_bytes=probe_bytes)
    slow_stream = 0 < speed.stream_bytes_s < SLOW_STREAM_BYTES_S
    if not dist.is_gloo_available() or not (speed.is_slow or slow_stream):
        return ReadChoice(mode="rank", why=str(speed), speed=speed, probe_bytes=probe_bytes)
    demand = _demand(transfers, files, speed)
    if all(len(ranks) == 1 for ranks in demand.groups):
        return ReadChoice(mode="rank", why=f"{speed}; one rank per node", speed=speed, probe_bytes=probe_bytes)
    flow_bytes, all_bytes_s = _flow(transfers, speed)
    alone_s, together_s = demand.seconds_alone(speed, all_bytes_s), demand.seconds_together(speed, all_bytes_s)
    return ReadChoice(
        mode="node" if together_s < alone_s else "rank",
        why=f"{speed}, {all_bytes_s / 1e9:.2f} GB/s for all ranks; each byte would be read {demand.copies:.1f} times; "
        f"expected {alone_s:.2f} s each for itself, {together_s:.2f} s together",
        speed=speed,
        probe_bytes=probe_bytes + flow_bytes,
    )


@dataclass(frozen=True, kw_only=True)
class _Demand:
    """What all ranks want."""

    wanted: tuple[int, ...]
    """Bytes that each rank would read for itself."""

    requests: tuple[int, ...]
    """In how many requests."""

    groups: tuple[tuple[int, ...], ...]
    """Ranks that would read together."""

    unions: tuple[int, ...]
    """Bytes that each group would read."""

    ranks_per_core: float
    """On the fullest node; at least 1."""

    @property
    def copies(self) -> float:
        """How many ranks of a group want a byte, on average."""
        return sum(self.wanted) / max(1, sum(self.unions))

    def seconds_alone(self, speed: Speed, all_bytes_s: float) -> float:
        """Each rank reads what it wants: as quickly as storage gives it to all, or as cores take it."""
        waiting = max(self.requests) * speed.request_s / speed.pace().threads
        copying = max(self.wanted) * self.ranks_per_core / _ALONE_BYTES_S
        return max(sum(self.wanted) / all_bytes_s, waiting, copying)

    def seconds_together(self, speed: Speed, all_bytes_s: float) -> float:
        """Each group reads what any of its ranks wants, while it passes on what it has read."""
        share = max(union / len(ranks) for union, ranks in zip(self.unions, self.groups, strict=True))
        waiting = share / _REQUEST_BYTES * speed.request_s / speed.pace().threads
        copying = max(self.wanted) * self.ranks_per_core / _TOGETHER_BYTES_S
        return max(sum(self.unions) / all_bytes_s, waiting, copying) + _START_S


def _demand(transfers: Sequence[Transfer], files: Sequence[Path], speed: Speed) -> _Demand:
    """Gathered from all ranks; the same on each."""
    pace = speed.pace()
    batches = cut_batches(
        transfers,
        staging_bytes=_BATCH_BYTES,
        max_gap_bytes=pace.max_gap_bytes,
        join_bytes=pace.join_bytes,
        direct_bytes=pace.request_bytes,
    )
    requests = list(batches)
    rank, (on_node, node_size) = rank_and_size()[0], rank_on_node()
    gathered = all_ranks((rank - on_node, node_size / _cores(), spans_of(requests, files), len(requests)))
    wanted = [spans for _, _, spans, _ in gathered]
    groups = groups_of([node for node, _, _, _ in gathered], wanted)
    return _Demand(
        wanted=tuple(num_bytes(spans) for spans in wanted),
        requests=tuple(count for _, _, _, count in gathered),
        groups=tuple(groups),
        unions=tuple(num_bytes(merged(torch.cat([wanted[r] for r in ranks]))) for ranks in groups),
        ranks_per_core=max(1.0, *(crowd for _, crowd, _, _ in gathered)),
    )


def _flow(transfers: Sequence[Transfer], speed: Speed) -> tuple[int, float]:
    """Bytes that this rank read, and bytes per second of all ranks at once beyond a request's own time."""
    rank, world_size = rank_and_size()
    part, pace = rank / world_size, speed.pace()
    try:
        measured = measure_flow(transfers, pace=pace, part=part, together=lambda: all_ranks(None))
    except CheckpointError:
        measured = (0, 0.0)  # the load meets the same fault, and there all ranks learn of it
    gathered = all_ranks(measured)
    longest = max(seconds for _, seconds in gathered)
    total = sum(size for size, _ in gathered)
    if not total:
        return measured[0], world_size * pace.threads * (speed.stream_bytes_s or SLOW_STREAM_BYTES_S)
    return measured[0], total / max(longest - speed.request_s, longest / 10)


def _cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
