"""What a checkpoint says of its arrays and files: shape and grid of an array, where the bytes of a chunk lie, digests and sizes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckpt.errors import StorageError
from ckpt.format.box import Box

BLOCK_BYTES = 4 << 20
"""Bytes under one digest. A part of a chunk can be checked by reading at most two blocks more than it needs."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array as storage sees it.

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
    """A tensor in a chunk, or a box of one.

    Attributes:
        key: of the tensor, in the folder of the chunk's array.
        shape: of the whole tensor.
        box: which of its elements, in global coordinates.
    """

    key: str
    shape: tuple[int, ...]
    box: Box


@dataclass(frozen=True, slots=True)
class Expected:
    """A chunk that will be written, or an array that has none.

    Attributes:
        chunk: row-major number; None: the array has no elements.
        contents: what lies end to end in it.
    """

    array: ArraySpec
    chunk: int | None
    contents: Sequence[Content]


@dataclass(frozen=True, slots=True)
class ChunkExtent:
    """Where the bytes of one chunk lie, and what they must be.

    Attributes:
        file: path below the checkpoint folder.
        offset: first byte in that file.
        length: number of bytes; for a raw chunk those of its `stored_shape`.
        digests: one xxh3-64 per `block_bytes` bytes, the last block shorter.
        raw: the bytes are the elements themselves, row-major and little-endian. If not, they are encoded, the digests
            are of the encoded bytes, and only the backend's own library can decode them.
    """

    file: str
    offset: int
    length: int
    digests: tuple[int, ...]
    block_bytes: int = BLOCK_BYTES
    raw: bool = True


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file: size in bytes, and the xxh3-128 (hex) of those of its bytes that no chunk's digests cover, in order."""

    size: int
    rest: str


CLIPPED_STORES = frozenset(("safetensors",))
"""Stores whose chunks end where the array ends. In all others an edge chunk is padded to a whole cell of the grid."""


def stored_shape(store: str, grid: tuple[int, ...], clipped: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in which a raw chunk lies in its store.

    Args:
        clipped: shape of the chunk inside of the array.
    """
    return clipped if store in CLIPPED_STORES else grid


def changed_in_memory(path: str) -> StorageError:
    """The error of bytes that are not what they were when they were copied."""
    return StorageError(
        f"{path} was changed in memory between the snapshot and the disk; nothing of this save is kept. Save again."
    )
