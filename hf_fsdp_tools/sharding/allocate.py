"""Storage for a model on meta, uninitialised: of each sharded parameter this rank's share."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.modeling.linear4bit import mark_weights
from hf_fsdp_tools.sharding.host_memory import empty_on_host

__all__ = ["allocate", "renew"]


def allocate(model: nn.Module, *, device: torch.device, dtype: torch.dtype | None = None) -> None:
    """Give every tensor of a meta model uninitialised storage on `device`, in place: of a DTensor only this rank's shard.

    Tied parameters stay one parameter and FSDP2 is told of the new ones. Tensors that have storage stay as they are.

    Args:
        model: plain, or sharded by `fully_shard` while on meta.
        device: where the storage of shards goes: the CPU for a CPU-offloaded FSDP2 model. Buffers and whole parameters of a
            sharded model go to the mesh's device.
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
    homes = [device if isinstance(tensor, DTensor) else whole_on for tensor in found]
    wanted = [(_local_shape(tensor), _storage_dtype(tensor, dtype)) for tensor in found]
    on_host = iter(empty_on_host([want for want, home in zip(wanted, homes, strict=True) if home.type == "cpu"]))
    return {
        tensor: _with_storage(
            tensor, next(on_host) if home.type == "cpu" else torch.empty(shape, dtype=kind, device=home)
        )
        for tensor, (shape, kind), home in zip(found, wanted, homes, strict=True)
    }


def _local_shape(tensor: torch.Tensor) -> torch.Size:
    return tensor.to_local().shape if isinstance(tensor, DTensor) else tensor.shape


def _storage_dtype(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Buffers keep their own dtype, and so do parameters that are no floating-point numbers."""
    chosen = dtype is not None and isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
    return dtype if chosen and dtype is not None else tensor.dtype


def _with_storage(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """The same parameter or buffer with `local` as its memory on this rank."""
    data = local
    if isinstance(tensor, DTensor):
        data = DTensor.from_local(
            local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    elif not tensor.is_contiguous():
        data = torch.empty_like(tensor, dtype=local.dtype, device=local.device)  # another order of its dimensions
    if not isinstance(tensor, nn.Parameter):
        return data
    allocated = nn.Parameter(data, requires_grad=tensor.requires_grad)
    allocated.__dict__.update(tensor.__dict__)  # attributes that model code hangs on its parameters
    for hook in (tensor._post_accumulate_grad_hooks or {}).values():  # set while on meta, by shard_model
        allocated.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch's own
    return allocated
