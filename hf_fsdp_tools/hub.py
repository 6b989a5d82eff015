"""Files of a hub repository as a local folder: fetched once per node, and never waited for without an end.

``huggingface_hub`` does the work: its cache, locks, tokens, retries and settings (``HF_HOME``, ``HF_ENDPOINT``,
``HF_HUB_OFFLINE``, ``HF_HUB_ETAG_TIMEOUT``, …) apply.
"""

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike, fspath
from pathlib import Path

from hf_fsdp_tools.errors import CheckpointError

__all__ = ["HubRepository", "is_hub_name"]

_CONNECTIONS = 8  # downloads at a time, as huggingface_hub's own snapshot_download has
_QUIET_S = 10.0  # nothing arrives for so long: ask whether the hub is still there (assumed)
_POLL_S = 0.5
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
        download a file and the others wait. Whenever nothing has arrived for 10 s, the hub is asked whether it is still
        there, so one that stops answering is found out within 20 s.

        Raises:
            CheckpointError: The hub refuses a file or stops answering.
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
        try:
            # The first file goes by the revision's name, so that the cache notes which commit that is.
            _watched([partial(self._download, file, self.revision) for file in files[:1]], cache / "blobs", self._ask)
            _watched([partial(self._download, file, self.commit) for file in files], cache / "blobs", self._ask)
        except Exception as error:  # as above
            raise _refusal(self.name, self.revision, error) from error
        return folder

    def _is_there(self) -> bool:
        try:
            self._cached_folder()
        except CheckpointError:
            return False
        return True

    def _download(self, file: str, revision: str | None) -> None:
        from huggingface_hub import hf_hub_download

        hf_hub_download(self.name, file, revision=revision, token=self.token, cache_dir=self.cache_dir)

    def _ask(self) -> None:
        _list_files(self.name, self.revision, self.token)

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


def _watched(tasks: Sequence[Callable[[], None]], growing: Path, ask: Callable[[], None]) -> None:
    """Run tasks side by side; ``ask`` may raise whenever neither a task has ended nor a file has grown for a while.

    The threads are daemons, so that one that is stuck in its retries keeps no process from ending.
    """
    gate = threading.Semaphore(_CONNECTIONS)
    given_up = threading.Event()

    def run(task: Callable[[], None], future: Future[None]) -> None:
        with gate:
            try:
                if not given_up.is_set():
                    task()
                future.set_result(None)
            except BaseException as error:
                future.set_exception(error)

    futures: list[Future[None]] = [Future() for _ in tasks]
    for task, future in zip(tasks, futures, strict=True):
        threading.Thread(target=run, args=(task, future), daemon=True).start()
    seen, since = None, time.monotonic()
    try:
        while True:
            done, pending = wait(futures, timeout=_POLL_S, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            if not pending:
                return
            if (now := (len(done), _state(growing))) != seen:
                seen, since = now, time.monotonic()
            elif time.monotonic() - since > _QUIET_S:
                ask()
                since = time.monotonic()
    finally:
        given_up.set()


def _state(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of every file of a folder; those of other processes' downloads too."""
    found = {}
    for path in folder.glob("*"):
        try:
            status = path.stat()
        except OSError:
            continue  # renamed meanwhile, when a download was complete
        found[path.name] = (status.st_size, status.st_mtime_ns)
    return found


def _refusal(name: str, revision: str | None, error: Exception) -> CheckpointError:
    """What the hub said, with what to do about it."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    where = f" at revision {revision!r}" if revision else ""
    reason = f"{type(error).__name__}: {_first_line(error)}"
    if isinstance(error, RevisionNotFoundError):
        cure = "The repository has no such revision. Give a branch, a tag or a commit that it has."
    elif isinstance(error, GatedRepoError):
        cure = (
            f"It is gated. Ask for access at {constants.ENDPOINT}/{name}, then log in (`hf auth login`) or pass token=…"
        )
    elif isinstance(error, RepositoryNotFoundError):
        cure = (
            "It does not exist, or it is private and the token does not open it. Check the name; log in (`hf auth login`) "
            "or pass token=…"
        )
    elif isinstance(error, (HfHubHTTPError, ValueError)):
        cure = "Check the name, the revision and the token, or download it first and give the folder."
    else:
        cure = (
            f"{constants.ENDPOINT} cannot be reached or does not answer. Check the network, or download it first and give "
            "the folder."
        )
    return CheckpointError(
        f"No checkpoint {name!r}{where}: it is not a local folder, and the hub did not give it ({reason}). {cure}"
    )


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given").rstrip(".")
