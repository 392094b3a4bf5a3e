"""Zarr v3 on a shared file system: an ordinary directory, one file for each chunk, that `zarr.open` reads without our code.

Raw chunks, the documents that describe arrays, and names are written without zarr-python. It encodes and decodes compressed chunks, and is
imported at the first of them; it makes the metadata of their arrays. Metadata is never opened: Zarr has no lock between processes, and
attribute caches may hide another rank's metadata. An unchanged chunk is a hard link to its file in the previous checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import torch

from ckpt.backends.base import Contents, Previous, Written, no_contents, staged_digests
from ckpt.backends.decoded_size import require_decodes_within
from ckpt.errors import LOAD_EARLIER, Argument, ConfigurationError, CorruptCheckpointError, importing, sentence
from ckpt.format.box import Box, chunk_box, chunks_meeting
from ckpt.format.consistency import MAX_FILE_BYTES
from ckpt.format.digests import EMPTY_DIGEST, digest_of
from ckpt.format.dtypes import AS_INTEGERS, bits_of, item_bytes
from ckpt.format.places import Place
from ckpt.format.records import ArraySpec, ChunkExtent, FileRecord, changed_in_memory
from ckpt.format.strict_json import Shape, read
from ckpt.storage.checkpoint_files import files_below
from ckpt.storage.direct_io import Buffers
from ckpt.storage.sink import Pieces, Sink, SinkWriter, padded_pieces, sink_below

DOCUMENT = "zarr.json"
"""Name of the file, or key, that describes an array or a group."""


def array_document(array: ArraySpec, compressors: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Return the `zarr.json` of an array: little-endian, row-major, chunk keys such as `c/0/1`, fill value zero."""
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(array.shape),
        "data_type": described_as(array.dtype),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(array.grid)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": _zero(array.dtype),
        "codecs": [_bytes_codec(array.dtype), *compressors],
        "attributes": {},
    }


class _Cells(msgspec.Struct):
    chunk_shape: Shape


class _Grid(msgspec.Struct):
    name: Literal["regular"]
    configuration: _Cells


class _Codec(msgspec.Struct):
    name: str


class _Document(msgspec.Struct):
    """The schema of an array's `zarr.json`: the fields that the manifest has, too."""

    zarr_format: Literal[3]
    node_type: Literal["array"]
    shape: Shape
    data_type: str
    chunk_grid: _Grid
    codecs: list[_Codec] = []


def spec_in(document: bytes, path: str) -> tuple[ArraySpec, list[str]]:
    """Parse the `zarr.json` of the array at `path`; return its spec, and the names of the codecs of its chunks, the outermost last.

    Raises:
        CorruptCheckpointError: it does not describe an array as this package writes them.
    """
    parsed = read(document, _Document, below(path, DOCUMENT))
    codecs = [codec.name for codec in parsed.codecs]
    return ArraySpec(path, parsed.data_type, parsed.shape, parsed.chunk_grid.configuration.chunk_shape), codecs


def compressors_in(codecs: Sequence[str], path: str) -> Sequence[str]:
    """Return the codecs of an array that turn bytes into bytes.

    Raises:
        CorruptCheckpointError: the elements are not simply turned into bytes before, as in every array of this package.
    """
    if codecs[:1] != ["bytes"]:
        raise CorruptCheckpointError(
            f"{path}: its {DOCUMENT} names the codecs {list(codecs)!r:.200}, where the first should be bytes",
            LOAD_EARLIER,
        )
    return codecs[1:]


def require_spec(described: ArraySpec, array: ArraySpec) -> None:
    """Refuse an array whose metadata differs from the manifest's entry: libraries allocate memory by the metadata.

    Raises:
        CorruptCheckpointError
    """
    if described != replace(array, dtype=described_as(array.dtype)):
        raise CorruptCheckpointError(
            f"{array.path}: its {DOCUMENT} describes {described.dtype} of shape {list(described.shape)} in chunks of "
            f"{list(described.grid)}, the manifest {array.dtype} of {list(array.shape)} in {list(array.grid)}",
            LOAD_EARLIER,
        )


def group_document() -> dict[str, Any]:
    """Return the `zarr.json` of a group."""
    return {"zarr_format": 3, "node_type": "group", "attributes": {}}


def with_groups_above(groups: Iterable[str]) -> list[str]:
    """Return the paths of these groups and of all groups above them, outermost first; the checkpoint itself is ""."""
    found = {""}
    for group in groups:
        parts = group.split("/")
        found.update("/".join(parts[:depth]) for depth in range(1, len(parts) + 1))
    return sorted(found)


def below(path: str, name: str) -> str:
    """Join the path of an array or group, which may be "", with a file name or key."""
    return f"{path}/{name}" if path else name


def chunk_key(array: ArraySpec, number: int) -> str:
    """Return the key of chunk `number` (row-major) below its array, such as `c/0/1`; for a 0-dim array `c`."""
    offsets = chunk_box(array.shape, array.grid, number).offsets
    return "/".join(["c", *(str(offset // side) for offset, side in zip(offsets, array.grid, strict=True))])


def described_as(dtype: str) -> str:
    """Return the data type that an array's `zarr.json` names: its own, or that of integers of its size."""
    return AS_INTEGERS.get(dtype, dtype)


def _zero(dtype: str) -> object:
    """The fill value, whose bits are zero."""
    if dtype == "bool":
        return False
    if dtype == "float8_e8m0fnu":  # has no zero
        return "0x00"
    if dtype in ("complex64", "complex128"):
        return [0.0, 0.0]
    return 0.0 if "float" in described_as(dtype) else 0


def _bytes_codec(dtype: str) -> dict[str, Any]:
    """Return the codec of raw elements. For elements of one byte zarr-python writes no endianness."""
    if item_bytes(dtype) == 1:
        return {"name": "bytes"}
    return {"name": "bytes", "configuration": {"endian": "little"}}


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
