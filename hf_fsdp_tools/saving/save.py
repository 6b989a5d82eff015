"""A sharded model back into an ordinary Hugging Face checkpoint: every rank writes its own bytes to the same files."""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from hf_fsdp_tools.background import in_background, wait_for_saves
from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, rank_and_size, same_on_all_ranks
from hf_fsdp_tools.errors import CheckpointError, ConfigError
from hf_fsdp_tools.hub import CARD
from hf_fsdp_tools.loading.conversion import persistent_tensors, revert_group, saved_tensors
from hf_fsdp_tools.loading.io.durable import library_errors, storage_errors, sync
from hf_fsdp_tools.loading.io.files import TransferStats, write_in_turn, write_transfers
from hf_fsdp_tools.loading.io.transfer import Transfer
from hf_fsdp_tools.loading.regions import row_major_strides
from hf_fsdp_tools.loading.weight_files import WEIGHTS_INDEX
from hf_fsdp_tools.modeling.arguments import as_dtype
from hf_fsdp_tools.modeling.configs import whole_generation_config
from hf_fsdp_tools.modeling.linear4bit import packed_linears
from hf_fsdp_tools.modeling.module_tree import original_classes
from hf_fsdp_tools.modeling.tree_copy import is_adapted, is_wrapper
from hf_fsdp_tools.saving.copies import HostCopies, copied_transfers, free_kept_memory
from hf_fsdp_tools.saving.draft import Draft
from hf_fsdp_tools.saving.gather import gather_to_first
from hf_fsdp_tools.saving.layout import Layout, plan_layout
from hf_fsdp_tools.saving.merge_adapter import merged_model
from hf_fsdp_tools.saving.outgoing import Outgoing, plan_outgoing
from hf_fsdp_tools.saving.publish import publish_weights
from hf_fsdp_tools.saving.push import hub_target, model_card_of, push_saved
from hf_fsdp_tools.saving.report import SaveReport
from hf_fsdp_tools.saving.reserve import check_visible, create_files
from hf_fsdp_tools.saving.save_adapter import save_adapter
from hf_fsdp_tools.saving.save_by_library import is_of_library, save_by_library
from hf_fsdp_tools.sharding.hf_interface import with_cache_as_found
from hf_fsdp_tools.text import dtype_name


def save_pretrained(
    model: nn.Module,
    folder: str | PathLike[str],
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    staging_bytes: int = 64 * 2**20,
    merge_adapters: bool = False,
    blocking: bool = True,
    model_card: bool = False,
    push_to_hub: bool = False,
    **hub_arguments: Any,
) -> SaveReport:
    """Write a model, sharded or not, as the checkpoint that plain `save_pretrained` would write.

    Keys, dtypes and shapes are the hub's (experts one by one, tied weights once), by transformers' own reverse
    conversions. Of a PEFT model, the adapter alone is written, as PEFT writes it; or, with `merge_adapters`, a
    checkpoint that needs no PEFT.

    No rank gathers the model. All ranks compute the same layout, rank 0 makes the files at full length in a hidden
    folder, every rank writes and syncs its own ranges (under HSDP the replicas of a shard share its bytes), and rank 0
    gives all files their names once they are complete. Until one last rename, whoever opens the folder gets the
    checkpoint that was there, and then the new one. Gathered one at a time, and counted, are tensors whose reverse
    conversion does more than move data, and tensors that would be written in runs of a few bytes.

    Args:
        model: its config, and generation config if it generates, are written too; `config.dtype` and
            `config.architectures` are set as transformers does.
        folder: made if it is not there; must be on a file system that all ranks see. Weight files of an earlier save
            are removed; where there are any, the names of new shards have the save's mark in them
            (`model.1b0f5e9a-00001-of-00006.safetensors`). Files of another kind of model that would be opened with the
            new ones are renamed to `*.former`, with a warning: those of an adapter, or `config.json` of full weights
            that are not the base of the adapter.
        tokenizer: saved beside the model.
        dtype: of floating-point tensors in the files; None keeps the model's. 4-bit weights are saved as bitsandbytes
            does, with their scales, and cannot be cast.
        max_shard_size: largest weight file, in bytes or as "5GB", "500 MiB"; a larger tensor has a file of its own.
        staging_bytes: bound of host memory used for casting and scattering.
        merge_adapters: write the base of a PEFT model with the active adapters merged into it, equal to PEFT's
            `merge_and_unload` bit for bit; the model stays as it is. Adapted modules are gathered one at a time, and
            this rank holds their merged shards until they are written.
        blocking: False returns as soon as each rank has copied what it writes into host memory of its own (in the dtype
            of the file; pinned for an accelerator, and kept for the next such save), and a thread writes it while
            training goes on. The files get the values of the moment of the call. `wait_for_saves()` waits; the next
            save and load do so by themselves. An error of any rank is raised on all ranks before the same step of an
            optimizer, or by the next such call. Adapters are small, and always written before the call returns.
        model_card: write huggingface_hub's template of a model card, unless the folder has a `README.md`. Beside an
            adapter PEFT writes its own in any case.
        push_to_hub: upload the files of this save, once they are complete, as one commit that also deletes weights of
            earlier saves from the repository. Rank 0 uploads, the others wait; without `blocking`, in the background. A
            `README.md` in the folder is uploaded too; where the repository has none either, the template is.
        hub_arguments: with `push_to_hub`, as transformers has them: `repo_id` (None: the name of the folder),
            `private`, `token`, `commit_message`, `commit_description`, `revision`, `create_pr`.

    Every rank of the default process group must call. The ranks exchange errors, and send gathered tensors to rank 0.

    Raises:
        ConfigError: adapters that cannot be merged, or have no `PeftModel` around them; arguments that differ between
            ranks, or are unknown.
        CheckpointError: the model is on meta; a tensor has a dtype that safetensors has no name for; the folder is a
            file, cannot be written or is not seen by all ranks; the disk is full; another job is saving there; config
            or tokenizer cannot be saved; host memory does not hold the copy; an earlier save failed in the background.
            The same on every rank; what was saved there before is unchanged. Or the hub refuses or cannot be reached,
            when the folder holds the new checkpoint.

    Example:
        >>> model = from_pretrained("checkpoint", load_kwargs={"progress": False})
        >>> report = save_pretrained(model, "saved")
        >>> from transformers import AutoModelForCausalLM
        >>> plain = AutoModelForCausalLM.from_pretrained("saved")
        >>> torch.equal(plain.lm_head.weight, model.lm_head.weight.full_tensor())
        True
    """
    start_s = time.perf_counter()
    dtype = as_dtype(dtype)
    same_on_all_ranks("saving the model", push_to_hub=push_to_hub, hub_arguments={**hub_arguments, "token": None})
    target = hub_target(Path(folder), push_to_hub, hub_arguments)
    begun = begin_save(
        model,
        folder,
        tokenizer=tokenizer,
        dtype=dtype,
        max_shard_size=max_shard_size,
        staging_bytes=staging_bytes,
        merge_adapters=merge_adapters,
        blocking=blocking,
        model_card=model_card,
    )
    if isinstance(begun, SaveReport):
        return push_saved(model, begun, target)
    if blocking:
        report = replace(begun.finish(), seconds=round(time.perf_counter() - start_s, 4))
        return push_saved(model, report, target)
    return in_background(lambda: push_saved(model, begun.finish(), target), begun.report, start_s)


def begin_save(
    model: nn.Module,
    folder: str | PathLike[str],
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    staging_bytes: int = 64 * 2**20,
    merge_adapters: bool = False,
    blocking: bool,
    model_card: bool = False,
) -> "BegunSave | SaveReport":
    """Do of `save_pretrained` what needs the model or the process group; the report of an adapter, which is saved.

    Without `blocking`, `finish` of the result writes from a copy, for any thread whose rounds all ranks use. Otherwise
    it writes from the model.
    """
    folder = Path(folder)
    wait_for_saves()
    same_on_all_ranks(
        "saving the model",
        dtype=dtype,
        max_shard_size=max_shard_size,
        staging_bytes=staging_bytes,
        merge_adapters=merge_adapters,
        blocking=blocking,
    )
    if blocking:
        free_kept_memory()
    if merge_adapters:
        model = merged_model(model)
    elif is_adapted(model):
        return save_adapter(model, folder, tokenizer=tokenizer, dtype=dtype)
    elif is_of_library(model):
        save = partial(save_pretrained, dtype=dtype, max_shard_size=max_shard_size, staging_bytes=staging_bytes)
        return save_by_library(model, folder, save, tokenizer=tokenizer, staging_bytes=staging_bytes)
    elif any(is_wrapper(module) for module in model.modules()):
        raise ConfigError(
            f"{type(model).__name__} has adapters without a PeftModel around it (model.add_adapter). Make it with "
            "get_peft_model(model, config) to save the adapter, or save it with merge_adapters=True."
        )
    draft = Draft(folder, all_ranks(secrets.token_hex(4), "beginning the save")[0])
    with agreed("planning the checkpoint"):
        _refuse_meta(model)
        _refuse_cast(model, dtype)
        layout = plan_layout(model, dtype, max_shard_size, draft.path)
    outgoing = plan_outgoing(model, layout)
    try:
        prepare_save(model, draft, layout, dtype, tokenizer, card=model_card)
        write: Callable[[], TransferStats] = partial(_write, model, layout, outgoing, staging_bytes)
        copies = None
        if not blocking:
            write, copies = _copied(model, layout, outgoing, staging_bytes)
    except BaseException:
        draft.end()
        raise
    # Rank 0 writes to every file: headers, and what is gathered.
    files = list(map(layout.path, layout.files)) if rank_and_size()[0] == 0 else [t.file for t in outgoing.in_place]
    return BegunSave(
        draft=draft,
        layout=layout,
        files=list(dict.fromkeys(files)),
        gathered_bytes=_gathered_bytes(layout, outgoing),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        write=write,
        copies=copies,
    )


@dataclass(frozen=True, kw_only=True)
class BegunSave:
    """A save of which writing and the switch are left."""

    draft: Draft
    layout: Layout

    files: list[Path]
    """To which this rank writes."""

    gathered_bytes: int
    num_parameters: int

    write: Callable[[], TransferStats]
    """Writes this rank's bytes. Every rank must call."""

    copies: HostCopies | None
    """From which they are written; None for the model itself."""

    @property
    def report(self) -> SaveReport:
        """What is known before anything is written."""
        return SaveReport(
            folder=str(self.draft.folder),
            files=(),
            total_bytes=self.layout.num_bytes,
            bytes_written=0,
            gathered_bytes=self.gathered_bytes,
            write_calls=0,
            seconds=0.0,
            copied_bytes=self._held_bytes(),
        )

    def finish(self) -> SaveReport:
        """Write, and make what is written the checkpoint of the folder. Every rank must call; once."""
        try:
            stats = self.write()
            files, others = self._publish(stats)
        finally:
            self.drop()
        return replace(self.report, files=files, others=others, bytes_written=stats.num_bytes, write_calls=stats.calls)

    def drop(self) -> None:
        """Leave the folder as it was, unless the save is finished, and give the copies' memory back."""
        self.draft.end()
        if self.copies is not None:
            self.copies.give_back()

    def _held_bytes(self) -> int:
        """Of host memory on this rank: copies, and on rank 0 what was gathered for them."""
        gathered_bytes = self.gathered_bytes if rank_and_size()[0] == 0 else 0
        return 0 if self.copies is None else self.copies.num_bytes + gathered_bytes

    def _publish(self, stats: TransferStats) -> tuple[tuple[str, ...], ...]:
        """Sync what this rank wrote, and let rank 0 switch; names of the weight files, and of the others."""
        folder, layout = self.draft.folder, self.layout
        with agreed("syncing the checkpoint", folder), storage_errors("save to", folder):
            for file in self.files:
                sync(file)
        written = sum(all_ranks(stats.num_bytes, "adding up what was written"))
        assert written == layout.num_bytes, f"wrote {written} of {layout.num_bytes} bytes"
        names: tuple[tuple[str, ...], ...] = ()
        with agreed("finishing the save", folder):
            if rank_and_size()[0] == 0:
                weight_map = {key: place.file for key, place in layout.places.items()}
                sizes = {"total_parameters": self.num_parameters, "total_size": layout.num_bytes}
                others = (*self.draft.names_beside(), *([WEIGHTS_INDEX] if len(layout.files) > 1 else []))
                may_thread = self.copies is None  # the interpreter may be ending otherwise
                names = publish_weights(self.draft, layout.files, weight_map, sizes, threads=may_thread), others
                self.draft.end()  # before any rank goes on
        return all_ranks(names, "finishing the save")[0]


# ---- before ----


def _refuse_meta(model: nn.Module) -> None:
    """Refuse a model with tensors on meta: it was never loaded, or its loading failed."""
    empty = [key for key, tensor in persistent_tensors(model).items() if tensor.is_meta]
    if empty:
        raise CheckpointError(
            f"{len(empty)} tensors are on meta and have no values, {empty[0]!r} first. Load the model with "
            "load_weights or from_pretrained before it is saved; after a failed load, load it again."
        )


def _refuse_cast(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Refuse a cast of 4-bit weights: they are bytes, also where their storage has a floating-point dtype."""
    if dtype is not None and (packed := packed_linears(model)):
        raise CheckpointError(
            f"dtype={dtype} cannot be honoured: {min(packed)!r} holds 4-bit values, which a cast destroys. "
            "Leave dtype out."
        )


def prepare_save(
    model: nn.Module, draft: Draft, layout: Layout, dtype: torch.dtype | None, tokenizer: Any, *, card: bool = False
) -> None:
    """Make the hidden folder on rank 0, with all that lies beside the weights, and files for them at full length.

    Every rank must call; the ranks exchange errors.
    """
    folder = draft.folder
    with agreed("preparing the save", folder):
        if rank_and_size()[0] == 0:
            draft.begin()
            _stage_configs(model, draft, dtype, tokenizer)
            if card and not (folder / CARD).is_file():
                model_card_of(model).save(draft.beside / CARD)
            create_files(layout, folder)
    with agreed("opening the folder", folder):
        check_visible(layout, folder)


def _stage_configs(model: nn.Module, draft: Draft, dtype: torch.dtype | None, tokenizer: Any) -> None:
    """Write everything beside the weights as transformers does: config, generation config, model code, tokenizer."""
    with library_errors("save config and tokenizer to", draft.folder):
        if isinstance(model, PreTrainedModel):
            model.config.dtype = dtype_name(dtype or model.dtype)
            model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
            with original_classes(model):  # transformers copies the file of the class, which is torch's under FSDP2
                if model.is_remote_code():
                    custom_object_save(model, draft.beside, config=model.config)
            with with_cache_as_found(model):
                model.config.save_pretrained(draft.beside)
            if model.can_generate():
                whole_generation_config(model).save_pretrained(draft.beside)
        if tokenizer is not None:
            tokenizer.save_pretrained(draft.beside)


# ---- bytes ----


def _write(model: nn.Module, layout: Layout, outgoing: Outgoing, staging_bytes: int) -> TransferStats:
    """Write from the model: this rank's shards to their places first, then, on rank 0, what is gathered."""
    with agreed("writing the checkpoint", layout.folder.parent):
        stats = write_transfers(outgoing.in_place, staging_bytes=staging_bytes)
    for key in outgoing.gathered:
        transfers = _gathered(model, key, layout, staging_bytes)
        with agreed(f"writing {key!r}"):
            stats += write_transfers(transfers, staging_bytes=staging_bytes)
    return stats


def _copied(
    model: nn.Module, layout: Layout, outgoing: Outgoing, staging_bytes: int
) -> tuple[Callable[[], TransferStats], HostCopies]:
    """What writes from copies that hold the values of this moment, and the copies."""
    gathered_bytes = _gathered_bytes(layout, outgoing) if rank_and_size()[0] == 0 else 0
    transfers, copies = copied_transfers(outgoing.in_place, beside_bytes=gathered_bytes)
    try:
        for key in outgoing.gathered:
            transfers += _gathered(model, key, layout, staging_bytes)
    except BaseException:
        copies.give_back()
        raise
    return partial(_write_copies, transfers, layout.folder.parent), copies


def _write_copies(transfers: list[Transfer], folder: Path) -> TransferStats:
    with agreed("writing the checkpoint", folder):
        return write_in_turn(transfers)


def _gathered_bytes(layout: Layout, outgoing: Outgoing) -> int:
    return sum(layout.places[key].num_bytes for key in outgoing.gathered)


def _gathered(model: nn.Module, key: str, layout: Layout, staging_bytes: int) -> list[Transfer]:
    """Gather the model tensors of one saved tensor on rank 0, which reverts their conversion: what it is to write."""
    place = layout.places[key]
    state = saved_tensors(model)
    whole = {n: gather_to_first(state[n], staging_bytes=staging_bytes) for n in sorted(place.tensor.sources)}
    with agreed(f"converting {key!r}"):
        if rank_and_size()[0] != 0:
            return []
        result = revert_group(model, {name: t for name, t in whole.items() if t is not None})[key]
        file, strides = layout.path(place.file), row_major_strides(result.shape)
        return [Transfer(file=file, start=place.offset, dtype=place.dtype, strides=strides, memory=result)]
