"""What a Trainer says of its run: lines, the rows of a loss that is NaN, and what was measured next to the estimate."""

import json
import math
import time
from collections import deque
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median_high
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from hf_fsdp_tools.accelerator import device_title, peak_bytes
from hf_fsdp_tools.distributed.agreement import agreed, all_ranks
from hf_fsdp_tools.distributed.mesh import ranks_per_row
from hf_fsdp_tools.errors import ConfigError, storage_errors, warn
from hf_fsdp_tools.integrations.hooks import TrainerBase
from hf_fsdp_tools.integrations.trainer_settings import TrainerSettings
from hf_fsdp_tools.modeling.module_tree import class_name
from hf_fsdp_tools.modeling.tree_copy import base_of
from hf_fsdp_tools.scripting.setups import estimate_of
from hf_fsdp_tools.sharding.sharding import sharding_of
from hf_fsdp_tools.text import dtype_name, first_line

_LIBRARIES = ("trl.", "sentence_transformers.", "transformers.")
_PACKAGES = ("hf-fsdp-tools", "torch", "transformers", "accelerate", "trl")


class Measured:
    """What a run is measured by: the tokens that this rank has trained on, counted without waiting for the device, when
    losses were logged, and the last losses, each with its step and what its batch begins with."""

    def __init__(self) -> None:
        self.tokens: torch.Tensor | int = 0
        self.rows = self.longest = 1
        self.logged: list[tuple[float, int]] = []
        self.losses: deque[tuple[int, torch.Tensor, Any]] = deque(maxlen=1000)

    def count(self, inputs: Any) -> None:
        """Count a batch; padding is no token."""
        named = inputs if isinstance(inputs, Mapping) else {}
        ids, mask = named.get("input_ids"), named.get("attention_mask")
        if isinstance(ids, torch.Tensor):
            self.tokens = self.tokens + (ids.numel() if mask is None else (mask != 0).sum())
            self.rows, self.longest = len(ids), max(self.longest, ids.shape[-1])

    def note(self) -> None:
        """Note the time and the count; the loss has been read, so that the device has done these tokens."""
        self.logged.append((time.perf_counter(), int(self.tokens)))

    @property
    def tokens_per_second(self) -> float | None:
        """The median between two logs; the first log has the start in it."""
        pairs = zip(self.logged, self.logged[1:], strict=False)
        rates = [(after - before) / (end - start) for (start, before), (end, after) in pairs]
        return median_high(rates) / ranks_per_row() if rates and max(rates) > 0 else None


class ReportingMixin(TrainerBase):  # type: ignore[misc]  # transformers is not typed
    """What a `Trainer` says of its run: one line that it is sharded, the rows of a loss that is NaN, and a file with
    what was estimated and measured."""

    fsdp_settings: TrainerSettings = TrainerSettings()
    """Given by keyword to a trainer, they take the place of those of its class."""
    estimated: Any = None  # Has the estimate of a recipe as `values`, on rank 0
    """The estimate for `report_estimate` where there is one already; None makes one when the training has ended."""
    _measured: Measured

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        """As the Trainer's, after one line that the model is sharded. A run that had come to its end trains nothing."""
        if self.state.global_step >= self.state.max_steps:
            if self.args.should_log:
                done = f"step {self.state.global_step} of {self.state.max_steps}"
                warn(f"Nothing is left to train: the checkpoint is of {done}.")
            self.control.should_training_stop = True
            return
        if self.args.should_log and not self._measured.losses:
            sharding, ranks = sharding_of(self.model), self.args.world_size
            units = f", {len(sharding.plan.units)} units," if sharding is not None else ""
            how = f"over {ranks} rank{'s' * (ranks > 1)}, by FSDP{self.accelerator.state.fsdp_plugin.fsdp_version}"
            if sharding is not None and sharding.is_whole:
                units, how = "", "whole on one rank"
            print(f"hf_fsdp_tools: {class_name(base_of(self.model))}{units} is trained {how}")
        super()._run_epoch(*args, **kwargs)

    def training_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As the Trainer's; the loss is kept until losses are logged, with what the batch begins with: 16 values of its
        first input, or its first row as it is."""
        values = inputs.values() if isinstance(inputs, Mapping) else ()
        first = next((value for value in values if isinstance(value, torch.Tensor) and value.dim() > 1), None)
        rows = inputs[:1] if isinstance(inputs, list) else None if first is None else first[0].flatten()[:16].clone()
        if self.fsdp_settings.report_estimate is not None:
            self._measured.count(inputs)
        loss: torch.Tensor = super().training_step(model, inputs, *args, **kwargs)
        self._measured.losses.append((self.state.global_step + 1, loss.detach(), rows))
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the Trainer's; a mean loss of all ranks that is NaN or infinite stops all of them (see `allow_nan`)."""
        super().log(logs, *args, **kwargs)
        if "loss" in logs and self.fsdp_settings.report_estimate is not None:
            self._measured.note()
        if self.fsdp_settings.allow_nan or math.isfinite(logs.get("loss", 0.0)):
            return
        on = f"on rank {self.args.process_index}, whose batch begins with"
        bad = [(step, f"{loss} {on} {rows}") for step, loss, rows in self._measured.losses if not loss.isfinite()]
        found = [first for of_rank in all_ranks(bad[:1], "looking for a loss that is NaN") for first in of_rank]
        step, what = min(found, default=(self.state.global_step, f"{logs['loss']}"))
        raise ConfigError(
            f"The loss of step {step} is {what}. Look at these rows (labels that are all -100, numbers out of range), "
            "the learning rate, and fp16 where bf16 would do. To go on: TrainerSettings(allow_nan=True), or "
            "--allow_nan of a recipe."
        )


def check_report(trainer: Any) -> None:
    """Refuse a file that cannot be written, with which a training of hours would end. Every rank must call."""
    if named := trainer.fsdp_settings.report_estimate:
        file = Path(named)
        with agreed("opening the report of the estimate", file), storage_errors("write to", file):
            if trainer.args.should_save:
                file.open("a").close()


def report_estimate(trainer: Any) -> None:
    """Add a line to the file, if one is asked for: versions, the GPU, what was estimated (null on CPUs) and, on the
    same scale, measured.

    Every rank must call; the peak is that of the rank that needs most, the speed the mean of all.
    """
    if not (named := trainer.fsdp_settings.report_estimate):
        return
    file, measured = Path(named), trainer._measured
    of_ranks = all_ranks((peak_bytes(), measured.tokens_per_second), "reporting what was measured")
    rates = [rate for _, rate in of_ranks if rate is not None]
    peak_gb, rate = max(peak for peak, _ in of_ranks) / 1e9, mean(rates) if rates else None
    with agreed("writing the report of the estimate", file), storage_errors("write to", file):
        if trainer.args.should_save:
            model, kinds = base_of(trainer.model), type(trainer).__mro__
            line = {
                "versions": {name: version(name) for name in _PACKAGES if find_spec(name.replace("-", "_"))},
                "gpu": device_title(trainer.accelerator.device),
                "model": getattr(getattr(model, "config", None), "_name_or_path", "") or class_name(model),
                "trainer": next(kind.__name__ for kind in kinds if kind.__module__.startswith(_LIBRARIES)),
                "estimated": getattr(trainer.estimated, "values", None) or _estimate(trainer, model, measured),
                "measured": {"peak_gb": peak_gb, "tokens_per_second_per_gpu": rate},
            }
            with file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line, default=str) + "\n")


def _estimate(trainer: Any, model: Any, measured: Measured) -> dict[str, Any] | None:
    """The estimate for a Trainer of one's own, on GPUs; or why there is none, which ends no run."""
    if trainer.accelerator.device.type == "cpu":
        return None
    is_trls = any(kind.__module__.startswith("trl.") for kind in type(trainer).__mro__)
    loss = None if is_trls else "full"  # transformers' own Trainer makes all logits at once
    try:
        arguments = (_options_of(trainer, model, measured), trainer.args)
        own = {"auto_class": class_name(model), "loss": loss}
        return estimate_of(model.config, arguments, trainer.accelerator, **own)
    except Exception as error:  # of whatever a model's own code does without data: it is in the line
        return {"none": first_line(error)}


def _options_of(trainer: Any, model: Any, measured: Measured) -> SimpleNamespace:
    """What the options of a recipe would be with the batches that a trainer had, its adapter, and its base."""
    base = str(getattr(getattr(model.config, "quantization_config", None), "quant_method", ""))
    options: dict[str, Any] = {
        "max_length": measured.longest,
        "per_device_train_batch_size": measured.rows,
        "dtype": dtype_name(next(p.dtype for p in model.parameters() if p.requires_grad)),
        "attn_implementation": model.config._attn_implementation.partition("|")[0],
        "load_in_4bit": "bitsandbytes" in base,
        "dequantize": not base or "bitsandbytes" in base,
    }
    for adapter in list(getattr(trainer.model, "peft_config", {}).values())[:1]:
        targets = adapter.target_modules
        options |= {"use_peft": True, "lora_r": getattr(adapter, "r", None), "lora_dropout": adapter.lora_dropout}
        options["lora_target_modules"] = targets if isinstance(targets, str) else sorted(targets)
    return SimpleNamespace(**options)
