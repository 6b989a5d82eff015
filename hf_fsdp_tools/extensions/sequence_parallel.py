"""Sequence parallelism: between divided layers, each rank of a tensor-parallel group holds its own tokens alone.

The hidden states of a row are cut before the first block and joined after the decoder (Korthikanti et al., arXiv
2205.05198, 4.2). What lies between divided layers (norms, sums of the residual stream, dropout) runs on own tokens,
of (batch, tokens / ranks, width); divided layers run on whole rows, as transformers' styles compute them:

    region    a module below a block with divided layers (attention, an MLP, experts); the block itself, where its own
              code calls them
    join      an all-gather before a region; backward, gradients of own tokens: summed by a reduce-scatter where the
              readers are divided layers, of which each rank has a part of the gradient, and else cut out
    cut       after a region; where its last layer gives sums of ranks, one reduce-scatter in place of an all-reduce

With context parallelism the same is done with a rank's part of each row (`Rows.spread`).

Weights outside regions see own tokens: their gradients are summed over the group. A pass with a cache (`generate`), and
one of rows that the ranks do not divide, keeps whole rows.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_fsdp_tools.axes import spread_problem
from hf_fsdp_tools.distributed.mesh import Axes
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.extensions.context_parallel import DEEPSTACK, follow_rows
from hf_fsdp_tools.extensions.entry import Replaced
from hf_fsdp_tools.extensions.float8 import Float8Layer
from hf_fsdp_tools.extensions.readers import Reads, find_readers
from hf_fsdp_tools.extensions.tensor_parallel import run_divided_on_meta, with_summed_gradients
from hf_fsdp_tools.modeling.arguments import CACHES
from hf_fsdp_tools.modeling.meta import copy_on_meta
from hf_fsdp_tools.modeling.module_tree import ModuleTree
from hf_fsdp_tools.modeling.notes import Chosen, Divided, Note, install_style
from hf_fsdp_tools.planning.stacks import find_blocks
from hf_fsdp_tools.sharding.phases import Hook, Phase, Undo, install
from hf_fsdp_tools.sharding.sharding import Feature, Sharding
from hf_fsdp_tools.sharding.zero_grads import first_float
from hf_fsdp_tools.text import first_line

try:
    from transformers.distributed.parallel_utils import _AllReduceBackward, _use_local_dtensor_params
except ImportError:  # before transformers 5.21, whose plans divide no layers
    _AllReduceBackward = _use_local_dtensor_params = None

_ops: Any = torch.ops._c10d_functional


@dataclass(frozen=True)
class Spread(Note):
    """What sequence parallelism makes of a module, found when the model was divided."""

    is_region: bool = False
    """Whether it takes and gives own tokens, and computes with whole rows."""
    ends_region: bool = False
    """Whether it is the layer whose sums over ranks are what a region gives."""
    sees_own: bool = False
    """Whether its weights see own tokens alone."""


@dataclass(eq=False)
class Tokens:
    """The tokens of the rows that a group of ranks shares."""

    rank: int
    size: int
    group: dist.ProcessGroup | None = None
    """None where a model is followed on tensors without data."""
    may_cut: bool = False
    """Whether the latest forward pass is one without a cache."""
    is_cut: bool = False
    """Whether its rows are cut, which the ranks divide."""
    seen: dict[int, bool] = field(default_factory=dict)
    """By the tokens of hidden states between blocks, whether they are own: a block may run again after another pass."""
    length: int = 0
    """Tokens of whole rows of the region that runs."""
    whole_layers: bool = False
    """Whether layers run as transformers' styles let them; torch's compiler follows no views of rows."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Tokens":
        """A copied model has its tokens in the same group, which cannot be copied."""
        return copy(self)

    def follow(self, given: Iterable[Any]) -> None:
        """Know whether these inputs in a block are of own tokens, also where it runs again."""
        hidden = next((each for each in given if isinstance(each, torch.Tensor) and each.dim() > 2), None)
        self.is_cut = self.is_cut if hidden is None else self.seen.get(hidden.shape[1], self.is_cut)

    @property
    def _name(self) -> str:
        return "tp" if self.group is None else self.group.group_name

    def own(self, whole: torch.Tensor) -> torch.Tensor:
        """The own tokens of whole rows (batch, tokens, …), in memory of their own."""
        length = whole.shape[1] // self.size
        return whole.narrow(1, self.rank * length, length).contiguous()

    def gathered(self, own: torch.Tensor) -> torch.Tensor:
        """Whole rows, of which each rank has its own tokens."""
        ranks: torch.Tensor = _ops.wait_tensor(_ops.all_gather_into_tensor(own.contiguous(), self.size, self._name))
        return ranks.view(self.size, *own.shape).transpose(0, 1).flatten(1, 2)

    def summed(self, whole: torch.Tensor) -> torch.Tensor:
        """The own tokens of the sum over ranks of whole rows."""
        batch, _, *rest = whole.shape
        ranks = whole.reshape(batch, self.size, -1, *rest).transpose(0, 1).flatten(0, 1).contiguous()
        own: torch.Tensor = _ops.wait_tensor(_ops.reduce_scatter_tensor(ranks, "sum", self.size, self._name))
        return own

    def summed_back(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight that sees own tokens: its gradient is summed over ranks."""
        if self.group is None:
            return weight
        summed: torch.Tensor = _AllReduceBackward.apply(weight, self.group)
        return summed


class _Join(torch.autograd.Function):
    """Own tokens as whole rows, twice in the same memory: for readers each of which has the whole gradient on every
    rank, and for divided layers, which have a part of it."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.tokens = tokens
        ctx.set_materialize_grads(False)
        whole = tokens.gathered(own)
        return (whole.clone(), None) if tokens.whole_layers else (whole, whole.detach())

    @staticmethod
    def backward(ctx: Any, complete: torch.Tensor | None, parts: torch.Tensor | None) -> Any:
        own = None if complete is None else ctx.tokens.own(complete)
        if parts is not None:
            summed = ctx.tokens.summed(parts)
            own = summed if own is None else own + summed
        return own, None


class _Cut(torch.autograd.Function):
    """The own tokens of whole rows, which are equal on all ranks or, with `sums`, are to be summed over them."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, tokens: Tokens, sums: bool) -> torch.Tensor:
        ctx.tokens = tokens
        return tokens.summed(whole) if sums else tokens.own(whole)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.tokens.gathered(gradient), None, None


_PARTS = "_hf_fsdp_parts"
"""The attribute of a region's input in whole rows: the same rows for divided layers."""


def _joined(own: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    whole, parts = _join(own, tokens)
    setattr(whole, _PARTS, parts)
    return whole


_join: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = _Join.apply
_cut: Callable[..., torch.Tensor] = _Cut.apply


class SequenceParallel(Feature):
    """The ranks that share layers hold their own tokens between them.

    In each block, forward and backward, an all-gather before each region and a reduce-scatter after it, where its last
    layer gives sums, take the place of an all-reduce: as many bytes.
    """

    def divide(self, model: nn.Module, axes: Axes, rules: Mapping[str, Any]) -> None:
        """The model, of which each rank has its part already, is tried on meta, and its regions are noted."""
        if problem := spread_problem(axes.dims):
            raise ConfigError(f"{problem}.")
        note_regions(model, axes.dims.tp_size, axes.dims.cp_size)
        Chosen.put(model, features=Chosen.of(model).features | {"sequence_parallel"})

    def describe(self, model: nn.Module) -> str:
        """What lies between divided layers."""
        return "own tokens alone between layers that ranks share"

    def hooks(self, model: nn.Module, tree: ModuleTree, sharding: Sharding) -> Iterator[Hook | Undo]:
        """Rows are cut and joined."""
        mesh = sharding.axes.groups["tp"]
        tokens = Tokens(mesh.get_local_rank(), mesh.size(), mesh.get_group())
        yield from hooks_of_tokens(model, tokens, whole_layers=sharding.compile is not None)


FEATURE = SequenceParallel()


# ---- finding ----


def note_regions(model: Any, size: int, parts: int = 1) -> None:
    """Note the regions of a model whose layers so many ranks share, and whose rows are in so many parts (`cp_size`): it
    is tried on meta. Nothing is communicated.

    Raises:
        ConfigError: it does not run so.
    """
    decoder = _decoder(model)
    blocks = [] if decoder is None else _blocks(decoder)
    problem = "it is not a decoder of transformers alone, or has no stack of blocks"
    if blocks and any(parameter is not None for parameter in decoder._parameters.values()):
        blocks, problem = [], "its decoder has weights of its own, next to its blocks"
    if blocks and parts > 1 and (hasattr(decoder, DEEPSTACK) or Reads.of(decoder).way == "rows"):
        blocks, problem = [], f"beside its blocks its decoder works on whole rows, with cp_size {parts}"
    for regions in ([each for block in blocks for each in _regions(block)], blocks) if blocks else ():
        for module in decoder.modules():
            Spread.put(module, is_region=module in regions, ends_region=False, sees_own=False)
        if not (tried := _tried(model, size, parts)):
            return
        problem = tried if regions is not blocks else problem
    cure = "Leave it out; tp_size works without it." if parts == 1 else "Leave it out, or cp_size."
    raise ConfigError(f"sequence_parallel is not for {type(model).__name__}: {problem}. {cure}")


def _decoder(model: Any) -> Any:
    """The innermost model around the blocks of a decoder; None where there is no decoder alone."""
    if not hasattr(model, "get_decoder") or getattr(model.config, "is_encoder_decoder", False):
        return None
    outer, blocks = model.get_decoder(), set(_blocks(model.get_decoder()))
    models = [each for each in outer.modules() if isinstance(each, PreTrainedModel)]
    return next((each for each in reversed(models) if blocks and blocks <= {*each.modules()}), None)


def _blocks(decoder: nn.Module) -> list[nn.Module]:
    """The blocks of the largest stack of a decoder."""
    stacks = find_blocks(ModuleTree(decoder))
    return [node.module for node in max(stacks, key=lambda stack: sum(node.size for node in stack), default=[])]


def _regions(block: nn.Module) -> list[nn.Module]:
    """The modules of a block that compute with divided layers, or read other tokens; the block itself where its own
    code calls a divided layer."""
    found, children, readers = [], [*block.children()], {module for module, _ in find_readers(block, 1)}
    while children:
        child = children.pop()
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            children += child.children()
        elif any(_is_divided(below) or below in readers for below in child.modules()):
            if _is_divided(child) and not any(child.children()):
                return [block]
            found.append(child)
    return found


def _is_divided(module: nn.Module) -> bool:
    note = Divided.of(module)
    return bool(note.parallel) or note.style is not None


def _tried(model: nn.Module, size: int, parts: int) -> str:
    """Why a model does not run with these regions on meta; "" if it does, and what is known of its layers is noted."""
    twin: Any = copy_on_meta(model)
    names = {module: name for name, module in twin.named_modules()}
    tokens, decoder = Tokens(0, size), _decoder(twin)
    seen = _Seen(_blocks(decoder)[0])
    try:
        for module in twin.modules():
            install_style(module)
        seen.watch(twin)
        install(twin, [*(follow_rows(twin, parts, size) if parts > 1 else ()), *hooks_of_tokens(twin, tokens)])
        decoder.register_forward_hook(seen.end)
        run_divided_on_meta(twin, 4 * size * parts)
    except Exception as error:
        return f"it does not run with own tokens of a row ({first_line(error)})"
    if not tokens.is_cut or seen.length != 4 * size:
        return "its decoder does not give the hidden states of the tokens that its blocks take"
    for module in seen.own:
        Spread.put(model.get_submodule(names[module]), sees_own=True)
    for module in seen.ends:
        Spread.put(model.get_submodule(names[module]), ends_region=True)
    return ""


class _Seen:
    """What a model that is tried does with its tokens."""

    def __init__(self, first_block: nn.Module) -> None:
        self._first = first_block
        self._is_between = self._is_in_region = False  # the first block and the decoder's end
        self._sums: Any = None  # what the latest layer with sums over ranks gave
        self._summing: Any = None  # that layer
        self._written = 0  # how often that was written to
        self.own: list[nn.Module] = []
        """Modules with weights, outside regions, that run on own tokens."""
        self.ends: list[nn.Module] = []
        """Layers whose sums are what a region gives."""
        self.length = 0
        """Tokens of what the decoder gives."""

    def watch(self, model: nn.Module) -> None:
        """Look at all modules of a model, and at what regions give before it is cut."""
        for module in model.modules():
            module.register_forward_pre_hook(self._before)
            module.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: Any) -> None:
        self._is_between |= module is self._first
        has_weights = any(parameter is not None for parameter in module._parameters.values())
        if self._is_between and not self._is_in_region and not Spread.of(module).is_region and has_weights:
            self.own.append(module)
        self._is_in_region |= Spread.of(module).is_region

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        first: Any = first_float(output)
        if _style_of(module) == "rowwise" and isinstance(module, nn.Linear):
            self._sums, self._summing, self._written = first, module, first._version
        if Spread.of(module).is_region:
            self._is_in_region = False
            if first is not None and first is self._sums and first._version == self._written:
                self.ends.append(self._summing)

    def end(self, decoder: nn.Module, args: Any, output: Any) -> None:
        """Look at what the decoder gives, after its hooks."""
        hidden: Any = first_float(output)
        self._is_between, self.length = False, hidden.shape[1]


def _style_of(module: nn.Module) -> str:
    style = Divided.of(module).style
    return "" if style is None else str(style.keywords.get("style", ""))


# ---- hooks ----


def hooks_of_tokens(model: Any, tokens: Tokens, *, whole_layers: bool = False) -> Iterator[Hook | Undo]:
    """Yield what cuts and joins rows. With `whole_layers`, layers run as transformers' styles let them, which torch's
    compiler follows: all-reduces stay, and whole rows are cut after them."""
    decoder = _decoder(model)
    blocks, tokens.whole_layers = _blocks(decoder), whole_layers
    yield Hook(decoder, Phase.TOKENS, partial(_before_decoder, tokens=tokens))
    yield Hook(decoder, Phase.WHOLE_TOKENS, partial(_after_decoder, tokens=tokens))
    if hasattr(decoder, DEEPSTACK):
        yield Replaced(decoder, DEEPSTACK, partial(_add_to_own, tokens=tokens))
    for block in blocks:
        if block is blocks[0] or not Spread.of(block).is_region:
            yield Hook(block, Phase.OWN, partial(_before_block, tokens=tokens, is_first=block is blocks[0]))
    tuned = {each.get_base_layer() for each in model.modules() if hasattr(each, "get_base_layer")}
    for module in decoder.modules():
        note = Spread.of(module)
        if note.is_region:
            if module is not blocks[0]:  # which has whole rows
                yield Hook(module, Phase.REGION, partial(_before_region, tokens=tokens))
            yield Hook(module, Phase.OWN_AGAIN, partial(_after_region, tokens=tokens))
        elif note.sees_own:
            yield _Instead(module, partial(_run_on_own, module=module, tokens=tokens))
        elif whole_layers or Float8Layer.of(module).config:
            continue
        elif _style_of(module) in ("colwise", "packed_colwise"):
            yield _Instead(module, partial(_run_on_parts, module=module))
        elif note.ends_region and module not in tuned:  # what an adapter adds is of whole rows
            yield _Instead(module, partial(_run_to_own, module=module, tokens=tokens))


class _Around(partial[Any]):
    """A forward pass with something around it."""


class _Instead:
    """Runs something around a module's own forward pass, until it is removed."""

    def __init__(self, module: Any, run: Callable[..., Any]) -> None:
        self._module = module
        own = module.__dict__.pop("forward", None)
        self._former = own.args[0] if isinstance(own, _Around) else own  # this module is a copy of one with it
        if getattr(self._former, "__func__", None) is type(module).forward:
            self._former = None
        module.forward = _Around(run, self._former or module.forward)

    def remove(self) -> None:
        """Give the module its own forward pass back."""
        del self._module.forward
        if self._former is not None:
            self._module.forward = self._former


def _before_decoder(decoder: nn.Module, args: Any, kwargs: Any, *, tokens: Tokens) -> Any:
    """Whether this pass is one without a cache."""
    given = dict(zip(inspect.signature(type(decoder).forward).parameters, (decoder, *args), strict=False)) | kwargs
    tokens.may_cut = not given.get("use_cache") and all(given.get(name) is None for name in CACHES)
    tokens.is_cut = False
    return (args, kwargs | {"use_cache": False}) if tokens.may_cut else (args, kwargs)


def _add_to_own(
    inner: Callable[..., torch.Tensor], hidden: torch.Tensor, is_image: Any, images: torch.Tensor, *, tokens: Tokens
) -> torch.Tensor:
    """Add what a tower saw of the images' tokens, in the order of whole rows, to own tokens."""
    if not tokens.is_cut:
        return inner(hidden, is_image, images)
    is_own, places = map(tokens.own, (is_image, is_image.flatten().cumsum(0).view_as(is_image) - 1))
    return inner(hidden, is_own, tokens.summed_back(images)[places[is_own]])


def _before_block(block: nn.Module, args: Any, kwargs: Any, *, tokens: Tokens, is_first: bool) -> Any:
    """Own tokens of all that blocks take, but of what regions read whole: positions, masks."""
    names = [*inspect.signature(type(block).forward).parameters][1:]
    given = dict(zip(names, args, strict=False)) | kwargs
    length = given[names[0]].shape[1]
    if is_first:
        tokens.is_cut = tokens.may_cut and not length % tokens.size
        tokens.seen[length // tokens.size if tokens.is_cut else length] = tokens.is_cut
    if not tokens.is_cut or Spread.of(block).is_region:  # the first block has whole rows
        return args, kwargs
    length *= 1 if is_first else tokens.size
    cut = {
        name: _cut(value, tokens, False) if _is_of_tokens(name, value, length) else value
        for name, value in given.items()
    }
    return (cut.pop(names[0]),), cut


def _is_of_tokens(name: str, value: Any, length: int) -> bool:
    """Whether an argument is of vectors of so many tokens."""
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 2
    return is_float and value.shape[1] == length and "mask" not in name and "position" not in name


def _before_region(module: nn.Module, args: Any, kwargs: Any, *, tokens: Tokens) -> Any:
    """Whole rows of own tokens."""
    tokens.follow((*args, *kwargs.values()))
    if not tokens.is_cut:
        return args, kwargs
    own = next(each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor) and each.dim() > 2)
    length, tokens.length = own.shape[1], own.shape[1] * tokens.size
    joined = {name: _joined(v, tokens) if _is_of_tokens(name, v, length) else v for name, v in kwargs.items()}
    return tuple(_joined(each, tokens) if _is_of_tokens("", each, length) else each for each in args), joined


def _after_region(module: nn.Module, args: object, output: Any, *, tokens: Tokens) -> Any:
    """Own tokens of what a region made of whole rows."""
    if not tokens.is_cut:
        return output
    if isinstance(output, tuple):
        return type(output)(_after_region(module, args, each, tokens=tokens) for each in output)
    if isinstance(output, torch.Tensor) and output.dim() == 2 and output.shape[0] % tokens.length == 0:  # of all rows
        return _cut(output.view(-1, tokens.length, output.shape[1]), tokens, False).flatten(0, 1)
    return _cut(output, tokens, False) if _is_of_tokens("", output, tokens.length) else output


def _after_decoder(decoder: nn.Module, args: object, output: Any, *, tokens: Tokens) -> Any:
    """Whole rows of hidden states, for heads and losses."""
    if not tokens.is_cut:
        return output
    hidden: Any = first_float(output)
    length = hidden.shape[1]

    def whole(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(whole, value))
        return _join(value, tokens)[0] if _is_of_tokens("", value, length) else value

    if not isinstance(output, MutableMapping):
        return whole(output)
    for name, value in [*output.items()]:
        output[name] = whole(value)
    return output


# ---- layers ----


def _run_on_own(inner: Any, *args: Any, module: nn.Module, tokens: Tokens, **kwargs: Any) -> Any:
    """Run a module whose weights see own tokens: their gradients are summed over the ranks."""
    tokens.follow((*args, *kwargs.values()))
    if not tokens.is_cut:
        return inner(*args, **kwargs)
    return with_summed_gradients(inner, *args, module=module, summed=tokens.summed_back, **kwargs)


def _run_on_parts(inner: Any, rows: torch.Tensor, *args: Any, module: Any, **kwargs: Any) -> Any:
    """Run a divided layer on a region's own input: its part of the gradient is summed where the input was joined."""
    if (parts := getattr(rows, _PARTS, None)) is None:
        return inner(rows, *args, **kwargs)
    with _use_local_dtensor_params(module):
        return type(module).forward(module, parts, *args, **kwargs)


def _run_to_own(inner: Any, rows: torch.Tensor, *args: Any, module: Any, tokens: Tokens, **kwargs: Any) -> Any:
    """Run the last layer of a region: own tokens of the sums over ranks, and then its bias."""
    if not tokens.is_cut:
        return inner(rows, *args, **kwargs)
    if (bias := module._parameters.get("bias")) is not None:
        module._parameters["bias"] = None  # which each rank would add
    try:
        with _use_local_dtensor_params(module):
            own = _cut(type(module).forward(module, rows, *args, **kwargs), tokens, True)
    finally:
        if bias is not None:
            module._parameters["bias"] = bias
    return own if bias is None else own + tokens.summed_back(bias.to_local() if isinstance(bias, DTensor) else bias)
