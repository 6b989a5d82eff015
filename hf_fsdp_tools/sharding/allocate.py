"""Storage for a model on meta, uninitialised: of each sharded parameter this rank's share."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.modeling.linear4bit import mark_weights

__all__ = ["allocate", "renew", "with_data", "with_storage"]


def allocate(model: nn.Module, *, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Give every tensor of a meta model uninitialised storage on `device`, in place; a DTensor, this rank's shard of
    it.

    Tied parameters stay one parameter and FSDP2 is told of the new ones. Tensors that have storage stay as they are.

    Args:
        model: plain, or sharded by `fully_shard` while on meta.
        device: where the storage of shards goes: the CPU for a CPU-offloaded FSDP2 model. Buffers and whole parameters
            of a sharded model go to the mesh's device.
        dtype: what floating-point parameters become; None keeps each one's own. Buffers always keep their own.

    No rank communicates.
    """
    replaced = _allocated(model, device, dtype)
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    tensors[name] = replaced[tensor]  # type: ignore[assignment]  # a Parameter for a Parameter
    renew(model)


def renew(model: nn.Module) -> None:
    """Let FSDP2 take note of parameters that were put in place of others. No rank communicates.

    It keeps its own reference to each shard and renews it in `_apply`; a function that changes nothing is enough.
    """
    model._apply(lambda tensor: tensor)  # type: ignore[no-untyped-call]  # torch's own
    mark_weights(model)


def _allocated(model: nn.Module, device: torch.device, dtype: torch.dtype | None) -> dict[torch.Tensor, torch.Tensor]:
    """What takes the place of each tensor on meta; tied ones are one tensor."""
    found = dict.fromkeys(
        tensor
        for module in model.modules()
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if tensor.is_meta
    )
    mesh = next((p.device_mesh for p in model.parameters() if isinstance(p, DTensor)), None)
    # CPU offload is for shards alone: what every rank holds whole is used where the mesh is.
    whole_on = torch.device(mesh.device_type) if mesh is not None else device
    return {
        tensor: with_storage(
            tensor,
            device=device if isinstance(tensor, DTensor) else whole_on,
            dtype=_storage_dtype(tensor, dtype),
        )
        for tensor in found
    }


def _storage_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Buffers keep their own dtype, and so do parameters that are no floating-point numbers."""
    chosen = dtype is not None and isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
    return dtype if chosen and dtype is not None else tensor.dtype


def with_storage(tensor: torch.Tensor, *, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The same parameter or buffer with uninitialised memory on `device`: of a DTensor, this rank's shard.

    Strides, attributes that model code hangs on a parameter, and its hooks on gradients stay.
    """
    dtype = dtype or tensor.dtype
    if isinstance(tensor, DTensor):
        local = torch.empty(tensor.to_local().shape, dtype=dtype, device=device)
        data: torch.Tensor = DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    else:
        data = torch.empty_like(tensor, dtype=dtype, device=device)
    return with_data(tensor, data) if isinstance(tensor, nn.Parameter) else data


def with_data(parameter: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    """Another parameter to put in the place of one: with this data, and the same attributes and hooks on its
    gradient."""
    new = nn.Parameter(data, requires_grad=parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    for hook in (parameter._post_accumulate_grad_hooks or {}).values():
        new.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch's own
    return new
