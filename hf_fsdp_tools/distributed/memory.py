"""How much host memory this process can still get, and how much PyTorch takes for pinned memory."""

import os
import re
from collections.abc import Mapping
from pathlib import Path


def pinned_bytes(num_bytes: int, variables: Mapping[str, str] = os.environ) -> int:
    """What PyTorch takes for pinned memory of so many bytes: the next power of two, or as many as are asked for above
    the MiB that `pinned_max_round_threshold_mb` says in PYTORCH_ALLOC_CONF."""
    settings = variables.get("PYTORCH_ALLOC_CONF", variables.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    threshold = re.search(r"pinned_max_round_threshold_mb:\s*(\d+)", settings)
    if not num_bytes or (threshold and num_bytes > int(threshold[1]) * 2**20):
        return num_bytes
    return 1 << (num_bytes - 1).bit_length()


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes of memory that this process can still get without swapping; None where the system does not say.

    The smaller one of what the machine has and what a container's limit (cgroups 1 and 2) leaves; memory that files
    take and that can be taken from them counts as available.
    """
    limits = []
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        limits += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        return None
    for folder, limit, usage in (
        ("sys/fs/cgroup", "memory.max", "memory.current"),
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            most, now = ((root / folder / name).read_text().strip() for name in (limit, usage))
            stat = dict(line.split(" ", 1) for line in (root / folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if most.isdigit():
            files = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
            limits.append(max(0, int(most) - int(now) + files))
    return min(limits, default=None)
