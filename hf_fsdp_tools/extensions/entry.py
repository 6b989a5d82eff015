"""From a model's entry to its first block, where each rank has a part of every row: its own code runs on own tokens.

Ids and positions are cut when the model is called, before anything is embedded. What its code makes of all tokens of a
row is made of whole rows of integers: masks by transformers' functions, places of images and positions that follow them
by methods of models that read images. Nothing of whole rows has the width of hidden states.

    entry          ids, positions, and embeddings that a caller made, are cut
    whole          ids where images are looked for, masks and kinds of tokens, each an integer for a token
    first block    where rows are cut that a model embeds whole: those of which `Entry.suits` says no
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_fsdp_tools.extensions.rows import Rows, called_instead, of_tokens
from hf_fsdp_tools.modeling.module_tree import has_forward
from hf_fsdp_tools.sharding.phases import Hook, Phase, Undo

_MAKES_MASKS = re.compile("create_.*mask.*")
_PLACES, _POSITIONS = re.compile("get_.*placeholder_mask"), "compute_3d_position_ids"
"""Methods of transformers' models that read images: which tokens are images; positions of all tokens of rows."""
_BY_VALUES = re.compile("cumsum|position_ids_from|rope_index")
"""Names in code that makes positions of the values of ids or masks."""
_OF_WORDS = re.compile(".*input_ids|inputs_embeds|.*mask|.*position_ids|.*token_type_ids|.*labels|cu_seq.*|seq_idx")
"""Arguments that belong to words; others are images, sounds and what is known of them."""


class Entry:
    """A model, or a base that is called alone, whose code may run on own tokens up to its first block."""

    def __init__(self, model: nn.Module, decoder: Any, block: nn.Module, rows: Rows) -> None:
        self.model, self._decoder, self._rows = model, decoder, rows
        around = [each for each in model.modules() if any(below is block for below in each.modules())][:-1]
        self._names = {each: _names_in(each) for each in around if has_forward(each)}
        self._places = {
            each: places for each in self._names if (places := [*filter(_PLACES.fullmatch, self._names[each])])
        }
        inner = {each for child in decoder.children() if child not in self._names for each in child.modules()}
        self._by_values = any(_BY_VALUES.search(name) for each in {*self._names, *inner} for name in _names_in(each))
        self._has_positions = any(hasattr(each, _POSITIONS) for each in self._names)
        self._takes = [*inspect.signature(model.forward).parameters]

    def suits(self, given: Mapping[str, Any]) -> bool:
        """Whether these inputs may be cut: positions are given or follow from places in a row alone, and images are put
        into rows by code that is known."""
        if given.get("position_ids") is None and self._by_values and not self._has_positions:
            return False
        others = tree_leaves([value for name, value in given.items() if not _OF_WORDS.fullmatch(name)])
        if not any(isinstance(each, torch.Tensor) and each.dim() > 1 for each in others):
            return True
        puts = (self._names[each] for each in self._places if "masked_scatter" in self._names[each])
        counts = [bool({"numel", "torch_compilable_check"} & names) for names in puts]  # compared with all features
        return counts == [False] and given.get("input_ids") is not None

    def cut(self, given: dict[str, Any]) -> dict[str, Any]:
        """The inputs with this rank's part of ids, positions and embeddings; positions are those that the model would
        make of whole rows."""
        rows = self._rows
        tokens = given["input_ids"] if given.get("input_ids") is not None else given["inputs_embeds"]
        rows.ids, rows.position_ids = given.get("input_ids"), given.get("position_ids")
        if rows.position_ids is None and "position_ids" in self._takes and not self._has_positions:
            rows.position_ids = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[0], -1)
            given["position_ids"] = rows.position_ids
        names = ["input_ids", "inputs_embeds", "position_ids"]
        if "token_type_ids" in inspect.signature(self._decoder.forward).parameters:  # which it embeds
            names.append("token_type_ids")
        return given | {
            name: of_tokens(name, given[name], tokens.shape[1], rows.part) for name in names if name in given
        }

    def hooks(self) -> Iterator[Hook | Undo]:
        """Yield what lets code around the blocks see whole rows of integers."""
        rows, model = self._rows, self.model
        kind = type(getattr(self._decoder, "config", None))
        for each in self._names:
            known = inspect.unwrap(type(each).forward).__globals__
            makers = {name: made for name, made in known.items() if _MAKES_MASKS.fullmatch(name) and callable(made)}
            own = {name: partial(_mask_of_rows, inner=made, rows=rows, kind=kind) for name, made in makers.items()}
            yield Hook(each, Phase.CONTEXT, partial(called_instead, known, own))
            for name in self._places.get(each, ()):
                yield Replaced(each, name, partial(_places_of_rows, rows=rows))
            if hasattr(each, _POSITIONS):
                yield Replaced(each, _POSITIONS, partial(_positions_of_rows, rows=rows))
        if self._places:
            words = _words_of(rows)
            embedding = model.get_input_embeddings()  # type: ignore[operator]  # transformers' own
            yield Hook(embedding, Phase.WHOLE, partial(_as_words, words=words, rows=rows))
            yield Hook(self._decoder, Phase.ROWS, _as_tensors)
        for each in self._decoder.modules() if rows.angles_follow_length else ():
            if getattr(each, "rope_type", None) is not None:
                yield Hook(each, Phase.ROWS, partial(_add_last_position, rows=rows))
                yield Hook(each, Phase.WHOLE, partial(_drop_last_position, rows=rows))


def _names_in(module: nn.Module) -> set[str]:
    return {*inspect.unwrap(type(module).forward).__code__.co_names}


class Replaced:
    """A method of one module that another function is called in place of, until it is removed."""

    def __init__(self, module: Any, name: str, call: Callable[..., Any]) -> None:
        self._module, self._name = module, name
        if getattr(vars(module).get(name), "func", None) is getattr(call, "func", call):  # of the model that was copied
            delattr(module, name)
        setattr(module, name, partial(call, getattr(module, name)))

    def remove(self) -> None:
        """Give the module its own method back."""
        delattr(self._module, self._name)


def _whole(value: Any, rows: Rows) -> Any:
    """Whole rows in the place of a part: of positions, or of hidden states, whose shape alone is read."""
    if not isinstance(value, torch.Tensor) or value.dim() < 2:
        return value
    if value.is_floating_point() and value.dim() == 3 and value.shape[1] == rows.part_length:
        one = value.detach().as_subclass(torch.Tensor)[:, :1]
        return one.expand(-1, rows.part_length * rows.size, -1)
    is_of_positions = not value.is_floating_point() and value.shape[-1] == rows.part_length
    return rows.positions(value) if is_of_positions else value


def _mask_of_rows(*args: Any, inner: Callable[..., Any], rows: Rows, kind: type, **kwargs: Any) -> Any:
    """What one of transformers' functions gives for whole rows, asked with the config of the decoder."""
    if rows.entered_cut and type(next(iter(args), kwargs.get("config"))) is kind:
        args = tuple(_whole(value, rows) for value in args)
        kwargs = {name: _whole(value, rows) for name, value in kwargs.items()}
        kwargs |= _without_own_padding(kwargs.get("attention_mask"), rows)
    return inner(*args, **kwargs)


def _without_own_padding(mask: Any, rows: Rows) -> dict[str, torch.Tensor]:
    """A mask of words in which the padding of parts counts as the word before it: no word sees it, and rows without
    other padding need no mask of tokens by tokens."""
    missing = rows.part_length * rows.size - rows.length
    if not missing or not rows.is_causal or not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        return {}
    return {"attention_mask": torch.cat([mask[:, :-missing], mask[:, -missing - 1 : -missing].expand(-1, missing)], 1)}


def _positions_of_rows(inner: Callable[..., Any], *args: Any, rows: Rows, **kwargs: Any) -> Any:
    """This rank's part of positions that follow from images in whole rows; without these, from places alone."""
    if not rows.entered_cut:
        return inner(*args, **kwargs)
    found, own = _called_with_rows(inner, args, kwargs, rows)
    if found is None:
        tokens = own if rows.ids is None else rows.ids
        found = torch.arange(rows.part_length * rows.size, device=tokens.device).expand(tokens.shape[0], -1)
    return rows.part(found, -1)


def _called_with_rows(inner: Callable[..., Any], args: Any, kwargs: Any, rows: Rows) -> tuple[Any, Any]:
    """What a method says of the ids of whole rows; and the embeddings of own tokens that it was given."""
    given = inspect.signature(inner).bind(*args, **kwargs)
    own = given.arguments.get("inputs_embeds")
    given.arguments |= {"input_ids": rows.ids, "inputs_embeds": _whole(own, rows)}
    return inner(*given.args, **given.kwargs), own


# ---- images ----


def _places_of_rows(inner: Callable[..., Any], *args: Any, rows: Rows, **kwargs: Any) -> Any:
    """Which of this rank's tokens are images, by a method that compares the number of all with that of features."""
    if not rows.entered_cut:
        return inner(*args, **kwargs)
    found, _ = _called_with_rows(inner, args, kwargs, rows)

    def part(mask: torch.Tensor, dim: int) -> torch.Tensor:
        return rows.part(mask[..., :1] if mask.dim() == 3 else mask, dim)

    return of_tokens("", found, rows.part_length * rows.size, part)


def _words_of(rows: Rows) -> type[torch.Tensor]:
    """A kind of tensor: embeddings of own tokens, into which the features of own images alone are put."""

    class Words(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.masked_scatter and not kwargs:
                words, mask, source = args
                args = (
                    words,
                    mask,
                    source.reshape(-1, words.shape[-1])[rows.places(mask.as_subclass(torch.Tensor)[..., 0])],
                )
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    return Words


def _as_words(embedding: nn.Module, args: object, output: Any, *, words: type[torch.Tensor], rows: Rows) -> Any:
    return output.as_subclass(words) if rows.entered_cut and type(output) is torch.Tensor else output


def _as_tensors(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = kwargs.get("inputs_embeds")
    return args, kwargs if given is None else kwargs | {"inputs_embeds": given.as_subclass(torch.Tensor)}


# ---- rotary angles that follow the length of a row ----


def _add_last_position(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, rows: Rows) -> Any:
    """The largest position of rows behind those of own tokens: by it some angles are chosen."""
    if not rows.entered_cut:
        return args, kwargs
    given = inspect.signature(type(module).forward).bind(module, *args, **kwargs).arguments
    own = given["position_ids"]
    last = rows.positions(own).amax(-1, keepdim=True)
    given["position_ids"] = torch.cat([own, last], -1)
    return (), {name: value for name, value in given.items() if value is not module}


def _drop_last_position(module: nn.Module, args: object, output: Any, *, rows: Rows) -> Any:
    if not rows.entered_cut:
        return output
    own = rows.part_length
    return of_tokens("position_embeddings", output, own + 1, lambda each, dim: each.narrow(dim, 0, own))


# ---- whether a model's code may run on own tokens ----


class Watched(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """A pass on meta, which is seen to count tokens before the first block: those of a part would be too few."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._rows, self.counted = rows, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if self._rows.reached_blocks or not isinstance(result, torch.Tensor):
            return result
        own, name = self._rows.part_length, func.overloadpacket.__name__
        sizes = args[0].shape if args and isinstance(args[0], torch.Tensor) else ()
        whole = own * self._rows.size
        is_cut = name == "slice" and any(
            new == own and old not in (own, whole) for new, old in zip(result.shape, sizes, strict=False)
        )
        if is_cut or (name == "cumsum" and own in sizes) or (name == "arange" and result.numel() == own):
            self.counted = name
        return result
