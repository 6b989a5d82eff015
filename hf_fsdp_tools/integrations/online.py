"""TRL's online trainers: a rank whose reward function fails stops all ranks, and vLLM gets the weights of shards."""

import inspect
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_fsdp_tools.distributed.agreement import agreed
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.modeling.module_tree import replaced
from hf_fsdp_tools.sharding.sharding import sharding_of
from hf_fsdp_tools.streaming.live import BUCKET_BYTES, LiveWeights, live_weights
from hf_fsdp_tools.text import first_lines, quoted

REWARDING = ("_calculate_rewards", "_calculate_rewards_from_functions")
"""Methods of TRL's trainers (1.16) that call the reward functions; GRPO's and RLOO's then gather what they returned."""


def guard_rewards(trainer: Any) -> None:
    """Let the ranks agree on the rewards of a TRL trainer's functions, once after each batch; of others, do nothing."""
    for name in REWARDING:
        if hasattr(trainer, name):
            setattr(trainer, name, partial(_agreed_rewards, trainer, getattr(trainer, name)))


def _agreed_rewards(trainer: Any, calculate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What TRL's method returns, if the functions of all ranks returned rewards. Every rank must call."""
    failures: list[ConfigError] = []
    functions = [f if isinstance(f, nn.Module) else _guarded(f, failures) for f in trainer.reward_funcs or ()]
    with replaced(trainer, reward_funcs=functions):
        rewards = calculate(*args, **kwargs)
    with agreed("computing rewards"):
        if failures:
            raise failures[0]
    return rewards


def _guarded(function: Any, failures: list[ConfigError]) -> Any:
    """A reward function that notes its failure and returns zeros then, with which TRL comes to where ranks gather."""
    plain = function
    while isinstance(plain, partial):
        plain = plain.func
    name = getattr(plain, "__name__", type(plain).__name__)

    def failed(error: Exception, completions: Sequence[Any]) -> list[float]:
        own = error if isinstance(error, ConfigError) else None
        frames = traceback.extract_tb(error.__traceback__)[1:]  # behind the call below
        lines = [frame.lineno for frame in frames if frame.filename == frames[0].filename]
        place = f" ({Path(frames[0].filename).name}:{lines[-1]})" if lines else ""
        fact = f"{type(error).__name__}: {first_lines(error)}{place}"
        said = ConfigError(f"The reward function {name} raised {fact}. Mend it.")
        said.__cause__ = error
        failures.append(own or said)
        return [0.0] * len(completions)

    if inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(getattr(plain, "__call__", None)):  # noqa: B004

        async def later(*args: Any, completions: Sequence[Any], **kwargs: Any) -> Any:
            try:
                return _checked(name, await function(*args, completions=completions, **kwargs), len(completions))
            except Exception as error:
                return failed(error, completions)

        return later

    def at_once(*args: Any, completions: Sequence[Any], **kwargs: Any) -> Any:
        try:
            return _checked(name, function(*args, completions=completions, **kwargs), len(completions))
        except Exception as error:
            return failed(error, completions)

    return at_once


def _checked(name: str, returned: Any, expected: int) -> list[float | None]:
    """The rewards that a function returned, if they are one finite number, or None, for each completion."""
    cure = "Return one finite number for each completion, None for one that it does not judge."
    if inspect.isgenerator(returned) or not hasattr(returned, "__iter__"):
        raise ConfigError(f"The reward function {name} returned {quoted(returned)}, which is no list. {cure}")
    rewards = [reward.item() if hasattr(reward, "item") else reward for reward in returned]
    if len(rewards) != expected:
        raise ConfigError(
            f"The reward function {name} returned {len(rewards)} rewards for {expected} completions. {cure}"
        )
    for number, reward in enumerate(rewards):
        if reward is not None and not (isinstance(reward, (int, float)) and math.isfinite(reward)):
            raise ConfigError(
                f"The reward function {name} returned {quoted(reward)} for completion {number + 1} of {expected}. "
                f"{cure}"
            )
    return rewards


# ---- weights for vLLM ----


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
