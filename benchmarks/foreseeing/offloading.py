"""Activation checkpoints in host memory (`offload_wrapper`, `save_on_cpu`), which PyTorch's GPT-1T of 2022 needed.

The library has no such option; the benchmark lays it over a trace.
"""

from dataclasses import replace

from hf_fsdp_tools.foresight.events import Alloc, Event, Free, Mark, Work
from hf_fsdp_tools.foresight.tracing.trace import Trace

__all__ = ["offload_checkpoints"]


def offload_checkpoints(trace: Trace, num_bytes: int) -> Trace:
    """The trace with the inputs of checkpointed blocks copied to the host, and back before the blocks' backward.

    The copies run on the compute stream, as those of `save_on_cpu` do.

    Args:
        trace: of a model with activation checkpointing.
        num_bytes: of one block's input.
    """
    events = list(trace.events)
    freed = {event.block: at for at, event in enumerate(events) if isinstance(event, Free)}
    new_block = 1 + max(event.block for event in events if isinstance(event, Alloc))
    backward = next(at for at, event in enumerate(events) if isinstance(event, Mark) and "backward" in event.where)
    inserted: dict[int, tuple[Event, Event]] = {}
    for at, event in enumerate(events[:backward]):
        if not isinstance(event, Alloc) or event.num_bytes != num_bytes or freed.get(event.block, 0) < backward:
            continue
        block = next((module for each in events[at:backward] if (module := _begun_block(each)) is not None), None)
        if block is None:  # the last block's output
            continue
        copy = Work("device_to_host", 0.0, num_bytes, event.unit, "forward")
        back = replace(copy, operation="host_to_device", phase="backward")
        inserted[_place(events, at, "after_forward", block)] = copy, Free(event.block)
        inserted[_place(events, at, "before_backward", block)] = replace(event, block=new_block), back
        events[freed[event.block]] = Free(new_block)
        new_block += 1
    changed = [each for at, event in enumerate(events) for each in (event, *inserted.get(at, ()))]
    return replace(trace, events=tuple(changed))


def _begun_block(event: Event) -> str | None:
    """The block whose forward pass begins here."""
    if isinstance(event, Mark) and event.where == "before_forward" and event.module.rpartition(".")[2].isdigit():
        return event.module
    return None


def _place(events: list[Event], after: int, where: str, module: str) -> int:
    """Index of the first mark of a module's pass."""
    for at in range(after, len(events)):
        event = events[at]
        if isinstance(event, Mark) and (event.where, event.module, event.again) == (where, module, False):
            return at
    raise ValueError(f"{module} has no mark {where}")
