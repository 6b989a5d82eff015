"""A rank's beat: what it does and how far it has come, told to the others every few seconds while it is in a call."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from hf_fsdp_tools.distributed.watch import progress_made, waited_for

__all__ = ["Beat"]

_BEAT_S = 2.0
"""Between two beats, and before the first: most rounds are over by then."""

_IDLE_S = 60.0
"""How long the thread that beats waits for the next call before it ends."""


class Beat:
    """This rank's beat: a thread that tells what the rank does while it is in a call, if the call takes long."""

    def __init__(self, store: Any, key: str) -> None:
        self._store, self._key = store, key
        self._doing: list[str] = []
        self._count = 0
        self._changed, self._stopped = threading.Condition(), threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def telling(self, doing: str) -> Iterator[None]:
        """While this block runs, the rank does this."""
        with self._changed:
            self._doing.append(doing)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="beat", daemon=True)
                with suppress(RuntimeError):  # the interpreter is ending, and begins no thread any more
                    self._thread.start()
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._doing.pop()

    def stop(self) -> None:
        """End the thread, which holds the store of a group that is over."""
        self._stopped.set()
        with self._changed:
            self._changed.notify()

    def _run(self) -> None:
        store = self._store.clone()  # a connection of its own: the main thread may wait on the other
        told = False
        with suppress(RuntimeError):  # the store is gone: whoever waits for it says so
            while not self._stopped.wait(_BEAT_S):
                with self._changed:
                    if not self._doing and not told:
                        if self._changed.wait(_IDLE_S):
                            continue
                        self._thread = None  # the next call starts another one
                        return
                doing = list(self._doing)
                if doing or told:
                    self._count += 1
                    text = {"count": self._count, "progress": progress_made(), "doing": doing, "for": waited_for()}
                    store.set(self._key, json.dumps(text))
                    told = bool(doing)
