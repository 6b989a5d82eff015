"""A model and a checkpoint held against each other: which key fills which tensor, what is left over on either side."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from hf_fsdp_tools.errors import CheckpointError

from .conversion import LoadMap, adjust_keys, persistent_tensors
from .index import CheckpointIndex
from .pieces import PieceTensor
from .reader import read_transfers
from .shares import local_boxes_of, memory_view
from .slices import Box, slice_piece
from .transfer import Transfer
from .vocabulary import AddedRows, vocabulary_dims

__all__ = ["Fit", "check_ties", "fit_checkpoint", "transfers_of"]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The model and the checkpoint held against each other."""

    state: Mapping[str, torch.Tensor]
    """The model's persistent tensors by key, before storage."""

    loaded: Mapping[str, PieceTensor]
    """One key per distinct tensor of the model that the checkpoint fills."""

    doubles: tuple[tuple[PieceTensor, PieceTensor, str, str], ...]
    """Tied keys that the checkpoint holds both, with their keys."""

    to_initialize: frozenset[str]
    """Keys that nothing fills; one per distinct tensor."""

    missing_keys: frozenset[str]
    """As reported."""

    unexpected_keys: frozenset[str]
    """As reported."""

    mismatched: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    """(key, checkpoint shape, model shape)."""

    resized: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...]
    """(key, checkpoint shape, model shape) of what is loaded although the model has another number of tokens."""

    added: Mapping[str, AddedRows]
    """Of these, the loaded keys with rows that the checkpoint lacks."""


def fit_checkpoint(
    model: nn.Module,
    load_map: LoadMap,
    index: CheckpointIndex,
    *,
    ignore_mismatched_sizes: bool,
    strict: bool,
    resize_vocabulary: bool = False,
    packed: Collection[str] = (),
) -> Fit:
    """Sort every key of the model into loaded, missing and mismatched; raise for what must not be.

    With ``resize_vocabulary``, tensors that differ in their number of tokens alone are loaded token by token. Keys in
    ``packed`` are filled elsewhere.
    """
    state = persistent_tensors(model)
    found, added = _resized(model, state, load_map) if resize_vocabulary else (load_map.tensors, {})
    resized = tuple(
        (k, tuple(load_map.tensors[k].shape), tuple(t.shape))
        for k, t in found.items()
        if t.shape != load_map.tensors[k].shape
    )
    mismatched = tuple(
        (k, tuple(t.shape), tuple(state[k].shape)) for k, t in found.items() if t.shape != state[k].shape
    )
    if mismatched and not ignore_mismatched_sizes:
        rows = "\n".join(f"- {k}: {list(a)} in the checkpoint, {list(b)} in the model" for k, a, b in mismatched[:20])
        more = f"\n… and {len(mismatched) - 20} more" if len(mismatched) > 20 else ""
        raise CheckpointError(
            f"{len(mismatched)} tensors of {index.name!r} have another shape than the model's:\n{rows}{more}\nUse "
            "the config that "
            "belongs to the checkpoint, or pass ignore_mismatched_sizes=True to initialise these anew"
            + (" (or added_tokens, where the vocabulary alone was resized)." if not resize_vocabulary else ".")
        )
    _refuse_untied(model, state)
    wrong = {key for key, _, _ in mismatched}
    names: dict[int, list[str]] = {}
    for key, tensor in state.items():
        if key not in packed:
            names.setdefault(id(tensor), []).append(key)
    loaded: dict[str, PieceTensor] = {}
    doubles: list[tuple[PieceTensor, PieceTensor, str, str]] = []
    to_initialize: set[str] = set()
    missing: set[str] = set()
    for tied in names.values():
        there = [key for key in tied if key in found and key not in wrong]
        if there:
            loaded[there[0]] = found[there[0]]
            doubles += [(found[there[0]], found[other], there[0], other) for other in there[1:]]
        else:
            to_initialize.add(tied[0])
            missing.update(key for key in tied if key not in wrong)
    missing_keys, unexpected_keys = adjust_keys(model, missing, set(load_map.unexpected_keys))
    if strict and (missing_keys or unexpected_keys):
        raise CheckpointError(
            f"{index.name!r} does not hold exactly what the model needs. Missing: "
            f"{', '.join(sorted(missing_keys)) or 'none'}. "
            f"Unexpected: {', '.join(sorted(unexpected_keys)) or 'none'}. Use the matching auto class, or strict=False."
        )
    return Fit(
        state=state,
        loaded=loaded,
        doubles=tuple(doubles),
        to_initialize=frozenset(to_initialize),
        missing_keys=missing_keys,
        unexpected_keys=unexpected_keys,
        mismatched=mismatched,
        resized=resized,
        added={key: rows for key, rows in added.items() if key in loaded},
    )


def _resized(
    model: nn.Module, state: Mapping[str, torch.Tensor], load_map: LoadMap
) -> tuple[dict[str, PieceTensor], dict[str, AddedRows]]:
    """What the checkpoint holds, with the vocabulary's tensors cut or extended to the model's number of tokens."""
    found, added = dict(load_map.tensors), {}
    dims = vocabulary_dims(model)
    for key, tensor in load_map.tensors.items():
        dim = dims.get(key)
        if dim is None or tensor.pieces is None or tensor.dim() != state[key].dim():
            continue
        old, new = tensor.shape[dim], state[key].shape[dim]
        extended = tensor.extended(dim, new)
        if old != new and extended.shape == state[key].shape:
            found[key] = extended
            if new > old:
                added[key] = AddedRows(dim=dim, start=old)
    return found, added


def _refuse_untied(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Names that the config ties must be one parameter by now: a shard cannot be tied afterwards."""
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    apart = [f"{a} = {b}" for a, b in ties.items() if a in state and b in state and state[a] is not state[b]]
    if apart:
        raise CheckpointError(
            f"The config ties weights that are separate parameters in this model: {', '.join(apart)}. Call "
            "model.tie_weights() "
            "before sharding, or set tie_word_embeddings=False in the config."
        )


def check_ties(fit: Fit, index: CheckpointIndex, staging_bytes: int) -> None:
    """A tied weight that the checkpoint holds under two names must be equal in both; each rank compares its share."""
    for first, second, name, other in fit.doubles:
        if _are_same_bytes(first, second, index):
            continue
        for box, _ in local_boxes_of(fit.state[name]):
            for slab in _slabs(box, first.dtype, staging_bytes // 4):
                values = [torch.zeros(slab.length, dtype=first.dtype) for _ in range(2)]  # rows of added tokens stay 0
                for tensor, value in zip((first, second), values, strict=True):
                    transfers = transfers_of(tensor, slab, value, (0,) * len(slab.start), index)
                    read_transfers(transfers, staging_bytes=staging_bytes // 2)
                if not torch.equal(values[0], values[1]):
                    raise CheckpointError(
                        f"{index.name!r}: the config ties {name!r} and {other!r}, but the checkpoint holds "
                        "different values for "
                        "them. Set tie_word_embeddings=False in the config to keep both."
                    )


def _are_same_bytes(first: PieceTensor, second: PieceTensor, index: CheckpointIndex) -> bool:
    """Whether two tensors are one stored one: pickled files keep what the model ties under both names, and once."""
    if first.pieces is None or second.pieces is None:
        return False
    places = []
    for tensor in (first, second):
        stored = [(index.source(piece.source), piece) for piece in tensor.pieces or ()]
        places.append({(s.file, s.offset, s.dtype, piece.box, piece.view) for s, piece in stored})
    return places[0] == places[1]


def _slabs(box: Box, dtype: torch.dtype, num_bytes: int) -> Iterator[Box]:
    """The box in parts along dimension 0 of at most ``num_bytes``, or single rows."""
    rows = box.length[0] if box.length else 1
    step = max(1, num_bytes * rows // max(1, box.numel * dtype.itemsize))
    for i in range(0, rows, step):
        count = min(step, rows - i)
        yield Box(start=(box.start[0] + i, *box.start[1:]), length=(count, *box.length[1:])) if box.length else box


def transfers_of(
    tensor: PieceTensor, box: Box, local: torch.Tensor, local_start: tuple[int, ...], index: CheckpointIndex
) -> Iterator[Transfer]:
    """What to read for one box of a tensor that lies at ``local_start`` of ``local``."""
    for piece in tensor.pieces or ():
        part = slice_piece(piece, box)
        if part is None:
            continue
        stored = index.source(part.source)
        start = [p - b + at for p, b, at in zip(part.box.start, box.start, local_start, strict=True)]
        yield Transfer(
            key=part.source,
            file=stored.file,
            offset=stored.offset,
            dtype=stored.dtype,
            stored=part.view,
            memory=memory_view(local, start, part.box.length),
        )
