"""TRL's trainers on shards: frozen models, rewards on which all ranks agree, and vLLM, which gets the weights.

Reference and teacher models are evaluated and never trained: they are frozen, and sharded when they are set.
"""

import copy
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from hf_fsdp_tools.distributed.agreement import agreed
from hf_fsdp_tools.distributed.mesh import Axes
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.extensions.vllm import stream_to_vllm
from hf_fsdp_tools.integrations.model import digest_of_shards, shard_in_place
from hf_fsdp_tools.modeling.module_tree import replaced
from hf_fsdp_tools.sharding.adapters import add_adapter
from hf_fsdp_tools.sharding.fsdp2_internals import count_units
from hf_fsdp_tools.sharding.sharding import sharding_of
from hf_fsdp_tools.text import first_lines, quoted


class FrozenModels:
    """The frozen models of TRL's trainers: the reference (DPO, KTO, GRPO, …) and the teacher (distillation)."""

    NAMES = ("ref_model", "teacher_model")

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def shard(self) -> None:
        """Freeze and shard those that are set, once the trainer has its Accelerator and its trained model.

        TRL (1.16, `models.utils.prepare_fsdp`) would shard a frozen model with the root as its only unit, which is
        refused here; it leaves models alone that are sharded already.
        """
        held = vars(self.trainer)
        accelerator, policy = held.get("accelerator"), held.get("model")
        if accelerator is None or policy is None or not accelerator.is_fsdp2:
            return
        trained = set(policy.parameters())
        for name, model in ((name, held.get(name)) for name in self.NAMES):
            if isinstance(model, nn.Module) and sharding_of(model) is None and count_units(model) == 1:
                raise ConfigError(
                    f"{name} is sharded as 1 unit, so that each forward pass gathers all of {type(model).__name__}. "
                    "Give it plain, or made by from_pretrained(..., accelerator=accelerator)."
                )
            if isinstance(model, nn.Module) and trained.isdisjoint(model.parameters()):
                model.requires_grad_(False).eval()  # TRL's losses read weights of heads, which would get gradients
                if sharding_of(model) is None:
                    shard_in_place(model, accelerator, [])

    def made(self, load: Callable[..., Any], model_id: Any, *args: Any, **kwargs: Any) -> Any:
        """What TRL would load; a reference of the policy's own checkpoint is a copy of it, shard by shard."""
        if isinstance(model_id, nn.Module):  # AsyncGRPO and its kin (1.16) take a name alone
            if (attention := kwargs.get("attn_implementation")) is not None:
                model_id.set_attn_implementation(attention)  # type: ignore[operator]  # transformers' own
            return model_id
        policy = vars(self.trainer).get("model")  # set before the reference is made
        sharding = None if policy is None else sharding_of(policy)
        # hooks of ranks that divide rows, layers or experts cannot be copied
        if sharding is None or sharding.axes != Axes(shards=sharding.mesh) or policy.config._name_or_path != model_id:
            return load(model_id, *args, **kwargs)
        return copy.deepcopy(policy)


@contextmanager
def made_on_shards(trainer: Any) -> Iterator[None]:
    """A block in which TRL (1.16) packs long rows full, and makes the trainer, adapter, reference model, rewards and
    vLLM's weights on shards.

    PEFT makes no adapter of shards (`peft_config`); `add_adapter` does. TRL would load the policy's checkpoint again,
    whole on every rank, and GRPO and RLOO take no reference: the policy is copied, shard by shard. With
    `precompute_ref_log_probs` it would hash the bytes of a state dict, which DTensors do not give, to name the file of
    the log-probabilities.
    """
    ways: dict[str, Callable[..., Any]] = {
        "create_model_from_path": trainer._frozen.made,
        "hash_module": lambda plain, model: digest_of_shards(model) if count_units(model) else plain(model),
        "get_peft_model": _adapted,
        "pack_dataset": pack_full,
    }
    homes = homes_of(trainer)
    makers = (vars(home).get("prepare_peft_model") for home in homes)  # of trainers in trl.experimental
    homes |= {sys.modules[make.__module__] for make in makers if make is not None}
    with ExitStack() as stack:
        for home, name in ((home, name) for home in homes for name in ways if name in vars(home)):
            stack.enter_context(replaced(home, **{name: partial(ways[name], getattr(home, name))}))
        yield
    for name in REWARDING:
        if hasattr(trainer, name):
            setattr(trainer, name, partial(_agreed_rewards, trainer, getattr(trainer, name)))
    stream_to_vllm(trainer)


def homes_of(trainer: Any) -> set[ModuleType]:
    """The modules of a trainer's classes, in which their methods look names up."""
    return {sys.modules[kind.__module__] for kind in type(trainer).__mro__ if kind.__module__ in sys.modules}


def _adapted(plain: Any, model: nn.Module, config: Any, adapter_name: str = "default", **kwargs: Any) -> Any:
    if sharding_of(model) is None:
        return plain(model, config, adapter_name, **kwargs)
    return add_adapter(model, config, adapter_name=adapter_name).train(model.training)


_ROWS_AT_ONCE = 16
"""Rows that are packed of one batch of documents, of which the last is not full. (assumed: 1/32 of tokens is lost)"""
_LOOKED_AT = 64  # Documents by which their mean length is known


def pack_full(
    pack: Callable[..., Any], rows: Any, seq_length: int, strategy: str = "bfd", map_kwargs: Any = None
) -> Any:
    """Packed rows as TRL's, of as many documents at once as fill several.

    TRL packs a thousand documents at once, as `datasets` maps them (5.0). With 700 tokens each, these fill two
    thirds of one row of 1,048,576. A process holds the tokens of those documents once.
    """
    lengths = [len(row["input_ids"]) for row in rows.take(min(_LOOKED_AT, getattr(rows, "num_rows", _LOOKED_AT)))]
    wanted = math.ceil(_ROWS_AT_ONCE * seq_length * len(lengths) / max(1, sum(lengths)))
    return pack(rows, seq_length, strategy, {**(map_kwargs or {}), "batch_size": max(1000, wanted)})


# ---- rewards: a rank whose function fails, or returns none, stops all ranks ----

REWARDING = ("_calculate_rewards", "_calculate_rewards_from_functions")
"""Methods of TRL's trainers (1.16) that call the reward functions; GRPO's and RLOO's then gather what they returned."""


def _agreed_rewards(trainer: Any, calculate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What TRL's method returns, if the functions of all ranks returned rewards: they agree once after each batch.
    Every rank must call."""
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

    @contextmanager
    def noting(number: int) -> Iterator[list[Any]]:
        rewards: list[Any] = []
        try:
            yield rewards
        except Exception as error:
            own = error if isinstance(error, ConfigError) else None
            frames = traceback.extract_tb(error.__traceback__)[2:]  # behind this one and the call below
            lines = [frame.lineno for frame in frames if frame.filename == frames[0].filename]
            place = f" ({Path(frames[0].filename).name}:{lines[-1]})" if lines else ""
            fact = f"{type(error).__name__}: {first_lines(error)}{place}"
            said = ConfigError(f"The reward function {name} raised {fact}. Correct it.")
            said.__cause__ = error
            failures.append(own or said)
            rewards[:] = [0.0] * number

    if inspect.iscoroutinefunction(plain) or inspect.iscoroutinefunction(getattr(plain, "__call__", None)):  # noqa: B004

        async def later(*args: Any, completions: Sequence[Any], **kwargs: Any) -> Any:
            with noting(len(completions)) as rewards:
                rewards += _checked(name, await function(*args, completions=completions, **kwargs), len(completions))
            return rewards

        return later

    def at_once(*args: Any, completions: Sequence[Any], **kwargs: Any) -> Any:
        with noting(len(completions)) as rewards:
            rewards += _checked(name, function(*args, completions=completions, **kwargs), len(completions))
        return rewards

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
