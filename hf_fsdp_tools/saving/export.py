"""A training state, or an adapter merged into its base, as a Hugging Face checkpoint: on CPUs, never whole in memory.

The model is built without values and matched with the files (`material`), and laid out as the checkpoint that the
training would have written; then the ranks share its parts.
"""

import shutil
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from hf_fsdp_tools.distributed.agreement import agreed, rank_and_size, same_on_all_ranks
from hf_fsdp_tools.distributed.shards import Box, memory_view
from hf_fsdp_tools.errors import CheckpointError, ConfigError
from hf_fsdp_tools.loading.conversion import ConversionGroup, persistent_tensors, revert_group
from hf_fsdp_tools.loading.fill import check_values, read_converted, read_into
from hf_fsdp_tools.loading.heads import remember_heads
from hf_fsdp_tools.loading.io.files import STAGING_BYTES, Reader, TransferStats, Writer
from hf_fsdp_tools.loading.io.transfer import Transfer
from hf_fsdp_tools.loading.opening import Checkpoint, Source, open_checkpoint
from hf_fsdp_tools.loading.quantized.dequantize import Place as ReadPlace
from hf_fsdp_tools.loading.quantized.dequantize import batches
from hf_fsdp_tools.loading.regions import Piece
from hf_fsdp_tools.loading.report import loading_bar
from hf_fsdp_tools.loading.weight_files import CONFIG
from hf_fsdp_tools.modeling.arguments import as_dtype
from hf_fsdp_tools.saving.hidden_folder import Folder
from hf_fsdp_tools.saving.layout import Layout, Place, plan_layout
from hf_fsdp_tools.saving.material import ExportSource, adapted_model, material_of_adapter, material_of_model
from hf_fsdp_tools.saving.publish import SaveReport
from hf_fsdp_tools.saving.requantize import Requantizer, keep_format
from hf_fsdp_tools.saving.save import BegunSave, prepare_save, write_in_place
from hf_fsdp_tools.saving.save_adapter import save_adapter
from hf_fsdp_tools.sharding.adapters import ADAPTER_CONFIG
from hf_fsdp_tools.stores import local_folder, told
from hf_fsdp_tools.streaming.merging import connected, merge, whole_copies
from hf_fsdp_tools.text import listed

_PART_BYTES = 64 * 2**20
"""Bytes of tensors that a process moves at a time: enough to keep 16 threads busy with 8 MiB each for a moment, and
little compared with what importing torch takes. (assumed)"""

_OF_TRAININGS = (
    "*.distcp", ".metadata", "adapter_*", "optimizer*", "pytorch_model*", "scheduler*", "trainer_state.json",
)  # fmt: skip
"""Files and folders that lie next to weights in states of a training, and that a new checkpoint is not put between."""

_TOKENIZER = (
    "added_tokens.json", "additional_chat_templates/*", "chat_template*", "merges.txt", "*.model",
    "special_tokens_map.json", "*.tiktoken", "tokenizer*", "vocab.*",
)  # fmt: skip
"""Files of tokenizers, with what `save_pretrained` of transformers writes (5.23) and older ones wrote."""

_PROCESSOR = ("*processor_config.json",)
"""Files of processors of images, sound and video, and of processors around a tokenizer."""


def export_checkpoint(
    state: str | PathLike[str] | None,
    folder: str | PathLike[str],
    *,
    adapter: str | PathLike[str] | None = None,
    config: PreTrainedConfig | str | PathLike[str] | None = None,
    auto_class: Any = None,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    carry_heads: bool = True,
    keep_stored_format: bool = False,
    force: bool = False,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
    progress: bool | None = None,
    **hub_kwargs: Any,
) -> SaveReport:
    """Write a training state, or a base with its adapter merged, as the checkpoint that `save_pretrained` writes.

    Names, layout, dtypes, shapes and files are those of `save_pretrained` in the training; values are the state's, bit
    for bit. From the state of a `PeftModel` the adapter alone is written. With `adapter`, the result equals PEFT's
    `merge_and_unload().save_pretrained()` on the CPU bit for bit: PEFT itself merges one adapted module at a time, in
    the dtype of the base (of its config). An adapter that was trained on a base in 4 bits (QLoRA) is merged into the
    plain base. Tokenizer and processor files next to the adapter, the state, or its config, are copied.

    The ranks of the default process group, if there is one, share the work. Each holds the adapter and a part of the
    model at a time: 64 MiB of tensors and 64 MiB of staging buffers; or the tensors that one conversion takes together,
    where it does more than move data; or one adapted module with what PEFT computes for it (for LoRA on a base in bf16
    six times the module).

    Args:
        state: a DCP folder, or a folder of Accelerate or the Trainer with one in it (`checkpoint-500`), or any other
            checkpoint that `from_pretrained` opens. None, with `adapter`: the base that the adapter names.
        folder: new, empty, or with an earlier checkpoint, which stays until the new one is complete.
        adapter: hub name, or a folder with `adapter_config.json`, to merge into its base. Where PEFT saved
            several adapters into one folder, give the folder of one.
        config: of the model; None means the `config.json` of the state, or the nearest of two folders above.
        auto_class: the class of the model, or an `AutoModelFor…` class; None means the class for the adapter's task, or
            that which the config names.
        dtype: of floating-point tensors in the files, after merging; None keeps each tensor's own.
        max_shard_size: largest weight file, in bytes or as "5GB".
        carry_heads: copy heads of the state or base that the model's class ignores, as `save_pretrained` does.
        keep_stored_format: with `adapter`, of a base in a format that takes no data: what the adapter changes is
            merged as without, and quantised again by the format's rule; `report.requantized` says the error of each.
            All else is copied byte for byte, with the quantisation config.
        force: merge also into a base whose name ends otherwise than that which the adapter names.
        allow_pickle: read legacy `.bin` files, such as Accelerate's of FULL_STATE_DICT; no code of the file is run.
        trust_remote_code: run model code that comes with the config.
        progress: a bar on rank 0 over the bytes that this rank moves; None: where standard error is a terminal.
        hub_kwargs: `revision`, `token`, `cache_dir`, `local_files_only`, `subfolder`: of the adapter where there is
            one, otherwise of the state.

    Every rank of the default process group must call, if there is one. The ranks exchange errors and digests.

    Raises:
        CheckpointError: state, base or adapter is absent or damaged, or does not fit the model; the folder holds
            something else, or cannot be written. The same on every rank; what was saved there before is unchanged.
        ConfigError: the state is an adapter, or the adapter is none; PEFT cannot merge it (prompt methods, a base in 4
            bits); `keep_stored_format` without an adapter, with a dtype, or for a base that is not stored in FP8.

    Example:
        >>> report = export_checkpoint("checkpoint", "in-bfloat16", dtype=torch.bfloat16)
        >>> from_pretrained("in-bfloat16", dtype="auto", load_kwargs={"progress": False}).dtype
        torch.bfloat16
        >>> from peft import LoraConfig
        >>> adapted = from_pretrained("checkpoint", peft_config=LoraConfig(target_modules=["q_proj"]))
        >>> report = save_pretrained(adapted, "lora")
        >>> export_checkpoint(None, "merged", adapter="lora").files
        ('model.safetensors',)
    """
    start_s, folder, dtype = time.perf_counter(), local_folder(folder, "export writes to a folder,"), as_dtype(dtype)
    given = {"auto_class": auto_class, "allow_pickle": allow_pickle, "dtype": dtype, "carry_heads": carry_heads}
    given |= {"max_shard_size": max_shard_size, "keep_stored_format": keep_stored_format}
    same_on_all_ranks("writing the checkpoint", **given)
    _refuse_arguments(state, adapter, dtype, keep_stored_format=keep_stored_format)
    own = Source(fspath(state if adapter is None else adapter), hub_kwargs)  # type: ignore[arg-type]
    source = own if state is None else own.of(fspath(state), None) if adapter is not None else own
    options = {"config": config, "trust_remote_code": trust_remote_code, "allow_pickle": allow_pickle}
    checkpoint = _opened(source, own, merges=adapter is not None, **options)
    if source is own:  # at one commit now
        own = replace(own, hub=checkpoint.hub_kwargs)
    base = own.of(checkpoint.name, checkpoint.index.commit) if checkpoint.name != own.name else own
    named = checkpoint.config.name_or_path
    side_files = _SideFiles((own, base, Source("" if named == told(own.name) else named, {})))
    with agreed("looking at the folder", folder):
        _refuse_target(folder, side_files.homes)
    if checkpoint.adapter_state is not None:
        adapted = adapted_model(checkpoint, auto_class, trust_remote_code)
        return save_adapter(adapted, Folder(folder), tokenizer=side_files, dtype=dtype)
    if adapter is not None:
        material = material_of_adapter(checkpoint, own, auto_class, trust_remote_code, force=force)
    else:
        material = material_of_model(checkpoint, auto_class, dtype, trust_remote_code)
    with Folder(folder) as target:
        with agreed("preparing the save", folder):
            check_values(material.match, staging_bytes=STAGING_BYTES)
            remember_heads(material.model, material.match, carry=carry_heads)
            if keep_stored_format:
                stored = checkpoint.index.of_model(material.match.state)
                material, layout = keep_format(material, stored, max_shard_size, carry_heads=carry_heads)
            else:
                layout = plan_layout(material.model, dtype, max_shard_size)
            requantizer = Requantizer(material, layout.places) if keep_stored_format else None
            loop = _Loop(material, layout, requantizer)
            prepare_save(target, material.model, layout, dtype, side_files)
        files = [target.path / file for file in layout.sizes]
        write = partial(write_in_place, target, layout, files, partial(loop.write, target.path, progress))
        report = BegunSave(target=target, layout=layout, write=write).finish()
    errors = requantizer.all_errors() if requantizer is not None else {}
    return replace(report, requantized=errors, seconds=round(time.perf_counter() - start_s, 4))


def _refuse_arguments(state: Any, adapter: Any, dtype: torch.dtype | None, *, keep_stored_format: bool) -> None:
    if keep_stored_format and (adapter is None or dtype is not None):
        cure = "Give one (--adapter, adapter=)" if adapter is None else f"Leave dtype ({dtype}) out"
        raise ConfigError(f"keep_stored_format (--keep-stored-format) merges an adapter, and casts nothing. {cure}.")
    if state is None and adapter is None:
        raise ConfigError("Give a training state or checkpoint (STATE, state=), or an adapter (--adapter, adapter=).")


def _opened(source: Source, own: Source, *, merges: bool, **options: Any) -> Checkpoint:
    """The state or base that is written, of which the adapter is `own` if one is merged."""
    try:
        checkpoint = open_checkpoint(source.name, **options, **source.hub)
    except CheckpointError as error:
        is_named_by_adapter = merges and source is own
        if not is_named_by_adapter or own.path is None or not (own.path / ADAPTER_CONFIG).is_file():
            raise
        raise CheckpointError(
            f"The base of the adapter {own.name!r} cannot be opened: {error} Or name another as STATE (state=)."
        ) from None
    if not merges and checkpoint.adapter is not None:
        raise ConfigError(
            f"{own.name!r} is an adapter of {checkpoint.name!r}, not a model. Merge it into its base with "
            "hf-fsdp export --adapter (adapter=)."
        )
    if merges and checkpoint.adapter_state is not None:
        raise ConfigError(
            f"{source.name!r} is the training state of a PeftModel. Write its adapter with hf-fsdp export "
            "(export_checkpoint), and merge that."
        )
    return checkpoint


# ---- the loop ----


_Part = list[tuple[str, Box]]
"""What a rank moves at a time: boxes of tensors of the model, by key."""


class _Loop:
    """Reads, computes, writes and drops the tensors of a model, part by part.

    Tensors that are only moved, on the way in and on the way out, are cut into slabs. Those that something computes (an
    adapter is merged, or a conversion does more than move data) are taken whole, with all that they are computed with.
    """

    def __init__(self, material: ExportSource, layout: Layout, requantizer: Requantizer | None) -> None:
        self._material, self._match, self._requantizer = material, material.match, requantizer
        self._state = {**persistent_tensors(material.model), **material.copied}
        merged = material.merged
        self._adapted = {w: [id(merged[old]) for old in olds.values()] for w, olds in material.adapted.items()}
        """Adapted modules of the base, with the tensors that their adapters are merged into, by identity."""
        self._moved: dict[str, list[tuple[Place, Piece]]] = defaultdict(list)
        """Every piece of a saved tensor, by the key of the tensor of the model that it is cut from."""
        self._reverted: dict[frozenset[str], dict[str, Place]] = defaultdict(dict)
        """The saved tensors that a reverse conversion computes, by the tensors that it takes together."""
        keys: dict[str, None] = {}  # in the order of the files
        for saved, place in sorted(layout.places.items(), key=lambda item: (item[1].file, item[1].offset)):
            keys |= dict.fromkeys(sorted(place.symbol.sources))
            if place.symbol.pieces is None:
                self._reverted[place.symbol.sources][saved] = place
            for piece in place.symbol.pieces or ():
                self._moved[piece.source].append((place, piece))
        self._together = self._computed_together(keys)
        """Every tensor that is computed, by key, with all tensors that are computed with it."""
        wholes = dict.fromkeys(frozenset(self._together[key]) for key in keys if key in self._together)
        computed = [[(key, Box.whole(self._state[key].shape)) for key in sorted(whole)] for whole in wholes]
        slabs = (
            (key, slab)
            for key in keys
            if key not in self._together
            for slab in Box.whole(self._state[key].shape).slabs(_PART_BYTES, self._state[key].itemsize)
        )
        moved = batches(slabs, _PART_BYTES, lambda slab: self._num_bytes([slab]))
        self._parts: list[_Part] = sorted([*computed, *moved], key=self._num_bytes)
        """The same on every rank; neighbours are about as large, so that ranks can take them in turn."""

    def _num_bytes(self, part: _Part) -> int:
        """Bytes of a part in memory."""
        return sum(box.numel * self._state[key].itemsize for key, box in part)

    def write(self, folder: Path, progress: bool | None) -> TransferStats:
        """Write the parts of this rank to the files in a folder; the cost. No rank communicates."""
        (rank, num_ranks), stats, half = rank_and_size(), TransferStats(), STAGING_BYTES // 2
        parts = self._parts[rank::num_ranks]
        total = sum(map(self._num_bytes, parts))
        with (
            loading_bar(total, rank=rank, world_size=num_ranks, progress=progress, doing="Writing") as on_bytes,
            Reader(staging_bytes=half, side=None, read_ahead=True) as reader,
            Writer(staging_bytes=half, side=None) as writer,
        ):
            for part in parts:
                transfers = [replace(t, file=folder / t.file) for t in self._transfers(part, reader)]
                stats += writer.begin(transfers)()
                del transfers  # and with them the memory of this part
                if self._requantizer is not None:
                    self._requantizer.compare(folder, reader)
                on_bytes(self._num_bytes(part))
        self._match.index.refuse_changed()
        return stats

    def _computed_together(self, keys: Iterable[str]) -> dict[str, set[str]]:
        names: dict[int, list[str]] = defaultdict(list)
        converted: dict[str, list[str]] = defaultdict(list)
        for key in keys:
            names[id(self._state[key])].append(key)
            if (group := self._conversion(self._state[key])) is not None:
                converted[group.target].append(key)
        adapted = ([key for tensor in tensors for key in names[tensor]] for tensors in self._adapted.values())
        return connected([*adapted, *self._reverted, *converted.values()])

    def _conversion(self, tensor: torch.Tensor) -> ConversionGroup | None:
        """The conversion that computes a tensor from what is stored; None for any other tensor."""
        key = self._material.loaded.get(id(tensor))
        if key is None or self._match.loaded[key].pieces is not None:
            return None
        return self._match.load_map.groups[key]

    def _transfers(self, part: _Part, reader: Reader) -> Iterator[Transfer]:
        """Yield what writes a part, from memory that holds its values."""
        values = self._values([(self._state[key], box) for key, box in part], reader)
        for (key, box), memory in zip(part, values, strict=True):
            for place, piece in self._moved.get(key, ()):
                yield from place.transfers(piece, memory.contiguous(), box, self._state[key].shape)
        if part[0][0] in self._together:
            whole = {key: value for (key, _), value in zip(part, values, strict=True)}
            for sources, places in self._reverted.items():
                if sources <= whole.keys():
                    results = revert_group(self._material.model, {key: whole[key] for key in sorted(sources)})
                    if self._requantizer is not None:
                        results = self._requantizer.stored(results, reader)
                    yield from (place.transfer(results[saved]) for saved, place in places.items())

    def _values(self, boxes: Sequence[tuple[torch.Tensor, Box]], reader: Reader) -> list[torch.Tensor]:
        """The values of boxes of tensors, of the model or of the base of an adapter."""
        computed = self._computed([tensor for tensor, _ in boxes], reader)
        values: list[torch.Tensor] = []
        reads: list[ReadPlace] = []
        for tensor, box in boxes:
            key = self._material.loaded.get(id(tensor))
            if key is None or id(tensor) in computed:
                values.append(memory_view(computed.get(id(tensor), tensor.detach()), box.start, box.length))
            else:
                values.append(torch.empty(box.length, dtype=tensor.dtype))
                reads.append((values[-1], self._match.loaded[key], box))
        read_into(reads, self._match.index, reader, staging_bytes=_PART_BYTES)
        return values

    def _computed(self, tensors: Sequence[torch.Tensor], reader: Reader) -> dict[int, torch.Tensor]:
        """The whole values of those tensors that are merged or converted, by the identity of the tensor."""
        material, match, ids = self._material, self._match, set(map(id, tensors))
        wrappers = [wrapper for wrapper, merged in self._adapted.items() if not ids.isdisjoint(merged)]
        twins = whole_copies(wrappers, lambda p: self._values([(p, Box.whole(p.shape))], reader)[0].clone())
        computed = {id(material.merged[old]): whole for old, whole in merge(twins, material.adapted).items()}
        for tensor in tensors:
            if id(tensor) not in computed and (group := self._conversion(tensor)) is not None:
                results, _ = read_converted(
                    material.model, group, match.index, reader, dtype=tensor.dtype, staging_bytes=_PART_BYTES
                )
                computed |= {id(match.state[key]): value for key, value in results.items() if key in match.state}
        return computed


# ---- the folder ----


def _refuse_target(folder: Path, sources: tuple[Source, ...]) -> None:
    """Refuse a folder that is one of the sources, or holds anything but an earlier checkpoint of a model."""
    if not folder.is_dir():
        return
    if any(s.name and s.path is not None and s.path.exists() and s.path.samefile(folder) for s in sources):
        raise CheckpointError(f"{str(folder)!r} is what is read; writing there would destroy it. Give a new folder.")
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
    """The files of a tokenizer and of a processor, which are copied as a tokenizer would save itself."""

    homes: tuple[Source, ...]
    """All files of a kind come from the first that has any."""

    def save_pretrained(self, folder: Path) -> None:
        homes = [source.folder(*_TOKENIZER, *_PROCESSOR)[0] for source in self.homes if source.name]
        homes = [home.parent if home.is_file() else home for home in homes]
        for patterns in (_TOKENIZER, _PROCESSOR):
            found = ({f.relative_to(h): f for p in patterns for f in h.glob(p) if f.is_file()} for h in homes)
            for name, file in next(filter(None, found), {}).items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, folder / name)
