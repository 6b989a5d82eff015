"""One save on one rank: its time, what it wrote, the memory it took; and whether its files are right."""

import gc
import os
import time
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from benchmarks.loading.loaders import synchronize
from benchmarks.loading.measure import reference
from benchmarks.measuring.process import Figures, begin, end_without_memory, share_cores, usage
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.text import dtype_name

from .savers import SAVERS, STORED, Job


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
    return {"seconds": seconds, "on_disk": on_disk, **notes, "notes": {}, **figures}


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
    ours, theirs = (stored(path) for path in (folder, job.load.folder))
    if ours == theirs:
        return "equal"
    if ours.keys() == theirs.keys():
        dtypes = sorted({dtype_name(dtype) for dtype, _ in ours.values()})
        return f"equal values, stored as {', '.join(dtypes)}"
    return f"equal values, {len(ours)} tensors instead of the {len(theirs)} of the hub's layout"


def stored(folder: Path) -> Figures:
    """Dtype and shape of each stored tensor."""
    return {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in CheckpointIndex.open(folder).tensors.items()}
