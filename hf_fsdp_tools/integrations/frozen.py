"""TRL's reference and teacher models, which are evaluated and never trained: frozen, and sharded when they are set."""

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from hf_fsdp_tools.distributed.mesh import Axes
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.integrations.model import digest_of_shards, shard_in_place
from hf_fsdp_tools.sharding.sharding import sharding_of

FROZEN = ("ref_model", "teacher_model")
"""Attributes of TRL's trainers with a reference model (DPO, KTO, GRPO, …) and with a teacher (distillation)."""

NEEDED_BY_FROZEN = ("model", "_precompute_model_hash")
"""Attributes that must be set before a frozen model is sharded; every rank sets them."""

_HASHED = "_hashed_models"
"""Attribute with the sharded models that TRL may hash and the handles of their hooks, while the trainer is made."""


def check_frozen(name: str, model: nn.Module) -> None:
    """Refuse a frozen model that is sharded as one unit."""
    if sharding_of(model) is None and sum(isinstance(module, FSDPModule) for module in model.modules()) == 1:
        raise ConfigError(
            f"{name} is sharded as 1 unit, so that each forward pass gathers all of {type(model).__name__}. "
            "Give it plain, or made by from_pretrained(..., accelerator=accelerator)."
        )


def shard_frozen(trainer: Any) -> None:
    """Freeze and shard the frozen models that are set, once the trainer has its Accelerator and its trained model.

    Waits until TRL has hashed the weights, if it is to do so; of models that are sharded already it hashes a digest.
    TRL (1.16, `models.utils.prepare_fsdp`) would shard a frozen model with the root as its only unit; it leaves models
    alone that are sharded already.
    """
    held = vars(trainer)
    accelerator, policy = held.get("accelerator"), held.get("model")
    if accelerator is None or policy is None or not accelerator.is_fsdp2:
        return
    trained = set(policy.parameters())
    given = (held.get(name) for name in FROZEN)
    frozen = [each for each in given if isinstance(each, nn.Module) and trained.isdisjoint(each.parameters())]
    is_hashed = getattr(held.get("args"), "precompute_ref_log_probs", False)
    if is_hashed and "_precompute_model_hash" not in held:
        handles = held.setdefault(_HASHED, {})
        handles |= {m: _let_hash(m) for m in (policy, *frozen) if m not in handles and _is_sharded(m)}
        return
    for model in frozen:
        model.requires_grad_(False).eval()  # TRL's losses read weights of heads, which would get gradients
        if not _is_sharded(model):
            shard_in_place(model, accelerator, [])


@contextmanager
def hashable(trainer: Any) -> Iterator[None]:
    """A block in which TRL may hash sharded models that are set on the trainer; it makes the trainer."""
    try:
        yield
    finally:
        for handle in vars(trainer).pop(_HASHED, {}).values():
            handle.remove()


@contextmanager
def reference_copied(trainer: Any) -> Iterator[None]:
    """A block in which TRL copies a sharded policy, shard by shard, where it would load its checkpoint once more.

    TRL (1.16) loads reference models whole on every rank, and GRPO and RLOO take none. The block makes the trainer.
    Where ranks share rows, layers or experts, whose hooks cannot be copied, TRL loads it.
    """
    name = "create_model_from_path"
    homes = (sys.modules.get(kind.__module__) for kind in type(trainer).__mro__)
    own = {home: vars(home)[name] for home in homes if home is not None and name in vars(home)}

    def make(load: Any, model_id: str, *args: Any, **kwargs: Any) -> Any:
        policy = vars(trainer).get("model")  # set before the reference is made
        sharding = None if policy is None else sharding_of(policy)
        if sharding is None or sharding.axes != Axes(shards=sharding.mesh) or policy.config._name_or_path != model_id:
            return load(model_id, *args, **kwargs)
        return copy.deepcopy(policy)

    for home, load in own.items():
        vars(home)[name] = partial(make, load)
    try:
        yield
    finally:
        for home, load in own.items():
            vars(home)[name] = load


def _let_hash(model: nn.Module) -> RemovableHandle:
    """Make the state dict of a sharded model one digest of all shards, until the handle is removed.

    With `precompute_ref_log_probs` TRL (1.16, `trainer.utils.hash_module`) hashes the bytes of a state dict, which
    DTensors do not give, to name the file of the log-probabilities.
    """

    def hold_digest(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
        state.clear()
        state["digest"] = torch.tensor(list(bytes.fromhex(digest_of_shards(module))), dtype=torch.uint8)

    handle: RemovableHandle = model.register_state_dict_post_hook(hold_digest)  # type: ignore[no-untyped-call]
    return handle


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in model.modules())
