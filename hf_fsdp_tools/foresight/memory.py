"""How much memory a training takes on each GPU, where its peak stands and what it is made of."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

from hf_fsdp_tools.axes import SHARING, size_names
from hf_fsdp_tools.foresight.allocator import replay
from hf_fsdp_tools.foresight.events import Alloc, Work, in_use
from hf_fsdp_tools.foresight.forecast import Forecast, Report, Source, step_of
from hf_fsdp_tools.foresight.fsdp2.step import Step
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.timing.hardware import Gpu, gpu_named
from hf_fsdp_tools.text import grouped, merge_names, show_bytes, show_count

ALLOCATORS = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)  # Variables that set up the allocator, the new name first
EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True"  # The variable with which segments of the allocator grow
_WORKSPACES = {"h100": 32, "b200": 32, "blackwell": 32, "mi250x": 32, "mi300x": 128, "mi355x": 128}
"""MiB of cuBLAS' workspace by family of GPUs, of all others 8.125 (`parseChosenWorkspaceSize` in
`CublasHandlePool.cpp`). The thread of the forward pass and autograd's have one each (counted on an H200)."""
_CONTEXT = 500 * 2**20  # CUDA context with the kernels that are loaded. (assumed; 0.4 to 0.6 GiB are usual)
_MANY_SHARDS = 2048
_OF_MANY_SHARDS = "each rank spends up to a minute in torch's fully_shard; with replicas (dp_replicate_size, HSDP) less"
_NCCL_CHANNEL = 10 * 2**20  # NCCL's buffer of one channel in one direction (NVIDIA/nccl issue 1685)
_NCCL_CHANNELS = 24  # In a ring on NVLink. (assumed: with the context the 1.06 GB of issue 1685 on 8 H100)
_SHOWN = 0.001  # Part of the GPU's memory below which a kind of memory is counted as "other". (assumed)
MARGIN = 0.1  # Part that a recommended setting leaves free: 62 of 66 published peaks were so near above the estimate
WASTED = 0.03  # Part that another setting of the allocator must save to be named. (assumed)
_SETTLED = 3  # Steps after the first until the allocator does the same in every step. (2 or 3 were enough)


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate(Report):
    """The memory of a training on the GPU that takes most, in steps after the first.

    Example:
        >>> estimate = estimate_memory("checkpoint", num_processes=8, gpu="h100-80gb", max_length=32)
        >>> isinstance(estimate, MemoryEstimate), estimate.fits, estimate.peak_phase
        (True, True, ...)
    """

    _derived: ClassVar = ("total", "fits", "spare_bytes")
    model_class: str
    num_params: int
    setup: TrainingSetup
    peak_allocated: int  # Bytes of the blocks in use at the peak: `torch.cuda.max_memory_allocated`
    peak_reserved: int  # Bytes that the allocator holds at most: `torch.cuda.max_memory_reserved`
    at_peak: Mapping[str, int]  # `peak_allocated` by kind; "rounding" is what blocks are longer than what was asked for
    peak_phase: str
    peak_unit: str  # The unit that computes at the peak: fqn of its first module, "" for the root
    outside: Mapping[str, int]  # Bytes that PyTorch's allocator does not know of: of the CUDA context and of NCCL
    peak_event: int  # Index of the event of the step after which the peak stands
    limit_bytes: int  # Memory of the GPU that the training may use
    host_bytes: int = 0  # On the host, for one process: shards, gradients, states under CPU offload; blocks' inputs
    notes: tuple[str, ...] = ()
    forecast: Forecast = field(repr=False, compare=False)

    @property
    def total(self) -> int:
        """Bytes of the GPU's memory that the training wants: reserved, and outside of the allocator."""
        return self.peak_reserved + sum(self.outside.values())

    @property
    def fits(self) -> bool:
        """Whether it has room on this GPU, on NVIDIA's also where only segments that grow have (`total_expandable`)."""
        return self.spare_bytes >= 0 or self.total_expandable <= self.limit_bytes

    @property
    def spare_bytes(self) -> int:
        """What is left of the GPU's memory; below 0, cached memory must be given back, or the step does not run."""
        return self.limit_bytes - self.total

    @cached_property
    def total_expandable(self) -> int:
        """`total` with `EXPANDABLE`, which wastes less of a large model; on AMD's GPUs, which have none, `total`."""
        if gpu_named(self.setup.gpu).family.startswith("mi"):
            return self.total
        return _replayed(self.forecast.step, self.setup, expandable=True)[1] + sum(self.outside.values())

    def largest(self, most: int = 10) -> list[tuple[int, int, str, str]]:
        """What takes most at the peak, the largest first: bytes, number of equal tensors, units, what makes them."""
        step = self.forecast.step
        blocks = in_use(step.events[: self.peak_event + 1], step.resident)[1].values()
        alike = (
            (one.source or one.kind, re.sub(r"\d+", "#", one.unit), one.source and one.num_bytes) for one in blocks
        )
        rows = []
        for (source, *_), group in grouped(zip(alike, blocks, strict=True)).items():
            units = merge_names(dict.fromkeys(alloc.unit for alloc in group if alloc.unit))
            rows.append((sum(alloc.num_bytes for alloc in group), len(group), units, source))
        return sorted(rows, key=lambda row: -row[0])[:most]

    def __str__(self) -> str:
        setup, limit, cached = self.setup, self.limit_bytes, self.peak_reserved - self.peak_allocated
        steps, shared = setup.gradient_accumulation_steps, setup.dims.ranks_per_row
        times, each = f" × {steps} accumulation steps" * (steps > 1), f"{shared} GPUs" if shared > 1 else "GPU"
        kinds = sorted(self.at_peak.items(), key=lambda item: -item[1])
        large = [(kind, num_bytes) for kind, num_bytes in kinds if num_bytes >= _SHOWN * limit] or kinds[:1]
        rows = setup.per_device_train_batch_size * setup.rows_per_example
        lines = [
            f"{self.model_class}, {show_count(self.num_params)} parameters, on {setup.num_processes} × {setup.gpu}",
            f"{rows} × {setup.max_length:,} tokens per {each}{times}; "
            f"peak in {self.peak_phase}, at {self.peak_unit or 'the root'}",
            f"assumed: {setup.words}",
        ]
        for name, num_bytes in (  # share of the GPU's memory as a number and as a bar
            *large,
            ("other", self.peak_allocated - sum(num_bytes for _, num_bytes in large)),
            ("allocated at the peak", self.peak_allocated),
            ("cached by the allocator", cached),
            *self.outside.items(),
            ("in all", self.total),
        ):
            bar = "█" * min(30, round(30 * num_bytes / limit)) if name in self.at_peak else ""
            head = "=" if name in ("allocated at the peak", "in all") else " "
            lines.append(f"{head} {name:<23} {show_bytes(num_bytes):>9} {num_bytes / limit:>6.1%} {bar}".rstrip())
        spare = show_bytes(abs(self.spare_bytes))
        if not self.fits:
            lines.append(f"does not fit: {spare} more than the GPU's {show_bytes(limit)}")
        elif self.spare_bytes < 0:
            least = f"with {EXPANDABLE}, which takes {show_bytes(self.total_expandable)}"
            lines.append(f"fits {show_bytes(limit)} only {least}; without it {spare} are missing")
        else:
            is_barely = self.spare_bytes < MARGIN * limit
            less = f", less than the {MARGIN:.0%} that `hf-fsdp search` leaves" * is_barely
            lines.append(f"fits{' barely' * is_barely}: {spare} of {show_bytes(limit)} free{less}")
        if self.spare_bytes >= 0 and cached > WASTED * limit and self.total - self.total_expandable > WASTED * limit:
            lines.append(f"with {EXPANDABLE} {show_bytes(self.total_expandable)} in all")
        lines += [f"host memory of each process: {show_bytes(self.host_bytes)}"] * (self.host_bytes > 0)
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def estimate_memory(
    name_or_model: Source,
    setup: TrainingSetup | None = None,
    *,
    model_kwargs: Mapping[str, Any] | None = None,
    **fields: Any,
) -> MemoryEstimate:
    """The memory that a training takes on each GPU, found by a dry run on this machine, without weights and GPUs.

        print(estimate_memory("meta-llama/Llama-3.1-8B", num_processes=8, gpu="h100-80gb", max_length=8192))

    Args:
        name_or_model: hub name, folder, `config.json`, configuration, or a model on any device.
        setup: the training; without it `TrainingSetup()`.
        model_kwargs: as in `build_meta_model` (`auto_class`, `revision`, …).
        fields: of `TrainingSetup`, by name, in place of those of `setup`.

    Any rank may call; nothing is communicated, and no accelerator is used.

    Raises:
        ConfigError: a field is unknown or has a value that cannot be, or the GPU is unknown.
        CheckpointError, WrapPlanError: the model cannot be built or planned.

    Example:
        >>> print(estimate_memory("checkpoint", num_processes=8, gpu="rtx-4090", max_length=32))
        LlamaForCausalLM, 45.9 K parameters, on 8 × rtx-4090
        ...
        fits: ...
    """
    return memory_of(step_of(name_or_model, TrainingSetup.of(setup, **fields), **(model_kwargs or {})))


def memory_of(forecast: Forecast) -> MemoryEstimate:
    """The memory of a forecast."""
    setup, step, trace = forecast.setup, forecast.step, forecast.trace
    gpu = gpu_named(setup.gpu)
    degrees = [getattr(setup, name) for name in ("dp_shard_size", *size_names(*SHARING))]
    degrees.append(setup.num_processes // setup.gpus_per_copy)
    groups = sum(size > 1 for size in (*degrees, setup.expert_shard_size * (setup.ep_size > 1)))
    outside = {"CUDA context": _CONTEXT, "NCCL's buffers": groups * 2 * _NCCL_CHANNELS * _NCCL_CHANNEL}
    outside = {name: num_bytes for name, num_bytes in outside.items() if num_bytes}
    allocated, reserved = _replayed(step, setup)
    at = max(range(len(allocated)), key=allocated.__getitem__)
    unit, blocks = in_use(step.events[: at + 1], step.resident)
    coming = next((event.phase for event in step.events[at:] if isinstance(event, Work)), "optimizer")
    kinds = Counter[str]({"cuBLAS workspace": _workspace(gpu)})
    for alloc in blocks.values():
        kinds[alloc.kind] += alloc.num_bytes
    kinds["rounding"] = allocated[at] - kinds.total()
    is_many = setup.num_processes // setup.num_copies >= _MANY_SHARDS
    return MemoryEstimate(
        model_class=forecast.plan.model_class,
        # of the plan where a rank has a part, of the trace where the plan counts bytes
        num_params=max(forecast.plan.num_params * setup.dequantize, trace.num_params),
        setup=setup,
        peak_allocated=allocated[at],
        peak_reserved=reserved,
        at_peak={kind: num_bytes for kind, num_bytes in kinds.items() if num_bytes},
        peak_phase=coming,
        peak_unit=unit,
        peak_event=at,
        outside=outside,
        limit_bytes=gpu.memory_bytes,
        host_bytes=step.host_bytes,
        notes=(*trace.notes, *[_OF_MANY_SHARDS] * is_many),
        forecast=forecast,
    )


def _replayed(step: Step, setup: TrainingSetup, *, expandable: bool = False) -> tuple[Sequence[int], int]:
    """A late step in the allocator: after parameters, and a first step in which the optimizer takes its state."""
    parameters = (*step.parameters, Alloc(-1, _workspace(gpu_named(setup.gpu)), "temporaries", ""))
    is_expandable = expandable or setup.expandable_segments
    return replay(parameters, step.first, step.events, expandable=is_expandable, again=_SETTLED - 1)


def _workspace(gpu: Gpu) -> int:
    return int(2 * _WORKSPACES.get(gpu.family, 8.125) * 2**20)
