"""The key-value store of the process group, asked by one thread, which also tells the others what this rank does.

The thread uses the connection that the process group has. With one more connection per rank, all made in the first
call, the store stands still: for each, its only thread asks the name server for the name of the address, and waits 5 s
where a question or its answer is lost (`TCPStore` of torch 2.11 to 2.15; seen with 24 ranks and more on one machine).

Who asks waits for the thread, not for the store: a call of torch never returns while the process that keeps the store
is stopped.
"""

import json
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch.distributed as dist

from hf_fsdp_tools.distributed.storage import progress_made, waited_for

Place = Sequence[str]
"""What a rank does, and the path of the round in which it does it; of a scope, with a slash at its end; of the round
that ends a scope, with the number of rounds and scopes that the rank has begun in it."""

SILENT_S = 60
"""Seconds for which a process may be stopped, and for which the store may not answer. (assumed)"""

_BEAT_S = 2.0
"""Between two beats, and before the first: most rounds are over by then."""


class StoreClient:
    """One rank's way to the store, whose operations (`get`, `set`, …) are methods of this object."""

    def __init__(self, store: Any, key: str, also: Callable[[Any], None], silent_s: float = SILENT_S) -> None:
        self.store, self._key, self._also, self._silent_s = store, key, also, silent_s
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._unanswered: Future[Any] | None = None
        self._places: list[Place] = []
        self._count, self._told, self._watches, self._is_over = 0, False, False, False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        return partial(self._ask, operation)

    def _ask(self, operation: str, *args: Any) -> Any:
        """The store's answer."""
        answer: Future[Any] = Future()
        call = partial(getattr(self.store, operation), *args)
        with self._changed:
            is_silent = self._unanswered is not None and not self._unanswered.done()
            has_thread = self._begin() and self._thread is not threading.current_thread()  # as garbage is collected
            if has_thread and not is_silent:
                self._calls.append((answer, call))
        if not has_thread:
            return call()
        # Counted by its own steps: a job that was stopped as a whole goes on at different moments.
        for _ in range(0 if is_silent else max(1, round(self._silent_s))):
            with suppress(TimeoutError):
                return answer.result(1.0)
        self._unanswered = self._unanswered if is_silent else answer
        raise dist.DistStoreError(f"no answer for {self._silent_s:.0f} s")

    @contextmanager
    def telling(self, doing: str, path: str) -> Iterator[None]:
        """While this block runs, the rank does this, there (see `Place`)."""
        with self._changed:
            self._places.append((doing, path))
            self._begin()
        try:
            yield
        finally:
            with self._changed:
                self._places.pop()

    @property
    def places(self) -> list[Place]:
        """Where the rank is: in a scope, within it in another, and in a round."""
        return list(self._places)

    def watch(self) -> None:
        """Let the thread do what it also does."""
        with self._changed:
            self._watches = True
            self._begin()

    def stop(self) -> None:
        """End the thread, which holds the store of a group that is over, when no call is under way."""
        with self._changed:
            self._watches, self._is_over = False, True
            self._changed.notify()

    def _begin(self) -> bool:
        """Have the thread look at what has changed; False where none can be begun, as the interpreter is ending."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="store", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:
                return False
        self._changed.notify()
        return True

    def _run(self) -> None:
        beat_s, tells = time.monotonic() + _BEAT_S, True
        while True:
            with self._changed:
                while not self._calls:
                    if tells and (self._places or self._told or self._watches):
                        if not self._changed.wait(max(0.0, beat_s - time.monotonic())):
                            break
                    elif self._is_over and not self._places:
                        self._thread = None  # the next call starts another one
                        return
                    else:
                        self._changed.wait()
                        beat_s = time.monotonic() + _BEAT_S
                call = self._calls.popleft() if self._calls else None
            if call is not None:
                _answer(*call)
            if time.monotonic() >= beat_s:
                beat_s = time.monotonic() + _BEAT_S
                try:
                    self._tell()
                except RuntimeError:  # the store is gone: whoever waits for it says so
                    tells = False

    def _tell(self) -> None:
        """Tell the other ranks where this one is, or for the last time that it is in no call."""
        if (at := self.places) or self._told:
            self._count += 1
            text = {"count": self._count, "progress": progress_made(), "at": at, "for": waited_for()}
            self.store.set(self._key, json.dumps(text | {"doing": [doing for doing, _ in at]}))
            self._told = bool(at)
        if self._watches:
            self._also(self.store)


def _answer(answer: Future[Any], call: Callable[[], Any]) -> None:
    try:
        answer.set_result(call())
    except Exception as error:  # for the thread that asked
        answer.set_exception(error)


def conflict(own: Iterable[Place], other: Iterable[Place]) -> tuple[str, str] | None:
    """What two ranks do that are in different calls and would wait for each other for ever; None if they may meet.

    They are, if one waits in a round where the other has entered a scope, if they do different things in one place, or
    if one waits at the end of a scope for the other, which waits within it.
    """
    for doing, path in own:
        for said, place in other:
            is_other = path.rstrip("/") == place.rstrip("/") and (doing, path) != (said, place)
            if is_other or _is_within(path, place) or _is_within(place, path):
                return doing, said
    return None


def _is_within(path: str, end: str) -> bool:
    """Whether a path lies in the scope of which the other is the last round, where who ends it has not been.

    What a rank tells is a few seconds old: where both have been, it is no longer.
    """
    scope, is_end, begun = end.rpartition("/end/")
    if not is_end or not path.startswith(f"{scope}."):
        return False
    return int(re.split(r"[./]", path.removeprefix(f"{scope}."))[0]) >= int(begun)
