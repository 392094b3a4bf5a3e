"""The key-value store of a job: which machines can reach it, and how long a call to it may take.

A TCPStore of torch listens on every interface, without authentication, and most of its calls wait without end for a server whose
process hangs. Here a server listens on one address, and each connection has a deadline. The kernel keeps the deadline (SO_RCVTIMEO,
SO_SNDTIMEO), so it costs a call nothing.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TypeVar

from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import DistError

from ckpt.ranks.waiting import in_thread

_T = TypeVar("_T")
_FOLDERS = ("/proc/self/fd", "/dev/fd")
_TIMEVAL = struct.Struct("@ll")
_LONGEST_S = 1e6
_CONNECT_S = 10.0
"""That a new connection may take, if its calls may take less: torch asks name servers who is at its other end."""


class StoreGoneError(Exception):
    """The store does not answer any more.

    Attributes:
        is_silent: its server is there, but did not answer within the deadline.
    """

    def __init__(self, message: str, *, is_silent: bool = False) -> None:
        super().__init__(message)
        self.is_silent = is_silent


def serve(address: str, port: int = 0, *, timeout_s: float, is_shared: bool = False) -> TCPStore:
    """Hold a store in this process. It listens on one address of this machine alone.

    Args:
        address: or a name of this machine; of several addresses IPv6 first, as torch's clients try them.
        port: 0: any that is free.
        timeout_s: of the calls that wait for a key.
        is_shared: torch may hold a store of its own under the same port in this process, which is then the same one.

    Raises:
        OSError: this machine has no such address, or the port is taken.
    """
    listener = _listener(address, port)
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=is_shared,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def reach(address: str, port: int, *, timeout_s: float) -> TCPStore:
    """Connect to a store that another process holds.

    Args:
        timeout_s: for the connection, and of each call over it.

    Raises:
        StoreGoneError: nobody answers there.
    """

    def connect() -> TCPStore:
        return TCPStore(
            address,
            port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=min(timeout_s, _LONGEST_S)),
        )

    return _connected(connect, port, f"{address}:{port}", timeout_s)


def connection(store: Store, timeout_s: float) -> Store:
    """Return the same store over a connection of its own, for one thread.

    Args:
        timeout_s: of each call over it.

    Raises:
        StoreGoneError: the store does not answer.
    """
    clone: Callable[[], Store] = store.clone  # type: ignore[attr-defined]  # its stub has no clone
    base = _base_of(store)
    if not isinstance(base, TCPStore):
        return clone()
    return _connected(clone, base.port, where_is(store), timeout_s)


def where_is(store: Store) -> str:
    """Return the address and port of a store, for messages."""
    base = _base_of(store)
    return f"{base.host}:{base.port}" if isinstance(base, TCPStore) else type(base).__name__


def _base_of(store: Store) -> Store:
    while (beneath := getattr(store, "underlying_store", None)) is not None:
        store = beneath
    return store


def _listener(address: str, port: int) -> socket.socket:
    failure: OSError | None = None
    found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    for family, _, _, _, where in sorted(found, key=lambda one: one[0] != socket.AF_INET6):
        try:
            return socket.create_server(where, family=family)
        except OSError as error:
            failure = error
    raise failure or OSError(f"{address} has no address")


def _connected(connect: Callable[[], _T], port: int, where: str, timeout_s: float) -> _T:
    """Make a connection in time, and give it a deadline.

    Torch does not tell which descriptor is the connection's. Of two threads that connect to one server at once, each may see the
    other's as new: the shorter deadline holds for both.
    """
    before, patience_s = set(_sockets()), max(timeout_s, _CONNECT_S)
    try:
        made = in_thread(connect, "ckpt-store").result(
            min(patience_s, _LONGEST_S)
        )  # it may hang, and knows no deadline
    except TimeoutError:
        raise StoreGoneError(
            f"the store at {where} did not answer a new connection within {patience_s:g} s", is_silent=True
        ) from None
    except DistError as error:
        raise StoreGoneError(str(error)) from error
    for inode, descriptor in _sockets().items():
        if inode not in before:
            _limit(descriptor, port, timeout_s)
    return made


def _sockets() -> dict[int, int]:
    """Return the sockets of this process: inode -> descriptor."""
    found = {}
    for name in os.listdir(next(folder for folder in _FOLDERS if os.path.isdir(folder))):
        with suppress(OSError):  # closed meanwhile
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[status.st_ino] = int(name)
    return found


def _limit(descriptor: int, port: int, timeout_s: float) -> None:
    """Give a socket a deadline, if the other end is this port, and it has no shorter one."""
    wanted = _TIMEVAL.pack(int(min(timeout_s, _LONGEST_S)), int(min(timeout_s, _LONGEST_S) % 1 * 1e6))
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as made:
        # Other threads make sockets meanwhile, of other kinds, too: the peer of a Unix socket is a name.
        if made.family not in (socket.AF_INET, socket.AF_INET6) or made.getpeername()[1] != port:
            return
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            now = _TIMEVAL.unpack(made.getsockopt(socket.SOL_SOCKET, option, _TIMEVAL.size))
            if now == (0, 0) or _TIMEVAL.unpack(wanted) < now:
                made.setsockopt(socket.SOL_SOCKET, option, wanted)
