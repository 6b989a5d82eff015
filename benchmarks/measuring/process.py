"""What a process used, from /proc and from the GPU's allocator, and its end before the machine has no memory left."""

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Figures = dict[str, Any]

OUT_OF_MEMORY = 77
"""Exit code of a rank that ended because the machine had no memory left."""

_SPARE_BYTES = 2**30  # of the machine, below which ranks end


def share_cores() -> None:
    """As many threads for torch's own work as this rank has cores."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // dist.get_world_size()))


def end_without_memory() -> None:
    """End this process, with a code of its own, when the machine runs out of memory; the user's work goes on."""
    Path("/proc/self/oom_score_adj").write_text("1000")  # should it come faster than this looks

    def watch() -> None:
        while True:
            lines = Path("/proc/meminfo").read_text().splitlines()
            if next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")) * 1024 < _SPARE_BYTES:
                os._exit(OUT_OF_MEMORY)
            time.sleep(0.05)

    threading.Thread(target=watch, daemon=True).start()


def begin(device: torch.device) -> Figures:
    """Let all ranks meet, and begin to count; `usage` before what is measured."""
    with suppress(OSError):  # some sandboxes have no such file; the high-water mark is then that of the whole process
        Path("/proc/self/clear_refs").write_text("5")  # it starts again from here
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_peak_host_memory_stats()
    if dist.is_initialized():
        dist.barrier()
    return usage(device)


def usage(device: torch.device) -> dict[str, int]:
    """Bytes read and bytes resident of this process, from /proc, its processor time, and memory of and for a GPU."""
    fields = (line.split() for name in ("io", "status") for line in Path("/proc/self", name).read_text().splitlines())
    figures = {f[0].rstrip(":"): int(f[1]) * (1024 if f[-1] == "kB" else 1) for f in fields if f[1:] and f[1].isdigit()}
    on_gpu = dict.fromkeys(("device", "device_peak", "device_reserved", "pinned", "pinned_peak"), 0)
    figures |= {**on_gpu, "cpu_us": int(time.process_time() * 1e6)}
    if device.type == "cuda":
        figures["device"] = torch.cuda.memory_allocated(device)
        figures["device_peak"] = torch.cuda.max_memory_allocated(device)
        figures["device_reserved"] = torch.cuda.memory_reserved(device)
        host = torch.cuda.host_memory_stats()  # empty until something is pinned
        figures["pinned"] = host.get("active_bytes.current", 0)
        figures["pinned_peak"] = host.get("allocated_bytes.peak", 0)
    return figures
