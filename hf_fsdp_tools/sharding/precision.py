"""In which dtypes a model computes: one table, and what carries it out for units and for the whole model of one rank.

Under mixed precision the modules that compute with shards get inputs in their dtype, and the root runs in autocast,
which computes losses in fp32: FSDP2 itself would cast what enters the root, with labels, token counts and masks.

Weights of units are gathered by FSDP2 in the dtype of computation. A model that one rank holds whole on its device is a
plain one, of which no unit is gathered: weights are cast, those of a block when it runs, others when the module that
has them runs. The copies are what autograd keeps, as under autocast, and gradients reach the weights through the cast.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_fsdp_tools.modeling.meta import kept_in_fp32
from hf_fsdp_tools.modeling.module_tree import ModuleTree, takes_fp32
from hf_fsdp_tools.sharding.fsdp2_internals import gather_as_stored
from hf_fsdp_tools.sharding.phases import Hook, Installed, Phase
from hf_fsdp_tools.sharding.sharding import Feature, Sharding
from hf_fsdp_tools.sharding.zero_grads import first_float
from hf_fsdp_tools.text import grouped

OF_RECURRENCES = (".A_log", ".dt_bias")
"""Parameters with which models compute in fp32, whatever the rest computes in; autocast leaves them as they are."""

_LOWER = (torch.bfloat16, torch.float16)
"""The dtypes to which autocast casts."""

# ---- the table ----


@dataclass
class Dtypes:
    """In which dtypes one module computes; None is as it comes."""

    inputs: torch.dtype | None = None
    outputs: torch.dtype | None = None
    weights: tuple[str, ...] = ()
    """Names of its own weights that are whole on every rank, and are cast apart from units."""
    weights_in: torch.dtype | None = None
    autocast: torch.dtype | bool | None = None
    """False turns it off: in the dtype of gathered weights, norms and softmax too, it would keep more memory."""


def dtypes_of(
    model: nn.Module,
    dtype: torch.dtype,
    *,
    units: Collection[nn.Module],
    replicated: Collection[torch.Tensor],
    in_fp32: Collection[torch.Tensor] = (),
) -> dict[nn.Module, Dtypes]:
    """The dtypes of the modules of a model that computes in mixed precision."""
    table: dict[nn.Module, Dtypes] = defaultdict(Dtypes)
    for module in _first_with_shards(model, units, {*replicated, *in_fp32}):
        if not (own := set(module.parameters())) or not own.issubset(in_fp32):
            table[module].inputs = dtype
    apart = {weight for weight in replicated if weight.is_floating_point() and weight.dim()}.difference(in_fp32)
    for module in model.modules():
        names = tuple(name for name, weight in module._parameters.items() if weight in apart)
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
            if module.affine:
                table[module].weights, table[module].weights_in = ("weight", "bias"), module.running_mean.dtype
        elif names:
            table[module].weights, table[module].weights_in = names, dtype
            if module is not model:  # the root takes labels and counts too
                table[module].inputs = dtype
        own = {weight for weight in module._parameters.values() if weight is not None}
        if table[module].inputs is not None or (own and own.issubset(in_fp32)):  # in fp32, also in the root's own code
            table[module].autocast = False
        # the root's own code, which computes losses and the like in fp32, as under DDP
        if dtype in _LOWER and (module is model or _holds_matrices(module)):
            table[module].autocast = dtype
    return table


def _dtypes_of_copies(model: nn.Module) -> dict[nn.Module, Dtypes]:
    """The dtypes of copies that PEFT trains in another dtype than their originals: they take and give what these do."""
    table: dict[nn.Module, Dtypes] = defaultdict(Dtypes)
    for wrapper in model.modules():
        inside: Any = wrapper._modules
        original, copies = inside.get("original_module"), inside.get("modules_to_save")
        for copy in copies.children() if original is not None and copies is not None else ():
            floats = ([p.dtype for p in each.parameters() if p.is_floating_point()] for each in (original, copy))
            stored, own = (next(iter(dtypes), None) for dtypes in floats)
            if own is not None and stored is not None and own != stored:
                table[copy] = Dtypes(inputs=own, outputs=stored)
    return table


def _holds_matrices(module: nn.Module) -> bool:
    """Whether a module multiplies activations by matrices in fp32 that are buffers: decays of MiniMax, masks of GPT."""
    return any(b is not None and b.is_floating_point() and b.dim() > 2 for b in module._buffers.values())


def _first_with_shards(
    root: nn.Module, units: Collection[nn.Module], replicated: Collection[torch.Tensor]
) -> Iterator[nn.Module]:
    """The outermost modules below the root that compute with shards: units, and owners of what the root unit holds.

    In a unit with floating-point buffers, layers of torch too: buffers stay as they are, fp32 for example, and so is
    what is computed with them, which a layer with gathered weights does not take. A model's own layers cast themselves.
    """
    seen: set[nn.Module] = set()

    def walk(module: nn.Module, *, inside: bool) -> Iterator[nn.Module]:
        for child in module.children():
            if child in seen:
                continue
            seen.add(child)
            is_unit = child in units
            has_shards = any(weight is not None and weight not in replicated for weight in child._parameters.values())
            if is_unit or (has_shards and (not inside or type(child).__module__.startswith(("torch.nn.", "torchao.")))):
                yield child
            if not is_unit or any(buffer.is_floating_point() for buffer in child.buffers()):
                yield from walk(child, inside=inside or is_unit)

    return walk(root, inside=False)


# ---- what carries it out ----


class Precision(Feature):
    """Weights, inputs and outputs get the dtypes of `mp_policy`, with units and without."""

    def hooks(self, model: nn.Module, tree: ModuleTree, sharding: Sharding) -> Iterator[Hook]:
        """The casts of the table; of weights, those that FSDP2 does not make."""
        policy, modules = sharding.mp_policy, dict(model.named_modules(remove_duplicate=False))
        replicated = {model.get_parameter(name) for name in sharding.plan.replicated}
        in_fp32 = {tensor for _, _, tensor in kept_in_fp32(model, policy.param_dtype)}
        in_fp32 |= {tensor for name, tensor in model.named_parameters() if name.endswith(OF_RECURRENCES)}
        units = dict.fromkeys(modules[name] for name in sorted(n for unit in sharding.plan.units for n in unit.modules))
        if not sharding.is_whole:
            gather_as_stored(model, in_fp32)
        elif policy.param_dtype is not None:
            yield from hooks_of_weights(model, units, policy.param_dtype, stay={*replicated, *in_fp32})
        if policy.param_dtype is None or not policy.cast_forward_inputs:
            table = _dtypes_of_copies(model)
        else:
            table = dtypes_of(model, policy.param_dtype, units=units, replicated=replicated, in_fp32=in_fp32)
            if policy.output_dtype is None:
                yield Hook(model, Phase.OUTPUT, _return_fp32)
        for unit in units if sharding.is_whole and policy.output_dtype is not None else ():
            table[unit].outputs = policy.output_dtype
        yield from hooks_of_dtypes(table, sharding.mesh.device_type)


def hooks_of_dtypes(table: Mapping[nn.Module, Dtypes], device_type: str = "cpu") -> Iterator[Hook]:
    """Yield the hooks that give modules the dtypes of a table."""
    for module, row in table.items():
        if row.weights_in is not None:
            cast = CastWeights([(module, name) for name in row.weights], row.weights_in)
            yield Hook(module, Phase.CONTEXT, cast.in_pass)
        if row.inputs is not None:
            yield Hook(module, Phase.CAST, partial(cast_inputs, dtype=row.inputs, has_own_cast=takes_fp32(module)))
        if isinstance(row.autocast, torch.dtype):
            yield Hook(module, Phase.CONTEXT, partial(torch.autocast, device_type, row.autocast, cache_enabled=False))
        elif row.autocast is False:
            yield Hook(module, Phase.CONTEXT, partial(torch.autocast, device_type, enabled=False))
        if row.outputs is not None:
            yield Hook(module, Phase.OUTPUT, partial(_cast_output, dtype=row.outputs))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
def cast_inputs(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    dtype: torch.dtype,
    has_own_cast: bool = False,
) -> Any:
    """Cast floating-point inputs, also in tuples and lists, to the dtype in which a module's weights are gathered; not
    hidden states that the module casts itself.

    Rotary tables next to hidden states that have this dtype already are left alone: a model that makes them in fp32
    rotates in fp32.
    """
    floats = (v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor) and v.is_floating_point())
    hidden = next(floats, None)
    kept = ("position_embeddings",) if hidden is not None and hidden.dtype == dtype else ()
    alone = hidden if has_own_cast else None
    cast = {
        key: value if value is alone or (key in kept and type(value) is tuple) else _cast(value, dtype)
        for key, value in kwargs.items()
    }
    return tuple(value if value is alone else _cast(value, dtype) for value in args), cast


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        # A number next to hidden states takes their dtype; the Trainer hands a count to each layer.
        if not value.is_floating_point() or value.dtype == dtype or not value.dim():
            return value
        # The least number of fp32, which masks are made of, is no number of bf16 or fp16: it stays one, and not -inf.
        limit = torch.finfo(dtype).max
        if value.requires_grad or torch.finfo(value.dtype).max <= limit:  # hidden states; clamp would drop a gradient
            return value.to(dtype)
        return torch.where(value.isinf(), value, value.clamp(-limit, limit)).to(dtype)
    if type(value) in (tuple, list):
        return type(value)(_cast(item, dtype) for item in value)
    return value


def _cast_output(module: nn.Module, args: object, output: Any, *, dtype: torch.dtype) -> Any:
    return tree_map_only(torch.Tensor, lambda each: each.to(dtype) if each.is_floating_point() else each, output)


def _return_fp32(model: Any, args: object, output: Any) -> Any:
    """Return outputs in fp32, of which a script may compute its own loss, as Accelerate does under DDP.

    Logits of a language model that has computed its loss stay as they are: a copy would be large, and nobody reads it.
    """
    loss = output.get("loss") if isinstance(output, dict) else output[0] if isinstance(output, tuple) else None
    has_loss = isinstance(loss, torch.Tensor) and not loss.dim()
    if has_loss and hasattr(model, "get_output_embeddings") and model.get_output_embeddings() is not None:
        return None
    return _in_fp32(output)


def _in_fp32(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in _LOWER else value
    if type(value) in (tuple, list):
        return type(value)(_in_fp32(item) for item in value)
    if isinstance(value, dict):  # and the outputs of transformers
        for key, item in value.items():
            value[key] = _in_fp32(item)
    return value


# ---- weights without units ----


class CastWeights:
    """Weights whose copies in the dtype of computation stand in their place while they are used."""

    def __init__(self, places: Sequence[tuple[nn.Module, str]], dtype: torch.dtype) -> None:
        self._places, self._dtype = places, dtype
        self._own: list[tuple[dict[str, Any], str, torch.Tensor]] = []

    def _others(self) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
        """Yield the weights that have another dtype, each with where it is registered."""
        for module, name in self._places:
            weight = module._parameters.get(name)
            if weight is not None and weight.is_floating_point() and weight.dtype != self._dtype:
                yield module._parameters, name, weight

    def sizes(self) -> dict[int, int]:
        """Bytes of the copies, by the `id` of their weights."""
        return {id(weight): weight.numel() * self._dtype.itemsize for _, _, weight in self._others()}

    def cast(self) -> None:
        """Put copies in the place of weights, unless they are there; a tied weight has one."""
        if self._own:
            return
        self._own = list(self._others())
        weights = {id(weight): weight for _, _, weight in self._own}
        copies = {key: weight.to(self._dtype) for key, weight in weights.items()}
        for store, name, weight in self._own:
            copy = copies[id(weight)]
            # PEFT puts what it adds to frozen stacks of experts around a parameter, for the time of a pass.
            store[name] = copy if weight.requires_grad else nn.Parameter(copy, requires_grad=False)

    def restore(self) -> None:
        """Put the weights back."""
        for store, name, weight in self._own:
            store[name] = weight
        self._own = []

    @contextmanager
    def in_pass(self) -> Iterator[None]:
        """A block, a forward pass, in which the copies are there; copies of several passes stay."""
        if self._own:
            yield
            return
        self.cast()
        try:
            yield
        finally:
            self.restore()

    def cast_again(self, module: Any, args: object, kwargs: object) -> None:
        """Let the copies be made once more where a module's pass is recomputed: transformers' blocks checkpoint their
        `forward`, around which no hook runs then. A hook before each pass, as scripts turn checkpointing on later."""
        run = getattr(module, "_gradient_checkpointing_func", None)
        if run is not None and getattr(getattr(run, "func", None), "__self__", None) is not self:
            module._gradient_checkpointing_func = partial(self._run_again, run)

    def _run_again(self, run: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return run(self.in_pass()(function), *args, **kwargs)


class LentWeights(CastWeights):
    """Weights of a head of which attributes give copies after a pass of the base alone, until its backward pass:
    chunked losses, as TRL's, read them without a call of the model. Modules register the weights all the time."""

    def keep_until_backward(self, base: nn.Module, args: object, output: object) -> None:
        """Let attributes give copies, unless a pass of the whole model goes on, which has its own."""
        hidden = first_float(output)
        if not torch.is_grad_enabled() or hidden is None or not hidden.requires_grad:
            return
        self.cast()
        lent = [(vars(module), name, module._parameters[name]) for module, name in self._places] if self._own else []
        super().restore()
        for store, name, copy in lent:
            store[name] = copy
        if lent:
            hidden.register_hook(lambda gradient: self._end(lent))  # type: ignore[no-untyped-call]  # torch's own

    def _end(self, lent: Iterable[tuple[dict[str, Any], str, object]]) -> None:
        """Let attributes give weights again, unless a later pass has lent others."""
        if all(store.get(name) is copy for store, name, copy in lent):
            self.restore()

    def give_back(self, module: object, args: object, kwargs: object) -> None:
        """Let attributes give weights again before a pass: the backward pass of the one before may never have come."""
        self.restore()

    def restore(self) -> None:
        """Let attributes give weights again."""
        super().restore()
        for module, name in self._places:
            vars(module).pop(name, None)


def hooks_of_weights(
    model: nn.Module, units: Iterable[nn.Module], dtype: torch.dtype, stay: Collection[torch.Tensor] = ()
) -> Iterator[Hook]:
    """Yield the hooks that cast weights, and note what they cast: those of a checkpointed block together, or of a unit
    with children, and others of each module."""
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    caster: dict[nn.Module, nn.Module] = {}
    for block in (*blocks, *(unit for unit in units if unit is not model and any(unit.children()))):
        block = getattr(block, "_checkpoint_wrapped_module", block)  # inside of torch's own wrapper
        for module in block.modules():  # outer ones come before those inside them
            caster.setdefault(module, block)
    places = [
        (caster.get(module, module), (module, name))
        for module in model.modules()
        for name, weight in module._parameters.items()
        if weight is not None and weight.is_floating_point() and weight not in stay
    ]
    casts = {module: CastWeights(own, dtype) for module, own in grouped(places).items()}
    for module, cast in casts.items():
        Installed.put(module, casts=(cast,))
        yield Hook(module, Phase.CONTEXT, cast.in_pass)
        if hasattr(module, "gradient_checkpointing"):
            yield Hook(module, Phase.CAST, cast.cast_again)
    base, head = getattr(model, "base_model", model), getattr(model, "get_output_embeddings", lambda: None)()
    names = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    inside = set(head.modules()) if isinstance(head, nn.Module) else set()  # PEFT's wrapper has children
    of_head = [place for _, place in places if place[0] in inside]
    # Once for all that use them in a pass, so that gradients are added up in the dtype of computation, as in a unit;
    # and for chunked losses, which do not call the head.
    shared = [(m, key) for block, (m, key) in places if block is m and names[id(m._parameters[key])] > 1]
    together = [*dict.fromkeys([*shared, *of_head])]
    if together:
        in_pass, lent = CastWeights(together, dtype), LentWeights(of_head, dtype)
        Installed.put(model, casts=(in_pass, lent, *Installed.of(model).casts))
        yield Hook(model, Phase.CONTEXT, in_pass.in_pass)
        if base is not model:
            yield from (Hook(module, Phase.CAST, lent.give_back) for module in (model, base))
            yield Hook(base, Phase.KEEP, lent.keep_until_backward)
