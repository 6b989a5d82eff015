"""Measure the memory of the cases on this machine and foresee it: one record for each run."""

from collections.abc import Iterator
from typing import Any

import torch
import transformers

from benchmarks.foreseeing import cuda, gloo
from benchmarks.foreseeing.cases import CASES, SIZES, Case, case_named
from hf_fsdp_tools.foresight.build import build
from hf_fsdp_tools.foresight.events import Alloc, Free
from hf_fsdp_tools.foresight.fsdp2.step import Step, compose
from hf_fsdp_tools.foresight.memory import estimate_memory
from hf_fsdp_tools.foresight.tracing.dry_run import trace_model
from tests._dist import run_ranks

_TIMEOUT_S = 900


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
    return dict(run_ranks(cuda.measure, 1, case.name, size, world, timeout_s=_TIMEOUT_S, device="cuda")[0])


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
