"""What blocks keep from the forward to the backward pass: of which blocks activations are recomputed, what these
keep all the same, and where.

A checkpointed block keeps its input, the hidden states. Offloaded, these lie in host memory from the end of the block's
forward pass until its backward pass: they are copied on a stream of their own while the block computes, and brought
back while the block behind it goes backward. torch's `save_on_cpu` copies them on the stream that computes.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_fsdp_tools.accelerator import SideStream, side_stream_for
from hf_fsdp_tools.distributed.agreement import refuse_too_large
from hf_fsdp_tools.distributed.mesh import pinned_bytes
from hf_fsdp_tools.distributed.shards import Held
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.modeling.module_tree import ModuleTree
from hf_fsdp_tools.sharding.hf_interface import turn_cache_off
from hf_fsdp_tools.sharding.phases import Hook, Phase
from hf_fsdp_tools.sharding.sharding import Feature, Sharding
from hf_fsdp_tools.sharding.zero_grads import first_float
from hf_fsdp_tools.text import did_you_mean, first_line, grouped, quoted, show_bytes

_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "torch_attn::_varlen_attn",
)
_WORDS = {
    "matmul": ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm"),
    "attention": _ATTENTION,
}
"""Words for several of torch's operators."""


@dataclass(frozen=True, kw_only=True)
class Recompute:
    """Which blocks recompute their activations in the backward pass, and what they keep for it."""

    every_n_layers: int = 1
    """The blocks 0, n, 2n, … of each stack are checkpointed, the others keep their activations."""
    offload: bool = False
    """Whether the inputs of these blocks lie in host memory until their backward pass."""
    save_ops: tuple[str, ...] = ()
    """Operators whose results these blocks keep, on the device: "matmul", "attention", or torch's names."""

    @property
    def words(self) -> str:
        """What happens to activations, for a reader."""
        some = f" (every {ordinal(self.every_n_layers)} block of each stack)" if self.every_n_layers > 1 else ""
        kept = f", results of {', '.join(self.save_ops)} kept" if self.save_ops else ""
        return f"recomputed block by block{some}{kept}" + (", the blocks' inputs on the host" * self.offload)


def ordinal(number: int) -> str:
    """2 as "2nd"."""
    return f"{number}{ {2: 'nd', 3: 'rd'}.get(number, 'th') }"


def as_recompute(value: Any) -> Recompute | None:
    """What `activation_checkpointing=` says: True, False or None, or a mapping of what differs from all blocks."""
    if value is None or isinstance(value, bool):
        return Recompute() if value else None
    if isinstance(value, Recompute):
        return value
    names = [each.name for each in fields(Recompute)]
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"activation_checkpointing is {quoted(value)}: give True, False, or a mapping with {', '.join(names)}."
        )
    for name in value.keys() - set(names):
        raise ConfigError(f"activation_checkpointing has no {name!r}{did_you_mean(str(name), names)}")
    ops = value.get("save_ops") or ()
    words = [each.strip() for each in ops.split(",")] if isinstance(ops, str) else [str(each) for each in ops]
    every, offload = value.get("every_n_layers", 1), value.get("offload", False)
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ConfigError(f"every_n_layers is {quoted(every)}; it must be a whole number, 1 or more.")
    if not isinstance(offload, bool):
        raise ConfigError(f"offload of activation_checkpointing is {quoted(offload)}; it is True or False.")
    recompute = Recompute(every_n_layers=every, offload=offload, save_ops=tuple(filter(None, words)))
    operators_named(recompute.save_ops)
    return recompute


def operators_named(names: tuple[str, ...]) -> list[Any]:
    """torch's operators of these names: words of `_WORDS`, names in `aten` ("mm"), or with a namespace ("aten::mm")."""
    found: list[Any] = []
    for name in names:
        parts = [each.rpartition("::") for each in _WORDS.get(name, (name,))]
        packets = [getattr(getattr(torch.ops, space or "aten"), own, None) for space, _, own in parts]
        overloads = [getattr(each, overload) for each in packets if each is not None for overload in each.overloads()]
        if not overloads:
            known = [*_WORDS, *(each for each in dir(torch.ops.aten) if not each.startswith("__")), "mm"]
            raise ConfigError(
                f"save_ops: torch has no operator {name!r}{did_you_mean(name, known, otherwise='.')} Use matmul, "
                "attention, or a name such as aten::mm."
            )
        found += overloads
    return found


def check_checkpointing(model: nn.Module, recompute: Recompute | None = None) -> None:
    """Refuse to checkpoint activations of a model that cannot, or not of some blocks alone."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        raise ConfigError(
            f"{type(model).__name__} cannot checkpoint activations (supports_gradient_checkpointing is not set). "
            "Turn activation_checkpointing off, or wrap its blocks with torch's checkpoint_wrapper before sharding."
        )
    if recompute is not None and recompute != Recompute() and not any(True for _ in _stacks(model)):
        raise ConfigError(
            f"{type(model).__name__} has no GradientCheckpointingLayer, by which transformers marks blocks: all of its "
            "activations are recomputed, or none. Leave every_n_layers, offload and save_ops out."
        )


def checkpoint_activations(
    model: nn.Module,
    recompute: Recompute | None = None,
    *,
    link_of: "Callable[[torch.Tensor], Link]" = lambda tensor: Link(side_stream_for([tensor])),
) -> None:
    """Let the blocks of a transformers model recompute their activations in the backward pass.

    `link_of` gives what copies a tensor to the host, where it is not this machine's.
    """
    recompute = recompute or Recompute()
    if hasattr(model, "activation_checkpointing_enable"):  # the name since transformers 5.20
        model.activation_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]  # transformers' own
    else:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]  # transformers' own
    run = partial(checkpoint, use_reentrant=False)
    if recompute.save_ops:
        run = partial(run, context_fn=partial(_contexts, frozenset(operators_named(recompute.save_ops))))
    for blocks in _stacks(model):
        chain = _Chain()
        for index, block in enumerate(blocks):
            own: Any = block
            own.gradient_checkpointing = index % recompute.every_n_layers == 0
            own._gradient_checkpointing_func = run
            if recompute.offload:
                own._gradient_checkpointing_func = partial(
                    _run_offloaded, run=run, chain=chain, is_first=index == 0, link_of=link_of
                )


def _stacks(model: nn.Module) -> Iterator[list[GradientCheckpointingLayer]]:
    """Yield the blocks that transformers checkpoints, those below one module together."""
    blocks = (
        (name, module) for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)
    )
    yield from grouped((name.rpartition(".")[0], block) for name, block in blocks).values()


# ---- results that are kept ----


class _Choosing(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """A block's forward pass, which keeps the results of some operators; and the same pass again, which takes them.

    torch's own (`create_selective_checkpoint_contexts`, to 2.15) count every operator, those too by which FSDP2 gathers
    units inside the block, which are others when it runs again; and they refuse results that the model writes to.
    """

    supports_higher_order_operators = True
    ignore_compile_internals = classmethod(lambda cls: True)

    def __init__(self, operators: frozenset[Any], results: dict[tuple[Any, int], Any], *, is_again: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._operators, self._results, self._is_again = operators, results, is_again
        self._count: Counter[Any] = Counter()

    def __enter__(self) -> Any:
        self._count.clear()  # a backward pass may come twice
        return super().__enter__()  # type: ignore[no-untyped-call]  # torch's own

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = (func, self._count[func])
        self._count[func] += func in self._operators
        if self._is_again and place in self._results:
            return self._results.pop(place)
        if not self._is_again and getattr(getattr(func, "_schema", None), "is_mutable", False):
            written = _memories((args, kwargs))
            for each, kept in self._results.items():
                if written & _memories(kept):  # copied before it may be written to
                    self._results[each] = tree_map_only(torch.Tensor, torch.clone, kept)
        result = func(*args, **kwargs or {})
        if not self._is_again and func in self._operators:
            self._results[place] = tree_map_only(torch.Tensor, torch.Tensor.detach, result)
        return result


def _contexts(operators: frozenset[Any]) -> tuple[_Choosing, _Choosing]:
    results: dict[tuple[Any, int], Any] = {}
    return _Choosing(operators, results, is_again=False), _Choosing(operators, results, is_again=True)


def _memories(values: Any) -> set[int]:
    tensors = (each for each in tree_leaves(values) if isinstance(each, torch.Tensor))
    return {Held.of(each).memory.untyped_storage()._cdata for each in tensors}


# ---- inputs of blocks on the host ----


class Link:
    """What copies between a device and pinned memory, on a stream next to the computation; or within host memory."""

    def __init__(self, side: SideStream | None) -> None:
        self._side = side

    def keep(self, source: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Begin to copy a tensor of one dimension into host memory: that memory, and a mark behind the copy.

        Raises:
            ConfigError: the system does not give so much pinned memory.
        """
        if self._side is None:
            return source.clone(), None
        try:
            host = self._side.pinned(source.nbytes).view(source.dtype)
        except RuntimeError as error:  # of torch's allocators, which have no class of their own for it on every device
            raise ConfigError(
                f"The system does not give {show_bytes(pinned_bytes(source.nbytes))} more of pinned host memory for "
                f"the inputs of checkpointed blocks ({first_line(error)}). {_CURE}"
            ) from error
        return host, self._side.copy_after_current(host, source)

    def fetch(self, host: torch.Tensor, to: torch.Tensor) -> Any:
        """Begin to copy host memory of `keep` back; a mark behind the copy."""
        return to.copy_(host) if self._side is None else self._side.copy_after_current(to, host)

    def wait(self, mark: Any) -> None:
        """Let what is computed from now on wait for a mark."""
        if self._side is not None:
            self._side.lead(mark)


_CURE = "Take a smaller batch or a larger cp_size, free memory, or turn offload of activation checkpointing off."


@dataclass(eq=False)
class _Chain:
    """The blocks of a stack in a forward pass, one behind the other."""

    last: "weakref.ref[_Kept] | None" = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Chain":
        return _Chain()


class _Kept:
    """Hidden states in host memory."""

    def __init__(self, tensor: torch.Tensor, link: Link, before: "weakref.ref[_Kept] | None") -> None:
        self._link, self._before = link, before
        self._size, self._stride = tensor.size(), tensor.stride()
        self._like = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._source: torch.Tensor | None = tensor.detach()
        self._host, self._mark = link.keep(self._flat(self._source))
        self._fetched: torch.Tensor | None = None

    def _flat(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided((tensor.numel(),), (1,))

    def settle(self) -> None:
        """Give the memory on the device up, once the copy is there."""
        self._link.wait(self._mark)
        self._source = None

    def fetch(self) -> None:
        """Begin to bring them back, unless that has begun."""
        if self._fetched is None:
            self._fetched = self._like.new_empty_strided(self._size, self._stride)
            self._mark = self._link.fetch(self._host, self._flat(self._fetched))

    def take(self) -> torch.Tensor:
        """The hidden states on the device; those of the block before are on their way then."""
        self.fetch()
        self._link.wait(self._mark)
        tensor, self._fetched = self._fetched, None
        assert tensor is not None
        if self._before is not None and (before := self._before()) is not None:
            before.fetch()
        return tensor


@torch.compiler.disable(recursive=False)  # type: ignore[no-untyped-call, untyped-decorator]  # torch's own
def _run_offloaded(
    function: Callable[..., Any],
    *args: Any,
    run: Callable[..., Any],
    chain: _Chain,
    is_first: bool,
    link_of: Callable[[torch.Tensor], Link],
) -> Any:
    """Run a block by `run`, torch's checkpoint, and keep its input on the host."""
    hidden = first_float(args) if torch.is_grad_enabled() else None
    if hidden is None or not hidden.requires_grad or not _is_dense(hidden):
        return run(function, *args)
    storage, shape = hidden.untyped_storage()._cdata, hidden.shape
    del hidden  # autograd keeps the functions below as long as what they pack
    made: list[_Kept] = []

    def pack(tensor: torch.Tensor) -> Any:
        if made or tensor.untyped_storage()._cdata != storage or tensor.shape != shape:
            return tensor
        made.append(_Kept(tensor, link_of(tensor), None if is_first else chain.last))
        chain.last = weakref.ref(made[0])
        return made[0]

    def unpack(kept: Any) -> torch.Tensor:
        return kept.take() if isinstance(kept, _Kept) else kept

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        output = run(function, *args)
    for kept in made:
        kept.settle()
    return output


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements lie one behind the other, in whatever order."""
    place = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride != place:
            return False
        place *= size
    return tensor.numel() > 0


# ---- whether the host holds them ----


class Checkpointing(Feature):
    """Blocks recompute their activations in the backward pass, as a model's `activation_checkpointing` says."""

    def check(self, model: nn.Module, tree: ModuleTree, sharding: Sharding) -> None:
        """Blocks that transformers marks are looked for."""
        if sharding.activation_checkpointing is not None:
            check_checkpointing(model, sharding.activation_checkpointing)

    def before_units(self, model: nn.Module, tree: ModuleTree, sharding: Sharding) -> None:
        """Blocks get torch's checkpoint; the cache is turned off, which would keep what is to be recomputed."""
        if sharding.activation_checkpointing is not None:
            turn_cache_off(model)
            checkpoint_activations(model, sharding.activation_checkpointing)

    def hooks(self, model: nn.Module, tree: ModuleTree, sharding: Sharding) -> Iterator[Hook]:
        """Refuse the first forward pass in training, on every rank, where some machine has no memory for the inputs of
        the decoder's checkpointed blocks.

        A rank keeps its tokens times the width of the decoder in the dtype of computation, for each such block. That
        pass exchanges sizes through the store.
        """
        if sharding.activation_checkpointing is None or not sharding.activation_checkpointing.offload:
            return
        ranks = sorted(sharding.mesh.mesh.flatten().tolist())
        dtype, ranks_per_row = sharding.mp_policy.param_dtype, sharding.axes.dims.cp_size
        config: Any = getattr(model, "config", None)
        find = getattr(model, "get_decoder", None)
        decoder = find() if find is not None and not getattr(config, "is_encoder_decoder", False) else None
        width = getattr(config.get_text_config(), "hidden_size", None) if hasattr(config, "get_text_config") else None
        if not isinstance(decoder, nn.Module) or width is None:
            return  # what their blocks take is not known before they run
        blocks = sum(block.gradient_checkpointing for stack in _stacks(decoder) for block in stack)
        weight = next(model.parameters())
        each = width * (dtype or weight.dtype).itemsize
        is_checked = False

        def check(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal is_checked
            if is_checked or not (module.training and torch.is_grad_enabled()):
                return
            is_checked = True
            rows = next((kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None), None)
            rows = next(iter(args), None) if rows is None else rows
            tokens = rows.shape[0] * rows.shape[1] if isinstance(rows, torch.Tensor) and rows.dim() > 1 else 0
            num_bytes = -(-tokens // ranks_per_row) * each
            taken = num_bytes if weight.device.type == "cpu" else pinned_bytes(num_bytes)
            fact = "The inputs of checkpointed blocks are offloaded"
            refuse_too_large(blocks * taken, ConfigError, fact, _CURE, ranks=ranks)

        yield Hook(model, Phase.FIRST_PASS, check)
