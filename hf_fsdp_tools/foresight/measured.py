"""A real training step over its course, read from what torch's profiler exports with `profile_memory=True`.

The trace names what is needed:

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
from dataclasses import replace
from typing import Any

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.events import COLLECTIVES
from hf_fsdp_tools.foresight.timeline import Bar, Schedule, Timeline, extremes, make_schedule

_LABEL = re.compile(r"FSDP::(\w+)(?: \((.*?)\))?(?: \[.*)?$")  # names all modules of a unit, by ", "

_Record = Mapping[str, Any]


class _Host:
    """Where the host is in the step at a time: the phase and the unit."""

    def __init__(self, records: Sequence[_Record]) -> None:
        changes: list[tuple[float, str, str]] = []
        for record in records:
            start, end = record["ts"], record["ts"] + record.get("dur", 0.0)
            label, unit = _label(record)
            if label in ("pre_forward", "pre_backward"):
                changes.append((start, label.removeprefix("pre_"), unit))
            elif label == "post_forward":
                changes.append((end, "after a unit" if unit else "loss", ""))
            elif label == "root_post_backward_callback":
                changes.append((end, "clip", ""))
            elif record["name"].startswith("Optimizer.step#"):
                changes.append((start, "optimizer", ""))
        if not any(phase == "backward" for _, phase, _ in changes):  # a model without FSDP
            times = [r["ts"] for r in records if r["name"].startswith("autograd::engine::evaluate_function")]
            changes += [(min(times), "backward", ""), (max(times), "clip", "")] if times else []
        changes.sort(key=lambda change: change[0])
        for at, (time, phase, _) in enumerate(changes):
            if phase == "after a unit":  # after the last one comes the loss, which transformers' models compute
                is_last = at + 1 < len(changes) and changes[at + 1][1] in ("loss", "backward")
                changes[at] = (time, "loss" if is_last else "forward", "")
        self._changes = changes
        self._times = [time for time, _, _ in changes]

    def at(self, time: float) -> tuple[str, str]:
        i = bisect_right(self._times, time) - 1
        return self._changes[i][1:] if i >= 0 else ("forward", "")


def _label(record: _Record) -> tuple[str, str]:
    """FSDP2's label and the unit's first module; ("", "") for other records."""
    match = _LABEL.match(record["name"]) if record["name"].startswith("FSDP::") else None
    return (match[1], (match[2] or "").split(", ")[0]) if match else ("", "")


def _records(trace: _Record) -> list[_Record]:
    """The records of a trace that have a time, in the order in which they begin, labels of GPU streams left out."""
    events = trace.get("traceEvents", ())
    kept = [r for r in events if r.get("ph") in ("X", "i") and "ts" in r and r.get("cat") != "gpu_user_annotation"]
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
    """When the recorded step computed and communicated: streams of a GPU, or the host and gloo's threads."""
    records = _records(trace)
    host, began = _Host(records), records[0]["ts"]
    read = _gpu_bars if any(record.get("cat") == "kernel" for record in records) else _cpu_bars
    return make_schedule(
        "measured",
        (
            replace(bar, start_s=(bar.start_s - began) / 1e6, end_s=(bar.end_s - began) / 1e6)
            for bar in read(records, host)
        ),
    )


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
    bars, inner = [], dict[int, _Record]()
    for record in records:
        if record.get("cat") != "cpu_op" or record["tid"] in threads:
            continue
        before = inner.get(record["tid"])
        if before is not None and record["ts"] >= before["ts"] + before["dur"]:
            bars.append(before)
        inner[record["tid"]] = record  # one that begins before the last has ended is called by it
    for record in (*bars, *inner.values()):
        if "c10d" not in record["name"]:
            phase, unit = host.at(record["ts"])
            yield Bar("compute", "compute", unit, phase, record["ts"], record["ts"] + record["dur"])


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
