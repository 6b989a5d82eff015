"""Write a list of events: numbers of blocks and of CUDA events are given here."""

from collections.abc import Iterable
from dataclasses import replace

from hf_fsdp_tools.foresight.events import Alloc, Event, Free, Kind, Operation, Phase, Record, Stream, Wait, Work


class EventWriter:
    """A list of events that grows."""

    def __init__(self, first_block: int = 0) -> None:
        self.events: list[Event] = []  # What was written
        self.phase: Phase = "forward"  # The part of the step that new work belongs to
        self.unit = ""  # The unit that new memory and work belong to
        self._block = first_block
        self._event = 0

    def new_block(self) -> int:
        self._block += 1
        return self._block

    def alloc(self, num_bytes: int, kind: Kind, stream: Stream = "compute") -> Alloc:
        """Memory with a number of its own, which is not written."""
        return Alloc(self.new_block(), num_bytes, kind, self.unit, stream)

    def take(self, num_bytes: int, kind: Kind, stream: Stream = "compute") -> int:
        self.events.append(self.alloc(num_bytes, kind, stream))
        return self._block

    def free(self, *blocks: int) -> None:
        self.events.extend(Free(block) for block in blocks)

    def work(
        self,
        operation: Operation,
        num_bytes: float,
        stream: Stream = "compute",
        *,
        dtype_bytes: int = 2,
        ranks: int = 1,
    ) -> None:
        """A copy or a collective."""
        self.events.append(
            Work(operation, 0.0, float(num_bytes), self.unit, self.phase, stream, dtype_bytes, ranks=ranks)
        )

    def record(self, stream: Stream = "compute") -> int:
        """A CUDA event on a stream; its number."""
        self._event += 1
        self.events.append(Record(self._event, stream))
        return self._event

    def wait(self, event: int, *streams: Stream) -> None:
        self.events.extend(Wait(event, stream) for stream in streams)

    def wait_stream(self, waiting: Stream, other: Stream) -> None:
        """A stream waits for all that another one was given so far."""
        self.wait(self.record(other), waiting)

    def wait_on_host(self, event: int) -> None:
        self.events.append(Wait(event, "host"))

    def extend_renumbered(self, events: Iterable[Event]) -> None:
        """Events of memory and work from elsewhere, whose blocks get numbers of their own here."""
        numbers: dict[int, int] = {}
        for event in events:
            if isinstance(event, Alloc):
                numbers[event.block] = self.new_block()
                event = replace(event, block=numbers[event.block])
            elif isinstance(event, Free):
                event = Free(numbers.pop(event.block))
            self.events.append(event)
