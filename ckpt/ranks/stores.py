"""Servers of a job's key-value store, and connections to them: reachable on one address only, and with a deadline for each call.

A TCPStore of torch listens on all interfaces, without authentication, and most of its calls wait forever for a server whose process
hangs. Here a server listens on one address. The kernel enforces the deadline of calls (SO_RCVTIMEO, SO_SNDTIMEO), at no cost.
"""

from __future__ import annotations

import os
import resource
import socket
import stat
import struct
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TypeVar

from torch.distributed import DistError, Store, TCPStore

from ckpt.errors import ConfigurationError
from ckpt.ranks.waiting import in_thread

_T = TypeVar("_T")
_FOLDERS = ("/proc/self/fd", "/dev/fd")
_TIMEVAL = struct.Struct("@ll")
_LONGEST_S = 1e6
_CONNECTIONS_OF_RANK = 6
_OTHER_FILES = 256
_CONNECT_S = 10.0
"""Shortest deadline of a new connection, for which torch looks up host names."""


class StoreGoneError(Exception):
    """The store no longer answers.

    Attributes:
        is_silent: the connection exists, but the server did not answer within the deadline.
    """

    def __init__(self, message: str, *, is_silent: bool = False) -> None:
        super().__init__(message)
        self.is_silent = is_silent


def serve(address: str, port: int = 0, *, timeout_s: float, is_shared: bool = False, for_ranks: int = 1) -> TCPStore:
    """Start a store in this process. It listens on one address of this machine only.

    Args:
        address: address or name of this machine; of several addresses IPv6 first, as torch's clients try them.
        port: 0: any free port.
        timeout_s: of calls that wait for a key.
        is_shared: if torch starts a store on this port in this process, it gets the same one.
        for_ranks: that will connect.

    Raises:
        ConfigurationError: this process may not open as many files as these ranks have connections.
        OSError: this machine has no such address, or the port is taken.
    """
    _make_room_for(for_ranks)
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


def _make_room_for(num_ranks: int) -> None:
    """Allow this process as many open files as the connections of these ranks need; torch's process groups have some of their own."""
    wanted = _CONNECTIONS_OF_RANK * num_ranks + _OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ConfigurationError(
            f"this process holds the store of {num_ranks} ranks, whose connections need about {wanted} open files, and may open {hard}: "
            "raise the limit (ulimit -Hn, or LimitNOFILE of its service)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def reach(address: str, port: int, *, timeout_s: float) -> TCPStore:
    """Connect to the store of another process.

    Args:
        timeout_s: of the connection, and of each call.

    Raises:
        StoreGoneError: there is no answer.
    """
    timeout = timedelta(seconds=min(timeout_s, _LONGEST_S))
    connect = partial(TCPStore, address, port, is_master=False, wait_for_workers=False, timeout=timeout)
    return _connected(connect, port, f"{address}:{port}", timeout_s)


def connection(store: Store, timeout_s: float) -> Store:
    """Return the same store over a new connection, for one thread.

    Args:
        timeout_s: of each call.

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


def has_queues(store: Store) -> bool:
    """Return whether a store offers queues, whose server wakes the reader. That of a HashStore wakes any one of its readers."""
    base = _base_of(store)
    return isinstance(base, TCPStore) and bool(base.libuvBackend)  # type: ignore[attr-defined]


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
    """Open a connection within a time limit, and set its deadline.

    Torch does not expose the connection's descriptor. If two threads connect to one server at once, each may find the other's
    descriptor: both get the shorter deadline.
    """
    before, patience_s = set(_sockets()), max(timeout_s, _CONNECT_S)
    try:
        # In a thread: it may hang, and knows no deadline.
        made = in_thread(connect, "ckpt-store").result(min(patience_s, _LONGEST_S))
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
    """Set the deadline of a socket that is connected to this port and has no shorter one."""
    wanted = _TIMEVAL.pack(int(min(timeout_s, _LONGEST_S)), int(min(timeout_s, _LONGEST_S) % 1 * 1e6))
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as made:
        # Sockets of other threads may be of other kinds: the peer of a Unix socket is a name.
        if made.family not in (socket.AF_INET, socket.AF_INET6) or made.getpeername()[1] != port:
            return
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            now = _TIMEVAL.unpack(made.getsockopt(socket.SOL_SOCKET, option, _TIMEVAL.size))
            if now == (0, 0) or _TIMEVAL.unpack(wanted) < now:
                made.setsockopt(socket.SOL_SOCKET, option, wanted)
