"""Measure the memory of the cases on this machine and foresee it: one record for each run."""

import gc
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.foreseeing import gloo
from benchmarks.foreseeing.cases import CASES, SIZES, Case, case_named
from benchmarks.foreseeing.training import Training
from hf_fsdp_tools.foresight.events import Alloc, Free
from hf_fsdp_tools.foresight.forecast import build
from hf_fsdp_tools.foresight.fsdp2.step import Step, compose
from hf_fsdp_tools.foresight.memory import estimate_memory
from hf_fsdp_tools.foresight.tracing.dry_run import trace_model
from tests._dist import run_ranks

_TIMEOUT_S = 900
_STEPS = 4  # of a run on a device; by the last one, the allocator has all its segments


def runs(device: str, names: list[str], worlds: list[int]) -> Iterator[tuple[Case, int]]:
    """Each case that a device can run, with each number of GPUs."""
    for case in CASES:
        if device not in case.on or (names and case.name not in names):
            continue
        replicas = case.settings.get("dp_replicate_size", 1)
        for world in [case.ranks] if device == "cpu" else worlds:
            if world % replicas == 0:
                yield case, world


def measured(case: Case, device: str, size: str, world: int) -> dict[str, Any]:
    """What a real training took."""
    if device == "cpu":
        ranks = run_ranks(gloo.measure, world, case.name, size, timeout_s=_TIMEOUT_S)
        # The first rank holds the most.
        found = {key: value for key, value in ranks[0].items() if key not in ("events", "collectives")}
        return found | {"peaks_of_ranks": [rank["peak"] for rank in ranks], "torch": torch.__version__}
    return dict(run_ranks(counted_on_cuda, 1, case.name, size, world, timeout_s=_TIMEOUT_S, device="cuda")[0])


def counted_on_cuda(name: str, size: str, num_gpus: int) -> dict[str, Any]:
    """What the caching allocator counts for the last step of a case, in bytes; a function for `run_ranks`.

    This process is rank 0 of a group of any size whose collectives do nothing, so that one device is enough.
    """
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


def foresee(record: dict[str, Any]) -> dict[str, Any]:
    """What this package foresees of a run."""
    case, size, world = case_named(record["case"]), record["size"], record["gpus"]
    setup = case.sized(size, world)
    config = case.config(SIZES[size])
    if record["device"] == "cpu":
        held, peak = requested(foreseen_on_cpus(case, size, world))
        foreseen = {"held": held, "peak": peak}
    else:
        gpu = "h200-141gb" if "H200" in record["measured"]["device"] else "h100-80gb"
        fields: dict[str, Any] = {
            "num_gpus": world,
            "batch_size": setup.batch_size,
            "seq_len": setup.seq_len,
            "gpu": gpu,
        }
        fields |= case.settings | {"loss": "full", "model_kwargs": {"auto_class": case.auto_class}}
        estimate = estimate_memory(config, **fields)
        foreseen = {"allocated": estimate.peak_allocated, "reserved": estimate.peak_reserved}
    return {"foreseen": foreseen, "transformers": transformers.__version__}


def foreseen_on_cpus(case: Case, size: str, world: int) -> Step:
    """The step of a case as CPUs run it, whose kernels save other things than those of GPUs."""
    setup = case.sized(size, world)
    model, plan = build(case.config(SIZES[size]), setup, auto_class=case.auto_class)
    return compose(trace_model(model, plan, setup, device="cpu"), plan, setup)


def requested(step: Step) -> tuple[int, int]:
    """(bytes before a step with the batch, bytes at its peak), as requested, without any allocator's rounding."""
    live = {alloc.block: alloc for alloc in step.resident}
    total = peak = held = sum(alloc.num_bytes for alloc in step.resident)
    batch = most = 0
    for event in step.events:
        if isinstance(event, Alloc):
            live[event.block] = event
            total += event.num_bytes
            batch += event.num_bytes if event.kind == "inputs" else 0
        elif isinstance(event, Free):
            freed = live.pop(event.block)
            total -= freed.num_bytes
            batch -= freed.num_bytes if freed.kind == "inputs" else 0
        peak, most = max(peak, total), max(most, batch)
    return held + most, peak
