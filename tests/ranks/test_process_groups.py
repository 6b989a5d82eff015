"""A process group that has no backend for CPUs, as `TrainingArguments` starts on GPUs, is given one; waiting for a rank
that is busy uses no backend at all."""

import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg  # noqa: F401  (registers the backend "fake")

from hf_fsdp_tools import (
    ConfigError,
    ParallelDims,
    RanksError,
    from_pretrained,
    make_accelerator,
    rank_timeout,
    save_pretrained,
)
from hf_fsdp_tools.distributed.cpu_backend import add_cpu_backend, has_cpu_backend
from hf_fsdp_tools.distributed.mesh import check_sharing
from hf_fsdp_tools.errors import MeshError
from tests._dist import needs_gpus, run_cases, run_ranks
from tests._training import ShardedTrainer, arguments, batches_of, make_rows, train
from tests.api import gather_to_first, local_device, timeout_of, wait_for_all_ranks

SECONDS = timedelta(seconds=77)


def _threads_of(group: Any) -> tuple[int, timedelta]:
    options = group._get_backend(torch.device("cpu")).options
    return options._threads, options._timeout


def _groups_of_gloo(model: Path) -> None:
    assert _threads_of(ParallelDims(dp_replicate_size=2).build_mesh("cpu").get_group("dp_shard"))[0] == 1
    with patch.dict(os.environ, {"GLOO_SOCKET_IFNAME": "absent0"}), pytest.raises(RuntimeError, match="absent0"):
        add_cpu_backend(dist.new_group(backend="cuda:fake"))
    of_script = dist.new_group(timeout=SECONDS)
    assert _threads_of(of_script)[0] == 2, "torch's own, and the reason for all this"
    add_cpu_backend(of_script)
    _check_adopted(of_script)
    # A script that starts the group, and TrainingArguments, which come first.
    wait_for_all_ranks()
    rank, store = dist.get_rank(), dist.PrefixStore("again", dist.distributed_c10d._get_default_store())
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=SECONDS)
    assert _threads_of(dist.group.WORLD)[0] == 2
    from_pretrained(model)
    _check_adopted(dist.group.WORLD)


def _check_adopted(group: Any) -> None:
    assert (*_threads_of(group), timeout_of(group)) == (1, SECONDS, SECONDS)
    with patch("hf_fsdp_tools.distributed.cpu_backend._connected") as connect:
        add_cpu_backend(group)
    connect.assert_not_called()  # a second gloo would close while other members still connect to it
    assert dist.get_backend(group) == "gloo"
    count = torch.ones(1)
    dist.all_reduce(count, group=group)
    assert count.item() == 2
    dist.distributed_c10d._set_pg_timeout(2 * SECONDS, group)
    assert timeout_of(group) == 2 * SECONDS


def test_collectives_of_gloo_run_on_one_thread(folders: dict[str, Path]) -> None:
    """Torch's two corrupt the memory of a process in which two gathers of DTensors end together."""
    run_ranks(_groups_of_gloo, 2, folders["llama"])


def _given_a_backend(model: Path, out: Path) -> list[float]:
    on_cpu = local_device().type == "cpu"
    rank, size = dist.get_rank(), dist.get_world_size()
    wait_for_all_ranks()  # so that nothing is under way
    dist.destroy_process_group()
    backend = "cuda:gloo" if on_cpu else "nccl"  # the first: gloo for a kind of device that is not there
    store = dist.FileStore(str(out / "other store"), size)
    bound = local_device() if backend == "nccl" else None  # to a GPU, as torch advises
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=SECONDS, device_id=bound)
    name = dist.group.WORLD.group_name
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1))
    accelerator = make_accelerator(cpu=on_cpu)
    count = torch.ones(1)
    dist.all_reduce(count)
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, rank)
    assert (count.item(), everyone) == (size, list(range(size)))
    assert dist.group.WORLD.group_name == name, "meshes find their group by its name"
    assert timeout_of() == SECONDS, "a group that was there keeps its time limit"
    other = "cuda:fake" if on_cpu else "nccl"  # the first sends nothing; gloo is started beside it
    part = dist.new_group(list(range(size)), backend=other)  # as that of a mesh's axis
    assert not has_cpu_backend(part)
    for _ in range(2):  # nothing happens the second time
        add_cpu_backend(part)
    dist.all_reduce(count, group=part)
    assert count.item() == size * size
    sharded = from_pretrained(model, accelerator=accelerator)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    sharded, optimizer = accelerator.prepare(sharded.train(), optimizer)
    losses = train(sharded, optimizer, batches_of(make_rows(4), 2), accelerator=accelerator, clip=0.5)
    save_pretrained(sharded, out / "saved")
    whole = gather_to_first(next(sharded.parameters()), staging_bytes=1000)
    assert (whole is None) == (rank > 0)
    if size > 1:
        _waiting(accelerator, rank, out / "done")
    return losses


def _waiting(accelerator: Any, rank: int, done: Path) -> None:
    """With all collectives forbidden; rank 0 is busy."""
    refused = patch.multiple(dist, barrier=None, all_reduce=None, all_gather_object=None, broadcast_object_list=None)
    with refused:
        time.sleep(1 if rank == 0 else 0)
        accelerator.wait_for_everyone()
        with accelerator.main_process_first():
            time.sleep(0.2 if rank == 0 else 0)
            assert done.exists() == (rank > 0), "rank 1 begins once rank 0 is through"
            done.touch()
        # What fails on the first rank stops the others, which would wait for the group's time limit.
        with pytest.raises(ConfigError, match="no room"), accelerator.main_process_first():
            assert rank == 0, "not begun"
            raise ConfigError("no room")


@pytest.mark.parametrize(
    ("device", "ranks"),
    [
        pytest.param("cpu", 2, id="cpu"),
        *(pytest.param("cuda", count, id=f"{count} on GPUs", marks=needs_gpus(count)) for count in (1, 2, 4)),
    ],
)
def test_a_group_without_a_backend_for_cpus_is_given_one(
    device: Any, ranks: int, folders: dict[str, Path], tmp_path: Path
) -> None:
    of_ranks = run_ranks(_given_a_backend, ranks, folders["llama"], tmp_path, device=device)
    assert of_ranks == of_ranks[:1] * ranks and of_ranks[0][-1] < of_ranks[0][0]
    assert (tmp_path / "saved" / "config.json").is_file()


def _on_gpus(uuids: list[str]) -> None:
    """Each rank sees one GPU, with one of these UUIDs."""
    found = SimpleNamespace(uuid=uuids[dist.get_rank()])
    seen = patch.object(torch.cuda, "get_device_properties", return_value=found)
    not_set = patch.dict(os.environ, NCCL_MULTI_RANK_GPU_ENABLE="")
    with seen, not_set, patch.object(torch.accelerator, "device_count", return_value=1):
        check_sharing(torch.device("cuda", 0))


def _on_the_same_gpu() -> None:
    with pytest.raises(MeshError, match="2 processes of this machine use the same GPU: ranks share one only by NCCL"):
        _on_gpus(["a", "a"])
    _on_gpus(["a", "b"])


def test_ranks_that_share_a_gpu_are_refused_on_all_of_them() -> None:
    run_ranks(_on_the_same_gpu, 2, device="cpu")


# ---- what rank 0 does alone ----

IDS = torch.arange(3, 11)[None]


def refused(call: Callable[[], object]) -> str:
    """The message with which rank 0's call and what the others do instead end, the same on both ranks."""
    accelerator = make_accelerator()
    with pytest.raises(RanksError) as caught:
        call() if dist.get_rank() == 0 else accelerator.wait_for_everyone()
    return str(caught.value)


def rank_0_alone_saves(folder: Path) -> None:
    model = from_pretrained(folder)
    for save in (partial(save_pretrained, model), model.save_pretrained):
        message = refused(partial(save, folder.with_name("saved")))
        assert "rank 0 is saving the model, rank 1 is waiting for every rank" in message


def rank_0_alone_calls(folder: Path) -> None:
    """When it generates, whether the weights fit is compared first, so that both ranks learn of it at once."""
    trainer = ShardedTrainer(from_pretrained(folder), arguments(folder / "out"), eval_dataset=make_rows(4))
    model, state = make_accelerator().prepare(from_pretrained(folder)), str(folder.with_name("state"))
    for call, doing in (
        (lambda: make_accelerator().get_state_dict(model), "gathering the state dict"),
        (trainer.evaluate, "evaluating"),
        (lambda: trainer.accelerator.save_state(state), "saving the state"),
        (lambda: model.generate(IDS), "generating"),
    ):
        assert f"rank 0 is {doing}, rank 1 is waiting for every rank" in refused(call)


def rank_0_alone_runs_forward(folder: Path) -> None:
    """It waits in a collective for rank 1, which is told that it may, and comes after all."""
    accelerator = make_accelerator()
    model = from_pretrained(folder)
    said = "rank 0 is in no call of hf_fsdp_tools; every rank must call, and run each forward pass .*generate"
    if dist.get_rank() == 1:
        with rank_timeout(1), pytest.raises(RanksError, match=said):
            accelerator.wait_for_everyone()
    model(IDS)
    if dist.get_rank() == 0:
        with pytest.raises(RanksError, match=said):
            accelerator.wait_for_everyone()


def test_what_rank_0_does_alone_is_named_on_all_ranks(folders: dict[str, Path], tmp_path: Path) -> None:
    copytree(folders["llama"], tmp_path / "llama")  # a run writes into it
    run_ranks(run_cases, 2, (rank_0_alone_saves, rank_0_alone_calls, rank_0_alone_runs_forward), tmp_path / "llama")
