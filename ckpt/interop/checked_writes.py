"""Write pieces to known places in files, durably, and compare what is then read back. Ranks may write parts of one file each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from ckpt.errors import StorageError
from ckpt.format.digests import StreamDigest
from ckpt.storage.files import WriteOnce, naming, read_once

_READ_BACK_BYTES = 4 << 20


class PlacedBytes(NamedTuple):
    """Bytes, and the file and the first byte in it at which they belong."""

    path: Path
    start: int
    data: memoryview


@dataclass(slots=True)
class WrittenRun:
    """Consecutive bytes of a file, written by this rank, and the digest of what they were to be."""

    path: Path
    start: int
    end: int
    digest: StreamDigest


def write_pieces(pieces: Iterable[PlacedBytes], progress: Callable[[int], None]) -> list[WrittenRun]:
    """Write pieces, and return when they are on the disk. Other ranks may write other parts of the same files.

    Args:
        pieces: file by file, in ascending order. Their memory may be reused as soon as the next one is requested.
        progress: called with the number of bytes that have moved.

    Returns:
        what was written, for `require_read_back`.
    """
    runs: list[WrittenRun] = []
    for path, of_file in groupby(pieces, attrgetter("path")):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            out = WriteOnce(fd)
            for piece in of_file:
                if not runs or (runs[-1].path, runs[-1].end) != (path, piece.start):
                    runs.append(WrittenRun(path, piece.start, piece.start, StreamDigest()))
                runs[-1].digest.update(piece.data)
                with naming(path):
                    out.write(piece.data, piece.start)
                runs[-1].end += len(piece.data)
                progress(len(piece.data))
            with naming(path):
                out.close()
        finally:
            os.close(fd)
    return runs


def require_read_back(runs: Iterable[WrittenRun], dst: Path, progress: Callable[[int], None]) -> None:
    """Compare runs of bytes with those in the files.

    Raises:
        StorageError: they differ.
    """
    memory = memoryview(bytearray(_READ_BACK_BYTES))
    for path, of_file in groupby(runs, attrgetter("path")):
        with path.open("rb") as file:
            for run in of_file:
                found, at = StreamDigest(), run.start
                while at < run.end and (num_bytes := read_once(file.fileno(), [memory[: run.end - at]], at)):
                    found.update(memory[:num_bytes])
                    at += num_bytes
                    progress(num_bytes)
                if found.digest() != run.digest.digest():
                    raise StorageError(
                        f"what was written for {dst} is not what is read back: bytes {run.start} to {run.end} of {path.name} were changed"
                    )
