"""A stream of rows, divided among the ranks, and the trainer that takes it so."""

import json
from collections.abc import Collection, Mapping
from typing import Any

from hf_fsdp_tools.distributed.agreement import agreed, rank_and_size
from hf_fsdp_tools.errors import ConfigError


class StreamMixin:
    """Gives a Trainer a data loader that leaves a stream as it is: `load_splits` has divided it among the ranks.

    Accelerate would divide it once more, by files, of which one rank may have more than another. A data set that is no
    stream is loaded as without the mixin. Nothing is communicated.

    Example:
        >>> class MyTrainer(StreamMixin, FSDPTrainerMixin, SFTTrainer):
        ...     "TRL's trainer on this rank's share of a stream."
    """

    def get_train_dataloader(self) -> Any:
        """Batches of this rank's rows, each at most `per_device_train_batch_size` of them."""
        from datasets import Dataset
        from torch.utils.data import DataLoader

        trainer: Any = self
        if isinstance(trainer.train_dataset, Dataset):
            return super().get_train_dataloader()  # type: ignore[misc]  # of the Trainer
        args = trainer.args
        return DataLoader(
            trainer.train_dataset,
            args.train_batch_size,
            collate_fn=trainer.data_collator,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
        )


def check_divided_once(trainer: Any) -> None:
    """Refuse a Trainer that would divide a rank's share of a stream among the ranks once more."""
    from datasets import IterableDataset

    if isinstance(trainer.train_dataset, IterableDataset) and not isinstance(trainer, StreamMixin):
        name = type(trainer).__name__
        raise ConfigError(
            f"{name} would divide the stream among the ranks, and load_splits has made it this rank's share. Put "
            f"StreamMixin first: class {name}(StreamMixin, FSDPTrainerMixin, …)."
        )


def share_of_stream(stream: Any, *, held_out: Any = None, columns: Collection[str] = ("text",)) -> Any:
    """This rank's rows of a stream, again and again: no rank has a row of another, and none ends before the others.

    Where the stream's files divide evenly among the ranks, a rank reads files of its own; otherwise it reads all of
    them and keeps every n-th row. A stream without end needs a number of steps (`--max_steps`).

    Args:
        stream: a `datasets.IterableDataset`, the same on every rank.
        held_out: rows that are not to be in the result, wherever they stand in the stream.
        columns: what a row of `held_out` is known by: text or the turns of a chat; those that rows lack do not count.

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
    kept_back = frozenset(_known_by(row, columns) for row in held_out or ())
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
    return own.repeat(None)


def _is_of_rank(row: Any, index: int, rank: int, ranks: int) -> bool:
    return index % ranks == rank


def _is_new(row: Any, kept_back: frozenset[str], columns: Collection[str]) -> bool:
    return _known_by(row, columns) not in kept_back


def _known_by(row: Mapping[str, Any], columns: Collection[str]) -> str:
    """What two rows with the same values in these columns have in common."""
    return json.dumps([_without_none(row.get(name)) for name in sorted(columns)], sort_keys=True, default=repr)


def _without_none(value: Any) -> Any:
    """The value without keys that Arrow added, for they stand in other rows."""
    if isinstance(value, Mapping):
        return {name: _without_none(part) for name, part in value.items() if part is not None}
    return [_without_none(part) for part in value] if isinstance(value, list) else value
