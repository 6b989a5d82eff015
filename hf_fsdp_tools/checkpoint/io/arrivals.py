"""Bytes that come in from other ranks, in order of position, put where they belong."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_fsdp_tools.checkpoint.io.reader import scatter
from hf_fsdp_tools.checkpoint.io.spans import FILE_STEP
from hf_fsdp_tools.checkpoint.io.transfer import Batch

__all__ = ["Arrivals"]


@dataclass(frozen=True, kw_only=True)
class _Arrival:
    """A batch whose bytes are coming in."""

    batch: Batch
    """What they are."""

    start: int
    """Position of its first byte."""

    stop: int
    """Position after its last."""

    memory: torch.Tensor
    """Its bytes: a buffer, or the final place of a direct batch."""


class Arrivals:
    """Puts bytes where they belong: straight, or through a buffer and `reader.scatter`.

    Args:
        batches: What is to come.
        files: All files of the checkpoint, whose numbers positions are made of (see ``spans``).
        on_bytes: Told how many bytes of the batches have arrived since the last call.
    """

    def __init__(self, batches: Sequence[Batch], files: Sequence[Path], on_bytes: Callable[[int], object]) -> None:
        base = {file: number * FILE_STEP for number, file in enumerate(files)}
        single = (
            Batch(file=batch.file, chunks=chunks, is_direct=batch.is_direct)
            for batch in batches
            for chunks in ([(chunk,) for chunk in batch.chunks] if batch.is_direct else [batch.chunks])
        )
        self._waiting = deque(sorted(((base[b.file] + b.start, b) for b in single), key=lambda pair: pair[0]))
        self._buffer_bytes = max((b.stop - b.start for b in batches if not b.is_direct), default=0)
        self._coming: list[_Arrival] = []
        self._free: list[torch.Tensor] = []
        self._made = 0
        self._on_bytes = on_bytes

    @property
    def staging_bytes(self) -> int:
        """All buffers together."""
        return self._made * self._buffer_bytes

    def take(self, start: int, received: torch.Tensor) -> None:
        """The bytes from a position on. All of one call lie after those of the calls before."""
        stop = start + received.numel()
        while self._waiting and self._waiting[0][0] < stop:
            self._coming.append(self._begin(*self._waiting.popleft()))
        for arrival in self._coming:
            begin, end = max(start, arrival.start), min(stop, arrival.stop)
            if begin < end:
                arrival.memory[begin - arrival.start : end - arrival.start] = received[begin - start : end - start]
        done = [arrival for arrival in self._coming if arrival.stop <= stop]
        self._coming = [arrival for arrival in self._coming if arrival.stop > stop]
        for arrival in done:
            self._finish(arrival)

    def _begin(self, start: int, batch: Batch) -> _Arrival:
        if batch.is_direct:
            memory = batch.chunks[0].memory.detach().reshape(-1).view(torch.uint8)
        elif self._free:
            memory = self._free.pop()
        else:
            memory = torch.empty(self._buffer_bytes, dtype=torch.uint8, device="cpu")
            self._made += 1
        return _Arrival(batch=batch, start=start, stop=start + batch.stop - batch.start, memory=memory)

    def _finish(self, arrival: _Arrival) -> None:
        batch = arrival.batch
        if not batch.is_direct:
            filled = arrival.memory[: arrival.stop - arrival.start]
            # To a GPU in one copy that is waited for, so that the buffer is free; casts and strides run there.
            scatter(batch, filled.to(batch.chunks[0].memory.device))
            self._free.append(arrival.memory)
        self._on_bytes(sum(chunk.num_bytes for chunk in batch.chunks))
