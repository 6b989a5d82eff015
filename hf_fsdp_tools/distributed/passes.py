"""Forward passes of sharded models, counted, so that a rank that runs one alone is named and not waited for.

A forward pass gathers weights from all ranks of a shard group. Where some of them do not run it, the others wait inside
a collective, which knows nobody. So each rank counts its passes; one that has begun none for a few seconds tells the
number to the key-value store, and ranks that wait in a round compare it with their own.
"""

import hashlib
import json
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

_QUIET_S = 5.0
"""After the beginning of a pass, its number is told: most steps are over by then. (assumed)"""

_CURE = (
    "A sharded model gathers its weights from all ranks: call it, generate and evaluate on every rank, equally often"
)

_run: dict[str, int] = {}
"""Passes that this rank has begun, by group of ranks."""

_latest: dict[str, Any] = {"since": 0.0, "of": ""}
"""When the latest pass began, and of which class of model."""


def group_of(ranks: Sequence[int]) -> str:
    """The name of a group of ranks whose passes are counted, from now on."""
    name = hashlib.sha256(json.dumps(list(ranks)).encode()).hexdigest()[:16]
    _run.setdefault(name, 0)
    return name


def passes_run() -> bytes:
    """What this rank tells of its passes."""
    return json.dumps({"run": _run, "of": _latest["of"]}).encode()


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
def begin_pass(
    module: torch.nn.Module, args: object, *, group: str, gathers: Callable[[torch.nn.Module], bool]
) -> None:
    """Count a pass that gathers weights: a forward pre-hook of the root of a sharded model. Nothing is communicated."""
    if not gathers(module):
        return
    _run[group] += 1
    _latest.update(since=time.monotonic(), of=type(module).__name__)


def behind(told: bytes, teller: int, rank: int) -> str:
    """Why a rank that waits in a round waits for ever; empty if it may not."""
    said = json.loads(told)
    for group, number in said["run"].items():
        own = _run.get(group)
        if own is not None and own < number:
            return (
                f"rank {teller} waits in forward pass {number} of {said['of']} for rank {rank}, which has run {own}. "
                f"{_CURE}"
            )
    return ""


class PassWatch:
    """Tells the number of this rank's passes, and warns of ranks that do not come."""

    def __init__(self, prefix: str, rank: int, ranks: Sequence[int]) -> None:
        self._prefix, self._rank, self._ranks = prefix, rank, ranks
        self._told: dict[str, int] = {}
        self._next_look_s = 0.0

    def look(self, store: Any) -> None:
        """Do so if the latest pass began some time ago; to be called every few seconds."""
        quiet_s = time.monotonic() - _latest["since"]
        now = dict(_run)
        if quiet_s < _QUIET_S or not any(now.values()):
            return
        if now != self._told:
            store.set(f"{self._prefix}/passes/{self._rank}", passes_run())
            self._told, self._next_look_s = now, 2 * _QUIET_S
        if store.check([key := f"{self._prefix}/alone/{self._rank}"]):
            warnings.warn(f"{store.get(key).decode()}.", stacklevel=1)
            store.delete_key(key)
        if quiet_s > self._next_look_s:
            self._next_look_s = 2 * quiet_s
            if said := of_ended(store, self._prefix, self._ranks):
                warnings.warn(said, stacklevel=1)


def of_ended(store: Any, prefix: str, ranks: Sequence[int]) -> str:
    """A sentence on ranks that have ended without passes that this rank has begun; empty if none has."""
    for rank in ranks:
        if store.check([key := f"{prefix}/ended/{rank}"]):
            run = json.loads(store.get(key))["run"]
            for group, number in _run.items():
                if run.get(group, number) < number:
                    return (
                        f"rank {rank} has ended and run {run[group]} of the {number} forward passes of "
                        f"{_latest['of']} that this rank has begun. {_CURE}."
                    )
    return ""
