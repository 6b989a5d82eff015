"""Measure the memory of the cases on this machine and estimate it: one record for each run.

On CPUs over gloo it is counted allocation by allocation. Every allocation and free of PyTorch's CPU allocator from the
first parameter to the end of the second step is in `torch.profiler`'s memory events, on all threads, with its address
and the operations above it. gloo takes memory that NCCL does not: what is allocated inside a collective's own call
(`c10d::…`, on the calling thread) or while gloo works (`gloo:…`, on its threads) is counted apart, and so is its
release, by its address; so is what the CPU's kernel takes to join gradients (`aten::_chunk_cat`), which a GPU's does
not. That this is all of gloo's scratch and nothing else is checked by the sizes: twice the gathered bytes for each all-
gather, the whole input for each reduce-scatter. Kernels are PyTorch's own: oneDNN's take scratch by the instructions of
the processor (a convolution of a tiny model a megabyte with AMX, and nothing without), so that the numbers would be
those of one machine.
"""

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile, record_function
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.foreseeing.cases import CASES, SIZES, Case, case_named
from benchmarks.foreseeing.training import Training
from hf_fsdp_tools.foresight.events import Alloc, Free
from hf_fsdp_tools.foresight.forecast import build
from hf_fsdp_tools.foresight.fsdp2.step import Step, compose
from hf_fsdp_tools.foresight.memory import estimate_memory
from hf_fsdp_tools.foresight.tracing.dry_run import trace_model
from hf_fsdp_tools.testing import run_ranks

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
        ranks = run_ranks(measured_on_cpus, world, case.name, size, timeout_s=_TIMEOUT_S)
        # The first rank holds the most.
        found = {key: value for key, value in ranks[0].items() if key not in ("events", "collectives")}
        return found | {"peaks_of_ranks": [rank["peak"] for rank in ranks], "torch": torch.__version__}
    return dict(run_ranks(counted_on_cuda, 1, case.name, size, world, timeout_s=_TIMEOUT_S, device="cuda")[0])


def counted_on_cuda(name: str, size: str, num_processes: int) -> dict[str, Any]:
    """What the caching allocator counts for the last step of a case, in bytes; a function for `run_ranks`.

    This process is rank 0 of a group of any size whose collectives do nothing, so that one device is enough.
    """
    torch.cuda.set_device(0)
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=num_processes, store=FakeStore())
    return counted(Training(case_named(name), size, num_processes=num_processes, device=torch.device("cuda", 0)))


def counted(training: Training) -> dict[str, Any]:
    """What the caching allocator counts for the last of a few steps, in bytes."""
    for step in range(_STEPS):
        gc.collect()
        torch.cuda.synchronize()
        if step == _STEPS - 1:
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        training.step()
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


def estimate(record: dict[str, Any]) -> dict[str, Any]:
    """What this package estimates of a run."""
    case, size, world = case_named(record["case"]), record["size"], record["gpus"]
    setup = case.sized(size, world)
    config = case.config(SIZES[size])
    if record["device"] == "cpu":
        held, peak = requested(estimated_on_cpus(case, size, world))
        estimated = {"held": held, "peak": peak}
    else:
        gpu = "h200-141gb" if "H200" in record["measured"]["device"] else "h100-80gb"
        fields = {
            "num_processes": world,
            "per_device_train_batch_size": setup.per_device_train_batch_size,
            "max_length": setup.max_length,
            "gpu": gpu,
        }
        fields |= case.settings | {"loss": "full", "model_kwargs": {"auto_class": case.auto_class}}
        estimate = estimate_memory(config, **fields)
        estimated = {"allocated": estimate.peak_allocated, "reserved": estimate.peak_reserved}
    return {"estimated": estimated, "transformers": transformers.__version__}


def estimated_on_cpus(case: Case, size: str, world: int) -> Step:
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


# ---- on CPUs ----

_STEPS_ON_CPUS = 2  # The last is counted: the optimizer has its state, FSDP2 its buffers
_COLLECTIVES = ["all_gather_into_tensor", "all_gather_single", "all_reduce", "all_to_all_single", "broadcast"]
_COLLECTIVES += ["reduce_scatter_single", "reduce_scatter_tensor"]
"""Names of what FSDP2 calls, in several versions of PyTorch."""

Sizes = list[tuple[str, int]]
"""Names of collectives, and bytes of the largest tensor of each."""

_MARK = "training: "

_SCRATCH = ("c10d::", "gloo:", "aten::_chunk_cat")
"""Operations whose memory is counted apart."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """Memory that was taken or given back."""

    time_ns: int
    address: int
    num_bytes: int  # Negative where it is given back
    above: tuple[str, ...]  # The operations in which it happened, outermost first

    @property
    def is_scratch(self) -> bool:
        """Whether gloo, or the CPU's kernel that joins gradients, took it for itself."""
        return any(name.startswith(_SCRATCH) for name in self.above)


def measured_on_cpus(name: str, size: str) -> dict[str, Any]:
    """What a rank of a case takes, in bytes; a function for `run_ranks`."""
    world = dist.get_world_size()
    sizes: Sizes = []
    recording = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with torch.backends.mkldnn.flags(enabled=False), recording as profiler, _released_at_once(sizes):
        with record_function(f"{_MARK}build"):
            training = Training(case_named(name), size, num_processes=world, device=torch.device("cpu"))
        for step in range(_STEPS_ON_CPUS):
            gc.collect()
            sizes.clear()
            with record_function(f"{_MARK}step {step}"):
                training.step()
    parameters = sum(parameter.numel() for parameter in training.model.parameters())
    return count(log_of(profiler)) | {"parameters": parameters, "collectives": sizes}


@contextmanager
def _released_at_once(sizes: Sizes) -> Iterator[None]:
    """A block in which a collective returns once gloo's threads have let go of its tensors; its size is noted.

    They let go soon after, at random before or after the caller does; and memory that a thread of gloo frees when its
    work is over is in no log.
    """

    def patient(collective: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            tensors: list[Any] = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
            before = [tensor._use_count() for tensor in tensors]
            sizes.append((collective.__name__, max(tensor.nbytes for tensor in tensors)))
            result = collective(*args, **kwargs)
            while any(tensor._use_count() > count for tensor, count in zip(tensors, before, strict=True)):
                time.sleep(1e-4)
            return result

        return run

    with _functional_released_at_once(), ExitStack() as stack:
        for name in _COLLECTIVES:
            if collective := getattr(dist, name, None):
                stack.enter_context(patch.object(dist, name, patient(collective)))
        yield


@contextmanager
def _functional_released_at_once() -> Iterator[None]:
    """The same for the functional collectives of tensor and expert parallelism, which the backward pass runs in C++."""

    def all_to_all(rows: torch.Tensor, received: list[int], sent: list[int], group: Any) -> torch.Tensor:
        output = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(output, rows.contiguous(), received, sent, group=_resolve_process_group(group))
        return output

    def all_reduce(tensor: torch.Tensor, operation: str, group: Any) -> torch.Tensor:
        assert operation == "sum"
        output = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(output, group=_resolve_process_group(group))
        return output

    with torch.library._scoped_library("_c10d_functional", "IMPL") as library:
        library.impl("all_to_all_single", all_to_all, "CPU")
        library.impl("all_reduce", all_reduce, "CPU")
        yield


def log_of(profiler: profile) -> list[Allocation]:
    """All allocations that a profiler saw, in their order."""

    def below(event: Any, above: tuple[str, ...]) -> Iterator[Allocation]:
        fields = event.extra_fields
        if type(fields).__name__ == "_ExtraFields_Allocation":
            yield Allocation(event.start_time_ns, fields.ptr, fields.alloc_size, above)
        for child in event.children:
            yield from below(child, (*above, event.name))

    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    roots = profiler.profiler.kineto_results.experimental_event_tree()
    return sorted((found for root in roots for found in below(root, ())), key=lambda found: found.time_ns)


def count(log: list[Allocation]) -> dict[str, Any]:
    """Held, peak and every change of the last step, without scratch; and that scratch."""
    first = next(i for i, found in enumerate(log) if f"{_MARK}step {_STEPS_ON_CPUS - 1}" in found.above)
    live: dict[int, bool] = {}  # address -> whether it is scratch
    taken: Counter[str] = Counter()
    events: list[tuple[int, int]] = []
    total = held = peak = 0
    for i, found in enumerate(log):
        held = total if i == first else held
        if found.num_bytes > 0:
            is_scratch = live[found.address] = found.is_scratch
        elif found.address in live:
            is_scratch = live.pop(found.address)
        else:
            continue  # it was taken before the log began
        if is_scratch:
            if i >= first and found.num_bytes > 0:
                taken[_collective(found)] += found.num_bytes
            continue
        total += found.num_bytes
        if i >= first:
            peak = max(peak, total)
            events.append((found.num_bytes, found.address))
    return {"held": held, "peak": peak, "scratch": dict(taken), "events": events}


def _collective(found: Allocation) -> str:
    return next(name for name in reversed(found.above) if name.startswith(_SCRATCH))
