"""An engine of verl (0.9) whose weights go out as the checkpoint has them: experts one by one, adapters merged.

verl's own FSDP engine gathers each parameter with `full_tensor()` and gives the names of transformers' modules, which
rollout servers do not know for mixtures of experts. Name this class in place of `FSDPEngineWithLMHead`:

    from verl_weights import StreamingEngine

LoRA goes out merged, in each pass: the second value, verl's `peft_config` with which its servers take an adapter alone
after the base (`base_sync_done`), is always None.
"""

from collections.abc import Iterator
from typing import Any

import torch
from verl.workers.engine import FSDPEngineWithLMHead

from hf_fsdp_tools import live_weights


class StreamingEngine(FSDPEngineWithLMHead):
    """verl's engine for language models, with the exports of `live_weights`."""

    def initialize(self) -> None:
        """Make the module as verl does, and read the names of its weights; every rank calls it."""
        super().initialize()
        is_adapted = hasattr(self.module, "peft_config")
        self.weights = live_weights(self.module, dtype="bfloat16", merge_adapters=is_adapted)

    def get_per_tensor_param(self, **kwargs: Any) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        """Every tensor whole on every rank, at most 1 GiB at a time; verl iterates to the end on every rank."""
        return (pair for bucket in self.weights.buckets(to=None) for pair in bucket.items()), None
