"""What tells this machine from others, and its addresses: on which one a process listens, by which one others reach it."""

from __future__ import annotations

import os
import socket

import psutil

LOOPBACK = "127.0.0.1"
"""What listens here is reached from this machine alone."""


def own_address() -> str:
    """Return the address on which this process listens for others of its job.

    That of the interface which GLOO_SOCKET_IFNAME names, as for torch's own groups; else the one by which this machine reaches
    other networks; its name, if there is none.
    """
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if chosen and (found := _address_of(chosen)) is not None:
        return found
    try:
        return address_towards("192.0.2.1", 9)  # no machine has this address: only the interface is of interest
    except OSError:
        return socket.gethostname()


def address_towards(host: str, port: int) -> str:
    """Return the own address from which this machine reaches another one, or itself. Sends nothing.

    Raises:
        OSError: the name is unknown, or no interface leads there.
    """
    for family, kind, _, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
        with socket.socket(family, kind) as probe:
            try:
                probe.connect(where)
                return str(probe.getsockname()[0])
            except OSError:
                continue
    raise OSError(f"no interface of this machine leads to {host}")


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has this address, or None."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in addresses):
            return str(name)
    return None


def machine(namespace: str | None = None) -> str:
    """Return a text that is equal in two processes if and only if they run on one kernel, in the same namespace of this kind.

    Args:
        namespace: "net": they reach what the other has on its loopback interface; "pid": they see each other's pids; None: whatever
            it is, they see each other's locks.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return boot if namespace is None else f"{boot} {os.readlink(f'/proc/self/ns/{namespace}')}"
    except OSError:
        return socket.gethostname()


def _address_of(interface: str) -> str | None:
    found = psutil.net_if_addrs().get(interface, ())
    for family in (socket.AF_INET, socket.AF_INET6):
        for one in found:
            if one.family == family:
                return str(one.address)
    return None
