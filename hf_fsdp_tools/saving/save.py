"""A sharded model back into an ordinary Hugging Face checkpoint: every rank writes its own slices to the same files."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from hf_fsdp_tools.background import in_background, wait_for_saves
from hf_fsdp_tools.distributed.agreement import agreed, all_ranks, rank_and_size, same_on_all_ranks
from hf_fsdp_tools.distributed.cpu_backend import all_reduced
from hf_fsdp_tools.distributed.shards import Box
from hf_fsdp_tools.errors import CheckpointError, ConfigError, library_errors, storage_errors
from hf_fsdp_tools.hub import CARD, hub_target
from hf_fsdp_tools.loading.conversion import persistent_tensors, revert_whole, saved_tensors
from hf_fsdp_tools.loading.fill import read_into
from hf_fsdp_tools.loading.io.files import STAGING_BYTES, TransferStats, Writer, write_in_turn, write_transfers
from hf_fsdp_tools.loading.io.transfer import Transfer
from hf_fsdp_tools.loading.symbolic import PieceTensor
from hf_fsdp_tools.modeling.arguments import as_dtype
from hf_fsdp_tools.modeling.configs import save_tokenizer, whole_generation_config, write_older_keys
from hf_fsdp_tools.modeling.module_tree import original_classes
from hf_fsdp_tools.modeling.packed import refuse_cast, with_stored_quantization
from hf_fsdp_tools.modeling.tree_copy import is_adapted, is_wrapper
from hf_fsdp_tools.saving import copies
from hf_fsdp_tools.saving.durable import UNCHANGED, sync
from hf_fsdp_tools.saving.hidden_folder import Folder
from hf_fsdp_tools.saving.layout import Layout, plan_layout
from hf_fsdp_tools.saving.publish import SaveReport, publish_weights
from hf_fsdp_tools.saving.push import model_card_of, push_saved
from hf_fsdp_tools.saving.save_adapter import save_adapter
from hf_fsdp_tools.saving.save_by_library import is_of_library, save_by_library
from hf_fsdp_tools.saving.streamed import begin_stream
from hf_fsdp_tools.saving.target import Target, WholeFiles
from hf_fsdp_tools.saving.targets import target_of
from hf_fsdp_tools.sharding.adapters import ADAPTER_CONFIG
from hf_fsdp_tools.sharding.fsdp2_internals import reshard_units
from hf_fsdp_tools.sharding.hf_interface import with_cache_as_found
from hf_fsdp_tools.sharding.shard import warn_of_drift
from hf_fsdp_tools.streaming.exchange import gather_to_first
from hf_fsdp_tools.streaming.held import Part, parts_of, shares
from hf_fsdp_tools.streaming.live import live_weights
from hf_fsdp_tools.streaming.merging import merged_model
from hf_fsdp_tools.streaming.outgoing import refuse_empty
from hf_fsdp_tools.text import dtype_name, grouped

_SLAB_BYTES = 16 * 2**20
"""Bytes of a head that a rank copies at a time. (assumed)"""


def save_pretrained(
    model: nn.Module,
    folder: str | PathLike[str],
    *,
    processing_class: Any = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    staging_bytes: int = STAGING_BYTES,
    merge_adapters: bool = False,
    blocking: bool = True,
    carry_heads: bool = True,
    model_card: bool = False,
    push_to_hub: bool = False,
    **hub_arguments: Any,
) -> SaveReport:
    """Write a model, sharded or not, as the checkpoint that plain `save_pretrained` would write.

    Keys, dtypes and shapes are the hub's (experts one by one, tied weights once), by transformers' own reverse
    conversions. A PEFT model's adapter alone is written, as PEFT writes it; or, with `merge_adapters`, a
    checkpoint that needs no PEFT.

    No rank gathers the model. All ranks compute the same layout, rank 0 makes the files at full length in a hidden
    folder, every rank writes and syncs its own ranges (under HSDP the replicas of a shard share its bytes), and rank 0
    gives all files their names once they are complete. Until one last rename, whoever opens the folder gets the
    checkpoint that was there, and then the new one. Gathered one at a time, and counted, are tensors whose reverse
    conversion does more than move data, and tensors that would be written in runs of a few bytes.

    Args:
        model: its config, and generation config if it generates, are written too; `config.dtype` and
            `config.architectures` are set as transformers does.
        folder: made if it is not there; must be on a file system that all ranks see. Or a place in a store of fsspec
            ("s3://bucket/run"), to which each rank uploads whole files, with an index that comes last and no shared
            disk (`docs/checkpoints.md`). Weight files of an earlier save are removed; where there are any, the names of
            new shards have the save's mark in them (`model.1b0f5e9a-00001-of-00006.safetensors`). Files of another kind
            of model that would be opened with the new ones are renamed to `*.former`, with a warning: those of an
            adapter, or `config.json` of full weights that are not the base of the adapter. In a store they are refused.
        processing_class: a tokenizer or processor, saved next to the model.
        dtype: of floating-point tensors in the files; None keeps the model's. 4-bit weights are saved as bitsandbytes
            does, with their scales, and cannot be cast.
        max_shard_size: largest weight file, in bytes or as "5GB"; a larger tensor has a file of its own.
        staging_bytes: bound of host memory used for casting and scattering.
        merge_adapters: write the base of a PEFT model with the active adapters merged into it, equal to PEFT's
            `merge_and_unload` bit for bit; the model stays as it is. Adapted modules are gathered one at a time, and
            this rank holds their merged shards until they are written.
        blocking: False returns as soon as each rank has copied what it writes into host memory of its own (in the dtype
            of the file), and a thread writes it while training goes on. The files get the values of the moment of the
            call. `wait_for_saves()` waits; the next save and load do so by themselves. An error of any rank is raised
            on all ranks before the same step of an optimizer, or by the next such call. Adapters, which are small, and
            models of another library are always written before the call returns.
        carry_heads: copy the heads that `load_weights` has remembered byte for byte from their files, each rank its
            part; where the model is plain and they are quantised, dequantised to its dtype. `dtype` casts them too.
        model_card: write huggingface_hub's template of a model card, unless the folder has a `README.md`. Next to an
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
        >>> torch.equal(plain.lm_head.weight, model.lm_head.weight)
        True
    """
    start_s = time.perf_counter()
    options: dict[str, Any] = {"dtype": as_dtype(dtype), "max_shard_size": max_shard_size, "blocking": blocking}
    options |= {"staging_bytes": staging_bytes, "merge_adapters": merge_adapters, "carry_heads": carry_heads}
    to_hub = {**hub_arguments, "push_to_hub": push_to_hub, "token": None}
    same_on_all_ranks("saving the model", **options, to_hub=to_hub)
    place = target_of(folder)
    if push_to_hub and not isinstance(place, Folder):
        raise ConfigError(
            f"push_to_hub uploads from a folder, and {place.where!r} is none. Save to a folder, or leave it out."
        )
    on_hub = hub_target(Path(folder), push_to_hub, hub_arguments)
    begun = begin_save(model, place, tokenizer=processing_class, model_card=model_card, **options)
    if isinstance(begun, SaveReport):
        return push_saved(model, begun, on_hub)
    if blocking:
        report = replace(begun.finish(), seconds=round(time.perf_counter() - start_s, 4))
        return push_saved(model, report, on_hub)
    return in_background(lambda: push_saved(model, begun.finish(), on_hub), begun.report, start_s)


def begin_save(
    model: nn.Module,
    target: Target,
    *,
    tokenizer: Any = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    staging_bytes: int = STAGING_BYTES,
    merge_adapters: bool = False,
    blocking: bool,
    carry_heads: bool = True,
    model_card: bool = False,
) -> "BegunSave | SaveReport":
    """Do of `save_pretrained` what needs the model or the process group; the report of an adapter, which is saved.

    Without `blocking`, `finish` of the result writes from a copy, for any thread whose rounds all ranks use. Otherwise
    it writes from the model. Every rank must call, with equal arguments.
    """
    wait_for_saves()
    reshard_units(model)
    warn_of_drift(model)
    sizes: dict[str, Any] = {"max_shard_size": max_shard_size, "staging_bytes": staging_bytes}
    if merge_adapters:
        model = merged_model(model)
    elif is_adapted(model):
        return save_adapter(model, target, tokenizer=tokenizer, dtype=dtype)
    elif is_of_library(model):

        def save(inside: nn.Module, part: Target) -> SaveReport:
            begun = begin_save(inside, part, dtype=dtype, carry_heads=carry_heads, blocking=True, **sizes)
            return begun if isinstance(begun, SaveReport) else begun.finish()

        return save_by_library(model, target, save, tokenizer=tokenizer, card=model_card, staging_bytes=staging_bytes)
    try:
        with agreed("preparing the save", target.where):
            _refuse_unready(model, dtype)
            layout = plan_layout(model, dtype, max_shard_size, carry_heads=carry_heads)
            held: dict[str, Sequence[Part]] = {}
            if isinstance(target, Folder):
                held |= parts_of(layout.places, saved_tensors(model))
            scattered = [key not in held or copies.is_scattered(layout.transfers(held[key])) for key in layout.places]
            prepare_save(target, model, layout, dtype, tokenizer, model_card)
        begun = BegunSave(target=target, layout=layout)
        if isinstance(target, Folder):
            return _in_place(begun, target, model, held, scattered, staging_bytes, blocking=blocking)
        assert isinstance(target, WholeFiles)
        weights = live_weights(model, dtype=dtype)
        how: dict[str, Any] = {"staging_bytes": staging_bytes, "blocking": blocking}
        send, write, copied_bytes = begin_stream(weights, target, layout, **how)
        return replace(begun, send=send, write=write, copied_bytes=copied_bytes)
    except BaseException:
        target.discard()
        raise


def _in_place(
    begun: "BegunSave",
    target: Folder,
    model: nn.Module,
    held: Mapping[str, Sequence[Part]],
    scattered: Sequence[bool],
    staging_bytes: int,
    *,
    blocking: bool,
) -> "BegunSave":
    """The same save, of which each rank writes its own parts, and rank 0 the tensors that it gathers. Every rank must
    call."""
    layout = begun.layout
    # A tensor is gathered by all ranks or by none.
    mask = all_reduced(torch.tensor(scattered, dtype=torch.uint8, device="cpu"), op=dist.ReduceOp.MAX).tolist()
    gathered = {key for key, is_gathered in zip(layout.places, mask, strict=True) if is_gathered}
    own = [part for key, parts in held.items() if key not in gathered for part in shares(parts)]
    transfers = [replace(transfer, file=target.path / transfer.file) for transfer in layout.transfers(own)]
    files = list(dict.fromkeys(transfer.file for transfer in transfers))
    gathered_bytes, beside_bytes = sum(layout.places[key].num_bytes for key in gathered), 0
    begun = replace(begun, gathered_bytes=gathered_bytes)
    if rank_and_size()[0] == 0:  # which writes headers, and what is gathered
        files, beside_bytes = [target.path / file for file in layout.sizes], gathered_bytes
    gather = partial(_gather, model, layout, target.path, sorted(gathered), staging_bytes)
    finish = partial(write_in_place, target, layout, files)
    if blocking:
        written: list[TransferStats] = []
        send = partial(gather, lambda t: written.append(write_transfers([t], staging_bytes=staging_bytes)))
        write = partial(finish, lambda: sum(written, write_transfers(transfers, staging_bytes=staging_bytes)))
        return replace(begun, send=send, write=write)
    transfers = copies.copied_transfers(transfers, beside_bytes=beside_bytes)
    copied_bytes = sum(transfer.memory.nbytes for transfer in transfers) + beside_bytes
    failure = gather(transfers.append)
    write = partial(finish, partial(write_in_turn, transfers))
    return replace(begun, send=lambda: failure, write=write, copied_bytes=copied_bytes)


def write_in_place(
    target: Folder, layout: Layout, files: Iterable[Path], write: Callable[[], TransferStats]
) -> TransferStats:
    """Write this rank's part of a checkpoint, copied heads too, and bring the files to disk. No rank communicates."""
    stats = write() + _copy_heads(layout, target.path)
    carried = (target.path / place.file for place in layout.carried.values())
    with storage_errors("save to", target.folder):
        for file in dict.fromkeys([*files, *carried]):
            sync(file)
    return stats


@dataclass(frozen=True, kw_only=True)
class BegunSave:
    """A save of which writing and publishing are left."""

    target: Target
    layout: Layout
    send: Callable[[], Exception | None] = lambda: None
    """Sends this rank's parts to those that write them; what this rank has failed with. Every rank must call."""
    write: Callable[[], TransferStats] = TransferStats
    """Writes, or completes, all of this rank; tensor data alone is counted. No rank communicates."""
    gathered_bytes: int = 0
    copied_bytes: int = 0
    """Bytes of the copies from which it is written; 0 for the model itself."""

    @property
    def report(self) -> SaveReport:
        """What is known before anything is written."""
        return SaveReport(
            folder=self.target.where,
            total_bytes=self.layout.num_bytes,
            gathered_bytes=self.gathered_bytes,
            copied_bytes=self.copied_bytes,
        )

    def finish(self) -> SaveReport:
        """Write, and make what is written the checkpoint of the place. Every rank must call; once."""
        where = self.target.where
        with self.target:
            failure = self.send()
            with agreed("writing the checkpoint", where):
                if failure is not None:
                    raise failure
                stats = self.write()
                if self.layout.heads is not None:
                    self.layout.heads[0].refuse_changed()
                total = sum(all_ranks(stats.num_bytes, "adding up what was written"))
                if total != self.layout.num_bytes:
                    raise CheckpointError(f"Saving to {where!r} wrote {total} of {self.layout.num_bytes} bytes.")
                publish_weights(self.target, self.layout)  # before any rank goes on
        files, others = tuple(self.target.weights.values()), self.target.others
        return replace(self.report, files=files, others=others, bytes_written=stats.num_bytes, write_calls=stats.calls)


# ---- before ----


def _refuse_unready(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Refuse a model that was never loaded, or whose loading failed; adapters that PEFT cannot save; and a cast of
    weights that are no floats."""
    if any(is_wrapper(module) for module in model.modules()):
        raise ConfigError(
            f"{type(model).__name__} has adapters without a PeftModel around it (model.add_adapter). Make it with "
            "get_peft_model(model, config) to save the adapter, or save it with merge_adapters=True."
        )
    refuse_empty(persistent_tensors(model), "it is saved")
    refuse_cast(model, dtype)


def prepare_save(
    target: Target,
    model: nn.Module,
    layout: Layout,
    dtype: torch.dtype | None,
    tokenizer: Any,
    card: bool = False,
) -> None:
    """Begin, with all that lies next to the weights. Every rank must call, in `agreed`."""
    target.begin(ADAPTER_CONFIG)
    if rank_and_size()[0] == 0:
        _stage_configs(model, target.new, target.where, dtype, tokenizer, card and target.read(CARD) is None)
    target.prepare(layout)


def _stage_configs(
    model: nn.Module, new: Path, where: str, dtype: torch.dtype | None, tokenizer: Any, card: bool
) -> None:
    """Write everything next to the weights as transformers does: config, generation config, model code, tokenizer;
    and a card."""
    with library_errors(f"Cannot save config and tokenizer to {where!r}", UNCHANGED):
        if isinstance(model, PreTrainedModel):
            model.config.dtype = dtype_name(dtype or model.dtype)
            model.config.architectures = [type(model).__name__.removeprefix("FSDP")]
            with original_classes(model):  # transformers copies the file of the class, which is torch's under FSDP2
                if model.is_remote_code():
                    custom_object_save(model, new, config=model.config)
            with with_cache_as_found(model), with_stored_quantization(model):
                model.config.save_pretrained(new)
            write_older_keys(model.config, new)
            if model.can_generate():
                whole_generation_config(model).save_pretrained(new)
        if tokenizer is not None:
            save_tokenizer(tokenizer, new)
    if card:
        model_card_of(model).save(new / CARD)


# ---- bytes ----


def _gather(
    model: nn.Module,
    layout: Layout,
    folder: Path,
    keys: Iterable[str],
    staging_bytes: int,
    use: Callable[[Transfer], None],
) -> Exception | None:
    """Gather the model tensors of saved tensors on rank 0, one after another, which reverts their conversion.

    Every rank must call. Rank 0 does `use` what writes each saved tensor, and gets what it has failed with.
    """
    state: Mapping[str, torch.Tensor] = saved_tensors(model)
    failure: Exception | None = None
    # What has the same sources, as the experts that are fused, is gathered once for all.
    saved_from = grouped((tuple(sorted(layout.places[key].symbol.sources)), key) for key in keys)
    for sources, saved in saved_from.items():
        whole = {name: gather_to_first(state[name], staging_bytes=staging_bytes) for name in sources}
        try:
            if failure is None and rank_and_size()[0] == 0:
                result = revert_whole(model, {name: t for name, t in whole.items() if t is not None})
                for key in saved:
                    use(replace(layout.places[key].transfer(result[key]), file=folder / layout.places[key].file))
        except Exception as error:  # the other ranks go on sending
            failure = error
    return failure


def _copy_heads(layout: Layout, folder: Path) -> TransferStats:
    """Copy this rank's part of the heads from their files to those in a folder, in bounded memory."""
    stats = TransferStats()
    if layout.heads is None:
        return stats
    heads, index = layout.heads
    rank, num_ranks = rank_and_size()
    slabs = [
        (place, slab)
        for place in layout.carried.values()
        for slab in Box.whole(place.symbol.shape).slabs(_SLAB_BYTES, place.element.itemsize)
    ]
    with heads.reader() as reader, Writer(staging_bytes=_SLAB_BYTES, side=None, in_flight=1) as writer:
        for place, slab in slabs[rank::num_ranks]:
            memory = torch.empty(slab.length, dtype=place.element)
            read_into([(memory, place.symbol, slab)], index, reader, staging_bytes=_SLAB_BYTES)
            (whole,) = PieceTensor.named("", place.symbol.shape, place.element).pieces or ()
            transfers = place.transfers(whole, memory, slab, place.symbol.shape)
            stats += writer.move_in_turn(replace(each, file=folder / each.file) for each in transfers)
    return stats
