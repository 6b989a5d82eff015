"""Heads that a checkpoint holds and transformers drops on load: found by name, and their files kept open for saves."""

import os
import re
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hf_fsdp_tools.distributed.agreement import rank_and_size
from hf_fsdp_tools.distributed.storage import watched
from hf_fsdp_tools.errors import CheckpointError, storage_errors, warn
from hf_fsdp_tools.loading.index import CheckpointIndex
from hf_fsdp_tools.loading.io.files import STAGING_BYTES, Reader, TransferStats
from hf_fsdp_tools.loading.io.transfer import Transfer
from hf_fsdp_tools.loading.match import Match, part_of
from hf_fsdp_tools.modeling.configs import text_config
from hf_fsdp_tools.modeling.notes import Note
from hf_fsdp_tools.modeling.packed import saved_quantization
from hf_fsdp_tools.stores import name_of, stored_object
from hf_fsdp_tools.text import listed, quoted


class Heads:
    """The stored tensors of heads that a model has no modules for; saves copy them.

    Their files stay open: they are still read when another save has replaced them, or old checkpoints were deleted.
    """

    def __init__(self, index: CheckpointIndex, stored: CheckpointIndex, beside: frozenset[str] = frozenset()) -> None:
        """Open the files of these tensors, with quantised ones as plain ones and as they are stored; `beside`: those of
        the latter that belong to weights that are quantised as stored, and are copied in any case."""
        self.index, self.stored, self.beside = index, stored, beside
        self._open: dict[Path, int] = {}
        weakref.finalize(self, _close, self._open).atexit = False  # a save in the background may still read
        sources = (stored.source(name) for tensor in stored.tensors.values() for name in tensor.sources)
        for file in dict.fromkeys(source.file for source in sources):
            with storage_errors("open", file), watched(file):
                self._open[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        self._stamps = self._stamps_now()

    def __reduce__(self) -> tuple[type["Heads"], tuple[CheckpointIndex, CheckpointIndex, frozenset[str]]]:
        return Heads, (self.index, self.stored, self.beside)

    def of(self, model: nn.Module, *, carry: bool) -> CheckpointIndex:
        """What a save copies: stored tensors for a model with weights quantised as stored, otherwise plain ones."""
        index = self.stored if saved_quantization(model) else self.index
        return index if carry else part_of(index, self.beside.__contains__)

    def _stamps_now(self) -> dict[Path, tuple[int, int]]:
        """Length and time of modification of each file, which change when it is written."""
        stamps = {}
        for file, descriptor in self._open.items():
            with storage_errors("read", file), watched(file):
                status, there = os.fstat(descriptor), stored_object(file)
            stamps[file] = (status.st_size, status.st_mtime_ns) if there is None else there.version_now()
        return stamps

    def refuse_changed(self) -> None:
        """Refuse files that were written since the model was loaded from them, or that the system gives no more."""
        now = self._stamps_now()
        if changed := [file for file, stamp in self._stamps.items() if now[file] != stamp]:
            raise CheckpointError(
                f"{name_of(changed[0])}: was written after the model was loaded from it, so that "
                f"{len(self.index.tensors)} tensors of heads ({listed(self.index.tensors)}) cannot be copied from it. "
                "Save without them: save_pretrained(model, folder, carry_heads=False); or load the model again."
            )

    def reader(self) -> Reader:
        """Reads the files, on the calling thread."""
        return _HeadReader(self._open)


class _HeadReader(Reader):
    """Reads files that are open already, and begins no thread, which the interpreter refuses while it ends."""

    def __init__(self, opened: Mapping[Path, int]) -> None:
        super().__init__(staging_bytes=STAGING_BYTES // 4, side=None, in_flight=1, read_ahead=True)
        self._opened = opened

    def begin(self, transfers: Iterable[Transfer]) -> Callable[[], TransferStats]:
        stats = self.move_in_turn(transfers)
        return lambda: stats

    def _open(self, file: Path) -> int:
        return os.dup(self._opened[file])


@dataclass(frozen=True)
class WithHeads(Note):
    """What a loaded model's checkpoint has that it has no modules for."""

    heads: Heads | None = None


def _close(opened: Mapping[Path, int]) -> None:
    for descriptor in opened.values():
        os.close(descriptor)


def remember_heads(model: nn.Module, match: Match, *, carry: bool) -> None:
    """Note on a model the heads of its checkpoint, for saves; or, without `carry`, that there are none.

    One warning on rank 0 says what config.json will promise and nobody will find. No rank communicates.
    """
    heads, fact = match.heads if carry or match.beside else None, ""
    if heads is None:
        WithHeads.put(model, heads=None)
    else:
        found = (heads, match.stored_heads)
        plain, stored = (each if carry else part_of(each, match.beside.__contains__) for each in found)
        WithHeads.put(model, heads=Heads(plain, stored, match.beside))
    if heads is not None:
        rows = {shape[0] for _, shape, _ in match.resized}
        tables = [key for key, tensor in heads.tensors.items() if tensor.shape and tensor.shape[0] in rows]
        if tables:
            fact = f"The heads keep tables of the vocabulary as it was: {listed(tables)}. Servers may refuse them"
    elif (match.heads is not None or match.index.is_model_state) and (promised := _promised(model)):
        which = "are left out" if match.heads is not None else f"are not in {match.index.name!r}, a training state"
        fact = (
            f"Heads {which}, so that saves hold none, which config.json promises: {promised}. Servers may refuse that"
        )
    if fact and rank_and_size()[0] == 0:
        warn(f"{fact}.")


def _promised(model: nn.Module) -> str:
    """What a config says of heads for multi-token prediction."""
    config: Any = getattr(model, "config", None)
    entries = {} if config is None else {**config.to_dict(), **text_config(config).to_dict()}
    return listed(f"{key} = {quoted(value)}" for key, value in entries.items() if value and re.search("mtp|nextn", key))
