"""File operations that backends share: errors that name the file, one sync for all files of a save."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ckpt.format.places import Place

PIECE_BYTES = 8 << 20
"""Bytes per write: large enough for the disk, small enough for frequent progress."""

EAGER_BYTES = 1 << 20
"""Writeback of smaller pieces is not started early; they go to disk with others."""

PAGE_BYTES = 4096

SETTLE_BYTES = 64 << 20
"""Bytes per wait while a large file goes to disk."""

MANY_FILES = 64
"""From this number of files or folders on, one `syncfs` (0.1 ms a file) is faster than `fsync` of each (0.4 ms)."""

_SYNCFS_TELLS = (5, 8)
"""The first Linux whose `syncfs` reports earlier failed writes. Older ones return 0 and lose the bytes."""


@contextmanager
def naming(path: Place) -> Iterator[None]:
    """Add the file's name to an `OSError` of a call on a descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def is_shown(folder: Path) -> bool:
    """Whether a folder that another host has made is there; network file systems show it late."""
    if folder.is_dir():
        return True
    os.listdir(folder.parent)  # makes NFS clients ask again
    return False


def write_all(fd: int, piece: memoryview) -> None:
    """Write all bytes of a piece at the file's position, in as many calls as needed."""
    while piece:
        piece = piece[os.write(fd, piece) :]


def read_once(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Read as `os.preadv` does, and drop the bytes from the page cache: for files that are not read again soon.

    A cache that fills evicts what training needs, and takes memory that is slow where it is touched for the first time.
    """
    num_bytes = os.preadv(fd, buffers, offset)
    forget(fd, offset, num_bytes)
    return num_bytes


def forget(fd: int, offset: int, num_bytes: int) -> None:
    """Drop bytes that are on the disk from the page cache."""
    if hasattr(os, "posix_fadvise"):
        start = offset // PAGE_BYTES * PAGE_BYTES  # whole pages alone are dropped
        os.posix_fadvise(fd, start, offset + num_bytes - start, os.POSIX_FADV_DONTNEED)


class WriteOnce:
    """Writes a file through a small part of the page cache, and leaves nothing there.

    While one stretch of about `SETTLE_BYTES` is filled, the one before it goes to the disk.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._filled = self._going = (
            0,
            0,
        )  # [start, end) of the stretch being filled, and of that on its way to the disk

    def write(self, piece: memoryview, offset: int | None = None) -> None:
        """Write all bytes of a piece: after the last one, or at an offset."""
        start, end = self._filled
        at = end if offset is None else offset
        if at < end or at - start >= SETTLE_BYTES:
            self._send()
            start = at
        os.lseek(self._fd, at, os.SEEK_SET)
        write_all(self._fd, piece)
        self._filled = start, at + len(piece)

    def close(self) -> None:
        """Wait until every byte is on the disk. The descriptor stays open."""
        os.fsync(self._fd)
        forget(self._fd, 0, os.fstat(self._fd).st_size)

    def _send(self) -> None:
        """Send the stretch to the disk, and wait for the one before it."""
        start, end = self._filled
        start_writeback(self._fd, start, end - start)
        going, gone = self._going
        if going < gone:  # a length of 0 would be the whole file
            _sync_file_range(self._fd, going, gone - going, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
            forget(self._fd, going, gone - going)
        self._going = self._filled


class FolderTree:
    """Makes folders below `root`, each with one call, for one rank. A symbolic link in a folder's place is an error."""

    def __init__(self, root: Path) -> None:
        self.made: set[Path] = {root}

    def make(self, folder: Path) -> None:
        """Make a folder and its parents. Other ranks may make the same folders at the same time."""
        if folder not in self.made:
            self.make(folder.parent)
            try:
                folder.mkdir()
            except FileExistsError:
                if not stat.S_ISDIR(os.lstat(folder).st_mode):
                    raise
            self.made.add(folder)


def make_durable(
    root: Path, sizes: Mapping[str, int], folders: Collection[Path], progress: Callable[[int], None]
) -> None:
    """Make the files in `sizes` (path below `root` -> bytes) and the entries of `folders` survive a power cut.

    The bytes of a large file count as progress once more when they reach the disk.

    Raises:
        OSError: the disk refused bytes that were written, such as a delayed allocation.
    """
    one_sync = max(len(sizes), len(folders)) > MANY_FILES and syncfs_tells(sys.platform, os.uname().release)
    for name, size in sizes.items():
        if not one_sync or size > SETTLE_BYTES:
            _sync_file(root / name, size, progress)
    if one_sync:
        _syncfs(root)
        return
    for folder in folders:
        with _opened(folder) as fd:
            os.fsync(fd)


def syncfs_tells(platform: str, release: str) -> bool:
    """Whether one `syncfs` replaces `fsync` of every file, errors included. False for a release that cannot be parsed.

    Args:
        release: of the kernel, such as "5.14.0-427.el9.x86_64".
    """
    match = re.match(r"(\d+)\.(\d+)", release)
    return platform == "linux" and match is not None and (int(match[1]), int(match[2])) >= _SYNCFS_TELLS


def _sync_file(path: Path, size: int, progress: Callable[[int], None]) -> None:
    with _opened(path) as fd:
        for at in range(0, size - SETTLE_BYTES, SETTLE_BYTES):  # fsync alone could run for minutes without progress
            _sync_file_range(fd, at, SETTLE_BYTES, _WAIT_BEFORE | _WRITE | _WAIT_AFTER)
            progress(SETTLE_BYTES)
        os.fsync(fd)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open a file or a folder inside the block, to sync it. Errors name it."""
    with naming(path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)


_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4


def start_writeback(fd: int, offset: int, num_bytes: int) -> None:
    """Start writing a range to disk now, so that little is left for the sync at the end."""
    if num_bytes >= EAGER_BYTES:
        _sync_file_range(fd, offset, num_bytes, _WRITE)


def _sync_file_range(fd: int, offset: int, num_bytes: int, flags: int) -> None:
    """Call Linux's sync_file_range. It is a hint: only errors of the disk are raised."""
    if sys.platform != "linux":
        return
    if _libc().sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(num_bytes), ctypes.c_uint(flags)) != 0:
        code = ctypes.get_errno()
        if code in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise OSError(code, os.strerror(code))


_KEEP_SIZE = 1


def reserve(fd: int, offset: int, num_bytes: int) -> bool:
    """Reserve disk space for the bytes of a file from `offset` on, contiguous where possible; return whether that worked.

    Without it, files that several ranks write at once are interleaved on the disk, and read back in short pieces. A lack of space is
    reported by the writes. No byte at or behind `offset` may have been written: a refusal ends the file there, because some file systems
    (ext4) keep what they could reserve before they refused.
    """
    if sys.platform != "linux":
        return False
    if _libc().fallocate(fd, _KEEP_SIZE, ctypes.c_int64(offset), ctypes.c_int64(num_bytes)) == 0:
        return True
    if ctypes.get_errno() in (errno.ENOSPC, errno.EDQUOT):
        # Twice: the first one frees nothing where it makes the file longer, because writes are in flight.
        os.ftruncate(fd, offset)
        os.ftruncate(fd, offset)
    return False


def _syncfs(root: Path) -> None:
    with _opened(root) as fd:
        if _libc().syncfs(fd) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)
