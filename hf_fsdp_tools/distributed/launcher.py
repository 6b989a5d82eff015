"""A launcher's variables: the rank on this machine, the device of a process, and processes that would train alone."""

import re
from collections.abc import Mapping

from hf_fsdp_tools.errors import MeshError

_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
"""A process's rank on its machine: torchrun, srun, Open MPI, Intel MPI and MPICH."""

_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
"""The number of processes on this machine, of the same launchers; srun's is "4(x2)", on each of two machines."""

_STEPS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpirun"}
"""Variables that tell a process how many were started with it, and by which launcher. Not SLURM_NTASKS, which the
shells of salloc and sbatch have too."""


def world_size(variables: Mapping[str, str]) -> int:
    """The number of processes of the job, as `WORLD_SIZE` says; 1 without it."""
    return int(variables.get("WORLD_SIZE", "1"))


def local_rank(variables: Mapping[str, str]) -> int | None:
    """This process's rank on its machine; None where no variable says it.

    Variables of srun and mpirun count where `RANK` is set: otherwise each process is a world of its own.
    """
    return _first_number(_LOCAL_RANKS, variables)


def local_size(variables: Mapping[str, str]) -> int:
    """The number of processes on this machine; 1 where no variable says it. See `local_rank`."""
    return _first_number(_LOCAL_SIZES, variables) or 1


def _first_number(names: tuple[str, ...], variables: Mapping[str, str]) -> int | None:
    values = (variables.get(name, "") for name in (names if "RANK" in variables else names[:1]))
    return next((int(number[0]) for value in values if (number := re.match(r"\d+", value))), None)


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
            f"WORLD_SIZE is {world_size(variables)}, {count} {kind} devices are visible, and LOCAL_RANK is not set: "
            "all processes of this machine would use device 0. Set LOCAL_RANK to the process's number on its machine, "
            "or start with torchrun or accelerate launch."
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
