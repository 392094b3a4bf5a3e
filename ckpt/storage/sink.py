"""What writes the files of one rank in one save, wherever they go, and the pieces in which the bytes of a chunk get there.

Backends write through a `Sink`, and know no more of the storage. On a file system (`FileSink`) large files go past the page cache, one sync
is for all, and files of an earlier checkpoint are hard-linked, where the file system has links. A piece is digested once, and compared with
stored digests and with digests of the snapshot.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from ckpt.errors import CorruptCheckpointError, free_bytes, needing
from ckpt.format.digests import BlockDigests
from ckpt.format.dtypes import bits_of, raw_bytes
from ckpt.format.places import Place, is_inner_path
from ckpt.format.records import BLOCK_BYTES, Expected, changed_in_memory
from ckpt.storage.checkpoint_files import CheckpointFolder
from ckpt.storage.direct_io import NEW, O_DIRECT, Buffers, Direct, Kept, NewFile, OpenFile, Paged, WriterThreads
from ckpt.storage.files import PIECE_BYTES, FolderTree, Same, make_durable, naming, remove, write_all
from ckpt.storage.objects.sink import ObjectSink
from ckpt.storage.pool import PooledSave, PoolFile

_ZEROS = bytes(1 << 20)


def padded_pieces(host: torch.Tensor, cell: tuple[int, ...]) -> Iterator[memoryview]:
    """Yield the bytes of one whole chunk in pieces: `host` at the start of a grid cell, zeros in the rest."""
    if tuple(host.shape) == cell or tuple(host.shape[1:]) == cell[1:]:
        yield from _cut(raw_bytes(host).numpy().data)
        missing = (math.prod(cell) - host.numel()) * host.element_size()
        for at in range(0, missing, len(_ZEROS)):
            yield memoryview(_ZEROS)[: min(missing - at, len(_ZEROS))]
        return
    bits = bits_of(host)
    padded = np.zeros(cell, bits.dtype)
    padded[tuple(slice(0, n) for n in host.shape)] = bits
    yield from _cut(padded.reshape(-1).view(np.uint8).data)


def _cut(memory: memoryview) -> Iterator[memoryview]:
    for at in range(0, len(memory), PIECE_BYTES):
        yield memory[at : at + PIECE_BYTES]


class Pieces:
    """The bytes of one chunk as they will be stored, in pieces, each digested once: for `have`, or as they are written.

    Args:
        staged: digests from when the bytes were copied from the tensors; `written` compares them.
    """

    def __init__(self, pieces: Iterator[memoryview], staged: tuple[int, ...] | None = None) -> None:
        self._pieces = pieces
        self._staged = staged
        self._digests = BlockDigests(BLOCK_BYTES)
        self._compared: list[memoryview] = []

    def have(self, digests: tuple[int, ...]) -> bool:
        """Whether the bytes have these digests. Uses `staged` if given, else reads up to the first difference."""
        if self._staged is not None:
            return self._staged == digests
        for piece in self._pieces:
            self._compared.append(piece)
            self._digests.update(piece)
            if not self._digests.agree(digests):
                return False
        return self._digests.close() == digests

    def digested(self) -> Iterator[memoryview]:
        """Yield the pieces, each just digested, and so in the processor's cache when it is written."""
        yield from self._compared
        for piece in self._pieces:
            self._digests.update(piece)
            yield piece

    def written(self, path: str) -> tuple[int, ...]:
        """Return the digests after all pieces were written. `path` names the array in errors.

        Raises:
            StorageError: they differ from `staged`.
        """
        digests = self._digests.close()
        if self._staged is not None and digests != self._staged:
            raise changed_in_memory(path)
        return digests


DIRECT_BYTES = 1 << 20
"""Smaller files go through the page cache: copying them takes less time than a direct write."""


class FileSink:
    """Writes files one after another. Large ones may still be in flight when `write` returns. Used by one thread.

    Args:
        root: folder above all files.
        rank: that writes; only rank 0 logs warnings that hold for all.
        progress: called, from any thread, with the number of bytes that have just been written or become durable.
        memory: keeps all files in host memory, linked ones if it kept them before; None: keeps none.
    """

    def __init__(
        self, root: Path, rank: int, progress: Callable[[int], None], buffers: Buffers, memory: PooledSave | None = None
    ) -> None:
        self._root = root
        self._free = free_bytes(root)  # before this save
        self._folder = CheckpointFolder(root)
        self._before: CheckpointFolder | None = None
        self._memory = memory
        self._tells = rank == 0
        self._progress = progress
        self._buffers = buffers
        self._folders = FolderTree(root)
        self._sizes: dict[str, int] = {}
        self._heads: dict[str, bytes] = {}
        self.segment_bytes: int | None = None
        self._linked: dict[str, Same] = {}
        self._streams: dict[str, FileStream] = {}
        self._threads: WriterThreads | None = None

    def write(self, name: str, pieces: Iterable[memoryview], num_bytes: int) -> None:
        """Write a new file below the root, and make its folders. The pieces' memory is free when this returns.

        Args:
            num_bytes: of all pieces together.

        Raises:
            OSError: a write failed, of this file or of an earlier one, which it names.
        """
        with needing(name, lambda: num_bytes, self._free):
            stream = self.open(name, num_bytes)
            try:
                stream.append(pieces)
            finally:
                stream.close()

    def open(self, name: str, num_bytes: int | None = None) -> FileStream:
        """Open a new file below the root. The caller appends to it and closes it.

        Args:
            num_bytes: that will be appended; None: unknown, and large.
        """
        with self._noting():
            file = NewFile(self._folder, name, self._make_folder_of(name))
            is_large = num_bytes is None or num_bytes >= DIRECT_BYTES
            memory = self._memory.file(name) if self._memory is not None else None
            direct = self._open_direct(file, num_bytes, memory) if is_large and self._buffers.direct_io else None
            opened = Paged(file, self._progress, memory) if direct is None else direct
        self._streams[name] = FileStream(opened, partial(self._close, name), self._noting)
        return self._streams[name]

    def link(self, name: str, checkpoint: Place, size: int) -> bool:
        """Hard-link a durable file of another checkpoint to the same path below the root; return whether that worked.

        False: the file system has no such link, the file has the most links possible, or it is no regular file of this size any
        more. The bytes must be written then.

        Raises:
            FileExistsError: the name is taken. Writing to it could change another checkpoint's file.
        """
        if not isinstance(checkpoint, Path):
            return False
        path = self._make_folder_of(name)
        if self._before is None or self._before.root != checkpoint:
            self._before = CheckpointFolder(checkpoint)
        try:
            with self._before.parent(name) as (folder, last):
                found = os.stat(last, dir_fd=folder, follow_symlinks=False)
                if not stat.S_ISREG(found.st_mode) or found.st_size != size:
                    return False
                os.link(last, path, src_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:
            raise
        except (OSError, CorruptCheckpointError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            self._buffers.tell_of_links(checkpoint / name, str(why), tell=self._tells)
            return False
        self._linked[name] = Same.of(found)
        if self._memory is not None:
            self._memory.link(name, checkpoint / name)
        self._progress(1)
        return True

    def _overwrite(self, name: str, data: bytes) -> None:
        """Replace the first bytes of a file that has been closed and written."""
        with naming(self._root / name):
            fd = self._folder.open(name, os.O_WRONLY)
            try:
                write_all(fd, memoryview(data))
            finally:
                os.close(fd)
        if self._memory is not None:
            self._memory.file(name).overwrite(data)

    def unlink(self, name: str) -> None:
        """Undo `link`."""
        with naming(self._root / name):
            remove(self._root / name, self._linked.pop(name))
        if self._memory is not None:
            self._memory.unlink(name)

    def flush(self) -> None:
        """Wait until the file system has all bytes.

        Raises:
            OSError: a write failed; it names the file.
        """
        if self._threads is not None:
            with self._noting():
                self._threads.finish()
            self._threads = None
        while self._heads:
            self._overwrite(*self._heads.popitem())

    def make_durable(self) -> None:
        """Make all files and their folders survive a power cut, with one sync.

        Raises:
            OSError: the disk refused bytes that were written.
        """
        self.flush()
        self._let_go()
        with self._noting():
            make_durable(self._root, self._sizes, self._folders.made, self._progress)

    def abort(self) -> None:
        """Stop writing; return when no write is in flight."""
        if self._threads is not None:
            self._threads.give_up()
        for stream in list(self._streams.values()):
            stream.close()
        if self._threads is not None:
            self._threads.stop()
            self._threads = None
        self._let_go()

    def _noting(self) -> AbstractContextManager[None]:
        """Have the error of a full disk say how much was free before the save."""
        return needing(None, lambda: 0, self._free)

    def _let_go(self) -> None:
        """Close the folders' descriptors. They are reopened if another file comes."""
        self._folder.close()
        if self._before is not None:
            self._before.close()

    def _make_folder_of(self, name: str) -> Path:
        """Make the folder of a file; return the file's absolute path."""
        if not is_inner_path(name):
            raise CorruptCheckpointError(f"{name!r:.200} is not a path inside of {self._root}, and is not written")
        path = self._root / name
        self._folders.make(path.parent)
        return path

    def _close(self, name: str, size: int, head: bytes) -> None:
        del self._streams[name]
        self._sizes[name] = size
        if head:
            self._heads[name] = head

    def _open_direct(self, name: NewFile, num_bytes: int | None, memory: PoolFile | None) -> Direct | Kept | None:
        """Open a new file with O_DIRECT; where the file system refuses, log it and return None."""
        try:
            fd = name.open(NEW | O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            name.remove()  # some file systems refuse after creating the file
            self._buffers.refuse(name.path, error, tell=self._tells)
            return None
        if self._threads is None:
            self._threads = WriterThreads(self._buffers, self._tells, self._progress)
        file = OpenFile(name, fd, num_bytes)
        return Direct(self._threads, file) if memory is None else Kept(self._threads, file, memory)


class FileStream:
    """One open file to append to. Used by the sink's thread.

    Attributes:
        size: bytes that have been appended.
    """

    def __init__(
        self,
        file: Direct | Kept | Paged,
        closed: Callable[[int, bytes], None],
        noting: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._file = file
        self._closed = closed
        self._noting = noting
        self.size = 0

    def append(self, pieces: Iterable[memoryview]) -> None:
        """Append pieces. Their memory is free when this returns.

        Raises:
            OSError: a write failed, of this file or of an earlier one, which it names.
        """
        with self._noting():
            for piece in pieces:
                self._file.append(piece)
                self.size += len(piece)

    def close(self, head: bytes = b"") -> None:
        """End the file. Its last bytes may still be in flight, and its first ones, if `head` replaces them, until `FileSink.flush`."""
        self._closed(self.size, head)
        self._file.close()


class Stream(Protocol):
    """One open file to append to. Used by the sink's thread.

    Attributes:
        size: bytes that have been appended.
    """

    size: int

    def append(self, pieces: Iterable[memoryview]) -> None:
        """Append pieces. Their memory is free when this returns.

        Raises:
            OSError: a write failed, of this file or of an earlier one, which it names.
        """

    def close(self, head: bytes = b"") -> None:
        """End the file. Its last bytes may still be in flight.

        Args:
            head: replaces its first bytes.
        """


class Sink(Protocol):
    """Writes files one after another. Used by one thread.

    Attributes:
        segment_bytes: the longest file that should be made of several values; None: any length.
    """

    segment_bytes: int | None

    def write(self, name: str, pieces: Iterable[memoryview], num_bytes: int) -> None:
        """Write a new file below the root. The pieces' memory is free when this returns.

        Args:
            num_bytes: of all pieces together.

        Raises:
            OSError: a write failed, of this file or of an earlier one, which it names.
        """

    def open(self, name: str, num_bytes: int | None = None) -> Stream:
        """Open a new file below the root. The caller appends to it and closes it.

        Args:
            num_bytes: that will be appended; None: unknown, and large.
        """

    def link(self, name: str, checkpoint: Place, size: int) -> bool:
        """Take a durable file of another checkpoint, to the same path below the root, without its bytes; return whether that worked.

        Args:
            checkpoint: where its files are.
            size: of the file; another one is not taken.
        """

    def unlink(self, name: str) -> None:
        """Undo `link`."""

    def flush(self) -> None:
        """Wait until the storage has all bytes.

        Raises:
            OSError: a write failed; it names the file.
        """

    def make_durable(self) -> None:
        """Make all files survive a power cut."""

    def abort(self) -> None:
        """Stop writing; return when no write is in flight."""


def sink_below(
    root: Place, rank: int, progress: Callable[[int], None], buffers: Buffers, memory: PooledSave | None = None
) -> Sink:
    """Return what writes below a place. See `FileSink` and `ObjectSink`.

    Args:
        memory: keeps all files in host memory; None: keeps none. Of local files alone.
    """
    if isinstance(root, Path):
        return FileSink(root, rank, progress, buffers, memory)
    return ObjectSink(root, progress, buffers)


class SinkWriter:
    """Base of the writers of all formats: the parts of `ckpt.backends.base.Writer` that need only a sink."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def expect(self, chunks: Iterable[Expected]) -> None:
        """Do nothing: most formats take chunks as they come. See `ckpt.backends.base.Writer.expect`."""

    def add(self, file: str, data: bytes) -> None:
        """Write a small file of the caller's own."""
        self._sink.write(file, [memoryview(data)], len(data))

    def make_durable(self) -> None:
        """Make all files and folders durable, once for all of them."""
        self._sink.make_durable()

    def abort(self) -> None:
        """Stop writing. The files stay until their folder is removed."""
        self._sink.abort()
