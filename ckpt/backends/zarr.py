"""Zarr v3 on a shared file system: an ordinary directory of chunk files that `zarr.open` reads without our code.

Raw chunks and metadata are written as files (directory.py). zarr-python makes the metadata, and encodes and decodes compressed chunks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from zarr.abc.codec import BytesBytesCodec
from zarr.core.chunk_grids import RegularChunkGrid
from zarr.core.group import GroupMetadata
from zarr.core.metadata.v3 import ArrayV3Metadata
from zarr.storage import LocalStore, MemoryStore, StorePath

from ckpt.backends.base import Previous
from ckpt.backends.decoded_size import require_decodes_within
from ckpt.backends.directory import Describe, DirectoryWriter
from ckpt.backends.zarr_format import DOCUMENT, array_document, chunk_key, compressors_in, require_spec
from ckpt.errors import ConfigurationError, CorruptCheckpointError, sentence
from ckpt.format import zarr_dtypes
from ckpt.format.box import Box, chunks_meeting
from ckpt.format.checkpoint_files import CheckpointFolder
from ckpt.format.consistency import MAX_FILE_BYTES
from ckpt.format.dtypes import bits_of, item_bytes
from ckpt.format.records import ArraySpec
from ckpt.format.strict_json import parse
from ckpt.storage.direct_io import Buffers
from ckpt.storage.file_sink import FileSink


class ZarrBackend:
    """Reads and writes Zarr v3 directories.

    Args:
        compressors: Zarr v3 codecs that turn bytes into fewer bytes, such as
            `[{"name": "zstd", "configuration": {"level": 3, "checksum": false}}]`. None stores raw elements, which load
            faster: only raw chunks are read straight into tensors.
        direct_io: write large chunks past the page cache, where the file system allows it: less processor time, and other files
            stay cached.
        buffer_mib: memory of each rank for direct writes, in MiB, on top of the state.

    Raises:
        ConfigurationError: zarr-python does not know a compressor.
    """

    store = "zarr"

    def __init__(
        self, *, compressors: list[dict[str, Any]] | None = None, direct_io: bool = True, buffer_mib: int = 32
    ) -> None:
        zarr_dtypes.register()
        self._compressors = list(compressors or ())
        _check_compressors(self._compressors)
        self._buffers = Buffers(buffer_mib=buffer_mib, direct_io=direct_io)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Register our data types with zarr-python: a copy may be in another process."""
        zarr_dtypes.register()
        self.__dict__.update(state)

    def writer(
        self, root: Path, rank: int, progress: Callable[[int], None], previous: Previous | None = None
    ) -> DirectoryWriter:
        """Return this rank's writer below the unpublished folder `root`."""
        sink = FileSink(root, rank, progress, self._buffers)
        encode = partial(_compressed, self._compressors) if self._compressors else None
        return DirectoryWriter(sink, self._description(), encode, previous)

    def join(self, root: Path, writers: Sequence[int], progress: Callable[[int], None]) -> list[str]:
        """Do nothing: all ranks write into one directory."""
        return []

    def read(self, root: Path, array: ArraySpec, box: Box, out: torch.Tensor) -> None:
        """Fill `out` (host, shape box.shape) through zarr-python.

        Raises:
            CorruptCheckpointError: the array, or a chunk that `box` meets, is missing or cannot be decoded.
        """
        metadata, grid = _metadata_in(root / array.path)
        dtype = str(metadata.data_type.to_json(zarr_format=3))
        require_spec(ArraySpec(array.path, dtype, tuple(metadata.shape), grid), array)
        compressors = compressors_in([str(one.to_dict()["name"]) for one in metadata.codecs], array.path)
        chunk_bytes = math.prod(array.grid) * item_bytes(array.dtype)
        for number in chunks_meeting(array.shape, array.grid, box):
            file = root / array.path / chunk_key(array, number)
            if not file.is_file():  # zarr-python would hand out zeros in its place
                raise CorruptCheckpointError(f"{array.path}: {file} is missing. Load an earlier checkpoint.")
            require_decodes_within(file, compressors, chunk_bytes)
        try:
            stored = zarr.open_array(store=LocalStore(root, read_only=True), path=array.path, mode="r")
            values = np.asarray(stored[box.slices])
        except (
            Exception
        ) as error:  # codecs raise nearly anything, also an OSError of no number, which is not the system's
            if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None):
                raise
            raise CorruptCheckpointError(
                f"{array.path}: zarr cannot read {box} of {root / array.path}: {sentence(error)}. Load an earlier checkpoint."
            ) from error
        bits = bits_of(out)
        bits[...] = values.view(bits.dtype)

    def _description(self) -> Describe:
        """Return the function that makes the `zarr.json` documents of one save; it asks zarr-python once for arrays stored alike."""

        @cache
        def of_kind(dtype: str, shape: tuple[int, ...], grid: tuple[int, ...]) -> bytes:
            return _document_bytes(_metadata(ArraySpec("", dtype, shape, grid), self._compressors))

        def describe(array: ArraySpec | None) -> bytes:
            return _document_bytes(GroupMetadata()) if array is None else of_kind(array.dtype, array.shape, array.grid)

        return describe


def _compressed(compressors: Sequence[dict[str, Any]], array: ArraySpec, box: Box, host: torch.Tensor) -> bytes:
    """Encode a chunk with zarr-python, by letting it write this one chunk to a store in memory."""
    files: dict[str, Any] = {}
    metadata = _metadata(array, compressors)
    encoder = zarr.Array(zarr.AsyncArray(metadata, StorePath(MemoryStore(files))))
    encoder = encoder.with_config({"write_empty_chunks": True})  # by default an all-zero chunk is left out
    encoder[box.slices] = bits_of(host).view(metadata.data_type.to_native_dtype())
    encoded: bytes = files[chunk_key(array, next(chunks_meeting(array.shape, array.grid, box)))].to_bytes()
    return encoded


def _metadata(array: ArraySpec, compressors: Sequence[dict[str, Any]]) -> ArrayV3Metadata:
    return ArrayV3Metadata.from_dict(array_document(array, compressors))


def _document_bytes(metadata: ArrayV3Metadata | GroupMetadata) -> bytes:
    return json.dumps(metadata.to_dict()).encode()  # zarr-python indents, which takes most of its time


def _metadata_in(folder: Path) -> tuple[ArrayV3Metadata, tuple[int, ...]]:
    """Read the metadata of the array in `folder`; return it and the array's grid.

    Raises:
        CorruptCheckpointError: there is no such file, or zarr-python does not understand it as an array on a regular grid.
    """
    file = folder / DOCUMENT
    try:
        with CheckpointFolder(folder) as opened:
            document = parse(opened.read(DOCUMENT, MAX_FILE_BYTES), str(file))
        metadata = ArrayV3Metadata.from_dict(document)
        grid = metadata.chunk_grid
        if not isinstance(grid, RegularChunkGrid):
            raise ValueError("its chunk grid is not regular")
        return metadata, tuple(grid.chunk_shape)
    except CorruptCheckpointError:
        raise
    except Exception as error:  # zarr-python raises nearly anything
        raise CorruptCheckpointError(
            f"{file} is not the metadata of a Zarr v3 array: {sentence(error)}. Load an earlier checkpoint."
        ) from error


def _check_compressors(compressors: Sequence[dict[str, Any]]) -> None:
    """Refuse codecs that zarr-python does not know, or that are no compressors, before the first save."""
    try:
        codecs = _metadata(ArraySpec("", "uint8", (1,), (1,)), compressors).codecs[1:]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigurationError(
            f"compressors={compressors}: {error}. Give a list of Zarr v3 codecs, such as "
            "[{name: zstd, configuration: {level: 3, checksum: false}}], or nothing."
        ) from error
    for codec in codecs:
        if not isinstance(codec, BytesBytesCodec):
            raise ConfigurationError(
                f"compressors={compressors}: {type(codec).__name__} does not turn bytes into bytes. Give codecs "
                "such as blosc, gzip or zstd, or nothing."
            )
