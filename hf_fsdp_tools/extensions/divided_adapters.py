"""LoRA on layers and experts that ranks share (`tensor_parallel`): each rank has the part of it that its part needs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hf_fsdp_tools.errors import ConfigError
from hf_fsdp_tools.modeling.notes import Divided, install_style
from hf_fsdp_tools.modeling.packed import Packed, with_added
from hf_fsdp_tools.modeling.packed_weight import Factors, part_name

_OF_EXPERTS = "ParamWrapper"
"""PEFT's wrapper of a module for LoRA on one parameter of it: `target_parameters`."""


def refuse_adapters(model: nn.Module) -> None:
    """Refuse adapters on divided layers of which no rank could compute its part; nothing is changed."""
    for name, wrapper in model.named_modules():
        if not hasattr(wrapper, "get_base_layer") or not isinstance(base := wrapper.get_base_layer(), nn.Module):
            continue
        kind = type(wrapper).__name__
        dora = " with DoRA" if any((getattr(wrapper, "use_dora", None) or {}).values()) else ""
        can_be = kind in ("Linear", "Embedding") or (kind == _OF_EXPERTS and wrapper.num_experts > 1)
        if Divided.of(base).parallel and (dora or not can_be):
            raise ConfigError(
                f"{name}: a {kind} of PEFT{dora} cannot be divided among ranks as its base is (tp_size, ep_size). Use "
                "LoRA on linear layers, LoraConfig(target_modules=['q_proj', 'k_proj', 'v_proj', 'o_proj']), or on "
                "the weights of fused experts, target_parameters=['experts.gate_up_proj', 'experts.down_proj']."
            )


def divide_adapters(model: nn.Module) -> None:
    """Let LoRA on a divided layer be divided with it: the second matrix where the weight is cut by rows, the first
    where it is cut by columns. The other matrix is whole on every rank. LoRA on fused experts follows these."""
    for wrapper in model.modules():
        if type(wrapper).__name__ == _OF_EXPERTS and (divided := _way_of_experts(wrapper)) is not None:
            _follow_experts(wrapper, *divided)
            continue
        for matrix, dim, install in matrices_divided_with(wrapper):
            if Divided.of(matrix).style is None:
                Divided.put(matrix, style=install, parallel={"weight": (install.keywords["group"], (Shard(dim),))})
                install(matrix)


def matrices_divided_with(wrapper: Any) -> Iterator[tuple[nn.Module, int, Any]]:
    """Yield the matrices of LoRA on a divided layer that are divided too: along which dimension, in which style."""
    base = getattr(wrapper, "base_layer", None)
    install = Divided.of(base).style if isinstance(base, nn.Module) else None
    style = "" if install is None else install.keywords["style"]
    name, dim = ("lora_B", 0) if style.startswith("colwise") else ("lora_A", 1)
    if style.startswith(("colwise", "rowwise")):
        yield from ((matrix, dim, install) for matrix in getattr(wrapper, name).values())


def _way_of_experts(wrapper: Any) -> tuple[DeviceMesh, Any, int] | None:
    """Among which ranks the weights of fused experts are divided for which a `ParamWrapper` is, how, and along which
    dimension of (experts, …, …); None where they are not."""
    base, name = wrapper.get_base_layer(), wrapper.parameter_name
    form = Packed.of(base).forms.get(name)
    group, (place,) = Divided.of(base).parallel.get(
        name if form is None else part_name(name, "packed"), (None, (None,))
    )
    if group is None:
        return None
    dim = place.dim % 3
    return group, place, 3 - dim if dim and form is not None and form.is_transposed else dim


def _follow_experts(wrapper: Any, group: DeviceMesh, place: Any, dim: int) -> None:
    """Let LoRA on fused experts follow them. Where each is whole on one rank, the first matrix has the rows of each
    expert together, the second, of each of its `r` columns, one for each expert: both are divided. Where ranks share
    each, both are whole on every rank, which uses a part of one."""
    for name, matrix in wrapper.lora_A.items() if dim == 0 else ():
        Divided.put(matrix, parallel={"weight": (group, (place,))})
        columns = _StridedShard(1, split_factor=wrapper.r[name])
        Divided.put(wrapper.lora_B[name], parallel={"weight": (group, (columns,))})
    if Divided.of(wrapper).style is None:
        Divided.put(wrapper, style=_add_own_deltas, is_dispatched=dim == 0)
        install_style(wrapper)


def _add_own_deltas(wrapper: Any) -> None:
    wrapper.forward = partial(_with_own_deltas, wrapper.forward, wrapper=wrapper)


def _with_own_deltas(inner: Any, *args: Any, wrapper: Any, **kwargs: Any) -> Any:
    """Run experts that ranks share with what LoRA adds to the part of this rank, as PEFT's `ParamWrapper` adds it to
    all: it reads their number and its matrices from whole tensors."""
    names = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    if wrapper.disable_adapters or wrapper.merged or "adapter_names" in kwargs or not names:
        return inner(*args, **kwargs)
    factors = partial(_own_factors, wrapper, names)
    with with_added(wrapper.get_base_layer(), wrapper.parameter_name, factors, partial(_added_to, wrapper, factors)):
        return wrapper.base_layer(*args, **kwargs)


def _own_factors(wrapper: Any, names: list[str]) -> list[Factors]:
    """What adapters add to this rank's part of the weights of fused experts."""
    from transformers.distributed.parallel_utils import _AllReduceBackward  # 5.21 or newer: the layers are divided

    way, found = _way_of_experts(wrapper), []
    assert way is not None
    group, place, dim = way
    for name in names:
        first, second = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
        if dim == 0:
            first, second = first.to_local(), second.to_local()
        else:  # a rank's part of the weights gives a part of each gradient
            first, second = (_AllReduceBackward.apply(each, group.get_group()) for each in (first, second))
        rows = first.unflatten(0, (-1, wrapper.r[name]))  # (experts, r, in)
        columns = second.unflatten(1, (wrapper.r[name], -1)).permute(2, 0, 1)  # (experts, out, r)
        # PEFT's own word for experts whose weights are (experts, out, in)
        left, right = (columns, rows) if wrapper._did_swap_in_out_features else (rows.mT, columns.mT)
        if dim:
            left, right = (
                _own_part(each, dim, place, group) if i == dim else each for i, each in ((1, left), (2, right))
            )
        dtype = wrapper.get_param().dtype
        found.append((left.to(dtype), right.to(dtype), wrapper.scaling[name]))
    return found


def _own_part(tensor: torch.Tensor, dim: int, place: Any, group: DeviceMesh) -> torch.Tensor:
    """This rank's part of a tensor that is divided along a dimension as weights in this place are."""
    pieces = tensor.chunk(getattr(place, "split_factor", 1), dim)
    return torch.cat([piece.chunk(group.size(), dim)[group.get_local_rank()] for piece in pieces], dim)


@contextmanager
def _added_to(wrapper: Any, factors: Callable[[], list[Factors]]) -> Iterator[None]:
    """A block in which fused experts have floats with what adapters add to this rank's part of them."""
    own = wrapper.get_base_layer()._parameters
    former = own[wrapper.parameter_name]
    weight = former.to_local() if isinstance(former, DTensor) else former
    with torch.autocast(weight.device.type, enabled=False):
        for left, right, scaling in factors():
            weight = torch.baddbmm(weight, left, right, alpha=scaling)
    own[wrapper.parameter_name] = weight
    try:
        yield
    finally:
        own[wrapper.parameter_name] = former
