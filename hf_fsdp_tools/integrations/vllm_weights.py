"""The weights of a sharded policy for TRL's vLLM: under checkpoint names, in buckets, adapters merged on the way."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from hf_fsdp_tools.distributed.agreement import agreed
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.sharding.sharding import sharding_of
from hf_fsdp_tools.streaming.live import BUCKET_BYTES, LiveWeights, live_weights
from hf_fsdp_tools.text import first_lines


def stream_to_vllm(trainer: Any) -> None:
    """Let TRL's `VLLMGeneration` of a trainer, if it has one, take the weights of the sharded policy as a stream.

    TRL (1.16) gathers each parameter on every rank and sends it under the name of the module, which vLLM does not know
    where transformers has fused it; adapters it merges into shards. Here the names are the checkpoint's, tensors go to
    rank 0 alone (server) or to every rank (colocate), and their metadata are known without a gather.
    """
    generation = vars(trainer).get("vllm_generation")
    if generation is not None:
        generation.sync_weights = partial(_Stream(trainer, generation).sync, generation.sync_weights)


class _Stream:
    """The weights of a trainer's policy on their way to its vLLM."""

    def __init__(self, trainer: Any, generation: Any) -> None:
        self.trainer, self.generation = trainer, generation
        self.weights: LiveWeights | None = None
        self.named: Iterator[tuple[str, torch.Tensor]] | None = None
        """What is being sent; every rank must iterate to its end."""

    def sync(self, send: Any) -> None:
        """Send the weights by TRL's own method, whose error is that of all ranks. Every rank must call."""
        model, generation = self.trainer.model, self.generation
        sharding = sharding_of(model)
        if sharding is None:
            send()  # TRL's own way
            return
        if self.weights is None:
            dtype = sharding.mp_policy.param_dtype  # in which the policy computes
            self.weights = live_weights(model, dtype=dtype, merge_adapters=hasattr(model, "peft_config"))
            tensors = self.weights.tensors.items()
            generation._weight_metadata = [(n, str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in tensors]
            generation._iter_named_params = self.begin
        failure: Exception | None = None
        self.named = None
        try:
            send()
        except Exception as error:
            failure = error
        for _ in self.named or self.begin():
            pass
        with agreed("sending the weights to vLLM"):
            if failure is not None:
                said = f"{type(failure).__name__}: {first_lines(failure)}"
                raise ConfigError(
                    f"vLLM did not take the weights: {said}. It must be up, and serve the model that is trained."
                ) from failure

    def begin(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Stands for TRL's `_iter_named_params`."""
        self.named = self._named()
        return self.named

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        assert self.weights is not None
        largest = max(tensor.num_bytes for tensor in self.weights.tensors.values())
        to = (0,) if self.generation.mode == "server" else None
        for bucket in self.weights.buckets(max(BUCKET_BYTES, 4 * largest), to=to):  # what a rank gets, and gives
            yield from bucket.items()
