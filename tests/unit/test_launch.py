"""How the process group starts: whom a launcher has started without RANK does not train alone; timeouts are kept."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import InitProcessGroupKwargs
from transformers import Trainer, TrainingArguments

from hf_fsdp_tools import FSDPTrainerMixin, MeshError, make_accelerator
from hf_fsdp_tools.distributed.mesh import ensure_process_group
from tests._checkpoints import make_model

OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture
def launched(monkeypatch):
    """Sets what a launcher sets, and nothing of torchrun's; ends a group that was started."""

    def launch(variables):
        for name in OURS:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    yield launch
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3"}, "srun has started 8 processes .* srun --ntasks-per-node"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, "mpirun has started 2 .* mpirun --map-by ppr:1"),
        ({"PMI_SIZE": "4", "PMI_RANK": "0"}, r"mpirun has started 4 processes \(PMI_SIZE\) and RANK is not set"),
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


def timeout_of_group():
    return dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout


@pytest.fixture
def alone(launched):
    """A process whose Accelerate has no state, before and after."""
    launched({})
    _forget_accelerate()  # of other tests in this process
    yield
    _forget_accelerate()


def _forget_accelerate():
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_the_timeout_that_accelerate_is_asked_for_is_that_of_the_group(alone, recwarn):
    asked = InitProcessGroupKwargs(timeout=timedelta(seconds=15))
    make_accelerator(cpu=True, kwargs_handlers=[asked])
    assert timeout_of_group() == timedelta(seconds=15)
    assert not [one for one in recwarn if "InitProcessGroupKwargs" in str(one.message)]


def test_a_timeout_for_a_group_that_runs_already_is_answered(alone):
    ensure_process_group("cpu")
    with pytest.warns(UserWarning, match=r"InitProcessGroupKwargs\(timeout=0:00:15\) comes too late"):
        make_accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=15))])


def test_the_trainers_ddp_timeout_is_that_of_the_group(alone, tmp_path):
    class OurTrainer(FSDPTrainerMixin, Trainer):
        pass

    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, ddp_timeout=15, report_to=[])
    OurTrainer(model=make_model("llama"), args=args)
    assert timeout_of_group() == timedelta(seconds=15)
