"""What ranks with the same rows, or layers, must have in common: rows, draws, and the weights that each holds whole."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.distributed.shards import Held
from hf_fsdp_tools.errors import ConfigError

IGNORED = -100
"""The label of a token that has no loss; source: torch, `CrossEntropyLoss.ignore_index`."""


def require_same_batch(tokens: torch.Tensor, group: dist.ProcessGroup, shared: str) -> None:
    """Refuse rows that differ between the ranks of a group, which must all call: one all-reduce of a few numbers."""
    values = tokens.detach().double().flatten()
    places = torch.arange(1, len(values) + 1, dtype=values.dtype, device=values.device)
    shape = values.new_tensor([tokens.shape[0], tokens.numel()])
    own = torch.cat([torch.stack([values.sum(), (values * places).sum() / len(values)]), shape])
    extremes = torch.cat([own, -own])
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    most, least = extremes.chunk(2)
    if not torch.equal(most, -least):
        raise ConfigError(
            f"The {group.size()} ranks that share {shared} have different rows. Give each group the "
            "same batches: by accelerator.prepare(loader) or a Trainer whose parallelism_config has the same sizes as "
            f"the model; in a loop of your own, a sampler for {dist.get_world_size() // group.size()} replicas and "
            f"rank // {group.size()}."
        )


def compare_inputs(inputs: Iterable[object], group: dist.ProcessGroup, shared: str) -> None:
    """Compare the first tensor of a model's inputs as `require_same_batch` does."""
    tensors = [each for each in inputs if isinstance(each, torch.Tensor) and each.dim()]
    if tensors:
        require_same_batch(tensors[0], group, shared)


def sync_rng(meshes: Iterable[DeviceMesh], device: torch.device) -> None:
    """Give torch's generators, of the CPU and of this rank's device, the states of the first rank of each mesh.

    Every rank must call; each mesh has one axis, along which some KB are broadcast.
    """
    of_devices = [torch] if device.type == "cpu" else [torch, torch.get_device_module(device)]
    for mesh in meshes:
        for generator in of_devices:
            state = generator.get_rng_state().to(device)
            dist.broadcast(state, group=mesh.get_group(), group_src=0)
            generator.set_rng_state(state.cpu())


def differing_weights(model: nn.Module, mesh: DeviceMesh | None) -> list[str]:
    """The weights that the ranks of a mesh each hold whole, next to their shards, and that differ between them.

    Every rank must call; two numbers for each such weight are reduced over the mesh.
    """
    if mesh is None or mesh.size() == 1:
        return []
    ranks = set(mesh.mesh.flatten().tolist())
    whole = {
        name: Held.of(parameter.detach()).memory.flatten()
        for name, parameter in model.named_parameters()
        if not isinstance(parameter, DTensor) or len(ranks & {*parameter.device_mesh.mesh.flatten().tolist()}) == 1
    }
    sums = [part[::step].sum(dtype=torch.float64) for part in whole.values() for step in (1, 7)]
    if not sums:
        return []
    own = torch.stack([each.to(mesh.device_type) for each in sums]).nan_to_num()
    extremes = torch.cat([own, -own])
    for group in mesh.get_all_groups():
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    most, least = extremes.view(2, -1, 2)
    return [name for name, differs in zip(whole, (most != -least).any(-1).tolist(), strict=True) if differs]
