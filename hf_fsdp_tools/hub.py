"""Fetch files of a hub repository into a local folder and upload files to one, by `huggingface_hub` alone.

Its cache, locks, tokens, retries and settings (`HF_HOME`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`, …) apply. It lists a
repository, and uploads, without time limits (1.10 to 2.4), so that a silent hub would keep every rank waiting for ever.
So it is asked only of a hub that has just answered.
"""

import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from hf_fsdp_tools.errors import CheckpointError, ConfigError
from hf_fsdp_tools.text import first_line, first_lines

CARD = "README.md"

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
    again for a hub that did not answer. The hub has `HF_HUB_ETAG_TIMEOUT` (10 s) to answer; if it does not or refuses,
    the cache is used, with a warning. When no more bytes of a file arrive, huggingface_hub gives up within 7 minutes.

    No rank communicates; processes that share a cache wait for each other's downloads at its file locks.
    """
    from huggingface_hub import snapshot_download

    where: dict[str, Any] = {"revision": revision, "cache_dir": cache_dir}
    is_local = local_files_only or not _answers(name, token, **where)
    if is_local:
        snapshot = _cached_snapshot(name, **where)
    else:
        wanted = [f"{subfolder}/{pattern}" if subfolder else pattern for pattern in patterns]
        for pause_s in (*_PAUSES_S, None):
            try:
                snapshot = Path(snapshot_download(name, allow_patterns=wanted, token=token, **where))
                break
            except Exception as error:  # of huggingface_hub's HTTP library, which has changed twice
                # It does not try again itself after a connection reset in the middle of a file, or a status of 5xx.
                root = _root(error)
                if pause_s is None or (_status(root) < 500 and type(root).__name__ != "ReadError"):
                    raise _refusal(name, revision, error) from None
                time.sleep(pause_s)
    with suppress(OSError):  # a read-only cache; huggingface_hub makes no folder where no file matches
        snapshot.mkdir(parents=True, exist_ok=True)
    return snapshot / (subfolder or ""), {"revision": snapshot.name, "local_files_only": is_local}


def _answers(name: str, token: str | bool | None, revision: str | None, cache_dir: str | PathLike[str] | None) -> bool:
    """Whether the hub answers and has the repository; False if the cache is to be used."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import OfflineModeIsEnabled, RevisionNotFoundError

    try:
        HfApi(token=token).model_info(name, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        return True
    except OfflineModeIsEnabled:
        return False
    except Exception as error:
        try:
            snapshot = _cached_snapshot(name, revision, cache_dir)
        except CheckpointError:
            snapshot = None
        if snapshot is None or isinstance(error, RevisionNotFoundError):  # deleted since
            raise _refusal(name, revision, error) from None
        reason = f"{type(error).__name__}: {first_line(error)}"
        warnings.warn(f"The hub did not give {name!r} ({reason}). Using what is cached, in {snapshot}.", stacklevel=3)
        return False


def _cached_snapshot(name: str, revision: str | None, cache_dir: str | PathLike[str] | None) -> Path:
    """The folder of a revision in the cache, whatever files it holds."""
    from huggingface_hub import snapshot_download

    where: dict[str, Any] = {"revision": revision, "cache_dir": cache_dir}
    try:
        return Path(snapshot_download(name, local_files_only=True, allow_patterns=[], **where))
    except (OSError, ValueError) as error:  # not there; not a name
        raise _refusal(name, revision, error) from None


def _refusal(name: str, revision: str | None, error: Exception) -> CheckpointError:
    """An error of a download as a `CheckpointError` with a cure."""
    at = f" at revision {revision!r}" if revision else ""
    return CheckpointError(
        f"No checkpoint {name!r}{at}: it is not a local folder, and the hub did not give it ({_in_a_line(error)}). "
        f"{_cure(name, error)} Or download it first and give the folder."
    )


# ---- errors of the hub ----


def _root(error: Exception) -> Exception:
    """The error beneath those that huggingface_hub wraps around it."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    is_wrapper = type(error) is RuntimeError or isinstance(error, LocalEntryNotFoundError)
    return _root(error.__cause__) if is_wrapper and isinstance(error.__cause__, Exception) else error


def _in_a_line(error: Exception) -> str:
    return f"{type(_root(error)).__name__}: {first_lines(_root(error), 4)}"


def _status(error: Exception) -> int:
    """The status of the hub's answer; 0 where there was none."""
    in_text = _STATUS_IN_TEXT.search(str(error))
    return int(in_text[1] if in_text else getattr(getattr(error, "response", None), "status_code", 0))


def _cure(name: str, error: Exception) -> str:
    """What to do about an error of huggingface_hub."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RevisionNotFoundError

    error = _root(error)
    status = _status(error)
    if isinstance(error, RevisionNotFoundError):
        return "The repository has no such revision. Give a branch, a tag or a commit that it has."
    if status in (401, 403, 404):
        return (
            f"Check the name. Where it is private or gated, ask for access at {constants.ENDPOINT}/{name} and log in "
            "(`hf auth login`) or pass token=…, with a token that may use it."
        )
    if status == 429 or status >= 500:
        return f"{constants.ENDPOINT} is busy or in trouble. Try again later, logged in (`hf auth login`)."
    if isinstance(error, (HfHubHTTPError, LocalEntryNotFoundError, ValueError)):
        return "Check the name, the revision and the token."
    if isinstance(error, OSError) and error.errno is not None:
        return f"Check space and permissions of the files and of the cache in {constants.HF_HUB_CACHE}."
    return (
        f"{constants.ENDPOINT}, or where it keeps files, cannot be reached or does not answer. Check the network and "
        "proxies; where it is only slow to begin, set HF_HUB_DOWNLOAD_TIMEOUT higher."
    )


@contextmanager
def upload_errors(target: "HubTarget", kept: str) -> Iterator[None]:
    """Turn any error of a block that uploads into a `CheckpointError` that says what is kept, and the cure."""
    try:
        yield
    except Exception as error:
        fact = f"{kept!r} is saved and complete, but its upload to {target.repo_id!r} failed"
        then = f" Then upload it: `hf upload {target.repo_id} {kept}`."
        if not kept:
            fact, then = f"{target.repo_id!r} on the hub cannot be written to", ""
        raise CheckpointError(f"{fact} ({_in_a_line(error)}). {_cure(target.repo_id, error)}{then}") from None


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

    The repository, and a branch, are made where they are not there. Contents that the hub has are not sent again.
    (`upload_folder` makes several commits of a large folder.) No rank communicates.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api = HfApi(token=target.token, library_name="hf_fsdp_tools")
    repo_id, names = _ready_repository(api, target)
    additions = [CommitOperationAdd(name, str(path)) for name, path in sorted(files.items())]
    if card is not None and CARD not in files and CARD not in names:
        additions.append(CommitOperationAdd(CARD, card().encode()))
    deletions = [CommitOperationDelete(name) for name in names if name not in files and is_outdated(name)]
    commit = api.create_commit(
        repo_id,
        [*additions, *deletions],
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

    where = {"revision": target.revision, "timeout": constants.HF_HUB_ETAG_TIMEOUT}
    repo_id = target.repo_id
    if "/" not in repo_id:
        repo_id = api.create_repo(repo_id, private=target.private, exist_ok=True).repo_id
    try:
        info = api.model_info(repo_id, **where)
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        if isinstance(error, RepositoryNotFoundError):
            api.create_repo(repo_id, private=target.private, exist_ok=True)
        if target.revision is not None and not target.revision.startswith("refs/pr"):
            api.create_branch(repo_id, branch=target.revision, exist_ok=True)
        info = api.model_info(repo_id, **where)
    return repo_id, [file.rfilename for file in info.siblings or ()]
