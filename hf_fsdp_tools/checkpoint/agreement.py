"""All ranks go on together or stop together with the same error, so that none is left waiting in a collective."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from hf_fsdp_tools.errors import CheckpointError

__all__ = ["agreed", "all_ranks", "rank_and_size"]

T = TypeVar("T")


def rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks; (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def all_ranks(value: T) -> list[T]:
    """Every rank's value, in rank order. All ranks must call; the values are pickled and gathered, keep them small."""
    _, size = rank_and_size()
    if size == 1:
        return [value]
    values: list[T] = [value] * size
    dist.all_gather_object(values, value)
    return values


@contextmanager
def agreed(doing: str) -> Iterator[None]:
    """Run a block on every rank; if it failed on any of them, raise the same ``CheckpointError`` on all of them.

    All ranks must enter, and nothing in the block may communicate: a rank that fails leaves it early. At the end of
    the block the ranks gather one short string each. A rank whose own failure was no ``CheckpointError`` (a mistake in
    this package, memory exhausted) raises that itself; the others say where it happened.

    Args:
        doing: What the block does, for messages: "reading the checkpoint".
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    _, size = rank_and_size()
    text = str(failure) if isinstance(failure, CheckpointError) else repr(failure) if failure else None
    texts = all_ranks(text)
    if failure is not None and not isinstance(failure, CheckpointError):
        raise failure
    failed = [r for r, t in enumerate(texts) if t is not None]
    if not failed:
        return
    messages = list(dict.fromkeys(t for t in texts if t is not None))
    if len(failed) == size and len(messages) == 1:
        raise CheckpointError(messages[0]) from failure
    lines = [f"rank {', '.join(str(r) for r in failed if texts[r] == m)}: {m}" for m in messages]
    raise CheckpointError(
        f"{doing[:1].upper()}{doing[1:]} failed on {len(failed)} of {size} ranks.\n" + "\n".join(lines)
    ) from failure
