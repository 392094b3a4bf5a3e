"""The ranks of one host: a socket between any two, and of each a segment of memory that all the others see.

Bytes that one of them puts into its segment need no other way to the rest; the sockets carry but a few words about them.
The kernel holds the segment while a process has it mapped (memfd), so nothing is left behind, however a rank ends.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from ckpt.errors import RankLeftError
from ckpt.memory.shared_memory import mapped
from ckpt.ranks.topology import Topology
from ckpt.ranks.waiting import poll_until, unless_timeout
from ckpt.storage.host_memory import shared

READY, DONE = 1, 2
_WORDS = struct.Struct("<BII")
_LOOK_S = 0.2
_T = TypeVar("_T")
_HELLO = struct.Struct("<I")


class HostLink:
    """One rank's end. First `listen`, then, when all ranks have the addresses of all, `reach`, and when all could, `join`.

    Attributes:
        memory: rank -> its segment, flat bytes; this rank's own from the beginning.
        sockets: rank -> the socket between it and this one.
    """

    def __init__(self, rank: int, num_bytes: int) -> None:
        self.rank = rank
        self.memory: dict[int, torch.Tensor] = {}
        self.sockets: dict[int, socket.socket] = {}
        self.address = f"ckpt-{secrets.token_hex(16)}"
        self._fd = -1
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._fd = shared("ckpt-in-flight", num_bytes)
            self.memory[rank] = mapped(self._fd)
            # A name of the kernel's, not of a file system; it goes with the socket.
            self._listener.bind("\0" + self.address)
            self._listener.listen(4096)
        except BaseException:
            self.close()
            raise

    def reach(self, addresses: Sequence[tuple[int, str]]) -> bool:
        """Call the ranks below this one; return whether all of them are there.

        They are not where two hosts or containers go by one name.
        """
        try:
            for rank, address in addresses:
                if rank < self.rank:
                    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    self.sockets[rank] = made
                    made.setblocking(False)  # nobody answers yet: where no more calls are kept, it would wait for ever
                    made.connect("\0" + address)
                    made.send(_HELLO.pack(self.rank))
        except OSError:
            return False
        return True

    def join(self, ranks: Sequence[int], topology: Topology) -> None:
        """Answer the ranks above this one, and map everybody's segment. All have called already.

        A user may have only so many descriptors on their way between processes, on all sockets together. So a rank has one: any
        two swap theirs before they turn to others, and all do so in one order of pairs, in which nobody waits in a circle.

        Raises:
            RankLeftError: one of them has gone, or does not answer.
        """
        others = [rank for rank in sorted(ranks) if rank != self.rank]
        try:
            for _ in range(sum(rank > self.rank for rank in others)):
                made = self._answered(others, topology)
                hello = _patiently(made, partial(made.recv, _HELLO.size), others, topology)
                self.sockets[_sender_in(hello)] = made
            for rank in others:
                self._swap_memory(rank, topology)
        except OSError as error:
            if isinstance(error, RankLeftError):  # which is a TimeoutError, and so an OSError
                raise
            raise RankLeftError(f"a rank of this host left before it had shared its memory: {error}") from error

    def _answered(self, others: Sequence[int], topology: Topology) -> socket.socket:
        """Answer the next call of this user. Other users can see the address, and call, too; they are turned away."""
        while True:
            made, _ = _patiently(self._listener, self._listener.accept, others, topology)
            if _is_of_this_user(made):
                return made
            made.close()

    def send(self, rank: int, kind: int, parcel: int, slot: int) -> None:
        """Say a few words. There is room for all that can be under way at a time.

        Raises:
            ConnectionError: the other rank has left.
        """
        self.sockets[rank].send(_WORDS.pack(kind, parcel, slot))

    def receive(self, rank: int) -> tuple[int, int, int] | None:
        """What another rank said; None: it has left."""
        try:
            data = self.sockets[rank].recv(_WORDS.size)
        except ConnectionError:
            return None
        return _WORDS.unpack(data) if data else None

    def _swap_memory(self, rank: int, topology: Topology) -> None:
        """Hand a neighbour this rank's segment, and map its; the rank above the other one begins."""
        made = self.sockets[rank]
        if rank < self.rank:
            socket.send_fds(made, [_HELLO.pack(self.rank)], [self._fd])
        hello, fds, _, _ = _patiently(made, partial(socket.recv_fds, made, _HELLO.size, 1), [rank], topology)
        try:
            if _sender_in(hello) != rank or len(fds) != 1:
                raise ConnectionError(f"rank {rank} hands over something else")
            self.memory[rank] = mapped(fds[0])
        finally:
            for fd in fds:
                os.close(fd)
        if rank > self.rank:
            socket.send_fds(made, [_HELLO.pack(self.rank)], [self._fd])

    def close(self) -> None:
        """Let go of everything."""
        for made in (*self.sockets.values(), self._listener):
            made.close()
        self.sockets.clear()
        self.memory.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _patiently(waits: socket.socket, call: Callable[[], _T], ranks: Sequence[int], topology: Topology) -> _T:
    """Wait in a call on a socket for one of these ranks, as long as none of them has failed, at most `topology.timeout_s`.

    Raises:
        RankLeftError: one has failed, or nothing came.
    """
    waits.settimeout(_LOOK_S)

    def ask() -> _T | None:
        topology.progress()
        return unless_timeout(call)

    def look() -> None:
        if (gone := topology.has_raised(ranks)) is not None:
            raise RankLeftError(f"rank {gone} left before it had shared its memory", rank=gone)

    failure = partial(TimeoutError, "timed out")
    return poll_until(ask, look=look, nap=None, timeout_s=topology.timeout_s, failure=failure)


def _sender_in(hello: bytes) -> int:
    if len(hello) != _HELLO.size:
        raise ConnectionError("it closed the connection")
    (sender,) = _HELLO.unpack(hello)
    return int(sender)


def _is_of_this_user(made: socket.socket) -> bool:
    credentials = made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.geteuid())
