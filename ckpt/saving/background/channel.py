"""Messages between a process and one that it started, over a socket: pickled objects, and descriptors beside them.

Both ends trust each other: they are one program. Neither ever waits for the other without looking, now and then, whether it is there.
"""

from __future__ import annotations

import errno
import os
import pickle
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

LOOK_S = 0.25
"""Between two looks of who waits."""

_HEADER = struct.Struct("<QI")
_MOST_FDS = 64


class Gone(Exception):
    """The other end is gone, or this one is closed."""


class Channel:
    """One end. Any thread may send; one receives.

    Args:
        made: a connected stream socket between processes of this host; this object closes it.
    """

    def __init__(self, made: socket.socket) -> None:
        self._socket = made
        self._socket.settimeout(LOOK_S)
        self._sending = threading.Lock()

    def send(self, message: Any, fds: Sequence[int] = (), look: Callable[[], None] = lambda: None) -> None:
        """Send an object that can be pickled, and descriptors that the other end gets copies of.

        Args:
            look: called now and then as long as the other end takes nothing; raises if that is no use any more.

        Raises:
            Gone: the other end is, or this one is closed.
        """
        assert len(fds) <= _MOST_FDS
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        header = _HEADER.pack(len(data), len(fds))
        with self._sending:
            sent = _patiently(lambda: socket.send_fds(self._socket, [header], fds), look)
            with self._whole_or_never_again():
                for rest in (memoryview(header)[sent:], memoryview(data)):
                    while rest:
                        rest = rest[_patiently(partial(self._socket.send, rest), look) :]

    def receive(self, look: Callable[[], None] = lambda: None) -> tuple[Any, list[int]]:
        """Return the next object, and the descriptors that came with it, which are the caller's now.

        Args:
            look: called now and then as long as nothing comes.

        Raises:
            Gone: the other end is, or this one is closed.
        """
        start, fds, _, _ = _patiently(lambda: socket.recv_fds(self._socket, _HEADER.size, _MOST_FDS), look)
        if not start:
            raise Gone
        with self._whole_or_never_again():
            size, num_fds = _HEADER.unpack(start + self._exactly(_HEADER.size - len(start), look))
            if num_fds != len(fds):
                raise OSError(errno.EMFILE, f"{len(fds)} of {num_fds} descriptors came: {os.strerror(errno.EMFILE)}")
            return pickle.loads(self._exactly(size, look)), fds

    def shut(self) -> None:
        """End the conversation for both sides, and for all threads that wait on this one."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the other end was faster

    def close(self) -> None:
        """Let go of this end; other processes that have it, as forks do, are none the wiser."""
        self._socket.close()

    def _exactly(self, size: int, look: Callable[[], None]) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = _patiently(partial(self._socket.recv_into, view), look)
            if count == 0:
                raise Gone
            view = view[count:]
        return data

    @contextmanager
    def _whole_or_never_again(self) -> Iterator[None]:
        """A message that was broken off is the last one: what follows it would be taken for the rest of it."""
        try:
            yield
        except BaseException:
            self.shut()
            raise


def _patiently(call: Callable[[], Any], look: Callable[[], None]) -> Any:
    """Return what a call on the socket does, however long it takes, and look whenever it took `LOOK_S` in vain."""
    while True:
        try:
            return call()
        except TimeoutError:
            look()  # whose own errors are its caller's
        except OSError as error:
            raise Gone from error
