"""A stand-in for accelerators: what can go wrong on a GPU by chance goes wrong here. Copies run late, on a thread for
each stream; memory is poisoned once it is freed; each thread begins on device 0, and devices of calls are noted."""

import queue
import random
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from hf_fsdp_tools.accelerator import SideStream

POISON = 0xCB


class Stream:
    """Works through its queue on a thread of its own, each piece late."""

    def __init__(self, machine: "Machine", name: str) -> None:
        self._machine = machine
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, work: Callable[[], object], late_s: float | None = None) -> None:
        late_s = self._machine.rng.uniform(0, 2 * self._machine.late_s) if late_s is None else late_s
        self._queue.put(lambda: (time.sleep(late_s), work()))

    def mark(self) -> "Mark":
        mark = Mark()
        self._queue.put(mark.done.set)
        return mark

    def end(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except BaseException as error:
                self.error = error
            del work


class Mark:
    """An event of a stream."""

    def __init__(self) -> None:
        self.done = threading.Event()

    def query(self) -> bool:
        return self.done.is_set()

    def synchronize(self) -> None:
        assert self.done.wait(200), "the stream does not come to this mark"


class Machine:
    """A few devices, their memory and streams; a context manager."""

    def __init__(self, *, late_s: float = 1e-3, seed: int = 0) -> None:
        self.late_s = late_s
        self.rng = random.Random(seed)
        self.named: list[int] = []
        """Devices on which calls were made, in order."""
        self.done: list[str] = []
        """What the device has done, in order: copy, copy_each."""
        self.pinned_bytes: list[int] = []
        """The size of each pinned allocation."""
        self.pinned_alive = 0
        self.released = 0
        self._current = threading.local()
        self._streams: dict[int | str, Stream] = {}
        self._memory: dict[int, np.ndarray[Any, Any]] = {}
        self._on_device: set[int] = set()
        self._read_by_copies: list[tuple[int, int]] = []
        self._lock = threading.Lock()

    def __enter__(self) -> "Machine":
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self._streams.values():
            stream.end()
        errors = [stream.error for stream in self._streams.values() if stream.error]
        assert not errors, errors

    def stream(self, key: int | str) -> Stream:
        """A named stream, or the default stream of a device."""
        with self._lock:
            if key not in self._streams:
                self._streams[key] = Stream(self, f"stream {key}")
            return self._streams[key]

    def touch(self) -> None:
        """Note a call that goes to the calling thread's current device."""
        self.named.append(getattr(self._current, "device", 0))

    def set_device(self, index: int, stream: Stream | None = None) -> None:
        self._current.device = index
        self._current.stream = stream or self.stream(index)
        self.touch()

    def current_stream(self, index: int) -> Stream:
        same = getattr(self._current, "device", 0) == index
        return self._current.stream if same and hasattr(self._current, "stream") else self.stream(index)

    def tensor(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Device memory."""
        count = int(np.prod(shape)) * dtype.itemsize
        return self._allocate(count, on_device=True, freed=lambda memory: None).view(dtype).reshape(shape)

    def _allocate(self, num_bytes: int, *, on_device: bool, freed: Callable[..., object]) -> torch.Tensor:
        memory = np.full(max(1, num_bytes), POISON, dtype=np.uint8)
        handle = memory[:]  # dies with the tensor; what is queued holds `memory`
        address = memory.ctypes.data
        with self._lock:
            self._memory[address] = memory
            (self._on_device.add if on_device else self._on_device.discard)(address)
        weakref.finalize(handle, freed, memory).atexit = False
        return torch.from_numpy(handle)[:num_bytes]

    def pinned(self, num_bytes: int) -> torch.Tensor:
        self.touch()
        self.pinned_bytes.append(num_bytes)
        self.pinned_alive += 1

        def freed(memory: np.ndarray[Any, Any]) -> None:
            self.pinned_alive -= 1
            memory.fill(POISON)  # it may be given to somebody else at once

        return self._allocate(num_bytes, on_device=False, freed=freed)

    def scratch(self, num_bytes: int, stream: Stream) -> torch.Tensor:
        """Device memory that is given to somebody else once `stream` has done what was queued when it is freed."""
        freed = lambda memory: stream.add(lambda: memory.fill(POISON), late_s=0)  # noqa: E731
        return self._allocate(num_bytes, on_device=True, freed=freed)

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._on_device

    def raw(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, which does not keep the tensor alive."""
        memory = self._memory.get(tensor.untyped_storage().data_ptr())
        if memory is None:
            return tensor.detach()
        whole = torch.from_numpy(memory)
        whole = whole[: whole.numel() // tensor.itemsize * tensor.itemsize].view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def queue_copy(self, stream: Stream, to: list[torch.Tensor], sources: list[torch.Tensor], name: str) -> None:
        pairs = [(self.raw(t), self.raw(s)) for t, s in zip(to, sources, strict=True)]
        spans = [(s.data_ptr(), s.data_ptr() + s.numel() * s.itemsize) for _, s in pairs if s.is_contiguous()]
        with self._lock:
            self._read_by_copies += spans

        def run() -> None:
            for t, s in pairs:
                t.copy_(s)
            with self._lock:
                for span in spans:
                    self._read_by_copies.remove(span)
            self.done.append(name)

        stream.add(run)

    def is_read(self, memory: memoryview) -> bool:
        """Whether a copy that is queued or running reads some of these bytes."""
        start = np.frombuffer(memory, dtype=np.uint8).ctypes.data
        with self._lock:
            return any(a < start + memory.nbytes and start < b for a, b in self._read_by_copies)

    @property
    def copies_under_way(self) -> int:
        with self._lock:
            return len(self._read_by_copies)


class LateSideStream(SideStream):
    """The side stream of one of the machine's devices."""

    def __init__(self, machine: Machine, index: int, *, holds: Callable[[torch.Tensor], bool] | None = None) -> None:
        self.device = torch.device("cpu")  # never asked: every call that would need it is below
        self.machine, self.index = machine, index
        self._side = machine.stream(f"side of {index}")
        self._holds = holds or machine.is_on_device

    def holds(self, tensor: torch.Tensor) -> bool:
        return self._holds(tensor)

    def enter(self) -> None:
        self.machine.set_device(self.index, self._side)

    def follow(self) -> None:
        self.machine.touch()
        before = self.machine.current_stream(self.index).mark()
        self._side.add(before.synchronize, late_s=0)

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return self.machine.pinned(num_bytes)

    def empty(self, num_bytes: int) -> torch.Tensor:
        self.machine.touch()
        return self.machine.scratch(num_bytes, self.machine.current_stream(self.index))

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        assert to.dtype == source.dtype and to.is_contiguous() and source.is_contiguous()
        self.machine.touch()
        self.machine.queue_copy(self.machine.current_stream(self.index), [to], [source], "copy")

    def copy_after_current(self, to: torch.Tensor, source: torch.Tensor) -> Any:
        assert to.dtype == source.dtype and to.is_contiguous() and source.is_contiguous()
        self.follow()
        self.machine.queue_copy(self._side, [to], [source], "copy")
        return self.mark()

    def lead(self, event: Any) -> None:
        event.synchronize()  # the host computes

    def copy_each(self, to: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        self.machine.touch()
        assert all(self.holds(tensor) for tensor in (*to, *sources)), "a kernel reads and writes device memory"
        self.machine.queue_copy(self.machine.current_stream(self.index), to, sources, "copy_each")

    def mark(self) -> Mark:
        return self._side.mark()

    def wait(self) -> None:
        self._side.mark().synchronize()

    def release(self) -> None:
        self.machine.released += 1
