"""Downloads by huggingface_hub, side by side, for as long as bytes arrive on this node, however slowly."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["Arrivals", "Stalled", "run_downloads"]

_CONNECTIONS = 8  # downloads at a time, as huggingface_hub's own snapshot_download has
_POLL_S = 0.5
_MAX_ASKED_S = 300.0  # the hub counts requests over windows of 5 minutes: https://huggingface.co/docs/hub/rate-limits


class Stalled(Exception):
    """Nothing has arrived for too long; ``status`` is that of the last answer if it was no success, else 0."""

    def __init__(self, fact: str, status: int) -> None:
        super().__init__(fact)
        self.status = status


class Arrivals:
    """What huggingface_hub receives in this process, over HTTP or xet, while it is attached.

    The files do not tell: over HTTP they grow by 10 MiB at a time, which takes minutes on a slow line.
    """

    def __init__(self) -> None:
        self._responses: list[tuple[int, Any]] = []  # the first byte asked for, and the answer
        self._xet_bytes = 0
        self._asked_until = 0.0
        self._clients: list[Any] = []
        self.refusal = ""
        """The last answer that was no success; its ``status`` too."""
        self.status = 0

    def attach(self) -> None:
        """Look at the answers that huggingface_hub's HTTP client gets. After a lost connection it makes a new client."""
        from huggingface_hub import get_session

        client = get_session()
        if not any(client is known for known in self._clients):
            hooks = client.event_hooks
            client.event_hooks = {**hooks, "response": [*hooks["response"], self._note]}
            self._clients.append(client)

    def detach(self) -> None:
        """Leave the clients as they were."""
        for client in self._clients:
            hooks = client.event_hooks
            client.event_hooks = {**hooks, "response": [hook for hook in hooks["response"] if hook != self._note]}

    @property
    def num_bytes(self) -> int:
        """Bytes of files that have arrived; what is sent again from the beginning counts once."""
        reached: dict[str, int] = {}
        for begin, response in self._responses:
            path = response.request.url.path
            reached[path] = max(reached.get(path, 0), begin + response.num_bytes_downloaded)
        return self._xet_bytes + sum(reached.values())

    def asked_until(self, since: float) -> float:
        """Until when the hub has asked to wait (too many requests), but no longer than its window; by the monotonic clock."""
        return min(self._asked_until, since + _MAX_ASKED_S)

    def bar_class(self) -> type:
        """huggingface_hub's own progress bar, which xet tells what it receives."""
        from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]  # public, not re-exported

        arrivals = self

        class Bar(tqdm):  # type: ignore[misc,unused-ignore]  # has no stubs
            def update(self, n: float | None = 1) -> bool | None:
                arrivals._xet_bytes += int(n or 0)  # of HTTP too, which only counts twice
                return super().update(n)  # type: ignore[no-any-return,unused-ignore]

        return Bar

    def _note(self, response: Any) -> None:
        """An answer has begun."""
        from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined]  # as above

        if response.is_success:
            begin = response.request.headers.get("Range", "").removeprefix("bytes=").partition("-")[0]
            self._responses.append((int(begin) if begin.isdigit() else 0, response))
        elif response.is_error:
            self.status = response.status_code
            self.refusal = f"HTTP {self.status} for {response.request.method} {response.request.url.path}"
            window = parse_ratelimit_headers(response.headers)
            after = response.headers.get("Retry-After", "")
            asked_s = (
                window.reset_in_seconds if window and not window.remaining else int(after) if after.isdigit() else 0
            )
            if asked_s:
                self._asked_until = time.monotonic() + asked_s


def run_downloads(
    tasks: Mapping[str, Callable[[], object]], *, arrivals: Arrivals, folder: Path, patience_s: float
) -> None:
    """Run tasks side by side until all are done, one fails, or nothing has arrived on this node for ``patience_s``.

    Processes that share a cache take turns at a file by its lock. One that receives bytes says so to those who wait, by
    the time of change of the unfinished files. The threads are daemons, so that one that is stuck in its retries keeps no
    process from ending.

    Args:
        tasks: Downloads by the name of their file.
        arrivals: What this process receives.
        folder: Where unfinished files are (``*.incomplete``).
        patience_s: How long nothing at all may happen, beyond what the hub asked to wait.

    Raises:
        Stalled: Says which files are missing.
        Exception: What the first task that failed raised.
    """
    gate = threading.Semaphore(_CONNECTIONS)
    given_up = threading.Event()

    def run(task: Callable[[], object], future: Future[None]) -> None:
        with gate:
            try:
                if not given_up.is_set():
                    task()
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)

    futures: dict[Future[None], str] = {Future(): name for name in tasks}
    arrivals.attach()
    for future, name in futures.items():
        threading.Thread(target=run, args=(tasks[name], future), name=f"download {name}", daemon=True).start()
    seen: object = None
    received, since = 0, time.monotonic()
    try:
        while True:
            done, pending = wait(futures, timeout=_POLL_S, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            if not pending:
                return
            arrivals.attach()
            now, asked_until = time.monotonic(), arrivals.asked_until(since)
            if arrivals.num_bytes != received or now < asked_until:
                received = arrivals.num_bytes
                _touch(folder)
            if (state := (len(done), received, _state(folder))) != seen:
                seen, since = state, since if now < asked_until else now  # its own touch is no arrival
            elif now > max(since, asked_until) + patience_s:
                missing = [name for future, name in futures.items() if future in pending]
                more = f" and {len(missing) - 1} more files" if len(missing) > 1 else ""
                last = f"; the last answer was {arrivals.refusal}" if arrivals.refusal else ""
                fact = f"{missing[0]!r}{more}: expected bytes, found none for {patience_s:.0f} s{last}"
                raise Stalled(fact, arrivals.status)
    finally:
        given_up.set()
        arrivals.detach()


def _touch(folder: Path) -> None:
    for path in folder.glob("*.incomplete"):
        with suppress(OSError):  # complete meanwhile; or another user's
            os.utime(path)


def _state(folder: Path) -> dict[str, tuple[int, int] | None]:
    """The files of a folder, with size and time of those that are unfinished; other processes' too."""
    found: dict[str, tuple[int, int] | None] = {}
    for path in folder.glob("*"):
        found[path.name] = None
        if path.suffix == ".incomplete":
            # A network file system looks again when a file is opened; what stat says may be a minute old.
            with suppress(OSError), open(path, "rb") as stream:
                status = os.fstat(stream.fileno())
                found[path.name] = (status.st_size, status.st_mtime_ns)
    return found
