"""Parallel degrees as a value, the device mesh that they make, and the process group."""

import os
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hf_fsdp_tools.accelerator import find_accelerator
from hf_fsdp_tools.errors import MeshError

__all__ = ["ParallelDims", "backends", "ensure_process_group", "local_device", "rank_on_node"]


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """The degrees of data parallelism, counted in processes; their product is the world size.

        ParallelDims().build_mesh()                        # FSDP over all processes
        ParallelDims(dp_replicate_size=2).build_mesh()     # HSDP: two replicas, each sharded over half of the processes

    Raises:
        MeshError: a degree is below 1.
    """

    dp_replicate_size: int = 1
    """Number of copies of the model; above 1 this is HSDP."""

    dp_shard_size: int | None = None
    """Number of processes over which each copy is sharded; None means the world size over `dp_replicate_size`."""

    def __post_init__(self) -> None:
        for name, size in (("dp_replicate_size", self.dp_replicate_size), ("dp_shard_size", self.dp_shard_size)):
            if size is not None and size < 1:
                raise MeshError(f"{name} is {size}; it must be 1 or more.")

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
        if dims.dp_replicate_size == 1:
            return init_device_mesh(device_type, (dims.dp_shard_size,), mesh_dim_names=("dp_shard",))
        shape = (dims.dp_replicate_size, dims.dp_shard_size)
        return init_device_mesh(device_type, shape, mesh_dim_names=("dp_replicate", "dp_shard"))


def local_device() -> torch.device:
    """The device of this process: the accelerator with the index LOCAL_RANK, or the CPU on a machine without one."""
    accelerator = find_accelerator()
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, int(os.environ.get("LOCAL_RANK", "0")))


def rank_on_node() -> tuple[int, int]:
    """(rank, number of processes) on this machine, as the launcher says; (0, 1) without a launcher."""
    return int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


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
    """Start the default process group unless one runs: gloo for the CPU, otherwise the device's own backend and gloo.

    Args:
        device_type: "cpu", or that of this machine's accelerator.
        timeout: of each collective; None is torch's own (30 minutes for gloo, 10 for NCCL).
        backend: None means as above.
        init_method: as for `torch.distributed.init_process_group`; None reads the launcher's variables.

    Every rank must call. A process without a launcher becomes a world of 1.

    Raises:
        MeshError: this process has no device of its own, variables of the launcher are absent, or `srun` or `mpirun`
            started several processes that would each train alone.
    """
    if dist.is_initialized():
        return
    device = torch.device("cpu") if device_type == "cpu" else local_device()
    if device.type != "cpu":
        count = torch.accelerator.device_count()
        if device.index >= count:
            raise MeshError(
                f"LOCAL_RANK is {device.index}, but this machine has {count} {device.type} device(s): every process "
                f"needs its own. Launch at most {count} process(es) on this machine."
            )
        torch.accelerator.set_device_index(device.index)
    own = dist.get_default_backend_for_device(device)
    backend = backend or backends(device.type, own)
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        _refuse_many_alone()
        store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not in torch's own list of exports
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        return
    absent = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if absent:
        raise MeshError(f"Not set: {', '.join(absent)}. Start the script with `accelerate launch` or `torchrun`.")
    dist.init_process_group(backend, init_method=init_method, timeout=timeout)


_STEPS = {
    "SLURM_STEP_NUM_TASKS": "srun",  # not SLURM_NTASKS, which the shells of salloc and sbatch have too
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "MV2_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpirun",
}
"""Variables that tell a process how many were started with it, and by whom (Slurm, Open MPI, MVAPICH2, MPICH)."""


def _refuse_many_alone() -> None:
    """Refuse to be a world of 1 where a launcher that sets no RANK has started more processes than this one."""
    for name, launcher in _STEPS.items():
        if (count := os.environ.get(name, "")).isdigit() and int(count) > 1:
            raise MeshError(
                f"{launcher} has started {count} processes ({name}) and RANK is not set, so that each would train "
                f"alone. Start one process on each node, and let torchrun start the others: {launcher} "
                f"{'--ntasks-per-node=1' if launcher == 'srun' else '--map-by ppr:1:node'} torchrun "
                "--nnodes=NODES --nproc-per-node=GPUS --rdzv-backend=c10d --rdzv-endpoint=FIRST_HOST:29500 script.py. "
                "Or set RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process."
            )
