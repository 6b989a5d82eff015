"""Let all ranks go on together, or stop together with the same error, so that none waits for another."""

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hf_fsdp_tools.distributed.mesh import rank_on_node
from hf_fsdp_tools.distributed.rounds import StoppedElsewhere, rounds_of
from hf_fsdp_tools.distributed.watch import watched
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.hub import local_path

__all__ = ["agreed", "all_ranks", "opened", "rank_and_size", "refuse_other_commits", "shared_rng_state", "shared_seed"]

T = TypeVar("T")


def rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks; (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def all_ranks(value: T, doing: str = "exchanging values", *, ranks: Sequence[int] | None = None) -> list[T]:
    """Every rank's value, in rank order; only this rank's where there is nobody else to ask (see `rounds_of`).

    Args:
        value: is pickled; keep it small.
        doing: what the ranks do, for messages; the same on every rank, or they stop with one error.
        ranks: the ranks that call; None means all ranks of the default process group.

    The values travel through the process group's key-value store, so no backend is used.

    Raises:
        RanksError: a rank does not come, is lost, or is in another call.
    """
    rounds = rounds_of(ranks)
    return [value] if rounds is None else rounds.exchange(value, doing)


def shared_rng_state() -> torch.Tensor:
    """The state of rank 0's default generator on the CPU, on every rank; this rank's own under the "fake" backend.

    Every rank must call. Nothing is drawn.
    """
    is_first = rounds_of() is None or rank_and_size()[0] == 0
    shared = all_ranks(torch.get_rng_state() if is_first else None, "sharing the random state")[0]
    assert shared is not None
    return shared


def shared_seed(seed: int | None) -> int:
    """`seed`, or one that follows from the state of rank 0's default generator, and so from `torch.manual_seed` and
    `set_seed`; the same on every rank. All ranks must call; nothing is drawn."""
    return zlib.crc32(shared_rng_state().numpy().tobytes()) if seed is None else seed


@contextmanager
def agreed(doing: str, where: str | PathLike[str] = "") -> Iterator[None]:
    """Run a block on every rank; if it fails on some rank, raise a `CheckpointError` on all ranks.

    Every rank must enter. Blocks may be nested, and a block may exchange values (`all_ranks`): the ranks that wait
    there for a rank that fails learn of it at once. A block must not run collectives of a process group, which would
    not learn of it. A rank whose own error is no `CheckpointError` (a mistake in this package, memory exhausted) raises
    that error; the other ranks say which rank it was.

    Args:
        doing: what the block does, for messages; the same on every rank: "reading the checkpoint".
        where: a path for messages, which may differ between ranks.

    Raises:
        CheckpointError: the block failed on some rank; the same on every rank.
        RanksError: a rank does not come, is lost, or is in another call.
    """
    rounds = rounds_of()
    if rounds is None:
        yield
        return
    failure: Exception | None = None
    with rounds.scope(doing) as scope:
        try:
            yield
        except StoppedElsewhere as stop:
            if stop.scope is not scope:
                raise
        except Exception as error:
            failure = error
            rounds.fail(scope)
        text = str(failure) if isinstance(failure, CheckpointError) else repr(failure) if failure else None
        texts = rounds.exchange(text, doing, ends=scope)
    if failure is not None and not isinstance(failure, CheckpointError):
        raise failure
    failed = [rank for rank, text in enumerate(texts) if text is not None]
    if not failed:
        return
    messages = list(dict.fromkeys(text for text in texts if text is not None))
    if len(failed) == len(texts) and len(messages) == 1:
        raise CheckpointError(messages[0]) from failure
    lines = [f"rank {', '.join(str(r) for r in failed if texts[r] == m)}: {m}" for m in messages]
    what = f"{doing[:1].upper()}{doing[1:]}{f' ({str(where)!r})' if where else ''}"
    raise CheckpointError(f"{what} failed on {len(failed)} of {len(texts)} ranks.\n" + "\n".join(lines)) from failure


def opened(
    doing: str,
    name_or_path: str | PathLike[str],
    open_it: Callable[[dict[str, Any]], T],
    hub_kwargs: Mapping[str, Any],
) -> T:
    """The result of `open_it(hub_kwargs)`, which opens a checkpoint, on every rank.

    All ranks open a local path at once. A hub name is opened by the first rank of each node, and then by the other
    ranks with `local_files_only`, so that a job asks the hub once per node and waits only once for a hub that fails.

    Args:
        doing: as for `agreed`.
        name_or_path: hub name or local path.
        open_it: must not communicate.
        hub_kwargs: for `open_it`.

    Every rank must call.

    Raises:
        CheckpointError: `open_it` failed on some rank; the same on every rank.
    """
    result: list[T] = []
    with agreed(doing):
        with watched(Path(name_or_path)):
            is_local = local_path(name_or_path) is not None
        is_first = is_local or rank_and_size()[1] == 1 or rank_on_node()[0] == 0
        if is_first:
            result.append(open_it(dict(hub_kwargs)))
    with agreed(doing):
        if not is_first:
            result.append(open_it({**hub_kwargs, "local_files_only": True}))
    return result[0]


def refuse_other_commits(name_or_path: str | PathLike[str], commit: str | None) -> None:
    """Refuse a hub name of which nodes got different commits, by a push meanwhile or from an old cache.

    Every rank must call; the ranks gather the commits.

    Raises:
        CheckpointError: the commits differ; the same on every rank.
    """
    commits = all_ranks(commit)
    if len(set(commits)) > 1:
        found = ", ".join(f"{c or 'a local folder'} on rank {commits.index(c)}" for c in dict.fromkeys(commits))
        raise CheckpointError(
            f"{str(name_or_path)!r} is not the same on all nodes: {found}. Give one commit as revision, or download "
            "it first and give the folder."
        )
