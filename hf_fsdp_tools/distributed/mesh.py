"""Parallel degrees as a value, the device mesh that they make, and the process group."""

import os
import warnings
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hf_fsdp_tools.accelerator import find_accelerator
from hf_fsdp_tools.distributed.cpu_backend import add_cpu_backend, default_timeout, loopback_advice
from hf_fsdp_tools.distributed.launcher import check_started, device_index, local_rank, local_size
from hf_fsdp_tools.errors import MeshError, frames_of_package


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """The degrees of data parallelism, counted in processes; their product is the world size.

        ParallelDims().build_mesh()                        # FSDP over all processes
        ParallelDims(dp_replicate_size=2).build_mesh()     # HSDP: two replicas, each sharded over half of the processes

    Raises:
        MeshError: a degree is below 1.

    Example:
        >>> ParallelDims(dp_replicate_size=2).resolve(world_size=16)
        ParallelDims(dp_replicate_size=2, dp_shard_size=8)
        >>> ParallelDims().build_mesh("cpu").mesh_dim_names
        ('dp_shard',)
    """

    dp_replicate_size: int = 1
    """Number of copies of the model; above 1 this is HSDP."""

    dp_shard_size: int | None = None
    """Number of processes over which each copy is sharded; None means the world size over `dp_replicate_size`."""

    def __post_init__(self) -> None:
        for name, size in (("dp_replicate_size", self.dp_replicate_size), ("dp_shard_size", self.dp_shard_size)):
            if size is not None and (not isinstance(size, int) or size < 1):
                raise MeshError(f"{name} is {size!r}; it must be a whole number, 1 or more.")

    def resolve(self, world_size: int) -> "ParallelDims":
        """The same degrees with `dp_shard_size` filled in for `world_size` processes.

        Raises:
            MeshError: the degrees do not multiply to the world size.
        """
        dp_shard_size = self.dp_shard_size or world_size // self.dp_replicate_size
        if self.dp_replicate_size * dp_shard_size != world_size:
            raise MeshError(
                f"dp_replicate_size {self.dp_replicate_size} x dp_shard_size {self.dp_shard_size or 'auto'} does not "
                f"make the {world_size} processes of this job. Choose degrees whose product is {world_size}."
            )
        return replace(self, dp_shard_size=dp_shard_size)

    def build_mesh(self, device_type: str | None = None) -> DeviceMesh:
        """Make the device mesh, with axes `("dp_shard",)`, or `("dp_replicate", "dp_shard")` for HSDP.

        Every rank must call. Starts the process group if none is running (from the variables that `torchrun` and
        `accelerate launch` set, or for this process alone where there are none) and creates the axes' subgroups.

        Args:
            device_type: `"cuda"`, `"cpu"`, …; None means this machine's accelerator, or the CPU if it has none.

        Raises:
            MeshError: the degrees do not fit the world size, or the process group cannot start.
        """
        device_type = device_type or local_device().type
        ensure_process_group(device_type)
        dims = self.resolve(dist.get_world_size())
        assert dims.dp_shard_size is not None
        sizes = {"dp_replicate": dims.dp_replicate_size, "dp_shard": dims.dp_shard_size}
        if dims.dp_replicate_size == 1:
            del sizes["dp_replicate"]
        mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        for group in mesh.get_all_groups() if device_type == "cpu" else ():
            add_cpu_backend(group)
        return mesh


def mesh_of(accelerator: Any) -> DeviceMesh:
    """The mesh of an Accelerator's parallelism config; without one, FSDP over all processes. Every rank must call."""
    if config := accelerator.parallelism_config:
        mesh: DeviceMesh = accelerator.torch_device_mesh[tuple(config.fsdp_dim_names)]
        return mesh
    return ParallelDims().build_mesh(accelerator.device.type)


def local_device() -> torch.device:
    """The device of this process, or the CPU on a machine without an accelerator.

    The device to which the script has bound the process group (`init_process_group(device_id=…)`); otherwise the
    accelerator of the process's rank on its machine, or the only one that is visible (see `device_index`).
    """
    accelerator = find_accelerator()
    if accelerator is None:
        return torch.device("cpu")
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is not None and accelerator.type in (known := _devices.get(group, {})):
        return known[accelerator.type]
    bound = None if group is None else group.bound_device_id
    if bound is not None and bound.type == accelerator.type:
        return torch.device(bound)
    count, current = torch.accelerator.device_count(), torch.accelerator.current_device_index()
    index = device_index(os.environ, count=count, kind=accelerator.type, current=current)
    return torch.device(accelerator.type, index)


def rank_on_node() -> tuple[int, int]:
    """(rank, number of processes) on this machine, as the launcher says; (0, 1) without a launcher."""
    return local_rank(os.environ) or 0, local_size(os.environ)


def gpus_are_hidden() -> bool:
    """Whether this process was told to leave GPUs alone, as `accelerate launch` tells it with `gpu_ids: ''`."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")


def streams_are_serialized() -> bool:
    """Whether CUDA was told to use one queue for all streams, so that communication waits for computation."""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


def backends(device_type: str, own: str) -> str:
    """The backends of a process group: gloo for tensors on the CPU (offloaded gradients), and the device's own."""
    return "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:{own}"


def ensure_process_group(
    device_type: str,
    *,
    timeout: timedelta | None = None,
    backend: str | None = None,
    init_method: str | None = None,
) -> None:
    """Have a default process group that communicates by the device's own backend and, between CPUs, by gloo.

    Starts one unless one runs. A group that runs already (of `TrainingArguments`, of the script) keeps its backends and
    its time limit, and is given gloo if it has none (`add_cpu_backend`). The process's own device becomes the current
    one.

    Every rank must call. A process without a launcher becomes a world of 1.
    """
    if not dist.is_initialized():
        is_launched = check_started(os.environ)
        device = _set_device(device_type)
        backend = backend or backends(device_type, dist.get_default_backend_for_device(device))
        timeout = timeout or default_timeout(device_type)
        if is_launched:
            if advice := loopback_advice():
                warnings.warn(advice, stacklevel=frames_of_package())
            dist.init_process_group(backend, init_method=init_method, timeout=timeout)
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not in torch's own list of exports
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    known = _devices.setdefault(dist.group.WORLD, {})
    if device_type in known or dist.get_backend() == "fake":
        return
    known[device_type] = _set_device(device_type)
    add_cpu_backend()


_devices: "WeakKeyDictionary[Any, dict[str, torch.device]]" = WeakKeyDictionary()
"""This process's device of each type, once a process group has been taken up; it does not change afterwards."""


def _set_device(device_type: str) -> torch.device:
    """Make this process's device the current one."""
    device = torch.device("cpu") if device_type == "cpu" else local_device()
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    return device
