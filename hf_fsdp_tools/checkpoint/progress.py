"""A bar with bytes and bytes per second while a checkpoint is read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from huggingface_hub.utils import are_progress_bars_disabled  # type: ignore[attr-defined]  # public, but not re-exported
from tqdm.auto import tqdm  # type: ignore[import-untyped]  # has no stubs
from transformers.utils.logging import is_progress_bar_enabled

__all__ = ["loading_bar"]

_DELAY_S = 1.0  # what is over sooner needs no bar (assumed)


@contextmanager
def loading_bar(
    num_bytes: int, *, rank: int, world_size: int, progress: bool | None
) -> Iterator[Callable[[int], object]]:
    """A bar on rank 0 over that rank's own bytes; the ranks read at the same time, so it is as far as all of them.

    Args:
        num_bytes: What this rank will read.
        rank: This rank.
        world_size: Number of ranks, for the text.
        progress: None shows the bar on a terminal where transformers' and the hub's bars are on, True anywhere, False
            nowhere. Either way it appears after a second.

    Yields:
        A function that takes the number of bytes read since its last call. Not for several threads at once.
    """
    unwanted = progress is False or rank != 0
    switched_off = not is_progress_bar_enabled() or are_progress_bars_disabled()
    disable = True if unwanted or (progress is None and switched_off) else (None if progress is None else False)
    text = "Loading weights" if world_size == 1 else f"Loading weights (rank 0 of {world_size})"
    with tqdm(total=num_bytes, desc=text, unit="B", unit_scale=True, delay=_DELAY_S, disable=disable) as bar:
        yield bar.update
