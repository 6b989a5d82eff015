"""How the process group starts: whom a launcher has started without RANK does not train alone, each process finds its
device and its network, timeouts are kept."""

import ctypes
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import InitProcessGroupKwargs

from hf_fsdp_tools import make_accelerator
from hf_fsdp_tools.distributed.mesh import device_index, ensure_process_group, local_rank, rank_on_node
from hf_fsdp_tools.errors import MeshError
from tests.api import check_environment

OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def launched(monkeypatch):

    def launch(variables):
        for name in OURS:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return launch


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"}, "srun has started 8 processes .* srun --ntasks-per-node"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, "mpirun has started 2 .* mpirun --map-by ppr:1"),
    ],
)
def test_many_processes_without_a_rank_are_told_how_to_start(launched, variables, said):
    launched(variables)
    with pytest.raises(MeshError, match=said + ".* torchrun --nnodes"):
        ensure_process_group("cpu")
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_NTASKS": "8", "SLURM_NPROCS": "8", "SLURM_JOB_ID": "7"},  # the shell of salloc
        {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},  # its interactive step
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},  # a script of sbatch
        {"OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_a_process_of_its_own_is_a_world_of_one(launched, variables):
    launched(variables)
    ensure_process_group("cpu")
    assert dist.get_world_size() == 1


@pytest.fixture
def alone(launched):
    launched({})


@pytest.mark.parametrize("is_running", [False, True])
def test_the_timeout_that_accelerate_is_asked_for_is_that_of_the_group(alone, recwarn, is_running):
    if is_running:
        ensure_process_group("cpu")
    make_accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=15))])
    assert dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=15)
    assert is_running or not [one for one in recwarn if "InitProcessGroupKwargs" in str(one.message)]


FLAT = {"RANK": "3", "WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("variables", "rank", "size"),
    [
        ({}, None, 1),
        ({"SLURM_LOCALID": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}, None, 1),  # without RANK: a world of its own
        ({**FLAT, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "SLURM_LOCALID": "0"}, 1, 2),  # torchrun within srun
        ({**FLAT, "SLURM_LOCALID": "3", "SLURM_STEP_TASKS_PER_NODE": "4"}, 3, 4),
        ({**FLAT, "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, 0, 2),
        ({**FLAT, "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 1, 2),
        (FLAT, None, 1),
    ],
)
def test_every_launcher_tells_the_rank_on_the_machine(variables, rank, size):
    assert (local_rank(variables), rank_on_node(variables)[1]) == (rank, size)


@pytest.mark.parametrize(
    ("variables", "count", "current", "index"),
    [
        ({**FLAT, "LOCAL_RANK": "3"}, 4, 0, 3),
        ({**FLAT, "LOCAL_RANK": "3"}, 1, 0, 0),  # one visible to each process
        (FLAT, 1, 0, 0),
        ({}, 8, 5, 5),  # alone, on the device that the script has chosen
        ({**FLAT, "LOCAL_RANK": "3"}, 8, 5, 5),
    ],
)
def test_the_device_of_a_process(variables, count, current, index):
    assert device_index(variables, count=count, kind="cuda", current=current) == index
    if "LOCAL_RANK" in variables and not current:
        assert index == int(variables["LOCAL_RANK"]) % count, "what Accelerate takes"


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({**FLAT, "LOCAL_RANK": "3"}, "LOCAL_RANK is 3, but this machine has 2 cuda device"),
        (FLAT, "WORLD_SIZE is 4, 2 cuda devices are visible, and LOCAL_RANK is not set.* torchrun"),
    ],
)
def test_a_process_without_a_device_of_its_own_is_refused(variables, said):
    with pytest.raises(MeshError, match=said):
        device_index(variables, count=2, kind="cuda")


SHARED = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}


@pytest.mark.parametrize(
    ("version", "variables", "said"),
    [
        ((2, 31, 2), SHARED, ""),
        ((2, 31, 2), {}, "NCCL_MULTI_RANK_GPU_ENABLE=1.*; the variable is not set here"),
        ((2, 28, 9), SHARED, "NCCL 2.30 or newer.*; NCCL is 2.28.9 here"),
        ((), SHARED, "NCCL is absent"),
    ],
)
def test_ranks_share_a_gpu_where_nccl_lets_them(monkeypatch, version, variables, said):
    """As the loaded library says its version, also one that is preloaded for a torch compiled with another."""

    def loaded(name):
        if not version or name is not None:
            raise OSError(name)
        number = version[0] * 10000 + version[1] * 100 + version[2]
        return SimpleNamespace(ncclGetVersion=lambda to: setattr(to._obj, "value", number))

    monkeypatch.setattr(ctypes, "CDLL", loaded)
    variables = {**FLAT, **variables, "LOCAL_RANK": "3"}
    with pytest.raises(MeshError, match=f"this machine has 2 cuda.*{said}") if said else nullcontext():
        assert device_index(variables, count=2, kind="cuda") == 1
    with pytest.raises(MeshError, match="launch at most 2 process"):
        device_index(variables, count=2, kind="xpu")


@pytest.fixture
def two_machines(monkeypatch):
    """This process as one of two machines, whose name is known to the loopback alone."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("127.0.1.1", 0))])
    return monkeypatch


def test_a_host_name_of_the_loopback_is_warned_of(two_machines):
    (finding,) = [one for one in check_environment().findings if one.code == "loopback"]
    assert "resolves to 127.0.1.1" in finding.problem and "GLOO_SOCKET_IFNAME" in finding.fix
    two_machines.setattr(dist, "init_process_group", Mock(side_effect=KeyboardInterrupt))
    two_machines.setenv("MASTER_ADDR", "10.0.0.1")
    two_machines.setenv("MASTER_PORT", "29500")
    with pytest.warns(UserWarning, match=r"resolves to 127.* Set GLOO_SOCKET"), pytest.raises(KeyboardInterrupt):
        ensure_process_group("cpu")
