"""The report of a load, as a value that can be printed and stored; and the progress bar of loading."""

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from logging import LoggerAdapter
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import are_progress_bars_disabled  # type: ignore[attr-defined]  # public, but not re-exported
from torch import nn
from tqdm.auto import tqdm  # type: ignore[import-untyped]  # has no stubs
from transformers.utils import logging
from transformers.utils.loading_report import LoadStateDictInfo, log_state_dict_report
from transformers.utils.logging import is_progress_bar_enabled

from hf_fsdp_tools.text import listed, show_bytes, table


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What one rank read, and which keys did not match. `str()` gives a short table.

    Example:
        >>> model, report = from_pretrained("checkpoint", output_loading_info=True, load_kwargs={"progress": False})
        >>> isinstance(report, LoadReport), report.missing_keys, report.mismatched_keys
        (True, (), ())
    """

    checkpoint: str
    """The folder, file or hub name that was opened."""
    rank: int
    """The rank that this report is about."""
    dtypes: tuple[str, ...]
    """Dtypes of the model's floating-point parameters, most elements first."""
    missing_keys: tuple[str, ...]
    """Keys of the model that the checkpoint lacks, without those that the model's class says not to report."""
    unexpected_keys: tuple[str, ...]
    """Keys of the checkpoint that the model has no place for, with the same exception."""
    mismatched_keys: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    """(key, shape in the checkpoint, shape in the model) where they differ; only with `ignore_mismatched_sizes`."""
    resized_keys: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    """(key, shape in the checkpoint, shape in the model) of tensors loaded token by token for another vocabulary."""
    initialized_keys: tuple[str, ...]
    """Keys that the model initialised itself: missing and mismatched ones."""
    bytes_read: int
    """Bytes of tensor data that this rank read; gaps between wanted bytes that were read through count."""
    share_bytes: int
    """Bytes of this rank's shards of the loaded tensors, in the stored dtypes: the least that must be read."""
    converted_bytes: int
    """The part of `bytes_read` that was read as whole tensors, because their conversion does more than move data."""
    read_calls: int
    """System calls that read data."""
    staging_bytes: int
    """Bytes of staging buffers, pinned where shards are on an accelerator."""
    peak_host_bytes: int
    """Bytes by which the process's resident memory rose above the shards (see `MemoryWatch`).

    On an accelerator, what the driver maps into the process meanwhile is in it (hundreds of MB of context and kernels);
    `staging_bytes` is exact there."""
    carried_keys: tuple[str, ...] = ()
    """Stored keys of heads that the model's class ignores, and that saves copy (`carry_heads`)."""
    carried_bytes: int = 0
    """Bytes of these as they are stored."""
    dequantized_from: str | None = None
    """The quantisation of the checkpoint whose weights were dequantised; None of a plain checkpoint."""
    quantized_bytes: int = 0
    """Bytes of the quantised weights of the whole checkpoint as they are stored, scales included."""
    dequantized_bytes: int = 0
    """Bytes of the same weights in the model's dtype."""
    seconds: dict[str, float]
    """Time per stage on this rank: plan, read, initialize."""

    @property
    def read_ratio(self) -> float:
        """`bytes_read` over `share_bytes`; 1.0 is the least possible."""
        return self.bytes_read / self.share_bytes if self.share_bytes else 1.0

    def loading_info(self) -> dict[str, Any]:
        """This report as the dictionary that transformers returns for `output_loading_info=True`."""
        return {
            "missing_keys": set(self.missing_keys),
            "unexpected_keys": set(self.unexpected_keys),
            "mismatched_keys": set(self.mismatched_keys),
            "error_msgs": [],
        }

    def to_json(self) -> str:
        """All fields as one JSON object."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        seconds = self.seconds.get("read", 0.0)
        speed = f", {self.bytes_read / seconds / 1e9:.2f} GB/s" if seconds > 0 and self.bytes_read > 1e6 else ""
        rows = {
            "checkpoint": self.checkpoint,
            "weights": ", ".join(self.dtypes),
            f"rank {self.rank} read": f"{show_bytes(self.bytes_read)} in {seconds:.2f} s{speed}, {self.read_ratio:.3f} "
            f"of its share, with {show_bytes(self.peak_host_bytes)} of host memory above the shards",
            "missing": listed(self.missing_keys) or "none",
            "unexpected": listed(self.unexpected_keys) or "none",
        }
        if self.converted_bytes:
            rows["read whole"] = f"{show_bytes(self.converted_bytes)}, for conversions that do more than move data"
        if self.dequantized_from:
            rows["dequantised"] = self.show_dequantized()
        if self.carried_keys:
            rows["carried"] = f"{len(self.carried_keys)} tensors, {show_bytes(self.carried_bytes)}, for saves to copy"
        if self.resized_keys:
            rows["other vocabulary"] = listed(key for key, _, _ in self.resized_keys)
        if self.mismatched_keys:
            rows["other shape"] = listed(key for key, _, _ in self.mismatched_keys)
        return "\n".join(table(list(rows.items())))

    def show_dequantized(self) -> str:
        """What was dequantised: the method, bytes as stored and as floats."""
        stored, floats = show_bytes(self.quantized_bytes), show_bytes(self.dequantized_bytes)
        return f"{self.dequantized_from}: {stored} as stored, with scales, became {floats} of {self.dtypes[0]}"


class MemoryWatch:
    """Measures how far this process's resident memory rises after the watch was made; zero where there is no /proc.

    Where Linux's high-water mark does not rise meanwhile, the resident size at the end stands in for the peak.
    """

    def __init__(self) -> None:
        self._start = _resident()

    def above(self, wanted_bytes: int) -> int:
        """Bytes that the peak lies above the resident size at the start plus `wanted_bytes`; never negative."""
        now, peak = _resident()
        reached = peak if peak > self._start[1] else now
        return max(0, reached - self._start[0] - wanted_bytes)


def _resident(status: Path = Path("/proc/self/status")) -> tuple[int, int]:
    """(resident bytes of this process now, their highest value so far)."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return 0, 0
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith(("VmRSS:", "VmHWM:"))}
    return kib.get("VmRSS", 0) * 1024, kib.get("VmHWM", 0) * 1024


class _WithoutColours(LoggerAdapter):  # type: ignore[type-arg]  # over transformers' own logger
    """A logger that leaves out the escape codes of a terminal, for files that are read later."""

    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        return re.sub(r"\x1b\[[0-9;]*m", "", str(msg)), kwargs


def log_keys(model: nn.Module, report: LoadReport) -> None:
    """Warn of missing, unexpected and mismatched keys on rank 0, in transformers' own table, through its own logger."""
    if report.rank != 0:
        return
    info = LoadStateDictInfo(**report.loading_info(), conversion_errors={}, skipped_pp_keys=set())
    info.mismatched_keys = {(key, torch.Size(a), torch.Size(b)) for key, a, b in report.mismatched_keys}
    logger: Any = logging.get_logger("transformers.modeling_utils")  # the one that its from_pretrained uses
    if not sys.stderr.isatty():
        logger = _WithoutColours(logger)
    log_state_dict_report(model, report.checkpoint, ignore_mismatched_sizes=True, loading_info=info, logger=logger)


def log_dequantized(report: LoadReport, other_blocks: Sequence[str]) -> None:
    """Say in one line on rank 0 that weights were dequantised, and in one more which ones contradict the config."""
    if report.rank != 0 or not report.dequantized_from:
        return
    logger = logging.get_logger("transformers.modeling_utils")
    logger.warning(
        f"{report.checkpoint} is quantised, and training needs floats: its weights were dequantised while they were "
        f"read. {report.show_dequantized()}."
    )
    if other_blocks:
        logger.warning(
            f"{len(other_blocks)} weights have scales on other blocks than weight_block_size says "
            f"({listed(other_blocks)}): their size is no multiple of the block size. They were dequantised as "
            "transformers does it, on blocks of equal size; check the model's outputs."
        )


_DELAY_S = 1.0
"""Seconds of loading after which the bar appears. (assumed)"""


@contextmanager
def loading_bar(
    num_bytes: int, *, rank: int, world_size: int, progress: bool | None, doing: str = "Loading weights"
) -> Iterator[Callable[[int], object]]:
    """Show a progress bar on rank 0, over the bytes of rank 0; all ranks read at the same time and are about as far."""
    unwanted = progress is False or rank != 0
    switched_off = not is_progress_bar_enabled() or are_progress_bars_disabled()
    disable = True if unwanted or (progress is None and switched_off) else (None if progress is None else False)
    text = doing if world_size == 1 else f"{doing} (rank 0 of {world_size})"
    with tqdm(total=num_bytes, desc=text, unit="B", unit_scale=True, delay=_DELAY_S, disable=disable) as bar:
        yield bar.update
