"""Tests on ranks that share this machine's GPU: a collective first, then test files in parts that end within 100 s."""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from hf_fsdp_tools.accelerator import nccl_version
from hf_fsdp_tools.distributed.mesh import local_device
from hf_fsdp_tools.testing import run_ranks

ROOT = Path(__file__).parents[2]
_DEVICE = "ranks/test_one_gpu.py::test_all_that_a_device_can_break"
_PAIRS = "behaviour/test_matrix.py::test_pairs"
TESTS = {
    "groups": "ranks/test_process_groups.py -k on_GPUs",
    **{
        f"a device, {part}, {ranks} ranks": f"{_DEVICE}[{ranks}-{part}]"
        for ranks in (2, 4)
        for part in ("loading", "trainer", "offload", "precision")
    },
    **{f"pairs {part}": f"{_PAIRS}[{part}]" for part in ("2-0", "4-0", "2-20", "2-40", "1-0")},
    "skipped units": "ranks/test_skipped.py",
    "Muon": "ranks/test_muon.py",
    "files, placements": "ranks/test_load.py -k placements",
    "files, kinds": "ranks/test_load.py -k every_kind",
    "whole parameters": "ranks/test_trainer.py -k cuda",
    "bases as stored": "ranks/test_one_gpu.py -k quantised",
    **{f"pairs {part}": f"{_PAIRS}[{part}]" for part in ("2-60", "2-80", "2-100")},
    **{f"a device, {part}, 1 rank": f"{_DEVICE}[1-{part}]" for part in ("compiled", "loading", "precision")},
    "a device, compiled, 2 ranks": f"{_DEVICE}[2-compiled]",
    "sequences of acts": "ranks/test_acts.py",
}
"""What pytest is given, the weightiest first."""
STEPS = {"NCCL": 60} | dict.fromkeys(TESTS, 100)
HEADS = ("result", "failed")


def summed() -> float:
    """Milliseconds of a sum over the ranks that is right; a function for `run_ranks`."""
    values = torch.full((2**20,), float(dist.get_rank()), device=local_device())
    dist.all_reduce(values)
    expected = sum(range(dist.get_world_size()))
    assert bool((values == expected).all()), f"{values[0].item()} and not {expected}"
    began = time.perf_counter()
    for _ in range(10):
        dist.all_reduce(values)
    values.sum().item()
    return round((time.perf_counter() - began) * 100, 2)


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    if name == "NCCL":
        found = {n: run_ranks(summed, n, device=options.device, timeout_s=STEPS[name] / 2)[0] for n in (2, 4)}
        version = ".".join(map(str, nccl_version()))
        return {"result": f"NCCL {version}: 4 MiB in {found[2]} ms by 2 ranks, {found[4]} ms by 4", "failures": []}
    return tested(TESTS[name], STEPS[name], options.device)


def tested(given: str, limit_s: int, device: str) -> dict[str, Any]:
    """What pytest says of the tests on ranks of a device, and what failed."""
    words = [sys.executable, "-m", "pytest", "-q", "--tb=short", *f"tests/{given}".split()]
    ranks_on = os.environ | {"RANKS_ON": device}
    tests = subprocess.Popen(words, env=ranks_on, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    end = ""
    try:
        said, _ = tests.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        for each in psutil.Process(tests.pid).children(recursive=True):
            each.kill()  # ranks, which hold memory of the GPU
        tests.kill()
        said, _ = tests.communicate()
        end = f"not done in {limit_s} s"
    print(said, flush=True)  # into the log
    lines = [line.strip("= ") for line in said.splitlines() if re.search(r"\d (passed|failed|skipped|error)", line)]
    cases = re.findall(r"^E +(--- case .+):$", said, re.MULTILINE) + re.findall(r"^FAILED (.+)$", said, re.MULTILINE)
    return {"result": end or lines[-1] if end or lines else said[-200:], "failures": [*dict.fromkeys(cases)]}


def foresee(name: str, *, tiny: bool) -> dict[str, Any]:
    return {}


def cells(row: dict[str, Any], foreseen: dict[str, Any]) -> list[str]:
    return [row["result"], "; ".join(row["failures"])]
