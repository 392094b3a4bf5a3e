"""Zarr v3 as an ordinary directory: a rank's side of a save, a file per chunk, written by its computed path.

No library is needed to write raw chunks. Metadata is never opened: Zarr has no lock between processes, and another rank's metadata may
still sit in an attribute cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
import xxhash

from ckpt.backends.base import BLOCK_BYTES, ArraySpec, ChunkExtent, FileRecord, Written
from ckpt.backends.files import padded_pieces
from ckpt.backends.outlet import Outlet, OutletWriter
from ckpt.backends.zarr_format import DOCUMENT, below, chunk_key, with_groups_above
from ckpt.blocks import EMPTY_DIGEST, BlockDigests
from ckpt.box import Box, chunk_box

Describe = Callable[[ArraySpec | None], bytes]
"""The `zarr.json` of an array, or of a group."""

Encode = Callable[[ArraySpec, Box, torch.Tensor], bytes]
"""The bytes of a chunk's file, where they are not the elements themselves."""


class DirectoryWriter(OutletWriter):
    """One rank's side of one save: a file per chunk and per description.

    Args:
        encode: None: chunks are stored raw.
    """

    def __init__(self, outlet: Outlet, describe: Describe, encode: Encode | None = None) -> None:
        super().__init__(outlet)
        self._describe = describe
        self._encode = encode
        self._written = Written()

    def write(self, array: ArraySpec, chunk: int, host: torch.Tensor) -> None:
        """Write chunk number `chunk` of `array`; `host` is contiguous and has the chunk's clipped shape."""
        box = chunk_box(array.shape, array.grid, chunk)
        assert tuple(host.shape) == box.shape and host.is_contiguous(), f"{array.path}: {host.shape} for {box}"
        file = below(array.path, chunk_key(array, chunk))
        if self._encode is None:
            pieces, size = padded_pieces(host, array.grid), math.prod(array.grid) * host.element_size()
        else:
            data = self._encode(array, box, host)
            pieces, size = iter([memoryview(data)]), len(data)
        digests = BlockDigests(BLOCK_BYTES)
        self._outlet.write(file, digested(pieces, digests), size)
        self._written.chunks[array.path, chunk] = ChunkExtent(
            file, 0, size, digests.close(), BLOCK_BYTES, raw=self._encode is None
        )
        self._written.files[file] = FileRecord(size, EMPTY_DIGEST)

    def describe(self, arrays: Sequence[ArraySpec], groups: Collection[str] | None = None) -> None:
        """Write the `zarr.json` of these arrays, and of the groups at and above these paths."""
        for group in with_groups_above(groups) if groups is not None else ():
            self._write_description(group, self._describe(None))
        for array in arrays:
            self._write_description(array.path, self._describe(array))

    def finish(self) -> Written:
        """Hand all bytes to the file system, and say where the chunks lie."""
        self._outlet.flush()
        return self._written

    def _write_description(self, path: str, document: bytes) -> None:
        file = below(path, DOCUMENT)
        self.add(file, document)
        self._written.files[file] = FileRecord(len(document), xxhash.xxh3_128_hexdigest(document))


def digested(pieces: Iterator[memoryview], digests: BlockDigests) -> Iterator[memoryview]:
    """Yield the pieces; each has been digested, and is therefore in the cache, when it is written."""
    for piece in pieces:
        digests.update(piece)
        yield piece
