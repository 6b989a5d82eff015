"""A stream of rows, divided among the ranks."""

import json
import random
from collections.abc import Collection, Mapping
from typing import Any

from hf_fsdp_tools.distributed.agreement import agreed, rank_and_size
from hf_fsdp_tools.distributed.mesh import ranks_per_row
from hf_fsdp_tools.errors import ConfigError

_WINDOW = 1_000
"""Rows among which a stream is shuffled: as many as datasets keeps in a buffer, which a resumed run would lose."""


def share_of_stream(
    stream: Any, *, held_out: Any = None, columns: Collection[str] = ("text",), seed: int | None = None
) -> Any:
    """This rank's rows of a stream, again and again: none has a row of another that it does not share (`cp_size`), and
    none ends before the others.

    Where the stream's files divide evenly among the ranks, a rank reads files of its own; otherwise it reads all of
    them and keeps every n-th row. (`split_dataset_by_node` of datasets divides what the trainer makes of the rows: each
    rank would tokenize all of them.) Rows whose values in `columns` are those of a held-out row are left out.
    With a seed, each thousand rows come in an order of their own, the same each time.

    Every rank must call. The ranks exchange errors alone.
    """
    rank, ranks = (number // ranks_per_row() for number in rank_and_size())  # who shares rows has neighbouring numbers
    kept_back = frozenset(_content(row, columns) for row in held_out or ())
    if stream.num_shards % ranks == 0:
        own = stream.shard(num_shards=ranks, index=rank)
    else:
        own = stream.filter(_is_of_rank, with_indices=True, fn_kwargs={"rank": rank, "ranks": ranks})
    if kept_back:
        own = own.filter(_is_new, fn_kwargs={"kept_back": kept_back, "columns": columns})
    with agreed("dividing the stream among the ranks"):
        if next(iter(own), None) is None:
            kept = f": {len(kept_back):,} different rows are held out to evaluate" if kept_back else ""
            raise ConfigError(
                f"--dataset_streaming: rank {rank} of {ranks} has no row to train on{kept}. Give more rows, or use "
                "fewer processes" + (", or --eval_strategy no." if kept else ".")
            )
    if seed is not None:
        options = {"batched": True, "batch_size": _WINDOW, "with_indices": True, "features": own.features}
        own = own.map(_shuffled, fn_kwargs={"seed": seed}, **options)
    return own.repeat(None)


def _shuffled(rows: Mapping[str, Any], indices: Any, seed: int) -> dict[str, Any]:
    order = random.Random(f"{seed} {indices[0]}").sample(range(len(indices)), len(indices))
    return {name: [values[i] for i in order] for name, values in rows.items()}


def _is_of_rank(row: Any, index: int, rank: int, ranks: int) -> bool:
    return index % ranks == rank


def _is_new(row: Any, kept_back: frozenset[str], columns: Collection[str]) -> bool:
    return _content(row, columns) not in kept_back


def _content(row: Mapping[str, Any], columns: Collection[str]) -> str:
    """The values of a row in these columns as one text, equal for equal values."""
    return json.dumps([_without_none(row.get(name)) for name in sorted(columns)], sort_keys=True, default=repr)


def _without_none(value: Any) -> Any:
    """The value without keys that Arrow added, for they stand in other rows."""
    if isinstance(value, Mapping):
        return {name: _without_none(part) for name, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list) else value
