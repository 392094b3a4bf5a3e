"""Identity and addresses of this machine: the address to listen on, and the one by which others reach it."""

from __future__ import annotations

import os
import socket
import struct

import psutil

LOOPBACK = "127.0.0.1"
"""Reachable from this machine only."""

_CREDENTIALS = struct.Struct("iII")


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process at the other end of a Unix socket, and its effective user."""
    pid, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, user


def own_address() -> str:
    """Return the address on which this process listens for others of its job.

    It is that of the interface GLOO_SOCKET_IFNAME, as for torch's own groups; else the one by which this machine reaches other
    networks; else the host name.
    """
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if chosen and (found := _address_of(chosen)) is not None:
        return found
    try:
        return address_towards("192.0.2.1", 9)  # reserved for documentation: only the interface is of interest
    except OSError:
        return socket.gethostname()


def address_towards(host: str, port: int) -> str:
    """Return this machine's address on the route to another one, or to itself. Sends nothing.

    Raises:
        OSError: the name is unknown, or there is no route.
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
        if any(net_address.address.partition("%")[0] == address for net_address in addresses):
            return str(name)
    return None


def machine(namespace: str | None = None) -> str:
    """Return a text that is equal in two processes if and only if they run on one kernel, in the same namespace of this kind.

    Args:
        namespace: "net": they share a loopback interface; "pid": they see each other's pids; None: any namespace, they see each
            other's file locks.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return boot if namespace is None else f"{boot} {os.readlink(f'/proc/self/ns/{namespace}')}"
    except OSError:
        return socket.gethostname()


def _address_of(interface: str) -> str | None:
    """Return the first address of an interface, IPv4 before IPv6; None: it has none."""
    found = {net_address.family: str(net_address.address) for net_address in reversed(psutil.net_if_addrs().get(interface, []))}
    return found.get(socket.AF_INET, found.get(socket.AF_INET6))
