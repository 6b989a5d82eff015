"""FSDP2 under `torch.inference_mode`: memory for gathered parameters that training can use afterwards.

FSDP2 (torch 2.11 to 2.13) makes that memory when a unit is gathered for the first time. Made in inference mode, it ends the first
training step ("Inplace update to inference tensor outside InferenceMode"), and where a unit is not sharded at all, as on one
GPU, or along another dimension than 0, the forward pass itself ("Inference tensors do not track version counter").
"""

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from hf_fsdp_tools.older_torch import drop_hook
from hf_fsdp_tools.release import parameter_groups

__all__ = ["allow_inference"]


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
