"""Rows for added tokens: which tensors have one row per token, and which values fill the rows that no file holds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_fsdp_tools.distributed.agreement import all_ranks
from hf_fsdp_tools.distributed.shards import is_first_replica, local_boxes_of, local_tensor, memory_view
from hf_fsdp_tools.errors import CheckpointError, ConfigError
from hf_fsdp_tools.loading.conversion import persistent_tensors
from hf_fsdp_tools.modeling.initialize import draw_values
from hf_fsdp_tools.modeling.meta import build_meta_model
from hf_fsdp_tools.modeling.module_tree import original_classes
from hf_fsdp_tools.text import first_line

_SLAB_ELEMENTS = 2**20
"""Values that are summed at a time, which bounds the memory of a sum to 16 MiB for any vocabulary. (assumed)"""

AddedTokens = Literal["mean", "random"]
"""How rows of added tokens are filled: with the mean of the old rows, or by the model's own initialisation."""


@dataclass(frozen=True, kw_only=True)
class AddedRows:
    """The new rows (or columns) of a tensor that has one per token."""

    dim: int
    """The dimension that counts tokens."""

    start: int
    """Index of the first new row; all rows before it are old."""


def resize_vocabulary(model: PreTrainedModel, num_tokens: int | None, pad_to_multiple_of: int | None) -> None:
    """Resize embeddings, head and config of a plain meta model, by transformers' own code; ties stay."""
    for name, count in (("num_tokens", num_tokens), ("pad_to_multiple_of", pad_to_multiple_of)):
        if count is not None and count < 1:
            raise ConfigError(f"{name} is {count}; it must be at least 1.")
    try:
        with torch.device("meta"):
            model.resize_token_embeddings(num_tokens, pad_to_multiple_of, mean_resizing=False)
    except (TypeError, ValueError, NotImplementedError, AttributeError, RuntimeError) as error:
        # each of them is how some class of transformers says that it cannot; the sentence is passed on
        raise ConfigError(
            f"The vocabulary of {type(model).__name__} cannot be resized: {first_line(error)}. Load it with the "
            "vocabulary that its checkpoint has."
        ) from None


def resized_twin(
    model: PreTrainedModel, num_tokens: int | None, pad_to_multiple_of: int | None = None
) -> PreTrainedModel:
    """A resized model on meta of the same config; its differences from `model` are what resizing has to change."""
    with original_classes(model):
        twin = build_meta_model(model.config, auto_class=type(model), dtype=model.dtype)
    resize_vocabulary(twin, num_tokens, pad_to_multiple_of)
    return twin


def vocabulary_dims(model: nn.Module) -> dict[str, int]:
    """The dimension that counts tokens, by state-dict key of each tensor that has such a dimension.

    These are embeddings, heads and their biases. They are found by resizing a twin on meta with transformers' own code,
    so their names do not matter.
    """
    if not isinstance(model, PreTrainedModel):
        return {}
    rows = model.get_input_embeddings().weight.shape[0]
    twin = persistent_tensors(resized_twin(model, rows + 1))
    dims = {}
    for key, tensor in persistent_tensors(model).items():
        changed = [d for d, (n, m) in enumerate(zip(tensor.shape, twin[key].shape, strict=True)) if n != m]
        if changed:
            dims[key] = changed[0]
    return dims


def fill_added(model: nn.Module, added: Mapping[str, AddedRows], how: AddedTokens, seed: int) -> None:
    """Fill the new rows of loaded tensors, in place, with values that do not depend on the number of ranks.

    "mean": each new row is the mean of the old rows, summed in float64 (transformers adds noise of 3e-5 of their
    spread). "random", and buffers in any case: the model's own initialisation of the new rows, from a generator seeded
    by `seed` and the module's name.

    Every rank must call; each gathers one row per tensor from the others.
    """
    if not added:
        return
    state = persistent_tensors(model)
    by_mean = {key for key in added if how == "mean" and isinstance(state[key], nn.Parameter)}
    shapes = {}
    for key in sorted(added.keys() - by_mean):
        shape = list(state[key].shape)
        shape[added[key].dim] -= added[key].start
        shapes[key] = tuple(shape)
    values = draw_values(model, shapes, seed=seed)
    sums = {key: _sum_of_old(state[key], added[key]) for key in sorted(by_mean)}
    of_ranks = all_ranks(sums, "averaging the rows of a vocabulary")
    for key in sums:
        mean = torch.stack([sums_of_rank[key] for sums_of_rank in of_ranks]).sum(0) / added[key].start
        if not mean.isfinite().all():
            raise CheckpointError(
                f"{key!r} holds values that are not finite, so its rows have no mean. "
                "Use added_tokens='random', or another checkpoint."
            )
        values[key] = mean.to(state[key].dtype).unsqueeze(added[key].dim)
    for key, rows in added.items():
        _write_new(state[key], rows, values[key])


def _write_new(tensor: torch.Tensor, rows: AddedRows, value: torch.Tensor) -> None:
    """Write this rank's part of the new rows; `value` holds all new rows, or one row for all of them."""
    local = local_tensor(tensor)
    for box, start in local_boxes_of(tensor):
        first = max(box.start[rows.dim], rows.start)
        count = box.start[rows.dim] + box.length[rows.dim] - first
        if count <= 0:
            continue
        source = value.expand(*(n if d != rows.dim else -1 for d, n in enumerate(tensor.shape)))
        for d, (s, n) in enumerate(zip(box.start, box.length, strict=True)):
            if d != rows.dim:
                source = source.narrow(d, s, n)
            elif source.shape[d] > 1:
                source = source.narrow(d, first - rows.start, count)
        place = list(start)
        place[rows.dim] += first - box.start[rows.dim]
        length = list(box.length)
        length[rows.dim] = count
        with torch.no_grad():
            memory_view(local, place, length).copy_(source)


def _sum_of_old(tensor: torch.Tensor, rows: AddedRows) -> torch.Tensor:
    """The sum of this rank's part of the old rows, zero elsewhere; of zeros on ranks other than the first replica."""
    other_dims = [d for d in range(tensor.dim()) if d != rows.dim]
    total = torch.zeros([tensor.shape[d] for d in other_dims], dtype=torch.float64)
    if not is_first_replica(tensor):
        return total
    local = local_tensor(tensor)
    for box, start in local_boxes_of(tensor):
        count = min(box.length[rows.dim], rows.start - box.start[rows.dim])
        if count <= 0:
            continue
        length = [count if d == rows.dim else n for d, n in enumerate(box.length)]
        by_token = memory_view(local, start, length).movedim(rows.dim, 0)
        place = tuple(box.slices[d] for d in other_dims)
        for slab in torch.split(by_token, max(1, _SLAB_ELEMENTS * by_token.shape[0] // by_token.numel())):
            total[place] += slab.double().sum(0).cpu()
    return total
