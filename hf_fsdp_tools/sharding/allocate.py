"""Give a model on meta uninitialised storage: whole tensors, and this rank's shards of DTensors."""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.distributed.shards import Held
from hf_fsdp_tools.modeling.module_tree import slots, swap
from hf_fsdp_tools.sharding.fsdp2_internals import forget_memory, new_memory


def allocate(model: nn.Module, *, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Give every tensor on meta uninitialised storage on `device`, in place; of a DTensor, this rank's shard.

    Ties stay, and FSDP2 notes the new parameters. `dtype` is that of floating-point parameters; None keeps theirs. No
    rank communicates.
    """
    mesh = next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)
    # CPU offload is for shards alone: whole tensors are on the mesh's device.
    whole_on = torch.device(mesh.device_type) if mesh is not None else device
    of_units = new_memory(model)
    made = {
        tensor: with_storage(
            tensor,
            device=device if isinstance(tensor, DTensor) else whole_on,
            dtype=dtype if isinstance(tensor, nn.Parameter) and tensor.is_floating_point() else None,
            memory=of_units.get(tensor) if isinstance(tensor, nn.Parameter) else None,
        )
        for tensor in dict.fromkeys(tensor for _, _, tensor in slots(model) if tensor.is_meta)
    }
    swap(model, made)
    renew(model)


def renew(model: nn.Module) -> None:
    """Let FSDP2 note parameters that were put in the place of others: it does in `_apply`, but not of those on meta."""
    model._apply(lambda tensor: tensor)  # type: ignore[no-untyped-call]  # torch's own
    forget_memory(model)


def with_storage(
    tensor: torch.Tensor,
    *,
    device: torch.device,
    dtype: torch.dtype | None = None,
    memory: Callable[[torch.device, torch.dtype], torch.Tensor] | None = None,
) -> torch.Tensor:
    """A parameter or buffer like `tensor` with uninitialised memory on `device`; of a DTensor, this rank's shard."""
    dtype = dtype or tensor.dtype
    if isinstance(tensor, DTensor):
        shape = Held.of(tensor).memory.shape
        local = memory(device, dtype) if memory else torch.empty(shape, dtype=dtype, device=device)
        data = Held.of(tensor).around(local)
    else:
        data = torch.empty_like(tensor, dtype=dtype, device=device)
    return with_data(tensor, data) if isinstance(tensor, nn.Parameter) else data


def with_data(parameter: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """A new parameter with `data`, and with the attributes and gradient hooks of `parameter`."""
    new = nn.Parameter(data, requires_grad=parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        new.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch's own
    return new
