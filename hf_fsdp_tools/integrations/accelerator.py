"""An Accelerator that runs FSDP2 on GPUs, on one GPU, and on CPUs."""

from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_fsdp_tools.errors import ConfigError

from .placement import check_managed, check_optimizers, check_precision, shard_in_place
from .plugin import HybridFSDPPlugin
from .state import start_state

__all__ = ["ShardedAccelerator", "adopt", "make_accelerator"]


def make_accelerator(*, fsdp_plugin: HybridFSDPPlugin | None = None, **accelerate_kwargs: Any) -> Accelerator:
    """Make an `Accelerator` that runs FSDP2: on GPUs, on one GPU, and on CPUs (gloo), launched or alone.

        accelerator = make_accelerator(mixed_precision="bf16", gradient_accumulation_steps=4)
        model = from_pretrained("Qwen/Qwen3-8B", accelerator=accelerator)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)

    Its `prepare` keeps the units and the optimizer of a model that `from_pretrained` made, and shards any other model by
    the plugin's policy. It takes models with or without their optimizer, several of them too.

    Args:
        fsdp_plugin: None makes one from the variables that `accelerate launch` sets.
        accelerate_kwargs: passed to `Accelerator`. `cpu=True` runs on the CPU of a machine with GPUs.

    Every rank must call; starts the process group.

    Raises:
        ConfigError: an Accelerator without FSDP exists already in this process, or a setting cannot be honoured.
    """
    plugin = fsdp_plugin or HybridFSDPPlugin()
    if not isinstance(plugin, HybridFSDPPlugin):
        raise ConfigError(
            f"fsdp_plugin is a {type(plugin).__name__}; make_accelerator needs a HybridFSDPPlugin, which takes the same "
            "arguments and a policy."
        )
    start_state(
        plugin,
        mixed_precision=accelerate_kwargs.get("mixed_precision"),
        cpu=bool(accelerate_kwargs.get("cpu")),
        parallelism_config=accelerate_kwargs.get("parallelism_config"),
    )
    return ShardedAccelerator(fsdp_plugin=plugin, **accelerate_kwargs)


class ShardedAccelerator(Accelerator):  # type: ignore[misc]  # accelerate is not typed
    """An Accelerator without state of its own whose `prepare` leaves sharded models and their optimizers alone.

    Accelerate's `prepare` re-links optimizers by the address of each local shard. Empty shards (fewer rows than ranks)
    all have address 0, so their parameters collapse into one. A model that is sharded before needs no re-linking.
    """

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """As `Accelerator.prepare`; under FSDP2 models may come without an optimizer, and several at once."""
        if not self.is_fsdp2:
            return super().prepare(*objects, device_placement=device_placement)
        if device_placement is not None:
            raise ConfigError(
                "device_placement cannot be chosen under FSDP: shards live where the mesh is. Leave it out."
            )
        optimizers = [obj for obj in objects if isinstance(obj, torch.optim.Optimizer)]
        for model in (obj for obj in objects if isinstance(obj, nn.Module)):
            self._take_model(model, optimizers)
        schedulers = torch.optim.lr_scheduler.LRScheduler
        check_optimizers(optimizers, self._models)
        first = [obj if isinstance(obj, schedulers) else self._prepare_object(obj) for obj in objects]
        prepared = [self._prepare_object(obj) if isinstance(obj, schedulers) else obj for obj in first]
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def prepare_model(self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """As `Accelerator.prepare_model`; under FSDP2 the model is sharded, for evaluation alone too (reward models)."""
        if not self.is_fsdp2:
            return super().prepare_model(model, device_placement, evaluation_mode)
        self._take_model(model, [])
        return model

    def _prepare_object(self, obj: Any) -> Any:
        if isinstance(obj, torch.utils.data.DataLoader):
            return self.prepare_data_loader(obj)
        if isinstance(obj, torch.optim.Optimizer):
            return self.prepare_optimizer(obj, device_placement=False)
        if isinstance(obj, torch.optim.lr_scheduler.LRScheduler):
            return self.prepare_scheduler(obj)
        return obj

    def _take_model(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        if any(model is known for known in self._models):
            return
        if not any(isinstance(module, FSDPModule) for module in model.modules()):
            shard_in_place(model, self, optimizers)
        check_managed(model)
        check_precision(model, self.mixed_precision)
        self._models.append(model)
        model._is_accelerate_prepared = True  # type: ignore[assignment]  # Accelerate's own mark


def adopt(accelerator: Accelerator) -> Accelerator:
    """Give an Accelerator that someone else made our `prepare`, in place; `ShardedAccelerator` adds no state to it."""
    accelerator.__class__ = ShardedAccelerator
    return accelerator
