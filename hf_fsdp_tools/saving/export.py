"""A training state, or an adapter merged into its base, as a Hugging Face checkpoint: on CPUs, never whole in memory.

The model is built without values, matched with the files, and laid out as the checkpoint that the training would have
written; then the ranks share its parts (`rewrite`).
"""

import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from hf_fsdp_tools.distributed.agreement import agreed, rank_and_size, same_on_all_ranks
from hf_fsdp_tools.errors import CheckpointError, ConfigError
from hf_fsdp_tools.hub import local_path
from hf_fsdp_tools.loading.fill import check_ties
from hf_fsdp_tools.loading.io.files import STAGING_BYTES, TransferStats
from hf_fsdp_tools.loading.opening import Source, open_checkpoint
from hf_fsdp_tools.loading.report import loading_bar
from hf_fsdp_tools.loading.weight_files import CONFIG
from hf_fsdp_tools.modeling.arguments import as_dtype
from hf_fsdp_tools.saving.hidden_folder import HiddenFolder
from hf_fsdp_tools.saving.layout import plan_layout
from hf_fsdp_tools.saving.material import Material, adapted_model, material_of_adapter, material_of_model
from hf_fsdp_tools.saving.report import SaveReport
from hf_fsdp_tools.saving.rewrite import Rewrite
from hf_fsdp_tools.saving.save import BegunSave, prepare_save
from hf_fsdp_tools.saving.save_adapter import save_adapter
from hf_fsdp_tools.text import listed

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
        >>> from_pretrained("in-bfloat16", dtype="auto", load_kwargs={"progress": False}).dtype
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
            f"{source!r} is an adapter of {checkpoint.name!r}, not a model. Merge it into its base with "
            "hf-fsdp export --adapter (merge_adapter)."
        )
    side_files = _SideFiles({source: checkpoint.hub_kwargs, checkpoint.config.name_or_path: {}})
    with agreed("building the model"):
        _refuse_target(Path(folder), side_files.homes)
        if checkpoint.adapter_state is None:
            material = material_of_model(checkpoint, auto_class, dtype, trust_remote_code)
    if checkpoint.adapter_state is not None:
        adapted = adapted_model(checkpoint, auto_class, trust_remote_code)
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
        base: in place of the base that the adapter names.
        config: of the base, in place of its own.
        auto_class: class of the base, or an `AutoModelFor…` class; None means the class for the adapter's task, or that
            which the config names.
        dtype: of floating-point tensors in the files, after merging; None keeps the base's.
        hub_kwargs: of the adapter: `revision`, `token`, `cache_dir`, `local_files_only`, `subfolder`.

    The others are those of `export_checkpoint`, about the base.

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
            f"The base of the adapter {source!r} cannot be opened: {error} Or name another as STATE (base)."
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
    material = material_of_adapter(checkpoint, source, own, auto_class, trust_remote_code)
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
        num_bytes = sum(map(rewrite.num_bytes, parts))
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
        sources = (Source(name, hub_kwargs) for name, hub_kwargs in self.homes.items() if name)
        homes = [source.folder(*_TOKENIZER, *_PROCESSOR)[0] for source in sources]
        homes = [home.parent if home.is_file() else home for home in homes]
        for patterns in (_TOKENIZER, _PROCESSOR):
            for home in homes:
                if files := {file for pattern in patterns for file in home.glob(pattern) if file.is_file()}:
                    for file in files:
                        target = Path(folder) / file.relative_to(home)
                        target.parent.mkdir(parents=True, exist_ok=True)
                        shutil.copyfile(file, target)
                    break
