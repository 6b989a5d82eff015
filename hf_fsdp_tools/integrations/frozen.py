"""Models beside the policy that are evaluated and never trained: TRL's reference and teacher models."""

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.shard import sharding_of

from .placement import shard_in_place

__all__ = ["FrozenModel"]


class FrozenModel:
    """An attribute of a Trainer whose model is frozen and sharded by the plugin's policy when it is first read.

    TRL (1.16, `models.utils.prepare_fsdp`) shards such a model with the root as its only unit, so that every forward pass
    gathers all of it, and leaves models alone that are sharded already. Read, and so sharded, it is before TRL gets there.
    Frozen weights keep their dtype: they need no fp32 masters.

    Setting and reading behave as for a plain attribute otherwise. Every rank must read it the first time.

    Raises:
        ConfigError: what is set is one FSDP unit, or its log probabilities are to be precomputed and it is sharded.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        if trainer is None:
            return self
        if self.name not in vars(trainer):
            raise AttributeError(f"{type(trainer).__name__!r} object has no attribute {self.name!r}")
        model = vars(trainer)[self.name]
        if isinstance(model, nn.Module) and not _is_sharded(model) and _may_be_sharded(trainer, model):
            shard_in_place(model.requires_grad_(False).eval(), trainer.accelerator, [])
        return model

    def __set__(self, trainer: Any, model: Any) -> None:
        if isinstance(model, nn.Module) and _is_sharded(model) and sharding_of(model) is None:
            units = sum(isinstance(module, FSDPModule) for module in model.modules())
            if units == 1:
                raise ConfigError(
                    f"{self.name} is sharded as 1 unit, so that each forward pass gathers all of {type(model).__name__}. "
                    "Give it plain, or made by from_pretrained(..., accelerator=accelerator)."
                )
        if isinstance(model, nn.Module) and _is_sharded(model) and _waits_for_hash(trainer):
            raise ConfigError(
                f"precompute_ref_log_probs needs a plain {self.name}: TRL hashes its whole weights, and this one is sharded. "
                f"Give a plain one (it is sharded afterwards), or set precompute_ref_log_probs=False."
            )
        vars(trainer)[self.name] = model


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in model.modules())


def _may_be_sharded(trainer: Any, model: nn.Module) -> bool:
    """Once the Accelerator exists; and where TRL hashes the plain weights first, not before that."""
    accelerator = getattr(trainer, "accelerator", None)
    if accelerator is None or not accelerator.is_fsdp2 or model is trainer.model:
        return False
    return not _waits_for_hash(trainer)


def _waits_for_hash(trainer: Any) -> bool:
    precompute = getattr(getattr(trainer, "args", None), "precompute_ref_log_probs", False)
    return bool(precompute) and "_precompute_model_hash" not in vars(trainer)
