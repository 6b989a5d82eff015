"""Gloo, which communicates between CPUs, on one thread in any process group."""

import os
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    PrefixStore,
    ProcessGroup,
    _get_default_group,
    _get_default_store,
    _set_pg_timeout,
    _world,
)

from hf_fsdp_tools.accelerator import find_accelerator

_CPU = torch.device("cpu")


def default_timeout(device_type: str) -> timedelta:
    """The time limit of a collective in groups that this package starts: torch's own, of gloo and of NCCL."""
    return timedelta(minutes=30 if device_type == "cpu" else 10)


def has_cpu_backend(group: ProcessGroup | None = None) -> bool:
    """Whether a process group, by default the default one, communicates between CPUs."""
    return _CPU in (group or _get_default_group())._device_types


def all_reduced(
    values: torch.Tensor, groups: Iterable[ProcessGroup | None] = (None,), op: Any = dist.ReduceOp.SUM
) -> torch.Tensor:
    """Values on the CPU, reduced over each group in turn, by default the default one, between CPUs where it can; as
    they are without a process group. Every member must call: the key-value store is too slow for what grows with
    tensors."""
    for group in groups if dist.is_initialized() else ():
        values = values.to("cpu" if has_cpu_backend(group) else find_accelerator())
        dist.all_reduce(values, op, group)
    return values.cpu()


def timeout_of(group: ProcessGroup | None = None) -> timedelta:
    """The time limit of a group's collectives, the longest of its backends'; torch's for gloo where none says it."""
    group = group or dist.group.WORLD  # None once it is over
    backends = [group._get_backend(device) for device in group._device_types] if group is not None else []
    limits = [limit for one in backends if (limit := getattr(getattr(one, "options", None), "_timeout", None))]
    return max(limits, default=default_timeout("cpu"))


def set_timeout(limit: timedelta) -> None:
    """Give all groups of this process that run already a time limit for the collectives that begin from now on."""
    for group in _world.pg_map:
        _set_pg_timeout(limit, group)


def add_cpu_backend(group: ProcessGroup | None = None) -> None:
    """Give a process group gloo on one thread for tensors on the CPU, if it has no backend for them, or gloo alone.

    `TrainingArguments`, and most scripts, choose NCCL alone. Then nothing on the CPU (counts of labels, norms of
    offloaded gradients) can be sent. Torch makes gloo with two threads, which take collectives in turn, and set the
    name of the last one (`lastCompletedWorkName` in `ProcessGroupGloo::runLoop`, torch 2.11 to 2.15) without a lock:
    freed twice, it kills the process later. The group's other backends, and its time limit, stay.

    Every member must call. Members of a group that is given gloo connect to each other.
    """
    group = group or _get_default_group()
    if not dist.is_gloo_available():
        return
    name, description = group.group_name, group.group_desc
    # A group keeps one backend of each type: a second gloo would be dropped, while other members still connect to it.
    present = [group._get_backend(device) for device in group._device_types]
    gloo: Any = next((one for one in present if one.name() == "gloo"), None)
    if not has_cpu_backend(group):
        group._register_backend(_CPU, ProcessGroup.BackendType.GLOO, gloo or _connected(group))
    elif {one.name() for one in present} == {"gloo"} and group._get_backend(_CPU).options._threads > 1:  # type: ignore[attr-defined]
        group._register_backend(_CPU, ProcessGroup.BackendType.CUSTOM, _connected(group))
    else:
        return
    group._set_group_name(name)  # of all its backends: torch asks the first one for the group's name
    group._set_group_desc(description)


def _connected(group: ProcessGroup) -> Any:
    """Gloo of a group, with options that neither `init_process_group` nor `DeviceMesh` takes."""
    kind: Any = dist.ProcessGroupGloo
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    options = kind._Options()
    options._devices = [kind.create_device(interface=name) for name in names] or [kind.create_default_device()]
    options._timeout, options._threads = timeout_of(group), 1
    store = store_of_its_own(_get_default_store(), f"gloo/{group.group_name}", group.size())
    return kind(store, group.rank(), group.size(), options)


def store_of_its_own(store: Any, name: str, ranks: int) -> PrefixStore:
    """The part of a store that so many ranks share under a name.

    A group that is started again over the same store does not find the keys of its former life.
    """
    life = (store.add(f"hf_fsdp_tools/{name}/lives", 1) - 1) // ranks
    return PrefixStore(f"hf_fsdp_tools/{name}/{life}", store)
