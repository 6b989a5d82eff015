"""Open a checkpoint by name, with its config and, for an adapter, its base: headers are read, weights are not."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any, cast

import transformers
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from hf_fsdp_tools.background import wait_for_saves
from hf_fsdp_tools.distributed.agreement import agreed_steps, opened
from hf_fsdp_tools.distributed.storage import watched
from hf_fsdp_tools.errors import CheckpointError
from hf_fsdp_tools.hub import fetch, local_path
from hf_fsdp_tools.loading.adapter_state import AdapterState, adapter_prefixes
from hf_fsdp_tools.loading.index import CheckpointIndex, refuse_other_contents
from hf_fsdp_tools.loading.weight_files import CONFIG, Contents
from hf_fsdp_tools.modeling.meta import load_config
from hf_fsdp_tools.modeling.pickles import load_generation_config
from hf_fsdp_tools.sharding.adapters import ADAPTER_CONFIG, ADAPTER_FILES, as_peft_config, read_adapter_config
from hf_fsdp_tools.stores import as_url, pinned
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
    base_options: Mapping[str, Any] = field(default_factory=dict)
    """Class and number of labels of the base that an adapter was trained on, where its config and files say them."""


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

    Every rank of the default process group must call. One rank of each node asks the hub, and the others read its
    cache. The ranks exchange errors, and digests of what they have opened.

    Raises:
        CheckpointError: the checkpoint is absent or damaged, nodes have different copies of it, or it does not say of
            which model it is; the same on every rank.

    Example:
        >>> checkpoint = open_checkpoint("checkpoint")
        >>> model = build_meta_model(checkpoint.config)
        >>> report = load_weights(shard_model(model, make_wrap_plan(model)), checkpoint.index, progress=False)
    """
    wait_for_saves()  # perhaps of this checkpoint
    name, peft_config = fspath(name_or_path), as_peft_config(peft_config)
    names = partial(_names, Source(name, hub_kwargs), config, peft_config)
    open_it = partial(_open_alone, name, config, peft_config, trust_remote_code, allow_pickle)
    with pinned(), agreed_steps("opening the checkpoint"):
        checkpoint = opened("opening the checkpoint", names, open_it, hub_kwargs)
        is_adapter = {"is an adapter": checkpoint.adapter is not None}
        refuse_other_contents(checkpoint.index, checkpoint.config, checkpoint.generation_config, is_adapter)
        if checkpoint.adapter_state is not None:
            refuse_other_contents(checkpoint.adapter_state.index)
    return checkpoint


@dataclass(frozen=True)
class Source:
    """Where a checkpoint is, and how it is fetched."""

    name: str
    """Hub name, folder or file."""
    hub: Mapping[str, Any]
    """`revision`, `token`, `cache_dir`, `local_files_only` and `subfolder`."""

    @cached_property
    def path(self) -> Path | None:
        """The local path; None for a hub name."""
        return local_path(self.name)

    @cached_property
    def contents(self) -> Contents | None:
        """What the local folder holds; None for a hub name."""
        return None if self.path is None else Contents(self.folder()[0])

    def folder(self, *patterns: str) -> "tuple[Path, Source]":
        """The local folder, with files of these patterns fetched, and the source at the same commit."""
        if self.path is None:
            folder, pinned = fetch(self.name, *patterns, **self.hub)
            return folder, replace(self, hub={**self.hub, **pinned})
        return self.path / (self.hub.get("subfolder") or ""), self

    def of(self, name: str, revision: str | None) -> "Source":
        """Another checkpoint, which a file of this one names, fetched in the same way.

        A file may name a folder, a repository of the hub, or a place in the same kind of store. All else would let a
        file say what this process connects to, and some file systems of fsspec run what they read.
        """
        protocol, own = ((as_url(place) or "").partition("://")[0] for place in (name, self.name))
        if "::" in name or protocol not in ("", own):
            raise CheckpointError(
                f"{self.name!r} names {quoted(name)} as its base. A file may name a folder, a repository of the hub, "
                "or a place in the store that it lies in. If you trust it, load that base, and then load_adapter()."
            )
        return Source(name, {**self.hub, "subfolder": "", "revision": revision})

    def holding(self, file: str) -> str | None:
        """The folder in which a file that belongs to the checkpoint is: its own, or the nearest of two above, or None.

        Of a hub name, an absent one, and with a subfolder, the name as it is: whoever opens it says more.
        """
        path = self.path
        if path is None or not path.exists() or self.hub.get("subfolder"):
            return self.name
        own = path.absolute() if path.is_dir() else path.absolute().parent
        return next((str(folder) for folder in (own, *list(own.parents)[:2]) if (folder / file).is_file()), None)


def _names(source: Source, config: Any, peft_config: Any) -> list[str | PathLike[str]]:
    """All that is opened with a source: itself, its config if that is a name, and the base of its adapter."""
    names: list[str | PathLike[str]] = [source.name]
    if config is not None and not isinstance(config, PreTrainedConfig):
        names.append(config)
    with watched(Path(source.name)):
        near = None if source.path is None else source.holding(ADAPTER_CONFIG)
    base = _base_of(source, near if peft_config is None else peft_config)
    return names if base is None else [*names, base.name]


def _open_alone(
    name: str, config: Any, peft_config: Any, trust_remote_code: bool, allow_pickle: bool, hub_kwargs: dict[str, Any]
) -> Checkpoint:
    """The checkpoint of a name, or the base of its adapter. No rank communicates."""
    if config is not None and not isinstance(config, PreTrainedConfig):
        config = load_config(config, trust_remote_code=trust_remote_code)
    files = partial(_open_files, config=config, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
    source, base, base_options = _find_base(Source(name, hub_kwargs))
    home = base or source
    checkpoint = files(home)
    state = None if base else checkpoint.adapter_state
    if state is not None:
        state = replace(state, config=peft_config or state.config)
        base_options = base_options_of(_fields_of(state.config), {})
        if (named := _base_of_state(source, state, checkpoint.config)) is not None:
            if state.holds_base:
                own = load_config(named.name, trust_remote_code=trust_remote_code, **named.hub)
                checkpoint = replace(checkpoint, config=own)
            else:
                home, checkpoint = named, files(named)
    if home.name != source.name and checkpoint.adapter_state is not None:
        raise CheckpointError(
            f"The base of {source.name!r}, {home.name!r}, is the state of a PeftModel itself. Merge its adapter into "
            "it and name the result."
        )
    adapter = source.name if base else None
    checkpoint = replace(checkpoint, name=home.name, adapter=adapter, adapter_state=state, hub_kwargs=source.hub)
    return replace(checkpoint, base_options=base_options)


# ---- adapters ----


_TASKS = {
    "FEATURE_EXTRACTION": "AutoModel",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
}
"""Auto class of the base by PEFT's `task_type`, as PEFT's own auto classes have it, where the head differs from that of
language models."""

_HEADS = ("score.weight", "classifier.weight", "classifier.out_proj.weight")
"""Weights of heads of transformers' classifiers, with one row per label."""


def base_options_of(written: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """`auto_class` and `num_labels` of the base of an adapter, as far as its config and the shapes in its files say."""
    task = getattr(written.get("task_type"), "value", written.get("task_type"))
    made_on = (written.get("auto_mapping") or {}).get("base_model_class")
    kind = getattr(transformers, str(_TASKS.get(str(task), made_on)), None)
    is_known = task in _TASKS or (isinstance(kind, type) and issubclass(kind, PreTrainedModel))
    heads = [shapes[key][0] for key in _HEADS if task in _TASKS and key in shapes]
    return {**({"auto_class": kind} if is_known else {}), **({"num_labels": heads[0]} if heads else {})}


def adapter_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of an adapter's tensors by the keys of the base."""
    files = [folder / name for name in ADAPTER_FILES]
    stored = next((CheckpointIndex.open(file, allow_pickle=True).tensors for file in files if file.is_file()), {})
    keys = {key: key.removeprefix("base_model.model.").replace(".base_layer.", ".") for key in stored}
    return {keys[key]: tuple(tensor.shape) for key, tensor in stored.items()}


def _find_base(source: Source) -> tuple[Source, Source | None, dict[str, Any]]:
    """The source at one commit, and the base if it is an adapter, and what the adapter says of it."""
    with watched(Path(source.name)):
        folder, source = source.folder("*config.json")
        kind = "adapter" if source.contents is None else source.contents.kind
    written = read_adapter_config(folder) if "adapter" in kind else None
    if written is None:
        return source, None, {}
    base = source if "model" in kind else _base_of(source, written)
    if base is None:
        raise CheckpointError(
            f"The adapter {source.name!r} names no base model (base_model_name_or_path in adapter_config.json). Write "
            "the base's name or folder there, or load the base and call load_adapter(model, folder)."
        )
    if base.name == source.name:  # the model's own config says what it is
        return source, source, {}
    return source, base, base_options_of(written, adapter_shapes(source.folder("adapter_model.*")[0]))


def _fields_of(peft_config: Any) -> Mapping[str, Any]:
    """The fields of a config of PEFT, which may be the name of the folder that has it, or None."""
    if isinstance(peft_config, str):
        peft_config = read_adapter_config(Path(peft_config))
    return (peft_config or {}) if isinstance(peft_config, Mapping | None) else vars(peft_config)


def _base_of(source: Source, peft_config: Any) -> Source | None:
    """The base that a config of PEFT names."""
    fields = _fields_of(peft_config)
    base = fields.get("base_model_name_or_path")
    return source.of(base, fields.get("revision")) if base else None


def _base_of_state(source: Source, state: AdapterState, config: PreTrainedConfig | None) -> Source | None:
    """The base that must be opened next to a training state with an adapter; None where the state has all of it."""
    if state.config is None:
        raise CheckpointError(
            f"{source.name!r} is the state of a PeftModel ({len(state.index.tensors)} tensors of an adapter, as "
            f"{quoted(min(state.index.tensors))}), and neither it nor the two folders above have an {ADAPTER_CONFIG}. "
            "Pass peft_config=, the config that it was trained with, or put that file there; where the base's weights "
            "are not in the state, it must name the base."
        )
    if state.holds_base and config is not None:
        return None
    named = _base_of(source, state.config)
    if named is None:
        raise CheckpointError(
            f"{source.name!r} is the state of a PeftModel without the base's "
            f"{f'{CONFIG} near it' if state.holds_base else 'weights'}, and its PEFT config names no base. Name it "
            "there (base_model_name_or_path), or pass config=, its name or folder, where the weights are in the state."
        )
    return named


# ---- files ----


def _open_files(source: Source, *, config: Any, trust_remote_code: bool, allow_pickle: bool) -> Checkpoint:
    """Config, index (None where it lacks them) and generation config of a checkpoint, of one commit or one save."""
    with watched(Path(source.name)):
        near = source.holding(CONFIG)
    home = None if near is None else replace(source, name=near)

    def read(contents: Contents | None) -> Checkpoint:
        hub, used_config = dict(source.hub), config
        if home is not None and (config is None or home.path is None):  # of a hub name, this fixes the commit
            own = load_config(home.name, trust_remote_code=trust_remote_code, **hub)
            hub["revision"] = own._commit_hash or hub.get("revision")
            used_config = own if config is None else config
        if contents is None:
            index = CheckpointIndex.open(source.name, allow_pickle=allow_pickle, **hub)
        else:
            index = CheckpointIndex.of(contents, name=source.name, allow_pickle=allow_pickle)
        hub["revision"] = index.commit or hub.get("revision")
        base, adapter = index.split_adapter(adapter_prefixes)
        if used_config is None and adapter is None:
            raise CheckpointError(
                f"No {CONFIG} in {source.name!r} or in the two folders above. Pass config= (--config), the name or "
                "folder of the model that was saved, or copy its config.json there."
            )
        state = None
        if adapter is not None:
            state = AdapterState(index=adapter, config=source.holding(ADAPTER_CONFIG), holds_base=base is not None)
        settings = Source(home.name if home else source.name, hub)
        if settings.path is None:  # they were fetched with the config if they exist
            hub["local_files_only"] = True
        generation = load_generation_config(settings.folder()[0])
        if generation is None and config is not None and (own_folder := local_path(config.name_or_path)) is not None:
            generation = load_generation_config(own_folder)  # next to the config that was given
        return Checkpoint(
            name=source.name,
            config=used_config,
            index=cast(CheckpointIndex, base),
            generation_config=generation,
            adapter=None,
            adapter_state=state,
            hub_kwargs=source.hub,
        )

    if source.contents is None:
        return read(None)
    return source.contents.settled(read, *([] if near is None else [Path(near) / CONFIG]))
