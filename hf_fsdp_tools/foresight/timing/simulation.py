"""A step in time: the host issues work to the streams of a GPU, streams wait for each other, links are shared.

What the simulation knows of CUDA and NCCL: a stream runs its work in order; work begins when the host has issued it; a
wait holds a stream, or the host, until all work before the recorded event has ended; NCCL runs the collectives of one
communicator one after another in the order of their launch, whatever their streams are (NCCL user guide, "Using
multiple NCCL communicators concurrently"); collectives that share a link take turns.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from hf_fsdp_tools.foresight.events import COLLECTIVES, COPIES, Event, Record, Wait, Work
from hf_fsdp_tools.foresight.setup import TrainingSetup
from hf_fsdp_tools.foresight.timing.efficiency import Durations, Efficiency, efficiency_of
from hf_fsdp_tools.foresight.timing.hardware import gpu_named

_HOST_SECONDS = 15e-6
"""Host time of an operator that a model's Python calls, with its kernel's launch. (assumed: 0.5 ms for the forward pass
of a decoder layer of transformers, which has 30 to 40)"""
_AUTOGRAD_SECONDS = 7e-6  # The same where autograd's C++ calls it, in the backward pass. (assumed)
_HOST_COLLECTIVE_SECONDS = 150e-6  # Of a collective with FSDP2's Python around it. (assumed)
_COMPILED_HOST = 0.3  # Share that is left under `torch.compile`, which launches fused kernels. (assumed)


@dataclass(slots=True)
class _Task:
    """Work that a stream runs in one go: a collective, a copy, or kernels of the compute stream in a row."""

    stream: str
    seconds: float = 0.0  # Alone on the GPU
    memory_seconds: float = 0.0  # The part of these that the GPU's memory bounds
    host_seconds: float = 0.0
    lead: float = 0.0  # Not before this time after the host has begun to issue it can the work run without gaps
    works: list[tuple[int, float]] = field(default_factory=list)
    """Index of each `Work` in the list of events, and when it begins, counted from the task's begin."""
    group: str = ""  # The communicator of a collective
    link: str = ""
    ticket: int = 0  # The place in the order of launches on the communicator
    memory_share: float = 0.0  # Of the GPU's memory bandwidth, while it runs
    is_copy: bool = False
    ready: float = 0.0
    start: float = 0.0
    left: float = 0.0


class _Stall(NamedTuple):
    """The host waits until the GPU has nothing to do, and then for some time."""

    seconds: float


class _HostTask(NamedTuple):
    """Work of the host's own processors."""

    place: int  # Index in the list of events
    seconds: float


_Item: TypeAlias = _Task | Record | Wait | _Stall | _HostTask


@dataclass(frozen=True)
class Timing:
    """When the work of a step runs on one rank."""

    seconds: float
    spans: tuple[tuple[float, float], ...]
    """Start and end in seconds of each `Work`, in the order of the list of events."""
    parts: dict[str, float]
    """What the compute stream does in these seconds: `matmul`, `attention`, `memory` (kernels that the GPU's memory
    bounds), or it has nothing to do: `communication` (while a collective runs: exposed), `offload` (while bytes move
    between GPU and host, or the optimizer runs on the CPU), `allocator` (the stalls), `host` (launches are late)."""
    communication: float  # Seconds of all collectives, hidden or exposed

    def continued(self, two: "Timing", steps: int) -> "Timing":
        """The timing of so many micro-steps, of which this is one and `two` are two: all others are like the second."""

        def last(one: float, both: float) -> float:
            return one + (steps - 1) * (both - one)

        parts = {part: last(seconds, two.parts[part]) for part, seconds in self.parts.items()}
        return Timing(last(self.seconds, two.seconds), two.spans, parts, last(self.communication, two.communication))


def simulate(
    events: Sequence[Event],
    setup: TrainingSetup,
    *,
    efficiency: Efficiency | None = None,
    stalls: Mapping[int, float] | None = None,
) -> Timing:
    """The timing of a list of events (`Step.events`) on the setup's GPUs and links.

    `stalls`: by index of an event, before which the host waits for the GPU and then for so many seconds.
    """
    gpu, stalls = gpu_named(setup.gpu), stalls or {}
    durations = Durations(setup, gpu, efficiency or efficiency_of(gpu))
    program = _program(events, durations, _COMPILED_HOST if setup.compile else 1.0, stalls)
    simulation = _Simulation(program)
    seconds, spans = simulation.run(), simulation.spans
    parts = dict.fromkeys(("matmul", "attention", "memory"), 0.0)
    communication = on_host = 0.0
    for index, event in enumerate(events):
        if not isinstance(event, Work):
            continue
        start, end = spans[index]
        if event.operation in COLLECTIVES:
            communication += end - start
        elif event.stream == "offload":
            on_host += end - start
        elif event.stream == "compute" and event.operation in parts:
            parts[event.operation] += end - start
    stalled = sum(stalls.values())
    on_host = min(on_host, simulation.host_bound - stalled)
    parts["communication"] = simulation.exposed
    parts["offload"] = simulation.exposed_copies + on_host
    parts["allocator"] = stalled
    parts["host"] = simulation.host_bound - stalled - on_host
    return Timing(seconds, tuple(spans[index] for index in sorted(spans)), parts, communication)


def _program(
    events: Sequence[Event], durations: Durations, host_factor: float, stalls: Mapping[int, float]
) -> Iterator[_Item]:
    """What the host does, one after the other, with kernels in a row on the compute stream put together."""
    kernels: _Task | None = None
    tickets: dict[str, int] = {}
    from_python, from_autograd = _HOST_SECONDS * host_factor, _AUTOGRAD_SECONDS * host_factor
    for index, event in enumerate(events):
        if kernels is not None and index in stalls:
            yield kernels
            kernels = None
        if index in stalls:
            yield _Stall(stalls[index])
        if isinstance(event, Work):
            operation = event.operation
            seconds = durations.seconds(event)
            if event.stream == "compute" and operation not in COLLECTIVES and operation not in COPIES:
                if kernels is None:
                    kernels = _Task("compute")
                kernels.works.append((index, kernels.seconds))
                # the kernel can run when the host has issued it; what ran before it must have begun that much earlier
                is_autograd = event.phase == "backward" and not event.again
                kernels.host_seconds += from_autograd if is_autograd else from_python
                kernels.lead = max(kernels.lead, kernels.host_seconds - kernels.seconds)
                kernels.seconds += seconds
                if operation == "memory":
                    kernels.memory_seconds += seconds
                continue
        elif not isinstance(event, Record | Wait):
            continue
        if kernels is not None:
            yield kernels
            kernels = None
        yield _alone(index, event, seconds, durations, tickets) if isinstance(event, Work) else event
    if kernels is not None:
        yield kernels


def _alone(index: int, work: Work, seconds: float, durations: Durations, tickets: dict[str, int]) -> _Task | _HostTask:
    """The task of a collective, a copy, a kernel of another stream than compute, or of the host."""
    if work.stream == "offload":
        return _HostTask(index, seconds)
    task = _Task(work.stream, seconds, works=[(index, 0.0)], host_seconds=_HOST_SECONDS, lead=_HOST_SECONDS)
    if work.operation in COLLECTIVES:
        group = durations.group(work)
        task.host_seconds = task.lead = _HOST_COLLECTIVE_SECONDS
        if group.ranks > 1:
            task.group = work.axis
            task.link = "network" if group.nodes > 1 else "node"
            task.ticket = tickets[task.group] = tickets.get(task.group, 0) + 1
            task.memory_share = durations.memory_share(work, seconds)
    elif work.operation in COPIES:
        task.is_copy = True
    else:
        task.memory_share = 1.0
    return task


@dataclass(slots=True)
class _Queue:
    """What a stream runs, and what the host has issued to it besides."""

    items: deque[_Task | Record | Wait] = field(default_factory=deque)
    running: _Task | None = None

    @property
    def head(self) -> _Task | Record | Wait | None:
        return self.items[0] if self.items and self.running is None else None

    @property
    def is_done(self) -> bool:
        return self.running is None and not self.items


class _Simulation:
    """The clock, the host and the streams."""

    def __init__(self, program: Iterable[_Item]) -> None:
        self._program = deque(program)
        self._now = self._host = 0.0  # The clock of the GPU, and that of the host, which is ahead
        self._blocked: Wait | _Stall | None = None
        self._queues = {"compute": _Queue()}
        self._done: set[int] = set()  # Events that have come
        self._turn: dict[str, int] = {}  # Tickets that were served, by communicator
        self._taken: set[str] = set()  # Links in use
        self.spans: dict[int, tuple[float, float]] = {}
        """Start and end of each `Work`, by its index in the list of events."""
        self.exposed = self.exposed_copies = self.host_bound = 0.0
        """Seconds in which the compute stream has nothing to do: a collective runs, copies to or from the host do, or
        neither."""

    def run(self) -> float:
        while True:
            self._issue()
            while self._begin_all():
                self._issue()
            until = self._next_time()
            if until is None:
                break
            self._pass(until)
        assert not self._program and self._blocked is None, "the list of events waits for itself"
        seconds = max(self._now, self._host)
        self.host_bound += seconds - self._now
        return seconds

    def _issue(self) -> None:
        """The host goes on until it has to wait."""
        if isinstance(self._blocked, Wait) and self._blocked.event in self._done:
            self._host, self._blocked = max(self._host, self._now), None
        elif isinstance(self._blocked, _Stall) and all(queue.is_done for queue in self._queues.values()):
            self._host, self._blocked = max(self._host, self._now) + self._blocked.seconds, None
        while self._blocked is None and self._program:
            item = self._program.popleft()
            if isinstance(item, _Stall) or (isinstance(item, Wait) and item.stream == "host"):
                self._blocked = item
                self._issue()
            elif isinstance(item, _HostTask):
                start, self._host = self._host, self._host + item.seconds
                self.spans[item.place] = start, self._host
            else:
                if isinstance(item, _Task):
                    item.ready = self._host + item.lead
                    self._host += item.host_seconds
                self._queues.setdefault(item.stream, _Queue()).items.append(item)

    def _begin_all(self) -> bool:
        """Pass records and waits, and begin what can begin now; whether an event has come that the host waits for."""
        is_changed = True
        while is_changed:
            is_changed = False
            for queue in self._queues.values():
                while (head := queue.head) is not None and self._pass_head(queue, head):
                    is_changed = True
        if isinstance(self._blocked, Wait):
            return self._blocked.event in self._done
        return self._blocked is not None and all(queue.is_done for queue in self._queues.values())

    def _pass_head(self, queue: _Queue, head: _Task | Record | Wait) -> bool:
        """Whether a stream could go on with the first of its items."""
        if isinstance(head, Record):
            self._done.add(head.event)
        elif isinstance(head, Wait):
            if head.event not in self._done:
                return False
        else:
            if head.ready > self._now or head.link in self._taken:
                return False
            if head.group:
                if self._turn.get(head.group, 0) != head.ticket - 1:
                    return False
                self._taken.add(head.link)
            head.start, head.left = self._now, head.seconds
            queue.running = head
        queue.items.popleft()
        return True

    def _rate(self) -> float:
        """How fast the compute stream goes: kernels of other streams stop it, collectives share its memory."""
        task = self._queues["compute"].running
        if task is None or not task.seconds:
            return 1.0
        share = sum(
            queue.running.memory_share
            for stream, queue in self._queues.items()
            if queue.running is not None and stream != "compute"
        )
        if share >= 1:
            return 0.0
        bound = task.memory_seconds / task.seconds
        return 1 / (1 - bound + bound / (1 - share))

    def _next_time(self) -> float | None:
        """When something ends or can begin; None if nothing will."""
        times = []
        for stream, queue in self._queues.items():
            if (task := queue.running) is not None:
                rate = self._rate() if stream == "compute" else 1.0
                if rate:
                    times.append(self._now + task.left / rate)
            elif isinstance(head := queue.head, _Task) and head.ready > self._now:
                times.append(head.ready)
        return min(times) if times else None

    def _pass(self, until: float) -> None:
        """Let time pass, and end what ends then."""
        passed, rate = until - self._now, self._rate()
        if self._queues["compute"].running is None:
            running = [queue.running for queue in self._queues.values() if queue.running is not None]
            if any(task.group for task in running):
                self.exposed += passed
            elif any(task.is_copy for task in running):
                self.exposed_copies += passed
            else:
                self.host_bound += passed
        self._now = until
        for stream, queue in self._queues.items():
            if (task := queue.running) is None:
                continue
            task.left -= passed * (rate if stream == "compute" else 1.0)
            if task.left > 1e-12:
                continue
            queue.running = None
            if task.group:
                self._turn[task.group] = task.ticket
                self._taken.discard(task.link)
            self._note(task)

    def _note(self, task: _Task) -> None:
        """Remember when a task's work ran; what slowed the task is spread over all of it."""
        stretch = (self._now - task.start) / task.seconds if task.seconds else 1.0
        starts = [task.start + begin * stretch for _, begin in task.works]
        ends = [*starts[1:], self._now]
        for (index, _), start, end in zip(task.works, starts, ends, strict=True):
            self.spans[index] = start, end
