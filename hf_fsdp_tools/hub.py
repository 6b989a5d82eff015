"""Fetch files of a hub repository into a local folder and upload files to one, by `huggingface_hub` alone.

Its cache, locks, tokens, retries and settings (`HF_HOME`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`, …) apply. It lists a
repository, and uploads, without time limits (1.10 to 2.4), so that a silent hub would keep every rank waiting for ever.
So it is asked only of a hub that has just answered.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from hf_fsdp_tools.errors import CheckpointError, ConfigError, warn
from hf_fsdp_tools.stores import as_url, stub_of
from hf_fsdp_tools.text import did_you_mean, first_line, first_lines

CARD = "README.md"

OF_GGUF = (
    "Make a plain checkpoint of GGUF files once: "
    "AutoModelForCausalLM.from_pretrained(folder, gguf_file=name).save_pretrained(new_folder)."
)


def local_path(name_or_path: str | PathLike[str]) -> Path | None:
    """The local path of a name, with `~` expanded; None for a name on the hub ("gpt2", "org/model").

    A path that exists is local. So is a name that no repository can have ("./model", "a/b/c"), existing or not. A name
    in a store ("s3://bucket/run") gives the stub that stands for what is there.
    """
    name = fspath(name_or_path)
    if name.startswith("https://huggingface.co/"):
        raise CheckpointError(f"{name!r} is a page. Give the name on the hub: {'/'.join(name.split('/')[3:5])}")
    if (url := as_url(name)) is not None:
        return stub_of(url)
    name = name.removeprefix("file://")
    if not name.strip():
        raise CheckpointError(f"The name of a checkpoint is empty ({name!r}). Give a local folder or a hub name.")
    path = Path(os.path.expanduser(name))
    can_be_on_hub = not name.startswith((".", "~", "/")) and name.count("/") <= 1 and "\\" not in name
    return None if can_be_on_hub and not os.path.exists(path) else path  # False for a name of any length


def hub_name_of(model: Any) -> str:
    """The name on the hub of what a model was made from; "" where it came from a folder, a store or nothing."""
    name = getattr(getattr(model, "config", None), "_name_or_path", "")
    return name if name and as_url(name) is None and local_path(name) is None else ""


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
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import OfflineModeIsEnabled, RevisionNotFoundError

    if ":" in name:
        raise CheckpointError(
            f"{name!r} is a name with a tag, of Ollama or of GGUF files, which cannot be trained on. Give the model of "
            "which it was made by its name on the hub, such as Qwen/Qwen3-8B."
        )
    refusal: Exception | None = None
    try:
        if not local_files_only:
            HfApi(token=token).model_info(name, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except Exception as error:  # of huggingface_hub's HTTP library, which has changed twice
        local_files_only, refusal = True, error
    wanted = [f"{subfolder}/{pattern}" if subfolder else pattern for pattern in patterns]
    try:
        if isinstance(refusal, RevisionNotFoundError):  # also where it is cached: it was deleted since
            raise refusal
        snapshot = Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=[] if local_files_only else wanted,
                token=token,
                cache_dir=None if cache_dir is None else Path(cache_dir),
                local_files_only=local_files_only,
            )
        )
    except Exception as error:
        raise CheckpointError(
            f"No checkpoint {name!r}{f' at revision {revision!r}' if revision else ''}: it is not a local folder, and "
            f"the hub did not give it ({_in_a_line(refusal or error)}). Check name, revision and network and, where it "
            "is private or gated, the token (`hf auth login`); or download it first and give the folder."
        ) from None
    if refusal is not None and not isinstance(refusal, OfflineModeIsEnabled):
        text = f"The hub did not give {name!r} ({_in_a_line(refusal)}). Using what is cached, in {snapshot}."
        warn(text)
    with suppress(OSError):  # a read-only cache; huggingface_hub makes no folder where no file matches
        snapshot.mkdir(parents=True, exist_ok=True)
    return snapshot / (subfolder or ""), {"revision": snapshot.name, "local_files_only": local_files_only}


def _in_a_line(error: Exception) -> str:
    """An error of huggingface_hub; why, for a file that was neither sent nor cached, or could not be put."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    if isinstance(error, LocalEntryNotFoundError | RuntimeError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return f"{type(error).__name__}: {first_lines(error, 4)}"


def hub_target(folder: Path, push_to_hub: bool, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
    """Where on the hub a save goes, as arguments of `upload`; None where nothing is to be uploaded."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # it is public

    known = ("repo_id", "private", "token", "commit_message", "commit_description", "revision", "create_pr")
    for name in sorted(arguments.keys() - set(known)):
        text = f"Those for an upload are push_to_hub and {', '.join(known)}."
        raise ConfigError(f"save_pretrained has no argument {name!r}{did_you_mean(name, known)} {text}")
    if arguments and not push_to_hub:
        raise ConfigError(f"{', '.join(sorted(arguments))} mean nothing without an upload. Add push_to_hub=True.")
    if not push_to_hub:
        return None
    target = {"repo_id": folder.resolve().name, **arguments}
    try:
        validate_repo_id(target["repo_id"])
    except HFValidationError as error:
        name = f"repo_id={target['repo_id']!r} is no name of a repository on the hub"
        raise ConfigError(f'{name}: {first_line(error)}. Give repo_id as "organization/name" or "name".') from None
    return target


def upload(
    folder: Path,
    files: Mapping[str, Path],
    *,
    is_outdated: Callable[[str], bool],
    card: Callable[[], object] | None = None,
    repo_id: str,
    private: bool | None = None,
    token: str | bool | None = None,
    commit_message: str | None = None,
    commit_description: str | None = None,
    revision: str | None = None,
    create_pr: bool = False,
) -> str:
    """Upload files of a saved folder as one commit, so that whoever opens the repository gets the former files or all
    the new ones; the commit's page. Outdated files go, and a card is written where there is none.

    The repository, and a branch, are made where they are not there. Contents that the hub has are not sent again.
    (`upload_folder` makes several commits of a large folder.) No rank communicates.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        api = HfApi(token=token, library_name="hf_fsdp_tools")
        with suppress(RepositoryNotFoundError):
            api.model_info(repo_id, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not revision.startswith("refs/pr"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        names = api.list_repo_files(repo_id, revision=revision)
        additions = [CommitOperationAdd(name, str(path)) for name, path in sorted(files.items())]
        if card is not None and CARD not in files and CARD not in names:
            additions.append(CommitOperationAdd(CARD, str(card()).encode()))
        deletions = [CommitOperationDelete(name) for name in names if name not in files and is_outdated(name)]
        commit = api.create_commit(
            repo_id,
            [*additions, *deletions],
            commit_message=commit_message or "Upload model",
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
        )
        return str(commit.pr_url or commit.commit_url)
    except Exception as error:
        raise CheckpointError(
            f"{str(folder)!r} is saved and complete, but its upload to {repo_id!r} failed ({_in_a_line(error)}). Check "
            f"name, network and token. Then upload it: `hf upload {repo_id} {folder}`."
        ) from None
