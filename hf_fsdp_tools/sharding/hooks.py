"""What FSDP2 leaves undone before torch 2.13 in units of several modules. To be deleted with the support of 2.11 and 2.12.

Those versions run their hooks at the first and the last module of such a unit; 2.13 runs them at each, and completes the unit
after the pass of the whole model (`_register_group_forward_hooks`, `_force_complete_incomplete_states`). The same is done
here, through private attributes of torch 2.11 and 2.12.
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map

from hf_fsdp_tools.sharding.fsdp2_internals import drop_hook, parameter_groups

__all__ = [
    "allow_inference",
    "mend_units",
]

_IS_OLDER = not hasattr(FSDPModule, "reset_iter_state")


def mend_units(model: nn.Module) -> None:
    """Give a sharded model the hooks that its torch lacks, each once; nothing from torch 2.13 on. Nothing is communicated."""
    if not _IS_OLDER:
        return
    drop_hook(model._forward_hooks, _complete_units)  # it must come after FSDP2's own, which may be new
    model.register_forward_hook(_complete_units)
    for module in model.modules():
        drop_hook(module._forward_pre_hooks, _cast_inputs)  # of a module that is in no unit any more, too
        if isinstance(module, FSDPModule) and len(_state_of(module)._modules) > 1:
            module.register_forward_pre_hook(_cast_inputs, with_kwargs=True)


def _state_of(module: FSDPModule) -> Any:
    return module._get_fsdp_state()


def _cast_inputs(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Cast what enters each module of a unit, not only the first: behind a norm that stays in fp32 (replicated, say), a head
    would meet fp32 with gathered weights in a lower precision, and stop."""
    assert isinstance(module, FSDPModule)
    policy = _state_of(module)._mp_policy
    if not policy.cast_forward_inputs or policy.param_dtype is None:
        return None

    def cast(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(policy.param_dtype) if is_float else value

    return tree_map(cast, args), tree_map(cast, kwargs)


def _complete_units(model: nn.Module, args: object, output: Any) -> Any:
    """Complete every unit of which one module did not run: TRL takes the head's weight and skips its forward.

    FSDP2 would wait for that forward for ever: the unit is neither sharded after an evaluation, nor gathered again for its
    backward pass, nor in the next step.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule) and (state := _state_of(module))._modules_to_run_forward:
            output = state._post_forward(state._modules[0], None, output)
            state._modules_to_run_forward.clear()
    return output


def allow_inference(model: nn.Module) -> None:
    """Give each FSDP2 module of `model` the hook that makes that memory, once. Nothing is communicated."""
    for module in model.modules():
        drop_hook(module._forward_pre_hooks, _make_outputs)  # of a module that is in no unit any more, too
        if isinstance(module, FSDPModule):
            module.register_forward_pre_hook(_make_outputs, prepend=True)  # before FSDP2's own, which gathers


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
def _make_outputs(module: nn.Module, args: object) -> None:
    """Make a unit's memory, which is about to be filled, as memory that autograd may keep."""
    if not torch.is_inference_mode_enabled() or not isinstance(module, FSDPModule):
        return
    state: Any = module._get_fsdp_state()
    with torch.inference_mode(False):
        state._lazy_init()  # as FSDP2 does next: it decides in which dtype a parameter is gathered
        for group in parameter_groups(state):
            for managed in group.fsdp_params:
                if not hasattr(managed._sharded_local_tensor, "fsdp_pre_all_gather"):  # an extension of the user's
                    managed.init_all_gather_outputs(
                        [managed._sharded_param_data.numel()],
                        [managed.param_dtype or managed.orig_dtype],
                        group._all_gather_process_group.size(),
                        group.device,
                    )
