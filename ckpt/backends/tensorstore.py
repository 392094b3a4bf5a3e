"""Zarr v3 arrays for TensorStore, in an OCDBT database (a few files for any number of tensors) or as files.

With OCDBT each rank writes its own database, `arrays.ocdbt/rank-00003/`, so that no rank waits for another. The lead rank then joins
them by reference into the database `arrays.ocdbt/`, which copies no data. Values lie raw and outside of the B-tree's nodes: each chunk
has an extent, and bytes do not pass through TensorStore, which would hold those of a save in memory. Unchanged values stay in data
files of the previous checkpoint, which are hard-linked (linked_values.py).
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import tensorstore as ts
import torch

from ckpt.backends.base import DATABASE, Contents, Previous, Writer, Written, database_files, no_contents
from ckpt.backends.linked_values import LinkedValues
from ckpt.backends.ocdbt_format import Value, manifest_of, tree_of
from ckpt.backends.zarr import (
    DOCUMENT,
    DirectoryWriter,
    array_document,
    below,
    chunk_key,
    group_document,
    require_spec,
    with_groups_above,
)
from ckpt.errors import (
    LOAD_EARLIER,
    Argument,
    ConfigurationError,
    CorruptCheckpointError,
    StorageError,
    free_bytes,
    needing,
    refused,
)
from ckpt.format.box import Box, chunk_box
from ckpt.format.digests import EMPTY_DIGEST, StreamDigest, digest_of
from ckpt.format.dtypes import bits_of
from ckpt.format.places import ObjectPath, Place
from ckpt.format.records import ArraySpec, ChunkExtent, FileRecord
from ckpt.format.strict_json import read
from ckpt.storage.checkpoint_files import files_below
from ckpt.storage.direct_io import Buffers
from ckpt.storage.files import make_durable
from ckpt.storage.sink import Pieces, Sink, SinkWriter, Stream, padded_pieces, sink_below

POLL_S = 0.05
"""Seconds between two polls of a running commit. Nothing here blocks longer, so that signals and other threads get their turn."""

TREE_CACHE = "cache_pool#tree"

_MANIFEST = "manifest.ocdbt"
_CONFIG = {"max_inline_value_bytes": 0, "compression": None}
_STATUS_ERRORS = (ValueError, RuntimeError, KeyError, NotImplementedError)
"""Exceptions of TensorStore's failed operations, by status code."""
_LOCATION = re.compile(r"(?:btreenode|value):([^:%]*):([^:%]+):([0-9]{1,19}):([0-9]{1,19})")
"""A node or value in `ts.ocdbt.dump`: folder and file, percent-encoded, its first byte, and its length."""


class TensorStoreBackend:
    """Reads and writes Zarr v3 arrays through TensorStore.

    Args:
        kvstore: "ocdbt" stores all arrays in one database below the checkpoint; "file" writes the same directories as the
            zarr backend.
        direct_io: see `ckpt.backends.zarr.ZarrBackend`.

    Attributes:
        buffers: of its writers, kept from save to save.

    Raises:
        ConfigurationError: `kvstore` has another value.
    """

    def __init__(self, *, kvstore: str = "ocdbt", direct_io: bool = True) -> None:
        if kvstore not in ("ocdbt", "file"):
            raise refused("backend.kvstore", kvstore, "ocdbt or file")
        self._in_database = kvstore == "ocdbt"
        self.store = "ocdbt" if self._in_database else "zarr"
        self.buffers = Buffers(direct_io=direct_io)

    def writer(
        self, root: Place, rank: int, progress: Callable[[int], None], previous: Previous | None = None
    ) -> Writer:
        """Return this rank's writer below the unpublished folder `root`."""
        sink = sink_below(root, rank, progress, self.buffers)
        if self._in_database:
            return OcdbtWriter(root, rank, sink, previous)
        return DirectoryWriter(sink, _description, previous=previous)

    def join(
        self, root: Place, writers: Sequence[int], progress: Callable[[int], None], contents: Contents = no_contents
    ) -> list[str] | Mapping[str, bytes]:
        """Join the databases of `writers` by reference. With files there is nothing to join."""
        if not self._in_database:
            return []
        if isinstance(root, Path):
            return _join_databases(root, writers, progress)
        return _write_database(root, contents())

    def read(self, root: Place, array: ArraySpec, box: Box, out: torch.Tensor) -> None:
        """Fill `out` (host, shape box.shape) through TensorStore, in place.

        Raises:
            CorruptCheckpointError: the array, or a chunk that `box` meets, is missing or cannot be decoded.
        """
        if out.numel() == 0:
            return
        if not isinstance(root, Path):
            raise CorruptCheckpointError(
                f"{array.path}: {root} holds an encoded chunk in a database, which no save of this package has made"
            )
        context = mapping_files()
        with refusing(f"{array.path}: tensorstore cannot read {box} of {root}"):
            in_database = {**_database(root / DATABASE), "path": f"{array.path}/"}
            stored = opened(in_database if self._in_database else folder_store(root / array.path), context)
            require_spec(_spec_of(array.path, stored), array)
            read_box(stored, context, box, out)

    def list_arrays(self, root: Path) -> dict[str, ArraySpec]:
        """Return every array in the database below `root`, by path, as TensorStore opens it. See `ForgetsArrays`.

        Raises:
            ConfigurationError: there is no database with kvstore="file".
            CorruptCheckpointError: the database is missing, or TensorStore does not understand the metadata of an array.
        """
        self._require_database("list_arrays")
        context = ts.Context()
        with refusing(f"tensorstore cannot list the arrays of {root}"):
            kvstore = _database(root / DATABASE)
            paths = _array_paths(ts.KvStore.open(kvstore, context=context).result())
            return {path: _spec_of(path, opened({**kvstore, "path": f"{path}/"}, context)) for path in paths}

    def remove(self, root: Path, paths: Collection[str]) -> None:
        """Remove the keys of the arrays at these paths from the database, written together; the ranks' data files stay.

        Raises:
            ConfigurationError: there is no database with kvstore="file".
        """
        self._require_database("remove")
        with _naming_errors(f"remove {len(paths)} arrays from {root / DATABASE}"):
            transaction = ts.Transaction()  # unlike copies, deletions in a transaction keep the other references
            database = ts.KvStore.open(_database(root / DATABASE), transaction=transaction).result()
            for path in paths:
                database.delete_range(ts.KvStore.KeyRange(f"{path}/", f"{path}0")).result()  # "0" comes after "/"
            _wait(transaction.commit_async())

    def _require_database(self, what: str) -> None:
        if not self._in_database:
            raise ConfigurationError(
                f"TensorStoreBackend.{what} needs kvstore='ocdbt': kvstore='file' stores arrays as folders, not in a database"
            )


class _DataFile:
    """One data file of a rank's database, created with its first bytes."""

    def __init__(self, sink: Sink, folder: str) -> None:
        self.name = f"d/{secrets.token_hex(16)}"
        self.path = f"{folder}/{self.name}"
        self.size = 0
        self._sink = sink
        self._stream: Stream | None = None

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many bytes may follow: in an object store a file has a segment at most, or one value."""
        most = self._sink.segment_bytes
        return most is None or self.size == 0 or self.size + num_bytes <= most

    def append(self, key: str, pieces: Iterable[memoryview], num_bytes: int = 0) -> Value:
        """Append a value."""
        at = self.size
        self.append_nodes(pieces, num_bytes)
        return Value(key.encode(), self.name, at, self.size - at)

    def append_nodes(self, pieces: Iterable[memoryview], num_bytes: int = 0) -> None:
        if self._stream is None:
            most = self._sink.segment_bytes
            self._stream = self._sink.open(self.path, None if most is None else max(most, num_bytes))
        self._stream.append(pieces)
        self.size = self._stream.size

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()


class OcdbtWriter(SinkWriter):
    """Appends one rank's values to one data file; `finish` appends the tree. See `ckpt.backends.base.Writer`.

    Unchanged values that must be written again go to a separate file: they will probably stay unchanged, and the next save can link it.
    """

    def __init__(self, root: Place, rank: int, sink: Sink, previous: Previous | None = None) -> None:
        super().__init__(sink)
        self._folder = f"{DATABASE}/rank-{rank:05d}"
        self._is_joined_by_records = sink.segment_bytes is not None
        self._main = _DataFile(sink, self._folder)
        self._unchanged = _DataFile(sink, self._folder)
        self._values: list[Value] = []
        self._linked = LinkedValues(previous, sink, root, f"{self._folder}/d/") if previous is not None else None
        self._rest = StreamDigest()
        self._written = Written()

    def write(self, array: ArraySpec, chunk: int, host: torch.Tensor, digests: tuple[int, ...] | None = None) -> None:
        """Write or link chunk number `chunk` of `array`; `host` is contiguous and has the chunk's clipped shape."""
        box = chunk_box(array.shape, array.grid, chunk)
        assert tuple(host.shape) == box.shape and host.is_contiguous(), f"{array.path}: {host.shape} for {box}"
        source = Pieces(padded_pieces(host, array.grid), digests)
        size = math.prod(array.grid) * host.element_size()
        key = below(array.path, chunk_key(array, chunk))
        if self._linked is None or not self._linked.take(array.path, chunk, key, source, size):
            self._main = self._put(self._main, array.path, chunk, key, source, size)

    def describe(self, arrays: Sequence[ArraySpec], groups: Collection[str] | None = None) -> None:
        """Write the `zarr.json` of these arrays, and of the groups at and above these paths."""
        if self._is_joined_by_records:
            return  # the lead describes all of them in the joined database
        documents = {below(array.path, DOCUMENT): _description(array) for array in arrays}
        if groups is not None:
            documents |= {below(path, DOCUMENT): _description(None) for path in with_groups_above(groups)}
        for key, document in documents.items():
            self._values.append(self._main.append(key, [memoryview(document)]))
            self._rest.update(document)

    def finish(self) -> Written:
        """Write the tree and the manifest, wait for all writes, and return the chunks and files."""
        if self._linked is not None:
            for path, chunk, key, size, source in self._linked.settle():
                self._unchanged = self._put(self._unchanged, path, chunk, key, source, size)
            for key, extent in self._linked.kept.values():
                file = extent.file.removeprefix(f"{self._folder}/")
                self._values.append(Value(key.encode(), file, extent.offset, extent.length))
            self._linked.add_to(self._written)
        if self._is_joined_by_records:
            self._end(self._main)
            self._end(self._unchanged)
            self._sink.flush()
            return self._written
        if self._values:
            nodes, root = tree_of(self._values, self._main.name, self._main.size)
            self._main.append_nodes(map(memoryview, nodes))
            for node in nodes:
                self._rest.update(node)
            manifest = manifest_of(root, self._main.name, os.urandom(16), time.time_ns())
            self.add(f"{self._folder}/{_MANIFEST}", manifest)
            self._written.files |= {
                self._main.path: FileRecord(self._main.size, self._rest.hexdigest()),
                f"{self._folder}/{_MANIFEST}": FileRecord(len(manifest), digest_of(manifest)),
            }
        if self._unchanged.size:
            self._written.files[self._unchanged.path] = FileRecord(self._unchanged.size, EMPTY_DIGEST)
        self._main.close()
        self._unchanged.close()
        self._sink.flush()
        return self._written

    def _put(self, file: _DataFile, path: str, chunk: int, key: str, source: Pieces, size: int) -> _DataFile:
        """Append a chunk to a data file, or to a new one where that is full; return the file."""
        if not file.has_room(size):
            self._end(file)
            file = _DataFile(self._sink, self._folder)
        value = file.append(key, source.digested(), size)
        self._values.append(value)
        self._written.chunks[path, chunk] = ChunkExtent(file.path, value.offset, value.length, source.written(path))
        return file

    def _end(self, file: _DataFile) -> None:
        """End a data file that holds chunks alone."""
        file.close()
        if file.size:
            self._written.files[file.path] = FileRecord(file.size, EMPTY_DIGEST)


def values_in(
    database: Path, opening: Callable[[str], object] = lambda file: None
) -> Iterator[tuple[bytes, Value | bytes]]:
    """Yield every key of the newest version of a database, in order, and its value: its bytes if they lie in the B-tree, or its place.

    Args:
        opening: called with each file of the B-tree, relative to the database, before it is read.

    Raises:
        CorruptCheckpointError: the B-tree has a node twice, or a place that names no file.
        Exceptions of TensorStore: see `refusing`.
    """
    base = ts.KvStore.open(folder_store(database)).result()
    versions = ts.ocdbt.dump(base).result().get("versions")
    if not versions:
        raise CorruptCheckpointError(f"{database}: the manifest of the database lists no version")
    newest = versions[-1]["root"]
    nodes = [(newest["location"], b"")] if "location" in newest else []
    seen: set[Value] = set()
    while nodes:
        location, prefix = nodes.pop()
        place = _place_of(b"", location, database)
        if place in seen:
            raise CorruptCheckpointError(f"{database}: the B-tree has the node {location} twice")
        seen.add(place)
        opening(place.file)
        node = ts.ocdbt.dump(base, location).result()
        if node["height"] > 0:
            below = [(entry["location"], prefix + entry["subtree_common_prefix"]) for entry in node["entries"]]
            nodes += reversed(below)
            continue
        for entry in node["entries"]:
            key = prefix + entry["key"]
            yield (
                key,
                entry["inline_value"] if "inline_value" in entry else _place_of(key, entry["indirect_value"], database),
            )


def _place_of(key: bytes, location: str, database: Path) -> Value:
    found = _LOCATION.fullmatch(location)
    if found is None:
        raise CorruptCheckpointError(f"{database}: {location!r:.200} names no bytes of a file")
    folder, file, offset, length = found.groups()
    return Value(key, folder + file, int(offset), int(length))


def _values_of(database: Path) -> Iterator[Value]:
    """Yield every value of the newest version of a database of this package.

    Raises:
        StorageError: a value lies inside a node of the B-tree, where it has no extent.
    """
    for key, value in values_in(database):
        if not isinstance(value, Value):
            raise StorageError(
                f"{key.decode()!r} lies inside a B-tree node of {database}, without an extent of its own"
            )
        yield value


def _join_databases(root: Path, writers: Sequence[int], progress: Callable[[int], None]) -> list[str]:
    """Copy the ranks' databases into the joined database by reference. Returns its files."""
    # One context for both sides, as copying by reference needs. It does not sync: `make_durable` does, once for all files.
    context = ts.Context({"file_io_sync": False})
    database = root / DATABASE
    folders = [database / f"rank-{rank:05d}" for rank in writers]
    for rank, folder in zip(writers, folders, strict=True):
        if not (folder / _MANIFEST).is_file():
            raise StorageError(f"{folder} is missing, where rank {rank} has committed its arrays")
    needed = sum((folder / _MANIFEST).stat().st_size for folder in folders)
    with (
        needing(_MANIFEST, lambda: needed, free_bytes(root)),
        _naming_errors(f"join the databases in {database}"),
    ):
        joined = ts.KvStore.open({**_database(database), "config": _CONFIG}, context=context).result()
        # Not in a transaction: TensorStore would silently drop the references, and every value would be empty.
        parts = [ts.KvStore.open(_database(folder), context=context).result() for folder in folders]
        failed: list[Exception] = []
        for copy in [part.experimental_copy_range_to(joined) for part in parts]:
            try:
                _wait(copy)
            except Exception as error:  # the other copies still write, and would create a removed directory again
                failed.append(error)
            progress(1)
        if failed:
            raise failed[0]
        _check_joined(database, folders)
    sizes = {file: (root / file).stat().st_size for file in database_files(root)}
    make_durable(root, sizes, {root / folder for file in sizes for folder in Path(file).parents}, progress)
    return list(sizes)


def _write_database(
    root: ObjectPath, contents: Iterable[tuple[ArraySpec, Mapping[int, ChunkExtent]]]
) -> Mapping[str, bytes]:
    """Write a database over the data files of all ranks, by the places in their records. Returns its files, and what is in them.

    TensorStore copies no range of a database in an object store by reference.
    """
    values, documents, groups = [], {}, set()
    for array, chunks in contents:
        documents[below(array.path, DOCUMENT)] = _description(array)
        groups.add(array.path.rpartition("/")[0])
        for number, extent in chunks.items():
            key, file = below(array.path, chunk_key(array, number)), extent.file.removeprefix(f"{DATABASE}/")
            values.append(Value(key.encode(), file, extent.offset, extent.length))
    documents |= {below(path, DOCUMENT): _description(None) for path in with_groups_above(groups)}
    name, data = f"d/{secrets.token_hex(16)}", bytearray()
    for key, document in documents.items():
        values.append(Value(key.encode(), name, len(data), len(document)))
        data += document
    nodes, node = tree_of(values, name, len(data))
    for member in nodes:
        data += member
    manifest = manifest_of(node, name, os.urandom(16), time.time_ns())
    made = {f"{DATABASE}/{name}": bytes(data), f"{DATABASE}/{_MANIFEST}": manifest}
    with files_below(root) as files:
        for path, content in made.items():
            files.write(path, content)
    return made


def _check_joined(database: Path, folders: Sequence[Path]) -> None:
    """Raise a `StorageError` unless the joined database has exactly the ranks' values, in the same places."""
    expected = {
        (value.key, f"{folder.name}/{value.file}", value.offset) for folder in folders for value in _values_of(folder)
    }
    found = {(value.key, value.file, value.offset) for value in _values_of(database)}
    if found != expected:
        raise StorageError(
            f"{database} holds {len(found)} values where {len(expected)} were joined, {len(found & expected)} of them in their "
            "places. ",
            "Save with ", Argument("backend.kvstore", "file"), ", and report the version of tensorstore.",
        )


def _wait(future: ts.Future[Any]) -> Any:
    """Return the result of a future. The wait wakes every `POLL_S`, so that signals and other threads get their turn."""
    while True:
        try:
            return future.result(timeout=POLL_S)
        except TimeoutError:
            continue


@contextmanager
def _naming_errors(attempt: str) -> Iterator[None]:
    """Turn TensorStore's exceptions for failed file operations into an `OSError` of the file, or a `StorageError`."""
    try:
        yield
    except OSError:
        raise  # already our own, or the file system's
    except _STATUS_ERRORS as error:
        text = _one_line(error)
        code = re.search(r"os_error_code='(\d+)'", text)
        paths = re.findall(r'"(/[^"]*)"', text)
        if code and paths:
            raise OSError(int(code[1]), os.strerror(int(code[1])), paths[-1].removesuffix(".__lock")) from error
        raise StorageError(f"tensorstore could not {attempt}: {text}") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _array_paths(kvstore: ts.KvStore) -> list[str]:
    """Return the sorted paths of the arrays in a store. Groups, which have metadata, too, are left out."""
    documents = [key.decode() for key in kvstore.list().result() if key.endswith(f"/{DOCUMENT}".encode())]
    values = [kvstore.read(key) for key in documents]
    return sorted(
        key.removesuffix(f"/{DOCUMENT}")
        for key, value in zip(documents, values, strict=True)
        if read(value.result().value, _Node, key).node_type == "array"
    )


class _Node(msgspec.Struct):
    node_type: Literal["array", "group"]


@contextmanager
def refusing(attempt: str) -> Iterator[None]:
    """Turn TensorStore's exceptions for arrays that it cannot read into a `CorruptCheckpointError`."""
    try:
        yield
    except CorruptCheckpointError:
        raise
    except (*_STATUS_ERRORS, OSError) as error:
        raise CorruptCheckpointError(f"{attempt}: {_one_line(error)}", LOAD_EARLIER) from error


def opened(kvstore: dict[str, Any], context: ts.Context | None = None, *, driver: str = "zarr3") -> ts.TensorStore:
    """Open the array in a store for reading. A missing chunk is an error, not zeros, TensorStore's default."""
    spec = {"driver": driver, "kvstore": kvstore, "fill_missing_data_reads": False}
    return ts.open(spec, open=True, read=True, context=context).result()


def read_box(stored: ts.TensorStore, context: ts.Context, box: Box, out: torch.Tensor) -> None:
    """Fill `out` (host, shape box.shape) with a box of an open array, in place."""
    values = bits_of(out).view(stored.dtype.numpy_dtype)
    wanted = stored[box.slices].translate_to[(0,) * len(box.shape)] if box.shape else stored
    ts.array(values, context=context).write(wanted).result()


def mapping_files(*, tree_cache_bytes: int = 0) -> ts.Context:
    """Return a context in which files are mapped, not read.

    Args:
        tree_cache_bytes: most bytes of decoded B-tree nodes that are kept, for databases opened with `TREE_CACHE`.
    """
    return ts.Context({"file_io_mode": {"mode": "memmap"}, TREE_CACHE: {"total_bytes_limit": tree_cache_bytes}})


def _spec_of(path: str, stored: ts.TensorStore) -> ArraySpec:
    grid = stored.chunk_layout.write_chunk.shape
    return ArraySpec(path, stored.dtype.name, tuple(stored.shape), tuple(side or 1 for side in grid or ()))


def folder_store(folder: Path) -> dict[str, Any]:
    """Return the store of the files in a folder."""
    return {"driver": "file", "path": f"{folder.resolve()}/"}  # not a URL, which would be percent-decoded


def _database(folder: Path) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": folder_store(folder)}


def _description(array: ArraySpec | None) -> bytes:
    """Return the `zarr.json` of an array, or of a group."""
    return json.dumps(group_document() if array is None else array_document(array)).encode()
