"""Write Zarr v3 as an ordinary directory: one file for each chunk, at its computed path.

Writing raw chunks needs no library. Metadata is never opened: Zarr has no lock between processes, and attribute caches may hide
another rank's metadata. An unchanged chunk is a hard link to its file in the previous checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence

import torch

from ckpt.backends.base import Previous, Written, staged_digests
from ckpt.backends.zarr_format import DOCUMENT, below, chunk_key, with_groups_above
from ckpt.format.box import Box, chunk_box
from ckpt.format.digests import EMPTY_DIGEST, digest_of
from ckpt.format.records import ArraySpec, ChunkExtent, FileRecord, changed_in_memory
from ckpt.storage.pieces import Pieces, padded_pieces
from ckpt.storage.sink import Sink, SinkWriter

Describe = Callable[[ArraySpec | None], bytes]
"""Returns the `zarr.json` of an array; None: of a group."""

Encode = Callable[[ArraySpec, Box, torch.Tensor], bytes]
"""Returns the encoded bytes of a chunk."""


class DirectoryWriter(SinkWriter):
    """Writes one rank's chunks and `zarr.json` files, one file each. See `ckpt.backends.base.Writer`.

    Args:
        describe: makes `zarr.json` documents.
        encode: encodes chunks; None: chunks are stored raw.
        previous: this rank's files in the previous checkpoint.
    """

    def __init__(
        self, sink: Sink, describe: Describe, encode: Encode | None = None, previous: Previous | None = None
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
            source = Pieces(padded_pieces(host, array.grid), digests)
        else:
            if digests is not None and staged_digests(host, array.grid) != digests:
                raise changed_in_memory(array.path)
            data = self._encode(array, box, host)
            size = len(data)
            source = Pieces(iter([memoryview(data)]))
        old = self._old(array, chunk, file, size)
        if old is not None and source.have(old.digests) and self._link(file, old):
            extent = old
        else:
            self._sink.write(file, source.digested(), size)
            extent = ChunkExtent(file, 0, size, source.written(array.path), raw=self._encode is None)
        self._written.chunks[array.path, chunk] = extent
        self._written.files[file] = FileRecord(size, EMPTY_DIGEST)

    def _old(self, array: ArraySpec, chunk: int, file: str, size: int) -> ChunkExtent | None:
        """Return the previous checkpoint's extent of a chunk, if it may be equal and is a whole file of the same name."""
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
        """Wait for all writes; return the chunks and files."""
        self._sink.flush()
        return self._written

    def _write_description(self, path: str, document: bytes) -> None:
        file = below(path, DOCUMENT)
        self.add(file, document)
        self._written.files[file] = FileRecord(len(document), digest_of(document))
