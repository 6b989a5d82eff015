"""Open a checkpoint by name, with its config and, for an adapter, its base: headers are read, weights are not."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import logging

from hf_fsdp_tools.background import wait_for_saves
from hf_fsdp_tools.distributed.agreement import agreed, opened, rank_and_size
from hf_fsdp_tools.distributed.storage import watched
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.hub import fetch, local_path
from hf_fsdp_tools.loading.adapter_state import AdapterState, split_adapter
from hf_fsdp_tools.loading.fingerprint import refuse_other_contents
from hf_fsdp_tools.loading.formats.dcp import METADATA, MODEL_FOLDERS
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.loading.unfinished import CONFIG, stamps
from hf_fsdp_tools.loading.weight_files import (
    ACCELERATE_PICKLED,
    PICKLED,
    PICKLED_INDEX,
    WEIGHTS,
    WEIGHTS_INDEX,
    has_safetensors,
)
from hf_fsdp_tools.modeling.meta import load_config
from hf_fsdp_tools.modeling.untrusted import load_generation_config
from hf_fsdp_tools.sharding.adapter_files import ADAPTER_CONFIG, as_peft_config, read_adapter_config
from hf_fsdp_tools.text import quoted


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was opened and not read: config and headers, from one commit of the hub.

    Example:
        >>> checkpoint = open_checkpoint("checkpoint")
        >>> isinstance(checkpoint, Checkpoint), checkpoint.config.model_type, checkpoint.adapter
        (True, 'llama', None)
    """

    name: str
    """Hub name or folder; of an adapter that was saved without its base, those of the base."""

    config: PreTrainedConfig
    """The model's configuration."""

    index: CheckpointIndex
    """File, dtype and byte range of every key."""

    generation_config: GenerationConfig | None
    """The checkpoint's own generation settings; None without any."""

    adapter: str | None
    """Hub name or folder of the PEFT adapter, if an adapter was opened; None for a model."""

    adapter_state: AdapterState | None
    """The PEFT adapter, if a training state was opened that holds values of one; None otherwise."""

    hub_kwargs: Mapping[str, Any]
    """Arguments that fetch more files of the same commit."""


def open_checkpoint(
    name_or_path: str | PathLike[str],
    *,
    config: PreTrainedConfig | str | PathLike[str] | None = None,
    peft_config: Any = None,
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    **hub_kwargs: Any,
) -> Checkpoint:
    """Open a checkpoint, or the base of a PEFT adapter: read its config and the headers of its files, no weights.

    Args:
        name_or_path: as for `from_pretrained`.
        config: in place of the checkpoint's own, which need not be there then.
        peft_config: of PEFT, for a training state that holds an adapter and has no `adapter_config.json` near it.
        trust_remote_code: use a config class that comes with the checkpoint (of an adapter, with its base).
        allow_pickle: read legacy `.bin` files where there are no safetensors.
        hub_kwargs: `revision`, `token`, `cache_dir`, `local_files_only`, `subfolder`.

    Every rank of the default process group must call; without a group, this process opens for itself. One rank of each
    node asks the hub, and the others read its cache. The ranks exchange errors, and digests of what they have opened
    (`refuse_other_contents`).

    Raises:
        CheckpointError: the checkpoint is absent or damaged, nodes have different copies of it, or it does not say of
            which model it is; the same on every rank.

    Example:
        >>> checkpoint = open_checkpoint("checkpoint")
        >>> model = build_meta_model(checkpoint.config)
        >>> report = load_weights(shard_model(model, make_wrap_plan(model)), checkpoint.index, progress=False)
    """
    peft_config = as_peft_config(peft_config)
    wait_for_saves()  # perhaps of this checkpoint
    name = fspath(name_or_path)
    if config is not None and not isinstance(config, PreTrainedConfig):
        config = opened("opening the config", config, partial(_load_config, config, trust_remote_code), {})
    read = partial(_open, config=config, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
    here, base = opened("looking for the checkpoint", name, partial(_find_base, name), hub_kwargs)
    home, asked = base or (name, here)
    found = opened("opening the checkpoint", home, partial(read, home), asked)
    state = None if base else found.adapter_state
    if state is not None:
        with agreed("looking for the config of the adapter", name):
            state = replace(state, config=peft_config or state.config)
            named = _base_of_state(name, state, found.config)
        if named is not None:
            base_name, asked = named[0], _without_place(here) | named[1]
            load = partial(_load_config, base_name, trust_remote_code)
            if state.holds_base:
                own = opened("opening the config", base_name, load, asked)
                found = replace(found, config=own)
            else:
                home, found = base_name, opened("opening the base", base_name, partial(read, base_name), asked)
    if home != name and found.adapter_state is not None:
        raise CheckpointError(
            f"The base of {name!r}, {home!r}, is the state of a PeftModel itself. Merge its adapter into it and name "
            "the result."
        )
    index, known = found.index, found.config
    assert index is not None and known is not None
    refuse_other_contents(index, known, found.generation_config, {"is an adapter": base is not None})
    if state is not None:
        refuse_other_contents(state.index)
    return Checkpoint(
        name=home,
        config=known,
        index=index,
        generation_config=found.generation_config,
        adapter=name if base else None,
        adapter_state=state,
        hub_kwargs=here,
    )


# ---- adapters ----


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
        holds = "adapter" if path is None else _what_is_in(folder)
    written = read_adapter_config(folder) if "adapter" in holds else None
    if written is None:
        return here, None
    base = (name, here) if "model" in holds else _base_in(written)
    if base is not None and (folder / CONFIG).is_file() and (path is None or base[0] == name):
        _tell_of_both(name, base[0])
    if base is None:
        raise CheckpointError(
            f"The adapter {name!r} names no base model (base_model_name_or_path in adapter_config.json). Write the "
            "base's name or folder there, or load the base and call load_adapter(model, folder)."
        )
    return here, base if base[0] == name else (base[0], _without_place(here) | base[1])


def _what_is_in(folder: Path) -> str:
    """What a local folder holds: "model" (or a training state), "adapter", or "model and adapter".

    Axolotl writes the config of the base beside an adapter, and Accelerate an adapter's values beside those of PEFT.
    """
    has_values = any(folder.glob("adapter_model.*"))
    if (folder / CONFIG).is_file():
        is_pickled = any((folder / name).is_file() for name in (PICKLED, PICKLED_INDEX))
        is_model = is_pickled or has_safetensors(folder)
        return ("model and adapter" if is_model else "adapter") if has_values else "model"
    of_states = (METADATA, MODEL_FOLDERS, ACCELERATE_PICKLED)
    is_state = not has_values and any(path for pattern in of_states for path in folder.glob(pattern))
    return "model" if is_state else "adapter"


def _tell_of_both(name: str, base: str) -> None:
    """Say in one line on rank 0 which base an adapter is put on that has a config of a model beside it."""
    if rank_and_size()[0] == 0:
        on = "the model beside it" if base == name else repr(base)
        logging.get_logger("transformers.modeling_utils").warning(
            f"{name!r} holds {CONFIG} and {ADAPTER_CONFIG}: the adapter is opened, on {on}, as transformers does. Take "
            f"{ADAPTER_CONFIG} out to open the model alone."
        )


def _base_in(written: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The base that a config of PEFT names, and its revision."""
    base, revision = (written.get(key) for key in ("base_model_name_or_path", "revision"))
    return (base, {"revision": revision} if revision else {}) if base else None


def _without_place(hub_kwargs: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in hub_kwargs.items() if key not in ("revision", "subfolder")}


def _base_of_state(
    name: str, state: AdapterState, config: PreTrainedConfig | None
) -> tuple[str, dict[str, Any]] | None:
    """The base that must be opened beside a training state with an adapter; None where the state has all of it."""
    if state.config is None:
        base = "" if state.holds_base else ", in which base_model_name_or_path names the base"
        raise CheckpointError(
            f"{name!r} is the state of a PeftModel ({len(state.index.tensors)} tensors of an adapter, as "
            f"{quoted(min(state.index.tensors))}), and neither it nor the two folders above have an {ADAPTER_CONFIG}. "
            f"Pass peft_config=, the config that it was trained with{base}, or put that file there."
        )
    if state.holds_base and config is not None:
        return None
    written = read_adapter_config(Path(state.config)) if isinstance(state.config, str) else vars(state.config)
    named = _base_in(written or {})
    if named is None:
        lacks = "has no config.json near it" if state.holds_base else "does not hold the base"
        cure = " or pass config=, its name or folder" if state.holds_base else ""
        raise CheckpointError(
            f"{name!r} is the state of a PeftModel, which {lacks}, and its PEFT config names no base. Name it there "
            f"(base_model_name_or_path){cure}."
        )
    return named


# ---- files ----


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """What one folder or hub name holds, None for what it lacks."""

    config: PreTrainedConfig | None
    index: CheckpointIndex | None
    generation_config: GenerationConfig | None
    adapter_state: AdapterState | None


def _open(
    name: str,
    hub_kwargs: dict[str, Any],
    *,
    config: PreTrainedConfig | None,
    trust_remote_code: bool,
    allow_pickle: bool,
) -> _Opened:
    """Config, index and generation config of a checkpoint: all of one commit or, in a folder, of one save."""
    with watched(Path(name)):
        home = _home_of(name, CONFIG, hub_kwargs)
        folder = home and local_path(home)
    before = folder and stamps(folder, WEIGHTS, WEIGHTS_INDEX)
    read = partial(_open_as_is, name, home, config, trust_remote_code, allow_pickle, hub_kwargs)
    found = read()
    if not folder or stamps(folder, WEIGHTS, WEIGHTS_INDEX) == before:
        return found
    return read()  # a save has replaced it meanwhile


def _open_as_is(
    name: str,
    home: str | None,
    config: PreTrainedConfig | None,
    trust_remote_code: bool,
    allow_pickle: bool,
    hub_kwargs: dict[str, Any],
) -> _Opened:
    asked = dict(hub_kwargs)
    if home is not None and (config is None or local_path(home) is None):  # of a hub name, this fixes the commit
        own = load_config(home, trust_remote_code=trust_remote_code, **asked)
        asked |= {"revision": own._commit_hash} if own._commit_hash else {}
        config = own if config is None else config
    index = CheckpointIndex.open(name, allow_pickle=allow_pickle, **asked)
    asked |= {"revision": index.commit} if index.commit else {}
    base, adapter = split_adapter(index)
    if config is None and adapter is None:
        raise CheckpointError(
            f"No {CONFIG} in {name!r} or in the two folders above. Pass config=, the name or folder of the model that "
            "was saved, or copy its config.json there."
        )
    state = None
    if adapter is not None:
        near = _home_of(name, ADAPTER_CONFIG, hub_kwargs)
        state = AdapterState(index=adapter, config=near, holds_base=base is not None)
    return _Opened(
        config=config, index=base, generation_config=_generation_config(name, home, asked), adapter_state=state
    )


def _generation_config(name: str, home: str | None, hub_kwargs: dict[str, Any]) -> GenerationConfig | None:
    path = local_path(home or name)
    if path is None:  # it was fetched with the config if it exists
        folder, _ = fetch(name, **hub_kwargs | {"local_files_only": True})
    else:
        folder = path / (hub_kwargs.get("subfolder") or "")
    return load_generation_config(folder)


def _load_config(name: str | PathLike[str], trust_remote_code: bool, asked: dict[str, Any]) -> PreTrainedConfig:
    return load_config(name, trust_remote_code=trust_remote_code, **asked)


def _home_of(name: str, file: str, hub_kwargs: dict[str, Any]) -> str | None:
    """The folder in which a file that belongs to a checkpoint is: its own, or the nearest of two above; None without.

    A hub name, a name that does not exist and one with a subfolder are given back: whoever opens them says more.
    """
    path = local_path(name)
    if path is None or not path.exists() or hub_kwargs.get("subfolder"):
        return name
    own = path.absolute() if path.is_dir() else path.absolute().parent
    return next((str(folder) for folder in (own, *list(own.parents)[:2]) if (folder / file).is_file()), None)
