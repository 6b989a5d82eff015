"""Which rank reads what: each its own share, or the ranks of a node together; chosen by measuring the storage."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.mesh import rank_on_node

from .agreement import all_ranks, rank_and_size
from .exchange import SHARED, groups_of, spans_of
from .probe import SLOW_STREAM_BYTES_S, Speed, slowest
from .spans import merged, num_bytes
from .transfer import Transfer, cut_batches

__all__ = ["ReadChoice", "ReadMode", "choose_read_mode", "refuse_read_mode"]

ReadMode = Literal["rank", "node", "auto"]

_BATCH_BYTES = (
    2 * 2**20
)  # of the batches that are counted here; about what 16 reads in flight have of the staging memory


@dataclass(frozen=True, kw_only=True)
class ReadChoice:
    """How the ranks read; the same on every rank."""

    mode: Literal["rank", "node"]
    """Each rank for itself, or the ranks of a node (or of the job) together."""

    why: str
    """The reason, for people."""

    speed: Speed
    """The slowest of what the ranks measured."""


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
    bytes they want.

    Args:
        transfers: What this rank wants.
        files: All files of the checkpoint, in the same order on every rank.
        speed: What this rank measured.
        mode: What was asked for.
    """
    if rank_and_size()[1] == 1:
        return ReadChoice(mode="rank", why=f"one rank; {speed}", speed=speed)
    speed = slowest(all_ranks(speed))
    if mode != "auto":
        return ReadChoice(mode=mode, why=f"as asked; {speed}", speed=speed)
    slow_stream = 0 < speed.stream_bytes_s < SLOW_STREAM_BYTES_S
    if not dist.is_gloo_available() or not (speed.is_slow or slow_stream):
        return ReadChoice(mode="rank", why=str(speed), speed=speed)
    picked, reason = _weigh(transfers, files, speed)
    return ReadChoice(mode=picked, why=f"{speed}; {reason}", speed=speed)


def _weigh(transfers: Sequence[Transfer], files: Sequence[Path], speed: Speed) -> tuple[Literal["rank", "node"], str]:
    """On slow storage: whether ranks would read the same bytes, or wait for requests longer than for bytes."""
    pace = speed.pace()
    batches = cut_batches(
        transfers,
        staging_bytes=_BATCH_BYTES,
        max_gap_bytes=pace.max_gap_bytes,
        join_bytes=pace.join_bytes,
        direct_bytes=pace.request_bytes,
    )
    requests = list(batches)
    gathered = all_ranks((rank_and_size()[0] - rank_on_node()[0], spans_of(requests, files), len(requests)))
    wanted = [spans for _, spans, _ in gathered]
    groups = groups_of([node for node, _, _ in gathered], wanted)
    if all(len(ranks) == 1 for ranks in groups):
        return "rank", "one rank per node"
    copies = max(_copies([wanted[r] for r in ranks]) for ranks in groups)
    if copies >= SHARED:
        return "node", f"each byte would be read {copies:.1f} times"
    mean_bytes = sum(num_bytes(spans) for spans in wanted) / max(1, sum(count for _, _, count in gathered))
    if speed.is_slow and mean_bytes < speed.worth_bytes:
        return "node", f"it would bring {mean_bytes / 2**20:.2f} MiB"
    return "rank", f"it brings {mean_bytes / 2**20:.2f} MiB"


def _copies(wanted: Sequence[torch.Tensor]) -> float:
    """How many ranks of a group want a byte, on average."""
    return sum(num_bytes(spans) for spans in wanted) / max(1, num_bytes(merged(torch.cat(list(wanted)))))
