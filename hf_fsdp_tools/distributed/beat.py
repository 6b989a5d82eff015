"""A rank's beat: what it does and how far it has come, told to the others every few seconds while it is in a call."""

import json
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from hf_fsdp_tools.distributed.watch import progress_made, waited_for

__all__ = ["Beat", "Place", "conflict"]

Place = Sequence[str]
"""What a rank does, and the path of the round in which it does it; of a scope, with a slash at its end; of the round
that ends a scope, with the number of rounds and scopes that the rank has begun in it."""

_BEAT_S = 2.0
"""Between two beats, and before the first: most rounds are over by then."""

_IDLE_S = 60.0
"""How long the thread that beats waits for the next call before it ends."""


class Beat:
    """This rank's beat: a thread that tells what the rank does while it is in a call, if the call takes long."""

    def __init__(self, store: Any, key: str) -> None:
        self._store, self._key = store, key
        self._places: list[Place] = []
        self._count = 0
        self._changed, self._stopped = threading.Condition(), threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def telling(self, doing: str, path: str) -> Iterator[None]:
        """While this block runs, the rank does this, there (see `Place`)."""
        with self._changed:
            self._places.append((doing, path))
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="beat", daemon=True)
                with suppress(RuntimeError):  # the interpreter is ending, and begins no thread any more
                    self._thread.start()
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._places.pop()

    @property
    def places(self) -> list[Place]:
        """Where the rank is: in a scope, within it in another, and in a round."""
        return list(self._places)

    def stop(self) -> None:
        """End the thread, which holds the store of a group that is over."""
        self._stopped.set()
        with self._changed:
            self._changed.notify()

    def _run(self) -> None:
        told = False
        with suppress(RuntimeError):  # the store is gone: whoever waits for it says so
            store = self._store.clone()  # a connection of its own: the main thread may wait on the other
            while not self._stopped.wait(_BEAT_S):
                with self._changed:
                    if not self._places and not told and not self._stopped.is_set():
                        if self._changed.wait(_IDLE_S) or self._places:  # a call may begin as the time is over
                            continue
                        self._thread = None  # the next call starts another one
                        return
                at = self.places
                if at or told:
                    self._count += 1
                    text = {"count": self._count, "progress": progress_made(), "at": at, "for": waited_for()}
                    store.set(self._key, json.dumps(text | {"doing": [doing for doing, _ in at]}))
                    told = bool(at)


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
