"""Context parallelism: the ranks of a group have the same rows, each with a part of every sequence.

A model is called with whole rows of integers, of which each rank cuts out its part before they are embedded; `entry`
says what its own code makes of whole rows all the same, such as masks of every kind (causal, sliding, chunked, packed).
Code that counts tokens before the first block runs on whole rows up to there. What reads other tokens in a block is the
model's own code, too, and `readers` says how it runs. Norms, experts, head and loss see the rank's tokens alone.

    rows      input_ids, labels, position_ids: whole, the same on every rank of a group
    part      positions [rank * length / size, (rank + 1) * length / size) of a row
    blocks    the stack of the model's decoder, between whose first and last block hidden states are parts
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from traceback import walk_tb
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from transformers import PreTrainedModel
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from hf_fsdp_tools.distributed.mesh import Axes
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.extensions.entry import Entry, Replaced, Watched
from hf_fsdp_tools.extensions.readers import (
    Reads,
    find_readers,
    heads_shared_in,
    hooks_of_readers,
    may_read_keys,
    mixes_tokens_itself,
    takes_cache,
)
from hf_fsdp_tools.extensions.rows import BOUNDARIES, Rows, of_tokens
from hf_fsdp_tools.modeling.arguments import CACHES
from hf_fsdp_tools.modeling.meta import copy_on_meta, run_on_meta
from hf_fsdp_tools.modeling.module_tree import ModuleNode, ModuleTree, replaced
from hf_fsdp_tools.modeling.notes import Chosen
from hf_fsdp_tools.planning.stacks import find_blocks
from hf_fsdp_tools.sharding.phases import Hook, Installed, Phase, Undo, install, remove_hooks
from hf_fsdp_tools.sharding.replica_checks import IGNORED
from hf_fsdp_tools.sharding.sharding import Feature, Sharding
from hf_fsdp_tools.text import first_line

DEEPSTACK = "_deepstack_process"
"""The method by which decoders of transformers add features of images between blocks (Qwen3-VL)."""


def check_rows(model: nn.Module, size: int) -> None:
    """Refuse a model whose rows so many ranks cannot share: it is tried on meta. Nothing is communicated."""
    blocks = _blocks(model) if hasattr(model, "get_decoder") else {}
    heads = min((heads for block in blocks.values() for heads in heads_shared_in(block)), default=size)
    if heads < size:
        raise ConfigError(
            f"{type(model).__name__} has {heads} attention heads, of which each of cp_size {size} ranks needs one: the "
            f"largest cp_size that goes is {heads}."
        )
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
    if _with_loss(model) is None:
        return "its loss is not that of its words alone, by transformers' loss_function"
    blocks = _blocks(model)
    if not blocks:
        return "no stack of blocks was found in its decoder"
    readers = {name: [*find_readers(block, size)] for name, block in blocks.items()}
    reading = {type(blocks[name]) for name, found in readers.items() if found}
    for name, block in blocks.items():
        if mixes_tokens_itself(block) or (takes_cache(block) and type(block) not in reading):
            return f"{name} ({type(block).__name__}) reads other tokens in its own code, and not in a module of its own"
    return "" if reading else "nothing in its blocks is known to read other tokens"


def _with_loss(model: nn.Module) -> Any:
    """The model whose own code computes the loss: the given one, or one in it that has a head of its own; None if
    neither calls transformers' function for it, or hands it whole rows of words."""
    inner = [part for part in model.modules() if isinstance(part, PreTrainedModel) and part.get_output_embeddings()]
    names = {part: inspect.unwrap(type(part).forward).__code__.co_names for part in (model, *inner)}
    if all(part is model for part in inner):
        return None if "CrossEntropyLoss" in names[model] else model
    takes_words = getattr(model, "main_input_name", "") == "input_ids"
    return next((part for part in names if takes_words and "loss_function" in names[part]), None)


_TOKENS = {True: 44, False: 4}
"""Tokens of a part with which a model is tried: one that is to enter cut with a multiple of 4 that no size is."""


def _tried(model: nn.Module, size: int) -> str:
    """Why a model that runs with whole rows does not run with parts of them, on meta; empty if it does.

    How readers run, what follows the blocks of a decoder, and whether rows are cut before them, is noted.
    """
    problem: str | None = None
    for enters_cut in _TOKENS:
        for module in model.modules():  # another size was perhaps tried before
            if Reads.of(module) != Reads():
                Reads.put(module, way="", enters_cut=False)
        Reads.put(_decoder(model), enters_cut=enters_cut)
        if (problem := _tried_so(model, size, _TOKENS[enters_cut])) == "":
            break
    return problem or ""


def _tried_so(model: nn.Module, size: int, tokens: int) -> str | None:
    """The same, as the model is noted to enter; None where values decide what it computes, so that nothing is said."""
    twin = copy_on_meta(model)
    if (run := _running(twin, tokens * size)) is None:
        return None
    names = {module: name for name, module in twin.named_modules()}
    readers = {module: way for block in _blocks(twin).values() for module, way in find_readers(block, size)}
    found = [module for module, way in readers.items() if not way and may_read_keys(module, way)]
    way = "keys"
    while True:
        for module in found:
            for each in (module, model.get_submodule(names[module])):
                Reads.put(each, way=way)
        rows = Rows(None, 0, size)
        install(twin, _made(twin, rows))
        try:
            with Watched(rows) as watched:
                run()
        except Exception as error:
            selves = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
            running = [each for each in selves if isinstance(each, nn.Module) and each in names]
            found, way = _other_way(twin, running, rows)
            if not found:
                where = f"{names[running[-1]]} ({type(running[-1]).__name__})" if running else "it"
                return f"{where} does not run on a part of a row ({first_line(error)})"
            remove_hooks(twin)
        else:
            if not rows.reached_blocks:
                return f"{next(iter(_blocks(model)))} and the blocks after it do not run on the words of a row"
            return f"it counts tokens ({watched.counted})" if rows.entered_cut and watched.counted else ""


def _running(twin: nn.Module, length: int) -> Callable[[], None] | None:
    """A call that runs a model of meta on whole rows; None where none does."""
    for has_mask in (True, False):
        run = partial(run_on_meta, twin, length, has_mask=has_mask)
        with suppress(Exception):
            run()
            return run
    return None


def _other_way(twin: Any, running: list[nn.Module], rows: Rows) -> tuple[list[nn.Module], str]:
    """What may run in another way where a model does not run, by the modules that were running; or nothing."""
    blocks = _blocks(twin).values()
    readers = {module: way for block in blocks for module, way in find_readers(block, rows.size) if way}
    if (failed := next((module for module in running if module in readers), None)) is not None:
        alike = [module for module in readers if type(module) is type(failed)]
        return alike, "keys" if may_read_keys(failed, readers[failed]) else "rows"
    decoder = _decoder(twin)
    is_after = rows.reached_blocks and decoder in running and not any(block in running for block in blocks)
    return [decoder] if is_after and not Reads.of(decoder).way else [], "rows"


class ContextParallel(Feature):
    """The ranks of a mesh with one axis have the same rows of a model.

    In each forward pass without a cache, all must give the same rows. In every block, forward and backward, 4
    all-to-alls of each attention carry (size - 1) / size of this rank's part of queries, keys, values and outputs; of a
    recurrence one for each of its inputs and outputs. Where keys or whole rows are gathered, a rank sends its part to
    each other one, and as much comes back as gradients.
    """

    def divide(self, model: nn.Module, axes: Axes, rules: Mapping[str, Any]) -> None:
        """The model is tried on meta while its layers are whole."""
        check_rows(model, axes.dims.cp_size)

    def check(self, model: nn.Module, tree: ModuleTree, sharding: Sharding) -> None:
        """The model is tried on meta, unless it was before it was divided."""
        if not sharding.is_divided:
            check_rows(model, sharding.axes.dims.cp_size)

    def hooks(self, model: nn.Module, tree: ModuleTree, sharding: Sharding) -> Iterable[Hook | Undo]:
        """Rows are cut and joined, and heads exchanged around attention."""
        mesh = sharding.axes.groups["cp"]
        spread = sharding.axes.dims.tp_size if "sequence_parallel" in Chosen.of(model).features else 1
        return _made(model, Rows(mesh.get_group(), mesh.get_local_rank(), mesh.size(), spread))


FEATURE = ContextParallel()


def follow_rows(model: nn.Module, size: int, spread: int = 1) -> list[Hook | Undo]:
    """Let a model that is followed on tensors without data run as on a rank that shares its rows (`Rows.spread`)."""
    return _made(model, Rows("cp", 0, size, spread))


def _made(model: nn.Module, rows: Rows) -> list[Hook | Undo]:
    blocks = list(_blocks(model).values())
    kinds = [str(getattr(module, "rope_type", "")) for module in model.modules()]
    rows.angles_follow_length = any("dynamic" in kind or "longrope" in kind for kind in kinds)
    decoder, with_loss = _decoder(model), _with_loss(model)
    base = getattr(model, "base_model", model)
    joins_at_end = Reads.of(decoder).way == "rows"
    entry, base_entry = (
        Entry(each, decoder, blocks[0], rows) if Reads.of(decoder).enters_cut else None for each in (model, base)
    )
    before = partial(_before_model, rows=rows, with_loss=with_loss)
    alone = [
        Hook(base, Phase.ROWS, partial(_before_base, before=before, entry=base_entry)),
        Hook(base, Phase.WHOLE, partial(_after_base, rows=rows)),
    ]
    between = [Replaced(decoder, DEEPSTACK, partial(_add_to_part, rows=rows))] if hasattr(decoder, DEEPSTACK) else []
    return [
        *hooks_of_readers(blocks, rows),
        *between,
        *(entry.hooks() if entry else ()),
        Hook(model, Phase.CONTEXT, partial(_own_loss, with_loss, rows)),
        Hook(model, Phase.ROWS, partial(before, entry=entry)),
        *(Hook(block, Phase.ROWS, partial(_before_block, rows=rows)) for block in blocks),
        *([Hook(blocks[-1], Phase.WHOLE, partial(_join_hidden, rows=rows))] if joins_at_end else []),
        Hook(decoder, Phase.WHOLE, partial(_after_decoder, rows=rows, cuts_hidden=joins_at_end)),
        Hook(model, Phase.WHOLE, partial(_after_model, rows=rows)),
        *(alone if base is not model else []),
    ]


def whole_outputs(model: nn.Module) -> AbstractContextManager[None]:
    """A block in which a model gives the outputs of whole rows next to a loss too, which take more memory."""
    hooks = (hook for module in model.modules() for hook in Installed.of(module).hooks if isinstance(hook, Hook))
    found = (hook.call.keywords.get("rows") for hook in hooks if isinstance(hook.call, partial))
    return replaced(next((rows for rows in found if rows is not None), Rows(None, 0, 1)), joins_outputs=True)


def _blocks(model: Any) -> dict[str, nn.Module]:
    """The blocks of the decoder's largest stack, and those that the user chose and that attend, by name."""
    stacks = find_blocks(tree := ModuleTree(_decoder(model)))
    blocks = set(max(stacks, key=_is_of_words_and_size, default=[]))
    chosen = (block for stack in stacks for block in stack if Chosen.of(block.module).is_block)
    blocks.update(block for block in chosen if any(map(takes_cache, block.module.modules())))
    return {block.fqn: block.module for block in tree if block in blocks}


def _decoder(model: Any) -> Any:
    """What makes hidden states of words; some models have a head of the name by which transformers looks for it."""
    decoder = model.get_decoder()
    return decoder if decoder is not None and any(map(takes_cache, decoder.modules())) else model.base_model


def _is_of_words_and_size(stack: Iterable[ModuleNode]) -> tuple[bool, int]:
    reads = any(takes_cache(below) for block in stack for below in block.module.modules())
    return reads, sum(block.size for block in stack)


# ---- rows and parts ----


def _add_to_part(
    inner: Callable[..., torch.Tensor], hidden: torch.Tensor, is_image: Any, images: torch.Tensor, *, rows: Rows
) -> torch.Tensor:
    """Add the features of the images' tokens, which are in the order of those of whole rows."""
    if not rows.is_cut:
        return inner(hidden, is_image, images)
    is_own = is_image if rows.entered_cut else rows.part(is_image, 1)
    return inner(hidden, is_own, images[rows.places(is_own)])


def _before_model(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, rows: Rows, with_loss: Any, entry: Entry | None
) -> Any:
    """Pad whole rows to a multiple of the ranks, and take this rank's part of them, and of the labels."""
    given = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | kwargs
    rows.is_cut = not given.get("use_cache") and all(given.get(name) is None for name in CACHES)
    if not rows.is_cut:
        return args, kwargs
    tokens = next((given[name] for name in ("input_ids", "inputs_embeds") if given.get(name) is not None), None)
    if tokens is None or given.get("return_dict") is False:
        raise ConfigError("With cp_size, a model is called with input_ids or inputs_embeds, and returns no tuple.")
    rows.compare(tokens)
    rows.length, rows.has_mask = tokens.shape[1], given.get("attention_mask") is not None
    rows.labels, rows.position_ids, rows.loss_was_computed = None, None, False
    if rows.length % rows.size and not (rows.has_mask or rows.is_causal):  # tokens would attend to the padding
        given["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.int64, device=tokens.device)
    if rows.length % rows.size and rows.angles_follow_length and given.get("position_ids") is None:
        given["position_ids"] = torch.arange(rows.length, device=tokens.device).expand(tokens.shape[0], -1)
    given = {name: _padded(name, value, rows) for name, value in given.items()} | {"use_cache": False}
    rows.entered_cut = entry is not None and entry.suits(given)
    if entry is not None and rows.entered_cut:
        given = entry.cut(given)
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
    rows.former_loss = (with_loss.__dict__.get("_loss_function"),)
    with_loss.loss_function = partial(_loss_of_part, with_loss.loss_function, rows=rows)
    return (), given


def _before_base(base: Any, args: Any, kwargs: Any, *, before: Any, entry: Entry | None) -> Any:
    """As `_before_model`, for a base that is called alone."""
    rows: Rows = before.keywords["rows"]
    rows.is_alone = not rows.in_pass
    return before(base, args, kwargs, entry=entry) if rows.is_alone else (args, kwargs)


def _after_base(base: nn.Module, args: object, output: Any, *, rows: Rows) -> Any:
    return _after_model(base, args, output, rows=rows) if rows.is_alone else output


def _padded(name: str, value: Any, rows: Rows) -> Any:
    """An input with whole rows, made longer at its end so that the ranks divide it; other inputs as they are."""
    missing = -rows.length % rows.size
    if not missing or not isinstance(value, torch.Tensor) or not value.dim():
        return value
    if name.startswith(BOUNDARIES):  # the padding is a document of its own
        return torch.cat([value, value[-1:] + missing])
    if name == "inputs_embeds":
        return nn.functional.pad(value, (0, 0, 0, missing))
    if value.dim() == 4 and name == "attention_mask":  # the padding attends to what the last token does, and none to it
        hidden = torch.finfo(value.dtype).min if value.is_floating_point() else 0
        places = torch.arange(rows.length + missing, device=value.device).clamp(max=value.shape[-2] - 1)
        return nn.functional.pad(value[..., places, :], (0, missing), value=hidden)
    if value.shape[-1] != rows.length or value.dim() not in (2, 3):
        return value
    if name == "position_ids":  # some rotary angles follow the length, which no row may exceed
        last = -1 if rows.angles_follow_length else value[..., -1:]
        return torch.cat(
            [value, (last + torch.arange(1, missing + 1, device=value.device)).expand(*value.shape[:-1], -1)], -1
        )
    return nn.functional.pad(value, (0, missing), value=IGNORED if "labels" in name else 0)


def _loss_of_part(inner: Callable[..., torch.Tensor], *args: Any, rows: Rows, **kwargs: Any) -> torch.Tensor:
    """The loss of this rank's tokens, divided by the number of tokens of the whole rows."""
    rows.loss_was_computed = True
    loss: torch.Tensor = inner(*args, **kwargs | {"shift_labels": rows.labels, "num_items_in_batch": rows.num_labels})
    return loss


def _before_block(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, rows: Rows) -> Any:
    """Cut what belongs to tokens; masks stay whole, as readers run on whole rows."""
    if not rows.is_cut:
        return args, kwargs
    rows.reached_blocks = True
    names = list(inspect.signature(type(block).forward).parameters)[1:]
    given = dict(zip(names, args, strict=False)) | kwargs
    length = rows.part_length * rows.size
    hidden = given[names[0]].shape
    if not {rows.part_length, length, rows.part_length // rows.spread} & set(hidden[1:-1]):
        raise ConfigError(
            f"{type(block).__name__} takes {hidden[1]} tokens of rows with {rows.length}: with cp_size {rows.size}, it "
            "must see the words of a row and nothing else. Leave cp_size out."
        )
    if (positions := given.get("position_ids")) is not None and positions.shape[-1] == length:
        rows.position_ids = positions
    cut = {n: v if "mask" in n else of_tokens(n, v, length, rows.part) for n, v in given.items()}
    return (cut.pop(names[0]),), cut  # by place, where offloading and transformers' `output_hidden_states` look


def _join_hidden(block: nn.Module, args: object, output: Any, *, rows: Rows) -> Any:
    """Whole rows for what a decoder does after its blocks."""
    return of_tokens("", output, rows.part_length, rows.whole) if rows.is_cut else output


def _after_decoder(decoder: nn.Module, args: object, output: Any, *, rows: Rows, cuts_hidden: bool) -> Any:
    """Join what routers said of each token, of which the loss that balances experts takes means over whole rows."""
    if rows.is_cut and cuts_hidden:
        output["last_hidden_state"] = rows.part(output["last_hidden_state"], 1)
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
        if isinstance(part, torch.Tensor) and (part.dim() == 2 or not has_labels or rows.joins_outputs):
            output[name] = _joined(part, rows)
        elif name == "hidden_states" and part:  # were asked for
            output[name] = tuple(_joined(each, rows)[:, : rows.length] for each in part)
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


def _joined(part: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Whole rows of what has a part of them; anything else as it is."""
    is_of_tokens = part.dim() > 1 and part.shape[1] == rows.part_length
    return rows.whole(part, 1)[:, : rows.length].contiguous() if is_of_tokens else part


@contextmanager
def _own_loss(model: Any, rows: Rows) -> Iterator[None]:
    """A forward pass, after which the model has its own loss function again, also if it failed."""
    rows.in_pass = True
    try:
        yield
    finally:
        rows.in_pass = False
        if rows.former_loss is not None:
            model.__dict__.pop("_loss_function", None)
            if rows.former_loss[0] is not None:
                model.loss_function = rows.former_loss[0]
            rows.former_loss = None
