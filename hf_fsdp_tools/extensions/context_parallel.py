"""Context parallelism: the ranks of a group have the same rows, each with a part of every sequence.

Up to the first block the model's own code runs on whole rows, so embeddings, rotary angles and masks of every kind
(causal, sliding, chunked, packed) are the model's. There each rank cuts out its part of the hidden states. Attention is
the model's own too: two all-to-alls exchange a part of the sequence with all heads for the whole sequence with a part
of the heads, and back (Ulysses, arXiv 2309.14509). Norms, experts, head and loss see the rank's tokens alone.

    rows      input_ids, labels, position_ids: whole, the same on every rank of a group
    part      positions [rank * length / size, (rank + 1) * length / size) of a row
    blocks    the stack of the model's decoder, between whose first and last block hidden states are parts
"""

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce, all_to_all_single_autograd
from transformers import AttentionInterface, PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from hf_fsdp_tools.distributed.mesh import Axes
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.modeling.meta import copy_on_meta, run_on_meta
from hf_fsdp_tools.modeling.module_tree import ModuleTree, replaced
from hf_fsdp_tools.modeling.notes import add_to_note, note_of
from hf_fsdp_tools.planning.stacks import find_blocks
from hf_fsdp_tools.sharding.alike import IGNORED, compare_rows
from hf_fsdp_tools.sharding.phases import Hook, Phase, Surgery, install
from hf_fsdp_tools.sharding.sharding import Feature, Sharding
from hf_fsdp_tools.text import first_line

_WITH_ANY_MASK = ("eager", "sdpa")
"""Attention functions that take a mask of any values: they can attend from a part of a row to the whole row."""

_SUFFIX = "|context_parallel"
"""Ends the names of attention functions that exchange heads, after the name of the model's own function."""

_DEEPSTACK = "_deepstack_process"
"""The method by which decoders of transformers add features of images between blocks (Qwen3-VL)."""


@dataclass(eq=False)
class Rows:
    """The rows that the ranks of a group share, and what is known of those in the forward pass under way."""

    group: dist.ProcessGroup | str | None
    """None where a model on meta is tried, and nothing is communicated; a name where a model is followed on tensors
    without data, and there is no such group."""
    rank: int
    size: int
    is_cut: bool = False
    """Whether the latest forward pass cut its rows; it did not if it had a cache (`generate`)."""
    length: int = 0
    """Tokens of a whole row, without padding of its end to a multiple of the ranks."""
    has_mask: bool = False
    is_causal: bool = True
    """Whether no token attends to later ones, nor to the padding at the end."""
    labels: torch.Tensor | None = None
    """The labels of this rank's part, each of the token after it."""
    num_labels: Any = None
    """What the sum of this rank's losses is divided by."""
    loss_was_computed: bool = False
    former_loss: tuple[Any] | None = None
    """While a pass has labels: the loss function that a user, or a divided head, has set on the model, or None."""
    reached_blocks: bool = False
    """Whether the first block was run."""
    joins_outputs: bool = False
    """Whether outputs are those of whole rows next to a loss too."""
    kept: int | torch.Tensor = 0
    """Which tokens are to have logits: so many last ones, these, or all (0)."""
    angles_follow_length: bool = False
    """Whether rotary angles depend on the largest position of a row."""
    were_compared: bool = False
    """Whether the ranks of the group were seen to have the same rows, which the first pass of a training shows."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Rows":
        """A copied model has its rows in the same group, which cannot be copied."""
        return copy(self)

    @property
    def part_length(self) -> int:
        """Tokens of this rank's part of each row."""
        return math.ceil(self.length / self.size)

    def part(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of a tensor with whole rows."""
        length = tensor.shape[dim] // self.size
        return tensor.narrow(dim, self.rank * length, length).contiguous()

    def whole(self, part: torch.Tensor, dim: int) -> torch.Tensor:
        """The whole rows of which each rank of the group has a part; every rank of it must call."""
        return self._from_all(part.expand(self.size, *part.shape), dim)

    def compare(self, tokens: torch.Tensor) -> None:
        """Refuse different rows on the ranks of the group, in the first pass alone."""
        if not self.were_compared and isinstance(self.group, dist.ProcessGroup):
            self.were_compared = True
            compare_rows(tokens, self.group, "rows (cp_size)")

    def exchange(self, tensor: torch.Tensor, *, cut: int, join: int) -> torch.Tensor:
        """Cut one dimension into a part for each rank, and join the parts of all ranks along another one."""
        return self._from_all(torch.stack(tensor.chunk(self.size, cut)), join)

    def _from_all(self, to_ranks: torch.Tensor, dim: int) -> torch.Tensor:
        counts = [1] * self.size
        received = to_ranks = to_ranks.contiguous()
        if isinstance(self.group, dist.ProcessGroup):
            received = all_to_all_single_autograd(to_ranks, counts, counts, self.group)
        elif self.group is not None:
            received = torch.ops._c10d_functional_autograd.all_to_all_single(to_ranks, counts, counts, self.group)
        return torch.cat(received.unbind(), dim)


def check_rows(model: nn.Module, size: int) -> None:
    """Refuse a model whose rows so many ranks cannot share: it is tried on meta. Nothing is communicated."""
    if problem := _refusal(model, size) or _tried(model, size):
        raise ConfigError(
            f"{type(model).__name__} cannot be trained with cp_size {size}: {problem}. Leave cp_size out; long rows "
            "then need activation checkpointing, offload or more GPUs."
        )


def _refusal(model: nn.Module, size: int) -> str:
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_decoder") or getattr(config, "is_encoder_decoder", False):
        return "it is not a decoder of transformers alone"
    if LOSS_MAPPING.get(getattr(model, "loss_type", None), ForCausalLMLoss) is not ForCausalLMLoss:
        return f"its loss ({model.loss_type}) is not that of the next token"
    for name, part in model.named_modules():
        if name and isinstance(part, PreTrainedModel) and part.get_output_embeddings() is not None:
            return f"its loss is computed of the outputs of {name}, a model with a head of its own"
    blocks = _blocks(model)
    if not blocks:
        return "no stack of blocks was found in its decoder"
    for name, block in blocks.items():
        if any(isinstance(child, nn.Conv1d) for child in block.modules()):
            return f"{name} mixes tokens by a convolution or a recurrence, whose state is not passed between ranks"
        attentions = list(_attentions(block))
        if not attentions:
            return f"{name} ({type(block).__name__}) does not call an attention function of transformers' registry"
        for attention in attentions:
            heads, function = (
                getattr(attention.config, "num_attention_heads", size),
                attention.config._attn_implementation,
            )
            if heads % size and function not in _WITH_ANY_MASK:
                return f"{heads} attention heads of {name} cannot be divided among {size} ranks, as {function} needs"
    return ""


def _tried(model: nn.Module, size: int) -> str:
    """Why a model that runs with whole rows does not run with parts of them, on meta; empty if it does."""
    twin = copy_on_meta(model)
    try:
        run_on_meta(twin, 4 * size)
    except Exception:  # values decide what it computes (experts, images), so nothing can be said
        return ""
    rows = Rows(None, 0, size)
    install(twin, _made(twin, rows))
    try:
        run_on_meta(twin, 4 * size)
    except Exception as error:
        return f"it does not run on a part of a row ({first_line(error)})"
    if not rows.reached_blocks:
        return f"{next(iter(_blocks(model)))} and the blocks after it do not run on the words of a row"
    return ""


class ContextParallel(Feature):
    """The ranks of a mesh with one axis have the same rows of a model.

    In each forward pass without a cache, all must give the same rows. In every block, forward and backward, 4
    all-to-alls of each attention carry (size - 1) / size of this rank's part of queries, keys, values and outputs.
    """

    def divide(self, model: nn.Module, axes: Axes, rules: Mapping[str, Any]) -> None:
        """The model is tried on meta while its layers are whole."""
        if axes.rows is not None:
            check_rows(model, axes.dims.cp_size)

    def check(self, model: nn.Module, tree: ModuleTree, sharding: Sharding) -> None:
        """The model is tried on meta, unless it was before it was divided."""
        if sharding.axes.rows is not None and not sharding.is_divided:
            check_rows(model, sharding.axes.dims.cp_size)

    def hooks(self, model: nn.Module, tree: ModuleTree, sharding: Sharding) -> Iterable[Hook | Surgery]:
        """Rows are cut and joined, and heads exchanged around attention."""
        if (mesh := sharding.axes.rows) is None:
            return ()
        return _made(model, Rows(mesh.get_group(), mesh.get_local_rank(), mesh.size()))


FEATURE = ContextParallel()


def follow_rows(model: nn.Module, size: int) -> list[Hook | Surgery]:
    """Let a model that is followed on tensors without data run as on a rank that shares its rows."""
    return _made(model, Rows("rows", 0, size))


def _made(model: nn.Module, rows: Rows) -> list[Hook | Surgery]:
    blocks = list(_blocks(model).values())
    copies: dict[int, Any] = {}
    exchanges = [_Exchange(attention, rows, copies) for block in blocks for attention in _attentions(block)]
    rows.is_causal = all(getattr(each, "is_causal", True) for block in blocks for each in _attentions(block))
    kinds = [str(getattr(module, "rope_type", "")) for module in model.modules()]
    rows.angles_follow_length = any("dynamic" in kind or "longrope" in kind for kind in kinds)
    decoder: Any = model.get_decoder()  # type: ignore[operator]
    between = [_Replaced(decoder, _DEEPSTACK, rows)] if hasattr(decoder, _DEEPSTACK) else []
    return [
        *exchanges,
        *between,
        Hook(model, Phase.CONTEXT, partial(_own_loss, model, rows)),
        Hook(model, Phase.ROWS, partial(_before_model, rows=rows)),
        *(
            Hook(block, Phase.ROWS, partial(_before_block, rows=rows, is_first=not index))
            for index, block in enumerate(blocks)
        ),
        Hook(decoder, Phase.WHOLE, partial(_after_decoder, rows=rows)),
        Hook(model, Phase.WHOLE, partial(_after_model, rows=rows)),
    ]


def whole_outputs(model: nn.Module) -> AbstractContextManager[None]:
    """A block in which a model gives the outputs of whole rows next to a loss too, which take more memory."""
    found = (rows for module in model.modules() if (rows := note_of(module).rows) is not None)
    return replaced(next(found, Rows(None, 0, 1)), joins_outputs=True)


def _blocks(model: Any) -> dict[str, nn.Module]:
    """The blocks of the decoder's largest stack, and those that the user chose and that attend, by name."""
    decoder = model.get_decoder()
    if decoder is None:
        return {}
    stacks = find_blocks(tree := ModuleTree(decoder))
    blocks = set(max(stacks, key=lambda stack: sum(block.size for block in stack), default=[]))
    chosen = (block for stack in stacks for block in stack if note_of(block.module).is_block)
    blocks.update(block for block in chosen if any(_attentions(block.module)))
    return {block.fqn: block.module for block in tree if block in blocks}


def _attentions(block: nn.Module) -> Iterator[Any]:
    """The modules of a block whose own code looks up transformers' attention functions."""
    for module in block.modules():
        code = inspect.unwrap(type(module).forward).__code__
        if "ALL_ATTENTION_FUNCTIONS" in code.co_names and hasattr(module, "config"):
            yield module


# ---- attention ----


class _Exchange:
    """Lets an attention module look up the function that exchanges heads around its own one, until it is removed.

    The module gets a copy of its config with the name of that function: the model makes masks by its own config.
    """

    def __init__(self, attention: Any, rows: Rows, copies: dict[int, Any]) -> None:
        self._attention, self._config = attention, attention.config
        name = self._config._attn_implementation.removesuffix(_SUFFIX)  # of a copied model
        AttentionInterface.register(name + _SUFFIX, partial(_attend, inner=name))
        add_to_note(attention, rows=rows)
        attention.config = copies.setdefault(id(self._config), copy(self._config))
        attention.config._attn_implementation_internal = name + _SUFFIX

    def remove(self) -> None:
        """Give the module its own config back."""
        add_to_note(self._attention, rows=None)
        self._attention.config = self._config


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *args: Any,
    inner: str,
    **kwargs: Any,
) -> Any:
    """Attention of whole rows with a part of the heads, in place of a part of the rows with all heads.

    Queries, keys and values are (batch, heads, tokens, width); the result is (batch, tokens, heads, width).
    """
    functions = inspect.unwrap(type(module).forward).__globals__
    attend = functions["ALL_ATTENTION_FUNCTIONS"].get(inner, functions.get("eager_attention_forward"))
    rows: Rows | None = note_of(module).rows
    if rows is None or not rows.is_cut:
        return attend(module, query, key, value, attention_mask, *args, **kwargs)
    heads, groups = query.shape[1], key.shape[1]
    if query.shape[2] != key.shape[2]:
        raise ConfigError(
            f"{type(module).__name__} attends from {query.shape[2]} to {key.shape[2]} tokens: with cp_size {rows.size} "
            "only attention of a row to itself is possible."
        )
    if heads % rows.size:
        key, value = (rows.whole(tensor, 2) for tensor in (key, value))
        attention_mask = _mask_of_part(module, query, attention_mask, rows, is_added=inner == "eager")
        return attend(module, query, key, value, attention_mask, *args, **kwargs)
    if copies := rows.size // math.gcd(groups, rows.size) - 1:  # fewer key heads than ranks: each to several
        key, value = (tensor.repeat_interleave(copies + 1, 1) for tensor in (key, value))
    query, key, value = (rows.exchange(tensor, cut=1, join=2) for tensor in (query, key, value))
    own = slice(rows.rank * heads // rows.size, (rows.rank + 1) * heads // rows.size)
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 4 and attention_mask.shape[1] == heads:
        attention_mask = attention_mask[:, own]
    kwargs = {name: _of_heads(value, heads, own) for name, value in kwargs.items()}
    seen = _OfHeads(module, heads, own, num_key_value_groups=query.shape[1] // key.shape[1])
    output, _ = attend(seen, query, key, value, attention_mask, *args, **kwargs)
    return rows.exchange(output, cut=1, join=2), None


def _mask_of_part(module: Any, query: torch.Tensor, mask: Any, rows: Rows, *, is_added: bool) -> Any:
    """The rows of a mask that are of this rank's tokens; the causal one where the model leaves it to the function."""
    if isinstance(mask, torch.Tensor):
        return rows.part(mask, -2) if mask.shape[-2] > 1 else mask
    if not getattr(module, "is_causal", False):
        return None
    length = query.shape[2] * rows.size
    mask = rows.part(torch.ones(length, length, dtype=torch.bool, device=query.device).tril(), 0)[None, None]
    return torch.where(mask, 0.0, torch.finfo(query.dtype).min).to(query.dtype) if is_added else mask


def _of_heads(value: Any, heads: int, own: slice) -> Any:
    """The values of some heads, of a vector with one value per head (sinks)."""
    return value[own] if isinstance(value, torch.Tensor) and value.dim() == 1 and len(value) == heads else value


class _OfHeads:
    """An attention module as its function sees it that computes some of the heads."""

    def __init__(self, module: nn.Module, heads: int, own: slice, **replaced: Any) -> None:
        self.__dict__ |= {"_module": module, "_heads": heads, "_own": own, **replaced}

    def __getattr__(self, name: str) -> Any:
        return _of_heads(getattr(self._module, name), self._heads, self._own)


# ---- rows and parts ----


class _Replaced:
    """Lets a decoder add what it saw of images to the hidden states of this rank's tokens, until it is removed."""

    def __init__(self, decoder: Any, name: str, rows: Rows) -> None:
        self._decoder, self._name = decoder, name
        setattr(decoder, name, partial(_add_to_part, getattr(decoder, name), rows=rows))

    def remove(self) -> None:
        """Give the decoder its own method back."""
        delattr(self._decoder, self._name)


def _add_to_part(
    inner: Callable[..., torch.Tensor], hidden: torch.Tensor, is_image: Any, images: torch.Tensor, *, rows: Rows
) -> torch.Tensor:
    """Add the features of the images' tokens, which are in the order of those of whole rows."""
    if not rows.is_cut:
        return inner(hidden, is_image, images)
    is_own = rows.part(is_image, 1)
    places = rows.part(is_image.flatten().cumsum(0).view_as(is_image) - 1, 1)
    return inner(hidden, is_own, images[places[is_own]])


def _before_model(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, rows: Rows) -> Any:
    """Pad whole rows to a multiple of the ranks, and take this rank's part of the labels."""
    given = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | kwargs
    rows.is_cut = given.get("past_key_values") is None and not given.get("use_cache")
    if not rows.is_cut:
        return args, kwargs
    tokens = next((given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None), None)
    if tokens is None or given.get("return_dict") is False:
        raise ConfigError("With cp_size, a model is called with input_ids or inputs_embeds, and returns no tuple.")
    rows.compare(tokens)
    rows.length, rows.has_mask = tokens.shape[1], given.get("attention_mask") is not None
    rows.labels, rows.loss_was_computed = None, False
    if rows.length % rows.size and not (rows.has_mask or rows.is_causal):  # tokens would attend to the padding
        given["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
    if rows.length % rows.size and rows.angles_follow_length and given.get("position_ids") is None:
        given["position_ids"] = torch.arange(rows.length, device=tokens.device).expand(tokens.shape[0], -1)
    given = {name: _padded(name, value, rows) for name, value in given.items()} | {"use_cache": False}
    rows.kept = given.pop("logits_to_keep", 0)
    labels, shifted = given.get("labels"), given.pop("shift_labels", None)
    if shifted is None and labels is None:
        return (), given
    if not isinstance(rows.kept, int) or rows.kept:
        raise ConfigError("With cp_size, logits_to_keep is for passes without labels. Leave one of them out.")
    if shifted is None:
        assert labels is not None
        shifted = nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:]
    rows.labels = rows.part(shifted, 1)
    # The mean over all ranks, of losses and of gradients, is then that of the whole rows.
    count = given.pop("num_items_in_batch", None)
    rows.num_labels = ((shifted != IGNORED).sum() if count is None else count) / rows.size
    given["labels"] = rows.labels
    accepted = inspect.signature(model.forward).parameters
    if "shift_labels" in accepted or any(each.kind is each.VAR_KEYWORD for each in accepted.values()):
        given |= {"shift_labels": rows.labels, "num_items_in_batch": rows.num_labels}
    rows.former_loss = (model.__dict__.get("_loss_function"),)
    model.loss_function = partial(_loss_of_part, model.loss_function, rows=rows)
    return (), given


def _padded(name: str, value: Any, rows: Rows) -> Any:
    """An input with whole rows, made longer at its end so that the ranks divide it; other inputs as they are."""
    missing = -rows.length % rows.size
    if not missing or not isinstance(value, torch.Tensor) or not value.dim():
        return value
    if name == "inputs_embeds":
        return nn.functional.pad(value, (0, 0, 0, missing))
    if value.dim() == 4 and name == "attention_mask":  # the padding attends to what the last token does, and none to it
        hidden = torch.finfo(value.dtype).min if value.is_floating_point() else 0
        places = torch.arange(rows.length + missing, device=value.device).clamp(max=value.shape[-2] - 1)
        return nn.functional.pad(value[..., places, :], (0, missing), value=hidden)
    if value.shape[-1] != rows.length or value.dim() not in (2, 3):
        return value
    if name == "position_ids":  # a document of its own, which makes no row longer: some rotary angles follow the length
        return torch.cat([value, torch.arange(missing, device=value.device).expand(*value.shape[:-1], -1)], -1)
    return nn.functional.pad(value, (0, missing), value=IGNORED if "labels" in name else 0)


def _loss_of_part(inner: Callable[..., torch.Tensor], *args: Any, rows: Rows, **kwargs: Any) -> torch.Tensor:
    """The loss of this rank's tokens, divided by the number of tokens of the whole rows."""
    rows.loss_was_computed = True
    loss: torch.Tensor = inner(*args, **kwargs | {"shift_labels": rows.labels, "num_items_in_batch": rows.num_labels})
    return loss


def _before_block(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, rows: Rows, is_first: bool
) -> Any:
    """Cut what belongs to tokens; masks stay whole, as attention takes whole rows."""
    if not rows.is_cut:
        return args, kwargs
    rows.reached_blocks = True
    names = list(inspect.signature(type(block).forward).parameters)[1:]
    given = dict(zip(names, args, strict=False)) | kwargs
    hidden = given[names[0]]
    length = hidden.shape[1] * (1 if is_first else rows.size)
    if length != rows.part_length * rows.size:
        raise ConfigError(
            f"{type(block).__name__} takes {length} tokens of rows with {rows.length}: with cp_size {rows.size}, it "
            "must see the words of a row and nothing else. Leave cp_size out."
        )
    given[names[0]] = rows.part(hidden, 1) if is_first else hidden
    has_angles = given.get("position_embeddings") is not None
    for name, value in given.items():
        if name == names[0] or "mask" in name or (name == "position_ids" and has_angles):
            continue  # attention alone takes position ids then, to find packed rows
        given[name] = _cut(name, value, length, rows)
    return (), given


def _cut(name: str, value: Any, length: int, rows: Rows) -> Any:
    """An argument of a block as it is of this rank's tokens."""
    if isinstance(value, tuple | list):
        return type(value)(_cut(name, each, length, rows) for each in value)
    if isinstance(value, Mapping):
        return {key: _cut(name, each, length, rows) for key, each in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    dim = {"position_embeddings": -2, "position_ids": -1, "cache_position": 0}.get(name, 1)
    return rows.part(value, dim) if -value.dim() <= dim < value.dim() and value.shape[dim] == length else value


def _after_decoder(decoder: nn.Module, args: object, output: Any, *, rows: Rows) -> Any:
    """Join what routers said of each token, of which the loss that balances experts takes means over whole rows."""
    logits = getattr(output, "router_logits", None)
    if rows.is_cut and logits:
        parts = (each.reshape(-1, rows.part_length, each.shape[-1]) for each in logits)
        seen = None if rows.has_mask else rows.length  # a mask leaves the padding out by itself
        output.router_logits = tuple(rows.whole(each, 1)[:, :seen].reshape(-1, each.shape[-1]) for each in parts)
    return output


def _after_model(model: nn.Module, args: object, output: Any, *, rows: Rows) -> Any:
    """Let every rank of the group see the outputs and the loss of whole rows; next to a loss, not logits."""
    if not rows.is_cut:
        return output
    has_labels, rows.labels = rows.labels is not None, None
    for name, part in list(output.items()):
        is_of_tokens = isinstance(part, torch.Tensor) and part.dim() > 1 and part.shape[1] == rows.part_length
        if is_of_tokens and (part.dim() == 2 or not has_labels or rows.joins_outputs):
            output[name] = rows.whole(part, 1)[:, : rows.length].contiguous()
    if not isinstance(rows.kept, int) or rows.kept:
        kept = slice(-rows.kept, None) if isinstance(rows.kept, int) else rows.kept
        output["logits"] = output["logits"][:, kept].contiguous()
    if (routed := getattr(output, "router_logits", None)) and rows.has_mask:  # without the padding
        of_rows = (each.view(-1, rows.part_length * rows.size, each.shape[-1])[:, : rows.length] for each in routed)
        output["router_logits"] = tuple(each.reshape(-1, each.shape[-1]) for each in of_rows)
    if not has_labels or getattr(output, "loss", None) is None:
        return output
    if not rows.loss_was_computed and type(model).forward is getattr(model.forward, "__func__", None):
        raise ConfigError(
            f"{type(model).__name__} computes its loss by itself, not by transformers' loss_function: with cp_size it "
            "would be that of a part of the rows."
        )
    mean = output.loss.detach()
    mean = all_reduce(mean, "sum", rows.group) if isinstance(rows.group, dist.ProcessGroup) else mean * rows.size
    # the value of whole rows, and the gradient of this rank's part
    output.loss = output.loss + (mean / rows.size - output.loss.detach())
    return output


@contextmanager
def _own_loss(model: Any, rows: Rows) -> Iterator[None]:
    """A forward pass, after which the model has its own loss function again, also if it failed."""
    try:
        yield
    finally:
        if rows.former_loss is not None:
            model.__dict__.pop("_loss_function", None)
            if rows.former_loss[0] is not None:
                model.loss_function = rows.former_loss[0]
            rows.former_loss = None
