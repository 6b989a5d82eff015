"""What a launcher tells its processes in variables: ranks on this machine, devices, and who would train alone."""

import re
from collections.abc import Mapping

from hf_fsdp_tools.errors import MeshError

_LOCAL_RANKS = (
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PMI_LOCAL_RANK",
)
"""A process's rank on its machine: torchrun, srun, Open MPI, MVAPICH2, Intel MPI and MPICH (Hydra), Cray's PMI."""

_LOCAL_SIZES = (
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "PMI_LOCAL_SIZE",
)
"""The number of processes on this machine, of the same launchers; srun has SLURM_STEP_TASKS_PER_NODE."""

_STEPS = {
    "SLURM_STEP_NUM_TASKS": "srun",  # not SLURM_NTASKS, which the shells of salloc and sbatch have too
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "MV2_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpirun",
}
"""Variables that tell a process how many were started with it, and by whom (Slurm, Open MPI, MVAPICH2, MPICH)."""


def world_size(variables: Mapping[str, str]) -> int:
    """The number of processes of the job, as `WORLD_SIZE` says; 1 without it."""
    return int(variables.get("WORLD_SIZE", "1"))


def local_rank(variables: Mapping[str, str]) -> int | None:
    """This process's rank on its machine; None where no variable says it.

    Variables of srun and mpirun count where `RANK` is set: otherwise each process is a world of its own.
    """
    names = _LOCAL_RANKS if "RANK" in variables else _LOCAL_RANKS[:1]
    return next((int(variables[name]) for name in names if variables.get(name, "").isdigit()), None)


def local_size(variables: Mapping[str, str]) -> int:
    """The number of processes on this machine; 1 where no variable says it. See `local_rank`."""
    names = _LOCAL_SIZES if "RANK" in variables else _LOCAL_SIZES[:1]
    if (found := next((variables[name] for name in names if variables.get(name, "").isdigit()), None)) is not None:
        return int(found)
    if "RANK" not in variables:
        return 1
    # As "4(x2),1": four processes on each of the first two machines, one on the third.
    told = re.findall(r"(\d+)(?:\(x(\d+)\))?", variables.get("SLURM_STEP_TASKS_PER_NODE", ""))
    counts = [int(count) for count, times in told for _ in range(int(times or "1"))]
    node = variables.get("SLURM_NODEID", "0")
    return counts[int(node)] if node.isdigit() and int(node) < len(counts) else 1


def device_index(variables: Mapping[str, str], *, count: int, kind: str, current: int = 0) -> int:
    """The index of the device that this process is to use.

    Where one device is visible (srun --gpus-per-task=1, Ray, Kubernetes) that one, whatever the rank; otherwise the
    rank on the machine. Accelerate takes the rank modulo the count, which is the same for all that is not refused here.
    """
    rank = local_rank(variables)
    if count == 1:
        return 0
    if rank is not None and rank >= count:
        raise MeshError(
            f"LOCAL_RANK is {rank}, but this machine has {count} {kind} device(s): every process needs its own. Launch "
            f"at most {count} process(es) on this machine."
        )
    if current or (rank is None and world_size(variables) == 1):
        return current
    if rank is None:
        raise MeshError(
            f"WORLD_SIZE is {world_size(variables)}, {count} {kind} devices are visible, and LOCAL_RANK is not set "
            f"(nor {', '.join(_LOCAL_RANKS[1:])}): all processes of this machine would use device 0. Set LOCAL_RANK "
            "to the process's number on its machine, or start with torchrun or accelerate launch."
        )
    return rank


def check_started(variables: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process as one of a job; False for a process alone."""
    if "RANK" in variables or "WORLD_SIZE" in variables:
        absent = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in variables]
        if absent:
            raise MeshError(f"Not set: {', '.join(absent)}. Start the script with `accelerate launch` or `torchrun`.")
        return True
    for name, launcher in _STEPS.items():
        if (count := variables.get(name, "")).isdigit() and int(count) > 1:
            raise MeshError(
                f"{launcher} has started {count} processes ({name}) and RANK is not set, so that each would train "
                f"alone. Start one process on each node, and let torchrun start the others: {launcher} "
                f"{'--ntasks-per-node=1' if launcher == 'srun' else '--map-by ppr:1:node'} torchrun "
                "--nnodes=NODES --nproc-per-node=GPUS --rdzv-backend=c10d --rdzv-endpoint=FIRST_HOST:29500 script.py. "
                "Or set RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each process."
            )
    return False
