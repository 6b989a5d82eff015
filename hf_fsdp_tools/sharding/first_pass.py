"""What is checked once, before the first training pass of a sharded model: what a script has done to it since."""

import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig

from hf_fsdp_tools.distributed.agreement import rank_and_size
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.modeling.configs import max_positions
from hf_fsdp_tools.sharding.parameters import never_called


def check_first_pass(model: nn.Module, device: torch.device) -> None:
    """Have the first training pass of a model checked, before anything is gathered for it.

    Shards that were moved elsewhere are refused. On rank 0 a warning names fp16 master weights, hooks on
    parameters that nobody calls, sequences that are longer than the model's positions, and a model that its Accelerator
    has not prepared (`expect_prepare`).
    """
    model._device_of_shards = device  # type: ignore[assignment]  # a plain attribute of our own
    model.register_forward_pre_hook(_look, prepend=True, with_kwargs=True)


def expect_prepare(model: nn.Module) -> None:
    """Let the first training pass warn if no Accelerator has prepared the model. Nothing is communicated."""
    model._waits_for_prepare = True  # type: ignore[assignment]  # a plain attribute of our own


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
def _look(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not model.training or not torch.is_grad_enabled():
        return
    for key in [key for key, hook in model._forward_pre_hooks.items() if hook is _look]:
        del model._forward_pre_hooks[key]
    _refuse_moved(model)
    if rank_and_size()[0] == 0:
        ids = kwargs.get("input_ids", next(iter(args), None))
        length = ids.shape[-1] if isinstance(ids, torch.Tensor) and ids.dim() == 2 else 0
        if length and isinstance(positions := kwargs.get("position_ids"), torch.Tensor):  # several sequences in a row
            length = int(positions.max()) + 1
        for problem in _problems(model, length):
            warnings.warn(problem, stacklevel=2)


def _refuse_moved(model: nn.Module) -> None:
    kind = model.__dict__["_device_of_shards"].type
    moved = {p.device.type for p in model.parameters() if isinstance(p, DTensor)} - {kind, "meta"}
    if moved:
        raise ConfigError(
            f"Shards of {type(model).__name__} are on {' and '.join(sorted(moved))}, and its mesh is on {kind}: they "
            "were moved after they were made. Leave out model.to(…), model.cuda() and model.cpu(); the mesh decides "
            "where shards are."
        )


def _problems(model: nn.Module, length: int) -> list[str]:
    name, found = type(model).__name__, []
    if any(parameter.requires_grad and parameter.dtype == torch.float16 for parameter in model.parameters()):
        found.append(
            f"The trained weights of {name} are float16 (dtype=, model.half() or model.to()): small updates of them "
            "vanish. Load them in float32 and compute in float16: make_accelerator(mixed_precision='fp16')."
        )
    if problem := never_called(model, is_sharded=True):
        found.append(problem)
    config = getattr(model, "config", None)
    limit = max_positions(config) if isinstance(config, PreTrainedConfig) else None
    if limit is not None and length > limit:
        found.append(
            f"A batch has sequences of {length:,} tokens, and {name} has {limit:,} positions: what comes after them is "
            "new to it. Truncate (max_length of the trainer, or of the tokenizer)."
        )
    own = model.__dict__
    if own.get("_waits_for_prepare") and not own.get("_is_prepared") and rank_and_size()[1] > 1:
        found.append(
            f"{name} is trained, and its Accelerator has not prepared it: a DataLoader that was not prepared gives "
            "every rank the same rows. Call model, optimizer, loader = accelerator.prepare(model, optimizer, loader) "
            "before the first step."
        )
    return found
