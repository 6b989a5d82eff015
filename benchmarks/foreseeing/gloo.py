"""Memory of a real training on CPUs over gloo, counted allocation by allocation.

Every allocation and free of PyTorch's CPU allocator from the first parameter to the end of the second step is in
`torch.profiler`'s memory events, on all threads, with its address and the operations above it. gloo takes memory that
NCCL does not: what is allocated inside a collective's own call (`c10d::…`, on the calling thread) or while gloo works
(`gloo:…`, on its threads) is counted apart, and so is its release, by its address; so is what the CPU's kernel takes to
join gradients (`aten::_chunk_cat`), which a GPU's does not. That this is all of gloo's scratch
and nothing else is checked by the sizes: twice the gathered bytes for each all-gather, the whole input for each
reduce-scatter. Kernels are PyTorch's own: oneDNN's take scratch by the instructions of the processor (a convolution of
a tiny model a megabyte with AMX, and nothing without), so that the numbers would be those of one machine.
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
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.foreseeing.cases import case_named
from benchmarks.foreseeing.training import Training

_STEPS = 2
"""Of which the last is counted: the optimizer has its state, FSDP2 its buffers."""

_COLLECTIVES = (
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "broadcast",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
)
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
    num_bytes: int
    """Negative where it is given back."""
    above: tuple[str, ...]
    """The operations in which it happened, outermost first."""

    @property
    def is_scratch(self) -> bool:
        """Whether gloo, or the CPU's kernel that joins gradients, took it for itself."""
        return any(name.startswith(_SCRATCH) for name in self.above)

    @property
    def phase(self) -> str:
        """The innermost mark of the training loop."""
        return next((name.removeprefix(_MARK) for name in reversed(self.above) if name.startswith(_MARK)), "")


def measure(name: str, size: str) -> dict[str, Any]:
    """What a rank of a case takes, in bytes; a function for `run_ranks`."""
    world = dist.get_world_size()
    sizes: Sizes = []
    recording = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with torch.backends.mkldnn.flags(enabled=False), recording as profiler, _released_at_once(sizes):
        with record_function(f"{_MARK}build"):
            training = Training(case_named(name), size, num_gpus=world, device=torch.device("cpu"))
        for step in range(_STEPS):
            gc.collect()
            sizes.clear()
            with record_function(f"{_MARK}step {step}"):
                training.step(lambda phase: record_function(f"{_MARK}{phase}"))
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
            tensors = [given for given in (*args, *kwargs.values()) if isinstance(given, torch.Tensor)]
            before = [tensor._use_count() for tensor in tensors]
            sizes.append((collective.__name__, max(tensor.nbytes for tensor in tensors)))
            result = collective(*args, **kwargs)
            while any(tensor._use_count() > count for tensor, count in zip(tensors, before, strict=True)):
                time.sleep(1e-4)
            return result

        return run

    with ExitStack() as stack:
        for name in _COLLECTIVES:
            if collective := getattr(dist, name, None):
                stack.enter_context(patch.object(dist, name, patient(collective)))
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
    first = next(i for i, found in enumerate(log) if f"{_MARK}step {_STEPS - 1}" in found.above)
    live: dict[int, bool] = {}  # address -> whether it is scratch
    taken: Counter[str] = Counter()
    events: list[tuple[int, int, str, str]] = []
    peaks: dict[str, int] = {}
    total = held = 0
    phase = ""
    for i, found in enumerate(log):
        held = total if i == first else held
        phase = found.phase or phase
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
            peaks[phase] = max(peaks.get(phase, 0), total)
            events.append((found.num_bytes, found.address, phase, _told(found)))
    return {"held": held, "peak": max(peaks.values()), "peaks": peaks, "scratch": dict(taken), "events": events}


def _collective(found: Allocation) -> str:
    return next(name for name in reversed(found.above) if name.startswith(_SCRATCH))


def _told(found: Allocation) -> str:
    return " / ".join([name for name in found.above if not name.startswith(_MARK)][-4:])
