"""Open a checkpoint by name, with its config and, for an adapter, its base: headers are read, weights are not."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from hf_fsdp_tools.checkpoint.background import wait_for_saves
from hf_fsdp_tools.checkpoint.fingerprint import refuse_other_contents
from hf_fsdp_tools.checkpoint.formats.dcp import find_dcp_folder
from hf_fsdp_tools.checkpoint.index import WEIGHTS, WEIGHTS_INDEX, CheckpointIndex
from hf_fsdp_tools.checkpoint.unfinished import CONFIG, stamps
from hf_fsdp_tools.distributed.agreement import opened
from hf_fsdp_tools.distributed.watch import watched
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.hub import fetch, local_path
from hf_fsdp_tools.modeling.meta import load_config
from hf_fsdp_tools.modeling.untrusted import load_generation_config
from hf_fsdp_tools.sharding.adapter_files import read_adapter_config

__all__ = ["Checkpoint", "open_checkpoint"]


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was opened and not read: config and headers, from one commit of the hub."""

    name: str
    """Hub name or folder; of an adapter, those of its base."""

    config: PreTrainedConfig
    """The model's configuration."""

    index: CheckpointIndex
    """File, dtype and byte range of every key."""

    generation_config: GenerationConfig | None
    """The checkpoint's own generation settings; None without any."""

    adapter: str | None
    """Hub name or folder of the PEFT adapter, if an adapter was opened; None for a model."""

    hub_kwargs: Mapping[str, Any]
    """Arguments that fetch more files of the same commit."""


def open_checkpoint(
    name_or_path: str | PathLike[str],
    *,
    config: PreTrainedConfig | str | PathLike[str] | None = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    **hub_kwargs: Any,
) -> Checkpoint:
    """Open a checkpoint, or the base of a PEFT adapter: read its config and the headers of its files, no weights.

    Args:
        name_or_path: as for `from_pretrained`.
        config: in place of the checkpoint's own, which need not be there then.
        trust_remote_code: use a config class that comes with the checkpoint (of an adapter, with its base).
        allow_pickle: read legacy `.bin` files where there are no safetensors.
        hub_kwargs: `revision`, `token`, `cache_dir`, `local_files_only`, `subfolder`.

    Every rank of the default process group must call; without a group, this process opens for itself. One rank of each
    node asks the hub, and the others read its cache. The ranks exchange errors, and digests of what they have opened
    (`refuse_other_contents`).

    Raises:
        CheckpointError: the checkpoint is absent or damaged, or nodes have different copies of it; the same on every
            rank.
    """
    wait_for_saves()  # perhaps of this checkpoint
    name = fspath(name_or_path)
    here, base = opened("looking for the checkpoint", name, partial(_find_base, name), hub_kwargs)
    home, asked = base or (name, here)
    read = partial(_open, home, trust_remote_code, allow_pickle, config is None)
    own_config, index, generation_config = opened("opening the checkpoint", home, read, asked)
    if config is not None and not isinstance(config, PreTrainedConfig):
        look = partial(_load_other_config, config, trust_remote_code)
        config = opened("opening the config", config, look, {})
    config = own_config if config is None else config
    assert config is not None
    refuse_other_contents(index, config, generation_config, {"is an adapter": base is not None})
    return Checkpoint(
        name=home,
        config=config,
        index=index,
        generation_config=generation_config,
        adapter=name if base else None,
        hub_kwargs=here,
    )


def _find_base(name: str, hub_kwargs: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, dict[str, Any]] | None]:
    """Arguments that fetch the same commit again; and, of an adapter, its base with the arguments to fetch it."""
    with watched(Path(name)):
        path = local_path(name)
    if path is None:
        folder, pinned = fetch(name, "*config.json", **hub_kwargs)
    else:
        folder, pinned = path / (hub_kwargs.get("subfolder") or ""), {}
    here = hub_kwargs | pinned
    with watched(folder):
        is_model = (folder / "config.json").is_file()
    written = None if is_model else read_adapter_config(folder)
    if written is None:
        return here, None
    base = written.get("base_model_name_or_path")
    if not base:
        raise CheckpointError(
            f"The adapter {name!r} names no base model (base_model_name_or_path in adapter_config.json). Write the "
            "base's name or folder there, or load the base and call load_adapter(model, folder)."
        )
    revision = {"revision": written["revision"]} if written.get("revision") else {}
    kept = {key: value for key, value in hub_kwargs.items() if key not in ("revision", "subfolder")}
    return here, (base, kept | revision)


def _open(
    name: str, trust_remote_code: bool, allow_pickle: bool, needs_config: bool, hub_kwargs: dict[str, Any]
) -> tuple[PreTrainedConfig | None, CheckpointIndex, GenerationConfig | None]:
    """Config, index and generation config of a checkpoint: all of one commit or, in a folder, of one save."""
    with watched(Path(name)):
        home = _config_home(name)
        folder = local_path(home)
    before = folder and stamps(folder, WEIGHTS, WEIGHTS_INDEX)
    found = _open_as_is(name, home, trust_remote_code, allow_pickle, needs_config, hub_kwargs)
    if folder is None or stamps(folder, WEIGHTS, WEIGHTS_INDEX) == before:
        return found
    return _open_as_is(
        name, home, trust_remote_code, allow_pickle, needs_config, hub_kwargs
    )  # a save has replaced it meanwhile


def _open_as_is(
    name: str, home: str, trust_remote_code: bool, allow_pickle: bool, needs_config: bool, hub_kwargs: dict[str, Any]
) -> tuple[PreTrainedConfig | None, CheckpointIndex, GenerationConfig | None]:
    path = local_path(home)
    config = None
    if needs_config or path is None or (path / (hub_kwargs.get("subfolder") or "") / CONFIG).is_file():
        config = load_config(home, trust_remote_code=trust_remote_code, **hub_kwargs)
    commit = {"revision": config._commit_hash} if config is not None and config._commit_hash else {}
    index = CheckpointIndex.open(name, allow_pickle=allow_pickle, **hub_kwargs | commit)
    if path is None:  # it was fetched with the config if it exists
        folder, _ = fetch(home, **hub_kwargs | commit | {"local_files_only": True})
    else:
        folder = path / (hub_kwargs.get("subfolder") or "")
    return config, index, load_generation_config(folder)


def _load_other_config(config: str | PathLike[str], trust_remote_code: bool, asked: dict[str, Any]) -> PreTrainedConfig:
    return load_config(config, trust_remote_code=trust_remote_code, **asked)


def _config_home(name: str) -> str:
    """Where the config is: for a DCP folder without one, the nearest of two folders above; else the name itself."""
    folder = local_path(name)
    if folder is None or not folder.is_dir() or (folder / "config.json").is_file() or find_dcp_folder(folder) is None:
        return name
    above = list(folder.absolute().parents)[:2]
    return next((str(path) for path in above if (path / "config.json").is_file()), name)
