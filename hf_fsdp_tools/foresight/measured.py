"""A real training step over its course, read from a trace of torch's profiler: its memory and its schedule.

The trace is what `torch.profiler.profile(profile_memory=True).export_chrome_trace` writes. It names what is needed:

    [memory]                      each allocation and free, with the totals of the allocator
    FSDP::pre_forward (fqn), …    FSDP2's own labels: which unit the host is at
    Optimizer.step#…              torch's label of a step of an optimizer
    kernel, gpu_memcpy            what a GPU ran; its `correlation` is that of the call that launched it
    gloo:…                        a collective of gloo, on a thread of its own, launched by a c10d:: operation
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.events import COLLECTIVES
from hf_fsdp_tools.foresight.streams import Bar, Schedule, make_schedule
from hf_fsdp_tools.foresight.timeline import Timeline, extremes

_LABEL = re.compile(r"FSDP::(\w+)(?: \((.*?)\))?(?: \[.*)?$")
"""`_with_fqn` in torch's `_fsdp_param_group.py`; of several modules of a unit the label names all, by ", "."""

_BETWEEN = "between two units of a forward pass"

_Record = Mapping[str, Any]


class _Host:
    """Where the host is in the step at a time: the phase and the unit."""

    def __init__(self, records: Sequence[_Record]) -> None:
        changes: list[tuple[float, str, str]] = []
        for record in records:
            start, end = record["ts"], record["ts"] + record.get("dur", 0.0)
            label, unit = _label(record)
            if label == "pre_forward":
                changes.append((start, "forward", unit))
            elif label == "post_forward":
                changes.append((end, _BETWEEN if unit else "loss", ""))
            elif label == "pre_backward":
                changes.append((start, "backward", unit))
            elif label == "root_post_backward_callback":
                changes.append((end, "clip", ""))
            elif record["name"].startswith("Optimizer.step#"):
                changes.append((start, "optimizer", ""))
        changes = _resolved(sorted(changes, key=lambda change: change[0]))
        if not any(phase == "backward" for _, phase, _ in changes):
            changes = sorted([*changes, *_without_units(records)], key=lambda change: change[0])
        self._changes = changes
        self._times = [time for time, _, _ in changes]

    def at(self, time: float) -> tuple[str, str]:
        """Phase and unit."""
        i = bisect_right(self._times, time) - 1
        return self._changes[i][1:] if i >= 0 else ("forward", "")


def _resolved(changes: Sequence[tuple[float, str, str]]) -> list[tuple[float, str, str]]:
    """What comes after the last unit of a forward pass is the loss, which transformers' models compute themselves."""
    result = []
    for (time, phase, unit), (_, following, _) in pairwise([*changes, (0.0, "", "")]):
        if phase == _BETWEEN:
            phase = "loss" if following in ("loss", "backward") else "forward"
        result.append((time, phase, unit))
    return result


def _without_units(records: Sequence[_Record]) -> Iterator[tuple[float, str, str]]:
    """Yield where the backward pass of a model without FSDP begins and ends."""
    times = [r["ts"] for r in records if r["name"].startswith("autograd::engine::evaluate_function")]
    if times:
        yield min(times), "backward", ""
        yield max(times), "clip", ""


def _label(record: _Record) -> tuple[str, str]:
    """FSDP2's label and the unit's first module; ("", "") for other records."""
    match = _LABEL.match(record["name"]) if record["name"].startswith("FSDP::") else None
    return (match[1], (match[2] or "").split(", ")[0]) if match else ("", "")


def _records(trace: _Record) -> list[_Record]:
    """The records of a trace that have a time, in the order in which they begin, labels of GPU streams left out."""
    found = trace.get("traceEvents", ())
    kept = [r for r in found if r.get("ph") in ("X", "i") and "ts" in r and r.get("cat") != "gpu_user_annotation"]
    if not kept:
        raise ConfigError("The profile of the step is empty. Run one whole training step while it is recorded.")
    return sorted(kept, key=lambda record: record["ts"])


def read_memory(trace: _Record, *, resident_bytes: int = 0) -> Timeline:
    """The memory of the recorded step: of the accelerator's caching allocator, or of PyTorch's allocator on a CPU."""
    records = _records(trace)
    memory = [record for record in records if record["name"] == "[memory]"]
    if not memory:
        raise ConfigError("No memory was allocated while the step was recorded. Run one whole training step.")
    devices = Counter((r["args"]["Device Type"], r["args"]["Device Id"]) for r in memory)
    device = max(devices, key=lambda key: (key[0] != 0, devices[key]))
    memory = [r for r in memory if (r["args"]["Device Type"], r["args"]["Device Id"]) == device]
    allocated = [int(r["args"]["Total Allocated"]) for r in memory]
    allocated = [allocated[0] - int(memory[0]["args"]["Bytes"]), *allocated]  # and before the first of them
    if device[0] == 0:  # a CPU's total begins with the first trace of the process
        allocated = [total - allocated[0] + resident_bytes for total in allocated]
    host, began = _Host(records), records[0]["ts"]
    times = [began, *(record["ts"] for record in memory)]
    states = [host.at(time) for time in times]
    reserved = [int(record["args"]["Total Reserved"]) for record in (memory[0], *memory)]
    kept = extremes(allocated, [phase for phase, _ in states])
    return Timeline(
        origin="measured",
        axis="seconds",
        positions=tuple((times[i] - began) / 1e6 for i in kept),
        phases=tuple(states[i][0] for i in kept),
        units=tuple(states[i][1] for i in kept),
        kinds={"allocated": tuple(allocated[i] for i in kept)},
        reserved=() if device[0] == 0 else tuple(reserved[i] for i in kept),
    )


def read_schedule(trace: _Record) -> Schedule:
    """When the recorded step computed and communicated: streams of a GPU, or the host's operations and gloo's
    threads.
    """
    records = _records(trace)
    host, began = _Host(records), records[0]["ts"]
    on_gpu = any(record.get("cat") == "kernel" for record in records)
    bars = list(_gpu_bars(records, host) if on_gpu else _cpu_bars(records, host))
    bars += _frees(records, host)
    moved = (
        Bar(b.track, b.operation, b.unit, b.phase, (b.start_s - began) / 1e6, (b.end_s - began) / 1e6) for b in bars
    )
    return make_schedule("measured", moved)


def _gpu_bars(records: Sequence[_Record], host: _Host) -> Iterator[Bar]:
    """Yield the kernels and copies of a GPU, times in microseconds; each belongs where the host launched it."""
    launched: Mapping[Any, float] = {
        r["args"]["correlation"]: r["ts"]
        for r in records
        if r.get("cat") in ("cuda_runtime", "cuda_driver", "xpu_runtime") and "correlation" in r.get("args", {})
    }
    labels = _intervals(records)
    for record in records:
        if record.get("cat") not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        start, end, name = record["ts"], record["ts"] + record["dur"], record["name"]
        at = launched.get(record.get("args", {}).get("correlation", ""), start)
        phase, unit = host.at(at)
        if operation := _collective(name) if "nccl" in name.lower() else "":
            yield Bar("communication", operation, _communicated(labels, at, unit), phase, start, end)
        elif "HtoD" in name or "DtoH" in name:
            yield Bar("host", "host_to_device" if "HtoD" in name else "device_to_host", unit, phase, start, end)
        else:
            yield Bar("compute", "compute", unit, phase, start, end)


def _cpu_bars(records: Sequence[_Record], host: _Host) -> Iterator[Bar]:
    """Yield the operations that call no other one and the collectives of gloo, times in microseconds."""
    labels = _intervals(records)
    launches = [r for r in records if r["name"].startswith("c10d::")]
    collectives = [r for r in records if r["name"].startswith("gloo:")]
    threads = {r["tid"] for r in collectives}
    for launch, record in zip(launches, collectives, strict=False):  # gloo takes them in the order of their launches
        phase, unit = host.at(launch["ts"])
        operation = _collective(launch["name"]) or _collective(record["name"]) or COLLECTIVES[-1]
        unit = _communicated(labels, launch["ts"], unit)
        yield Bar("communication", operation, unit, phase, record["ts"], record["ts"] + record["dur"])
    yield from _host_bars([r for r in records if r["tid"] not in threads], collectives, host)


def _host_bars(records: Sequence[_Record], collectives: Sequence[_Record], host: _Host) -> Iterator[Bar]:
    """Yield when the host computes: its innermost operations, and the Python between two where no collective runs."""
    inner: dict[int, _Record] = {}
    bars = []
    for record in (r for r in records if r.get("cat") == "cpu_op"):
        before = inner.get(record["tid"])
        if before is not None and record["ts"] >= before["ts"] + before["dur"]:
            bars.append(before)
        inner[record["tid"]] = record  # one that begins before the last has ended is called by it
    bars = sorted([*bars, *inner.values()], key=lambda record: record["ts"])
    bars = [record for record in bars if "c10d" not in record["name"]]
    starts, latest = [record["ts"] for record in collectives], 0.0
    ends = [latest := max(latest, record["ts"] + record["dur"]) for record in collectives]
    for record, following in zip(bars, [*bars[1:], None], strict=True):
        end = record["ts"] + record["dur"]
        if following is not None:
            running = bisect_right(starts, following["ts"])  # as many have begun by then
            end = following["ts"] if not running or ends[running - 1] <= end else end
        phase, unit = host.at(record["ts"])
        yield Bar("compute", "compute", unit, phase, record["ts"], end)


def _collective(name: str) -> str:
    """`ncclDevKernel_AllGather_RING_LL` and `c10d::_allgather_base_` as "all_gather"; "" for what is none."""
    plain = name.lower().replace("_", "")
    return next((operation for operation in COLLECTIVES if operation.replace("_", "") in plain), "")


def _intervals(records: Sequence[_Record]) -> list[tuple[float, float, str]]:
    """Start, end and unit of FSDP2's labels around collectives."""
    return [
        (r["ts"], r["ts"] + r["dur"], _label(r)[1])
        for r in records
        if _label(r)[0] in ("all_gather", "post_backward_reduce")
    ]


def _communicated(labels: Sequence[tuple[float, float, str]], time: float, computing: str) -> str:
    """The unit for which FSDP2 launched a collective at a time; the one that was computing where FSDP2 did not."""
    return next((unit for start, end, unit in reversed(labels) if start <= time <= end), computing)


def _frees(records: Sequence[_Record], host: _Host) -> Iterator[Bar]:
    """Yield where units gave up their gathered parameters, times in microseconds."""
    freed = [r["ts"] for r in records if r["name"] == "[memory]" and r["args"]["Bytes"] < 0]
    for record in records:
        label, unit = _label(record)
        if label not in ("post_forward", "post_backward_reshard"):
            continue
        i = bisect_right(freed, record["ts"])
        if i < len(freed) and freed[i] <= record["ts"] + record["dur"]:
            yield Bar("compute", "free", unit, host.at(record["ts"])[0], freed[i], freed[i])
