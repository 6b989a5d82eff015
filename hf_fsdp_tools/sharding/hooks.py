"""Hooks of a sharded model beside FSDP2's own.

Under mixed precision the modules that compute with shards get inputs in their dtype, and the root runs in autocast,
which computes losses in fp32: FSDP2 itself would cast what enters the root, with labels, token counts and masks. The
other hooks keep memory, outputs and gradients right where FSDP2 leaves a gap; each says below which one.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.distributed.agreement import all_ranks
from hf_fsdp_tools.modeling.notes import add_to_note, note_of
from hf_fsdp_tools.sharding.fsdp2_internals import (
    complete_unit,
    follow_training,
    gather_for_backward,
    in_backward,
    make_gathered_memory,
    unit_modules,
    use_frozen_in_place,
)
from hf_fsdp_tools.sharding.reached import first_float, reach_all, with_tensor

_IS_BEFORE_2_13 = not hasattr(FSDPModule, "reset_iter_state")
"""Whether torch is older than 2.13."""

_LOWER = (torch.bfloat16, torch.float16)
"""The dtypes to which autocast casts."""


def add_hooks(
    model: nn.Module,
    *,
    param_dtype: torch.dtype | None,
    output_dtype: torch.dtype | None = None,
    device_type: str = "cpu",
    kept: Collection[nn.Module] = (),
    experts: Mapping[nn.Module, nn.Module] | None = None,
    in_fp32: Collection[torch.Tensor] = (),
    is_one_rank: bool = False,
) -> None:
    """Give a model with all its units these hooks; those of an earlier call are removed."""
    for handle in note_of(model).hooks:
        handle.remove()
    units = {module for module in model.modules() if isinstance(module, FSDPModule)}
    hooks: list[Any] = []
    for module in units:
        assert isinstance(module, nn.Module)
        if module is not model and module._parameters:  # before FSDP2's own hook, which frees
            hooks.append(module.register_forward_hook(_part_from_weights, prepend=True))
        # before FSDP2's own hook, which gathers
        hooks.append(module.register_forward_pre_hook(_prepare_unit, prepend=True))
        if is_one_rank:
            hooks.append(module.register_forward_pre_hook(use_frozen_in_place, prepend=True))
        if len(unit_modules(module)) > 1:
            hooks.append(module.register_forward_hook(gather_for_backward))
    if param_dtype is not None:
        replicated = {parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)}
        options: Any = {"replicated": replicated, "in_fp32": in_fp32, "device_type": device_type}
        hooks += add_casts(model, param_dtype, units=units, **options)
        if output_dtype is None:
            hooks.append(model.register_forward_hook(_return_fp32))
    else:
        hooks += _cast_around_copies(model)
    hooks += reach_experts(experts or {})
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if isinstance(head, FSDPModule) and (base := getattr(model, "base_model", model)) is not model:
        hooks.append(base.register_forward_hook(partial(_gather_head, head=head)))
    # after FSDP2's own hooks
    if _IS_BEFORE_2_13:
        hooks.append(model.register_forward_hook(_complete_units))
    hooks.append(model.register_forward_hook(partial(_reshard_after_evaluation, kept=frozenset(kept))))
    add_to_note(model, hooks=tuple(hooks))


def add_casts(
    model: nn.Module,
    param_dtype: torch.dtype,
    *,
    units: Collection[nn.Module],
    replicated: Collection[torch.Tensor],
    in_fp32: Collection[torch.Tensor] = (),
    device_type: str = "cpu",
) -> list[Any]:
    """Give the modules of a model the hooks of mixed precision; return their handles. Nothing is communicated."""
    hooks: list[Any] = []
    casting = dict.fromkeys(_first_with_shards(model, units, {*replicated, *in_fp32}))
    for module in [each for each in casting if (own := set(each.parameters())) and own.issubset(in_fp32)]:
        del casting[module]
    cast_apart = {weight for weight in replicated if weight.is_floating_point() and weight.dim()}.difference(in_fp32)
    for module in model.modules():
        names = tuple(name for name, weight in module._parameters.items() if weight in cast_apart)
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
            if module.affine:
                hooks += _around(module, partial(_weights_in, module, ("weight", "bias"), None))
        elif names:
            hooks += _around(module, partial(_weights_in, module, names, param_dtype))
            casting.setdefault(module)
    casting.pop(model, None)  # the root takes labels and counts too
    for module in casting:
        hooks.append(module.register_forward_pre_hook(partial(cast_inputs, dtype=param_dtype), with_kwargs=True))
        # in the dtype of the gathered weights, norms and softmax too: autocast would keep more memory
        hooks += _around(module, partial(torch.autocast, device_type, enabled=False))
    if param_dtype in _LOWER:
        # the root's own code, which computes losses and the like in fp32, as under DDP
        hooks += _around(model, partial(torch.autocast, device_type, param_dtype, cache_enabled=False))
    return hooks


def _cast_around_copies(model: nn.Module) -> Iterator[Any]:
    """Let the copies that PEFT trains in another dtype than their originals take and give what these do."""
    for wrapper in model.modules():
        original, copies = (wrapper._modules.get(name) for name in ("original_module", "modules_to_save"))
        if original is None or copies is None:
            continue
        for copy in copies.children():
            floats = ([p.dtype for p in each.parameters() if p.is_floating_point()] for each in (original, copy))
            stored, own = (next(iter(dtypes), None) for dtypes in floats)
            if own is not None and stored is not None and own != stored:
                yield copy.register_forward_pre_hook(partial(cast_inputs, dtype=own), with_kwargs=True)
                yield copy.register_forward_hook(lambda _module, _args, output, dtype=stored: _cast(output, dtype))


def reach_experts(experts: Mapping[nn.Module, nn.Module]) -> list[Any]:
    """Let every expert be part of the result of the module that runs it; return the handles of the hooks."""
    return [  # before FSDP2's own hook, which reshards
        runner.register_forward_hook(partial(_reach_experts, experts=members), prepend=True)
        for runner, members in experts.items()
    ]


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
def _gather_head(base: nn.Module, args: object, output: object, *, head: FSDPModule) -> None:
    """Gather a head before its weight is read: losses in pieces, as TRL's, do not call it. The gradient of a shard that
    is read would be that of this rank's rows alone."""
    if torch.is_grad_enabled():
        head.unshard()


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
def _prepare_unit(module: Any, args: object) -> None:
    """Follow what is trained now, and make the memory into which a unit gathers outside of inference mode.

    FSDP2 (torch 2.11 to 2.13) makes it when a unit is gathered for the first time. Made in inference mode, it fails in
    the first training step; on one GPU, and with parameters split along another dimension than 0, in the forward pass.
    """
    follow_training(module)
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            make_gathered_memory(module)


def _reshard_after_evaluation(model: nn.Module, args: object, output: object, *, kept: Collection[nn.Module]) -> None:
    """After a forward pass without gradients, reshard what FSDP2 keeps gathered for backward (tail and root).

    An optimizer made after an evaluation would train the gathered copies, which FSDP2 throws away.
    """
    if not torch.is_grad_enabled() and not note_of(model).gathered:
        for module in model.modules():
            if isinstance(module, FSDPModule) and module not in kept:
                module.reshard()


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
def cast_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, dtype: torch.dtype) -> Any:
    """Cast floating-point inputs, also in tuples and lists, to the dtype in which a module's weights are gathered.

    Rotary tables beside hidden states that have this dtype already are left alone: a model that makes them in fp32
    rotates in fp32.
    """
    floats = (v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor) and v.is_floating_point())
    hidden = next(floats, None)
    kept = ("position_embeddings",) if hidden is not None and hidden.dtype == dtype else ()
    cast = {
        key: value if key in kept and type(value) is tuple else _cast(value, dtype) for key, value in kwargs.items()
    }
    return tuple(_cast(value, dtype) for value in args), cast


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        # A number beside hidden states takes their dtype; the Trainer hands a count to each layer.
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


def _around(module: nn.Module, context: Callable[[], AbstractContextManager[Any]]) -> Iterator[Any]:
    """Run the forward passes of a module in a context; yield the handles of the two hooks that enter and leave it."""
    entered: list[AbstractContextManager[Any]] = []

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
    def enter(module: nn.Module, args: object) -> None:
        entered.append(context())
        entered[-1].__enter__()

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
    def leave(module: nn.Module, args: object, output: object) -> None:
        if entered:  # nothing where an earlier hook raised
            entered.pop().__exit__(None, None, None)

    yield module.register_forward_pre_hook(enter)
    yield module.register_forward_hook(leave, always_call=True)


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


def _reach_experts(runner: nn.Module, args: object, output: Any, *, experts: nn.Module) -> Any:
    """Give experts that got no token a gradient of zeros.

    FSDP2 reduces the gradients that a rank has. Where the tokens of ranks choose different experts, the ranks would
    reduce different ones: the run hangs, or sums up what does not belong together.
    """
    weights = [weight for weight in experts.parameters() if weight.requires_grad]
    if not weights or not torch.is_grad_enabled():
        return output
    tensor = None if isinstance(output, dict) else first_float(output)
    return output if tensor is None else with_tensor(output, tensor, reach_all(tensor, *weights))


def _complete_units(model: nn.Module, args: object, output: Any) -> Any:
    """Complete every unit with a module that did not run, as when TRL uses the head's weight without its forward.

    Otherwise FSDP2 waits for this forward for ever: the unit is not resharded after an evaluation, and not gathered
    again for its backward pass or in the next step.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            output = complete_unit(module, output)
    return output


def share_buffers(model: nn.Module, mesh: DeviceMesh) -> Iterator[Any]:
    """Give all ranks of a mesh the first one's buffers before each forward pass, as DDP does; yield the hook's handle.

    These are the buffers that a checkpoint holds (others are caches of a rank's own rows), once a forward pass changes
    any: BatchNorm, queues. The ranks compare that before passes 2, 3, 5, 9 and so on.
    """
    holders = [module for module in model.modules() if module._buffers.keys() - module._non_persistent_buffers_set]
    ranks, count, is_changed = sorted(mesh.mesh.flatten().tolist()), 0, False
    seen: dict[torch.Tensor, int] = {}
    broadcast: Any = dist._broadcast_coalesced  # type: ignore[attr-defined]  # which DDP calls

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
    def share(model: nn.Module, args: object) -> None:
        nonlocal seen, count, is_changed
        if in_backward() or note_of(model).gathered:  # then ranks run passes of their own
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
        yield model.register_forward_pre_hook(share, prepend=True)
