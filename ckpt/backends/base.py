"""The contract of a storage backend: write standard files, report the extent of each chunk, read encoded chunks.

A backend knows one format. It does not decide which rank writes a chunk (planning/plan.py does), does not communicate with other
ranks, and does not read raw chunks in a load: storage/extents.py reads those of every backend, by their extents.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from ckpt.format.box import Box
from ckpt.format.digests import BlockDigests
from ckpt.format.places import Place
from ckpt.format.records import BLOCK_BYTES, ArraySpec, ChunkExtent, Expected, FileRecord
from ckpt.storage.checkpoint_files import CheckpointFolder
from ckpt.storage.direct_io import Buffers
from ckpt.storage.pool import Memories
from ckpt.storage.sink import padded_pieces

DATABASE = "arrays.ocdbt"
"""Folder of the joined OCDBT database below the checkpoint. Each writing rank's own database is `rank-<5 digits>` in it."""


def database_files(root: Path) -> Iterator[str]:
    """Yield the files of the joined database by path below the checkpoint, without those of the ranks' own databases."""
    with CheckpointFolder(root) as folder:
        yield from (path for path in folder.below(DATABASE) if "/rank-" not in path)


@dataclass(slots=True)
class Written:
    """The chunks and files of one rank, as `Writer.finish` returns them.

    Attributes:
        chunks: (array path, row-major chunk number) -> extent.
        files: path below the checkpoint folder -> record, for every file this rank made or linked.
        dead: linked file -> extents in it that are chunks of an earlier checkpoint, but not of this one; without files that have none.
        linked_bytes: of all linked files, dead bytes included.
    """

    chunks: dict[tuple[str, int], ChunkExtent] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    dead: dict[str, list[ChunkExtent]] = field(default_factory=dict)
    linked_bytes: int = 0


Contents = Callable[[], Iterable[tuple[ArraySpec, Mapping[int, ChunkExtent]]]]
"""Returns every array of a save, with the extents of its chunks by number."""


def no_contents() -> Iterable[tuple[ArraySpec, Mapping[int, ChunkExtent]]]:
    """The contents of a save that nobody asks for."""
    return ()


@dataclass(frozen=True, slots=True)
class Previous:
    """One rank's chunks and files in an earlier committed checkpoint, which stays until the save is committed.

    A chunk with the same bytes is not written again: its file is hard-linked into the new checkpoint. Length and digests decide, not the
    shape of the array.

    Attributes:
        folder: where the files of that checkpoint are.
        chunks, files, dead: as in the rank's index.
        min_live: smallest fraction of a file in use for linking it; else its used chunks are written again. Files without dead
            chunks are linked from one half on.
    """

    folder: Place
    chunks: Mapping[str, Mapping[int, ChunkExtent]]
    files: Mapping[str, FileRecord]
    dead: Mapping[str, Sequence[ChunkExtent]] = field(default_factory=dict)
    min_live: float = 0.5

    def chunk(self, path: str, number: int, length: int, *, raw: bool) -> ChunkExtent | None:
        """Return the extent of chunk `number` of the array at `path`, if its length and encoding are those of the new chunk."""
        old = self.chunks.get(path, {}).get(number)
        if old is None or (old.length, old.raw, old.block_bytes) != (length, raw, BLOCK_BYTES):
            return None
        return old


def staged_digests(host: torch.Tensor, grid: tuple[int, ...]) -> tuple[int, ...]:
    """Return the digests of a raw chunk with its padding: those of `Writer.write` and of `ChunkExtent`."""
    digests = BlockDigests(BLOCK_BYTES)
    for piece in padded_pieces(host, grid):
        digests.update(piece)
    return digests.close()


class Writer(Protocol):
    """Writes the chunks of one rank in one save. One thread calls it: `expect`, `write`s, `describe`, `finish`, `add`s, `make_durable`.

    `progress` is a sign of life, from any thread: a byte may count when it is copied, again when it is written, and again when it is
    durable. Each method may raise the error of an earlier asynchronous write.
    """

    def expect(self, chunks: Iterable[Expected]) -> None:
        """Receive the list of all chunks that this rank will write, before the first `write`, in any order."""

    def write(self, array: ArraySpec, chunk: int, host: torch.Tensor, digests: tuple[int, ...] | None = None) -> None:
        """Write one whole chunk, whose only writer is this rank, or link it to the previous checkpoint.

        Args:
            array: that the chunk belongs to. Another rank may describe it, at another time: do not open its metadata.
            chunk: row-major number.
            host: C-contiguous host tensor of the array's data type and the chunk's *clipped* shape; the writer pads an
                edge chunk. The caller may reuse its memory when this returns.
            digests: `staged_digests` of the chunk from when it was copied; the written bytes must match them. A chunk that is
                linked because of them is not read again.

        Raises:
            StorageError: the bytes do not match `digests`: they were changed in memory.
        """

    def describe(self, arrays: Sequence[ArraySpec], groups: Collection[str] | None = None) -> None:
        """Write the metadata of these arrays. Each array is described by exactly one rank.

        Args:
            groups: paths of the groups that hold the arrays of all ranks, given on the lead rank: describe these groups, those
                above them and the checkpoint itself, too. None on the other ranks.
        """

    def finish(self) -> Written:
        """Hand all bytes to the file system; return the extents and files. Only `add` and `make_durable` follow."""

    def add(self, file: str, data: bytes) -> None:
        """Write a small file of the caller's, by its path below the checkpoint. `Written` does not list it."""

    def make_durable(self) -> None:
        """Make all files and their folders survive a power cut, with one sync for all."""

    def abort(self) -> None:
        """Stop the save: no write is in flight when this returns. Files may stay; the lead rank removes the folder."""


class Backend(Protocol):
    """One storage format. The user's config constructs it: its keyword arguments are the config's keys."""

    store: str
    """Name of the format in manifests, such as "zarr", "ocdbt" or "safetensors". A load finds the backend by it."""

    def writer(
        self, root: Place, rank: int, progress: Callable[[int], None], previous: Previous | None = None
    ) -> Writer:
        """Return this rank's writer for a save into the unpublished folder `root`. It calls `progress(num_bytes)` as bytes move.

        Args:
            previous: an earlier checkpoint on the same file system, whose files may be linked.
        """

    def join(
        self, root: Place, writers: Sequence[int], progress: Callable[[int], None], contents: Contents = no_contents
    ) -> list[str] | Mapping[str, bytes]:
        """Combine the files of the ranks in `writers`, if the format needs that. Called on the lead rank, after all of them
        are durable. Calls `progress(num_bytes)` as bytes move.

        Args:
            contents: what the ranks have written, for a format that joins no files of theirs in an object store. Given there alone.

        Returns:
            paths of new files, relative to `root`; they are durable. In an object store these with their content, which is not read back.
        """

    def read(self, root: Place, array: ArraySpec, box: Box, out: torch.Tensor) -> None:
        """Fill `out` (host tensor of shape box.shape) with the format's own library. Any rank; loads call it for encoded chunks.

        Raises:
            CorruptCheckpointError: the array, or a chunk that `box` meets, is missing or cannot be decoded.
        """


class KeepsSaves(Protocol):
    """A backend that can keep the files of a save in host memory.

    Attributes:
        memories: hands the memory to its writers; None: no save is kept.
    """

    memories: Memories | None


class WritesThroughBuffers(Protocol):
    """A backend whose writers take host memory, which a coordinator may limit.

    Attributes:
        buffers: see `ckpt.memory.budget.Limited`.
        chunk_memories: how many times a chunk may be in memory on its way.
    """

    buffers: Buffers
    chunk_memories: int


class BringsTransport(Protocol):
    """A backend with a default transport for two-stage loads.

    Attributes:
        transport: name, as `TwoStageLoad` takes it.
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
