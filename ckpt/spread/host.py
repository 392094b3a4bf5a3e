"""The ranks of one host: a socket between any two, and of each a segment of memory that all the others see.

Bytes that one of them puts into its segment need no other way to the rest; the sockets carry but a few words about them.
The kernel holds the segment while a process has it mapped (memfd), so nothing is left behind, however a rank ends.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
import sys
from collections.abc import Callable, Sequence

import torch

from ckpt.errors import RankLeftError

READY, DONE = 1, 2
_WORDS = struct.Struct("<BII")
_HELLO = struct.Struct("<I")


def has_shared_memory() -> bool:
    """Whether ranks of one host can share memory here."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


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
        self._num_bytes = num_bytes
        self._fd = os.memfd_create("ckpt-in-flight", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, max(num_bytes, 1))
        self.memory[rank] = _mapped(self._fd, num_bytes)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.address = f"ckpt-{secrets.token_hex(16)}"
        self._listener.bind(
            "\0" + self.address
        )  # a name of the kernel's, not of a file system; it goes with the socket
        self._listener.listen(4096)

    def reach(self, addresses: Sequence[tuple[int, str]]) -> bool:
        """Call the ranks below this one, and hand them this rank's segment; return whether all of them are there.

        They are not where two hosts or containers go by one name.
        """
        try:
            for rank, address in addresses:
                if rank < self.rank:
                    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    self.sockets[rank] = made
                    made.connect("\0" + address)
                    socket.send_fds(made, [_HELLO.pack(self.rank)], [self._fd])
        except OSError:
            return False
        return True

    def join(self, ranks: Sequence[int], timeout_s: float, progress: Callable[[], None]) -> None:
        """Answer the ranks above this one, and map everybody's segment. All have called already.

        Raises:
            RankLeftError: one of them has gone, or does not answer.
        """
        try:
            self._listener.settimeout(timeout_s)
            for _ in range(sum(rank > self.rank for rank in ranks)):
                made, _ = self._listener.accept()
                _require_same_user(made)
                made.settimeout(timeout_s)
                rank = self._take_memory(made)
                self.sockets[rank] = made
                socket.send_fds(made, [_HELLO.pack(self.rank)], [self._fd])
                progress()
            for rank in (rank for rank in ranks if rank < self.rank):
                self.sockets[rank].settimeout(timeout_s)
                self._take_memory(self.sockets[rank])
                progress()
        except OSError as error:
            raise RankLeftError(f"a rank of this host left before it had shared its memory: {error}") from error

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

    def _take_memory(self, made: socket.socket) -> int:
        """Map the segment that a neighbour hands over; return its rank."""
        hello, fds, _, _ = socket.recv_fds(made, _HELLO.size, 1)
        if len(fds) != 1:
            raise ConnectionError("it closed the connection")
        try:
            (sender,) = _HELLO.unpack(hello)
            self.memory[sender] = _mapped(fds[0], self._num_bytes)
        finally:
            os.close(fds[0])
        return int(sender)

    def close(self) -> None:
        """Let go of everything."""
        for made in (*self.sockets.values(), self._listener):
            made.close()
        self.sockets.clear()
        self.memory.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _mapped(fd: int, num_bytes: int) -> torch.Tensor:
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(fd, num_bytes), dtype=torch.uint8)


def _require_same_user(made: socket.socket) -> None:
    credentials = made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, user, _ = struct.unpack("3i", credentials)
    if user != os.geteuid():
        raise ConnectionError(f"user {user} answered in place of a rank of this host")
