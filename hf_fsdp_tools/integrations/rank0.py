"""Weights that only rank 0 has (RAM-efficient loading), or that differ between ranks: rank 0's reach every rank's shards."""

import hashlib
import warnings
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from hf_fsdp_tools.allocate import allocate
from hf_fsdp_tools.checkpoint.agreement import all_ranks
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.shard import sharding_of

__all__ = ["send_weights", "weights_to_send"]

SAMPLES = 64
"""Values of each tensor that are compared between ranks (chosen): differently drawn or absent weights differ everywhere."""


def weights_to_send(model: nn.Module) -> dict[str, torch.Tensor]:
    """This rank's parameters and buffers that are not what rank 0 has, by name; the same names on every rank.

    Sharding takes each rank's slice of its own copy, so weights must be equal. With `fsdp_cpu_ram_efficient_loading`
    transformers leaves them on meta (5.23) or at zero (5.17) on all ranks but the first; heads and adapters that each
    rank drew by its own seed differ too. Every rank must call; a digest of a few values of each tensor is gathered.

    Raises:
        ConfigError: parameters are on meta on rank 0 too: nobody loaded the model.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    ranks = all_ranks({name: _digest(tensor) for name, tensor in tensors.items()})
    first = ranks[0]
    nowhere = [name for name, digest in first.items() if digest == "meta"]
    if nowhere:
        raise ConfigError(
            f"{len(nowhere)} parameters of {type(model).__name__} are on meta (first: {nowhere[0]}): it was never loaded. "
            "Load it with from_pretrained(..., accelerator=accelerator), or call load_weights after shard_model."
        )
    other = [name for name in first if any(rank.get(name, first[name]) != first[name] for rank in ranks)]
    drawn = [name for name in other if any(rank.get(name) not in ("meta", first[name]) for rank in ranks)]
    if drawn and dist.get_rank() == 0:
        warnings.warn(
            f"{len(drawn)} of {len(first)} tensors of {type(model).__name__} differ between ranks (first: {drawn[0]}); rank 0's "
            "are used on all. Set the same seed on every rank before the model is made.",
            stacklevel=5,
        )
    return {name: tensors[name].detach() for name in other if name in tensors}


def send_weights(model: nn.Module, whole: Mapping[str, torch.Tensor]) -> None:
    """Fill the shards of those tensors from rank 0's whole ones, in place, one tensor at a time.

    Args:
        model: sharded since `weights_to_send` looked at it; what is on meta gets storage here.
        whole: what `weights_to_send` gave; values count on rank 0 only.

    Every rank must call; each tensor is broadcast whole, and no rank but the first ever holds more than one.
    """
    sharding = sharding_of(model)
    if not whole or sharding is None:
        return
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        allocate(model, device=sharding.device)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    device = torch.device(sharding.mesh.device_type)
    with torch.no_grad():
        for name, mine in whole.items():
            tensor = tensors[name]
            full = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            if dist.get_rank() == 0:
                full.copy_(mine)
            dist.broadcast(full, src=0)
            if isinstance(tensor, DTensor):
                full = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None).to_local()
                tensor = tensor.to_local()
            tensor.copy_(full)


def _digest(tensor: torch.Tensor) -> str:
    if tensor.is_meta:
        return "meta"
    flat = tensor.detach().flatten()
    few = flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].cpu().contiguous()
    return hashlib.sha256(few.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
