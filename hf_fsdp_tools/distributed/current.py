"""Which rounds the calling thread uses: those of the process group, or some of its own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from multiprocessing.util import Finalize
from typing import Any
from weakref import WeakKeyDictionary, finalize

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from hf_fsdp_tools.distributed.rounds import Rounds

_of_thread: ContextVar[Rounds | None] = ContextVar("_of_thread", default=None)

_made: WeakKeyDictionary[Any, dict[tuple[int, ...] | str, Rounds]] = WeakKeyDictionary()


def rounds_of(ranks: Sequence[int] | None = None) -> Rounds | None:
    """The rounds of all ranks of the default process group, or of some; in a thread with `rounds_apart`, those.

    None where there is nobody to talk to: without a group, in a group of one, under the "fake" backend.
    """
    if (apart := _of_thread.get()) is not None:
        assert ranks is None or tuple(ranks) == apart.ranks, "rounds of a thread are rounds of all ranks"
        return apart
    if not dist.is_available() or not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    members = tuple(ranks) if ranks is not None else tuple(range(dist.get_world_size()))
    if len(members) == 1:
        return None
    of_group = _made.setdefault(dist.group.WORLD, {})
    if members not in of_group:
        of_group[members] = Rounds(_get_default_store(), dist.get_rank(), members)
        goodbye = finalize(dist.group.WORLD, of_group[members].goodbye())
        Finalize(None, goodbye, exitpriority=0)  # processes of `multiprocessing` run no other functions at their end
    return of_group[members]


def rounds_of_thread() -> Rounds | None:
    """The rounds that this thread is `using`; None in the main thread."""
    return _of_thread.get()


def rounds_apart() -> Rounds | None:
    """Rounds of all ranks for a thread beside the main one, which may go on when the group is over; None as above.

    They have names of their own, so that both threads may be in rounds at the same time. One thread of each rank uses
    them at a time. All ranks must use them for the same things in the same order.
    """
    if rounds_of() is None:
        return None
    of_group, ranks = _made[dist.group.WORLD], tuple(range(dist.get_world_size()))
    if "apart" not in of_group:
        of_group["apart"] = Rounds(_get_default_store(), dist.get_rank(), ranks, name="apart")
        finalize(dist.group.WORLD, of_group["apart"].stop)
    return of_group["apart"]


@contextmanager
def using(rounds: Rounds | None) -> Iterator[None]:
    """In this block of this thread, `agreed` and all that builds on it use these rounds; None changes nothing."""
    token = _of_thread.set(rounds)
    try:
        yield
    finally:
        _of_thread.reset(token)
