"""Let all ranks go on together, or stop together with the same error, so that none waits in a collective."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from hf_fsdp_tools.distributed.mesh import rank_on_node
from hf_fsdp_tools.distributed.watch import watched
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.hub import local_path

__all__ = ["agreed", "all_ranks", "opened", "rank_and_size", "refuse_other_commits"]

T = TypeVar("T")


def rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks; (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def all_ranks(value: T) -> list[T]:
    """Every rank's value, in rank order; only this rank's without a process group or under the "fake" backend.

    Every rank must call. The values are pickled and gathered, so keep them small.
    """
    _, size = rank_and_size()
    if size == 1 or dist.get_backend() == "fake":
        return [value]
    values: list[T] = [value] * size
    dist.all_gather_object(values, value)
    return values


@contextmanager
def agreed(doing: str) -> Iterator[None]:
    """Run a block on every rank; if it fails on some rank, raise a `CheckpointError` on all ranks.

    Every rank must enter, and nothing in the block may communicate, because a rank that fails leaves it early. At the
    end of the block the ranks gather one short string each. A rank whose own error is no `CheckpointError` (a mistake
    in this package, memory exhausted) raises that error; the other ranks say which rank it was.

    Args:
        doing: what the block does, for messages: "reading the checkpoint".

    Raises:
        CheckpointError: the block failed on some rank; the same on every rank.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    text = str(failure) if isinstance(failure, CheckpointError) else repr(failure) if failure else None
    texts = all_ranks(text)
    if failure is not None and not isinstance(failure, CheckpointError):
        raise failure
    failed = [r for r, t in enumerate(texts) if t is not None]
    if not failed:
        return
    messages = list(dict.fromkeys(t for t in texts if t is not None))
    if len(failed) == len(texts) and len(messages) == 1:
        raise CheckpointError(messages[0]) from failure
    lines = [f"rank {', '.join(str(r) for r in failed if texts[r] == m)}: {m}" for m in messages]
    raise CheckpointError(
        f"{doing[:1].upper()}{doing[1:]} failed on {len(failed)} of {len(texts)} ranks.\n" + "\n".join(lines)
    ) from failure


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
