"""Read the files below one checkpoint, wherever it is: in a folder of a mounted file system, or in an object store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Protocol, Self

from ckpt.format.places import ObjectPath, Place
from ckpt.storage.checkpoint_files import CheckpointFolder
from ckpt.storage.objects.files import ObjectFiles
from ckpt.storage.objects.store import store_of


class OpenedFile(Protocol):
    """A file, open for reading. A context manager; any thread may read.

    Attributes:
        size: in bytes.
        version: differs from that of a file that comes to this path later.
    """

    @property
    def size(self) -> int: ...

    @property
    def version(self) -> tuple[object, ...]: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def read_at(self, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill buffers in turn from an offset; return the number of bytes, which may be less than they hold. 0: the file ends there."""

    def close(self) -> None:
        """Close the file."""


class Files(Protocol):
    """The files of one checkpoint. A context manager.

    All methods take paths relative to its place, with `/` between parts, and raise:
        CorruptCheckpointError: the path leads out of the checkpoint or through a symbolic link, or is that of no regular file.
        FileNotFoundError: there is no such file.
        OSError: the file system, or the store, refused; it names the file.
    """

    @property
    def root(self) -> Place: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

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
