"""The network interface over which gloo connects the processes of several machines."""

import os
import socket
import warnings
from collections.abc import Iterable, Mapping

from hf_fsdp_tools.distributed.launcher import local_rank, local_size, world_size


def interface_of_nccl(variables: Mapping[str, str], present: Iterable[str]) -> str | None:
    """The one interface of this machine that `NCCL_SOCKET_IFNAME` names; None where it names none or several.

    "eth" stands for all that begin so, "=eth0" for that one alone, "^docker" for all others (NCCL's documentation).
    """
    asked = variables.get("NCCL_SOCKET_IFNAME", "")
    if not asked or asked.startswith("^") or "," in asked:
        return None
    exact = asked.removeprefix("=")
    found = [name for name in present if name == exact or (exact == asked and name.startswith(exact))]
    return found[0] if len(found) == 1 else None


def choose_interface() -> None:
    """Let gloo use an interface over which other machines reach this one; before gloo connects.

    gloo asks for the address of the host name, which on many machines is that of the loopback (Debian and its
    descendants write 127.0.1.1 into /etc/hosts). Then the interface that NCCL is told to use is taken, else the one
    that leads to `MASTER_ADDR`. Nothing is changed where `GLOO_SOCKET_IFNAME` is set, and nothing on one machine.
    """
    if not _on_several_machines(os.environ) or os.environ.get("GLOO_SOCKET_IFNAME"):
        return
    named = interface_of_nccl(os.environ, [name for _, name in socket.if_nameindex()])
    if named is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = named
        text = f"GLOO_SOCKET_IFNAME is not set: gloo uses {named}, which NCCL_SOCKET_IFNAME names."
    elif address := loopback_address():
        text = (
            f"The host name {socket.gethostname()} resolves to {address}, over which processes of other machines "
            "cannot be reached by gloo. "
        )
        if leading := interface_towards(os.environ.get("MASTER_ADDR", "")):
            os.environ["GLOO_SOCKET_IFNAME"] = leading
            text += f"gloo uses {leading}, which leads to MASTER_ADDR; GLOO_SOCKET_IFNAME names another."
        else:
            text += "Set GLOO_SOCKET_IFNAME to the interface between the machines (see `ip address`)."
    else:
        return
    if (local_rank(os.environ) or 0) == 0:
        warnings.warn(text, stacklevel=4)


def interface_towards(host: str) -> str | None:
    """The interface of this machine over which packets to a host leave; None for the loopback and for no such host.

    Nothing is sent: a UDP socket that is connected has the address of that interface.
    """
    import psutil

    if not host:
        return None
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(place)
            address = probe.getsockname()[0]
    except OSError:  # no such host, or no road to it
        return None
    if _is_loopback(address):
        return None
    places = psutil.net_if_addrs().items()
    return next((name for name, own in places if any(one.address.partition("%")[0] == address for one in own)), None)


def loopback_address() -> str:
    """The loopback address to which this machine's name resolves, and which gloo would use; "" where all is well.

    All is well for a job on one machine, and where `GLOO_SOCKET_IFNAME` is set.
    """
    if not _on_several_machines(os.environ) or os.environ.get("GLOO_SOCKET_IFNAME"):
        return ""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:  # gloo falls back to the loopback where the name does not resolve
        return "no address"
    addresses = [str(address[0]) for *_, address in found]
    return addresses[0] if all(map(_is_loopback, addresses)) else ""


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _on_several_machines(variables: Mapping[str, str]) -> bool:
    return world_size(variables) > local_size(variables)
