"""One load on one rank: its time, what it read, the memory it took, and whether its values are right."""

import gc
import time
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from benchmarks.measuring.process import Figures, begin, end_without_memory, share_cores, usage

from .loaders import LOADERS, PAGE, Job, dequantized, synchronize


def measure(name: str, job: Job, tiny: Path, check: bool) -> Figures:
    """Load once on this rank; the figures of this rank."""
    load = LOADERS[job.device][name]
    share_cores()
    end_without_memory()
    load(replace(job, folder=tiny))
    gc.collect()
    device = job.torch_device
    synchronize(device)
    before = begin(device)
    start = time.perf_counter()
    loaded = load(job)
    shards = [t.to_local() if isinstance(t, DTensor) else t for t in loaded.parameters()]
    touch([shard for shard in shards if shard.device.type == "cpu"])
    synchronize(device)
    dist.barrier()
    seconds = time.perf_counter() - start
    after = usage(device)  # before anything collects garbage: what a load leaves behind must show
    on_host, on_device = (sum(t.nbytes for t in shards if (t.device.type == "cpu") is host) for host in (True, False))
    fields = (("read", "rchar"), ("disk", "read_bytes"), ("mapped", "RssFile"), ("cpu_us", "cpu_us"))
    figures: Figures = {figure: after[field] - before[field] for figure, field in fields}
    figures["above"] = after["VmHWM"] - before["VmRSS"] - on_host
    figures["above_device"] = after["device_peak"] - before["device"] - on_device
    figures["reserved_left"] = after["device_reserved"] - before["device_reserved"] - on_device
    figures["pinned"] = after["pinned_peak"]
    figures["pinned_left"] = after["pinned"]
    figures["share"] = (on_host + on_device) * 2 // job.dtype.itemsize  # as stored
    sums = checksums(loaded.model) if check and loaded.model is not None else {}
    return {"seconds": seconds, "notes": loaded.notes, "tensors": sums, **figures}


def touch(shards: Sequence[torch.Tensor]) -> None:
    """Write to every page once: some loaders only map files."""
    for shard in shards:
        pages = shard.view(-1).view(torch.uint8)[::PAGE] if shard.is_contiguous() else shard
        pages.add_(0)


@torch.no_grad()
def checksums(model: nn.Module) -> Figures:
    """Dtype, shape and checksum of every whole parameter and buffer. Every rank must call."""
    found = {}
    buffers = model.named_buffers(remove_duplicate=False)
    for name, tensor in sorted([*model.named_parameters(remove_duplicate=False), *buffers]):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        data = b"" if whole.is_meta else whole.cpu().contiguous().view(-1).view(torch.uint8).numpy()
        found[name] = (tensor.dtype, tuple(tensor.shape), zlib.crc32(data))
    return found


def reference(job: Job) -> list[Figures]:
    """Checksums of plain `from_pretrained` on the CPU and, for a GPU, there too, since sines of buffers may differ.

    Of a quantised checkpoint, transformers leaves tensors that are stored plain in their stored dtype (5.23); a model
    that is wholly of the dtype asked for is right too.
    """
    devices: list[dict[str, Any]] = [{}, {"device_map": {"": "cuda:0"}}] if job.device == "cuda" else [{}]
    found = []
    for device in devices:
        options = {"dtype": job.dtype, **device, **dequantized(job.folder)}
        model = AutoModelForCausalLM.from_pretrained(job.folder, **options)
        found.append(checksums(model))
        if "quantization_config" in options:
            for parameter in model.parameters():
                parameter.data = parameter.data.to(job.dtype)
            found.append(checksums(model))
    return found
