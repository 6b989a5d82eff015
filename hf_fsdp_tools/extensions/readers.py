"""Modules that read other tokens than the one they compute: how they run where each rank has a part of every row.

A module is known as a reader by its look: it is given a mask or a cache, it calls transformers' attention functions, or
it has a convolution. Where its code calls functions that are known here, two all-to-alls around each call exchange a
part of the sequence with all heads for the whole sequence with a part of the heads, and back (Ulysses, arXiv
2309.14509; of convolutions and state spaces, channels), so that its own code and kernels run on whole rows. Attention
that has an indexer, or makes a mask of its values, takes the keys of whole rows as those of a cache in `generate`. Any
other reader is given whole rows on every rank of the group, each of which keeps its part of what comes out.
"""

import dis
import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.extensions.rows import BOUNDARIES, Rows, called_instead, of_tokens
from hf_fsdp_tools.modeling.arguments import CACHES
from hf_fsdp_tools.modeling.configs import config_of_layer
from hf_fsdp_tools.modeling.notes import Divided, Note
from hf_fsdp_tools.sharding.phases import Hook, Phase, Undo

_WITH_ANY_MASK = ("eager", "sdpa")
"""Attention functions that take a mask of any values: they can attend from a part of a row to the whole row."""

_ATTENTION = "ALL_ATTENTION_FUNCTIONS"
_CONVOLUTION = "causal_conv1d_fn"
_ALONG_ROWS = {
    _CONVOLUTION: (1, 2),
    "mamba_selective_scan": (1, 2),
    "mamba2_chunk_scan": (2, 1),
    "torch_chunk_gated_delta_rule": (2, 1),
    "chunk_kimi_delta_attention": (2, 1),
}
"""Functions of transformers that run along rows, with the dimensions of heads (or channels) and of tokens."""
KEYS = frozenset(CACHES)
"""The argument by which attention is given the keys of whole rows, where its code would not attend from them all."""
_FUSED = ("mamba_inner_fn", "mamba2_split_conv1d_scan_combined")
"""Kernels for a whole module, which then runs in steps, as it does where there is no such kernel."""


# ---- finding ----


@dataclass(frozen=True)
class Reads(Note):
    """How a module runs under context parallelism that was tried and does not run as it looks."""

    way: str = ""
    """With the "keys" of whole rows, or with whole "rows". A decoder has here what it does after its blocks."""
    enters_cut: bool = False
    """Whether a decoder, and the models around it, run on own tokens up to its first block."""


def find_readers(module: nn.Module, size: int) -> Iterator[tuple[Any, frozenset[str]]]:
    """Yield the readers below a module, each with the functions around which so many ranks exchange heads, or with the
    cache that gathers keys.

    With nothing, it is given whole rows; and then a reader around it too, whose own code would mix parts with them.
    """
    for child in module.children():
        inner, functions = list(find_readers(child, size)), _functions(type(child).forward)
        if takes_cache(child) or functions or _convolutions(child) or _takes(child, "att.*mask"):
            if Reads.of(child).way == "keys":
                yield child, KEYS
                continue
            is_known = bool(functions or inner) and all(way for _, way in inner)
            if not is_known or _needs_whole_rows(child, functions, size):
                yield child, frozenset()
                continue
            if functions:
                yield child, functions
        yield from inner


def heads_shared_in(block: nn.Module) -> Iterator[int]:
    """Yield how many heads each attention below a block has that calls transformers' attention functions."""
    for module in block.modules():
        if _ATTENTION in _functions(type(module).forward):
            heads = getattr(config_of_layer(module), "num_attention_heads", None)
            if isinstance(heads, int):
                yield heads


def may_read_keys(module: Any, way: frozenset[str]) -> bool:
    """Whether a reader may be tried with the keys of whole rows: attention that takes a cache and any mask."""
    is_attention = _ATTENTION in _functions(type(module).forward) and hasattr(module, "config")
    takes_both = len({*KEYS, "attention_mask"} & {*_parameters(type(module).forward)}) == 2
    is_tried = way == KEYS or Reads.of(module).way
    return is_attention and takes_both and not is_tried and module.config._attn_implementation in _WITH_ANY_MASK


def takes_cache(module: nn.Module) -> bool:
    """Whether `generate` hands a module what it will read again."""
    return _takes(module, "past|cache|^mems$|^state$")


def _takes(module: nn.Module, pattern: str) -> bool:
    return any(re.search(pattern, name) for name in _parameters(type(module).forward))


def mixes_tokens_itself(block: nn.Module) -> bool:
    """Whether a block has a convolution of its own, and not in a module below it."""
    return bool(_convolutions(block))


def _needs_whole_rows(module: Any, functions: frozenset[str], size: int) -> bool:
    is_replaced = "forward" in vars(module) and Divided.of(module).style is None  # by a kernel for the whole module
    if is_replaced or Reads.of(module).way or (_convolutions(module) and _CONVOLUTION not in functions):
        return True
    if _ATTENTION not in functions:
        return False
    config = config_of_layer(module)
    if config is None or len(functions) > 1:
        return True
    function = config._attn_implementation
    return bool(getattr(config, "num_attention_heads", size) % size) and function not in _WITH_ANY_MASK


def _convolutions(module: nn.Module) -> list[nn.Module]:
    """The convolutions of a module along its rows, but those whose own code calls the function known for it."""
    convolutions = (child for child in module.children() if isinstance(child, nn.Conv1d))
    return [each for each in convolutions if each.kernel_size != (1,) and not _functions(type(each).forward)]


@cache
def _functions(forward: Callable[..., Any]) -> frozenset[str]:
    """The names in the code of a module by which it calls functions that are known here."""
    code = inspect.unwrap(forward).__code__
    names = {each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"}
    return frozenset(names & {_ATTENTION, *_ALONG_ROWS})


@cache
def _parameters(forward: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(forward).parameters)[1:]


# ---- hooks ----


def hooks_of_readers(blocks: Iterable[nn.Module], rows: Rows) -> Iterator[Hook | Undo]:
    """Yield what lets the readers of blocks run on whole rows; it also finds whether none of them sees later tokens."""
    readers = {module: functions for block in blocks for module, functions in find_readers(block, rows.size)}
    rows.is_causal = all(_is_causal(below) for module in readers for below in module.modules())
    of_files: dict[int, dict[str, Any]] = {}
    for module, functions in readers.items():
        if not functions:
            yield Hook(module, Phase.ROWS, partial(_join_inputs, rows=rows))
            yield Hook(module, Phase.WHOLE, partial(_cut_outputs, rows=rows))
            continue
        if functions == KEYS:
            yield Hook(module, Phase.ROWS, partial(_give_keys, rows=rows))
            continue
        known = inspect.unwrap(type(module).forward).__globals__
        own = of_files.setdefault(id(known), _of_part_of_heads_in(known, rows))
        yield Hook(module, Phase.CONTEXT, partial(called_instead, known, own, lambda: rows.is_cut))
        if _ATTENTION not in functions:
            yield Hook(module, Phase.ROWS, partial(_cut_masks, rows=rows))


def _of_part_of_heads_in(known: Mapping[str, Any], rows: Rows) -> dict[str, Any]:
    """What is called in place of the functions that are known here, by the names that a file has of these."""
    own: dict[str, Any] = {
        name: partial(_along_rows, inner=known[name], name=name, rows=rows) for name in _ALONG_ROWS if name in known
    }
    own |= {name: _no_kernel for name in _FUSED if name in known}
    return own | ({_ATTENTION: _Attentions(known[_ATTENTION], rows)} if _ATTENTION in known else {})


class _KeysOfRows:
    """A cache with the keys of whole rows: those that attention makes of this rank's tokens, and of all others."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def update(self, *states: Any, **options: Any) -> Any:
        """The states of all tokens, for those of a part: keys and values, or what they are made of."""
        return tuple(map(self.update_indexer, (each for each in states if isinstance(each, torch.Tensor))))

    def update_indexer(self, keys: torch.Tensor, *layer: Any) -> torch.Tensor:
        """The keys of an indexer, of all tokens without the padding."""
        return self._rows.whole(keys, -2).narrow(-2, 0, self._rows.length)


def _give_keys(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, rows: Rows) -> Any:
    """Let attention run from a part of a row to whole rows, as it does from new tokens to those of a cache."""
    if not rows.is_cut:
        return args, kwargs
    names = _parameters(type(module).forward)
    given = dict(zip(names, args, strict=False)) | kwargs | dict.fromkeys(KEYS.intersection(names), _KeysOfRows(rows))
    is_added = module.config._attn_implementation == "eager"
    mask = _mask_of_part(module, given[names[0]], given.get("attention_mask"), rows, is_added=is_added)
    return (), given | {"attention_mask": None if mask is None else mask[..., : rows.length]}


def _is_causal(module: nn.Module) -> bool:
    return bool(getattr(module, "is_causal", getattr(module, "is_decoder", True)))


def _join_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, rows: Rows) -> Any:
    """Whole rows for a reader, without padding: indexers choose others of equal scores in longer rows.

    Masks are whole already, and so are the positions that its block was given.
    """

    def whole(name: str, value: Any) -> Any:
        if name == "position_ids" and value is not None and value.shape[-1] == rows.part_length:
            value = rows.positions(value)
        elif "mask" not in name:
            value = of_tokens(name, value, rows.part_length, rows.whole)
        return _unpadded(name, value, rows) if rows.length % rows.size else value

    if not rows.is_cut:
        return args, kwargs
    names = _parameters(type(module).forward)
    return (
        tuple(whole(name, value) for name, value in zip(names, args, strict=False)),
        {name: whole(name, value) for name, value in kwargs.items()},
    )


def _unpadded(name: str, value: Any, rows: Rows) -> Any:
    """An argument of whole rows without their padded end, which a bias of pairs of tokens has in each dimension."""
    padded = rows.part_length * rows.size
    if name.startswith(BOUNDARIES) and value is not None:
        return value[:-1]
    if "distance" in name and isinstance(value, torch.Tensor):  # of pairs, without rows of a batch (Inkling 2 Loop)
        return value[..., : rows.length, : rows.length]
    if "mask" in name and not isinstance(value, torch.Tensor | Mapping | None):
        raise ConfigError(
            f"{name} is a {type(value).__name__}: with cp_size {rows.size}, some modules of this model take it in rows "
            f"of a multiple of {rows.size} tokens alone. Pad rows to one, or use attn_implementation='eager'."
        )
    cut = of_tokens(name, value, padded, lambda tensor, dim: tensor.narrow(dim, 0, rows.length).contiguous())
    if cut is value and isinstance(value, torch.Tensor):
        for dim in range(1, value.dim()):
            cut = cut.narrow(dim, 0, rows.length) if value.shape[dim] == padded else cut
    return cut


def _cut_outputs(module: nn.Module, args: object, output: Any, *, rows: Rows) -> Any:
    """This rank's part of what a reader made of whole rows, of which it alone gets gradients."""
    missing = -rows.length % rows.size

    def part(whole: torch.Tensor, dim: int) -> torch.Tensor:
        return rows.part(nn.functional.pad(whole, (0, 0) * (whole.dim() - dim - 1) + (0, missing)), dim)

    return of_tokens("", output, rows.length, part) if rows.is_cut else output


# ---- convolutions and recurrences ----


def _no_kernel(*args: object, **kwargs: object) -> None:
    """What transformers' function for a fused kernel gives where there is none."""


def _cut_masks(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, rows: Rows) -> Any:
    """A mask with a value for each token becomes that of this rank's tokens."""
    if rows.is_cut:
        length = rows.part_length * rows.size
        kwargs = {n: of_tokens(n, v, length, rows.part) if "mask" in n else v for n, v in kwargs.items()}
    return args, kwargs


def _along_rows(*args: Any, inner: Any, name: str, rows: Rows, **kwargs: Any) -> Any:
    """A function that runs along rows, with a part of the heads on each rank.

    What has fewer heads is of groups of heads if heads come last, and of all channels if tokens do; vectors and
    matrices that begin with the heads are weights.
    """
    heads, tokens = _ALONG_ROWS[name]
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    of_heads = [value for value in given if value.dim() > 2 and value.shape[tokens] == rows.part_length]
    most = max(value.shape[heads] for value in of_heads)

    def own(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if any(value is each for each in of_heads):
            if value.shape[heads] != most and tokens > heads:
                return rows.whole(value, tokens)
            copies = rows.size // math.gcd(value.shape[heads], rows.size)
            if most % (value.shape[heads] * copies):
                raise ConfigError(f"{most} heads cannot be divided among {rows.size} ranks")
            value = value.repeat_interleave(copies, heads) if copies > 1 else value
            return rows.exchange(value, cut=heads, join=tokens)
        if value.dim() == 2 and value.shape[1] == rows.part_length and not value.is_floating_point():
            return rows.whole(value, 1)  # to which document a token belongs
        is_weight = 0 < value.dim() < 3 and value.shape[0] == most and value.is_floating_point()
        return rows.part(value, 0) if is_weight else value

    result = inner(*map(own, args), **{key: own(value) for key, value in kwargs.items()})
    output, *others = result if isinstance(result, tuple) else (result,)
    output = rows.exchange(output, cut=tokens, join=heads)
    return (output, *others) if isinstance(result, tuple) else output


# ---- attention ----


class _Attentions:
    """Transformers' attention functions as the code of a module looks them up, each with a part of the heads."""

    def __init__(self, known: Any, rows: Rows) -> None:
        self._known, self._rows = known, rows

    def get_interface(self, name: str, *default: Any) -> Any:
        """The function of a name, or the file's own one."""
        return partial(_attend, inner=self._known.get_interface(name, *default), name=name, rows=self._rows)

    def get(self, name: str, *default: Any) -> Any:
        """As `get_interface`."""
        return partial(_attend, inner=self._known.get(name, *default), name=name, rows=self._rows)

    def __getitem__(self, name: str) -> Any:
        return partial(_attend, inner=self._known[name], name=name, rows=self._rows)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *args: Any,
    inner: Callable[..., Any],
    name: str,
    rows: Rows,
    **kwargs: Any,
) -> Any:
    """Attention of whole rows with a part of the heads, in place of a part of the rows with all heads.

    Queries, keys and values are (batch, heads, tokens, width); the result is (batch, tokens, heads, width).
    """
    if kwargs.get("position_ids") is not None:
        kwargs["position_ids"] = rows.positions(kwargs["position_ids"])
    heads, groups = query.shape[1], key.shape[1]
    if query.shape[2] != key.shape[2]:
        raise ConfigError(
            f"{type(module).__name__} attends from {query.shape[2]} to {key.shape[2]} tokens: with cp_size {rows.size} "
            "only attention of a row to itself is possible."
        )
    if heads % rows.size:
        key, value = (rows.whole(tensor, 2) for tensor in (key, value))
        attention_mask = _mask_of_part(module, query, attention_mask, rows, is_added=name == "eager")
        return inner(module, query, key, value, attention_mask, *args, **kwargs)
    if copies := rows.size // math.gcd(groups, rows.size) - 1:  # fewer key heads than ranks: each to several
        key, value = (tensor.repeat_interleave(copies + 1, 1) for tensor in (key, value))
    query, key, value = (rows.exchange(tensor, cut=1, join=2) for tensor in (query, key, value))
    own = slice(rows.rank * heads // rows.size, (rows.rank + 1) * heads // rows.size)
    if isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 4 and attention_mask.shape[1] == heads:
        attention_mask = attention_mask[:, own]
    kwargs = {name: _of_heads(value, heads, own) for name, value in kwargs.items()}
    seen = _OfHeads(module, heads, own, num_key_value_groups=query.shape[1] // key.shape[1])
    output, _ = inner(seen, query, key, value, attention_mask, *args, **kwargs)
    return rows.exchange(output, cut=1, join=2), None


def _mask_of_part(module: Any, query: torch.Tensor, mask: Any, rows: Rows, *, is_added: bool) -> Any:
    """The rows of a mask that are of this rank's tokens; the causal one where the model leaves it to the function."""
    if isinstance(mask, torch.Tensor):
        return rows.part(mask, -2) if mask.shape[-2] > 1 else mask
    if mask is not None:
        raise ConfigError(
            f"{type(module).__name__} is given a mask of the form {type(mask).__name__}, of which no rank can take a "
            "part (cp_size). Use attn_implementation='eager'."
        )
    if not getattr(module, "is_causal", False):
        return None
    shape = (rows.part_length, rows.part_length * rows.size)
    mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril(rows.rank * rows.part_length)[None, None]
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
