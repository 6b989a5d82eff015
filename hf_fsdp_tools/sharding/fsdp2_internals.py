"""FSDP2 taken off a model again, so that it can be sharded anew with what was added to it: every rank keeps its shards.

torch has no public way back from `fully_shard`. What it registered is undone here through private attributes of torch 2.11
to 2.13 (`_fsdp_state.py`, `_fsdp_param_group.py`, `_composable/contract.py`); nothing else of the package does so. `resize`
does less: it replaces a parameter in its unit, and so keeps whatever else a user has set on that unit.
"""

import copy
from collections.abc import Iterator, MutableMapping
from typing import Any

from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule

from hf_fsdp_tools.modeling.module_tree import own_class

__all__ = [
    "copy_released",
    "drop_hook",
    "make_root",
    "managed_groups",
    "managed_parameters",
    "parameter_groups",
    "release",
]


def parameter_groups(state: Any) -> list[Any]:
    """torch's own record of the parameters that one FSDP2 unit gathers: one before torch 2.13, several since; empty for none."""
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def managed_groups(model: nn.Module) -> list[Any]:
    """The parameter groups of all FSDP2 units below `model`."""
    return [group for state in _states(model) for group in parameter_groups(state)]


def managed_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The shards that FSDP2 manages below `model`, tied ones once; what it keeps gathered is sharded first."""
    found = []
    for group in managed_groups(model):
        group.reshard()
        found += [managed.sharded_param for managed in group.fsdp_params]
    return found


def release(model: nn.Module) -> None:
    """Take FSDP2 off `model` and all below it, in place: own classes, no hooks of FSDP2, parameters left as DTensor shards.

    Not between a forward and its backward pass. Nothing is communicated.
    """
    for state in _states(model):
        for group in parameter_groups(state):
            group.reshard()
        for handle in _handles(state):
            handle.remove()
        for module in state._modules:
            module.__class__ = own_class(module)
            del module.__dict__[STATE_KEY], module.__dict__[REGISTRY_KEY]
            module.__dict__.pop("__deepcopy__", None)
            _module_state_mapping.pop(module)


def make_root(model: nn.Module) -> None:
    """Make a sharded, loaded model the root of its units now: the first of them to run would make itself the root otherwise.

    PEFT's prompt methods run the embedding alone before the model.
    """
    state: Any = model._get_fsdp_state()  # type: ignore[operator]  # an FSDPModule
    state._lazy_init()


def copy_released(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy of a module of an FSDP2 unit, as PEFT makes one to train it whole (`modules_to_save`).

    The copy has the module's own class, its own shards, and no hooks; FSDP2 does not manage it. FSDP2 itself refuses to copy.
    """
    twin: nn.Module = object.__new__(own_class(module))
    memo[id(module)] = twin
    fresh = nn.Module().__dict__
    own = {key for key in module.__dict__ if key not in fresh} | {"_parameters", "_buffers", "_modules", "training"}
    twin.__dict__.update(fresh)
    for key in own - {STATE_KEY, REGISTRY_KEY, "__deepcopy__"}:
        twin.__dict__[key] = copy.deepcopy(module.__dict__[key], memo)
    return twin


def _states(model: nn.Module) -> list[Any]:
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    return list({id(state): state for state in states}.values())


def _handles(state: Any) -> Iterator[Any]:
    """The hooks of one unit."""
    yield state._pre_forward_hook_handle
    yield state._post_forward_hook_handle
    for group in parameter_groups(state):
        yield from group._module_to_pre_save_state_dict_hook_handle.values()
        yield from group._module_to_pre_load_state_dict_hook_handle.values()
        for managed in group.fsdp_params:
            yield managed._post_load_hook_handle


def drop_hook(hooks: MutableMapping[int, Any], hook: Any) -> None:
    """Remove a hook from those that a module keeps, if it is there."""
    for key in [key for key, found in hooks.items() if found is hook]:
        del hooks[key]
