"""The base model inside a PEFT model, seen without its adapters: the tree and the names that plans and checkpoints know.

PEFT puts a wrapper where a module was and keeps the module inside it (`base_layer`, `original_module`, `token_adapter`).
A bare model is a second tree over the same parameters in which each wrapper is left out. PEFT itself is not imported.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from hf_fsdp_tools.modeling.module_tree import own_class

__all__ = [
    "BareModel",
    "bare_model",
    "base_of",
    "is_adapted",
    "is_wrapper",
]

_INSIDE = ("base_layer", "original_module", "token_adapter")
"""Where PEFT's wrappers (0.21) keep the module that they wrap; a wrapper may hold another wrapper."""


def is_adapted(model: nn.Module) -> bool:
    """Whether this is a `PeftModel`, whose base is not to be saved again with every adapter."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def base_of(model: nn.Module) -> nn.Module:
    """The model that PEFT adapted, with the adapters in it; any other model itself. FSDP's root is this module, so that
    `generate`, which PEFT hands to it, runs through the root too."""
    base: nn.Module = model.get_base_model() if is_adapted(model) else model  # type: ignore[operator]  # PEFT's own
    return base


def is_wrapper(module: nn.Module) -> bool:
    """Whether PEFT put this module where another was."""
    return hasattr(type(module), "adapter_layer_names") and any(
        module._modules.get(part) is not None for part in _INSIDE
    )


@dataclass(frozen=True, kw_only=True)
class BareModel:
    """A base model without its adapters, and where each of its modules is in the adapted one."""

    model: nn.Module
    """Copies of the modules (not of their tensors) under their own classes and their original names."""

    places: Mapping[str, str] = field(default_factory=dict)
    """Name of a bare module to the name of what stands in its place: the outermost wrapper, or itself."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Name of a bare module to the name of the module itself, inside its wrappers."""


def bare_model(
    base: nn.Module, *, merged: Mapping[nn.Parameter, nn.Parameter] | None = None, trained: bool = False
) -> BareModel:
    """See a base model without its adapters; nothing is changed and nothing communicated.

    Args:
        base: as `base_of` gives it; sharded or not, also one without adapters.
        merged: what to show in place of a parameter.
        trained: show the active copy of a module that PEFT trains whole (`modules_to_save`) in place of the original.
    """
    view = _View(merged or {}, trained)
    copy = view.copied(base, "", "")
    return BareModel(model=copy, places=view.places, names=view.names)


class _View:
    """A walk over a model that copies its modules without the wrappers between them."""

    def __init__(self, merged: Mapping[nn.Parameter, nn.Parameter], trained: bool) -> None:
        self.merged = merged
        self.trained = trained
        self.places: dict[str, str] = {}
        self.names: dict[str, str] = {}
        self.copies: dict[nn.Module, nn.Module] = {}

    def copied(self, module: nn.Module, bare: str, place: str) -> nn.Module:
        """The copy of a module that is called `bare` in the view and stands at `place`."""
        core, parts = self.inside(module)
        name = ".".join(part for part in (place, *parts) if part)
        self.places.setdefault(bare, place)
        self.names.setdefault(bare, name)
        if core in self.copies:
            return self.copies[core]
        copy: nn.Module = object.__new__(own_class(core))
        self.copies[core] = copy
        copy.__dict__.update(core.__dict__)
        copy.__dict__.pop("__deepcopy__", None)  # of a unit: it copies the sharded module
        copy.__dict__["_parameters"] = {
            key: None if parameter is None else self.merged.get(parameter, parameter)
            for key, parameter in core._parameters.items()
        }
        copy.__dict__["_modules"] = {
            key: None if child is None else self.copied(child, _join(bare, key), _join(name, key))
            for key, child in core._modules.items()
        }
        return copy

    def inside(self, module: nn.Module) -> tuple[nn.Module, list[str]]:
        """The module inside its wrappers, and the way to it."""
        parts: list[str] = []
        while is_wrapper(module):
            copies = module._modules.get("modules_to_save")
            active = getattr(module, "active_adapters", None)
            if self.trained and isinstance(copies, nn.ModuleDict) and active and active[0] in copies:
                parts += ["modules_to_save", active[0]]
                module = copies[active[0]]
                continue
            part, module = next((part, child) for part in _INSIDE if (child := module._modules.get(part)) is not None)
            parts.append(part)
        return module, parts


def _join(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part
