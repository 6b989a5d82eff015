"""Fetch files of a hub repository into a local folder and upload files to one, by `huggingface_hub` alone.

Its cache, locks, tokens, retries and settings (`HF_HOME`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`, …) apply. `model_info` and
`hf_hub_download` have time limits. `snapshot_download` lists a repository without one (1.10 to 2.4), so that a silent
hub would keep every rank waiting for ever; it is used here to look into the cache only. What uploads has no time limits
either, and is asked only of a hub that has just answered.
"""

import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any
from uuid import uuid4

from hf_fsdp_tools.errors import CheckpointError, ConfigError
from hf_fsdp_tools.text import first_line, first_lines

CARD = "README.md"

_CONNECTIONS = 8
"""Downloads at a time (source: the default of `snapshot_download`)."""

_PAUSES_S = (1.0, 2.0, 4.0)
"""Seconds before each further try (source: the first pauses of huggingface_hub's own retries)."""

_STATUS_IN_TEXT = re.compile(r"HTTP status \w+ error \((\d{3}) ")
"""The status of an answer in an error of hf_xet (1.8), which has no other field for it."""


def local_path(name_or_path: str | PathLike[str]) -> Path | None:
    """The local path of a name, with `~` expanded; None for a name on the hub ("gpt2", "org/model").

    A path that exists is local. So is a name that no repository can have ("./model", "a/b/c"), existing or not.
    """
    name = fspath(name_or_path)
    if not name.strip():
        raise CheckpointError(f"The name of a checkpoint is empty ({name!r}). Give a local folder or a hub name.")
    path = Path(os.path.expanduser(name))
    can_be_on_hub = not name.startswith((".", "~", "/")) and name.count("/") <= 1 and "\\" not in name
    return None if can_be_on_hub and not os.path.exists(path) else path  # False for a name of any length


def fetch(
    name: str,
    *patterns: str,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | PathLike[str] | None = None,
    local_files_only: bool = False,
    subfolder: str | None = None,
) -> tuple[Path, dict[str, Any]]:
    """Fetch the files of a hub repository that match a pattern; return their folder, and arguments for later calls.

    The arguments are `revision` and `local_files_only`: a later call with them gets the same commit, and does not wait
    again for a hub that did not answer. The hub has `HF_HUB_ETAG_TIMEOUT` (10 s) to list the repository; if it does
    not answer or refuses, the cache is used, with a warning. Cached files are not fetched again. When no more bytes of
    a file arrive, huggingface_hub gives up after six times `HF_HUB_DOWNLOAD_TIMEOUT` (10 s), or after 7 minutes if the
    hub did not even tell the file's size.

    No rank communicates; processes that share a cache wait for each other's downloads at its file locks.
    """
    from huggingface_hub import constants

    cache = os.path.expanduser(cache_dir or constants.HF_HUB_CACHE)
    listing = None if local_files_only else _list_files(name, revision, token, cache)
    if listing is None:
        snapshot = _cached_snapshot(name, revision, cache)
    else:
        commit, files = listing
        snapshot = _new_snapshot(name, revision, cache, commit)
        wanted = [f"{subfolder}/{pattern}" if subfolder else pattern for pattern in patterns]
        matching = [file for file in files if any(fnmatchcase(file, pattern) for pattern in wanted)]
        with ThreadPoolExecutor(_CONNECTIONS) as pool:
            list(pool.map(partial(_download, name, revision=commit, token=token, cache_dir=cache), matching))
    return snapshot / (subfolder or ""), {"revision": snapshot.name, "local_files_only": listing is None}


def _list_files(name: str, revision: str | None, token: str | bool | None, cache: str) -> tuple[str, list[str]] | None:
    """(commit, file names) of a repository; None if the cache is to be used."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import OfflineModeIsEnabled, RevisionNotFoundError

    try:
        info = HfApi(token=token).model_info(name, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except OfflineModeIsEnabled:
        return None
    except Exception as error:  # among them errors of huggingface_hub's HTTP library, which has changed twice
        try:
            snapshot = _cached_snapshot(name, revision, cache)
        except CheckpointError:
            raise _refusal(name, revision, error) from None
        if isinstance(error, RevisionNotFoundError):  # deleted since
            raise _refusal(name, revision, error) from None
        reason = f"{type(error).__name__}: {first_line(error)}"
        warnings.warn(f"The hub did not give {name!r} ({reason}). Using what is cached, in {snapshot}.", stacklevel=3)
        return None
    assert info.sha is not None, f"{name}: the hub named no commit"
    return info.sha, [file.rfilename for file in info.siblings or ()]


def _download(name: str, file: str, **where: Any) -> None:
    """Put one file into the cache.

    Tries again after a connection that was reset in the middle of a file, and after a status of 5xx, as huggingface_hub
    (1.0 to 2.4) does not. Such errors pass, and a job with thousands of downloads (files times nodes) meets some.
    """
    from huggingface_hub import hf_hub_download

    for pause_s in (*_PAUSES_S, None):
        try:
            hf_hub_download(name, file, **where)
            return
        except Exception as error:  # as above: a reset connection is a ReadError of httpx or of httpx2
            if pause_s is None or not (_status(error) >= 500 or type(error).__name__ == "ReadError"):
                raise _refusal(name, where["revision"], error, file) from None
            time.sleep(pause_s)


def _cached_snapshot(name: str, revision: str | None, cache: str) -> Path:
    """The folder of a revision in the cache, whatever files it holds."""
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True, allow_patterns=[])
        )
    except (OSError, ValueError) as error:  # not there; not a name
        where = f" at revision {revision!r}" if revision else ""
        raise CheckpointError(
            f"No checkpoint {name!r}{where} in the cache of the hub, and the network is not to be used "
            f"({first_line(error)}). Check the name, the revision and cache_dir, or download it first and "
            "give the folder."
        ) from None


def _new_snapshot(name: str, revision: str | None, cache: str, commit: str) -> Path:
    """Make the folder of a commit in the cache, and note there to which commit the branch or tag points.

    huggingface_hub makes the same folder and note, and looks for both without the network.
    """
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = Path(cache, repo_folder_name(repo_id=name, repo_type="model"))
    snapshot, ref = folder / "snapshots" / commit, folder / "refs" / (revision or constants.DEFAULT_REVISION)
    with suppress(OSError):  # a read-only cache may hold everything already
        snapshot.mkdir(parents=True, exist_ok=True)
        if revision != commit and not (ref.is_file() and ref.read_text() == commit):
            ref.parent.mkdir(parents=True, exist_ok=True)
            part = ref.with_name(f"{ref.name}.{uuid4().hex}")  # no reader finds half of it
            part.write_text(commit)
            part.replace(ref)
    return snapshot


def _status(error: Exception) -> int:
    """The status of the hub's answer; 0 where there was none."""
    return int(getattr(getattr(error, "response", None), "status_code", 0))


def _refusal(name: str, revision: str | None, error: Exception, file: str | None = None) -> CheckpointError:
    """An error of the hub as a `CheckpointError` with a cure."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # why the file was looked for in the cache at all
    where = f" at revision {revision!r}" if revision else ""
    what = f"{f'{file!r}: ' if file else ''}{type(error).__name__}: {first_line(error)}"
    return CheckpointError(
        f"No checkpoint {name!r}{where}: it is not a local folder, and the hub did not give it ({what}). "
        f"{_cure(name, error)}"
    )


def _cure(name: str, error: Exception) -> str:
    """What to do about an error of huggingface_hub."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    log_in = "log in (`hf auth login`) or pass token=…"
    download = "download it first and give the folder."
    if isinstance(error, RevisionNotFoundError):
        return "The repository has no such revision. Give a branch, a tag or a commit that it has."
    if isinstance(error, GatedRepoError):
        return f"It is gated. Ask for access at {constants.ENDPOINT}/{name}, then {log_in}"
    if isinstance(error, RepositoryNotFoundError):
        return f"It does not exist, or it is private and the token does not open it. Check the name; {log_in}"
    if _status(error) == 429:
        return f"These are too many requests. Wait, log in (`hf auth login`), or {download}"
    if _status(error) >= 500:
        return f"{constants.ENDPOINT} is in trouble. Try again later, or {download}"
    if isinstance(error, (HfHubHTTPError, ValueError)):
        return f"Check the name, the revision and the token, or {download}"
    if isinstance(error, OSError) and error.errno is not None:
        return f"Check space and permissions of the cache in {constants.HF_HUB_CACHE} (cache_dir=… takes another)."
    return (
        f"{constants.ENDPOINT}, or where it sends for files, cannot be reached or does not answer. Check the network "
        f"and proxies; set HF_HUB_DOWNLOAD_TIMEOUT (now {constants.HF_HUB_DOWNLOAD_TIMEOUT} s) higher where it is only "
        f"slow to begin; or {download}"
    )


# ---- uploading ----


@dataclass(frozen=True, kw_only=True)
class HubTarget:
    """Where on the hub files go, by which words: arguments of transformers' `push_to_hub`, with their meaning."""

    repo_id: str
    private: bool | None = None
    token: str | bool | None = None
    commit_message: str | None = None
    commit_description: str | None = None
    revision: str | None = None
    create_pr: bool = False

    def __post_init__(self) -> None:
        """Refuse a name that no repository can have."""
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # it is public

        try:
            validate_repo_id(self.repo_id)
        except HFValidationError as error:
            raise ConfigError(
                f"repo_id={self.repo_id!r} is no name of a repository on the hub: {first_line(error)}. Give repo_id as "
                '"organization/name" or "name".'
            ) from None


def upload(
    target: HubTarget,
    files: Mapping[str, Path],
    *,
    card: Callable[[], str] | None = None,
    is_outdated: Callable[[str], bool] = lambda name: False,
) -> str:
    """Upload files as one commit, so that whoever opens the repository gets the former files or all the new ones.

    The repository, and a branch that is asked for, are made where they are not there. Contents that the hub has are not
    sent again. A commit that is not answered is tried again, except where each try would open a pull request.

    No rank communicates. The errors are huggingface_hub's (see `upload_errors`).
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(token=target.token, library_name="hf_fsdp_tools")
    repo_id, there = _ready_repository(api, target)
    additions = [CommitOperationAdd(name, str(path)) for name, path in sorted(files.items())]
    if card is not None and CARD not in files and CARD not in there:
        additions.append(CommitOperationAdd(CARD, card().encode()))
    api.preupload_lfs_files(repo_id, additions, revision=target.revision, create_pr=target.create_pr, free_memory=False)
    for pause_s in (*_PAUSES_S, None):  # huggingface_hub tries all other requests again
        try:
            return _commit(api, replace(target, repo_id=repo_id), additions, is_outdated)
        except Exception as error:  # of huggingface_hub's HTTP library, which has changed twice
            if pause_s is None or target.create_pr or not _passes(error):
                raise
            time.sleep(pause_s)
    raise AssertionError("the last try returns or raises")


def _commit(api: Any, target: HubTarget, additions: list[Any], is_outdated: Callable[[str], bool]) -> str:
    """Make the commit, with deletions by what is there now: an earlier try may have succeeded without an answer."""
    from huggingface_hub import CommitOperationDelete

    _, there = _ready_repository(api, target)
    kept = {addition.path_in_repo for addition in additions}
    commit = api.create_commit(
        target.repo_id,
        [*additions, *(CommitOperationDelete(name) for name in there if name not in kept and is_outdated(name))],
        commit_message=target.commit_message or "Upload model",
        commit_description=target.commit_description,
        revision=target.revision,
        create_pr=target.create_pr,
    )
    return str(commit.pr_url or commit.commit_url)


def _ready_repository(api: Any, target: HubTarget) -> tuple[str, list[str]]:
    """The full name of a repository, which is made if it is not there, and the names of its files.

    The first request has a time limit, unless only the hub knows the full name.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    list_files = partial(api.model_info, revision=target.revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    repo_id = target.repo_id
    if "/" not in repo_id:
        repo_id = api.create_repo(repo_id, private=target.private, exist_ok=True).repo_id
    try:
        info = list_files(repo_id)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        if isinstance(error, RepositoryNotFoundError):
            api.create_repo(repo_id, private=target.private, exist_ok=True)
        if target.revision is not None and not target.revision.startswith("refs/pr"):
            api.create_branch(repo_id, branch=target.revision, exist_ok=True)
        info = list_files(repo_id)
    return repo_id, [file.rfilename for file in info.siblings or ()]


def _passes(error: Exception) -> bool:
    """Whether a request may succeed when it is made again."""
    return _status(error) >= 500 or type(error).__name__ in ("ReadError", "RemoteProtocolError", "ConnectError")


@contextmanager
def upload_errors(target: HubTarget, kept: str) -> Iterator[None]:
    """Turn any error of a block that uploads into a `CheckpointError` that says what is kept, and the cure.

    The block must hold no code of this package but `upload`.
    """
    try:
        yield
    except Exception as error:
        fact = f"{kept!r} is saved and complete, but its upload to {target.repo_id!r} failed"
        then = f"Then upload it: `hf upload {target.repo_id} {kept}`."
        if not kept:
            fact, then = f"{target.repo_id!r} on the hub cannot be written to", ""
        raise CheckpointError(f"{fact} ({_told(error)}). {_upload_cure(target, error)} {then}".rstrip()) from None


def _told(error: BaseException) -> str:
    """An error of the hub, of its cause where it only says which file it came with, and of what the server said."""
    cause = error.__cause__
    if type(error) is RuntimeError and cause is not None:  # "Error while uploading 'model.safetensors' to the Hub."
        return f"{first_line(error)}: {_told(cause)}"
    return f"{type(error).__name__}: {first_lines(error, 4)}"


def _upload_cure(target: HubTarget, error: Exception) -> str:
    """What to do about an error of an upload."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    cause = error.__cause__ if type(error) is RuntimeError and isinstance(error.__cause__, Exception) else error
    said, named = str(cause).lower(), _STATUS_IN_TEXT.search(str(cause))
    status = int(named[1]) if named else _status(cause)
    if isinstance(cause, OfflineModeIsEnabled):
        return "Unset HF_HUB_OFFLINE."
    if status in (402, 413, 507) or "quota" in said or "storage limit" in said:
        return f"Make room in that account ({constants.ENDPOINT}/settings/billing), or give another repo_id."
    if status in (401, 404):
        return "Log in (`hf auth login`) or pass token=… with a token of that account that may write; check repo_id."
    if status == 403:
        return f"Use a token that may write to {target.repo_id!r} (`hf auth login`, token=…), or give another repo_id."
    if status == 429:
        return "These are too many requests; wait."
    if status >= 500:
        return f"{constants.ENDPOINT} is in trouble; wait."
    if isinstance(cause, (HfHubHTTPError, ValueError)):
        return "Change what it names."
    if isinstance(cause, OSError) and cause.errno is not None:
        return "Check the storage of the files."
    return f"{constants.ENDPOINT}, or where it stores files, does not answer; check the network and proxies."
