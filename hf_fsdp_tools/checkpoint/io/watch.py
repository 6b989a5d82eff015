"""Threads that read files, and a watch over them: storage that stops answering is named, and given up in the end.

A system call that waits for a network file system cannot be ended, so reads run in threads and the caller waits for them.
"""

import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar, copy_context
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from hf_fsdp_tools.errors import CheckpointError

__all__ = ["READ_TIMEOUT_S", "ReadThreads", "close_unless_read", "patience", "patiently", "reading"]

READ_TIMEOUT_S = 300.0
"""How long no read may be completed: more than a file server takes to fail over (assumed), and less than the 10 minutes
after which NCCL's collectives abort the ranks that wait (torch's default)."""

_WARN_S = 30.0  # the first warning; each further one after twice the time
_POLL_S = 0.5

# Reads happen below many functions, to all of which the value would have to be handed.
_patience_s: ContextVar[float] = ContextVar("patience_s", default=READ_TIMEOUT_S)

T = TypeVar("T")


class _Abandoned(Exception):
    """Ends a thread whose read was completed after all, when nobody wants it any more."""


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """What is read in this block may take so long between two completed reads."""
    token = _patience_s.set(seconds)
    try:
        yield
    finally:
        _patience_s.reset(token)


class reading:
    """A block in which this thread waits for a file. Without effect in threads that are not of ``ReadThreads``."""

    __slots__ = ("descriptor", "file", "position", "since", "threads")

    def __init__(self, file: Path, position: int = 0, descriptor: int | None = None) -> None:
        self.file, self.position, self.descriptor, self.since = file, position, descriptor, time.monotonic()
        self.threads: ReadThreads | None = getattr(_own, "threads", None)

    def __enter__(self) -> None:
        if self.threads is not None:
            self.threads.refuse_if_abandoned()
            _under_way[threading.get_ident()] = self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.threads is not None:
            del _under_way[threading.get_ident()]
            self.threads.last_done = time.monotonic()
            self.threads.refuse_if_abandoned()  # the memory that it read into may be gone


_under_way: dict[int, reading] = {}  # by thread
_own = threading.local()  # the ReadThreads to which a thread belongs


def close_unless_read(descriptor: int) -> None:
    """Close a descriptor; leave it open where a thread was given up that may still go on with its number."""
    if all(read.descriptor != descriptor for read in list(_under_way.values())):
        os.close(descriptor)


def patiently(call: Callable[..., T], *args: Any, file: Path | None = None) -> T:
    """The result of a call that reads files, or that waits for ``file`` as a whole; see ``ReadThreads``."""

    def noted() -> T:
        with reading(file) if file is not None else nullcontext():
            return call(*args)

    with ReadThreads(1) as threads:
        request: Future[T] = threads.submit(copy_context().run, noted)
        return request.result()


class ReadThreads:
    """A few threads, as those of ``ThreadPoolExecutor``, that are given up when a read stalls.

    When 30 s pass without a completed read, whoever waits for a result warns, with file, position and seconds, and again
    after each doubling. After the time that ``patience`` set (else 5 minutes), it raises.

    Args:
        count: Number of threads.
        never: Do not give up, only warn: for writing, which a full page cache may hold up for any time.
    """

    def __init__(self, count: int, *, never: bool = False) -> None:
        self.last_done = time.monotonic()
        """When a read was completed last."""

        self._patience_s = float("inf") if never else _patience_s.get()
        self._warn_s = _WARN_S
        self._abandoned = False
        self._queue: SimpleQueue[tuple[_Request[Any], Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()
        # Daemons: one that is stuck keeps no process from ending.
        self._threads = [threading.Thread(target=self._work, name=f"read {i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> "ReadThreads":
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until no thread does anything but a read that was given up."""
        for __ in self._threads:
            self._queue.put(None)
        while alive := [thread for thread in self._threads if thread.is_alive()]:
            if self._abandoned and all(thread.ident in _under_way for thread in alive):
                return
            alive[0].join(_POLL_S if len(alive) == 1 else 0.01)
            with suppress(CheckpointError):  # whatever result mattered was waited for
                self.check()

    def submit(self, call: Callable[..., T], *args: Any) -> "Future[T]":
        """The future result of a call; to wait for it is to watch over the reads."""
        request: _Request[T] = _Request(self)
        self._queue.put((request, call, args))
        return request

    def map(self, call: Callable[..., T], items: Iterable[Any]) -> Iterator[T]:
        """The result for each item, in order."""
        requests = [self.submit(call, item) for item in items]
        return (request.result() for request in requests)

    def refuse_if_abandoned(self) -> None:
        """For the threads themselves: end, if nobody waits any more."""
        if self._abandoned:
            raise _Abandoned

    def check(self) -> None:
        """Warn, or raise, if no read has been completed for long while some are under way."""
        reads = [read for read in list(_under_way.values()) if read.threads is self]
        if not reads or self._abandoned:
            return
        oldest = min(reads, key=lambda read: read.since)
        quiet_s = time.monotonic() - max(oldest.since, self.last_done)
        if quiet_s >= self._patience_s:
            self._abandoned = True
            raise CheckpointError(
                f"{oldest.file}: expected bytes at {oldest.position:,}, found none for {quiet_s:.0f} s: the storage does not "
                "answer. Check its server, the network and the mount; where it is only that slow, pass a longer "
                "read_timeout_s."
            )
        if quiet_s < _WARN_S:
            self._warn_s = _WARN_S
        elif quiet_s >= self._warn_s:
            self._warn_s = 2 * quiet_s
            until = f" It is given up after {self._patience_s:.0f} s." if self._patience_s < float("inf") else ""
            text = f"{oldest.file}: no answer at byte {oldest.position:,} for {quiet_s:.0f} s; still waiting.{until}"
            warnings.warn(text, stacklevel=3)

    def _work(self) -> None:
        _own.threads = self
        while (item := self._queue.get()) is not None:
            request, call, args = item
            if request.set_running_or_notify_cancel():
                try:
                    request.set_result(call(*args))
                except BaseException as error:
                    request.set_exception(error)
            del request, call, args, item  # they hold memory


class _Request(Future[T], Generic[T]):
    """A result that is waited for under watch."""

    def __init__(self, threads: ReadThreads) -> None:
        super().__init__()
        self._threads = threads

    def result(self, timeout: float | None = None) -> T:
        while timeout is None and not self.done():
            if wait([self], _POLL_S).not_done:
                self._threads.check()
        return super().result(timeout)
