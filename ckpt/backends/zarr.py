"""Zarr v3 on a shared file system: an ordinary directory of chunk files that `zarr.open` reads without our code.

Raw chunks and their metadata are written as files (directory.py), without zarr-python. It encodes and decodes compressed chunks, and
is imported at the first of them; it makes the metadata of their arrays.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ckpt.backends.base import Contents, Previous, no_contents
from ckpt.backends.decoded_size import require_decodes_within
from ckpt.backends.directory import Describe, DirectoryWriter
from ckpt.backends.zarr_format import (
    DOCUMENT,
    array_document,
    below,
    chunk_key,
    compressors_in,
    group_document,
    require_spec,
    spec_in,
)
from ckpt.errors import LOAD_EARLIER, Argument, ConfigurationError, CorruptCheckpointError, sentence
from ckpt.errors.imports import importing
from ckpt.format.box import Box, chunks_meeting
from ckpt.format.consistency import MAX_FILE_BYTES
from ckpt.format.dtypes import bits_of, item_bytes
from ckpt.format.places import Place
from ckpt.format.records import ArraySpec
from ckpt.storage.direct_io import Buffers
from ckpt.storage.files_of import files_below
from ckpt.storage.sink import sink_below


class ZarrBackend:
    """Reads and writes Zarr v3 directories.

    Args:
        compressors: Zarr v3 codecs that turn bytes into fewer bytes, such as
            `[{"name": "zstd", "configuration": {"level": 3, "checksum": false}}]`. None stores raw elements, which load
            faster: only raw chunks are read straight into tensors.
        direct_io: write large chunks past the page cache, where the file system allows it: less processor time, and other files
            stay cached.

    Attributes:
        buffers: of its writers, kept from save to save.
        chunk_memories: how many times a chunk may be in memory on its way: laid out, encoded, and in zarr-python's buffers.

    Raises:
        ConfigurationError: zarr-python does not know a compressor, or cannot be imported and there are compressors.
    """

    store = "zarr"

    def __init__(
        self,
        *,
        compressors: list[dict[str, Any]] | None = None,
        direct_io: bool = True,
    ) -> None:
        self._compressors = list(compressors or ())
        if self._compressors:
            _check_compressors(self._compressors)
        self.chunk_memories = 3 if self._compressors else 1
        self.buffers = Buffers(direct_io=direct_io)

    def writer(
        self, root: Place, rank: int, progress: Callable[[int], None], previous: Previous | None = None
    ) -> DirectoryWriter:
        """Return this rank's writer below the unpublished folder `root`."""
        sink = sink_below(root, rank, progress, self.buffers)
        encode = partial(_compressed, self._compressors) if self._compressors else None
        return DirectoryWriter(sink, self._description(), encode, previous)

    def join(
        self, root: Place, writers: Sequence[int], progress: Callable[[int], None], contents: Contents = no_contents
    ) -> list[str]:
        """Do nothing: all ranks write into one directory."""
        return []

    def read(self, root: Place, array: ArraySpec, box: Box, out: torch.Tensor) -> None:
        """Fill `out` (host, shape box.shape) through zarr-python.

        Raises:
            CorruptCheckpointError: the array, or a chunk that `box` meets, is missing or cannot be decoded.
            ConfigurationError: zarr-python cannot be imported.
        """
        zarr = _zarr_python()
        path = below(array.path, DOCUMENT)
        file, copies = path, {}
        with files_below(root) as files:
            try:
                document = files.read(path, MAX_FILE_BYTES)
                described, codecs = spec_in(document, array.path)
                require_spec(described, array)
                compressors = compressors_in(codecs, array.path)
                chunk_bytes = math.prod(array.grid) * item_bytes(array.dtype)
                copies[path] = document
                for number in chunks_meeting(array.shape, array.grid, box):
                    file = below(array.path, chunk_key(array, number))
                    require_decodes_within(files, file, compressors, chunk_bytes)
                    if not isinstance(root, Path):
                        copies[file] = files.read(file, MAX_FILE_BYTES)
            except FileNotFoundError as error:  # zarr-python would hand out zeros in its place
                raise CorruptCheckpointError(
                    f"{array.path}: {root / file} is missing", LOAD_EARLIER
                ) from error
        try:
            stored = zarr.open_array(store=_zarr_store(root, copies), path=array.path, mode="r")
            values = np.asarray(stored[box.slices])
        except Exception as error:
            # Codecs raise nearly anything, also an OSError of no number, which is not the system's.
            if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None):
                raise
            raise CorruptCheckpointError(
                f"{array.path}: zarr cannot read {box} of {root / array.path}: {sentence(error)}", LOAD_EARLIER
            ) from error
        bits = bits_of(out)
        bits[...] = values.view(bits.dtype)

    def _description(self) -> Describe:
        """Return the function that makes the `zarr.json` documents of one save; it asks zarr-python once for arrays stored alike."""

        @cache
        def of_kind(dtype: str, shape: tuple[int, ...], grid: tuple[int, ...]) -> bytes:
            array = ArraySpec("", dtype, shape, grid)
            if not self._compressors:
                return json.dumps(array_document(array)).encode()
            return json.dumps(_in_memory(array, self._compressors, {}).metadata.to_dict()).encode()

        def describe(array: ArraySpec | None) -> bytes:
            if array is None:
                return json.dumps(group_document()).encode()
            return of_kind(array.dtype, array.shape, array.grid)

        return describe


@cache
def _zarr_python() -> Any:
    """Import zarr-python, which then knows our data types.

    Raises:
        ConfigurationError: it cannot be imported.
    """
    with importing("compressed chunks of the format zarr"):
        import zarr
        import zarr.buffer
        import zarr.storage

        from ckpt.format import zarr_dtypes

        zarr_dtypes.register()
    return zarr


def _zarr_store(root: Place, copies: Mapping[str, bytes]) -> Any:
    """Return zarr-python's store of a checkpoint's folder; of an object store, of what was read from it."""
    zarr = _zarr_python()
    if isinstance(root, Path):
        return zarr.storage.LocalStore(root, read_only=True)
    return zarr.storage.MemoryStore({path: zarr.buffer.cpu.Buffer.from_bytes(data) for path, data in copies.items()})


def _compressed(compressors: Sequence[dict[str, Any]], array: ArraySpec, box: Box, host: torch.Tensor) -> bytes:
    """Encode a chunk with zarr-python, by letting it write this one chunk to a store in memory."""
    files: dict[str, Any] = {}
    encoder = _in_memory(array, compressors, files)
    encoder = encoder.with_config({"write_empty_chunks": True})  # by default an all-zero chunk is left out
    encoder[box.slices] = bits_of(host).view(encoder.dtype)
    encoded: bytes = files[chunk_key(array, next(chunks_meeting(array.shape, array.grid, box)))].to_bytes()
    return encoded


def _in_memory(array: ArraySpec, compressors: Sequence[dict[str, Any]], files: dict[str, Any]) -> Any:
    """Return a `zarr.Array` that keeps its chunks and its document, which zarr-python completes, in `files`: key -> buffer."""
    zarr = _zarr_python()
    document = json.dumps(array_document(array, compressors)).encode()
    files[DOCUMENT] = zarr.buffer.cpu.Buffer.from_bytes(document)
    return zarr.open_array(zarr.storage.MemoryStore(files), mode="r+", zarr_format=3)


def _check_compressors(compressors: Sequence[dict[str, Any]]) -> None:
    """Refuse codecs that zarr-python does not know, or that do not turn bytes into bytes, before the first save."""
    try:
        _in_memory(ArraySpec("", "uint8", (1,), (1,)), compressors, {})
    except (ValueError, TypeError, KeyError) as error:
        reason = str(error).rstrip(".")
        raise ConfigurationError(
            Argument("backend.compressors", compressors),
            f": {reason}. Give a list of Zarr v3 codecs that turn bytes into bytes, such as "
            "[{name: zstd, configuration: {level: 3, checksum: false}}], or nothing."
        ) from error
