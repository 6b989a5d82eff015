"""What a step looks like over its course: of hand-made events, and of traces as torch's profiler writes them."""

import pytest

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.foresight.events import Alloc, Free, Work
from hf_fsdp_tools.foresight.timeline import extremes, memory_timeline, read_memory, read_schedule, step_schedule

GB = 10**9


def a_step(units=3, held=10 * GB, gather_s=1.0, compute_s=2.0):
    """Events of a step whose blocks are gathered one ahead, memory that is there before, times of the works."""
    events, spans = [], []
    clock = {"compute": 0.0, "all_gather": 0.0, "reduce_scatter": 0.0}
    gathered, kept = {}, {}

    def work(operation, unit, phase, seconds, stream="compute", after=0.0):
        start = max(clock[stream], after)
        clock[stream] = start + seconds
        events.append(Work(operation, 0.0, 0.0, unit, phase, stream))
        spans.append((start, clock[stream]))

    def gather(unit, phase):
        number = len(events) + 1000
        events.append(Alloc(number, GB, "gathered parameters", unit, "all_gather"))
        work("all_gather", unit, phase, gather_s, "all_gather")
        gathered[unit] = number, clock["all_gather"]

    def one_pass(order, phase):
        gather(order[0], phase)
        for unit, following in zip(order, [*order[1:], None], strict=True):
            if following is not None:
                gather(following, phase)
            if phase == "forward":
                kept[unit] = len(events) + 1000
                events.append(Alloc(kept[unit], 2 * GB, "activations", unit))
            number, ready = gathered.pop(unit)
            work("matmul", unit, phase, compute_s, after=ready)
            events.append(Free(number))
            if phase == "backward":
                events.append(Free(kept[unit]))
                work("reduce_scatter", unit, phase, gather_s, "reduce_scatter", after=clock["compute"])

    names = [f"model.layers.{i}" for i in range(units)]
    one_pass(names, "forward")
    events.append(Alloc(1, 26 * GB, "logits and loss", ""))
    work("memory", "", "loss", 0.5)
    events.append(Free(1))
    one_pass(names[::-1], "backward")
    work("memory", "", "optimizer", 0.5, after=max(clock.values()))
    return events, [Alloc(-1, held, "parameters", "")], spans


def test_memory_of_a_step_by_kind():
    events, resident, _ = a_step()
    line = memory_timeline(events, resident)
    assert line.peak_bytes == 42 * GB and (line.peak_phase, line.peak_unit) == ("loss", "model.layers.2")
    held = {kind: values[line.peak] for kind, values in line.kinds.items() if values[line.peak]}
    assert held == {"parameters": 10 * GB, "activations": 6 * GB, "logits and loss": 26 * GB}
    assert line.allocated[-1] == 10 * GB and line.positions == tuple(map(float, range(len(events))))
    assert set(line.phases) == {"forward", "loss", "backward", "optimizer"}
    assert max(line.kinds["gathered parameters"]) == 2 * GB, "one unit ahead"
    # what was there before may be freed
    line = memory_timeline([Alloc(1, 5, "temporaries", ""), Free(7)], [Alloc(7, 100, "gradients", "")])
    assert line.allocated == (105, 5)


def test_points_lie_in_time_where_times_are_known():
    events, resident, spans = a_step()
    line = memory_timeline(events, resident).in_seconds(events, spans)
    assert line.axis == "seconds" and list(line.positions) == sorted(line.positions)
    assert line.positions[line.peak] == spans[5][1], "logits are made when the forward pass has computed"


def test_few_points_keep_the_peak_the_reserved_peak_and_the_phases():
    events, resident, _ = a_step(units=400)
    reserved = [20 * GB] * len(events)
    reserved[1234] = 99 * GB
    line = memory_timeline(events, resident, reserved=reserved, most_points=100)
    full = memory_timeline(events, resident, most_points=10**6)
    assert len(line.positions) < 150 < len(full.positions) == len(events)
    assert line.peak_bytes == full.peak_bytes and max(line.reserved) == 99 * GB
    for phase in ("forward", "backward", "optimizer"):
        few, every = (
            [held for held, at in zip(one.allocated, one.phases, strict=True) if at == phase] for one in (line, full)
        )
        assert (max(few), min(few)) == (max(every), min(every)), phase
    assert list(dict.fromkeys(line.phases)) == ["forward", "loss", "backward", "optimizer"]
    assert extremes([1, 9, 1, 0, 1, 1, 1, 1], ["a"] * 8, 4) == [0, 1, 3, 4, 7]


def test_a_schedule_without_overlap_is_exposed_whole():
    works = [Work("all_gather", 0, 0, "a", "forward", "all_gather"), Work("matmul", 0, 0, "a", "forward")]
    schedule = step_schedule(works, [(0.0, 3.0), (3.0, 4.0)])
    assert schedule.exposed == ((0.0, 3.0),) and schedule.seconds == 4.0
    hidden = step_schedule(works, [(1.0, 3.0), (0.0, 4.0)])
    assert hidden.exposed == () and hidden.communication_seconds == 2.0
    part = step_schedule([*works, works[1]], [(1.0, 6.0), (0.0, 2.0), (3.0, 5.0)])
    assert part.exposed == ((2.0, 3.0), (5.0, 6.0))
    # kernels of one unit become one bar, and pauses stay
    works = [Work("matmul", 0, 0, "a", "forward")] * 3 + [Work("matmul", 0, 0, "b", "forward")]
    schedule = step_schedule(works, [(0.0, 1.0), (1.0, 2.0), (3.0, 4.0), (4.0, 5.0)])
    assert [(bar.unit, bar.start_s, bar.end_s) for bar in schedule.bars] == [("a", 0, 2), ("a", 3, 4), ("b", 4, 5)]


def record(name, ts, dur=None, cat="cpu_op", tid=1, **args):
    found = {"ph": "X" if dur is not None else "i", "cat": cat, "name": name, "ts": ts, "tid": tid, "args": args}
    return found | ({} if dur is None else {"dur": dur})


def memory(ts, num_bytes, total, device=0, reserved=0):
    kind = {"Device Type": device, "Device Id": 0 if device else -1}
    return record(
        "[memory]",
        ts,
        cat="cpu_instant_event",
        Bytes=num_bytes,
        **kind,
        **{"Total Allocated": total, "Total Reserved": reserved},
    )


LABELS = [
    record("FSDP::pre_forward", 0, 10, "user_annotation"),
    record("FSDP::all_gather (layers.0)", 12, 4, "user_annotation"),
    record("FSDP::pre_forward (layers.0)", 20, 10, "user_annotation"),
    record("FSDP::post_forward (layers.0)", 50, 4, "user_annotation"),
    record("FSDP::pre_forward (norm, head)", 60, 5, "user_annotation"),
    record("FSDP::post_forward", 90, 5, "user_annotation"),
    record("FSDP::pre_backward (norm, head)", 100, 5, "user_annotation"),
    record("FSDP::pre_backward (layers.0)", 120, 5, "user_annotation"),
    record("FSDP::post_backward_reshard (layers.0)", 150, 4, "user_annotation"),
    record("FSDP::post_backward_reduce (layers.0)", 155, 10, "user_annotation"),
    record("FSDP::root_post_backward_callback", 150, 30, "user_annotation"),
    record("Optimizer.step#AdamW.step", 200, 50, "user_annotation"),
]


def test_a_recorded_step_on_a_gpu_reads_the_gpus_allocator_and_streams():
    trace = {
        "traceEvents": [
            *LABELS,
            memory(1, 8, 8),
            memory(2, 100, 5000, device=1, reserved=8000),
            memory(130, -100, 4900, device=1, reserved=8000),
            record("cudaLaunchKernelExC", 13, 1, "cuda_runtime", correlation=1),
            record("ncclDevKernel_AllGather_RING_LL", 40, 20, "kernel", 7, correlation=1),
            record("cudaLaunchKernel", 25, 1, "cuda_runtime", correlation=2),
            record("gemm", 60, 30, "kernel", 8, correlation=2),
            record("cudaLaunchKernelExC", 156, 1, "cuda_runtime", correlation=3),
            record("ncclDevKernel_ReduceScatter_Sum_f32", 80, 30, "kernel", 9, correlation=3),
            record("cudaMemcpyAsync", 205, 1, "cuda_runtime", correlation=4),
            record("Memcpy DtoH (Device -> Pinned)", 120, 5, "gpu_memcpy", 8, correlation=4),
            record("FSDP::all_gather (layers.0)", 40, 20, "gpu_user_annotation", 7),
        ]
    }
    line = read_memory(trace, resident_bytes=10_000)
    assert line.allocated == (4900, 5000, 4900) and line.reserved == (8000, 8000, 8000)
    schedule = read_schedule(trace)
    found = [(bar.operation, bar.unit, bar.phase) for bar in schedule.bars]
    assert found == [
        ("all_gather", "layers.0", "forward"),
        ("compute", "layers.0", "forward"),
        ("reduce_scatter", "layers.0", "backward"),
        ("device_to_host", "", "optimizer"),
    ]
    assert [time for span in schedule.exposed for time in span] == pytest.approx([40e-6, 60e-6, 90e-6, 110e-6])
    with pytest.raises(ConfigError, match="profile of the step is empty"):
        read_schedule({"traceEvents": []})


def test_collectives_of_gloo_belong_to_the_units_that_launched_them():
    """gloo reduces by its all-reduce, on threads of its own; the host computes unless it waits for a collective."""
    trace = {
        "traceEvents": [
            *LABELS,
            record("c10d::_allgather_base_", 13, 1),
            record("gloo:all_gather", 14, 6, "user_annotation", 9),
            record("aten::linear", 30, 10),
            record("aten::mm", 31, 8),
            record("c10d::_reduce_scatter_base_", 156, 1),
            record("gloo:all_reduce", 158, 20, "user_annotation", 9),
            record("aten::copy_", 160, 5, tid=9),
            record("c10d::allreduce_", 190, 1),
            record("_c10d_functional::wait_tensor", 191, 6),
            record("gloo:all_reduce", 191, 5, "user_annotation", 9),
            record("aten::mul", 210, 5),
        ]
    }
    schedule = read_schedule(trace)
    collectives = [(b.operation, b.unit, b.phase) for b in schedule.bars if b.track == "communication"]
    assert collectives == [
        ("all_gather", "layers.0", "forward"),
        ("reduce_scatter", "layers.0", "backward"),
        ("all_reduce", "", "clip"),
    ]
    computed = [(b.unit, b.phase, round(1e6 * b.start_s)) for b in schedule.bars if b.operation == "compute"]
    assert computed == [("layers.0", "forward", 31), ("", "optimizer", 210)], "not gloo's thread, not the waiting"
    assert schedule.exposed_seconds == pytest.approx(31e-6)
