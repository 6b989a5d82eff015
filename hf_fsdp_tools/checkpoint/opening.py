"""Opening a checkpoint on all ranks: of each node one rank asks the hub, and the others find what that one fetched."""

from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.mesh import rank_on_node

from .agreement import agreed, all_ranks, rank_and_size
from .stall import patiently

__all__ = ["opened", "refuse_other_commits"]

T = TypeVar("T")


def opened(
    doing: str,
    name_or_path: str | PathLike[str],
    open_it: Callable[[dict[str, Any]], T],
    hub_kwargs: Mapping[str, Any],
) -> T:
    """The result of `open_it(hub_kwargs)`, which fetches what `name_or_path` names, on every rank.

    A local path is opened by all ranks at once. A hub name is opened by the first rank of each node, and then by the others
    with `local_files_only`: a job asks the hub once per node, and a hub that fails makes nobody wait twice.

    Args:
        doing: As for `agreed`.
        name_or_path: Hub name or local path.
        open_it: Must not communicate.
        hub_kwargs: For it.

    Every rank must call.

    Raises:
        CheckpointError: It failed on some rank; the same on every rank.
    """
    result: list[T] = []
    path = Path(name_or_path).expanduser()
    with agreed(doing):
        is_first = patiently(path.exists, file=path) or rank_and_size()[1] == 1 or rank_on_node()[0] == 0
        if is_first:
            result.append(open_it(dict(hub_kwargs)))
    with agreed(doing):
        if not is_first:
            result.append(open_it({**hub_kwargs, "local_files_only": True}))
    return result[0]


def refuse_other_commits(name_or_path: str | PathLike[str], commit: str | None) -> None:
    """Stop where nodes got different commits of one name: it was pushed to meanwhile, or one of them has only an older one.

    Every rank must call.

    Raises:
        CheckpointError: On every rank.
    """
    commits = all_ranks(commit)
    if len(set(commits)) > 1:
        found = ", ".join(f"{c or 'a local folder'} on rank {commits.index(c)}" for c in dict.fromkeys(commits))
        raise CheckpointError(
            f"{str(name_or_path)!r} is not the same on all nodes: {found}. Give one commit as revision, or download it first "
            "and give the folder."
        )
