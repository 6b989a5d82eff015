"""Show the base model inside a PEFT model without its adapters, as plans and checkpoints know it.

PEFT puts a wrapper where a module was and keeps the module inside it (`module_tree.ADAPTED`). A bare model is a second
tree over the same parameters without the wrappers. PEFT itself is not imported.
"""

from collections.abc import Mapping
from functools import partial

from torch import nn

from hf_fsdp_tools.modeling.clone import TreeCopy, copy_tree
from hf_fsdp_tools.modeling.module_tree import ADAPTED


def is_adapted(model: nn.Module) -> bool:
    """Whether a model is a `PeftModel`."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def base_of(model: nn.Module) -> nn.Module:
    """The base of a `PeftModel`, with the adapters in it; any other model unchanged.

    FSDP's root is the base, so that `generate`, which PEFT hands to the base, runs through the root.
    """
    base: nn.Module = model.get_base_model() if is_adapted(model) else model  # type: ignore[operator]  # PEFT's own
    return base


def is_wrapper(module: nn.Module) -> bool:
    """Whether a module is PEFT's wrapper around another module."""
    return hasattr(type(module), "adapter_layer_names") and any(
        module._modules.get(part) is not None for part in ADAPTED
    )


def bare_model(
    base: nn.Module, *, merged: Mapping[nn.Parameter, nn.Parameter] | None = None, trained: bool = False
) -> TreeCopy:
    """A base model without its adapters, as a second tree; nothing is changed or communicated."""
    shown = merged or {}

    def parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
        return {key: None if p is None else shown.get(p, p) for key, p in module._parameters.items()}

    return copy_tree(base, parameters=parameters, way_inside=partial(_way_inside, trained=trained))


def _way_inside(module: nn.Module, *, trained: bool) -> str:
    """The name of the module inside PEFT's wrappers, relative to the outermost; "" for a module that is no wrapper."""
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
