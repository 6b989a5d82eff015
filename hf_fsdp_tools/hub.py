"""Files of a hub repository as a local folder: fetched once per node, and never waited for without an end.

``huggingface_hub`` does the work: its cache, locks, tokens, retries and settings (``HF_HOME``, ``HF_ENDPOINT``,
``HF_HUB_OFFLINE``, ``HF_HUB_ETAG_TIMEOUT``, …) apply.
"""

import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from hf_fsdp_tools.errors import CheckpointError

__all__ = ["Arrivals", "HubRepository", "Stalled", "is_hub_name", "run_downloads"]

_PAUSES_S = (1.0, 2.0, 4.0)  # before another try (assumed; huggingface_hub's own begin alike)
_SILENCE_S = 60.0  # after a hub did not answer, what is cached is used for so long without asking again (assumed)


@dataclass
class _Silence:
    """When the hub last did not answer; one load opens a repository several times and should wait once."""

    last_s: float = -_SILENCE_S


_silence = _Silence()


def is_hub_name(name: str) -> bool:
    """Whether a name that is no local path can be one on the hub: "gpt2" or "org/model"."""
    return bool(name) and not name.startswith((".", "~", "/")) and name.count("/") <= 1 and "\\" not in name


@dataclass(frozen=True, kw_only=True)
class HubRepository:
    """A repository on the hub, at one revision. Make one with ``HubRepository.open``."""

    name: str
    """"org/model"."""

    revision: str | None
    """Branch, tag or commit as asked for; None is the default branch."""

    commit: str | None
    """The commit that the revision is; None where only the cache is used."""

    files: tuple[str, ...]
    """Names of all its files; empty where only the cache is used."""

    token: str | bool | None = None
    """None uses the stored one."""

    cache_dir: str | None = None
    """None is the hub library's own."""

    @classmethod
    def open(
        cls,
        name: str,
        *,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | PathLike[str] | None = None,
        local_files_only: bool = False,
    ) -> "HubRepository":
        """Ask the hub what the repository holds: one request, at most ``HF_HUB_ETAG_TIMEOUT`` (10 s) long.

        A hub that cannot be reached or does not answer is replaced by what is cached, with a warning; with
        ``local_files_only``, or within a minute of such a silence, it is not asked. No rank talks to another.

        Raises:
            CheckpointError: The repository or the revision does not exist or may not be read; or the hub does not answer
                and nothing is cached.
        """
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RevisionNotFoundError

        cache = None if cache_dir is None else fspath(cache_dir)
        cached = cls(name=name, revision=revision, commit=None, files=(), token=token, cache_dir=cache)
        if local_files_only:
            cached._cached_folder()
            return cached
        try:
            if time.monotonic() - _silence.last_s < _SILENCE_S and cached._is_there():
                return cached
            commit, files = _list_files(name, revision, token)
        except OfflineModeIsEnabled:  # HF_HUB_OFFLINE
            cached._cached_folder()
            return cached
        except Exception as error:  # the hub library passes on errors of its HTTP library, which has changed twice
            refusal = _refusal(name, revision, error)
            try:
                folder = cached._cached_folder()
            except CheckpointError:
                raise refusal from error
            if isinstance(error, RevisionNotFoundError):
                raise refusal from error
            if not isinstance(error, HfHubHTTPError):
                _silence.last_s = time.monotonic()
            reason = f"{type(error).__name__}: {_first_line(error)}"
            warnings.warn(f"The hub did not give {name!r} ({reason}). Using what is cached, in {folder}.", stacklevel=2)
            return cached
        return replace(cached, commit=commit, files=files)

    def fetch(self, *patterns: str) -> Path:
        """The local snapshot folder, named by its commit, with every file that matches a pattern (``*`` and ``?``) in it.

        Files that are cached cost nothing. Processes of one node share the cache, whose file locks make one of them
        download a file and the others wait. A download goes on for as long as bytes arrive on this node, however slowly;
        one that brings none for 20 s ends on all of them. That is twice ``HF_HUB_DOWNLOAD_TIMEOUT`` or
        ``HF_HUB_ETAG_TIMEOUT``, so that one request may time out and another be tried. Where the hub answers "too many
        requests" and names a time, that is waited for too, up to 5 minutes.

        Raises:
            CheckpointError: The hub refuses a file or stops giving it.
        """
        from huggingface_hub import constants
        from huggingface_hub.file_download import repo_folder_name
        from huggingface_hub.utils import filter_repo_objects  # type: ignore[attr-defined]  # public, not re-exported

        if self.commit is None:
            return self._cached_folder()
        cache = Path(self.cache_dir or constants.HF_HUB_CACHE, repo_folder_name(repo_id=self.name, repo_type="model"))
        folder = cache / "snapshots" / self.commit
        folder.mkdir(parents=True, exist_ok=True)
        files = list(filter_repo_objects(self.files, allow_patterns=list(patterns)))
        if not files:  # the cache notes which commit a revision is only with a file
            ref = cache / "refs" / (self.revision or constants.DEFAULT_REVISION)
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(self.commit)
        # The first file goes by the revision's name, so that the cache notes which commit that is.
        for revision, some in ((self.revision, files[:1]), (self.commit, files)):
            arrivals = Arrivals()
            bar_class = arrivals.bar_class()
            tasks = {file: partial(self._download, file, revision, bar_class) for file in some}
            try:
                run_downloads(
                    tasks,
                    arrivals=arrivals,
                    folder=cache / "blobs",
                    patience_s=2 * max(constants.HF_HUB_DOWNLOAD_TIMEOUT, constants.HF_HUB_ETAG_TIMEOUT),
                )
            except Stalled as error:
                raise _refusal(self.name, self.revision, error) from error
        return folder

    def _is_there(self) -> bool:
        try:
            self._cached_folder()
        except CheckpointError:
            return False
        return True

    def _download(self, file: str, revision: str | None, bar_class: type) -> None:
        from huggingface_hub import hf_hub_download

        for pause_s in (*_PAUSES_S, None):
            try:
                hf_hub_download(
                    self.name, file, revision=revision, token=self.token, cache_dir=self.cache_dir, tqdm_class=bar_class
                )
                return
            except Exception as error:  # as above
                if pause_s is None or not _is_passing(error):
                    raise _refusal(self.name, self.revision, error, file) from error
                time.sleep(pause_s)

    def _cached_folder(self) -> Path:
        from huggingface_hub import snapshot_download

        try:
            # No pattern: whether this or that file is there, is for the caller to say.
            return Path(
                snapshot_download(
                    self.name,
                    revision=self.revision,
                    cache_dir=self.cache_dir,
                    local_files_only=True,
                    allow_patterns=[],
                )
            )
        except (OSError, ValueError) as error:  # not there; not a name
            where = f" at revision {self.revision!r}" if self.revision else ""
            raise CheckpointError(
                f"No checkpoint {self.name!r}{where} in the cache of the hub, and the network is not to be used "
                f"({_first_line(error)}). Check the name, the revision and cache_dir, or download it first and give the folder."
            ) from error


def _list_files(name: str, revision: str | None, token: str | bool | None) -> tuple[str, tuple[str, ...]]:
    """Commit and file names of a repository, in one request that ends: snapshot_download's own has no time limit."""
    from huggingface_hub import HfApi, constants

    info = HfApi(token=token).model_info(name, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    assert info.sha is not None, f"{name}: the hub named no commit"
    return info.sha, tuple(file.rfilename for file in info.siblings or ())


def _is_passing(error: Exception) -> bool:
    """Whether a download that failed so may succeed a moment later, and huggingface_hub has not tried itself.

    It tries again after timeouts and connections that were refused or closed, but not after one that was reset or an answer
    of 500 or more in the middle of a download (1.33 and 2.4).
    """
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return error.response is not None and error.response.status_code >= 500
    names = {cls.__name__ for cls in type(error).__mro__}  # of httpx or httpx2, by the version of huggingface_hub
    return "NetworkError" in names and "ConnectError" not in names


def _refusal(name: str, revision: str | None, error: Exception, file: str | None = None) -> CheckpointError:
    """What the hub said, with what to do about it."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # why the file was looked for in the cache at all
    reason = _first_line(error) if isinstance(error, Stalled) else f"{type(error).__name__}: {_first_line(error)}"
    where = f" at revision {revision!r}" if revision else ""
    what = f"{file!r}: {reason}" if file else reason
    return CheckpointError(
        f"No checkpoint {name!r}{where}: it is not a local folder, and the hub did not give it ({what}). "
        f"{_cure(name, error)}"
    )


def _cure(name: str, error: Exception) -> str:
    """What to do about an error of the hub library."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    status = error.response.status_code if isinstance(error, HfHubHTTPError) and error.response is not None else 0
    if isinstance(error, RevisionNotFoundError):
        return "The repository has no such revision. Give a branch, a tag or a commit that it has."
    if isinstance(error, GatedRepoError):
        return (
            f"It is gated. Ask for access at {constants.ENDPOINT}/{name}, then log in (`hf auth login`) or pass token=…"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            "It does not exist, or it is private and the token does not open it. Check the name; log in (`hf auth login`) "
            "or pass token=…"
        )
    if isinstance(error, Stalled):
        status = error.status
    if status == 429:
        return "These are too many requests. Wait, log in (`hf auth login`), or download it first and give the folder."
    if status >= 500:
        return f"{constants.ENDPOINT} is in trouble. Try again later, or download it first and give the folder."
    if isinstance(error, (HfHubHTTPError, ValueError)):
        return "Check the name, the revision and the token, or download it first and give the folder."
    if isinstance(error, Stalled):
        return (
            f"{constants.ENDPOINT}, or where it sends for files, does not answer. Check the network and proxies; set "
            f"HF_HUB_DOWNLOAD_TIMEOUT (now {constants.HF_HUB_DOWNLOAD_TIMEOUT} s) higher where it is only slow to begin; or "
            "download it first and give the folder."
        )
    if isinstance(error, OSError) and error.errno is not None:
        return f"Check space and permissions of the cache in {constants.HF_HUB_CACHE} (cache_dir=… takes another)."
    return (
        f"{constants.ENDPOINT} cannot be reached or does not answer. Check the network, or download it first and give "
        "the folder."
    )


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given").rstrip(".")


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
