"""A model that is loaded wholly or not at all: what a failed load leaves behind cannot be used by mistake."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .shares import local_boxes_of, local_tensor, memory_view

__all__ = ["aftermath", "rolled_back"]


def aftermath(model: nn.Module) -> str:
    """What ``rolled_back`` would leave, for messages that are written before it happens."""
    if all(parameter.is_meta for parameter in model.parameters()):
        return "the model is on meta again, as it was"
    return "weights that had storage are partly overwritten, so they were filled with NaN"


@contextmanager
def rolled_back(model: nn.Module) -> Iterator[None]:
    """Undo a block that fails: tensors that were on meta are on meta again and their storage is free.

    A forward pass then stops at once (FSDP2 says that parameters are on meta), saving is refused, and loading can be
    tried again. Floating-point tensors that had storage before have lost their values, so they become NaN rather than a
    mixture of two models. No rank communicates; a failure that ``agreed`` shares undoes the block on all ranks.
    """
    before: list[tuple[dict[str, Any], str, torch.Tensor]] = [
        (store, name, tensor)
        for module in model.modules()
        for store in (module._parameters, module._buffers)
        for name, tensor in store.items()
        if tensor is not None
    ]
    try:
        yield
    except BaseException:
        for store, name, tensor in before:
            if tensor.is_meta:
                _free(store[name])
                store[name] = tensor
            elif tensor.is_floating_point():
                _fill_with_nan(tensor)
        model._apply(lambda tensor: tensor)  # type: ignore[no-untyped-call]  # FSDP2 takes note of its parameters here
        raise


def _free(tensor: torch.Tensor | None) -> None:
    """Give the memory back now: FSDP2 keeps a reference to each shard until it gets the next one."""
    if tensor is not None and not tensor.is_meta:
        storage = local_tensor(tensor).untyped_storage()
        if storage.resizable():
            storage.resize_(0)


def _fill_with_nan(tensor: torch.Tensor) -> None:
    local = local_tensor(tensor)
    with torch.no_grad():
        for box, start in local_boxes_of(tensor):
            memory_view(local, start, box.length).fill_(float("nan"))
