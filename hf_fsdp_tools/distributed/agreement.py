"""Let all ranks go on together, or stop together with the same error, so that none waits for another."""

import hashlib
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from os import PathLike
from pathlib import Path, PurePath
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hf_fsdp_tools import errors
from hf_fsdp_tools.distributed.cpu_backend import timeout_of
from hf_fsdp_tools.distributed.mesh import rank_on_node
from hf_fsdp_tools.distributed.rounds import StoppedElsewhere, patience_of_at_least, rounds_of, rounds_of_thread
from hf_fsdp_tools.distributed.storage import watched
from hf_fsdp_tools.errors import ConfigError, FSDPToolsError, RanksError
from hf_fsdp_tools.hub import local_path
from hf_fsdp_tools.text import listed, listed_lines

T = TypeVar("T")


def rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks; (0, 1) without a process group."""
    if (apart := rounds_of_thread()) is not None:  # the group may be over
        return apart.rank, len(apart.ranks)
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
def agreed(doing: str, where: str | PathLike[str] = "", *, ranks: Sequence[int] | None = None) -> Iterator[None]:
    """Run a block on every rank; if it fails on some rank, raise the same error on all ranks.

    Every rank must enter. Blocks may be nested, and a block may exchange values (`all_ranks`): the ranks that wait
    there for a rank that fails learn of it at once. A block must not run collectives of a process group, which would
    not learn of it. A rank whose own error is not of this package (a mistake in it, memory exhausted) raises that
    error; the other ranks raise a `CheckpointError` that says which rank it was.

    Args:
        doing: what the block does, for messages; the same on every rank: "reading the checkpoint".
        where: a path for messages, which may differ between ranks.
        ranks: the ranks that enter; None means all ranks of the default process group.

    Raises:
        FSDPToolsError: the block failed on some rank; of the kind that the first such rank raised, and with the same
            message on every rank.
        RanksError: a rank does not come, is lost, or is in another call.
    """
    rounds = rounds_of(ranks)
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
        except RanksError as error:  # the ranks have stopped together, and would wait here for one that is lost
            raise rounds.give_up(scope, error)  # noqa: B904  (as a rule it is this one)
        except Exception as error:
            failure = error
            rounds.fail(scope)
        try:
            told = rounds.exchange(_as_told(failure), doing, ends=scope)
        except RanksError as error:
            if failure is not None:
                error.add_note(f"Before, this rank failed: {failure!r}")
            raise
    if failure is not None and not isinstance(failure, FSDPToolsError):
        raise failure
    failed = {rank: one for rank, one in zip(rounds.ranks, told, strict=True) if one is not None}
    if not failed:
        return
    kind = getattr(errors, next(iter(failed.values()))[0])
    texts = list(dict.fromkeys(text for _, text in failed.values()))
    if len(failed) == len(told) and len(texts) == 1:
        assert failure is not None
        if type(failure) is kind:
            raise failure  # its traceback says where; a second error would say the same once more
        raise kind(texts[0]) from None
    lines = [f"rank {listed([str(r) for r in failed if failed[r][1] == text], 8)}: {text}" for text in texts]
    what = f"{doing[:1].upper()}{doing[1:]}{f' ({str(where)!r})' if where else ''}"
    raise kind(f"{what} failed on {len(failed)} of {len(told)} ranks.\n{listed_lines(lines, head='')}") from failure


@contextmanager
def announced(doing: str) -> Iterator[None]:
    """Run a block that may run collectives on every rank; a rank that fails says so and waits for nobody.

    Ranks that wait in a round within the block, or come to one or to its end, stop at once. A rank that waits in a
    collective stops when the process that failed ends, or by the group's timeout. Every rank must enter.
    """
    rounds = rounds_of()
    if rounds is None:
        yield
        return
    with rounds.scope(doing) as scope:
        try:
            yield
        except StoppedElsewhere as stop:
            if stop.scope is not scope:
                raise
        except RanksError as error:
            raise rounds.give_up(scope, error)  # noqa: B904  (as a rule it is this one)
        except Exception as error:
            rounds.fail(scope)
            rounds.give_up(scope, RanksError(f"While {doing}: rank {rounds.rank} failed: {error!r}. All ranks stop."))
            raise
        rounds.exchange(None, doing, ends=scope)


def wait_for_all_ranks() -> None:
    """Return once every rank has called this. A rank that has ended is named within seconds.

    No backend is used. How long a rank may do something of its own before it comes: see `patience`.
    """
    rounds = rounds_of()
    if rounds is not None:
        rounds.exchange(None, "waiting for every rank")
        rounds.wait_for_readers()  # a script may end here


@contextmanager
def going_first(is_first: bool) -> Iterator[None]:
    """Run a block on some ranks before the others; if it fails on one of the first, the others do not run it.

    Every rank must enter. The first ranks may make no progress for as long as a collective would wait (`timeout_of`),
    or `patience` says if that is longer; bytes that they read and write are progress.
    """
    if rounds_of() is None:
        yield
        return
    with patience_of_at_least(timeout_of().total_seconds()), agreed("waiting for the ranks that go first"):
        if is_first:
            yield
    if not is_first:
        yield


def _as_told(failure: Exception | None) -> tuple[str, str] | None:
    """The name of the error that the other ranks raise, and its text."""
    if failure is None:
        return None
    if isinstance(failure, FSDPToolsError):
        return type(failure).__name__, str(failure)
    return "CheckpointError", repr(failure)


def same_on_all_ranks(doing: str, *, ranks: Sequence[int] | None = None, **arguments: Any) -> None:
    """Refuse ranks that give one call different arguments, with which they would run unequal collectives.

    Arguments are compared by value: policies, configs and other dataclasses by their fields, classes and functions by
    their names, a plan by its digest, a mesh by its ranks; of other objects, the class.

    Args:
        doing: what the ranks do, for messages; the same on every rank: "loading the model".
        ranks: the ranks that call; None means all ranks of the default process group.
        arguments: by their names. Leave out what may differ between ranks: paths, tokens, devices with an index.

    Every rank must call. The ranks exchange one digest of 64 bytes, and the arguments only where the digests differ.

    Raises:
        ConfigError: some differ; each is named with the values that ranks gave. The same on every rank.
    """
    rounds = rounds_of(ranks)
    if rounds is None:
        return
    given = {name: _as_data(value) for name, value in arguments.items()}
    digest = hashlib.sha256(json.dumps(given, sort_keys=True).encode()).hexdigest()
    if len(set(rounds.exchange(digest, doing))) == 1:
        return
    every = [dict(_leaves(one)) for one in rounds.exchange(given, doing)]
    found = {name: [one.get(name, "not given") for one in every] for name in sorted(set().union(*every))}
    differing = [f"{name} is {by_rank(told, rounds.ranks)}" for name, told in found.items() if len(set(told)) > 1]
    raise ConfigError(
        f"While {doing}, the ranks give different arguments: {listed(differing, separator='; ')}. Give the same on "
        "every rank."
    )


def by_rank(told: Sequence[str], ranks: Sequence[int] | None = None) -> str:
    """Which ranks told what, for messages: "a on rank 0, b on rank 1, 2"."""
    ranks = range(len(told)) if ranks is None else ranks
    which = {text: [rank for rank, one in zip(ranks, told, strict=True) if one == text] for text in told}
    return listed(f"{text[:80]}{'…' * (len(text) > 80)} on rank {listed(found)}" for text, found in which.items())


def _as_data(value: Any) -> Any:
    """A value as data for JSON that is equal where the value means the same, without addresses in memory."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (torch.dtype, PurePath, Enum)):
        return str(value)
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_as_data(one), sort_keys=True) for one in value)
    if isinstance(value, (list, tuple)):
        return [_as_data(one) for one in value]
    if isinstance(value, Mapping):
        return {str(name): _as_data(one) for name, one in value.items()}
    if isinstance(value, partial):
        return [_as_data(value.func), _as_data(value.args), _as_data(value.keywords)]
    if isinstance(value, DeviceMesh):
        return [value.device_type, list(value.mesh_dim_names or ()), value.mesh.tolist()]
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(digest := getattr(value, "digest", None), str):
        return {"kind": kind, "digest": digest[:16]}
    if is_dataclass(value):
        return {"kind": kind} | {field.name: _as_data(getattr(value, field.name, None)) for field in fields(value)}
    if callable(getattr(value, "to_dict", None)):
        return {"kind": kind, **_as_data(value.to_dict())}
    return kind


def _leaves(data: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The values within mappings, each by its path."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from _leaves(value, f"{name}.{key}" if name else key)
    else:
        yield name, json.dumps(data)


def opened(
    doing: str,
    name_or_path: str | PathLike[str],
    open_it: Callable[[dict[str, Any]], T],
    hub_kwargs: Mapping[str, Any],
) -> T:
    """The result of `open_it(hub_kwargs)`, which opens a checkpoint, on every rank.

    All ranks open a local path at once. A hub name is opened by the first rank of each node, and then by the other
    ranks with `local_files_only`, so that a job asks the hub once per node and waits only once for a hub that fails.

    Every rank must call.
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
