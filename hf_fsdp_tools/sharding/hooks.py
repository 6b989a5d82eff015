"""Hooks of a sharded model next to FSDP2's own.

Under mixed precision the modules that compute with shards get inputs in their dtype, and the root runs in autocast,
which computes losses in fp32: FSDP2 itself would cast what enters the root, with labels, token counts and masks. The
other hooks keep memory, outputs and gradients right where FSDP2 leaves a gap; each says below which one.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.distributed.agreement import all_ranks
from hf_fsdp_tools.distributed.steps import Step, at_steps
from hf_fsdp_tools.modeling.meta import kept_in_fp32
from hf_fsdp_tools.modeling.module_tree import ModuleTree, has_forward, takes_fp32
from hf_fsdp_tools.modeling.roles import lists_of_experts
from hf_fsdp_tools.sharding.fsdp2_internals import (
    complete_unit,
    end_alone,
    follow_training,
    forward_begun,
    gather_as_stored,
    gather_for_backward,
    in_backward,
    in_pass,
    make_gathered_memory,
    make_root,
    refuse_gathered,
    reshard_units,
    show_shards,
    unit_modules,
    use_frozen_in_place,
)
from hf_fsdp_tools.sharding.phases import Hook, Phase
from hf_fsdp_tools.sharding.sharding import Feature, Sharded, Sharding
from hf_fsdp_tools.sharding.zero_grads import first_float, in_graph, own_weights, with_tensor, with_zero_grads

_IS_BEFORE_2_13 = not hasattr(FSDPModule, "reset_iter_state")
"""Whether torch is older than 2.13."""

OF_RECURRENCES = (".A_log", ".dt_bias")
"""Parameters with which models compute in fp32, whatever the rest computes in; autocast leaves them as they are."""

_LOWER = (torch.bfloat16, torch.float16)
"""The dtypes to which autocast casts."""


class Units(Feature):
    """What FSDP2 leaves open around units: dtypes of inputs and outputs, memory, gradients of what did not run."""

    def hooks(self, model: nn.Module, tree: ModuleTree, sharding: Sharding) -> Iterator[Hook]:
        """Each hook says below which gap it closes."""
        if sharding.is_whole:
            return
        at_steps(Step.STOP, refuse_gathered)
        in_fp32 = kept_as_stored(model, sharding.mp_policy.param_dtype)
        gather_as_stored(model, in_fp32)
        units = {module for module in model.modules() if isinstance(module, FSDPModule)}
        for module in units:
            assert isinstance(module, nn.Module)
            if module is not model and module._parameters:
                yield Hook(module, Phase.COPY, _part_from_weights)
            yield Hook(module, Phase.COPY, _as_no_views)
            yield Hook(module, Phase.MEMORY, partial(_prepare_unit, model=model, is_alone=sharding.mesh.shape[-1] == 1))
            if len(unit_modules(module)) > 1:
                yield Hook(module, Phase.KEEP, gather_for_backward)
            if module is not model:
                yield Hook(module, Phase.KEEP, partial(end_alone, model=model))
        replicated = {parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)}
        yield from hooks_of_precision(model, sharding, units=units, replicated=replicated, in_fp32=in_fp32)
        yield from hooks_of_experts(tree)
        head = getattr(model, "get_output_embeddings", lambda: None)()
        base = getattr(model, "base_model", model)
        if isinstance(head, FSDPModule) and base is not model:
            yield Hook(base, Phase.KEEP, partial(_gather_head, head=head))
        yield Hook(model, Phase.CONTEXT, partial(_pass, model))
        for part in model.modules():
            is_within = part is not model and part not in units and has_forward(part)
            if is_within and units.intersection(part.modules()):  # the base, a decoder, a tower
                yield Hook(part, Phase.CONTEXT, partial(_pass_within, model))
        if _IS_BEFORE_2_13:
            yield Hook(model, Phase.OUTPUT, _complete_units)


def kept_as_stored(model: nn.Module, dtype: torch.dtype | None) -> set[torch.Tensor]:
    """The weights with which a model computes in their own dtype, whatever the rest computes in."""
    in_fp32 = {tensor for _, _, tensor in kept_in_fp32(model, dtype)}
    return in_fp32 | {tensor for name, tensor in model.named_parameters() if name.endswith(OF_RECURRENCES)}


def hooks_of_precision(model: nn.Module, sharding: Sharding, **sets: Any) -> Iterator[Hook]:
    """Yield the hooks that a model's `mp_policy` asks for, with the sets of `hooks_of_casts`."""
    policy = sharding.mp_policy
    if policy.param_dtype is None or not policy.cast_forward_inputs:
        yield from _cast_around_copies(model)
        return
    yield from hooks_of_casts(model, policy.param_dtype, **sets, device_type=sharding.mesh.device_type)
    if policy.output_dtype is None:
        yield Hook(model, Phase.OUTPUT, _return_fp32)


def hooks_of_casts(
    model: nn.Module,
    param_dtype: torch.dtype,
    *,
    units: Collection[nn.Module],
    replicated: Collection[torch.Tensor],
    in_fp32: Collection[torch.Tensor] = (),
    device_type: str = "cpu",
) -> Iterator[Hook]:
    """Yield the hooks of mixed precision for the modules of a model."""
    casting = dict.fromkeys(_first_with_shards(model, units, {*replicated, *in_fp32}))
    for module in [each for each in casting if (own := set(each.parameters())) and own.issubset(in_fp32)]:
        del casting[module]
    cast_apart = {weight for weight in replicated if weight.is_floating_point() and weight.dim()}.difference(in_fp32)
    for module in model.modules():
        names = tuple(name for name, weight in module._parameters.items() if weight in cast_apart)
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
            if module.affine:
                yield Hook(module, Phase.CONTEXT, partial(_weights_in, module, ("weight", "bias"), None))
        elif names:
            yield Hook(module, Phase.CONTEXT, partial(_weights_in, module, names, param_dtype))
            casting.setdefault(module)
    casting.pop(model, None)  # the root takes labels and counts too
    for module in casting:
        casting_hook = partial(cast_inputs, dtype=param_dtype, has_own_cast=takes_fp32(module))
        yield Hook(module, Phase.CAST, casting_hook)
        # in the dtype of the gathered weights, norms and softmax too: autocast would keep more memory
        yield Hook(module, Phase.CONTEXT, partial(torch.autocast, device_type, enabled=False))
    for module in model.modules():
        own = {weight for weight in module._parameters.values() if weight is not None}
        if own and own.issubset(in_fp32):  # in fp32, also in the root's own code
            yield Hook(module, Phase.CONTEXT, partial(torch.autocast, device_type, enabled=False))
    if param_dtype in _LOWER:
        lower = partial(torch.autocast, device_type, param_dtype, cache_enabled=False)
        yield from (Hook(module, Phase.CONTEXT, lower) for module in model.modules() if _holds_matrices(module))
        # the root's own code, which computes losses and the like in fp32, as under DDP
        yield Hook(model, Phase.CONTEXT, lower)


def _holds_matrices(module: nn.Module) -> bool:
    """Whether a module multiplies activations by matrices in fp32 that are buffers: decays of MiniMax, masks of GPT."""
    return any(b is not None and b.is_floating_point() and b.dim() > 2 for b in module._buffers.values())


def _cast_around_copies(model: nn.Module) -> Iterator[Hook]:
    """Let the copies that PEFT trains in another dtype than their originals take and give what these do."""
    for wrapper in model.modules():
        original, copies = (wrapper._modules.get(name) for name in ("original_module", "modules_to_save"))
        if original is None or copies is None:
            continue
        for copy in copies.children():
            floats = ([p.dtype for p in each.parameters() if p.is_floating_point()] for each in (original, copy))
            stored, own = (next(iter(dtypes), None) for dtypes in floats)
            if own is not None and stored is not None and own != stored:
                yield Hook(copy, Phase.CAST, partial(cast_inputs, dtype=own))
                yield Hook(copy, Phase.OUTPUT, partial(_cast_output, dtype=stored))


def hooks_of_experts(tree: ModuleTree) -> Iterator[Hook]:
    """Let every expert of a list be part of the result of the module that runs the list."""
    for node in lists_of_experts(tree.root):
        runner = next((above for above in (node, *node.ancestors()) if has_forward(above.module)), None)
        if runner is not None:
            yield Hook(runner.module, Phase.REACH, partial(_reach_experts, experts=node.module))


@contextmanager
def _pass(model: nn.Module) -> Iterator[None]:
    """A pass of a model, or of its base alone, at whose end modules register shards: an optimizer made now, or a change
    in place, is of these. What FSDP2 keeps gathered for backward stays so; without gradients, or after an error, it
    does not."""
    yield
    if in_pass(model):  # FSDP2 waits for the end of a pass that has failed
        reshard_units(model)
    if Sharded.of(model).gathered:
        return
    for module in model.modules() if not torch.is_grad_enabled() else ():
        if isinstance(module, FSDPModule):
            module.reshard()
    show_shards(model)


@contextmanager
def _pass_within(model: nn.Module) -> Iterator[None]:
    """Let a pass of the base or a tower alone be one of the model, in whose own unit weights of it may lie."""
    with nullcontext() if in_pass(model) else _pass(model), forward_begun(model):
        yield


def _gather_head(base: nn.Module, args: object, output: object, *, head: FSDPModule) -> None:
    """Gather a head before its weight is read: chunked losses, as TRL's, do not call it. The gradient of a shard that
    is read would be that of this rank's rows alone."""
    if torch.is_grad_enabled():
        head.unshard()


def _prepare_unit(module: Any, args: object, kwargs: object, *, model: nn.Module, is_alone: bool) -> None:
    """Let the model be the root, whichever unit runs first (scripts run the base, PEFT's prompts the embedding); follow
    what is trained now; and make the memory into which a unit gathers outside of inference mode.

    FSDP2 (torch 2.11 to 2.13) makes it when a unit is gathered for the first time. Made in inference mode, it fails in
    the first training step; on one GPU, and with parameters split along another dimension than 0, in the forward pass.
    """
    make_root(model)
    if is_alone:
        use_frozen_in_place(module)
    follow_training(module)
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            make_gathered_memory(module)


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
    return _cast(output, dtype)


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


@contextmanager
def _weights_in(module: Any, names: Collection[str], dtype: torch.dtype | None) -> Iterator[None]:
    """Give a module its weights of these names in another dtype for a block; None: that of its running statistics."""
    wanted = dtype or module.running_mean.dtype
    own = {name: weight for name in names if (weight := module._parameters[name]) is not None}
    module._parameters.update({name: weight.to(wanted) for name, weight in own.items()})
    try:
        yield
    finally:
        module._parameters.update(own)


def _part_from_weights(module: nn.Module, args: object, output: Any) -> Any:
    """Copy an output that is a view of the module's own weights."""
    weights = (weight for weight in module._parameters.values() if weight is not None)
    if not isinstance(output, torch.Tensor) or isinstance(output, DTensor):  # tensor parallel: it has no storage
        return output
    own = {weight.untyped_storage().data_ptr() for weight in weights if not isinstance(weight, DTensor)}
    return output.clone() if output.untyped_storage().data_ptr() in own else output


def _as_no_views(module: nn.Module, args: object, output: Any) -> Any:
    """Hand on the same memory in tensors that are no views. A write to a view (RoCBert's) takes FSDP2's hook from it,
    and the unit is not gathered for the backward pass; FSDP2 warns of each."""
    for tensor in dict.fromkeys(in_graph(output)):
        if not isinstance(tensor, DTensor) and tensor._is_view():
            output = with_tensor(output, tensor, with_zero_grads(tensor))
    return output


def _reach_experts(runner: nn.Module, args: object, output: Any, *, experts: nn.Module) -> Any:
    """Give experts that got no token a gradient of zeros.

    FSDP2 reduces the gradients that a rank has. Where the tokens of ranks choose different experts, the ranks would
    reduce different ones: the run hangs, or sums up what does not belong together.
    """
    weights = own_weights([experts])  # experts that are units of their own are gathered one by one (`skipped`)
    if not weights or not torch.is_grad_enabled():
        return output
    tensor = None if isinstance(output, dict) else first_float(output)
    return output if tensor is None else with_tensor(output, tensor, with_zero_grads(tensor, *weights))


def _complete_units(model: nn.Module, args: object, output: Any) -> Any:
    """Complete every unit with a module that did not run, as when TRL uses the head's weight without its forward.

    Otherwise FSDP2 waits for this forward for ever: the unit is not resharded after an evaluation, and not gathered
    again for its backward pass or in the next step.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            output = complete_unit(module, output)
    return output


class Buffers(Feature):
    """All ranks of a mesh take over the first one's buffers before a forward pass, as under DDP.

    These are the buffers that a checkpoint holds (others are caches of a rank's own rows), once a forward pass changes
    any: BatchNorm, queues. The ranks compare that before passes 2, 3, 5, 9 and so on.
    """

    def hooks(self, model: nn.Module, tree: ModuleTree, sharding: Sharding) -> Iterator[Hook]:
        """The broadcast, where the model has such buffers."""
        if (mesh := sharding.mesh).size() == 1:
            return
        holders = [module for module in model.modules() if module._buffers.keys() - module._non_persistent_buffers_set]
        ranks, count, is_changed = sorted(mesh.mesh.flatten().tolist()), 0, False
        seen: dict[torch.Tensor, int] = {}
        broadcast: Any = dist._broadcast_coalesced  # type: ignore[attr-defined]  # which DDP calls

        def share(model: nn.Module, args: object, kwargs: object) -> None:
            nonlocal seen, count, is_changed
            if in_backward() or Sharded.of(model).gathered:  # then ranks run passes of their own
                return
            own = ({**m._buffers, **dict.fromkeys(m._non_persistent_buffers_set)}.values() for m in holders)
            held = [buffer for each in own for buffer in each if buffer is not None]
            if not is_changed and not count & (count - 1):
                before, seen = seen, {buffer: 0 if buffer.is_inference() else buffer._version for buffer in held}
                is_changed = count > 0 and any(all_ranks(before != seen, "comparing buffers", ranks=ranks))
            count += 1
            if is_changed:
                with torch.no_grad():
                    for group in reversed(mesh.get_all_groups()):
                        broadcast(group, held, 250 * 2**20, 0)

        if holders:
            yield Hook(model, Phase.BUFFERS, share)
