"""Zarr v3 on a shared file system: an ordinary directory of chunk files that `zarr.open` reads without our code.

A rank writes whole chunks, each to the file that its number names, and never opens metadata: Zarr has no lock between
processes, and another rank's metadata may still sit in an attribute cache. The lead writes the metadata afterwards.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from zarr.abc.codec import BytesBytesCodec
from zarr.core.chunk_grids import RegularChunkGrid
from zarr.core.group import GroupMetadata
from zarr.core.metadata.v3 import ArrayV3Metadata
from zarr.errors import NodeNotFoundError
from zarr.storage import LocalStore, MemoryStore, StorePath

from ckpt import zarr_dtypes
from ckpt.backends.base import BLOCK_BYTES, ArraySpec, ChunkExtent, FileRecord, Written
from ckpt.backends.files import Folders, make_durable, padded_pieces, remove_arrays, write_documents, write_file
from ckpt.backends.zarr_format import DOCUMENT, array_document, chunk_key, groups_above
from ckpt.blocks import EMPTY_DIGEST, BlockDigests
from ckpt.box import Box, chunk_box, chunks_meeting
from ckpt.dtypes import bits_of
from ckpt.errors import ConfigurationError, CorruptCheckpointError


class ZarrBackend:
    """Reads and writes Zarr v3 directories.

    Args:
        compressors: Zarr v3 codecs that turn bytes into fewer bytes, such as
            `[{"name": "zstd", "configuration": {"level": 3, "checksum": false}}]`. None keeps the elements as they are
            in memory, which is what makes loading fast: only raw chunks are read straight into tensors.

    Raises:
        ConfigurationError: zarr-python does not know one of the compressors.
    """

    store = "zarr"

    def __init__(self, *, compressors: list[dict[str, Any]] | None = None) -> None:
        zarr_dtypes.register()
        self._compressors = list(compressors or ())
        _check_compressors(self._compressors)

    def writer(self, root: Path, rank: int, progress: Callable[[int], None]) -> ZarrWriter:
        """Return this rank's writer below the unpublished folder `root`."""
        return ZarrWriter(root, self._compressors, progress)

    def lay_out(
        self,
        root: Path,
        arrays: Sequence[ArraySpec],
        writers: Sequence[int],
        progress: Callable[[int], None] = lambda _: None,
    ) -> list[str]:
        """Write the `zarr.json` of every array and of every group above one, the checkpoint itself included."""
        documents = {_below(path, DOCUMENT): _document_bytes(GroupMetadata()) for path in groups_above(arrays)}
        for array in arrays:
            documents[_below(array.path, DOCUMENT)] = _document_bytes(_metadata(array, self._compressors))
        return write_documents(root, documents, progress)

    def read(self, root: Path, array: ArraySpec, box: Box, out: torch.Tensor) -> None:
        """Fill `out` (host, shape box.shape) through zarr-python.

        Raises:
            CorruptCheckpointError: the array, or a chunk that `box` meets, is missing or cannot be decoded.
        """
        for number in chunks_meeting(array.shape, array.grid, box):
            file = root / array.path / chunk_key(array, number)
            if not file.is_file():  # zarr-python would hand out zeros in its place
                raise CorruptCheckpointError(f"{array.path}: {file} is missing. Load an earlier checkpoint.")
        try:
            stored = zarr.open_array(store=LocalStore(root, read_only=True), path=array.path, mode="r")
            values = np.asarray(stored[box.slices])
        except (NodeNotFoundError, ValueError, RuntimeError, KeyError, TypeError) as error:
            raise CorruptCheckpointError(
                f"{array.path}: zarr cannot read {box} of {root / array.path}: {error}. Load an earlier checkpoint."
            ) from error
        bits = bits_of(out)
        bits[...] = values.view(bits.dtype)

    def list_arrays(self, root: Path) -> dict[str, ArraySpec]:
        """Return every array below `root`, by path, from the metadata that zarr-python accepts.

        Raises:
            CorruptCheckpointError: a `zarr.json` is not what zarr-python understands.
        """
        return {spec.path: spec for spec in sorted(_arrays_below(root), key=lambda spec: spec.path)}

    def remove(self, root: Path, paths: Collection[str]) -> None:
        """Remove the arrays at these paths: their metadata and their chunks. One that is gone already is no error."""
        remove_arrays(root, [path for path in paths if (root / path).is_dir()])


class ZarrWriter:
    """One rank's side of one save: a file per chunk, written as `write` is called, made durable by `finish`."""

    def __init__(self, root: Path, compressors: Sequence[dict[str, Any]], progress: Callable[[int], None]) -> None:
        self._root = root
        self._compressors = compressors
        self._progress = progress
        self._folders = Folders(root)
        self._written = Written()

    def write(self, array: ArraySpec, chunk: int, host: torch.Tensor) -> None:
        """Write chunk number `chunk` of `array`; `host` is contiguous and has the chunk's clipped shape."""
        box = chunk_box(array.shape, array.grid, chunk)
        assert tuple(host.shape) == box.shape and host.is_contiguous(), f"{array.path}: {host.shape} for {box}"
        file = _below(array.path, chunk_key(array, chunk))
        self._folders.make((self._root / file).parent)
        digests = BlockDigests(BLOCK_BYTES)
        size = write_file(self._root / file, _digested(self._encoded(array, box, host), digests), self._progress)
        self._written.chunks[array.path, chunk] = ChunkExtent(
            file, 0, size, digests.close(), BLOCK_BYTES, raw=not self._compressors
        )
        self._written.files[file] = FileRecord(size, EMPTY_DIGEST)

    def finish(self) -> Written:
        """Make all files and folders durable, once for all of them, and say where the chunks lie."""
        sizes = {file: record.size for file, record in self._written.files.items()}
        make_durable(self._root, sizes, self._folders.made, self._progress)
        return self._written

    def abort(self) -> None:
        """Nothing is held open; the files stay until their folder is removed."""

    def _encoded(self, array: ArraySpec, box: Box, host: torch.Tensor) -> Iterator[memoryview]:
        """Yield the bytes of the chunk's file."""
        if not self._compressors:
            return padded_pieces(host, array.grid)
        return iter([memoryview(_compressed(array, self._compressors, box, host))])


def _digested(pieces: Iterator[memoryview], digests: BlockDigests) -> Iterator[memoryview]:
    """Yield the pieces; each has been digested, and is therefore in the cache, when it is written."""
    for piece in pieces:
        digests.update(piece)
        yield piece


def _compressed(array: ArraySpec, compressors: Sequence[dict[str, Any]], box: Box, host: torch.Tensor) -> bytes:
    """Return a chunk as zarr-python encodes it, by letting it write that chunk alone into memory."""
    files: dict[str, Any] = {}
    metadata = _metadata(array, compressors)
    encoder = zarr.Array(zarr.AsyncArray(metadata, StorePath(MemoryStore(files))))
    encoder = encoder.with_config({"write_empty_chunks": True})  # by default an all-zero chunk is left out
    encoder[box.slices] = bits_of(host).view(metadata.data_type.to_native_dtype())
    encoded: bytes = files[chunk_key(array, _number_of(array, box))].to_bytes()
    return encoded


def _number_of(array: ArraySpec, box: Box) -> int:
    return next(chunks_meeting(array.shape, array.grid, box))


def _metadata(array: ArraySpec, compressors: Sequence[dict[str, Any]]) -> ArrayV3Metadata:
    return ArrayV3Metadata.from_dict(array_document(array, compressors))


def _document_bytes(metadata: ArrayV3Metadata | GroupMetadata) -> bytes:
    return json.dumps(metadata.to_dict()).encode()  # not indented, as zarr-python does: that takes most of the time


def _below(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _arrays_below(root: Path) -> Iterator[ArraySpec]:
    """Yield the arrays below `root`; inside of one there is nothing to look for but chunks."""
    for folder, folders, files in os.walk(root):
        if DOCUMENT in files:
            spec = _spec_of(root, Path(folder))
            if spec is not None:
                folders.clear()
                yield spec


def _spec_of(root: Path, folder: Path) -> ArraySpec | None:
    """Return the array whose metadata lies in `folder`, or None if it is a group."""
    try:
        document = json.loads((folder / DOCUMENT).read_bytes())
        if document["node_type"] == "group":
            return None
        metadata = ArrayV3Metadata.from_dict(document)
    except (ValueError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(
            f"{folder / DOCUMENT} is not the metadata of a Zarr v3 array: {error}. Load an earlier checkpoint."
        ) from error
    grid = metadata.chunk_grid
    assert isinstance(grid, RegularChunkGrid)
    return ArraySpec(
        folder.relative_to(root).as_posix(),
        str(metadata.data_type.to_json(zarr_format=3)),
        tuple(metadata.shape),
        tuple(grid.chunk_shape),
    )


def _check_compressors(compressors: Sequence[dict[str, Any]]) -> None:
    """Refuse, before anything is saved, what zarr-python does not know or what is no compressor."""
    try:
        codecs = _metadata(ArraySpec("", "uint8", (1,), (1,)), compressors).codecs[1:]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(
            f"ckpt.compressors={compressors}: {error}. Give a list of Zarr v3 codecs, such as "
            "[{name: zstd, configuration: {level: 3, checksum: false}}], or null."
        ) from error
    for codec in codecs:
        if not isinstance(codec, BytesBytesCodec):
            raise ConfigurationError(
                f"ckpt.compressors={compressors}: {type(codec).__name__} does not turn bytes into bytes. Give codecs "
                "such as blosc, gzip or zstd, or null."
            )
