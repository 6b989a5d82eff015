"""Hooks of a sharded model beside FSDP2's own.

- Before the forward pass of each unit, in inference mode: make the memory of gathered parameters outside of it.
- Before the forward pass of blocks and other modules with shards, under mixed precision: cast their inputs. FSDP2
  itself would cast the inputs of the root, with labels, token counts and masks.
- Around the forward pass of the root, under mixed precision: autocast, which computes losses in fp32; not in the
  modules that compute with shards, whose dtype is that of their gathered weights. After it: outputs in fp32.
- Around the forward pass of modules that PEFT trains whole (`modules_to_save`) in fp32 on a base of 16 bits, without
  mixed precision: inputs in fp32, outputs in the dtype of the base, whose modules take no other.
- Around the forward pass of modules with whole parameters, under mixed precision: weights in the dtype of computation,
  as FSDP2 gathers those of shards.
- Around the forward pass of batch norms, under mixed precision: weights in the dtype of the running statistics.
- Before the forward pass of each unit, on one rank: use frozen weights where they lie (`use_frozen_in_place`).
- After a forward pass without gradients: reshard the units.
- After the forward pass of a unit that returns its own weights (a table of positions): copy them, before FSDP2 frees
  their memory.
- After the forward pass of a list of experts: make every expert part of the result, so that all ranks reduce the same
  gradients, whichever experts their tokens chose.
- Before the forward pass of the root: count it (`distributed.liveness`).
- Before torch 2.13: complete units with a module that did not run. These versions run FSDP2's hooks at the first and
  the last module of a unit; 2.13 runs them at each module, and completes the unit after the pass of the whole model
  (`_register_group_forward_hooks`, `_force_complete_incomplete_states`). Delete this with the support of 2.11 and 2.12.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hf_fsdp_tools.distributed.liveness import begin_pass, group_of
from hf_fsdp_tools.distributed.rounds import rounds_of
from hf_fsdp_tools.sharding.fsdp2_internals import (
    complete_unit,
    gathers,
    make_gathered_memory,
    use_frozen_in_place,
)

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
    shard_ranks: Sequence[int] = (),
) -> None:
    """Give a model with all its units the hooks named above, each once; call again when units are made anew.

    Nothing is communicated.
    """
    for module in model.modules():  # hooks of modules that are in no unit any more are removed
        _drop_hooks(
            module._forward_pre_hooks,
            _make_gathered_memory, _use_frozen_in_place, cast_inputs, _use_dtype, _use_dtype_of_statistics,
            _begin_autocast, _leave_autocast,
        )  # fmt: skip
        _drop_hooks(
            module._forward_hooks,
            _give_weights_back, _reach_experts, _part_from_weights, _cast_output, _end_autocast, _resume_autocast,
            _return_fp32,
        )  # fmt: skip
        if isinstance(module, FSDPModule) and module is not model and module._parameters:
            module.register_forward_hook(_part_from_weights, prepend=True)  # before FSDP2's own, which frees
        if isinstance(module, FSDPModule):
            module.register_forward_pre_hook(_make_gathered_memory, prepend=True)  # before FSDP2's own, which gathers
            if len(shard_ranks) == 1:
                module.register_forward_pre_hook(_use_frozen_in_place, prepend=True)
    if param_dtype is not None:
        units = {module for module in model.modules() if isinstance(module, FSDPModule)}
        whole = {parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)}
        add_casts(model, param_dtype, units=units, whole=whole, device_type=device_type)
        if output_dtype is None:
            model.register_forward_hook(_return_fp32)
    else:
        _cast_around_copies(model)
    reach_experts(experts or {})
    _drop_hooks(model._forward_pre_hooks, begin_pass)
    if len(shard_ranks) > 1 and rounds_of() is not None:
        model.register_forward_pre_hook(partial(begin_pass, group=group_of(shard_ranks), gathers=gathers), prepend=True)
    # These must come after FSDP2's own hooks, which may be new.
    _drop_hooks(model._forward_hooks, _complete_units, _reshard_after_evaluation)
    if _IS_BEFORE_2_13:
        model.register_forward_hook(_complete_units)
    model.register_forward_hook(partial(_reshard_after_evaluation, kept=frozenset(kept)))


def add_casts(
    model: nn.Module,
    param_dtype: torch.dtype,
    *,
    units: Collection[nn.Module],
    whole: Collection[torch.Tensor],
    device_type: str = "cpu",
) -> None:
    """Give the modules of a model the hooks of mixed precision. Nothing is communicated."""
    casting = dict.fromkeys(_first_with_shards(model, units, whole))
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
            if module.affine:
                module.register_forward_pre_hook(_use_dtype_of_statistics)
                module.register_forward_hook(_give_weights_back, always_call=True)
        elif names := _whole_weights(module, whole):
            module.register_forward_pre_hook(partial(_use_dtype, names=names, dtype=param_dtype))
            module.register_forward_hook(_give_weights_back, always_call=True)
            casting.setdefault(module)
    casting.pop(model, None)  # the root takes labels and counts too
    for module in casting:
        module.register_forward_pre_hook(partial(cast_inputs, dtype=param_dtype), with_kwargs=True)
        module.register_forward_pre_hook(partial(_leave_autocast, device_type=device_type))
        module.register_forward_hook(partial(_resume_autocast, device_type=device_type), always_call=True)
    if param_dtype in _LOWER:
        model.register_forward_pre_hook(partial(_begin_autocast, device_type=device_type, dtype=param_dtype))
        model.register_forward_hook(_end_autocast, always_call=True)


def _cast_around_copies(model: nn.Module) -> None:
    """Let the copies that PEFT trains in another dtype than their originals take and give what these do."""
    for wrapper in model.modules():
        original, copies = (wrapper._modules.get(name) for name in ("original_module", "modules_to_save"))
        stored = _dtype_of(original)
        for copy in copies.children() if copies is not None else ():
            own = _dtype_of(copy)
            if own is not None and stored is not None and own != stored:
                copy.register_forward_pre_hook(partial(cast_inputs, dtype=own), with_kwargs=True)
                copy.register_forward_hook(partial(_cast_output, dtype=stored))


def _dtype_of(module: nn.Module | None) -> torch.dtype | None:
    """The dtype of a module's first floating-point parameter; None where it has none."""
    parameters = module.parameters() if module is not None else ()
    return next((parameter.dtype for parameter in parameters if parameter.is_floating_point()), None)


def reach_experts(experts: Mapping[nn.Module, nn.Module]) -> None:
    """Let every expert be part of the result of the module that runs it."""
    for runner, members in experts.items():  # before FSDP2's own hook, which reshards
        runner.register_forward_hook(partial(_reach_experts, experts=members), prepend=True)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
def _make_gathered_memory(module: nn.Module, args: object) -> None:
    """Make the memory into which a unit gathers outside of inference mode.

    FSDP2 (torch 2.11 to 2.13) makes this memory when a unit is gathered for the first time. Memory made in inference
    mode fails in the first training step ("Inplace update to inference tensor outside InferenceMode"). On one GPU, and
    with parameters split along another dimension than 0, even the forward pass fails ("Inference tensors do not track
    version counter").
    """
    if torch.is_inference_mode_enabled() and isinstance(module, FSDPModule):
        with torch.inference_mode(False):
            make_gathered_memory(module)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
def _use_frozen_in_place(module: nn.Module, args: object) -> None:
    if isinstance(module, FSDPModule):
        use_frozen_in_place(module)


def _reshard_after_evaluation(model: nn.Module, args: object, output: object, *, kept: Collection[nn.Module]) -> None:
    """After a forward pass without gradients, reshard the units that FSDP2 keeps gathered for backward (tail and root).

    No backward pass follows, and `model.parameters()` would be the gathered tensors: an optimizer made after an
    evaluation would train copies that FSDP2 throws away.
    """
    if not torch.is_grad_enabled():
        for module in model.modules():
            if isinstance(module, FSDPModule) and module not in kept:
                module.reshard()


def _first_with_shards(
    root: nn.Module, units: Collection[nn.Module], whole: Collection[torch.Tensor]
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
            has_shards = any(weight is not None and weight not in whole for weight in child._parameters.values())
            if is_unit or (has_shards and (not inside or type(child).__module__.startswith("torch.nn."))):
                yield child
            if not is_unit or any(buffer.is_floating_point() for buffer in child.buffers()):
                yield from walk(child, inside=inside or is_unit)

    return walk(root, inside=False)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
def cast_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, dtype: torch.dtype) -> Any:
    """Cast floating-point inputs, also in tuples and lists, to the dtype in which a module's weights are gathered.

    Rotary tables beside hidden states that have this dtype already are left alone: a model that makes them in fp32
    rotates in fp32. Made a hook of the modules that compute with shards. Nothing is communicated.
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


def _cast_output(module: nn.Module, args: object, output: Any, *, dtype: torch.dtype) -> Any:
    """Cast what a module returns, as `cast_inputs` casts what it takes."""
    return _cast(output, dtype)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
def _begin_autocast(model: Any, args: object, *, device_type: str, dtype: torch.dtype) -> None:
    """Run the root's own code under autocast, which computes losses and the like in fp32, as under DDP."""
    model._autocast = torch.autocast(device_type, dtype, cache_enabled=False)
    model._autocast.__enter__()


def _end_autocast(model: nn.Module, args: object, output: object) -> None:
    if (context := model.__dict__.pop("_autocast", None)) is not None:  # nothing where an earlier hook raised
        context.__exit__(None, None, None)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
def _leave_autocast(module: Any, args: object, *, device_type: str) -> None:
    """Compute in the dtype of the gathered weights, norms and softmax too: autocast would keep more memory."""
    if torch.is_autocast_enabled(device_type):
        torch.set_autocast_enabled(device_type, False)
        module._left_autocast = True


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
def _resume_autocast(module: nn.Module, args: object, output: object, *, device_type: str) -> None:
    if module.__dict__.pop("_left_autocast", False):
        torch.set_autocast_enabled(device_type, True)


def _return_fp32(model: Any, args: object, output: Any) -> Any:
    """Return outputs in fp32, of which a script may compute its own loss, as Accelerate does under DDP.

    Logits of a language model that has computed its loss stay as they are: a copy would take 4 bytes for each token and
    word of the vocabulary, and as a rule nobody reads it.
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


def _whole_weights(module: nn.Module, whole: Collection[torch.Tensor]) -> tuple[str, ...]:
    """The names of the floating-point parameters of a module's own that every rank holds whole.

    Without those of no dimension: what is computed with these has the dtype of the other operand.
    """
    return tuple(
        name
        for name, weight in module._parameters.items()
        if weight is not None and weight in whole and weight.is_floating_point() and weight.dim()
    )


def _use_dtype(module: Any, args: object, *, names: Collection[str], dtype: torch.dtype) -> None:
    """Give a module its weights of these names in another dtype, until its forward pass ends."""
    own = {name: weight for name in names if (weight := module._parameters[name]) is not None}
    if any(weight.dtype != dtype for weight in own.values()):
        module._own_weights = own
        module._parameters.update({name: weight.to(dtype) for name, weight in own.items()})


def _use_dtype_of_statistics(norm: Any, args: object) -> None:
    """Give a batch norm its gathered weights in the dtype of its running statistics, which no other dtype goes with.

    As autocast does it: inputs and outputs are in the lower precision, weights and statistics are not.
    """
    _use_dtype(norm, args, names=("weight", "bias"), dtype=norm.running_mean.dtype)


def _give_weights_back(module: Any, args: object, output: object) -> None:
    """Give a module its own weights back."""
    if (own := module.__dict__.pop("_own_weights", None)) is not None:
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
    if isinstance(output, torch.Tensor):
        return _reach_all(output, *weights) if output.is_floating_point() else output
    if type(output) in (tuple, list):
        first = next((i for i, o in enumerate(output) if isinstance(o, torch.Tensor) and o.is_floating_point()), None)
        if first is not None:
            reached = _reach_all(output[first], *weights)
            return type(output)((*output[:first], reached, *output[first + 1 :]))
    return output


class _ReachAll(torch.autograd.Function):
    """The identity of its first input, which gives all others a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.likes = [(weight.shape, weight.dtype, weight.device) for weight in weights]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        # One zero, seen in the shape of the weight: only an expert without a gradient takes memory.
        zeros = (torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.likes)
        return (*grads, *zeros)


_reach_all: Callable[..., torch.Tensor] = _ReachAll.apply


def _complete_units(model: nn.Module, args: object, output: Any) -> Any:
    """Complete every unit with a module that did not run, as when TRL uses the head's weight without its forward.

    Otherwise FSDP2 waits for this forward for ever: the unit is not resharded after an evaluation, and not gathered
    again for its backward pass or in the next step.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            output = complete_unit(module, output)
    return output


def _drop_hooks(hooks: MutableMapping[int, Any], *ours: Any) -> None:
    """Remove ours from a module's hooks."""
    for key in [key for key, found in hooks.items() if getattr(found, "func", found) in ours]:
        del hooks[key]
