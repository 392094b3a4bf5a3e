"""Zarr v3 as an ordinary directory: a rank's side of a save, a file per chunk, written by its computed path.

No library is needed to write raw chunks. Metadata is never opened: Zarr has no lock between processes, and another rank's metadata may
still sit in an attribute cache. A chunk that is as it was in the checkpoint before is a link to its file there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import torch
import xxhash

from ckpt.backends.base import Previous, Written, staged_digests
from ckpt.backends.zarr_format import DOCUMENT, below, chunk_key, with_groups_above
from ckpt.format.blocks import EMPTY_DIGEST
from ckpt.format.box import Box, chunk_box
from ckpt.format.records import BLOCK_BYTES, ArraySpec, ChunkExtent, FileRecord, changed_in_memory
from ckpt.storage.file_sink import FileSink, FileSinkWriter
from ckpt.storage.pieces import Pieces, padded_pieces

Describe = Callable[[ArraySpec | None], bytes]
"""The `zarr.json` of an array, or of a group."""

Encode = Callable[[ArraySpec, Box, torch.Tensor], bytes]
"""The bytes of a chunk's file, where they are not the elements themselves."""


class DirectoryWriter(FileSinkWriter):
    """One rank's side of one save: a file per chunk and per description.

    Args:
        encode: None: chunks are stored raw.
        previous: what this rank has in the checkpoint before.
    """

    def __init__(
        self, sink: FileSink, describe: Describe, encode: Encode | None = None, previous: Previous | None = None
    ) -> None:
        super().__init__(sink)
        self._describe = describe
        self._encode = encode
        self._previous = previous
        self._written = Written()

    def write(self, array: ArraySpec, chunk: int, host: torch.Tensor, digests: tuple[int, ...] | None = None) -> None:
        """Write or link chunk number `chunk` of `array`; `host` is contiguous and has the chunk's clipped shape."""
        box = chunk_box(array.shape, array.grid, chunk)
        assert tuple(host.shape) == box.shape and host.is_contiguous(), f"{array.path}: {host.shape} for {box}"
        file = below(array.path, chunk_key(array, chunk))
        if self._encode is None:
            size = math.prod(array.grid) * host.element_size()
            old = self._old(array, chunk, file, size)
            source = Pieces(padded_pieces(host, array.grid), digests)
        else:
            if digests is not None and staged_digests(host, array.grid) != digests:
                raise changed_in_memory(array.path)
            data = self._encode(array, box, host)
            size = len(data)
            old = self._old(array, chunk, file, size)
            source = Pieces(iter([memoryview(data)]))
        if old is not None and source.have(old.digests) and self._link(file, old):
            extent = old
        else:
            self._sink.write(file, source.digested(), size)
            extent = ChunkExtent(file, 0, size, source.written(array.path), BLOCK_BYTES, raw=self._encode is None)
        self._written.chunks[array.path, chunk] = extent
        self._written.files[file] = FileRecord(size, EMPTY_DIGEST)

    def _old(self, array: ArraySpec, chunk: int, file: str, size: int) -> ChunkExtent | None:
        """The chunk in the checkpoint before, if it may be the same and has a file of the same name to itself."""
        if self._previous is None:
            return None
        old = self._previous.chunk(array.path, chunk, size, raw=self._encode is None)
        alone = FileRecord(size, EMPTY_DIGEST)
        return old if old is not None and old.file == file and self._previous.files.get(file) == alone else None

    def _link(self, file: str, old: ChunkExtent) -> bool:
        assert self._previous is not None
        is_linked = self._sink.link(file, self._previous.folder, old.length)
        self._written.linked_bytes += old.length if is_linked else 0
        return is_linked

    def describe(self, arrays: Sequence[ArraySpec], groups: Collection[str] | None = None) -> None:
        """Write the `zarr.json` of these arrays, and of the groups at and above these paths."""
        for group in with_groups_above(groups) if groups is not None else ():
            self._write_description(group, self._describe(None))
        for array in arrays:
            self._write_description(array.path, self._describe(array))

    def finish(self) -> Written:
        """Hand all bytes to the file system, and say where the chunks lie."""
        self._sink.flush()
        return self._written

    def _write_description(self, path: str, document: bytes) -> None:
        file = below(path, DOCUMENT)
        self.add(file, document)
        self._written.files[file] = FileRecord(len(document), xxhash.xxh3_128_hexdigest(document))
