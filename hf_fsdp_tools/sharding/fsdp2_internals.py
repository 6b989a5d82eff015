"""Private parts of FSDP2 that this package needs, behind named functions; no other file uses private names of FSDP2.

They are those of torch 2.11 to 2.15, in `torch/distributed/fsdp/_fully_shard` and `_composable/contract.py`; a torch
without one of them is refused when this file is imported. A "state" is torch's record of one unit, which all modules of
`fully_shard([a, b])` share; a "group" the parameters that it gathers together; an "entry" torch's record of one of
these (`FSDPParam`).
"""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, reduce
from types import CodeType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_param, _fsdp_param_group, _fsdp_state, _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState
from torch.distributed.tensor import DTensor
from torch.distributed.utils import _to_kwargs
from torch.utils.hooks import RemovableHandle

from hf_fsdp_tools.accelerator import pinned_empty
from hf_fsdp_tools.distributed.shards import Held
from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.modeling.module_tree import own_class, replaced
from hf_fsdp_tools.modeling.notes import install_style
from hf_fsdp_tools.sharding.phases import Installed
from hf_fsdp_tools.sharding.placement import parallel_parameters, placeholder
from hf_fsdp_tools.text import listed

_READ = """
    TrainingState _all_gather_process_group _all_gather_result _device _fsdp_param_group _get_fsdp_state
    _get_grad_inner_tensor _init_extensions _init_mp_dtypes _lazy_init _module_info
    _module_to_pre_load_state_dict_hook_handle _module_to_pre_save_state_dict_hook_handle _modules
    _modules_to_run_forward _orig_size _param_fqn _post_forward _post_forward_hook_handle _post_forward_indices
    _post_load_hook_handle _pre_forward _pre_forward_hook_handle _register_pre_backward_hook _setattr_on_modules
    _sharded_local_tensor _sharded_param_data _state_ctx _to_sharded _training_state _unsharded_param
    all_gather_inputs all_gather_outputs alloc_all_gather_outputs device finalize_backward free_unsharded_param
    fsdp_params fsdp_placement grad_offload_event init_all_gather_outputs init_dtype_attrs init_unsharded_param
    is_dtensor is_unsharded mesh_info module mp_policy offload_policy orig_dtype padded_sharded_param_size param_dtype
    param_name pin_memory post_backward post_forward_mesh_info reduce_grads reset_sharded_param shard_process_group
    sharded_param sharded_state shared_modules shared_param_names size to_unsharded unshard unsharded_accumulated_grad
"""
FSDP2_NAMES = frozenset(_READ.split())
"""What is read of torch's modules, states, groups and entries, here and by features' classes below `Entry` and `Group`
(a test compares it with the code)."""


def names_in(*modules: Any) -> set[str]:
    """All names that compiled code of modules has, also where their source is not there."""
    found, codes = set[str](), [module.__loader__.get_code(module.__name__) for module in modules]
    while codes:
        code = codes.pop()
        found |= {*code.co_names, *code.co_varnames}
        codes += [const for const in code.co_consts if isinstance(const, CodeType)]
    return found


def refuse_without(names: Iterable[str], known: Collection[str]) -> None:
    """Refuse a torch that knows not all of these names."""
    if missing := sorted({*names} - {*known}):
        raise ConfigError(
            f"FSDP2 of torch {torch.__version__} has no {listed(missing)}, which this package reads. Install one "
            "that was tested: torch 2.11 to 2.15."
        )


refuse_without(FSDP2_NAMES, names_in(_fsdp_common, _fsdp_state, _fsdp_param, _fsdp_param_group, _fully_shard))


# ---- units and their parameters ----


def unit_modules(module: FSDPModule) -> tuple[nn.Module, ...]:
    """The modules of the unit that `module` belongs to: those of one call of `fully_shard`."""
    return tuple(_state_of(module)._modules)


def parameters_of_unit(module: FSDPModule) -> Iterator[tuple[nn.Parameter, list[tuple[nn.Module, str]]]]:
    """Yield this rank's shard of each parameter of a unit, with all modules that register it and its names there.

    It is the shard that the optimizer holds, also while modules register the gathered parameter.
    """
    for group in _groups_of(_state_of(module)):
        for entry in group.fsdp_params:
            places = places_of(entry)
            # A gathered module registers the whole tensor. A replaced shard is in the module before FSDP2 knows of it.
            current = places[0][0]._parameters.get(places[0][1])
            yield current if isinstance(current, DTensor) else entry.sharded_param, places


def managed_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The shards that FSDP2 manages below `model`, tied ones once; gathered units are resharded first."""
    reshard_units(model)
    return [entry.sharded_param for entry in entries_of(model)]


@contextmanager
def bytes_sharded() -> Iterator[None]:
    """A block in which `fully_shard` takes frozen parameters of bytes.

    Before torch 2.13 it makes each shard one that needs a gradient, which bytes cannot, and takes that back
    (pytorch#177844).
    """
    if torch.__version__ >= "2.13":
        yield
        return

    def parameter(data: torch.Tensor, requires_grad: bool = True) -> nn.Parameter:
        return nn.Parameter(data, requires_grad=requires_grad and data.is_floating_point())

    with replaced(_fsdp_param, nn=SimpleNamespace(**{**vars(nn), "Parameter": parameter})):
        yield


def gather_as_stored(model: nn.Module, shards: Collection[torch.Tensor]) -> None:
    """Let units gather these shards in their own dtype, and not in that of computation."""
    for entry, shard in _registered(model):
        entry.is_as_stored = shard in shards


def count_units(model: nn.Module) -> int:
    """The number of units that FSDP2 manages in a model."""
    return len(_states(model))


def is_offloaded(model: nn.Module) -> bool:
    """Whether FSDP2 keeps shards of a model on the CPU between uses."""
    return any(isinstance(group.offload_policy, CPUOffloadPolicy) for group in groups_of(model))


def reshard_units(model: nn.Module) -> None:
    """Reshard the units below `model` that are gathered: after a forward pass, the root and the tail are. Where nothing
    is gathered, weights take the place of their copies in the dtype of computation."""
    for state in _states(model):  # of a pass that has failed, or of a module that was called alone
        state._modules_to_run_forward.clear()
        state._state_ctx.iter_forward_root = None
        for record in (state, *_groups_of(state)):
            if record._training_state == _fsdp_common.TrainingState.FORWARD:
                record._training_state = _fsdp_common.TrainingState.IDLE
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
        for cast in Installed.of(module).casts:
            cast.restore()


def bytes_gathered(model: nn.Module) -> int:
    """Bytes of all gathered parameters of a model, with their padding, in the dtype of computation."""
    make_root(model)
    casts = (cast for module in model.modules() for cast in Installed.of(module).casts)
    copies = dict(item for cast in casts for item in cast.sizes().items())
    return sum(copies.values()) + sum(  # type: ignore[no-any-return]  # of torch's own records
        entry._sharded_param_data.numel() * entry.mesh_info.shard_process_group.size() * gathered_dtype(entry).itemsize
        for entry in entries_of(model)
    )


def gather_units(model: nn.Module) -> None:
    """Gather the units below `model` that are sharded, one after the other. Every rank must call if one has any."""
    with torch.inference_mode(False), torch.no_grad():
        for module in model.modules():
            if isinstance(module, FSDPModule):
                make_gathered_memory(module)
                module.unshard()
            for cast in Installed.of(module).casts:
                cast.cast()


@contextmanager
def keep_gathered(model: nn.Module) -> Iterator[None]:
    """Gather all units of a root one after the other, and leave them so after the forward passes of a block.

    At its end they are sharded. Every rank must enter.
    """
    make_root(model)
    groups = [(group, group.post_forward_mesh_info) for group in groups_of(model)]
    try:
        gather_units(model)
        for group, _ in groups:
            group.post_forward_mesh_info = None  # as with reshard_after_forward=False
        yield
    finally:
        for group, info in groups:
            group.post_forward_mesh_info = info
        reshard_units(model)


# ---- entries and groups of ours ----


class Entry(_fsdp_param.FSDPParam):
    """torch's entry, also for a unit that never runs, for bytes, and for a shard that is frozen in some passes; and its
    modules register the shard whenever no pass runs. A feature has a class below it for what it gathers."""

    was_trained = is_as_stored = False
    gathered_as: torch.dtype | None = None
    """The dtype of what is gathered in the place of the shard, as `fsdp_pre_all_gather` of the entry itself says."""
    reduced_in: torch.dtype | None = None
    """The dtype of all gradients of the unit, where they have several."""

    def become(self, kind: type["Entry"], **values: Any) -> None:
        """Be of a feature's class, with attributes of its own."""
        self.__class__ = kind
        vars(self).update(values)
        self._init_extensions()

    @property
    def memory(self) -> torch.Tensor:
        """The values of the shard in a row, with the padding, which is zeros; on the CPU where shards are offloaded."""
        return self._sharded_param_data

    @property
    def ranks(self) -> Any:
        """The process group that holds the shards of one copy."""
        info: Any = self.mesh_info
        return info.shard_process_group

    @property
    def gathered_size(self) -> torch.Size:
        """The size of what the unit gathers; where ranks share a layer, it is this rank's part."""
        return self._orig_size

    @property
    def is_free(self) -> bool:
        """Whether the unit is to be gathered."""
        return self.sharded_state == ShardedState.SHARDED

    @property
    def to_reduce(self) -> torch.Tensor | None:
        """The gradient of the whole parameter: what was accumulated, or what this pass alone made."""
        made: torch.Tensor | None = self._unsharded_param.grad if hasattr(self, "_unsharded_param") else None
        return made if self.unsharded_accumulated_grad is None else self.unsharded_accumulated_grad

    def _get_grad_inner_tensor(self, grad: torch.Tensor) -> torch.Tensor:
        own = super()._get_grad_inner_tensor(grad)
        return own if self.reduced_in is None else own.to(self.reduced_in)

    @property
    def _sharded_local_tensor(self) -> Any:
        return super()._sharded_local_tensor if self.gathered_as is None else self

    def to_unsharded(self) -> None:
        """As torch's; what is gathered says so, for an optimizer that was given it."""
        super().to_unsharded()
        vars(self._unsharded_param)["is_gathered"] = True

    def show_shard(self) -> None:
        """Let the modules of a gathered parameter register the shard, while their attributes give what is gathered."""
        self._setattr_on_modules(self.sharded_param)
        for module, name in places_of(self) if self.sharded_state == ShardedState.UNSHARDED else ():
            vars(module)[name] = self._unsharded_param

    def _setattr_on_modules(self, param: nn.Parameter) -> None:
        super()._setattr_on_modules(param)
        for module, name in places_of(self):
            vars(module).pop(name, None)

    def init_dtype_attrs(self, mp_policy: Any) -> None:
        """As torch's, which would cast bytes to the dtype of computation before 2.13, and what is kept in fp32."""
        is_kept = self.is_as_stored or not self.sharded_param.is_floating_point()
        super().init_dtype_attrs(replace(mp_policy, param_dtype=None) if is_kept else mp_policy)

    def to_accumulated_grad_if_needed(self) -> None:
        """As torch's, which fails where nothing was ever gathered; with gradients that are reduced it does not."""
        if hasattr(self, "_unsharded_param"):
            super().to_accumulated_grad_if_needed()


class Group(_fsdp_param_group.FSDPParamGroup):
    """torch's group, whose modules register shards between passes. A feature has a class below it for what happens when
    a unit is gathered, and when its gradients arrive."""

    shows_shards = False

    @property
    def is_gathering(self) -> bool:
        """Whether a gather was begun."""
        return self._all_gather_result is not None

    @property
    def stage(self) -> str:
        """Which pass goes through the unit: "FORWARD", "PRE_BACKWARD", "POST_BACKWARD" or "IDLE"."""
        return self._training_state.name

    @property
    def is_gone_back(self) -> bool:
        """Whether no pass through the unit is left of which gradients will come."""
        return not self._post_forward_indices

    def leave(self) -> None:
        """Do what is to be done before FSDP2 is taken off the unit."""

    def show_shards(self) -> None:
        """Let the modules of what stays gathered for a backward pass register shards."""
        group: Any = self
        shown = [entry for entry in group.fsdp_params if entry.sharded_state != ShardedState.SHARDED]
        self.shows_shards = bool(shown)
        for entry in shown:
            entry.show_shard()

    def unshard(self, async_op: bool = False) -> None:
        """As torch's; what is shown is gathered anew for another forward pass, as somebody may have written to it."""
        group: Any = self
        if self.shows_shards and group._training_state != _fsdp_common.TrainingState.PRE_BACKWARD:
            group._to_sharded()
        elif self.shows_shards and group.is_unsharded:
            for entry in group.fsdp_params:
                entry.to_unsharded()
        self.shows_shards = False
        super().unshard(async_op)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch's own
    def post_backward(self, *unused: Any) -> None:
        """As torch's, which refuses gradients of two dtypes in one unit (pytorch#196996): what is kept in fp32 next to
        bf16, and what was accumulated, in fp32, next to what this pass alone made."""
        entries = [entry for entry in self.fsdp_params if isinstance(entry, Entry)]
        dtypes = {gradient.dtype for entry in entries if (gradient := entry.to_reduce) is not None}
        for entry in entries:
            entry.reduced_in = reduce(torch.promote_types, dtypes) if len(dtypes) > 1 else None
        super().post_backward(*unused)


def use_own_entries(model: nn.Module) -> None:
    """Let the units of a model, just sharded, keep their parameters in entries of ours."""
    for group in groups_of(model):
        group.__class__ = Group
    for entry in entries_of(model):
        entry.__class__ = Entry


def is_custom(entry: Any) -> bool:
    """Whether something else than the shard is gathered: its class has an extension of torch's, or its entry has."""
    return hasattr(entry._sharded_local_tensor, "fsdp_pre_all_gather")


def gathered_dtype(entry: Any) -> torch.dtype:
    """The dtype in which a unit gathers a shard."""
    if not hasattr(entry, "orig_dtype"):  # FSDP2 decides in the first pass
        entry.init_dtype_attrs(entry.mp_policy)
    dtype: torch.dtype = getattr(entry, "gathered_as", None) or entry.param_dtype or entry.orig_dtype
    return dtype


# ---- forward passes ----


def make_root(model: nn.Module) -> None:
    """Make a sharded, loaded model the root of its units now.

    Otherwise the first unit that runs becomes the root; PEFT's prompt methods run the embedding before the model. A
    model without units is left alone.
    """
    if isinstance(model, FSDPModule):
        _state_of(model)._lazy_init()


@contextmanager
def forward_begun(root: nn.Module) -> Iterator[None]:
    """Begin the forward pass of a root for a block: what the block runs before it calls the root belongs to that pass.

    Without a call, the pass ends with the block. Inputs of the root go to its device, where FSDP2 gathers; it moves
    them only where it begins a pass itself. Nothing is done with a model without units, and in a pass of the root.
    """
    if not isinstance(root, FSDPModule) or in_pass(root):
        yield
        return
    state = _state_of(root)
    with torch.inference_mode(False):
        make_gathered_memory(root)

    def to_device(module: nn.Module, args: Any, kwargs: Any) -> Any:
        moved = _to_kwargs(args, kwargs, state._device, False)  # torch's own, which FSDP2 calls
        return moved[0][0], moved[1][0]

    handle = root.register_forward_pre_hook(to_device, prepend=True, with_kwargs=True)
    state._pre_forward(root, (None,), {})
    try:
        yield
    finally:
        handle.remove()
        if state._state_ctx.iter_forward_root is state:
            state._post_forward(root, None, None)


def make_gathered_memory(module: FSDPModule) -> None:
    """Make the memory into which the unit of a module gathers its parameters, unless it exists; gather nothing."""
    state = _state_of(module)
    state._lazy_init()  # FSDP2 calls it next; it decides in which dtype a parameter is gathered
    for group in _groups_of(state):
        for entry in group.fsdp_params:
            if getattr(entry, "gathered_as", None) or not is_custom(
                entry
            ):  # of an extension of the user's, nobody knows
                entry.init_all_gather_outputs(
                    [entry._sharded_param_data.numel()],
                    [gathered_dtype(entry)],
                    group._all_gather_process_group.size(),
                    group.device,
                )


def use_frozen_in_place(module: FSDPModule) -> None:
    """Let a unit on one rank compute with its frozen shards themselves, which FSDP2 would copy before each use.

    Nothing is gathered on one rank, and what is gathered is the shard where its dtype is that of computation. A hook
    before each forward pass: where a shard has other memory than before, it is taken up. One that was ever trained is
    not: an adapter that is off looks frozen, while a backward pass may wait for the copy of a pass before.
    """
    state = _state_of(module)
    state._lazy_init()  # FSDP2 calls it next; it decides in which dtype a parameter is gathered
    for group in _groups_of(state):
        if group._all_gather_process_group.size() > 1 or isinstance(group.offload_policy, CPUOffloadPolicy):
            continue
        for entry in group.fsdp_params:
            entry.was_trained |= entry.sharded_param.requires_grad
            data = entry._sharded_param_data
            is_used = any(each is data for each in entry.all_gather_outputs)
            can_be = not entry.was_trained and data.dtype == (entry.param_dtype or entry.orig_dtype)
            if entry.sharded_state != ShardedState.SHARDED or is_used or not can_be or is_custom(entry):
                continue
            entry.all_gather_outputs = [data]  # FSDP2 copies what it gathers to this memory: a tensor to itself
            entry.__dict__.pop("_unsharded_param", None)  # made anew, of this memory
            entry.free_unsharded_param = lambda: None  # the memory is the shard's


def follow_training(module: FSDPModule) -> None:
    """Let a unit reduce gradients in the dtypes of what is trained now.

    FSDP2 takes those of the very first pass, where all of a unit may be frozen: its adapter is off, or trained later.
    """
    for group in _groups_of(_state_of(module)):
        trained = (entry.sharded_param.dtype for entry in group.fsdp_params if entry.sharded_param.requires_grad)
        decided = getattr(group, "_orig_dtype", ...)  # not before the first pass
        if decided is not ... and next(trained, decided) != decided:
            group._init_mp_dtypes()


def complete_unit(module: FSDPModule, output: Any) -> Any:
    """End the forward pass of a unit with modules that have not run, as its last module would; return the output."""
    state = _state_of(module)
    if state._modules_to_run_forward:
        output = state._post_forward(state._modules[0], None, output)
        state._modules_to_run_forward.clear()
    return output


def pass_through(
    module: FSDPModule, hidden: torch.Tensor, inside: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Do all that FSDP2 does around the forward pass of a unit, which runs `inside` in place of its modules."""
    state = _state_of(module)
    with torch.inference_mode(False):
        make_gathered_memory(module)
    follow_training(module)
    (hidden,), _ = state._pre_forward(state._modules[0], (hidden,), {})
    output: torch.Tensor = state._post_forward(state._modules[0], (hidden,), inside(hidden))
    return output


def gather_for_backward(module: FSDPModule, args: object, output: object) -> None:
    """Let the backward pass of each module of a unit gather it, not of the last one alone; a hook after forward."""
    if not in_backward():
        state = _state_of(module)
        state._register_pre_backward_hook(output)


def show_shards(model: nn.Module) -> None:
    """Let the modules of a model register shards, its pass being over."""
    for group in groups_of(model):
        group.show_shards()


def in_pass(model: nn.Module) -> bool:
    """Whether a forward pass of a sharded model goes on."""
    state = _state_of(model) if isinstance(model, FSDPModule) else None
    return state is not None and state._state_ctx.iter_forward_root is state


def end_alone(module: Any, args: object, output: Any, *, model: nn.Module) -> Any:
    """End the pass of a unit that was called without its model (a head after the base): FSDP2 would wait for its other
    modules. A hook after forward."""
    if in_backward() or in_pass(model):
        return output
    output = complete_unit(module, output)
    show_shards(model)
    return output


def refuse_gathered(optimizer: Any) -> None:
    """Refuse an optimizer of gathered parameters, which FSDP2 throws away: it would step nothing."""
    held = [each for group in optimizer.param_groups for each in group["params"]]
    if gathered := sum("is_gathered" in vars(each) for each in held):
        raise ConfigError(
            f"{gathered} of the {len(held)} parameters of {type(optimizer).__name__} are gathered copies, which end "
            "with the pass: it was made of attributes of modules (model.lm_head.weight). Make it from "
            "model.parameters(), which gives shards at any moment."
        )


def in_backward() -> bool:
    """Whether autograd runs, as where activations are recomputed."""
    graph: int = torch._C._current_graph_task_id()
    return graph != -1


# ---- memory of shards ----


def new_memory(model: nn.Module) -> dict[nn.Parameter, Callable[[torch.device, torch.dtype], torch.Tensor]]:
    """For each shard that a unit gathers, a function that makes uninitialised memory for it, and tells FSDP2.

    FSDP2 gathers from memory of the length of the longest shard, pinned under CPU offload; it would copy any other.
    """
    return {shard: partial(_memory_of, entry, shard) for entry, shard in _registered(model)}


def forget_memory(model: nn.Module) -> None:
    """Let FSDP2 forget the memory of shards that are on meta again, so that it is freed."""
    for entry, shard in _registered(model):
        if shard.is_meta:
            entry._sharded_param_data = torch.empty(
                entry.padded_sharded_param_size, dtype=shard.dtype, device="meta"
            ).view(-1)


def _registered(model: nn.Module) -> Iterator[tuple[Any, nn.Parameter]]:
    """Yield each entry with the parameter that its module registers now."""
    for entry in entries_of(model):
        parameter = entry._module_info.module._parameters.get(entry._module_info.param_name)
        if parameter is not None:
            yield entry, parameter


def _memory_of(entry: Any, shard: nn.Parameter, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    size, dim = entry.padded_sharded_param_size, entry.fsdp_placement.dim
    is_pinned = entry.pin_memory and device.type == "cpu"
    memory = pinned_empty(size, dtype) if is_pinned else torch.empty(size, dtype=dtype, device=device)
    length = Held.of(shard).memory.shape[dim] if Held.of(shard).memory.numel() else 0
    memory.narrow(dim, length, size[dim] - length).zero_()
    entry._sharded_param_data = memory.view(-1)
    return memory.narrow(dim, 0, length)


# ---- taking FSDP2 off, and replacing a parameter ----


def release(model: nn.Module) -> None:
    """Take FSDP2 off `model` and all modules below it, in place; the parameters stay this rank's shards, as DTensors.

    Settings that a user made on the units after `fully_shard` are lost. Do not call between a forward and its
    backward pass. Nothing is communicated.
    """
    reshard_units(model)
    for state in _states(model):
        for handle in _handles(state):
            handle.remove()
        for group in (group for group in _groups_of(state) if isinstance(group, Group)):
            group.leave()
        for module in state._modules:
            module.__class__ = own_class(module)
            del module.__dict__[STATE_KEY], module.__dict__[REGISTRY_KEY]
            module.__dict__.pop("__deepcopy__", None)
            _module_state_mapping.pop(module)


def copy_released(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy of a module of an FSDP2 unit, which FSDP2 itself refuses; PEFT makes one for `modules_to_save`.

    Hooks are not copied, but those by which transformers notes hidden states, which a flag of the model says are there;
    nor handles of hooks, as transformers keeps them for inputs that need gradients.
    """
    twin: nn.Module = object.__new__(own_class(module))
    memo[id(module)] = twin
    fresh = nn.Module().__dict__
    own = {key for key in module.__dict__ if key not in fresh} | {"_parameters", "_buffers", "_modules", "training"}
    for key in [*own]:
        value = module.__dict__[key]
        if isinstance(value[0] if isinstance(value, list) and value else value, RemovableHandle):
            own.remove(key)
    twin.__dict__.update(fresh)
    for place, hook in module._forward_hooks.items():
        if getattr(hook, "__module__", "") == "transformers.utils.output_capturing":
            twin._forward_hooks[place] = hook
    with replaced(*module.parameters(), grad=None):  # gradients are not copied; those of DTensors cannot be
        for key in own - {STATE_KEY, REGISTRY_KEY, "__deepcopy__", "_compiled_call_impl"}:
            twin.__dict__[key] = copy.deepcopy(module.__dict__[key], memo)
    for each in twin.modules():
        install_style(each)
    return twin


def replace_parameter(model: nn.Module, name: str, old: DTensor, shape: torch.Size) -> None:
    """Replace a parameter inside its unit, which keeps its settings, by a new one on meta of another shape."""
    entries = (
        (group, i) for group in groups_of(model) for i, e in enumerate(group.fsdp_params) if e.sharded_param is old
    )
    group, i = next(entries, (None, 0))
    if group is None:
        raise ConfigError(
            f"{name!r} is a DTensor that no FSDP2 unit gathers. Shard the model with shard_model or fully_shard."
        )
    divided: Any = parallel_parameters(model)
    entry, way = group.fsdp_params[i], divided.get(old)
    if entry.is_dtensor and way is None:
        raise ConfigError(f"{name!r} was divided by other code. Resize it before, or divide it by parallelize_model.")
    placement = entry.fsdp_placement
    blank = placeholder(torch.empty(shape, dtype=old.dtype, device="meta"), way)
    made = type(entry)(
        param=nn.Parameter(blank, requires_grad=old.requires_grad),
        module_info=entry._module_info,
        mesh_info=entry.mesh_info,
        post_forward_mesh_info=entry.post_forward_mesh_info,
        device=entry.device,
        shard_placement_fn=None if placement.dim == 0 else lambda _: placement,
        mp_policy=entry.mp_policy,
        offload_policy=group.offload_policy,
    )
    made._param_fqn = entry._param_fqn
    made.sharded_param.__dict__.update(old.__dict__)
    if hasattr(entry, "keep_unsharded_storage"):  # since torch 2.14: a setting of the user's
        made.keep_unsharded_storage = entry.keep_unsharded_storage
    entry._post_load_hook_handle.remove()
    group.fsdp_params[i] = made
    group._init_mp_dtypes()


# ---- torch's records ----


def places_of(entry: Any) -> list[tuple[nn.Module, str]]:
    """The modules that register a parameter, each with its name there."""
    info = entry._module_info
    return [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]


def _state_of(module: FSDPModule) -> Any:
    return module._get_fsdp_state()


def _states(model: nn.Module) -> list[Any]:
    states = [_state_of(module) for module in model.modules() if isinstance(module, FSDPModule)]
    return list({id(state): state for state in states}.values())


def _groups_of(state: Any) -> list[Any]:
    """The groups of one unit: one before torch 2.13, several since; empty where a unit has no parameters of its own."""
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def entries_of(model: nn.Module) -> list[Any]:
    """The entries of all parameters that units of a model gather."""
    return [entry for group in groups_of(model) for entry in group.fsdp_params]


def groups_of(model: nn.Module) -> list[Any]:
    """The groups of all units of a model."""
    return [group for state in _states(model) for group in _groups_of(state)]


def _handles(state: Any) -> Iterator[Any]:
    """The hooks of one unit."""
    yield state._pre_forward_hook_handle
    yield state._post_forward_hook_handle
    for group in _groups_of(state):
        yield from group._module_to_pre_save_state_dict_hook_handle.values()
        yield from group._module_to_pre_load_state_dict_hook_handle.values()
        for entry in group.fsdp_params:
            yield entry._post_load_hook_handle
