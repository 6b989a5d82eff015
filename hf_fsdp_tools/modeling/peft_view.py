"""The base model inside a PEFT model, seen without its adapters, as plans and checkpoints know it.

PEFT puts a wrapper where a module was and keeps the module inside it (`module_tree.ADAPTED`).
A bare model is a second tree over the same parameters in which each wrapper is left out. PEFT itself is not imported.
"""

from collections.abc import Mapping
from functools import partial

from torch import nn

from hf_fsdp_tools.modeling.clone import TreeCopy, copy_tree
from hf_fsdp_tools.modeling.module_tree import ADAPTED

__all__ = ["bare_model", "base_of", "is_adapted", "is_wrapper"]


def is_adapted(model: nn.Module) -> bool:
    """Whether this is a `PeftModel`, whose base is not to be saved again with every adapter."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def base_of(model: nn.Module) -> nn.Module:
    """The model that PEFT adapted, with the adapters in it; any other model itself.

    FSDP's root is this module, so that `generate`, which PEFT hands to it, runs through the root too.
    """
    base: nn.Module = model.get_base_model() if is_adapted(model) else model  # type: ignore[operator]  # PEFT's own
    return base


def is_wrapper(module: nn.Module) -> bool:
    """Whether PEFT put this module where another was."""
    return hasattr(type(module), "adapter_layer_names") and any(
        module._modules.get(part) is not None for part in ADAPTED
    )


def bare_model(
    base: nn.Module, *, merged: Mapping[nn.Parameter, nn.Parameter] | None = None, trained: bool = False
) -> TreeCopy:
    """See a base model without its adapters; nothing is changed and nothing communicated.

    Args:
        base: as `base_of` gives it; sharded or not, also one without adapters.
        merged: what to show in place of a parameter.
        trained: show the active copy of a module that PEFT trains whole (`modules_to_save`) in place of the original.
    """
    shown = merged or {}

    def parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
        return {key: None if p is None else shown.get(p, p) for key, p in module._parameters.items()}

    return copy_tree(base, parameters=parameters, way_inside=partial(_way_inside, trained=trained))


def _way_inside(module: nn.Module, *, trained: bool) -> str:
    """The name of the module inside PEFT's wrappers, seen from the outermost; "" for a module that is no wrapper."""
    parts: list[str] = []
    while is_wrapper(module):
        copies = module._modules.get("modules_to_save")
        active = getattr(module, "active_adapters", None)
        if trained and isinstance(copies, nn.ModuleDict) and active and active[0] in copies:
            parts += ["modules_to_save", active[0]]
            module = copies[active[0]]
            continue
        part, module = next((part, child) for part in ADAPTED if (child := module._modules.get(part)) is not None)
        parts.append(part)
    return ".".join(parts)
