"""Gloo: beside the device's own backend in groups that were started without it, and with one thread in every group."""

import os
from datetime import timedelta
from functools import wraps
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

from hf_fsdp_tools.distributed.network import choose_interface

__all__ = ["GROUP_TIMEOUT", "add_cpu_backend", "has_cpu_backend", "set_timeout", "timeout_of"]

GROUP_TIMEOUT = timedelta(minutes=30)
"""Time limit of a collective in groups that this package starts, over any backend: what torch gives gloo, and the
Trainer all of its groups (`ddp_timeout`)."""

_CPU = torch.device("cpu")


def _run_on_one_thread() -> None:
    """Let each gloo group that anybody makes in this process from now on run its collectives on one thread.

    By default two threads take them in turn, and each sets the name of the collective that it has completed without a
    lock (`pgStatus_->lastCompletedWorkName` in `ProcessGroupGloo::runLoop`, torch 2.11 to 2.15). When two collectives
    end together, the memory of the name is freed twice, and later the process dies of SIGSEGV or SIGABRT ("malloc():
    unaligned tcache chunk detected"). Names of up to 15 characters need no memory; ALLGATHER_COALESCED, which is what
    `DTensor.full_tensor` runs, does. Found in the core of a rank; four gathers under way at a time lead to it within a
    minute. FSDP waits for each collective, so that a second thread has nothing to run meanwhile.
    """
    kind: Any = dist.ProcessGroupGloo
    make = kind.__init__

    @wraps(make)
    def make_with_one_thread(self: Any, store: Any, rank: int, size: int, *args: Any, **named: Any) -> None:
        if args or "options" in named:  # the caller's own
            make(self, store, rank, size, *args, **named)
            return
        names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        options = kind._Options()
        options._devices = [kind.create_device(interface=name) for name in names] or [kind.create_default_device()]
        options._timeout = named.pop("timeout", GROUP_TIMEOUT)
        options._threads = 1
        for name, value in named.items():
            setattr(options, name, value)
        make(self, store, rank, size, options)

    kind.__init__ = make_with_one_thread


if dist.is_gloo_available():
    _run_on_one_thread()


def has_cpu_backend(group: ProcessGroup | None = None) -> bool:
    """Whether a process group, by default the default one, communicates between CPUs."""
    return _CPU in (group or _get_default_group())._device_types


def timeout_of(group: ProcessGroup | None = None) -> timedelta:
    """The time limit of a group's collectives, the longest of its backends'; `GROUP_TIMEOUT` where none says it."""
    group = group or _get_default_group()
    options = (getattr(group._get_backend(device), "options", None) for device in group._device_types)
    limits = [limit for one in options if (limit := getattr(one, "_timeout", None)) is not None]
    return max(limits, default=GROUP_TIMEOUT)


def set_timeout(limit: timedelta) -> None:
    """Give all groups of this process that run already a time limit for the collectives that begin from now on."""
    for group in _world.pg_map:
        _set_pg_timeout(limit, group)


def add_cpu_backend(group: ProcessGroup | None = None) -> None:
    """Give a process group gloo for tensors on the CPU, if it has no backend for them.

    Who starts a group chooses its backends: `TrainingArguments`, and most scripts, choose NCCL alone. Then torch sends
    objects (the plan of a DCP save, what Accelerate gathers) over NCCL and the GPU, and nothing on the CPU (counts of
    labels, norms of offloaded gradients) can be sent at all. The group's own backends, and its time limit, stay.

    Args:
        group: of which this process is a member; None means the default group.

    Every member must call. Members of a group that lacks gloo connect to each other.
    """
    group = group or _get_default_group()
    if has_cpu_backend(group) or not dist.is_gloo_available():
        return
    name, description = group.group_name, group.group_desc
    # Of each type a group keeps one backend: a second gloo would be dropped, while other members still connect to it.
    present = (group._get_backend(device) for device in group._device_types)
    gloo = next((one for one in present if one.name() == "gloo"), None) or _connect(group)
    group._register_backend(_CPU, ProcessGroup.BackendType.GLOO, gloo)
    group._set_group_name(name)  # of all its backends: torch asks the first one for the group's name
    group._set_group_desc(description)


def _connect(group: ProcessGroup) -> "dist.ProcessGroupGloo":
    choose_interface()
    store, path = _get_default_store(), f"hf_fsdp_tools/gloo/{group.group_name}"
    # A group that is started again over the same store must not find the addresses of its former life.
    life = (store.add(f"{path}/lives", 1) - 1) // group.size()
    own = PrefixStore(f"{path}/{life}/", store)
    return dist.ProcessGroupGloo(own, group.rank(), group.size(), timeout=timeout_of(group))
