"""Rows that hold several documents attend by torch's kernel for lengths that vary: no mask of tokens by tokens is made.

transformers finds the documents in `position_ids` that begin anew, and describes a mask by a function of two tokens. On
a GPU, or where ranks share rows, a decoder whose attention is sdpa gets a pair of transformers' interface in its place:
a function that makes the list of documents of that description, where it is one, and an attention function that takes
this list. Rows of one document, padded ones, and caches stay with sdpa.
"""

import inspect
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_fsdp_tools.accelerator import runs_documents
from hf_fsdp_tools.extensions.readers import Reads
from hf_fsdp_tools.modeling.module_tree import ModuleTree
from hf_fsdp_tools.modeling.notes import Chosen
from hf_fsdp_tools.sharding.sharding import Feature, Sharding

_NAME = "sdpa|documents"
"""The name of the pair in transformers' interface."""

_DTYPES = (torch.bfloat16, torch.float16)
"""The kernel's."""

_WIDEST, _MULTIPLE = 256, 8
"""The widest heads of the kernel (source: the same); zeros pad others to a multiple, and change no product."""

_GROUPS = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
"""Before torch 2.13, heads of keys may be fewer without it."""


class Documents(NamedTuple):
    """The documents in the rows of a batch, laid one after the other, each of which attends to itself causally."""

    starts: torch.Tensor
    """Where they begin, and where the last one ends: int32, on the device of the rows."""
    longest: int
    window: int | None
    """How many tokens each sees, itself included; None for all before it."""

    def mask_function(self, rows: int, length: int) -> Any:
        """Whether one token sees another, as transformers describes masks."""
        places = torch.arange(rows * length, device=self.starts.device)
        document = torch.bucketize(places, self.starts[1:], right=True).view(rows, length)
        window = length if self.window is None else self.window
        return lambda row, head, q, kv: (document[row, q] == document[row, kv]) & (kv <= q) & (q - kv < window)


def documents_or_mask(**given: Any) -> Any:
    """The `Documents` of a mask that transformers describes, or its mask for sdpa: None, or a tensor.

    A causal mask, one within windows, and one within chunks are lists of documents: they follow from whether each
    token sees the one before it, and none after it. The host waits for the device once, and for a mask that leaves no
    token out once more.
    """
    size, rows, device = given["q_length"], given["batch_size"], torch.device(given["device"])
    local = given.get("local_size")
    is_simple = given.get("allow_is_causal_skip", True) and (local is None or size < local)
    is_described = not given.get("use_vmap") and size == given["kv_length"] > 1
    if is_simple or not is_described or device.type == "meta" or torch.compiler.is_compiling():
        return sdpa_mask(**given)
    if (words := given.get("attention_mask")) is not None and not words.all():
        return sdpa_mask(**given)
    row, place = torch.arange(rows, device=device)[:, None], torch.arange(size, device=device)
    one, other = torch.stack([place[1:], place[:-1]])[:, None], torch.stack([place[:-1], place[1:]])[:, None]
    before, after = given["mask_function"](row, torch.zeros_like(row), one, other).expand(2, rows, -1).cpu()
    if after.any():
        return sdpa_mask(**given)
    starts = nn.functional.pad(~before, (1, 0), value=True).flatten().nonzero().flatten()
    starts = nn.functional.pad(starts, (0, 1), value=rows * size).to(torch.int32)
    longest = int(starts.diff().max())
    return Documents(
        starts.to(device, non_blocking=True), longest, local if local is not None and local < longest else None
    )


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> Any:
    """Attention of documents, or sdpa's. Queries, keys and values are (rows, heads, tokens, width); the result is
    (rows, tokens, heads, width).

    What the kernel lacks, sdpa does: document by document (fp32, heads wider than 256, devices without the kernel), or
    with a mask (dropout, biases).
    """
    if not isinstance(attention_mask, Documents):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = (each.to(torch.get_autocast_dtype(query.device.type)) for each in (query, key, value))
    rows, _, length, width = query.shape
    needs_mask = dropout > 0 or kwargs.get("position_bias") is not None
    padded = -(-max(width, value.shape[-1]) // _MULTIPLE) * _MULTIPLE
    if needs_mask:
        sees = attention_mask.mask_function(rows, length)
        sizes = {"batch_size": rows, "q_length": length, "kv_length": length}
        mask = sdpa_mask(**sizes, mask_function=sees, allow_is_causal_skip=False, device=query.device)
        return sdpa_attention_forward(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)
    if padded > _WIDEST or query.dtype not in _DTYPES or not runs_documents(query.device.type):
        one_by_one = _one_by_one(query, key, value, attention_mask, scaling)
        return one_by_one.view(rows, length, *one_by_one.shape[1:]), None
    flat = [each.transpose(1, 2).flatten(0, 1) for each in (query, key, value)]
    if not all(each.shape[-1] == padded for each in flat):
        flat = [nn.functional.pad(each, (0, padded - each.shape[-1])) for each in flat]
    run: Any = varlen_attn  # whose arguments depend on the version of torch
    output = run(
        *flat,
        attention_mask.starts,
        attention_mask.starts,
        attention_mask.longest,
        attention_mask.longest,
        scale=width**-0.5 if scaling is None else scaling,
        window_size=(-1 if attention_mask.window is None else attention_mask.window - 1, 0),
        **_GROUPS,
    )
    return output.unflatten(0, (rows, length))[..., : value.shape[-1]].contiguous(), None


def _one_by_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents, scaling: float | None
) -> torch.Tensor:
    """Attention of each document by sdpa, (tokens, heads, width); of a window so many queries at a time."""
    groups = query.shape[1] // key.shape[1]
    flat = [each.transpose(0, 1).flatten(1, 2) for each in (query, key, value)]
    flat[1:] = [each.repeat_interleave(groups, 0) if groups > 1 else each for each in flat[1:]]
    parts = []
    for first, last in pairwise(documents.starts.tolist()):
        window = documents.window or last - first
        for start in range(first, last, window):
            end, begin = min(start + window, last), max(first, start + 1 - window)
            sees = None
            if begin < start:
                sees = torch.ones(end - start, end - begin, dtype=torch.bool, device=query.device).tril(start - begin)
                sees &= ~sees.tril(start - begin - window)
            own, keys, values = flat[0][:, start:end], flat[1][:, begin:end], flat[2][:, begin:end]
            part = sdpa(own[None], keys[None], values[None], sees, is_causal=sees is None, scale=scaling)
            parts.append(part[0].transpose(0, 1))
    return torch.cat(parts)


class PackedRows(Feature):
    """A decoder whose attention is sdpa by default keeps documents of a row apart without a mask: on a GPU with the
    kernel, and where ranks share rows."""

    def before_units(self, model: nn.Module, tree: ModuleTree, sharding: Sharding) -> None:
        """The configs name the pair; those of a copied model do so as well."""
        ranks = sharding.axes.dims.cp_size
        for config in configs_of_documents(model, ranks):
            config._attn_implementation_internal = _NAME


def configs_of_documents(model: Any, ranks: int) -> list[Any]:
    """The configs of a decoder and of the models around it; none where attention is to stay as it is."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    inside = set(decoder.modules()) if isinstance(decoder, PreTrainedModel) else set()
    models = [each for each in model.modules() if isinstance(each, PreTrainedModel)]
    models = [each for each in models if each in inside or any(below is decoder for below in each.modules())]
    attentions = [*_attentions(inside)]
    configs = list({id(each.config): each.config for each in (*models, *attentions)}.values())
    # Models that hand a mask of flex_attention on do not look into it.
    is_left = any(Chosen.of(each).has_attention or not each._supports_flex_attn for each in models)
    is_other = any(config._attn_implementation != "sdpa" for config in configs)
    # Context parallelism divides the heads; where it cannot, ranks attend from a part of a row by a part of the mask.
    heads = [getattr(each.config, "num_attention_heads", ranks) for each in attentions]
    is_left |= any(Reads.of(each).way for each in inside)
    is_causal = attentions and all(getattr(each, "is_causal", False) for each in attentions)
    return configs if is_causal and not (is_left or is_other or any(each % ranks for each in heads)) else []


def _attentions(modules: set[nn.Module]) -> Iterator[Any]:
    """The modules whose own code looks up transformers' attention functions."""
    for module in modules:
        code = inspect.unwrap(type(module).forward).__code__
        if "ALL_ATTENTION_FUNCTIONS" in code.co_names and hasattr(module, "config"):
            yield module


AttentionInterface.register(_NAME, attend)
AttentionMaskInterface.register(_NAME, documents_or_mask)
FEATURE = PackedRows()
