"""TRL's reference and teacher models, which are evaluated and never trained: frozen, and sharded when they are set."""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.integrations.model import shard_in_place
from hf_fsdp_tools.sharding.shard import sharding_of

__all__ = ["FROZEN", "NEEDED_BY_FROZEN", "check_frozen", "shard_frozen"]

FROZEN = ("ref_model", "teacher_model")
"""Attributes of TRL's trainers with a reference model (DPO, KTO, GRPO, …) and with a teacher (distillation)."""

NEEDED_BY_FROZEN = ("model", "_precompute_model_hash")
"""Attributes that must be set before a frozen model is sharded; every rank sets them."""


def check_frozen(trainer: Any, name: str, model: nn.Module) -> None:
    """Refuse a frozen model that is sharded as one unit, or that is sharded before TRL can hash its weights."""
    if not _is_sharded(model):
        return
    if sharding_of(model) is None and sum(isinstance(module, FSDPModule) for module in model.modules()) == 1:
        raise ConfigError(
            f"{name} is sharded as 1 unit, so that each forward pass gathers all of {type(model).__name__}. "
            "Give it plain, or made by from_pretrained(..., accelerator=accelerator)."
        )
    if _waits_for_hash(trainer):
        raise ConfigError(
            f"precompute_ref_log_probs needs a plain {name}: TRL hashes its whole weights, and this one is sharded. "
            "Give a plain one (it is sharded afterwards), or set precompute_ref_log_probs=False."
        )


def shard_frozen(trainer: Any) -> None:
    """Freeze and shard the frozen models that are set, once the trainer has its Accelerator and its trained model.

    Waits until TRL has hashed plain weights, if it is to do so. TRL (1.16, `models.utils.prepare_fsdp`) would shard a
    frozen model with the root as its only unit; it leaves models alone that are sharded already.
    """
    there = vars(trainer)
    accelerator, policy = there.get("accelerator"), there.get("model")
    if accelerator is None or policy is None or not accelerator.is_fsdp2 or _waits_for_hash(trainer):
        return
    for model in (there.get(name) for name in FROZEN):
        if isinstance(model, nn.Module) and model is not policy and not _is_sharded(model):
            shard_in_place(model.requires_grad_(False).eval(), accelerator, [])


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in model.modules())


def _waits_for_hash(trainer: Any) -> bool:
    precompute = getattr(getattr(trainer, "args", None), "precompute_ref_log_probs", False)
    return bool(precompute) and "_precompute_model_hash" not in vars(trainer)
