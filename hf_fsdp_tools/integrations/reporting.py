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

from hf_fsdp_tools.accelerator import device_title, peak_bytes
from hf_fsdp_tools.distributed.agreement import agreed, all_ranks
from hf_fsdp_tools.distributed.mesh import ranks_per_row
from hf_fsdp_tools.errors import ConfigError, storage_errors, warn
from hf_fsdp_tools.modeling.module_tree import class_name
from hf_fsdp_tools.modeling.tree_copy import base_of
from hf_fsdp_tools.scripting.setups import estimate_of
from hf_fsdp_tools.sharding.sharding import sharding_of
from hf_fsdp_tools.text import dtype_name, first_line

_LIBRARIES = ("trl.", "sentence_transformers.", "transformers.")
_PACKAGES = ("hf-fsdp-tools", "torch", "transformers", "accelerate", "trl")


class Report:
    """What a `Trainer` says of a training: one line that it is sharded, the rows of a loss that is NaN, and a file with
    what was estimated and measured."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.tokens: torch.Tensor | int = 0  # of this rank, counted without waiting for the device
        self.rows = self.longest = 1
        self.logged: list[tuple[float, int]] = []  # when losses were logged, and the tokens until then
        self.losses: deque[tuple[int, torch.Tensor, Any]] = deque(maxlen=1000)
        """The last losses, each with its step and what its batch begins with."""

    def open(self) -> None:
        """Refuse a file that cannot be written, with which a training of hours would end. Every rank must call."""
        if named := self.trainer.fsdp_settings.report_estimate:
            file = Path(named)
            with agreed("opening the report of the estimate", file), storage_errors("write to", file):
                if self.trainer.args.should_save:
                    file.open("a").close()

    def begin_epoch(self) -> bool:
        """Say once that the model is sharded; whether there is anything to train: a resumed run may be at its end."""
        trainer, is_first = self.trainer, self.trainer.args.should_log
        if trainer.state.global_step >= trainer.state.max_steps:
            if is_first:
                done = f"step {trainer.state.global_step} of {trainer.state.max_steps}"
                warn(f"Nothing is left to train: the checkpoint is of {done}.")
            trainer.control.should_training_stop = True
            return False
        if is_first and not self.losses:
            sharding, ranks = sharding_of(trainer.model), trainer.args.world_size
            units = f", {len(sharding.plan.units)} units," if sharding is not None else ""
            how = f"over {ranks} rank{'s' * (ranks > 1)}, by FSDP{trainer.accelerator.state.fsdp_plugin.fsdp_version}"
            if sharding is not None and sharding.is_whole:
                units, how = "", "whole on one rank"
            print(f"hf_fsdp_tools: {class_name(base_of(trainer.model))}{units} is trained {how}")
        return True

    def look(self, inputs: Any) -> Any:
        """What a batch begins with: 16 values of its first input, or its first row as it is. Its tokens are counted
        where there is a file to write; padding is no token."""
        named = inputs if isinstance(inputs, Mapping) else {}
        ids, mask = named.get("input_ids"), named.get("attention_mask")
        if self.trainer.fsdp_settings.report_estimate is not None and isinstance(ids, torch.Tensor):
            self.tokens = self.tokens + (ids.numel() if mask is None else (mask != 0).sum())
            self.rows, self.longest = len(ids), max(self.longest, ids.shape[-1])
        first = next((each for each in named.values() if isinstance(each, torch.Tensor) and each.dim() > 1), None)
        return inputs[:1] if isinstance(inputs, list) else None if first is None else first[0].flatten()[:16].clone()

    def keep(self, loss: torch.Tensor, rows: Any) -> None:
        """Keep the loss of a batch until losses are logged, with what the batch begins with."""
        self.losses.append((self.trainer.state.global_step + 1, loss.detach(), rows))

    def check(self, logs: dict[str, float]) -> None:
        """Stop all ranks where a mean loss of all of them is NaN or infinite (see `allow_nan`); note the time and the
        count: the loss has been read, so that the device has done these tokens."""
        trainer = self.trainer
        if "loss" in logs and trainer.fsdp_settings.report_estimate is not None:
            self.logged.append((time.perf_counter(), int(self.tokens)))
        if trainer.fsdp_settings.allow_nan or math.isfinite(logs.get("loss", 0.0)):
            return
        on = f"on rank {trainer.args.process_index}, whose batch begins with"
        bad = [(step, f"{loss} {on} {rows}") for step, loss, rows in self.losses if not loss.isfinite()]
        found = [first for of_rank in all_ranks(bad[:1], "looking for a loss that is NaN") for first in of_rank]
        step, what = min(found, default=(trainer.state.global_step, f"{logs['loss']}"))
        raise ConfigError(
            f"The loss of step {step} is {what}. Look at these rows (labels that are all -100, numbers out of range), "
            "the learning rate, and fp16 where bf16 would do. To go on: TrainerSettings(allow_nan=True), or "
            "--allow_nan of a recipe."
        )

    @property
    def tokens_per_second(self) -> float | None:
        """The median between two logs; the first log has the start in it."""
        pairs = zip(self.logged, self.logged[1:], strict=False)
        rates = [(after - before) / (end - start) for (start, before), (end, after) in pairs]
        return median_high(rates) / ranks_per_row() if rates and max(rates) > 0 else None

    def write(self) -> None:
        """Add a line to the file, if one is asked for: versions, the GPU, what was estimated (null on CPUs) and, on the
        same scale, measured.

        Every rank must call; the peak is that of the rank that needs most, the speed the mean of all.
        """
        trainer = self.trainer
        if not (named := trainer.fsdp_settings.report_estimate):
            return
        of_ranks = all_ranks((peak_bytes(), self.tokens_per_second), "reporting what was measured")
        rates = [rate for _, rate in of_ranks if rate is not None]
        peak_gb, rate = max(peak for peak, _ in of_ranks) / 1e9, mean(rates) if rates else None
        with agreed("writing the report of the estimate", file := Path(named)), storage_errors("write to", file):
            if trainer.args.should_save:
                model, kinds = base_of(trainer.model), type(trainer).__mro__
                name = getattr(getattr(model, "config", None), "_name_or_path", "")
                line = {
                    "versions": {name: version(name) for name in _PACKAGES if find_spec(name.replace("-", "_"))},
                    "gpu": device_title(trainer.accelerator.device),
                    "model": class_name(model) if not name or Path(name).exists() else name,
                    "trainer": next(kind.__name__ for kind in kinds if kind.__module__.startswith(_LIBRARIES)),
                    "estimated": getattr(trainer.estimated, "values", None) or self._estimate(model),
                    "measured": {"peak_gb": peak_gb, "tokens_per_second_per_gpu": rate},
                }
                with file.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(line, default=str) + "\n")

    def _estimate(self, model: Any) -> dict[str, Any] | None:
        """The estimate for a Trainer of one's own, on GPUs; or why there is none, which ends no run."""
        trainer = self.trainer
        if trainer.accelerator.device.type == "cpu":
            return None
        is_trls = any(kind.__module__.startswith("trl.") for kind in type(trainer).__mro__)
        loss = None if is_trls else "full"  # transformers' own Trainer makes all logits at once
        try:
            arguments = (self._options_of(model), trainer.args)
            own = {"auto_class": class_name(model), "loss": loss}
            return estimate_of(model.config, arguments, trainer.accelerator, **own)
        except Exception as error:  # of whatever a model's own code does without data: it is in the line
            return {"none": first_line(error)}

    def _options_of(self, model: Any) -> SimpleNamespace:
        """What the options of a recipe would be with the batches that a trainer had, its adapter, and its base."""
        base = str(getattr(getattr(model.config, "quantization_config", None), "quant_method", ""))
        options: dict[str, Any] = {
            "max_length": self.longest,
            "per_device_train_batch_size": self.rows,
            "dtype": dtype_name(next(p.dtype for p in model.parameters() if p.requires_grad)),
            "attn_implementation": model.config._attn_implementation.partition("|")[0],
            "load_in_4bit": "bitsandbytes" in base,
            "dequantize": not base or "bitsandbytes" in base,
        }
        for adapter in list(getattr(self.trainer.model, "peft_config", {}).values())[:1]:
            targets = adapter.target_modules
            options |= {"use_peft": True, "lora_r": getattr(adapter, "r", None), "lora_dropout": adapter.lora_dropout}
            options["lora_target_modules"] = targets if isinstance(targets, str) else sorted(targets)
        return SimpleNamespace(**options)
