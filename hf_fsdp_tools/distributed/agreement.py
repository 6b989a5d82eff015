"""Let all ranks go on together, or stop together with the same error, so that none waits for another."""

import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import partial
from os import PathLike
from pathlib import Path, PurePath
from socket import gethostname
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hf_fsdp_tools import errors
from hf_fsdp_tools.accelerator import available_bytes
from hf_fsdp_tools.distributed.liveness import processes_in_sight
from hf_fsdp_tools.distributed.mesh import rank_on_node
from hf_fsdp_tools.distributed.rounds import StoppedElsewhere, patience_for_collectives, rounds_of, rounds_of_thread
from hf_fsdp_tools.distributed.storage import watched
from hf_fsdp_tools.errors import ConfigError, FSDPToolsError, RanksError
from hf_fsdp_tools.hub import local_path
from hf_fsdp_tools.stores import told
from hf_fsdp_tools.text import grouped, listed, listed_lines, show_bytes

T = TypeVar("T")

_FILLED = 0.9
"""Share of the host memory available that may be taken: data that waits to be written to the disk takes some, too.
(assumed)"""


def rank_and_size() -> tuple[int, int]:
    """This process's rank and the number of ranks; (0, 1) without a process group."""
    if (apart := rounds_of_thread.get()) is not None:  # the group may be over
        return apart.rank, len(apart.ranks)
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def all_ranks(value: T, doing: str = "exchanging values", *, ranks: Sequence[int] | None = None) -> list[T]:
    """Every rank's value, in rank order, through the store of the process group; only this rank's where there is nobody
    else to ask (see `rounds_of`). The value travels as JSON (`rounds._as_json`): keep it small.

    All of `ranks` must call, by default every rank: a `RanksError` names one that does not come, is lost, or is `doing`
    something else.
    """
    rounds = rounds_of(ranks)
    return [value] if rounds is None else rounds.exchange(value, doing)


def shared_rng_state() -> torch.Tensor:
    """The state of rank 0's default generator on the CPU; this rank's own under the "fake" backend. Nothing is drawn.

    Every rank must call.
    """
    is_first = rounds_of() is None or rank_and_size()[0] == 0
    shared = all_ranks(torch.get_rng_state().tolist() if is_first else [], "sharing the random state")[0]
    return torch.tensor(shared, dtype=torch.uint8)


def own_seed(seed: int | None) -> int:
    """`seed`, or one that follows from the state of this rank's default generator, and so from `torch.manual_seed` and
    `set_seed`. Nothing is drawn, and no rank communicates: take that of rank 0."""
    return zlib.crc32(torch.get_rng_state().numpy().tobytes()) if seed is None else seed


@contextmanager
def agreed(doing: str, where: str | PathLike[str] = "", *, ranks: Sequence[int] | None = None) -> Iterator[None]:
    """Run a block on every rank; if it fails on some rank, raise the same error on all ranks, of the first such rank's
    kind.

    All of `ranks` must enter, by default every rank. Blocks may be nested, and a block may exchange values
    (`all_ranks`): the ranks that wait there for a rank that fails learn of it at once. A block must not run collectives
    of a process group, which would not learn of it. A rank whose own error is not of this package (a mistake in it,
    memory exhausted) raises that error; the other ranks raise a `CheckpointError` that says which rank it was.

    What the block is `doing`, for messages, is the same on every rank; the path `where` it does so may differ.
    """
    steps = _steps.get()
    if steps is None:
        with _agreed_at_end(doing, where, ranks):
            yield
        return
    try:
        yield
    except Exception:
        steps.failed = steps.failed or _sentence(doing, where)
        raise


def agreed_steps(doing: str, *, ranks: Sequence[int] | None = None) -> AbstractContextManager[None]:
    """`agreed`, for a block of steps that need nothing of each other on other ranks: one round, where it ends.

    An `agreed` block within it is one of the steps; what the ranks compare (`compare_at_end`) travels with the errors.
    """
    return agreed(doing) if _steps.get() is not None else _agreed_at_end(doing, "", ranks, _Steps(ranks))


@dataclass(eq=False)
class _Steps:
    """The steps of a block with one round at its end, for some ranks or all."""

    ranks: Sequence[int] | None

    compared: list[tuple[Any, Callable[[list[Any]], object]]] = field(default_factory=list)
    """This rank's values to exchange at its end, each with the check of all values."""

    failed: str = ""
    """The step in which this rank failed, for messages."""


_steps: ContextVar[_Steps | None] = ContextVar("_steps", default=None)


@contextmanager
def _within(steps: _Steps | None) -> Iterator[None]:
    token = _steps.set(steps)
    try:
        yield
    finally:
        _steps.reset(token)


def _sentence(doing: str, where: str | PathLike[str]) -> str:
    return f"{doing[:1].upper()}{doing[1:]}{f' ({told(str(where))!r})' if where else ''}"


@contextmanager
def _agreed_at_end(
    doing: str,
    where: str | PathLike[str] = "",
    ranks: Sequence[int] | None = None,
    steps: _Steps | None = None,
    *,
    waits: bool = True,
) -> Iterator[None]:
    """`agreed` with a round at its end, also within a block of steps; a rank that fails `waits` there for the others,
    or raises at once."""
    rounds = rounds_of(ranks)
    if rounds is None:
        with _within(None):
            yield
        return
    failure: Exception | None = None
    with rounds.scope(doing) as scope:
        try:
            with _within(steps):
                yield
        except StoppedElsewhere as stop:
            if stop.scope is not scope:
                raise
        except RanksError as error:  # the ranks have stopped together, and would wait here for one that is lost
            raise rounds.give_up(scope, error)  # noqa: B904  (as a rule it is this one)
        except Exception as error:
            failure = error
            rounds.fail(scope)
            if not waits:
                text = f"While {doing}: rank {rounds.rank} failed: {error!r}. All ranks stop."
                rounds.give_up(scope, RanksError(text))
                raise
        problem = None  # the name of the error that the other ranks raise, its text, and the step that failed
        if failure is not None:
            is_own = isinstance(failure, FSDPToolsError)
            kinds = [kind.__name__ for kind in type(failure).__mro__ if hasattr(errors, kind.__name__)]  # nearest first
            said = (kinds[0], told(str(failure))) if is_own else ("CheckpointError", repr(failure))
            problem = (*said, (steps and steps.failed) or _sentence(doing, where))
        compared = steps.compared if steps else []
        try:
            answers = rounds.exchange((problem, [value for value, _ in compared]), doing, ends=scope)
        except RanksError as error:
            if failure is not None:
                error.add_note(f"Before, this rank failed: {failure!r}")
            raise
    with _within(None):  # first what differs, of all that every rank came to: it explains why some failed later
        for (_, check), *values in zip(compared, *(values for _, values in answers), strict=False):
            check(values)
    failed = {rank: problem for rank, (problem, _) in zip(rounds.ranks, answers, strict=True) if problem}
    _raise_failures(failure, failed, len(answers))


def _raise_failures(failure: Exception | None, failed: dict[int, tuple[str, str, str]], size: int) -> None:
    """Raise the error in which some ranks failed, the same on every rank; nothing where none failed."""
    if failure is not None and not isinstance(failure, FSDPToolsError):
        raise failure
    if not failed:
        return
    name, _, step = next(iter(failed.values()))
    texts = list(dict.fromkeys(text for _, text, _ in failed.values()))
    if failure is not None and len(failed) == size and len({problem[:2] for problem in failed.values()}) == 1:
        raise failure  # its traceback says where; a second error would say the same once more
    lines = [f"rank {listed([str(r) for r in failed if failed[r][1] == text], 8)}: {text}" for text in texts]
    text = f"{step} failed on {len(failed)} of {size} ranks.\n{listed_lines(lines, head='')}"
    raise getattr(errors, name)(text) from failure


def compare_at_end(
    value: Any,
    check: Callable[[list[Any]], object],
    doing: str = "comparing the ranks",
    *,
    ranks: Sequence[int] | None = None,
) -> None:
    """Give `check` every rank's value, in rank order: in `agreed_steps` where that ends, otherwise at once.

    The check must do the same on every rank, where it may raise or exchange more. Every rank must call.
    """
    if (steps := _steps.get()) is not None:
        steps.compared.append((value, check))
    else:
        check(all_ranks(value, doing, ranks=ranks))


def announced(doing: str) -> AbstractContextManager[None]:
    """Run a block that may run collectives on every rank; a rank that fails says so and waits for nobody.

    Every rank must enter. Others stop where they are in a round or come to one, or to the block's end; a rank that
    waits in a collective stops when the process that failed ends, or by the group's timeout.
    """
    return _agreed_at_end(doing, waits=False)


def refuse_too_large(
    num_bytes: int, kind: type[FSDPToolsError], what: str, cure: str, *, ranks: Sequence[int] | None = None
) -> None:
    """Refuse what the host memory of some machine, or container, does not hold. All of `ranks` must call."""
    own = (processes_in_sight() or gethostname(), gethostname(), num_bytes, available_bytes())
    every = all_ranks(own, "comparing host memory", ranks=ranks)
    for machine, host in dict.fromkeys((machine, host) for machine, host, *_ in every):
        sizes = [(wanted, left) for other, _, wanted, left in every if other == machine]
        needed, available = sum(wanted for wanted, _ in sizes), min(left for _, left in sizes)
        if needed > _FILLED * available:
            raise kind(
                f"{what}: {show_bytes(needed)} of host memory for the {len(sizes)} ranks on {host}, where "
                f"{show_bytes(available)} are available. {cure}"
            )


def wait_for_all_ranks() -> None:
    """Return once every rank has called this, on rank 0 last, without a backend. A rank that has ended is named."""
    all_ranks(None, "waiting for every rank")
    if (rounds := rounds_of()) is not None:
        rounds.wait_for_readers()


@contextmanager
def going_first(is_first: bool) -> Iterator[None]:
    """Run a block on some ranks before the others; if it fails on one of the first, the others do not run it.

    Every rank must enter. The first ranks may make no progress for as long as a collective would wait (`rank_timeout`).
    """
    with patience_for_collectives(), _agreed_at_end("waiting for the ranks that go first"):
        if is_first:
            yield
    if not is_first:
        yield


def same_on_all_ranks(doing: str, *, ranks: Sequence[int] | None = None, **arguments: Any) -> None:
    """Refuse ranks that give one call different arguments, with which they would run unequal collectives.

    Arguments are compared by value: policies, configs and other dataclasses by their fields, classes and functions by
    their names, a plan by its digest, a mesh by its ranks; of other objects, the class. Leave out what may differ
    between ranks: paths, tokens. Every rank of `ranks` must call, by default all; as `compare_at_end`.
    """
    steps = _steps.get()
    ranks = ranks if steps is None else steps.ranks

    def check(answers: list[dict[str, str]]) -> None:
        for name in sorted(set().union(*answers)):
            texts = [answer.get(name, "not given") for answer in answers]
            if len(set(texts)) > 1:
                raise ConfigError(
                    f"While {doing}, the ranks give different arguments: {name} is {by_rank(texts, ranks)}. Give the "
                    "same on every rank."
                )

    data = json.loads(json.dumps(arguments, default=_as_data, skipkeys=True))
    compare_at_end(dict(_leaves(data)), check, doing, ranks=ranks)


def by_rank(texts: Sequence[str], ranks: Sequence[int] | None = None) -> str:
    """Texts with the ranks that have them, for messages: "a on rank 0, b on rank 1, 2"."""
    ranks_of = grouped(zip(texts, range(len(texts)) if ranks is None else ranks, strict=True))
    return listed(f"{text[:80]}{'…' * (len(text) > 80)} on rank {listed(some)}" for text, some in ranks_of.items())


def _as_data(value: Any) -> Any:
    """A value that JSON does not know as data that is equal where the value means the same, without addresses."""
    if isinstance(value, (torch.dtype, PurePath, Enum)):
        return str(value)
    if isinstance(value, torch.device):
        return value.type
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(one, default=_as_data, sort_keys=True) for one in value)
    if isinstance(value, Mapping):
        return {str(name): one for name, one in value.items()}
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, DeviceMesh):
        return [value.device_type, list(value.mesh_dim_names or ()), value.mesh.tolist()]
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    kind = {"kind": f"{type(value).__module__}.{type(value).__qualname__}"}
    if isinstance(digest := getattr(value, "digest", None), str):
        return kind | {"digest": digest[:16]}
    if is_dataclass(value):
        return kind | {field.name: getattr(value, field.name, None) for field in fields(value)}
    return kind | value.to_dict() if callable(getattr(value, "to_dict", None)) else kind


def _leaves(data: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The values within mappings, each by its path."""
    if isinstance(data, Mapping):
        for key, value in data.items():
            yield from _leaves(value, f"{name}.{key}" if name else key)
    else:
        yield name, json.dumps(data)


def opened(
    doing: str,
    name_or_path: str | PathLike[str] | Callable[[], Iterable[str | PathLike[str]]],
    open_it: Callable[[dict[str, Any]], T],
    hub_kwargs: Mapping[str, Any],
) -> T:
    """The result of `open_it(hub_kwargs)`, which opens a checkpoint, on every rank. Every rank must call.

    All ranks open a local path at once; a function gives several, of which none may be on the hub. A hub name is opened
    by the first rank of each node, and then by the other ranks with `local_files_only`, so that a job asks the hub once
    per node and waits only once for a hub that fails.
    """
    result: list[T] = []
    with agreed(doing):
        with _agreed_at_end(doing):
            names = name_or_path() if callable(name_or_path) else [name_or_path]
            is_first = rank_and_size()[1] == 1 or rank_on_node()[0] == 0 or all(map(_is_local, names))
            if is_first:
                result.append(open_it(dict(hub_kwargs)))
        if not is_first:
            result.append(open_it({**hub_kwargs, "local_files_only": True}))
    return result[0]


def _is_local(name: str | PathLike[str]) -> bool:
    with watched(Path(name)):
        return local_path(name) is not None
