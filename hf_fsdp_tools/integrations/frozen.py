"""TRL's reference and teacher models, which are evaluated and never trained: frozen, and sharded when they are set."""

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from hf_fsdp_tools.distributed.mesh import Axes
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.integrations.model import digest_of_shards, shard_in_place
from hf_fsdp_tools.modeling.module_tree import replaced
from hf_fsdp_tools.sharding.fsdp2_internals import count_units
from hf_fsdp_tools.sharding.sharding import sharding_of

FROZEN = ("ref_model", "teacher_model")
"""Attributes of TRL's trainers with a reference model (DPO, KTO, GRPO, …) and with a teacher (distillation)."""


def check_frozen(name: str, model: nn.Module) -> None:
    """Refuse a frozen model that is sharded as one unit."""
    if sharding_of(model) is None and count_units(model) == 1:
        raise ConfigError(
            f"{name} is sharded as 1 unit, so that each forward pass gathers all of {type(model).__name__}. "
            "Give it plain, or made by from_pretrained(..., accelerator=accelerator)."
        )


def shard_frozen(trainer: Any) -> None:
    """Freeze and shard the frozen models that are set, once the trainer has its Accelerator and its trained model.

    TRL (1.16, `models.utils.prepare_fsdp`) would shard a frozen model with the root as its only unit; it leaves models
    alone that are sharded already.
    """
    held = vars(trainer)
    accelerator, policy = held.get("accelerator"), held.get("model")
    if accelerator is None or policy is None or not accelerator.is_fsdp2:
        return
    trained = set(policy.parameters())
    for model in map(held.get, FROZEN):
        if isinstance(model, nn.Module) and trained.isdisjoint(model.parameters()):
            model.requires_grad_(False).eval()  # TRL's losses read weights of heads, which would get gradients
            if not count_units(model):
                shard_in_place(model, accelerator, [])


@contextmanager
def made_on_shards(trainer: Any) -> Iterator[None]:
    """A block in which TRL (1.16) makes the trainer, and calls its functions for a reference model on shards.

    It would load the policy's checkpoint once more, whole on every rank, and GRPO and RLOO take no reference: here the
    policy is copied, shard by shard. And with `precompute_ref_log_probs` it would hash the bytes of a state dict, which
    DTensors do not give, to name the file of the log-probabilities.
    """
    ways: dict[str, Callable[..., Any]] = {"create_model_from_path": partial(_copied, trainer), "hash_module": _hashed}
    homes = {sys.modules.get(kind.__module__) for kind in type(trainer).__mro__}
    with ExitStack() as stack:
        for home, name in ((home, name) for home in homes for name in ways if hasattr(home, name)):
            stack.enter_context(replaced(home, **{name: partial(ways[name], getattr(home, name))}))
        yield


def _copied(trainer: Any, load: Callable[..., Any], model_id: str, *args: Any, **kwargs: Any) -> Any:
    policy = vars(trainer).get("model")  # set before the reference is made
    sharding = None if policy is None else sharding_of(policy)
    # hooks of ranks that share rows, layers or experts cannot be copied
    if sharding is None or sharding.axes != Axes(shards=sharding.mesh) or policy.config._name_or_path != model_id:
        return load(model_id, *args, **kwargs)
    return copy.deepcopy(policy)


def _hashed(plain: Callable[[nn.Module], str], model: nn.Module) -> str:
    return digest_of_shards(model) if count_units(model) else plain(model)
