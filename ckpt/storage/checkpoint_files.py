"""Files of one checkpoint, wherever it is: opened below its folder, and none outside of it, or in an object store (`files_below`).

A checkpoint may come from a stranger: its manifest and indexes can name `../../x`, and a name in its folder can be a symbolic link, a
FIFO or a device. Every file whose path comes from a checkpoint is opened here, for reading and for writing. The folder itself may be
a symbolic link (`checkpoints -> /scratch/...`); nothing below it may. Hard links are ordinary files: incremental saves make them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from ckpt.errors import CorruptCheckpointError
from ckpt.format.places import ObjectPath, Place, is_inner_path
from ckpt.storage.files import Closed, read_once
from ckpt.storage.objects.files import ObjectFiles
from ckpt.storage.objects.store import store_of

_ALWAYS = os.O_CLOEXEC | os.O_NOCTTY
_LOOK = os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY | os.O_NONBLOCK)
_FOLDER = os.O_DIRECTORY | _LOOK

_OPENAT2 = 437
"""Number of the system call openat2, on every architecture but Alpha."""

_NO_MAGICLINKS, _NO_SYMLINKS, _BENEATH = 0x02, 0x04, 0x08
_UNAVAILABLE = (errno.ENOSYS, errno.EPERM, errno.EAGAIN)
"""Errors of openat2 that mean "walk the path instead": a kernel before 5.6, a sandbox, a rename during the call."""


class CheckpointFolder(Closed):
    """The files of one checkpoint. A context manager; used by one thread at a time until the first file is open, then by any.

    Args:
        root: the checkpoint's folder, or a symbolic link to it. It is opened when the first file is, and kept open until `close`.

    All methods take paths relative to it, with `/` between parts, and raise:
        CorruptCheckpointError: the path leads out of the folder or through a symbolic link, or there is no regular file at it.
        OSError: as `os.open` does; it names the file.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._fd = -1
        self._release: weakref.finalize[Any, Any] | None = None

    def close(self) -> None:
        """Close the folder, not the files. It may be used again."""
        if self._release is not None:
            self._release()
            self._release, self._fd = None, -1

    def open(self, path: str, flags: int = os.O_RDONLY) -> int:
        """Return a descriptor of a regular file, as `os.open`. A new one is made only with O_CREAT and O_EXCL."""
        assert not flags & os.O_CREAT or flags & os.O_EXCL, "an existing file could be another checkpoint's"
        self._require_inner(path)
        # As os.open does: openat2 itself is seen by no audit hook.
        sys.audit("open", f"{self.root}/{path}", None, flags)
        if flags & os.O_EXCL:
            return self._opened(path, flags | _ALWAYS)
        # Without O_NONBLOCK the open of a FIFO would wait for a peer.
        fd = self._opened(path, flags | _ALWAYS | os.O_NONBLOCK)
        try:
            self._require_regular(os.fstat(fd), path)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def opened(self, path: str, *, once: bool = False) -> LocalFile:
        """Open a file for reading. See `ckpt.storage.checkpoint_files.Files`."""
        return LocalFile(self.open(path), once=once)

    def first_bytes(self, path: str, most_bytes: int) -> bytes:
        """Read the beginning of a file, at most so many bytes."""
        with self.stream(path) as stream:
            return stream.read(most_bytes)

    def size(self, path: str) -> int:
        """Return the size of a file in bytes, without opening it for reading."""
        return self.stat(path).st_size

    def stream(self, path: str) -> BinaryIO:
        """Open a file for reading, without a buffer."""
        return os.fdopen(self.open(path), "rb", buffering=0)

    def read(self, path: str, most_bytes: int) -> bytes:
        """Read a small file whole.

        Raises:
            CorruptCheckpointError: it has more bytes than that; none of them is read.
        """
        with os.fdopen(self.open(path), "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > most_bytes:
                raise CorruptCheckpointError(
                    f"{path} has {size} bytes, where at most {most_bytes} should be", file=path
                )
            return stream.read(size)

    def write(self, path: str, data: bytes) -> None:
        """Write a new small file."""
        try:
            with os.fdopen(self.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as stream:
                stream.write(data)
        except OSError as error:
            raise self._named(error, path) from error

    def below(self, path: str = "") -> Iterator[str]:
        """Yield the path of every file below a folder, at any depth. A symbolic link counts as a file, and is not followed."""
        for inside, folders, names in os.walk(self.root / path):
            folders.sort()
            here = Path(inside).relative_to(self.root)
            links = [name for name in folders if os.path.islink(os.path.join(inside, name))]
            yield from ((here / name).as_posix() for name in (*sorted(names), *links))

    def stat(self, path: str) -> os.stat_result:
        """Look at a regular file, without opening it for reading."""
        self._require_inner(path)
        fd = self._opened(path, _LOOK)
        try:
            found = os.fstat(fd)
        finally:
            os.close(fd)
        self._require_regular(found, path)
        return found

    @contextmanager
    def parent(self, path: str) -> Iterator[tuple[int, str]]:
        """Give a descriptor of the folder that holds a file, and the file's name in it, for calls that take `dir_fd`."""
        self._require_inner(path)
        above, _, name = path.rpartition("/")
        if not above:
            yield self._folder(), name
            return
        folder = self._opened(above, _FOLDER)
        try:
            yield folder, name
        finally:
            os.close(folder)

    def require_folder(self, path: str) -> None:
        """Refuse a path that is not a folder, such as a symbolic link, before it is opened as a checkpoint."""
        self._require_inner(path)
        os.close(self._opened(path, _FOLDER))

    def require_regular(self, path: str) -> None:
        """Refuse a path that is not a regular file, before a library opens it by its path."""
        os.close(self.open(path))

    def require_regular_below(self, path: str, progress: Callable[[], object] = lambda: None) -> None:
        """Refuse a folder that contains links, devices or pipes, before a library opens files in it.

        Args:
            progress: called for each folder.
        """
        self.require_folder(path)
        for _ in self._regular_below(path, progress):
            pass

    def sizes_below(self, path: str = "") -> dict[str, int]:
        """Return path -> size of every file below a folder, one that `require_regular_below` does not refuse."""
        return {inside: entry.stat(follow_symlinks=False).st_size for inside, entry in self._regular_below(path)}

    def _regular_below(self, path: str, progress: Callable[[], object] = lambda: None) -> Iterator[tuple[str, os.DirEntry[str]]]:
        folders = [path]
        while folders:
            above = folders.pop()
            progress()
            with os.scandir(self.root / above) as entries:
                for entry in entries:
                    inside = f"{above}/{entry.name}" if above else entry.name
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(inside)
                        continue
                    if not entry.is_file(follow_symlinks=False):
                        self._require_regular(entry.stat(follow_symlinks=False), inside)
                    yield inside, entry

    def _opened(self, path: str, flags: int) -> int:
        try:
            return _open_below(self._folder(), path, flags)
        except OSError as error:
            raise self._named(error, path) from error

    def _folder(self) -> int:
        if self._release is None:
            self._fd = os.open(self.root, _FOLDER)
            self._release = weakref.finalize(self, os.close, self._fd)
        return self._fd

    def _require_inner(self, path: str) -> None:
        if not is_inner_path(path):
            raise CorruptCheckpointError(f"{path!r:.200} is not a path inside of {self.root}", file=path)

    def _require_regular(self, found: os.stat_result, path: str) -> None:
        if stat.S_ISREG(found.st_mode):
            return
        if stat.S_ISDIR(found.st_mode):
            raise self._is_folder(path)
        raise link_in_checkpoint(self.root / path, path) if stat.S_ISLNK(found.st_mode) else self._is_special(path)

    def _named(self, error: OSError, path: str) -> Exception:
        """Return the exception to raise for a file that could not be opened."""
        match error.errno:
            case errno.ELOOP | errno.EXDEV:
                return link_in_checkpoint(self.root / path, path)
            case errno.ENXIO:
                return self._is_special(path)
            case errno.EISDIR:
                return self._is_folder(path)
            case errno.ENAMETOOLONG:
                return CorruptCheckpointError(f"{path!r:.200}... is longer than the name of a file can be", file=path)
        return OSError(error.errno, error.strerror, str(self.root / path))

    def _is_folder(self, path: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self.root / path} is a folder, where a file should be", file=path)

    def _is_special(self, path: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{self.root / path} is not a regular file, and is not opened", file=path)


class LocalFile(Closed):
    """A descriptor of a regular file, which it closes. See `ckpt.storage.checkpoint_files.OpenedFile`."""

    def __init__(self, fd: int, *, once: bool = False) -> None:
        self._fd = fd
        self._read = read_once if once else os.preadv

    @property
    def size(self) -> int:
        return os.fstat(self._fd).st_size

    @property
    def version(self) -> tuple[object, ...]:
        found = os.fstat(self._fd)
        return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns

    def read_at(self, buffers: Sequence[memoryview], offset: int) -> int:
        """See `ckpt.storage.checkpoint_files.OpenedFile.read_at`."""
        return self._read(self._fd, buffers, offset)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self._fd)


def link_in_checkpoint(file: Path, path: str | None = None) -> CorruptCheckpointError:
    """Return the exception to raise for a symbolic link below a checkpoint's folder.

    Args:
        path: of the file, below that folder.
    """
    return CorruptCheckpointError(
        f"{file} is a symbolic link, or lies behind one. A checkpoint with links inside of it is refused: if you trust it, copy it with "
        "the links resolved (cp -rL), and give the copy.",
        file=path,
    )


def _open_below(folder: int, path: str, flags: int) -> int:
    """Open a relative path below an open folder, as `os.open` does, following no symbolic link."""
    fd = _openat2(folder, path, flags)
    return _walk(folder, path, flags) if fd is None else fd


def _openat2(folder: int, path: str, flags: int) -> int | None:
    """Open with Linux's openat2, which resolves the whole path at once. Return None where it is not available.

    Raises:
        OSError: without the file's name.
    """
    if _SYSCALL is None:
        return None
    how = struct.pack("=QQQ", flags, 0o666 if flags & os.O_CREAT else 0, _NO_MAGICLINKS | _NO_SYMLINKS | _BENEATH)
    while (fd := _SYSCALL(_OPENAT2, folder, os.fsencode(path), how, len(how))) < 0:
        code = ctypes.get_errno()
        if code in _UNAVAILABLE:
            return None
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return int(fd)


def _walk(folder: int, path: str, flags: int) -> int:
    """Open without openat2, folder by folder.

    Raises:
        OSError: ELOOP where a part of the path is a symbolic link.
    """
    *above, name = path.split("/")
    here = folder
    try:
        for part in above:
            there = _open_part(part, _FOLDER, here)
            if here != folder:
                os.close(here)
            here = there
        return _open_part(name, flags, here)
    finally:
        if here != folder:
            os.close(here)


def _open_part(name: str, flags: int, folder: int) -> int:
    try:
        return os.open(name, flags | os.O_NOFOLLOW, 0o666, dir_fd=folder)
    except NotADirectoryError:  # Linux raises it for a link, too, when O_DIRECTORY is given
        if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from None
        raise


def _syscall() -> Any:
    if sys.platform != "linux":
        return None
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t)
    call.restype = ctypes.c_long
    return call


_SYSCALL = _syscall()


class OpenedFile(Closed, Protocol):
    """A file, open for reading. A context manager; any thread may read.

    Attributes:
        size: in bytes.
        version: differs from that of a file that comes to this path later.
    """

    @property
    def size(self) -> int: ...

    @property
    def version(self) -> tuple[object, ...]: ...

    def read_at(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill buffers in turn from an offset; return the number of bytes, which may be less than they hold. 0: the file ends there."""

    def close(self) -> None:
        """Close the file."""


class Files(Closed, Protocol):
    """The files of one checkpoint. A context manager.

    All methods take paths relative to its place, with `/` between parts, and raise:
        CorruptCheckpointError: the path leads out of the checkpoint or through a symbolic link, or is that of no regular file.
        FileNotFoundError: there is no such file.
        OSError: the file system, or the store, refused; it names the file.
    """

    @property
    def root(self) -> Place: ...

    def close(self) -> None:
        """Let go of the place, not of opened files. It may be used again."""

    def read(self, path: str, most_bytes: int) -> bytes:
        """Read a small file whole.

        Raises:
            CorruptCheckpointError: it has more bytes than that.
        """

    def first_bytes(self, path: str, most_bytes: int) -> bytes:
        """Read the beginning of a file, at most so many bytes."""

    def size(self, path: str) -> int:
        """Return the size of a file in bytes, without opening it."""

    def opened(self, path: str, *, once: bool = False) -> OpenedFile:
        """Open a file for reading.

        Args:
            once: its bytes are not read again soon, and need not stay in the page cache.
        """

    def stream(self, path: str) -> BinaryIO:
        """Open a file as what other libraries read."""

    def below(self, path: str = "") -> Iterator[str]:
        """Yield the path of every file below a folder, at any depth. A symbolic link counts as a file."""

    def write(self, path: str, data: bytes) -> None:
        """Write a new small file, into a folder that is there."""

    def require_folder(self, path: str) -> None:
        """Refuse a path that is not a folder, such as a symbolic link, before it is opened as a checkpoint."""

    def require_regular(self, path: str) -> None:
        """Refuse a path that is not a regular file, before a library opens it by its path."""

    def require_regular_below(self, path: str, progress: Callable[[], object] = lambda: None) -> None:
        """Refuse a folder that contains links, devices or pipes, before a library opens files in it."""


def files_below(place: Place) -> CheckpointFolder | ObjectFiles:
    """Return the files of the checkpoint at a place."""
    return CheckpointFolder(place) if isinstance(place, Path) else ObjectFiles(place)


def read_fully(file: OpenedFile, memory: memoryview, offset: int) -> None:
    """Fill memory with a file's bytes from an offset on.

    Raises:
        ValueError: the file ends before.
    """
    while memory:
        count = file.read_at([memory], offset)
        if count == 0:
            raise ValueError(f"it ends at byte {offset}")
        memory, offset = memory[count:], offset + count


def names_below(place: Place) -> list[str]:
    """Return the names of files and folders just below a place, of an object store: those that have objects below them, and objects.

    None, where there is no such folder.

    Raises:
        OSError: the file system, or the store, refused.
    """
    if isinstance(place, ObjectPath):
        folders, objects = store_of(place).names(place.key)
        return sorted([*folders, *objects])
    try:
        return sorted(os.listdir(place))
    except (FileNotFoundError, NotADirectoryError):
        return []


def is_file(place: Place) -> bool:
    """Whether a file, or an object, is there."""
    if isinstance(place, Path):
        return place.is_file()
    with suppress(FileNotFoundError):
        return bool(place.key and store_of(place).head(place.key))
    return False


def is_folder(place: Place) -> bool:
    """Whether a folder is there, or objects below an address."""
    return place.is_dir() if isinstance(place, Path) else bool(names_below(place))


def is_inside(place: Place, folder: Place) -> bool:
    """Whether a place is below another one, symbolic links resolved."""
    if isinstance(place, Path) and isinstance(folder, Path):
        return Path(os.path.realpath(folder)) in Path(os.path.realpath(place)).parents
    return isinstance(place, ObjectPath) and isinstance(folder, ObjectPath) and f"{place}/".startswith(f"{folder}/") and place != folder


def same_place(one: Place, other: Place) -> bool:
    """Whether two places are one, symbolic links resolved."""
    if isinstance(one, Path) and isinstance(other, Path):
        return os.path.realpath(one) == os.path.realpath(other)
    return one == other


def is_same_file(one: Path, other: Path) -> bool:
    """Whether two paths are of one file, by a hard link. False where one is not there."""
    with suppress(OSError):
        return os.path.samestat(os.lstat(one), os.lstat(other))
    return False
