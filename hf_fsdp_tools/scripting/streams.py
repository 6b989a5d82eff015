"""A stream of text, divided among the ranks."""

from typing import Any

from hf_fsdp_tools.distributed.agreement import agreed, rank_and_size
from hf_fsdp_tools.errors import ConfigError

__all__ = ["share_of_stream"]


def share_of_stream(stream: Any, *, held_out: Any = None, text: str = "text") -> Any:
    """This rank's rows of a stream, again and again: no rank has a row of another, and none ends before the others.

    Where the stream's files divide evenly among the ranks, a rank reads files of its own; otherwise it reads all of
    them and keeps every n-th row. A stream without end needs a number of steps (`--max_steps`).

    Args:
        stream: a `datasets.IterableDataset`, the same on every rank.
        held_out: rows of which no text is to be in the result, wherever it stands in the stream.
        text: the column of the text.

    Every rank must call. The ranks exchange errors alone.

    Raises:
        ConfigError: a rank would have no row; on all ranks alike.

    Example:
        >>> from datasets import load_dataset
        >>> stream = load_dataset("json", data_files="rows.jsonl", split="train", streaming=True)
        >>> rows = share_of_stream(stream, held_out=stream.take(2))
        >>> next(iter(rows))
        {'text': 'words of row 2'}
    """
    rank, ranks = rank_and_size()
    kept_back = frozenset(row[text] for row in held_out or ())
    if stream.num_shards % ranks == 0:
        own = stream.shard(num_shards=ranks, index=rank)
    else:
        own = stream.filter(_is_of_rank, with_indices=True, fn_kwargs={"rank": rank, "ranks": ranks})
    if kept_back:
        own = own.filter(_is_new, fn_kwargs={"kept_back": kept_back, "text": text})
    with agreed("dividing the stream among the ranks"):
        if next(iter(own), None) is None:
            raise ConfigError(
                f"--dataset_streaming: rank {rank} of {ranks} has no row to train on. Give more rows, or use fewer "
                "processes."
            )
    return own.repeat(None)


def _is_of_rank(row: Any, index: int, rank: int, ranks: int) -> bool:
    return index % ranks == rank


def _is_new(row: Any, kept_back: frozenset[str], text: str) -> bool:
    return row[text] not in kept_back
