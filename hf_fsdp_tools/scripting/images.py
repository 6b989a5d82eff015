"""Batches of rows with images, the same parts of a model for all ranks."""

from collections.abc import Mapping
from itertools import islice
from typing import Any

_LOOKED_AT = 10_000
"""Rows among which one with an image is looked for. (assumed)"""


def images_in_each_batch(trainer: Any, data: Any) -> None:
    """Let every batch of a trainer have an image, so that the ranks gather the same units in each forward pass.

    A model runs its vision tower where there are images. FSDP gathers the tower's shards from all ranks then, so that a
    rank whose batch is text alone would answer with those of another unit: the run hangs, aborts or goes on with wrong
    weights. Such a batch gets one more row with an image, of which no token counts in the loss.

    Args:
        trainer: whose `data_collator` makes the batches; it is replaced.
        data: rows with `images` or `image`, of which the first that has one is added. Where none has, nothing is done.

    Nothing is communicated; every rank must call.

    Example:
        >>> class MyTrainer:  # any with a collator
        ...     data_collator = staticmethod(lambda rows: {"labels": [1] * len(rows)})
        >>> trainer = MyTrainer()
        >>> images_in_each_batch(trainer, [{"images": ["picture.png"]}])
        >>> trainer.data_collator([{"images": []}])["labels"]
        [1, -100]
    """
    row = next((row for row in islice(iter(data), _LOOKED_AT) if _has_image(row)), None)
    collate = trainer.data_collator

    def collate_with_image(rows: list[dict[str, Any]]) -> Any:
        if any(map(_has_image, rows)):
            return collate(rows)
        batch = collate([*rows, dict(row or {})])
        batch["labels"][-1] = -100
        return batch

    if row is not None:
        trainer.data_collator = collate_with_image


def _has_image(row: Mapping[str, Any]) -> bool:
    return bool(row.get("images")) or row.get("image") is not None
