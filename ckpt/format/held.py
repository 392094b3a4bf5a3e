"""Files of a checkpoint that are in some rank's memory, too: where, and how a load gets at them. (How they come there: backends/pool.py.)

The memory is a file of the kernel's that is in no folder (memfd), which any process of the same user on the same host opens through
/proc, for as long as the rank that made it lives and keeps it. That it is the one which was meant is seen by name, inode and size.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ckpt.errors import CorruptCheckpointError

_log = logging.getLogger("ckpt")
_T = TypeVar("_T")


class MemoryFile(NamedTuple):
    """A file in the memory of a process of this host.

    Attributes:
        name: of the memory, which no other of this host has.
    """

    pid: int
    fd: int
    inode: int
    size: int
    name: str


class HeldFiles:
    """What of one checkpoint need not be read from its folder. Used by one thread at a time.

    Args:
        places: path below the checkpoint -> its bytes in memory.
        own: the same of those that are this process's own memory, mapped.
    """

    def __init__(
        self,
        places: Mapping[str, MemoryFile] | None = None,
        own: Mapping[str, np.ndarray[Any, np.dtype[np.uint8]]] | None = None,
    ) -> None:
        self._places = dict(places or {})
        self._own = own or {}

    def __contains__(self, file: str) -> bool:
        return file in self._places

    def open(self, file: str) -> int | None:
        """A descriptor to read a file's bytes from; None: they are not held, or not any more, and come from the disk."""
        place = self._places.get(file)
        if place is None:
            return None
        with suppress(OSError):
            # Without waiting: the number may be that of a pipe by now.
            fd = os.open(f"/proc/{place.pid}/fd/{place.fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                found = os.fstat(fd)
                name = os.readlink(f"/proc/self/fd/{fd}")
                if (found.st_ino, found.st_size) == (place.inode, place.size) and place.name in name:
                    return fd
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
        _log.info("%s is in memory no more; reading the file", file)
        del self._places[file]
        return None

    def place(self, file: str) -> MemoryFile | None:
        """Where a file is held; None: it is not."""
        return self._places.get(file)

    def read_at(self, file: str) -> Callable[[int, Sequence[memoryview], int], int]:
        """What reads the bytes of a file that is held, as `os.preadv` does, which is slower for memory that is mapped already."""
        return os.preadv if file not in self._own else partial(_copy_from, self._own[file])

    def read(self, file: str) -> bytes | None:
        """A small file, whole; None: it is not held."""
        fd = self.open(file)
        if fd is None:
            return None
        with os.fdopen(fd, "rb") as stream:
            return stream.read()

    def distrust(self, file: str) -> None:
        """What was found in memory is not what was saved: say so, and read the file from now on."""
        if self._places.pop(file, None) is not None:
            _log.warning("%s was changed in memory since it was saved; it is read from the disk", file)

    def or_disk(self, file: str, read: Callable[[], _T]) -> _T:
        """What `read` returns, which goes by what is held; once more, without it, if that proves damaged.

        Raises:
            CorruptCheckpointError, OSError: the file on the disk is no better.
        """
        try:
            return read()
        except (CorruptCheckpointError, OSError):
            if file not in self:
                raise
            self.distrust(file)
        return read()


def _copy_from(memory: np.ndarray[Any, np.dtype[np.uint8]], _: int, buffers: Sequence[memoryview], at: int) -> int:
    """Fill buffers from a byte of some memory on, as far as it goes; return how many bytes that was."""
    start = at
    for buffer in buffers:
        piece = memory[at : at + len(buffer)]
        np.copyto(np.frombuffer(buffer, np.uint8)[: len(piece)], piece)
        at += len(piece)
    return at - start


NOTHING_HELD = HeldFiles()
"""Of a checkpoint of which nothing is in memory. Stays empty."""


def places_from_json(rows: Mapping[str, Iterable[Any]]) -> dict[str, MemoryFile]:
    """What `json.loads` makes of a dictionary of places."""
    return {file: MemoryFile(*row) for file, row in rows.items()}
