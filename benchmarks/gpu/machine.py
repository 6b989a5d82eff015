"""This machine and its versions as JSON on standard output: `python -m benchmarks.gpu.machine`."""

import json
import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "huggingface_hub", "numpy", "peft", "trl", "datasets")
PACKAGES += ("bitsandbytes", "triton", "pytest")


def version_of(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def said(*command: str) -> str:
    """What a program prints; empty where there is none or it fails."""
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def describe() -> dict[str, Any]:
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    import hf_fsdp_tools

    root = Path(__file__).parents[2]
    commit = said("git", "-C", str(root), "rev-parse", "--short", "HEAD")
    changed = said("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return {
        "gpus": [{"name": gpu.name, "bytes": gpu.total_memory, "kind": f"{gpu.major}.{gpu.minor}"} for gpu in gpus],
        "cores": len(os.sched_getaffinity(0)),
        "processor": processor(),
        "memory": memory,
        "system": platform.platform(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda or "none",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpus else "none",
        "versions": {name: version_of(name) for name in PACKAGES},
        "package": hf_fsdp_tools.__version__ + (f", commit {commit}" if commit else "") + (", changed" * bool(changed)),
        "nvidia_smi": said("nvidia-smi"),
        "topology": said("nvidia-smi", "topo", "-m") if len(gpus) > 1 else "",
    }


if __name__ == "__main__":
    print(json.dumps(describe()))
