"""Create directories atomically (fill a temporary sibling, then rename it), and write files in pieces, which are read back.

Ranks may write parts of one file each.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from ckpt.catalog.catalog import catalog_at
from ckpt.errors import StorageError, telling
from ckpt.format.digests import StreamDigest
from ckpt.format.places import Place, place_of
from ckpt.ranks.topology import Topology
from ckpt.storage.files import WriteOnce, naming, own_name, read_once, remove, sync_folder

_READ_BACK_BYTES = 4 << 20


def require_free(dst: Place) -> None:
    """Refuse an existing path, other than an empty folder; an address at which there is a checkpoint, or something else.

    Raises:
        CheckpointExistsError: the path exists.
    """
    catalog_at(dst.parent).require_free(dst)


class NewPlace(NamedTuple):
    """A checkpoint that is being made.

    Attributes:
        folder: where its files go.
        record: takes its manifest, once all other files are written. The lead.
    """

    folder: Place
    record: Callable[[bytes], None]


@contextmanager
def shared_place(dst: Place, topology: Topology) -> Iterator[NewPlace]:
    """As `shared_directory`, for a checkpoint of ours, which may go into an object store, too. Collective."""
    catalog = catalog_at(dst.parent, run_id=str(dst))
    try:
        with topology.phase("create") as phase:
            if topology.is_lead:
                catalog.require_free(dst)
                phase.from_lead = str(catalog.open_at(dst))
        place = place_of(phase.from_lead)
        yield NewPlace(place, partial(catalog.record, place))
        with topology.phase("publish"):
            topology.require_awaited()
            if topology.is_lead:
                catalog.publish_at(place, dst)
    except BaseException:
        catalog.discard_all()
        raise


@contextmanager
def shared_directory(dst: Path, topology: Topology, *, is_file: bool = False) -> Iterator[Path]:
    """Yield a temporary folder beside `dst`, one for all ranks. It is renamed to `dst` at the end of the block, or removed after an error.
    Collective.

    The block makes the content durable; the rename is made durable here.

    Args:
        is_file: yield a path at which the block makes a file, whose last part is that of `dst`: files of torch hold their names.

    Raises:
        CheckpointExistsError: `dst` exists.
        StorageError: the folder cannot be made, or renamed.
    """
    dst = dst.absolute()
    around = dst.parent / f".converting-{dst.name}-{secrets.token_hex(4)}"  # the lead's
    try:
        with topology.phase("create") as phase:
            if topology.is_lead:
                require_free(dst)
                with telling(f"{dst} cannot be written"):
                    (around if is_file else around / dst.name).mkdir(parents=True)
                phase.from_lead = str(around / dst.name)
        yield Path(phase.from_lead)
        with topology.phase("publish"):
            topology.require_awaited()
            if topology.is_lead:
                require_free(dst)  # still: a file would be replaced
                with telling(f"{dst} cannot be written"):
                    os.rename(around / dst.name, dst)
                    sync_folder(dst.parent)
    finally:
        remove(around, own_name)


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
