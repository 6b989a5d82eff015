"""Parallel degrees as a value, the device mesh that they make, the process group, and what a launcher says of it."""

import math
import os
import re
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hf_fsdp_tools.accelerator import find_accelerator, nccl_version
from hf_fsdp_tools.axes import AXES, OfAxes, size_names
from hf_fsdp_tools.distributed.cpu_backend import add_cpu_backend, default_timeout, store_of_its_own
from hf_fsdp_tools.errors import MeshError, warn


@dataclass(frozen=True, kw_only=True)
class ParallelDims(OfAxes):
    """The degrees of parallelism, counted in processes; their product is the world size.

        ParallelDims().build_mesh()                        # FSDP over all processes
        ParallelDims(dp_replicate_size=2).build_mesh()     # HSDP: two replicas, each sharded over half of the processes
        ParallelDims(cp_size=2).build_mesh()               # two processes share each row (context parallelism)
        ParallelDims(tp_size=8).build_mesh()               # eight processes share each layer (tensor parallelism)
        ParallelDims(ep_size=8).build_mesh()               # eight processes share the experts (expert parallelism)

    Raises:
        MeshError: a degree is below 1, or `ep_size` is no multiple of `cp_size` x `tp_size`.

    Example:
        >>> ParallelDims(dp_replicate_size=2, tp_size=2).resolve(world_size=16)
        ParallelDims(dp_replicate_size=2, dp_shard_size=4, cp_size=1, tp_size=2, ep_size=1)
        >>> ParallelDims().build_mesh("cpu").mesh_dim_names
        ('dp_shard',)
    """

    dp_replicate_size: int = 1
    """Number of replicas of the model; above 1 this is HSDP."""

    dp_shard_size: int | None = None
    """Processes over which each replica is sharded, apart from the other degrees; None means all that they leave."""

    cp_size: int = 1
    """Number of processes that divide every sequence of a batch among them; a copy is sharded over
    `dp_shard_size` x `cp_size` processes."""

    tp_size: int = 1
    """Number of processes that share each layer, and the rows of a batch: neighbours, best on one machine."""

    ep_size: int = 1
    """Number of neighbouring processes of a copy among which experts are divided: `cp_size` x `tp_size` times a divisor
    of `dp_shard_size`, so that it takes no processes of its own."""

    def __post_init__(self) -> None:
        for name, size in vars(self).items():
            if size is not None and (type(size) is not int or size < 1):
                raise MeshError(f"{name} is {size!r}; it must be a whole number, 1 or more.")
        if self.ep_size > 1 and self.ep_size % self.ranks_per_row:
            shared = " x ".join(f"{name} {getattr(self, name)}" for name in size_names(of_rows=True))
            raise MeshError(
                f"ep_size {self.ep_size} is no multiple of {shared}: ranks with the same rows share the experts too. "
                "Use a multiple, or 1."
            )

    def __str__(self) -> str:
        """The degrees above 1, as a launch file names them."""
        above = [f"{name} {size}" for name, size in vars(self).items() if size not in (1, None)]
        return " x ".join(above) or ("all processes" if self.dp_shard_size is None else "one process")

    def resolve(self, world_size: int) -> "ParallelDims":
        """The same degrees with `dp_shard_size` filled in for `world_size` processes.

        Raises:
            MeshError: the degrees do not multiply to the world size.
        """
        others = self.num_copies * self.ranks_per_row
        dp_shard_size = self.dp_shard_size or world_size // others
        if others * dp_shard_size != world_size:
            further = self._times({*size_names("copy"), *size_names(of_rows=True)} - {"dp_replicate_size"})
            raise MeshError(
                f"dp_replicate_size {self.dp_replicate_size} x dp_shard_size {self.dp_shard_size or 'auto'}{further} "
                f"does not make the {world_size} processes of this job. Choose degrees whose product is {world_size}."
            )
        if dp_shard_size * self.ranks_per_row % self.ep_size:
            raise MeshError(
                f"ep_size {self.ep_size} does not divide the {dp_shard_size * self.ranks_per_row} processes of a copy "
                f"(dp_shard_size {dp_shard_size}{self._times(size_names(of_rows=True))}). Use a divisor."
            )
        return replace(self, dp_shard_size=dp_shard_size)

    def _times(self, names: Collection[str]) -> str:
        return "".join(f" x {name} {size}" for name, size in vars(self).items() if name in names and size > 1)

    def build_mesh(self, device_type: str | None = None) -> DeviceMesh:
        """Make the device mesh, with those of the axes `("dp_replicate", "dp_shard", "cp", "tp")` that are above 1, and
        those of other rows of `axes.AXES`, in their order.

        `dp_shard` is always there. With `ep_size` it is two axes, `"dp_shard_mod_ep"` and `"dp_shard_in_ep"`, of which
        the second is a part of the group that shares experts, with all of `cp` and `tp`; `tp` is there then too.

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
        if (in_ep := dims.ep_size // dims.ranks_per_row) and dims.ep_size > 1:
            shards = {"dp_shard_mod_ep": dims.dp_shard_size // in_ep, "dp_shard_in_ep": in_ep}
        else:
            shards = {"dp_shard": dims.dp_shard_size}
        copies = {axis.name: getattr(dims, axis.size) for axis in AXES if axis.weights == "copy"}
        degrees = copies | shards | {axis.name: getattr(dims, axis.size) for axis in AXES if axis.has_same_rows}
        needed = {*shards, "tp"} if dims.ep_size > 1 else {*shards}
        degrees = {name: size for name, size in degrees.items() if size > 1 or name in needed}
        mesh = init_device_mesh(device_type, tuple(degrees.values()), mesh_dim_names=tuple(degrees))
        for group in mesh.get_all_groups() if device_type == "cpu" else ():
            add_cpu_backend(group)
        return mesh


def dims_of(config: Any, ep_size: int = 1) -> ParallelDims:
    """The degrees of Accelerate's `ParallelismConfig`, which has none for experts, or of transformers'
    `DistributedConfig`."""
    # No size means the rest of the processes in transformers' config, and one in Accelerate's.
    shards = config.dp_shard_size or 1 if hasattr(config, "dp_shard_size") else getattr(config, "fsdp_size", None)
    found = {name: getattr(config, name, None) for name in size_names()}
    degrees = {name: size for name, size in found.items() if size is not None}
    return ParallelDims(dp_shard_size=shards, **{"ep_size": ep_size, **degrees})


def mesh_of(accelerator: Any) -> DeviceMesh:
    """The mesh of an Accelerator's parallelism config and its plugin's `ep_size`; without them, FSDP over all
    processes. Every rank must call."""
    config = accelerator.parallelism_config
    ep_size = getattr(accelerator.state.fsdp_plugin, "ep_size", 1)
    if config is None or ep_size > 1 or config.tp_size > 1:  # Accelerate's mesh has no axis of size 1
        dims = ParallelDims(ep_size=ep_size) if config is None else dims_of(config, ep_size)
        return dims.build_mesh(accelerator.device.type)
    mesh: DeviceMesh = accelerator.torch_device_mesh
    return mesh if config.cp_size > 1 else mesh[tuple(config.fsdp_dim_names)]


_sharing: "WeakKeyDictionary[Any, int]" = WeakKeyDictionary()


def set_model_parallel_size(number: int) -> None:
    """Record how many neighbouring ranks get the same rows in this process group."""
    _sharing[dist.group.WORLD] = number


def ranks_per_row() -> int:
    """How many ranks share each row, as an Accelerator's parallelism config says; 1 without one."""
    return _sharing.get(dist.group.WORLD, 1) if dist.is_initialized() else 1


_COPIES = ("replicate",)
"""Other names of an axis of copies: that of torch's documents."""
_SHARDS = ("dp_shard", "shard", "fsdp", "dp_shard_cp", "dp_shard_mod_ep", "dp_shard_in_ep")
"""Names of axes over which weights are sharded."""


@dataclass(frozen=True, kw_only=True)
class Axes:
    """What the axes of a mesh are for; all of these are parts of one mesh."""

    shards: DeviceMesh
    """The ranks over which weights are sharded: one axis, or (replicate, shard)."""
    groups: Mapping[str, DeviceMesh] = field(default_factory=dict)
    """The ranks of further axes, by their names in `AXES`. With "ep" there is "tp", maybe of this rank alone."""
    copies: Mapping[str, int] = field(default_factory=dict, compare=False)
    """The sizes of several axes of copies, which are one of `shards`."""
    expert_shards: DeviceMesh | None = None
    """The ranks over which the weights of the same experts are sharded: as `shards`, with fewer ranks."""

    def sharing(self, *, of_rows: bool) -> list[DeviceMesh]:
        """The groups of more than one rank with the same rows: all, or those whose ranks have parts of weights."""
        kinds = {"shard", "divide"} if of_rows else {"divide"}
        names = [axis.name for axis in AXES if axis.has_same_rows and axis.weights in kinds]
        return [group for name in names if (group := self.groups.get(name)) is not None and group.size() > 1]

    @property
    def dims(self) -> ParallelDims:
        """The degrees of these axes."""
        degrees = {f"{name}_size": group.size() for name, group in self.groups.items()}
        inside = math.prod(degrees.get(axis.size, 1) for axis in AXES if axis.weights == "shard")
        shards = self.shards.shape[-1] // inside
        copies = {f"{name}_size": size for name, size in self.copies.items()}
        if self.shards.ndim > 1 and not copies:
            named = f"{(self.shards.mesh_dim_names or ('',))[0]}_size"
            copies = {named if named in size_names("copy") else "dp_replicate_size": self.shards.size(0)}
        return ParallelDims(dp_shard_size=shards, **copies | degrees)

    def process_groups(self) -> list[dist.ProcessGroup]:
        """The process groups of all axes."""
        meshes = (self.shards, *self.groups.values(), self.expert_shards)
        return [group for mesh in meshes if mesh is not None for group in mesh.get_all_groups()]


def axes_of(mesh: DeviceMesh) -> Axes:
    """The parts of a mesh by their use. A mesh without `cp`, `tp` and `ep` is all of shards. Every rank must call.

    Raises:
        MeshError: the names of the axes do not say which of them are copies and which are shards.
    """
    names = mesh.mesh_dim_names or ()
    copying = {*_COPIES, *(axis.name for axis in AXES if axis.weights == "copy")}
    shared = [axis.name for axis in AXES if axis.has_same_rows]
    known = {*copying, *_SHARDS, *shared} if mesh.ndim > 1 else {*names} - {"tp", "ep", "pp"}
    is_ordered = len(names) < 2 or names[0] in copying or {*names[1:]} <= {*shared, "dp_shard_in_ep"}
    if {*names} - known or not is_ordered:
        raise MeshError(
            f"The axes of the mesh are named {names}, which does not say what each is for. Make it by "
            "ParallelDims(…).build_mesh(), or name the axes in the order (dp_replicate, dp_shard, cp, tp)."
        )
    copies = [name for name in names if name in copying]
    if not {*shared, "dp_shard_in_ep"} & set(names) and len(copies) < 2:
        return Axes(shards=mesh)

    def part(chosen: Sequence[str], flat: str) -> DeviceMesh:
        found = tuple(name for name in names if name in chosen)
        return mesh[found] if len(found) == 1 else mesh[found]._flatten(flat)

    def with_copies(inner: DeviceMesh) -> DeviceMesh:  # FSDP2 takes parts of one mesh for one tensor
        return DeviceMesh._concatenate([part(copies, "copies"), inner]) if copies else inner

    inside = [axis.name for axis in AXES if axis.weights == "shard"]
    groups, has_experts = {name: mesh[name] for name in shared if name in names}, "dp_shard_in_ep" in names
    return Axes(
        shards=with_copies(part((*_SHARDS, *inside), "dp_shard_cp")),
        copies={name: mesh[name].size() for name in copies if len(copies) > 1},
        groups=groups | ({"ep": part(("dp_shard_in_ep", *shared), "ep")} if has_experts else {}),
        expert_shards=with_copies(mesh["dp_shard_mod_ep"]) if has_experts else None,
    )


def local_device() -> torch.device:
    """The device of this process, or the CPU on a machine without an accelerator: the one to which the script has bound
    the process group (`init_process_group(device_id=…)`), otherwise that of `device_index`."""
    accelerator = find_accelerator()
    if accelerator is None:
        return torch.device("cpu")
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    bound = None if group is None else group.bound_device_id
    if bound is not None and bound.type == accelerator.type:
        return torch.device(bound)
    count, current = torch.accelerator.device_count(), torch.accelerator.current_device_index()
    index = device_index(os.environ, count=count, kind=accelerator.type, current=current)
    return torch.device(accelerator.type, index)


def rank_on_node(variables: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """(rank, number of processes) on this machine, as the launcher says; (0, 1) without a launcher."""
    return local_rank(variables) or 0, _first_number(_LOCAL_SIZES, variables) or 1


def gpus_are_hidden() -> bool:
    """Whether this process is set to leave GPUs alone, as `accelerate launch` tells it with `gpu_ids: ''`."""
    return os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")


def streams_are_serialized() -> bool:
    """Whether CUDA is set to use one queue for all streams, so that communication waits for computation."""
    return os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


def pinned_bytes(num_bytes: int, variables: Mapping[str, str] = os.environ) -> int:
    """What PyTorch takes for pinned memory of so many bytes: the next power of two, or as many above the MiB of
    `pinned_max_round_threshold_mb` in PYTORCH_ALLOC_CONF."""
    settings = variables.get("PYTORCH_ALLOC_CONF", variables.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    threshold = re.search(r"pinned_max_round_threshold_mb:\s*(\d+)", settings)
    if not num_bytes or (threshold and num_bytes > int(threshold[1]) * 2**20):
        return num_bytes
    return 1 << (num_bytes - 1).bit_length()


def ensure_process_group(
    device_type: str,
    *,
    timeout: timedelta | None = None,
    backend: str | None = None,
    init_method: str | None = None,
) -> None:
    """Have a default process group that communicates by the device's own backend and, between CPUs, by gloo.

    A group that runs already (of `TrainingArguments`, of the script) keeps its backends and its time limit, and is
    given gloo (`add_cpu_backend`). The process's own device becomes the current one.

    Every rank must call. A process without a launcher becomes a world of 1.
    """
    if not dist.is_initialized():
        is_launched = check_started(os.environ)
        device = _set_device(device_type)
        if backend is None:
            own = dist.get_default_backend_for_device(device)
            backend = "gloo" if device_type == "cpu" else f"cpu:gloo,{device_type}:{own}"
        timeout = timeout or default_timeout(device_type)
        if is_launched:
            if advice := loopback_advice():
                warn(advice)
            dist.init_process_group(backend, init_method=init_method, timeout=timeout)
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not in torch's own list of exports
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    if dist.get_backend() != "fake":
        check_sharing(_set_device(device_type))
        add_cpu_backend()


def _set_device(device_type: str) -> torch.device:
    """Make this process's device the current one."""
    device = torch.device("cpu") if device_type == "cpu" else local_device()
    if device.type != "cpu":
        torch.accelerator.set_device_index(device.index)
    return device


def check_sharing(device: torch.device) -> None:
    """Refuse ranks of one GPU, on all of them, where NCCL would, which goes by the UUID too. Every rank must call."""
    ranks = rank_on_node()[1]
    if device.type != "cuda" or torch.accelerator.device_count() >= ranks or not (problem := sharing_problem()):
        return
    store = store_of_its_own(dist.distributed_c10d._get_default_store(), f"GPUs of {socket.gethostname()}", ranks)
    store.add(own := f"{torch.cuda.get_device_properties(device).uuid}", 1)
    if store.add("here", 1) == ranks:
        store.set("all", "")
    store.wait(["all"])
    if (count := store.add(own, 0)) > 1:
        raise MeshError(f"{count} processes of this machine use the same GPU: {problem}")


def sharing_problem(variables: Mapping[str, str] = os.environ) -> str:
    """Why ranks cannot share a GPU, and what to do; "" where they can (source: NCCL's `src/init.cc`)."""
    found = nccl_version()
    if found >= (2, 30) and variables.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return ""
    lacks = f"NCCL is {'.'.join(map(str, found)) or 'absent'}" if found < (2, 30) else "the variable is not set"
    needed = "ranks share one only by NCCL 2.30 or newer with NCCL_MULTI_RANK_GPU_ENABLE=1, for tests, slowly"
    return f"{needed}; {lacks} here. Launch at most one process for each GPU."


def loopback_advice() -> str:
    """What to set where the machine's name, whose address gloo tells other machines, leads to the machine itself, as
    Debian and its descendants write it into `/etc/hosts`; "" on one machine and where `GLOO_SOCKET_IFNAME` is set."""
    if world_size(os.environ) <= rank_on_node()[1] or os.environ.get("GLOO_SOCKET_IFNAME"):
        return ""
    try:
        places = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        addresses = [str(address[0]) for *_, address in places]
    except OSError:  # gloo falls back to the loopback where the name does not resolve
        addresses = ["::1"]
    if not all(address == "::1" or address.startswith("127.") for address in addresses):
        return ""
    return (
        f"The host name {socket.gethostname()} resolves to {addresses[0]}, at which gloo does not reach the processes "
        "of other machines. Set GLOO_SOCKET_IFNAME to the interface between the machines (see `ip address`)."
    )


# ---- what a launcher's variables say ----

# Variables of torchrun, srun, Open MPI, Intel MPI and MPICH; srun's size is "4(x2)", on each of two machines.
_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")

_STEPS = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpirun"}
"""Variables that tell a process how many were started with it, and by which launcher. Not SLURM_NTASKS, which the
shells of salloc and sbatch have too."""


def world_size(variables: Mapping[str, str]) -> int:
    """The number of processes of the job, as `WORLD_SIZE` says; 1 without it."""
    return int(variables.get("WORLD_SIZE", "1"))


def local_rank(variables: Mapping[str, str]) -> int | None:
    """This process's rank on its machine; None where no variable says it, as where each process is a world of its own:
    those of srun and mpirun count where `RANK` is set."""
    return _first_number(_LOCAL_RANKS, variables)


def _first_number(names: tuple[str, ...], variables: Mapping[str, str]) -> int | None:
    values = (variables.get(name, "") for name in (names if "RANK" in variables else names[:1]))
    return next((int(number[0]) for value in values if (number := re.match(r"\d+", value))), None)


def device_index(variables: Mapping[str, str], *, count: int, kind: str, current: int = 0) -> int:
    """The index of the device that this process is to use: where one is visible (srun --gpus-per-task=1, Ray,
    Kubernetes) that one; otherwise the rank on the machine, as in Accelerate."""
    rank = local_rank(variables)
    if count == 1:
        return 0
    if rank is not None and rank >= count:
        cure = sharing_problem(variables) if kind == "cuda" else f"launch at most {count} process(es) on this machine."
        if not cure:
            return rank % count
        raise MeshError(f"LOCAL_RANK is {rank}, but this machine has {count} {kind} device(s): {cure}")
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
