"""Host memory, private to a process or shared, and the checkpoint files that ranks of this host keep in it (`pool.py`), read from there.

Memory is on huge pages where the system has them: faults of 4 KiB pages take longer than filling them (measured: 2.5 GB/s against 10 GB/s
on pages of 2 MiB). Shared memory is a memfd, which any process of the same user on the same host opens through /proc while its rank lives
and keeps it. Name, inode and size identify it.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ckpt.errors import CorruptCheckpointError
from ckpt.storage.checkpoint_files import CheckpointFolder, LocalFile

_log = logging.getLogger("ckpt")
_T = TypeVar("_T")


class MemoryFile(NamedTuple):
    """A file in the memory of a process of this host.

    Attributes:
        name: of the memfd, unique on this host.
    """

    pid: int
    fd: int
    inode: int
    size: int
    name: str


def open_memory(place: MemoryFile, access: int) -> int | None:
    """Open a file in the memory of a process of this host; None: there is another file at its place by now.

    Args:
        access: os.O_RDONLY or os.O_RDWR.

    Raises:
        OSError: the process has gone, or belongs to another user.
    """
    # O_NONBLOCK: the descriptor's number may belong to a pipe by now.
    fd = os.open(f"/proc/{place.pid}/fd/{place.fd}", access | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        found = os.fstat(fd)
        name = os.readlink(f"/proc/self/fd/{fd}")
        if (found.st_ino, found.st_size, name) == (place.inode, place.size, f"/memfd:{place.name} (deleted)"):
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


class HeldFiles:
    """The files of one checkpoint that can be read from memory. Used by one thread at a time.

    Args:
        places: path below the checkpoint -> its bytes in memory.
        own: path -> mapped bytes, of the files in this process's own memory.
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
        """Return a descriptor of a file's memory; None: the file is not held, or not any more, and must be read from disk."""
        place = self._places.get(file)
        if place is None:
            return None
        with suppress(OSError):
            if (fd := open_memory(place, os.O_RDONLY)) is not None:
                return fd
        _log.info("%s is in memory no more; reading the file", file)
        del self._places[file]
        return None

    def opened(self, file: str) -> LocalFile | None:
        """As `open`, but closed by the context manager that it is."""
        fd = self.open(file)
        return None if fd is None else LocalFile(fd)

    def place(self, file: str) -> MemoryFile | None:
        """Return where a file is held; None: it is not."""
        return self._places.get(file)

    def read_at(self, file: str) -> Callable[[int, Sequence[memoryview], int], int]:
        """Return a function like `os.preadv` for a held file: a plain copy where the memory is mapped here, which is faster."""
        return os.preadv if file not in self._own else partial(_copy_from, self._own[file])

    def read(self, file: str) -> bytes | None:
        """Return the bytes of a small file; None: it is not held."""
        fd = self.open(file)
        if fd is None:
            return None
        with os.fdopen(fd, "rb") as stream:
            return stream.read()

    def distrust(self, file: str) -> None:
        """Stop using a file's memory, whose bytes are not those that were saved, with a warning; use the disk from now on."""
        if self._places.pop(file, None) is not None:
            _log.warning("%s was changed in memory since it was saved; it is read from the disk", file)

    def or_disk(self, file: str, read: Callable[[], _T]) -> _T:
        """Call `read`, which prefers memory. If the memory proves damaged, distrust it and call `read` again.

        Raises:
            CorruptCheckpointError, OSError: the file on disk is damaged, too.
        """
        try:
            return read()
        except (CorruptCheckpointError, OSError):
            if file not in self:
                raise
            self.distrust(file)
        return read()


def _copy_from(memory: np.ndarray[Any, np.dtype[np.uint8]], _: int, buffers: Sequence[memoryview], at: int) -> int:
    """Fill buffers with the bytes of `memory` from `at` on; return the number of bytes copied."""
    start = at
    for buffer in buffers:
        piece = memory[at : at + len(buffer)]
        np.copyto(np.frombuffer(buffer, np.uint8)[: len(piece)], piece)
        at += len(piece)
    return at - start


class FilesInMemory(HeldFiles):
    """Those of a folder in a file system of memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with CheckpointFolder(folder) as files:
            found = {path: files.stat(path) for path in files.below()}
        super().__init__({path: MemoryFile(0, 0, it.st_ino, it.st_size, f"inode {it.st_ino}") for path, it in found.items()})

    def open(self, file: str) -> int | None:
        """See `HeldFiles.open`."""
        with suppress(FileNotFoundError), CheckpointFolder(self._folder) as files:
            return files.open(file)
        return None


NOTHING_HELD = HeldFiles()
"""For checkpoints of which nothing is in memory."""


def places_from_json(rows: Mapping[str, Iterable[Any]]) -> dict[str, MemoryFile]:
    """Rebuild a dictionary of places from parsed JSON."""
    return {file: MemoryFile(*row) for file, row in rows.items()}


HUGE_PAGE = 2 << 20
_MADV_POPULATE_WRITE = 23


class MemoryUse(NamedTuple):
    """What decides how much memory the parts of checkpointing take.

    Attributes:
        in_store: checkpoints are in an object store.
        on_device: tensors are on a device.
        chunk_bytes: of the largest chunk.
    """

    in_store: bool
    on_device: bool
    chunk_bytes: int


def power_of_two(num_bytes: int) -> int:
    """Round down to a power of two: page-locked memory of other sizes takes more than was asked for, because torch rounds it up."""
    return 1 << (num_bytes.bit_length() - 1) if num_bytes else 0


def can_be_shared() -> bool:
    """Whether this system has memfd_create."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def private(num_bytes: int) -> mmap.mmap:
    """Map new private memory, all zeros. A forked child that writes to it gets its own pages."""
    return _on_huge_pages(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def shared(name: str, num_bytes: int) -> int:
    """Make shared memory and return its descriptor. The kernel frees it with the last process that has it open or mapped.

    Args:
        name: shown in /proc; no file system has it.

    Raises:
        OSError: there is not enough memory.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, num_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def mapped(fd: int, num_bytes: int) -> mmap.mmap:
    """Map shared memory. The descriptor may be closed afterwards."""
    return _on_huge_pages(mmap.mmap(fd, num_bytes))


def mapped_at(place: MemoryFile) -> mmap.mmap | None:
    """Map shared memory of another process of this host; None: it is not there any more, or belongs to another user."""
    with suppress(OSError):
        if (fd := open_memory(place, os.O_RDWR)) is not None:
            try:
                return mapped(fd, place.size)
            finally:
                os.close(fd)
    return None


def populate(address: int, num_bytes: int) -> None:
    """Give a mapped range its pages now. Its bytes stay, and other threads may use it meanwhile; the interpreter's lock is not held.

    Without effect before Linux 5.14, and on other systems: pages then come as they are touched.

    Args:
        address: of a page.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), _MADV_POPULATE_WRITE)


def whole_huge_pages(num_bytes: int) -> int:
    """Round up to whole huge pages. Pages that are never touched take no memory."""
    return -(-num_bytes // HUGE_PAGE) * HUGE_PAGE


def _on_huge_pages(memory: mmap.mmap) -> mmap.mmap:
    with suppress(OSError, AttributeError):  # a kernel without huge pages, or without them for shared memory
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
