"""Gloo, which communicates between CPUs: on one thread, over an interface that other machines reach, in any group."""

import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import (
    PrefixStore,
    ProcessGroup,
    _get_default_group,
    _get_default_store,
    _set_pg_timeout,
    _world,
)

from hf_fsdp_tools.distributed.launcher import local_rank, local_size, world_size

_CPU = torch.device("cpu")


def default_timeout(device_type: str) -> timedelta:
    """The time limit of a collective in groups that this package starts: torch's own, of gloo and of NCCL."""
    return timedelta(minutes=30 if device_type == "cpu" else 10)


@contextmanager
def one_gloo_thread() -> Iterator[None]:
    """Let each gloo group that torch makes in this block run its collectives on one thread.

    By default two threads take them in turn, and set the name of the last one (`lastCompletedWorkName` in
    `ProcessGroupGloo::runLoop`, torch 2.11 to 2.15) without a lock: freed twice, it kills the process later.
    `init_process_group` and `DeviceMesh` take no options for gloo: they find a subclass of its class.
    """
    usual = getattr(distributed_c10d, "ProcessGroupGloo", None)  # a torch without gloo has none
    if usual is not None:
        distributed_c10d.ProcessGroupGloo = _one_thread_gloo()  # type: ignore[misc]
    try:
        yield
    finally:
        if usual is not None:
            distributed_c10d.ProcessGroupGloo = usual  # type: ignore[misc]


@cache
def _one_thread_gloo() -> Any:
    kind: Any = dist.ProcessGroupGloo

    class OneThreadGloo(kind):  # type: ignore[misc]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, **named: Any) -> None:
            names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
            options = kind._Options()
            options._devices = [kind.create_device(interface=name) for name in names] or [kind.create_default_device()]
            options._timeout, options._threads = timeout, 1
            for name, value in named.items():  # torch 2.14 has `enable_reconfigure`
                setattr(options, name, value)
            super().__init__(store, rank, size, options)

    return OneThreadGloo


def has_cpu_backend(group: ProcessGroup | None = None) -> bool:
    """Whether a process group, by default the default one, communicates between CPUs."""
    return _CPU in (group or _get_default_group())._device_types


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
    """Give a process group gloo on one thread for tensors on the CPU, if it has no backend for them, or has gloo alone
    and on several threads (see `one_gloo_thread`).

    `TrainingArguments`, and most scripts, choose NCCL alone. Then nothing on the CPU (counts of labels, norms of
    offloaded gradients) can be sent. The group's other backends, and its time limit, stay.

    Every member must call. Members of a group that is given gloo connect to each other.
    """
    group = group or _get_default_group()
    if not dist.is_gloo_available():
        return
    name, description = group.group_name, group.group_desc
    # Of each type a group keeps one backend: a second gloo would be dropped, while other members still connect to it.
    present = [group._get_backend(device) for device in group._device_types]
    gloo: Any = next((one for one in present if one.name() == "gloo"), None)
    if not has_cpu_backend(group):
        group._register_backend(_CPU, ProcessGroup.BackendType.GLOO, gloo or _connect(group))
    elif {one.name() for one in present} == {"gloo"} and group._get_backend(_CPU).options._threads > 1:  # type: ignore[attr-defined]
        group._register_backend(_CPU, ProcessGroup.BackendType.CUSTOM, _connect(group))
    else:
        return
    group._set_group_name(name)  # of all its backends: torch asks the first one for the group's name
    group._set_group_desc(description)


def _connect(group: ProcessGroup) -> Any:
    choose_interface()
    store, path = _get_default_store(), f"hf_fsdp_tools/gloo/{group.group_name}"
    # A group that is started again over the same store must not find the addresses of its former life.
    life = (store.add(f"{path}/lives", 1) - 1) // group.size()
    own = PrefixStore(f"{path}/{life}/", store)
    return _one_thread_gloo()(own, group.rank(), group.size(), timeout_of(group))


def choose_interface() -> None:
    """Let gloo use the interface that leads to `MASTER_ADDR`, where other machines do not reach this machine's name.

    gloo takes the address of the host name, which on many machines is the loopback's (Debian and its descendants write
    127.0.1.1 into /etc/hosts). Nothing is changed on one machine, or with `GLOO_SOCKET_IFNAME`.
    """
    if not (address := loopback_address()):
        return
    cure = "Set GLOO_SOCKET_IFNAME to the interface between the machines (see `ip address`)"
    if interface := interface_towards(os.environ.get("MASTER_ADDR", "")):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        cure = f"gloo uses {interface}, which leads to MASTER_ADDR; GLOO_SOCKET_IFNAME names another"
    if (local_rank(os.environ) or 0) == 0:
        warnings.warn(
            f"The host name {socket.gethostname()} resolves to {address}, at which gloo does not reach the processes "
            f"of other machines. {cure}.",
            stacklevel=4,
        )


def interface_towards(host: str) -> str | None:
    """The interface of this machine over which packets to a host leave; None for the loopback and for no such host.

    Nothing is sent: a UDP socket that is connected has the address of that interface.
    """
    import psutil

    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host or None, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            address = probe.getsockname()[0]
    except OSError:  # no such host, or no road to it
        return None
    own = psutil.net_if_addrs().items()
    names = [name for name, places in own if any(one.address.partition("%")[0] == address for one in places)]
    return None if _is_loopback(address) or not names else names[0]


def loopback_address() -> str:
    """The loopback address to which this machine's name resolves, and which gloo would use; "" where all is well.

    All is well for a job on one machine, and where `GLOO_SOCKET_IFNAME` is set.
    """
    if world_size(os.environ) <= local_size(os.environ) or os.environ.get("GLOO_SOCKET_IFNAME"):
        return ""
    try:
        places = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:  # gloo falls back to the loopback where the name does not resolve
        return "no address"
    addresses = [str(address[0]) for *_, address in places]
    return addresses[0] if all(map(_is_loopback, addresses)) else ""


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"
