"""A training state, or an adapter merged into its base, as a Hugging Face checkpoint: on CPUs, never whole in memory.

The model is built without values, matched with the files, and laid out as the checkpoint that the training would have
written; then the ranks share its parts (`rewrite`).
"""

import shutil
import time
import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_fsdp_tools.distributed.agreement import agreed, opened, rank_and_size, same_on_all_ranks
from hf_fsdp_tools.errors import CheckpointError, ConfigError
from hf_fsdp_tools.hub import fetch, local_path
from hf_fsdp_tools.loading.adapter_state import restore_adapter
from hf_fsdp_tools.loading.conversion import assume_conversions, persistent_tensors, set_conversions
from hf_fsdp_tools.loading.fill import fill_shards
from hf_fsdp_tools.loading.formats.stored import QuantizedTensor
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.loading.io.files import REQUESTS_IN_FLIGHT, TransferStats
from hf_fsdp_tools.loading.match import Match, check_ties, match_checkpoint
from hf_fsdp_tools.loading.opening import Checkpoint, open_checkpoint
from hf_fsdp_tools.loading.report import loading_bar
from hf_fsdp_tools.loading.unfinished import CONFIG
from hf_fsdp_tools.loading.vocabulary import resize_vocabulary
from hf_fsdp_tools.modeling.arguments import as_dtype
from hf_fsdp_tools.modeling.generation import set_generation_config
from hf_fsdp_tools.modeling.linear4bit import packed_linears
from hf_fsdp_tools.modeling.meta import build_meta_model, config_dtype
from hf_fsdp_tools.modeling.model_class import model_class
from hf_fsdp_tools.modeling.peft_view import base_of
from hf_fsdp_tools.modeling.quantization import forget_quantization
from hf_fsdp_tools.saving.hidden_folder import HiddenFolder
from hf_fsdp_tools.saving.layout import plan_layout
from hf_fsdp_tools.saving.merged_model import adapted_parameters, mergeable, with_merged
from hf_fsdp_tools.saving.report import SaveReport
from hf_fsdp_tools.saving.rewrite import FIT, STAGING_BYTES, Material, Rewrite
from hf_fsdp_tools.saving.save import BegunSave, prepare_save
from hf_fsdp_tools.saving.save_adapter import save_adapter
from hf_fsdp_tools.sharding.adapter_files import read_adapter_config
from hf_fsdp_tools.sharding.adapters import load_adapter
from hf_fsdp_tools.sharding.allocate import with_data
from hf_fsdp_tools.text import listed, listed_lines

_OF_ONE_REPOSITORY = ("revision", "subfolder")
"""Arguments that say where in a repository an adapter is, and nothing about its base."""

_OF_TRAININGS = (
    "*.distcp", ".metadata", "adapter_*", "optimizer*", "pytorch_model*", "scheduler*", "trainer_state.json",
)  # fmt: skip
"""Files and folders that lie beside weights in states of a training, and that a new checkpoint is not put between."""

_TOKENIZER = (
    "added_tokens.json", "additional_chat_templates/*", "chat_template*", "merges.txt", "*.model",
    "special_tokens_map.json", "*.tiktoken", "tokenizer*", "vocab.*",
)  # fmt: skip
"""Files of tokenizers, with what `save_pretrained` of transformers writes (5.23) and older ones wrote."""

_PROCESSOR = ("*processor_config.json",)
"""Files of processors of images, sound and video, and of processors around a tokenizer."""

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


def export_checkpoint(
    state: str | PathLike[str],
    folder: str | PathLike[str],
    *,
    config: PreTrainedConfig | str | PathLike[str] | None = None,
    auto_class: Any = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    progress: bool | None = None,
    **hub_kwargs: Any,
) -> SaveReport:
    """Write a training state, or any checkpoint, as the checkpoint that `save_pretrained` writes in the training.

    Of the state of a `PeftModel`, that is the adapter alone.

    A state that any number of ranks saved is read by this process, or by the ranks of the default process group, which
    share the work. Each holds a part of the model at a time: 64 MiB of tensors and 64 MiB of staging buffers, or, where
    a conversion does more than move data, the tensors that one conversion takes together. Names, layout, dtypes, shapes
    and files are those of `save_pretrained`; values are the state's, bit for bit. Tokenizer and processor files beside
    the state, or beside its config, are copied.

    Args:
        state: a DCP folder, or a folder of Accelerate or the Trainer with one in it (`checkpoint-500`), or any other
            checkpoint that `from_pretrained` opens.
        folder: of the new checkpoint. New, empty, or with an earlier checkpoint, which stays until the new one is
            complete, and if this fails.
        config: of the model; None means the `config.json` of the state, or the nearest of two folders above.
        auto_class: the class of the model, or an `AutoModelFor…` class; None means the class that the config names.
        dtype: of floating-point tensors in the files; None keeps each tensor's own.
        max_shard_size: largest weight file, in bytes or as "5GB".
        allow_pickle: read legacy `.bin` files, such as Accelerate's of FULL_STATE_DICT; no code of the file is run.
        trust_remote_code: run model code that comes with the config.
        progress: a bar on rank 0 over the bytes that this rank writes; None: where standard error is a terminal.
        hub_kwargs: `revision`, `token`, `cache_dir`, `local_files_only`, `subfolder`.

    Every rank of the default process group must call, if there is one. The ranks exchange errors and digests.

    Raises:
        CheckpointError: the state is absent, damaged or does not fit the model; the folder holds something else, or
            cannot be written. The same on every rank; what was saved there before is unchanged.
        ConfigError: the state is an adapter, which `merge_adapter` merges into its base.

    Example:
        >>> report = export_checkpoint("checkpoint", "in-bfloat16", dtype=torch.bfloat16)
        >>> CheckpointIndex.open("in-bfloat16").dtype
        torch.bfloat16
    """
    start_s, source = time.perf_counter(), fspath(state)
    dtype = as_dtype(dtype)
    files: dict[str, Any] = {"dtype": dtype, "max_shard_size": max_shard_size}
    same_on_all_ranks("writing the checkpoint", auto_class=auto_class, allow_pickle=allow_pickle, **files)
    checkpoint = open_checkpoint(
        source, config=config, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle, **hub_kwargs
    )
    if checkpoint.adapter is not None:
        raise ConfigError(
            f"{source!r} is an adapter of {checkpoint.name!r}, not a model. Merge it into its base with hf-fsdp merge "
            "(merge_adapter)."
        )
    side_files = _SideFiles({source: checkpoint.hub_kwargs, checkpoint.config.name_or_path: {}})
    with agreed("building the model"):
        _refuse_target(Path(folder), side_files.homes)
        if checkpoint.adapter_state is None:
            material = _of_model(checkpoint, auto_class, dtype, trust_remote_code)
    if checkpoint.adapter_state is not None:
        adapted = _adapted(checkpoint, auto_class, trust_remote_code)
        return save_adapter(adapted, Path(folder), tokenizer=side_files, dtype=dtype)
    return _write(material, side_files, Path(folder), progress=progress, start_s=start_s, **files)


def merge_adapter(
    adapter: str | PathLike[str],
    folder: str | PathLike[str],
    *,
    base: str | PathLike[str] | None = None,
    config: PreTrainedConfig | str | PathLike[str] | None = None,
    auto_class: Any = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    progress: bool | None = None,
    **hub_kwargs: Any,
) -> SaveReport:
    """Write the base of a PEFT adapter with the adapter merged into it, as a checkpoint that needs no PEFT.

    Equals PEFT's `merge_and_unload().save_pretrained()` on the CPU bit for bit, for every kind of adapter that PEFT
    merges: PEFT itself merges one adapted module at a time, in the dtype of the base (of its config, as with
    `dtype="auto"`). An adapter that was trained on a base in 4 bits (QLoRA) is merged into the plain base. Each process
    holds the adapter, and a part of the model at a time: 64 MiB of tensors that are only moved and 64 MiB of staging
    buffers, or one adapted module with what PEFT computes for it (for LoRA on a base in bf16 six times the module).
    Tokenizer files are copied from the adapter's folder, or from the base's.

    Args:
        adapter: hub name, or a folder with `adapter_config.json`. Of several adapters that PEFT saved into one folder,
            give the folder of one.
        folder: as for `export_checkpoint`.
        base: in place of the base that the adapter names.
        config: of the base, in place of its own.
        auto_class: class of the base, or an `AutoModelFor…` class; None means the class for the adapter's task, or that
            which the config names.
        dtype: of floating-point tensors in the files, after merging; None keeps the base's.
        max_shard_size: largest weight file, in bytes or as "5GB".
        allow_pickle: read legacy `.bin` files of the base.
        trust_remote_code: run model code that comes with the base.
        progress: as for `export_checkpoint`.
        hub_kwargs: of the adapter: `revision`, `token`, `cache_dir`, `local_files_only`, `subfolder`.

    Every rank of the default process group must call, if there is one. The ranks exchange errors and digests.

    Raises:
        CheckpointError: adapter or base is absent or damaged, or they do not fit each other; the folder holds something
            else, or cannot be written. The same on every rank; what was saved there before is unchanged.
        ConfigError: it is no adapter, or PEFT cannot merge it (prompt methods, a base in 4 bits).

    Example:
        >>> from peft import LoraConfig
        >>> adapted = from_pretrained("checkpoint", peft_config=LoraConfig(target_modules=["q_proj"]))
        >>> report = save_pretrained(adapted, "lora")
        >>> merge_adapter("lora", "merged").files
        ('model.safetensors',)
    """
    start_s, source = time.perf_counter(), fspath(adapter)
    dtype = as_dtype(dtype)
    files: dict[str, Any] = {"dtype": dtype, "max_shard_size": max_shard_size}
    same_on_all_ranks("writing the checkpoint", auto_class=auto_class, allow_pickle=allow_pickle, **files)
    of_base = {name: value for name, value in hub_kwargs.items() if name not in _OF_ONE_REPOSITORY}
    options: dict[str, Any] = {"config": config, "trust_remote_code": trust_remote_code, "allow_pickle": allow_pickle}
    try:
        if base is None:
            checkpoint = open_checkpoint(source, **options, **hub_kwargs)
        else:
            checkpoint = open_checkpoint(base, **options, **of_base)
    except CheckpointError as error:
        path = local_path(source)
        if base is not None or path is None or not (path / "adapter_config.json").is_file():
            raise
        raise CheckpointError(
            f"The base of the adapter {source!r} cannot be opened: {error} Or name another with --base (base)."
        ) from None
    if checkpoint.adapter_state is not None:
        raise ConfigError(
            f"{(source if base is None else fspath(base))!r} is the training state of a PeftModel. Write its adapter "
            "with hf-fsdp export (export_checkpoint), and merge that."
        )
    if base is None and checkpoint.adapter is None:
        raise ConfigError(
            f"{source!r} is a model, not an adapter that could be merged. Write it as a checkpoint with hf-fsdp export "
            "(export_checkpoint)."
        )
    own = checkpoint.hub_kwargs if base is None else hub_kwargs
    of_base = {name: value for name, value in own.items() if name not in _OF_ONE_REPOSITORY}
    side_files = _SideFiles({source: own, checkpoint.name: of_base | {"revision": checkpoint.index.commit}})
    with agreed("looking at the folder", folder):
        _refuse_target(Path(folder), side_files.homes)
    material = _of_adapter(checkpoint, source, own, auto_class, trust_remote_code)
    return _write(material, side_files, Path(folder), progress=progress, start_s=start_s, **files)


def _write(
    material: Material,
    side_files: "_SideFiles",
    folder: Path,
    *,
    dtype: torch.dtype | None,
    max_shard_size: int | str,
    progress: bool | None,
    start_s: float,
) -> SaveReport:
    """Write a model without values from where its values are. Every rank must call."""
    (rank, num_ranks), index = rank_and_size(), material.match.index
    hidden = HiddenFolder(folder)
    try:
        with agreed("preparing the save", folder):
            check_ties(material.match, staging_bytes=STAGING_BYTES)
            layout = plan_layout(material.model, dtype, max_shard_size)
            rewrite = Rewrite(material, layout)
            parts = rewrite.parts_of(rank, num_ranks)
            names, _ = prepare_save(hidden, material.model, layout, dtype, side_files)
    except BaseException:
        hidden.end()
        raise

    def write() -> TransferStats:
        num_bytes = sum(part.num_bytes for part in parts)
        with loading_bar(num_bytes, rank=rank, world_size=num_ranks, progress=progress, doing="Writing") as on_bytes:
            stats = rewrite.write(parts, hidden.path, on_bytes=on_bytes)
        index.refuse_changed()
        return stats

    save = BegunSave(
        hidden=hidden,
        layout=layout,
        names=names,
        files=[hidden.path / file for file in layout.sizes],
        gathered_bytes=0,
        num_parameters=sum(parameter.numel() for parameter in material.model.parameters()),
        staging_bytes=STAGING_BYTES,
        gather=None,
        write=write,
    )
    return replace(save.finish(), seconds=round(time.perf_counter() - start_s, 4))


# ---- folders ----


def _refuse_target(folder: Path, sources: Iterable[str]) -> None:
    """Refuse a folder that is one of the sources, or holds anything but an earlier checkpoint of a model."""
    if not folder.is_dir():
        return
    for path in map(local_path, filter(None, sources)):
        if path is not None and path.exists() and path.samefile(folder):
            raise CheckpointError(
                f"{str(folder)!r} is what is read; writing there would destroy it. Give a new folder."
            )
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".save-")}
    is_checkpoint = CONFIG in names and any(fnmatch(name, "model*.safetensors*") for name in names)
    foreign = sorted(name for name in names if any(fnmatch(name, pattern) for pattern in _OF_TRAININGS))
    if names and (foreign or not is_checkpoint):
        raise CheckpointError(
            f"{str(folder)!r} is not empty, and holds something else than an earlier checkpoint of a model: "
            f"{listed(foreign or sorted(names))}. Give a new folder."
        )


@dataclass(frozen=True)
class _SideFiles:
    """The files of a tokenizer and of a processor, to be saved beside other weights."""

    homes: Mapping[str, Mapping[str, Any]]
    """Folders, files in them, or hub names, with what fetches from there; all files of a kind come from the first that
    has any."""

    def save_pretrained(self, folder: str | PathLike[str]) -> None:
        """Copy them, as a tokenizer would save itself."""
        homes = [_fetched(name, hub_kwargs, _TOKENIZER + _PROCESSOR) for name, hub_kwargs in self.homes.items() if name]
        for patterns in (_TOKENIZER, _PROCESSOR):
            for home in homes:
                if files := {file for pattern in patterns for file in home.glob(pattern) if file.is_file()}:
                    for file in files:
                        target = Path(folder) / file.relative_to(home)
                        target.parent.mkdir(parents=True, exist_ok=True)
                        shutil.copyfile(file, target)
                    break


def _fetched(name: str, hub_kwargs: Mapping[str, Any], patterns: Iterable[str]) -> Path:
    """The local folder of a name; of one on the hub, files of these patterns are fetched."""
    path = local_path(name)
    if path is None:
        return fetch(name, *patterns, **hub_kwargs)[0]
    return path.parent if path.is_file() else path / (hub_kwargs.get("subfolder") or "")


# ---- models without values ----


def _of_model(checkpoint: Checkpoint, auto_class: Any, dtype: torch.dtype | None, trust_remote_code: bool) -> Material:
    """The model of a checkpoint, on meta; each tensor has the dtype in which it is stored. No rank communicates."""
    auto_class = model_class(checkpoint.config, auto_class, trust_remote_code=trust_remote_code, as_stored=True)
    model = _build(checkpoint, auto_class, checkpoint.index.dtype, trust_remote_code)
    match = match_checkpoint(model, checkpoint.index, ignore_mismatched_sizes=True)
    rows = [shape[0] for key, shape, _ in match.mismatched if key in _embeddings(model)]
    if rows:  # tokens were added, and the config is that of the original model
        resize_vocabulary(model, rows[0], None)
        match = match_checkpoint(model, checkpoint.index, ignore_mismatched_sizes=True)
    _refuse_other_shapes(match)
    if match.unexpected_keys:
        fact = (
            f"{match.index.name!r} holds {len(match.unexpected_keys)} tensors for which {type(model).__name__} has no "
            f"place: {listed(sorted(match.unexpected_keys))}"
        )
        if match.index.is_model_state:
            raise CheckpointError(f"{fact}. {FIT}")
        if rank_and_size()[0] == 0:
            warnings.warn(f"{fact}. They are left out.", stacklevel=2)
    quantized = {key for key, stored in match.index.tensors.items() if isinstance(stored, QuantizedTensor)}
    for key, stored in match.loaded.items():
        dtypes = {match.index.source_dtype(source) for source in stored.sources}
        own = dtype if dtype is not None and stored.sources & quantized else dtypes.pop() if len(dtypes) == 1 else None
        tensor = match.state[key]
        if own is not None and own.is_floating_point and own.itemsize > 1 and tensor.is_floating_point():
            tensor.data = tensor.data.to(own)
    set_conversions(model, match.load_map)
    forget_quantization(model)
    assume_conversions(model)
    return Material(model=model, match=match)


def _of_adapter(
    checkpoint: Checkpoint, adapter: str, hub_kwargs: Mapping[str, Any], auto_class: Any, trust_remote_code: bool
) -> Material:
    """The base of a PEFT adapter as it will be with the adapter merged into it; the adapter has its values.

    Every rank must call. The ranks exchange errors, and digests of the adapter's config.
    """
    written, shapes = opened("opening the adapter", adapter, partial(_look_at, adapter), hub_kwargs)
    with agreed("building the model"):
        heads = [shapes[key][0] for key in _HEADS if written.get("task_type") in _TASKS and key in shapes]
        model = _base(checkpoint, written, auto_class, trust_remote_code, **({"num_labels": heads[0]} if heads else {}))
        if rows := [shapes[key][0] for key in _embeddings(model) if key in shapes]:
            resize_vocabulary(model, max(rows), None)
        of_adapter = persistent_tensors(model).keys() & shapes.keys()
        _put_on_cpu(model, of_adapter)
        match = match_checkpoint(model, checkpoint.index, ignore_mismatched_sizes=True)
        _refuse_other_shapes(match, of_adapter)
        set_conversions(model, match.load_map)
    adapted = load_adapter(model, adapter, **hub_kwargs)
    with agreed("preparing the adapter"):
        wrappers = tuple(mergeable(adapted))
        base = base_of(adapted)
        merged = {
            old: nn.Parameter(torch.empty_like(old, device="meta"), requires_grad=False)
            for wrapper in wrappers
            for old in adapted_parameters(wrapper).values()
        }
        # What is trained whole has a copy for the adapter's values; the base keeps its own.
        trained = {
            key for key in of_adapter if "modules_to_save" in base.get_submodule(key.rpartition(".")[0])._modules
        }
        filled = {id(match.state[key]) for key in of_adapter - trained}
        saved = with_merged(base, merged)
    assert isinstance(saved, PreTrainedModel)
    keys = frozenset(key for key, tensor in match.state.items() if id(tensor) in filled)  # with tied names
    return Material(model=saved, match=match, wrappers=wrappers, merged=merged, of_adapter=keys)


def _adapted(checkpoint: Checkpoint, auto_class: Any, trust_remote_code: bool) -> Any:
    """The `PeftModel` of a training state with an adapter in it: adapter and embeddings have values, all else has none.

    Every rank must call. The ranks exchange errors, and digests of the adapter's config.
    """
    state = checkpoint.adapter_state
    assert state is not None
    with agreed("building the model"):
        model = _base(checkpoint, read_adapter_config(Path(state.config)) or {}, auto_class, trust_remote_code)
        embeddings = _embeddings(model)  # of which PEFT saves those that it adapts
        _put_on_cpu(model, embeddings)
        match = match_checkpoint(model, checkpoint.index, ignore_mismatched_sizes=True)
        own = {id(match.state[key]) for key in embeddings}
        loaded = {key: stored for key, stored in match.loaded.items() if id(match.state[key]) in own}
    fill_shards(
        model,
        replace(match, loaded=loaded),
        doing="reading the embeddings",
        staging_bytes=STAGING_BYTES,
        in_flight=REQUESTS_IN_FLIGHT,
        progress=False,
    )
    return restore_adapter(model, state, is_trainable=False)


def _base(
    checkpoint: Checkpoint, adapter_config: Mapping[str, Any], auto_class: Any, trust_remote_code: bool, **options: Any
) -> PreTrainedModel:
    """The base of an adapter, on meta: of the class for its task, of its base when it was made, or of its config."""
    task = _TASKS.get(str(adapter_config.get("task_type")))
    made_on = str((adapter_config.get("auto_mapping") or {}).get("base_model_class"))
    chosen = auto_class or getattr(transformers, task or made_on, None)
    if not task and not auto_class and not (isinstance(chosen, type) and issubclass(chosen, PreTrainedModel)):
        chosen = model_class(checkpoint.config, trust_remote_code=trust_remote_code, as_stored=True)
    dtype = config_dtype(checkpoint.config) or checkpoint.index.dtype
    return _build(checkpoint, chosen, dtype, trust_remote_code, **options)


def _build(
    checkpoint: Checkpoint, auto_class: Any, dtype: torch.dtype | None, trust_remote_code: bool, **options: Any
) -> PreTrainedModel:
    model = build_meta_model(
        checkpoint.config,
        auto_class=auto_class,
        dtype=dtype,
        trust_remote_code=trust_remote_code,
        **options,
    )
    if packed_linears(model):
        raise ConfigError(
            f"{checkpoint.name!r} holds weights in 4 bits (bitsandbytes), which can neither be written in another "
            "layout nor take an adapter without rounding it. Give the plain model that it was made of; of an adapter, "
            "with --base (base)."
        )
    set_generation_config(model, checkpoint.generation_config)
    return model


def _look_at(adapter: str, hub_kwargs: dict[str, Any]) -> tuple[Mapping[str, Any], dict[str, tuple[int, ...]]]:
    """An adapter's config, and the shapes of its tensors by the keys of the base."""
    folder = _fetched(adapter, hub_kwargs, ["adapter_*"])
    written = read_adapter_config(folder)
    if written is None:
        raise CheckpointError(
            f"No adapter_config.json in {str(folder)!r}. Give a folder that save_pretrained wrote for an adapter, or a "
            "hub name."
        )
    files = [folder / name for name in ("adapter_model.safetensors", "adapter_model.bin")]
    stored = next((CheckpointIndex.open(file, allow_pickle=True).tensors for file in files if file.is_file()), {})
    return written, {
        key.removeprefix("base_model.model.").replace(".base_layer.", "."): tuple(tensor.shape)
        for key, tensor in stored.items()
    }


# ---- tensors ----


def _refuse_other_shapes(match: Match, of_adapter: Collection[str] = ()) -> None:
    wrong = [(key, list(a), list(b)) for key, a, b in match.mismatched if key not in of_adapter]
    if wrong:
        rows = listed_lines(f"{key}: {a} in the files, {b} by the config" for key, a, b in wrong)
        raise CheckpointError(
            f"{len(wrong)} tensors of {match.index.name!r} have another shape than config and class say:\n{rows}\n{FIT}"
        )


def _embeddings(model: PreTrainedModel) -> list[str]:
    """The keys of the input embedding's weight."""
    try:
        weight = model.get_input_embeddings().weight
    except (AttributeError, NotImplementedError):
        # transformers' answer for models of images and sound, which have no table of tokens
        return []
    return [key for key, tensor in persistent_tensors(model).items() if tensor is weight]


def _put_on_cpu(model: nn.Module, filled: Collection[str]) -> None:
    """Give meta tensors a place on the CPU, where PEFT adapts them: memory for those filled, one element for others."""
    keys = {id(tensor) for key, tensor in persistent_tensors(model).items() if key in filled}
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if tensor not in made:
                    value = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
                    value = value.clone() if id(tensor) in keys else value
                    made[tensor] = with_data(tensor, value) if isinstance(tensor, nn.Parameter) else value
                tensors[name] = made[tensor]  # type: ignore[assignment]  # a Parameter for a Parameter
