"""What a Trainer's run took, as a line of JSON next to what was estimated."""

import json
import time
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
from hf_fsdp_tools.errors import storage_errors
from hf_fsdp_tools.modeling.module_tree import class_name
from hf_fsdp_tools.modeling.tree_copy import base_of
from hf_fsdp_tools.scripting.setups import DEFAULT_RECIPE, estimate_of
from hf_fsdp_tools.text import dtype_name, first_line

_LIBRARIES = ("trl.", "sentence_transformers.", "transformers.")
_PACKAGES = ("hf-fsdp-tools", "torch", "transformers", "accelerate", "trl")


class Measured:
    """The tokens that this rank has trained on, counted without waiting for the device, and when losses were logged."""

    def __init__(self) -> None:
        self.tokens: torch.Tensor | int = 0
        self.rows = self.longest = 1
        self.logged: list[tuple[float, int]] = []

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


def report_estimate(trainer: Any, measured: Measured, file: Path) -> None:
    """Add a line to a file: versions, the GPU, what was estimated (null on CPUs) and, on the same scale, measured.

    Every rank must call; the peak is that of the rank that needs most, the speed the mean of all.
    """
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
                "estimated": trainer.estimated or _estimate(trainer, model, measured),
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
        return estimate_of(DEFAULT_RECIPE, model.config, arguments, trainer.accelerator, **own)[1]
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
