"""Operations on files of a file system: errors that name the file, one sync for all files of a save, small durable files, deletion.

`write_durably` and `replace_durably` leave bytes and names that survive a power cut; `exchange` swaps two names at once.

`remove` is the one function of `ckpt` that deletes files and folders. It takes a proof that they are this package's own, and checks it.
`tests/unit/storage/test_removal.py` lists the few other calls. docs/decisions.md lists what is deleted, and by whom.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import stat
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from ckpt.errors import free_bytes, needing
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


class Closed(Protocol):
    """A context manager whose end is `close`."""

    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


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


def after(pieces: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Return `pieces` without their first `num_bytes` bytes."""
    for number, piece in enumerate(pieces):
        if num_bytes < len(piece):
            return [piece[num_bytes:], *pieces[number + 1 :]]
        num_bytes -= len(piece)
    return []


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


_Found = os.stat_result
Proof = Callable[[Path, _Found], bool]
"""Given a path and what is there now, says whether that may be deleted."""

_OWN_NAME = re.compile(
    r"\.(?:claim-|(?:unpublished|removed|converting|saving)-.+-|.+\.(?:json|yaml)\.)[0-9a-f]{8}(?:\.owner\.json)?",
    re.DOTALL,  # names of files may have line breaks
)


@dataclass(frozen=True, slots=True)
class Same:
    """Proof: it is still the very file or folder that this process has made, linked or locked."""

    device: int
    inode: int

    @classmethod
    def of(cls, which: int | Path | _Found) -> Same:
        """Of a descriptor, a path or what `stat` has found. Called by whoever has just made or locked it."""
        found = os.fstat(which) if isinstance(which, int) else os.lstat(which) if isinstance(which, Path) else which
        return cls(found.st_dev, found.st_ino)

    def __call__(self, path: Path, found: _Found) -> bool:
        return (self.device, self.inode) == (found.st_dev, found.st_ino)


def own_name(path: Path, found: _Found) -> bool:
    """Proof: its name, with a nonce, is one that this package alone gives.

    `.removed-` is given to what was shown to be a run's own (`Ledger.retain`, `Ledger.remove`), without the files of users; the others to
    what is being made: the caller knows that the maker has ended, or is the maker.
    """
    return _OWN_NAME.fullmatch(path.name) is not None


def empty(path: Path, found: _Found) -> bool:
    """Proof: it is a file without bytes, or a folder; one with entries is not removed."""
    return stat.S_ISDIR(found.st_mode) or (stat.S_ISREG(found.st_mode) and found.st_size == 0)


def listed(path: Path, found: _Found) -> bool:
    """Proof: it is a regular file, which a record of this package lists: an index of the checkpoint.

    The caller has read the path from the record, or is removing the record itself.
    """
    return stat.S_ISREG(found.st_mode)


def remove(path: Path, proof: Proof, *, dir_fd: int | None = None) -> bool:
    """Delete a file, a link, or a folder with all that is in it, if it exists and the proof holds; return whether it was deleted.

    Another process may be deleting the same.

    Args:
        proof: `Same`, `own_name`, `empty` or `listed`.
        dir_fd: of the folder that `path` is below.

    Raises:
        OSError: it cannot be deleted; a folder with `empty` as proof is not empty.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        found = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
        if not proof(path, found):
            return False
        if not stat.S_ISDIR(found.st_mode):
            os.unlink(path, dir_fd=dir_fd)
        elif proof is empty:
            os.rmdir(path, dir_fd=dir_fd)
        else:
            shutil.rmtree(path, onerror=_unless_gone, dir_fd=dir_fd)
        return True
    return False


def _unless_gone(_function: object, _path: str, raised: tuple[type[BaseException], BaseException, object]) -> None:
    if not isinstance(raised[1], FileNotFoundError):
        raise raised[1]


_CANNOT_SYNC_FOLDERS = (errno.EINVAL, errno.EOPNOTSUPP)
_CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EXDEV)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


def write_durably(path: Path, data: bytes) -> None:
    """Write a small file and make it and its name durable."""
    try:
        _write(path, data)
    except FileExistsError:  # perhaps a link to another file, which keeps its bytes
        replace_durably(path, data)
    else:
        sync_folder(path.parent)


def replace_durably(path: Path, data: bytes) -> None:
    """Write a small file durably and atomically: readers find the old file, if there was one, or the whole new one.

    A file of this name is replaced: the caller writes, or changes, the checkpoint that it belongs to.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        _write(beside, data)
        os.replace(beside, path)
    finally:
        remove(beside, own_name)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable, as far as its file system can."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC_FOLDERS:
            raise
    finally:
        os.close(descriptor)


def exchange(one: Path, other: Path) -> bool:
    """Swap what two names stand for, atomically. Return False where the system or the file system cannot.

    Source: renameat2(2) with RENAME_EXCHANGE, Linux 3.15.
    """
    if _RENAMEAT2 is None:
        return False
    if _RENAMEAT2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _CANNOT_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(one), None, str(other))


def _renameat2() -> Any:
    if sys.platform != "linux":
        return None
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)  # glibc 2.28
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    return call


_RENAMEAT2 = _renameat2()


def _write(path: Path, data: bytes) -> None:
    """Write a new file durably. If that fails, the file is removed."""
    free = free_bytes(path.parent)
    with needing(path.name, lambda: len(data), free), path.open("xb", buffering=0) as file:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except BaseException as error:
            with suppress(OSError):
                remove(path, Same.of(file.fileno()))
            if isinstance(error, OSError):  # of a call on a descriptor, which names no file
                error.filename = str(path)
            raise
