"""What writes the files of one rank in one save, wherever they go. Backends write through it, and know no more of the storage."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from ckpt.format.places import Place
from ckpt.format.records import Expected
from ckpt.storage.direct_io import Buffers
from ckpt.storage.file_sink import FileSink
from ckpt.storage.objects.sink import ObjectSink
from ckpt.storage.pool import PooledSave


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
