"""The contract of a storage backend: standard files, where in them every chunk lies, and what may be linked instead of written.

A backend knows one format. It never decides who writes what (plan.py does), never talks to other ranks, and never reads a
raw local chunk: it reports each chunk's extent, and extents.py reads those for every backend alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from ckpt.format.blocks import BlockDigests
from ckpt.format.box import Box
from ckpt.format.records import BLOCK_BYTES, ArraySpec, ChunkExtent, Expected, FileRecord
from ckpt.storage.pieces import padded_pieces
from ckpt.storage.pool import Memories

DATABASE = "arrays.ocdbt"
"""Folder of the joined database below the checkpoint; each writing rank's own is `rank-<5 digits>` in it."""


@dataclass(slots=True)
class Written:
    """What one rank has handed to the file system when `Writer.finish` returns.

    Attributes:
        chunks: (array path, row-major chunk number) -> where it lies.
        files: path below the checkpoint folder -> record, for every file this rank made or linked.
        dead: file -> what lies in it of an earlier checkpoint and is no chunk of this one, where there is any.
        linked_bytes: of all files that were linked, dead bytes included.
    """

    chunks: dict[tuple[str, int], ChunkExtent] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    dead: dict[str, list[ChunkExtent]] = field(default_factory=dict)
    linked_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Previous:
    """What one rank has in an earlier checkpoint, which is committed and stays until the save has been. Can be pickled.

    A chunk whose bytes would be those that lie there is not written again: the file that holds them gets a second name in the new
    checkpoint, by a hard link. The bytes alone decide, by length and digests; if the array has another shape now, they are the same
    bytes still.

    Attributes:
        folder: of that checkpoint.
        chunks, files, dead: as in its index.
        min_live: a file of which less than this fraction would still be used is not linked, and what is used is written anew; unless
            nothing that was ever a chunk in it is dead.
    """

    folder: Path
    chunks: Mapping[str, Mapping[int, ChunkExtent]]
    files: Mapping[str, FileRecord]
    dead: Mapping[str, Sequence[ChunkExtent]] = field(default_factory=dict)
    min_live: float = 0.5

    def chunk(self, path: str, number: int, length: int, *, raw: bool) -> ChunkExtent | None:
        """Where chunk `number` of the array at `path` lay, if it was as long as it will be now, and stored in the same way."""
        old = self.chunks.get(path, {}).get(number)
        if old is None or (old.length, old.raw, old.block_bytes) != (length, raw, BLOCK_BYTES):
            return None
        return old


def staged_digests(host: torch.Tensor, grid: tuple[int, ...]) -> tuple[int, ...]:
    """The digests of a chunk as it is stored raw, padding included: what `Writer.write` takes, and `ChunkExtent` keeps."""
    digests = BlockDigests(BLOCK_BYTES)
    for piece in padded_pieces(host, grid):
        digests.update(piece)
    return digests.close()


class Writer(Protocol):
    """One rank's side of one save. Used by one thread: `expect`, `write` and `describe`, `finish`, `add`, `make_durable`.

    What it tells `progress` is a sign of life: a byte counts when it is taken, may count again when it has reached the
    file system and again when it is durable, so that no long stretch of a save goes without one. Any of these may raise what
    became of a byte that an earlier one took.
    """

    def expect(self, chunks: Iterable[Expected]) -> None:
        """Take notice of everything that this rank will write, before the first of it; in no order."""

    def write(self, array: ArraySpec, chunk: int, host: torch.Tensor, digests: tuple[int, ...] | None = None) -> None:
        """Write one whole chunk, of which this rank is the only writer, or link it to the checkpoint before.

        Args:
            array: the array, described by some rank at some other time; its metadata must not be opened here.
            chunk: row-major number.
            host: C-contiguous host tensor of the array's data type and the chunk's *clipped* shape; the writer pads an
                edge chunk. The caller leaves its values alone until this returns.
            digests: its `staged_digests` from when it was copied; what is written must have them still. A chunk that is linked on
                their account is not looked at again.

        Raises:
            StorageError: it was changed in memory since.
        """

    def describe(self, arrays: Sequence[ArraySpec], groups: Collection[str] | None = None) -> None:
        """Write the metadata of arrays, each of which is described by exactly one rank.

        Args:
            groups: paths of the groups that hold the arrays of all ranks: these, those above them and the checkpoint itself are
                described too. One rank says so; None: another one does.
        """

    def finish(self) -> Written:
        """Hand everything to the file system, and say where it lies. What follows is `add`."""

    def add(self, file: str, data: bytes) -> None:
        """Write a small file of the caller's own, by its path below the checkpoint; `Written` does not list it."""

    def make_durable(self) -> None:
        """Return when all files, and the folders above them, survive a power cut: one sync for everything."""

    def abort(self) -> None:
        """Let go of everything; what is on disk may stay, the folder is about to be removed. Nothing appears there later."""


class Backend(Protocol):
    """One storage format. Constructed by the user's config: its keyword arguments are the config's schema."""

    store: str
    """What the manifest calls the format: "zarr", "ocdbt" or "safetensors". A load looks the backend up by this name."""

    def writer(
        self, root: Path, rank: int, progress: Callable[[int], None], previous: Previous | None = None
    ) -> Writer:
        """Return this rank's writer below the unpublished folder `root`; it calls `progress(num_bytes)` as bytes move.

        Args:
            previous: a checkpoint beside it, whose files may be linked.
        """

    def join(self, root: Path, writers: Sequence[int], progress: Callable[[int], None]) -> list[str]:
        """Make one of what the ranks in `writers` wrote, where their files are not that already. Lead rank only, after all of
        them finished. Calls `progress(num_bytes)` as bytes move.

        Returns:
            the files made, relative to `root`, durable.
        """

    def read(self, root: Path, array: ArraySpec, box: Box, out: torch.Tensor) -> None:
        """Fill `out` (host, shape box.shape) through the format's own library, for chunks that are not raw."""


@runtime_checkable
class KeepsSaves(Protocol):
    """A backend that can keep what it writes in host memory.

    Attributes:
        memories: where its writers find that memory; None: nothing is kept.
    """

    memories: Memories | None


@runtime_checkable
class BringsTransport(Protocol):
    """A backend that says by what two-stage loads spread, where nothing else is chosen.

    Attributes:
        transport: a name, as `TwoStageLoad` takes it.
    """

    transport: str


@runtime_checkable
class ForgetsArrays(Protocol):
    """A backend whose arrays share a database, from which only the backend can remove them. Called by the lead rank."""

    def list_arrays(self, root: Path) -> dict[str, ArraySpec]:
        """Return every array below `root` as the format's own library sees it, by path.

        Raises:
            CorruptCheckpointError: the library cannot read the database.
        """

    def remove(self, root: Path, paths: Collection[str]) -> None:
        """Remove the arrays at these paths and no others. A path without an array is passed over."""
