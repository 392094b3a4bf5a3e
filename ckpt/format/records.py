"""Records of arrays and files: shape and grid of an array, extent of a chunk, size and digests of a file. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckpt.errors import StorageError
from ckpt.format.box import Box

BLOCK_BYTES = 4 << 20
"""Bytes under one digest. Checking a part of a chunk reads at most two blocks more than the part."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array as storage knows it.

    Attributes:
        path: folder of the array below the checkpoint, with `/` between parts, already safe as a file name.
        dtype: a Zarr v3 data type name, such as "float32", "bfloat16" or "float8_e4m3fn".
        shape: of the global array, in elements.
        grid: shape of one chunk; every side is at least 1.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    grid: tuple[int, ...]


class Content(NamedTuple):
    """A tensor, or a box of one, that lies in a chunk.

    Attributes:
        key: of the tensor.
        shape: of the whole tensor.
        box: in global coordinates.
    """

    key: str
    shape: tuple[int, ...]
    box: Box


@dataclass(frozen=True, slots=True)
class Expected:
    """A chunk that will be written, or an array without chunks.

    Attributes:
        chunk: row-major number; None: the array has no elements.
        contents: of the chunk, end to end.
    """

    array: ArraySpec
    chunk: int | None
    contents: Sequence[Content]


ALIGNMENT = 16
"""Size of the largest element. Blocks of raw chunks are multiples of it, so that what is read at a time splits no element."""


@dataclass(frozen=True, slots=True)
class ChunkExtent:
    """The place of a chunk's bytes in a file, and their digests.

    Attributes:
        file: path below the checkpoint folder.
        offset: first byte in that file.
        length: number of bytes; for a raw chunk those of its `stored_shape`.
        digests: one xxh3-64 per `block_bytes` bytes, the last block shorter.
        raw: the bytes are the elements, row-major and little-endian. If not, they are encoded, the digests are of the
            encoded bytes, and the backend's library decodes them.
    """

    file: str
    offset: int
    length: int
    digests: tuple[int, ...]
    block_bytes: int = BLOCK_BYTES
    raw: bool = True


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file: size in bytes, and the xxh3-128 (hex) of its bytes outside of chunks, in order."""

    size: int
    rest: str


CLIPPED_STORES = frozenset(("safetensors",))
"""Stores that clip edge chunks to the array. All others pad them to a whole cell of the grid."""


def stored_shape(store: str, grid: tuple[int, ...], clipped: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in which a raw chunk is stored.

    Args:
        clipped: shape of the chunk, clipped to the array.
    """
    return clipped if store in CLIPPED_STORES else grid


def changed_in_memory(path: str) -> StorageError:
    """Return the error for bytes that no longer have the digests from when they were copied."""
    return StorageError(
        f"{path} was changed in memory between the snapshot and the disk; nothing of this save is kept. Save again."
    )
