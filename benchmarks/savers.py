"""Every saver that is compared, its time on one rank, what it writes and takes, and whether its files are right."""

import gc
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin, merge_fsdp_weights
from accelerate.utils.fsdp_utils import save_fsdp_model
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save as save_state
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

import hf_fsdp_tools
from benchmarks.loading.loaders import Job as Load
from benchmarks.loading.loaders import load_ours, reference, synchronize
from benchmarks.measuring import LIMIT, OURS, Figures, begin, end_without_memory, share_cores, usage
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.loading.io.files import REQUESTS_IN_FLIGHT
from hf_fsdp_tools.text import dtype_name

STORED = torch.bfloat16
"""Dtype of the files."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One save, the same on every rank."""

    load: Load  # The checkpoint from which the model comes, the dtype of its parameters, where its shards are
    target: Path  # The folder to save to
    file_bytes: int  # Largest weight file, so that there are as many as the checkpoint has


_PART_BYTES = 2**23  # of one request of the limit, as of ours
_THREADS = 4  # of torch's own writers, each of which takes a file


class Saver(NamedTuple):
    """One way to save."""

    make: Callable[[Job], Any]  # What is to be saved, on this rank
    save: Callable[[Any, Job], dict[str, Any] | None]
    """Saves it; every rank calls. What it gives is kept with the figures."""
    syncs: str  # What it brings to disk before it returns


def is_first() -> bool:
    return dist.get_rank() == 0


# ---- the limit ----


def parts_of_share(job: Job) -> list[tuple[str, int, int]]:
    """(file, position, bytes) of requests that write the rank's share: one contiguous part of each file."""
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = []
    for file in sorted(job.load.folder.glob("*.safetensors")):
        begin, end = (file.stat().st_size * r // world for r in (rank, rank + 1))
        parts += [(file.name, at, min(_PART_BYTES, end - at)) for at in range(begin, end, _PART_BYTES)]
    return parts


def own_share(job: Job) -> torch.Tensor:
    """As many bytes as the rank is to write."""
    return torch.ones(sum(size for *_, size in parts_of_share(job)), dtype=torch.uint8)


def save_limit(memory: torch.Tensor, job: Job) -> None:
    """The same bytes into new files of the same sizes, which then take the place of those that are there."""
    parts = parts_of_share(job)
    names = sorted({name for name, *_ in parts})
    draft = job.target / ".draft"
    if is_first():
        draft.mkdir(parents=True)
        for name in names:
            with open(draft / name, "wb") as stream:
                os.posix_fallocate(stream.fileno(), 0, (job.load.folder / name).stat().st_size)
    dist.barrier()
    files = {name: os.open(draft / name, os.O_WRONLY) for name in names}

    def write(part: tuple[str, int, int], piece: torch.Tensor) -> None:
        assert os.pwrite(files[part[0]], piece.numpy().data, part[1]) == part[2]

    with ThreadPoolExecutor(REQUESTS_IN_FLIGHT) as pool:
        list(pool.map(write, parts, memory.split([size for *_, size in parts])))
        list(pool.map(os.fsync, files.values()))
    for file in files.values():
        os.close(file)
    dist.barrier()
    if is_first():
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda name: os.replace(draft / name, job.target / name), names))
        draft.rmdir()


# ---- savers ----


def our_model(job: Job) -> nn.Module:
    return load_ours(job.load)


def save_ours(model: nn.Module, job: Job) -> None:
    hf_fsdp_tools.save_pretrained(model, job.target, dtype=STORED, max_shard_size=job.file_bytes)


def save_behind(model: nn.Module, job: Job) -> dict[str, Any]:
    """Ours in the background, and nothing done meanwhile."""
    report = hf_fsdp_tools.save_pretrained(
        model, job.target, dtype=STORED, max_shard_size=job.file_bytes, blocking=False
    )
    hf_fsdp_tools.wait_for_saves()
    return {"pause": report.pause_seconds}


def save_full(model: nn.Module, job: Job) -> None:
    """As Accelerate's guide to FSDP saves: the whole model on rank 0, which writes it."""
    accelerator = SimpleNamespace(distributed_type="FSDP", is_fsdp2=True)  # an Accelerator drops FSDP on CPUs
    state = cast(Accelerator.get_state_dict(accelerator, model))
    PreTrainedModel.save_pretrained(
        model, job.target, is_main_process=is_first(), state_dict=state, max_shard_size=job.file_bytes
    )


def cast(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor.to(STORED) if tensor.is_floating_point() else tensor for key, tensor in state.items()}


def save_merged(model: nn.Module, job: Job) -> None:
    """Accelerate's sharded save, and `accelerate merge-weights` after it, without the time that a command needs to
    start. It casts nothing."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    state = PartialState(cpu=job.load.device == "cpu")
    save_fsdp_model(plugin, state, model, str(job.target / "state"))
    dist.barrier()
    merge_fsdp_weights(str(job.target / "state" / "pytorch_model_fsdp_0"), str(job.target))
    save_configs(model, job.target)


def save_configs(model: Any, folder: Path) -> None:
    """What makes weights a checkpoint that can be opened."""
    if is_first():
        model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
        model.config.save_pretrained(folder)
        model.generation_config.save_pretrained(folder)


def native_model(job: Job) -> nn.Module:
    """Sharded by transformers itself; a single rank has the whole model."""
    config = DistributedConfig(fsdp_size=dist.get_world_size())
    alone = {"device_map": {"": job.load.torch_device}}
    kwargs = {"distributed_config": config} if dist.get_world_size() > 1 else alone
    model = AutoModelForCausalLM.from_pretrained(job.load.folder, dtype=job.load.dtype, **kwargs)
    for parameter in model.parameters():
        parameter.detach().mul_(1)  # what was mapped from a file becomes memory, as in a training
    return model


def save_gathered(model: Any, job: Job) -> None:
    """transformers' own way to a checkpoint: it gathers the model on rank 0. It casts nothing."""
    model.save_pretrained(job.target, is_main_process=is_first(), max_shard_size=job.file_bytes)


def save_dcp(model: nn.Module, job: Job) -> None:
    """torch's writer of safetensors: each rank its shards, then rank 0 writes them again."""
    once = {id(tensor): key for key, tensor in reversed(model.state_dict(keep_vars=True).items())}
    state = {key: tensor.detach() for key, tensor in model.state_dict().items() if key in once.values()}
    state = cast(state)
    options: dict[str, Any] = {"fqn_to_index_mapping": file_of_each(state, job.file_bytes), "save_distributed": True}
    options |= {"enable_consolidation": True, "thread_count": _THREADS, "thread_count_consolidation": _THREADS}
    save_state(state, storage_writer=HuggingFaceStorageWriter(str(job.target), **options))
    save_configs(model, job.target)


def file_of_each(state: dict[str, torch.Tensor], file_bytes: int) -> dict[str, int]:
    """The number of the file, from 1, that holds each tensor."""
    index, number, filled = {}, 1, 0
    for key, tensor in state.items():
        size = tensor.numel() * tensor.element_size()
        if filled and filled + size > file_bytes:
            number, filled = number + 1, 0
        index[key] = number
        filled += size
    return index


SAVERS: dict[str, Saver] = {
    LIMIT: Saver(own_share, save_limit, "all"),
    OURS: Saver(our_model, save_ours, "all"),
    f"{OURS}, blocking=False": Saver(our_model, save_behind, "all"),
    "Accelerate FULL_STATE_DICT": Saver(our_model, save_full, "nothing"),
    "Accelerate SHARDED_STATE_DICT + merge-weights": Saver(our_model, save_merged, "its shards only"),
    "transformers save_pretrained": Saver(native_model, save_gathered, "nothing"),
    "torch DCP HuggingFaceStorageWriter, consolidated": Saver(our_model, save_dcp, "its shards only"),
}
"""In the order of the table."""


# ---- one save on one rank ----


def measure(name: str, job: Job, tiny: Job) -> Figures:
    """Save once on this rank; the figures of this rank."""
    saver = SAVERS[name]
    share_cores()
    end_without_memory()
    saver.save(saver.make(tiny), tiny)  # imports the rest
    made = saver.make(job)
    gc.collect()
    device = job.load.torch_device
    synchronize(device)
    before = begin(device)
    start = time.perf_counter()
    notes = saver.save(made, job) or {}
    dist.barrier()
    seconds = time.perf_counter() - start
    after = usage(device)  # before anything collects garbage
    if dist.get_rank() == 0:
        sync_all(job.target)
    dist.barrier()
    on_disk = time.perf_counter() - start
    fields = (("written", "wchar"), ("read", "rchar"), ("cpu_us", "cpu_us"))
    figures: Figures = {figure: after[field] - before[field] for figure, field in fields}
    figures["above"] = after["VmHWM"] - before["VmRSS"]
    figures["above_device"] = after["device_peak"] - before["device"]
    figures["pinned"] = after["pinned_peak"]
    return {"seconds": seconds, "on_disk": on_disk, **notes, **figures}


def sync_all(folder: Path) -> None:
    """Wait until every file below is on disk."""
    for path in [folder, *folder.rglob("*")]:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def compare(job: Job, folder: Path, expected: Figures) -> str:
    """Open a saved checkpoint by plain `from_pretrained` and compare every tensor; then names, dtypes and shapes in the
    files with those of the checkpoint that the model came from."""
    found = reference(replace(job.load, folder=folder, dtype=STORED, device="cpu"))[0]
    wrong = sorted(key for key in found.keys() | expected.keys() if found.get(key) != expected.get(key))
    if wrong:
        return f"wrong: {len(wrong)} tensors, {wrong[0]}"
    ours, theirs = (CheckpointIndex.open(path).tensors for path in (folder, job.load.folder))
    if ours.keys() != theirs.keys():
        return f"equal values, {len(ours)} tensors instead of the {len(theirs)} of the hub's layout"
    dtypes = {dtype_name(tensor.dtype) for key, tensor in ours.items() if tensor.dtype != theirs[key].dtype}
    return f"equal values, stored as {', '.join(sorted(dtypes))}" if dtypes else "equal"
