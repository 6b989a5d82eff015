"""Memory of a real training on a CUDA device, as PyTorch's caching allocator counts it; a function for `run_ranks`.

This process is rank 0 of a process group of any size whose collectives do nothing, so one device is enough. Sizes are
real.
"""

import gc
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.foreseeing.cases import case_named
from benchmarks.foreseeing.training import Training

_STEPS = 4
"""The last one is measured: by then the allocator has all its segments."""


def measure(name: str, size: str, num_gpus: int) -> dict[str, Any]:
    """What the allocator counts for the last step of a case, in bytes."""
    torch.cuda.set_device(0)
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=num_gpus, store=FakeStore())
    training = Training(case_named(name), size, num_gpus=num_gpus, device=torch.device("cuda", 0))
    for step in range(_STEPS):
        gc.collect()
        torch.cuda.synchronize()
        if step == _STEPS - 1:
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        training.step(lambda phase: nullcontext())
    torch.cuda.synchronize()
    return {
        "held": held,
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "segments": len(torch.cuda.memory_snapshot()),
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
        "parameters": sum(parameter.numel() for parameter in training.model.parameters()),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
