"""Zarr v3 arrays written and read by TensorStore, in an OCDBT database (few files however many tensors) or as files.

In OCDBT each rank commits one transaction to a database of its own, `arrays.ocdbt/rank-00003/`, so that no rank waits for
another; the lead then joins them by reference in the database `arrays.ocdbt/`, which copies no data. Values lie raw and
outside of the B-tree's nodes, so that every chunk has an extent.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorstore as ts
import torch
import xxhash

from ckpt.backends.base import BLOCK_BYTES, DATABASE, ArraySpec, ChunkExtent, FileRecord, Writer, Written
from ckpt.backends.files import PIECE_BYTES, make_durable, padded_pieces, push, remove_arrays, write_documents
from ckpt.backends.zarr_format import DOCUMENT, array_document, chunk_key, group_document, groups_above
from ckpt.blocks import EMPTY_DIGEST, BlockDigests
from ckpt.box import Box, chunk_box
from ckpt.dtypes import bits_of
from ckpt.errors import ConfigurationError, CorruptCheckpointError, StorageError

SMALL_BYTES = 32 << 10
"""Chunks up to this size are handed over as bytes: opening an array costs 80 us, copying them less."""

POLL_S = 0.05
"""Between two looks at a running commit. Nothing here blocks for longer, so signals and other threads get their turn."""

_CONFIG = {"max_inline_value_bytes": 0, "compression": None}
_STATUS_ERRORS = (ValueError, RuntimeError, KeyError, NotImplementedError)
"""What TensorStore raises for a failed operation, depending on its status code."""


class TensorStoreBackend:
    """Reads and writes Zarr v3 arrays through TensorStore.

    Args:
        kvstore: "ocdbt" keeps all arrays in one database below the checkpoint; "file" makes the same directories as the
            zarr backend does.

    Raises:
        ConfigurationError: another kvstore was asked for.
    """

    def __init__(self, *, kvstore: str = "ocdbt") -> None:
        if kvstore not in ("ocdbt", "file"):
            raise ConfigurationError(f"ckpt.kvstore={kvstore!r} is not known; choose ocdbt or file")
        self._in_database = kvstore == "ocdbt"
        self.store = "ocdbt" if self._in_database else "zarr"

    def writer(self, root: Path, rank: int, progress: Callable[[int], None]) -> Writer:
        """Return this rank's writer below the unpublished folder `root`."""
        if self._in_database:
            return OcdbtWriter(root, rank, progress)
        return FileWriter(root, progress)

    def lay_out(
        self,
        root: Path,
        arrays: Sequence[ArraySpec],
        writers: Sequence[int],
        progress: Callable[[int], None] = lambda _: None,
    ) -> list[str]:
        """Write the `zarr.json` of every array and group; in OCDBT also join the databases of `writers`."""
        documents = {_below(path, DOCUMENT): _json(group_document()) for path in groups_above(arrays)}
        documents |= {_below(array.path, DOCUMENT): _json(array_document(array)) for array in arrays}
        if self._in_database:
            return _join_databases(root, documents, writers, progress)
        return write_documents(root, documents, progress)

    def read(self, root: Path, array: ArraySpec, box: Box, out: torch.Tensor) -> None:
        """Fill `out` (host, shape box.shape) through TensorStore, in place.

        Raises:
            CorruptCheckpointError: the array, or a chunk that `box` meets, is missing or cannot be decoded.
        """
        if out.numel() == 0:
            return
        context = ts.Context({"file_io_mode": {"mode": "memmap"}})
        try:
            stored = _opened(self._kvstore(root), array.path, context)
            values = bits_of(out).view(stored.dtype.numpy_dtype)
            wanted = stored[box.slices].translate_to[(0,) * len(box.shape)] if box.shape else stored
            ts.array(values, context=context).write(wanted).result()
        except (*_STATUS_ERRORS, OSError) as error:
            raise CorruptCheckpointError(
                f"{array.path}: tensorstore cannot read {box} of {root}: {_one_line(error)}. Load an earlier checkpoint."
            ) from error

    def list_arrays(self, root: Path) -> dict[str, ArraySpec]:
        """Return every array below `root`, by path, as TensorStore opens it.

        Raises:
            CorruptCheckpointError: there is no database, or an array's metadata is not what TensorStore understands.
        """
        context = ts.Context()
        try:
            kvstore = self._kvstore(root)
            paths = _array_paths(ts.KvStore.open(kvstore, context=context).result())
            return {path: _spec_of(path, _opened(kvstore, path, context)) for path in paths}
        except (*_STATUS_ERRORS, OSError) as error:
            raise CorruptCheckpointError(
                f"tensorstore cannot list the arrays of {root}: {_one_line(error)}. Load an earlier checkpoint."
            ) from error

    def remove(self, root: Path, paths: Collection[str]) -> None:
        """Remove the arrays at these paths. In OCDBT their keys go, written together; the ranks' data files stay.

        One that is gone already is no error.
        """
        if not self._in_database:
            remove_arrays(root, [path for path in paths if (root / path).is_dir()])
            return
        with _naming_errors(f"remove {len(paths)} arrays from {root / DATABASE}"):
            transaction = ts.Transaction()  # other than copies, deletions leave the references that stay as they are
            database = ts.KvStore.open(self._kvstore(root), transaction=transaction).result()
            for path in paths:
                database.delete_range(ts.KvStore.KeyRange(f"{path}/", f"{path}0")).result()  # "0" comes after "/"
            _wait(transaction.commit_async())

    def _kvstore(self, root: Path) -> dict[str, Any]:
        return _database(root / DATABASE) if self._in_database else _folder(root)


class OcdbtWriter:
    """One rank's side of one save: chunks are handed over by reference, and go to disk when `finish` commits them all."""

    def __init__(self, root: Path, rank: int, progress: Callable[[int], None]) -> None:
        self._root = root
        self._folder = _database_of(root, rank)
        self._progress = progress
        self._transaction = ts.Transaction()
        self._chunks = _Chunks(_new_database(self._folder), _unsynced(), self._transaction)
        self._digests: dict[tuple[str, int], tuple[int, ...]] = {}
        self._names: dict[str, tuple[str, int]] = {}

    def write(self, array: ArraySpec, chunk: int, host: torch.Tensor) -> None:
        """Take chunk number `chunk` of `array`; `host` has its clipped shape, and is read again in `finish`."""
        with _naming_errors(f"write {array.path} to {self._folder}"):
            self._chunks.write(array, chunk, host).result()
        self._digests[array.path, chunk] = _digests(array, host)
        self._names[_below(array.path, chunk_key(array, chunk))] = array.path, chunk
        self._progress(host.nbytes)

    def finish(self) -> Written:
        """Commit, make the database's files durable, and say where in them the chunks lie."""
        written = Written()
        if not self._names:
            return written
        with _naming_errors(f"commit {self._folder}"):
            _wait(self._transaction.commit_async(), _Growth(self._folder / "d", self._progress).look)
        self._chunks.close()
        sizes = _sizes_below(self._folder, self._root)
        make_durable(self._root, sizes, _folders_above(self._root, sizes), self._progress)
        written.chunks = self._extents()
        written.files = _records(self._root, sizes, written.chunks.values())
        return written

    def abort(self) -> None:
        """Drop the transaction. The folder, if there is one already, stays until it is removed."""
        self._transaction.abort()
        self._chunks.close()

    def _extents(self) -> dict[tuple[str, int], ChunkExtent]:
        """Return where TensorStore has put every chunk."""
        folder = self._folder.relative_to(self._root).as_posix()
        extents = {
            self._names[value.key]: ChunkExtent(
                f"{folder}/{value.file}", value.offset, value.length, self._digests[self._names[value.key]], BLOCK_BYTES
            )
            for value in _values_of(self._folder)
        }
        if extents.keys() != self._digests.keys():
            raise StorageError(
                f"{self._folder} holds {len(extents)} chunks after the commit of {len(self._digests)}. Save with "
                "ckpt.kvstore=file, and report the versions of tensorstore and of the file system."
            )
        return extents


class FileWriter:
    """One rank's side of one save into ordinary Zarr v3 directories: writes start at once and run side by side."""

    def __init__(self, root: Path, progress: Callable[[int], None]) -> None:
        self._root = root
        self._progress = progress
        self._chunks = _Chunks(_folder(root), _unsynced())
        self._running: deque[tuple[str, ts.Future[Any]]] = deque()
        self._written = Written()

    def write(self, array: ArraySpec, chunk: int, host: torch.Tensor) -> None:
        """Start to write chunk number `chunk` of `array`; `host` has its clipped shape, and is read until `finish`."""
        file = _below(array.path, chunk_key(array, chunk))
        with _naming_errors(f"write {self._root / file}"):
            self._running.append((file, self._chunks.write(array, chunk, host)))
        size = _cell_bytes(array, host)
        self._written.chunks[array.path, chunk] = ChunkExtent(file, 0, size, _digests(array, host), BLOCK_BYTES)
        self._written.files[file] = FileRecord(size, EMPTY_DIGEST)
        while self._running and self._running[0][1].done():
            self._settle_first()

    def finish(self) -> Written:
        """Wait for all writes and make their files durable, once for all of them."""
        while self._running:
            self._settle_first()
        self._chunks.close()
        sizes = {file: record.size for file, record in self._written.files.items()}
        make_durable(self._root, sizes, _folders_above(self._root, sizes), self._progress)
        return self._written

    def abort(self) -> None:
        """Wait for the writes that run, whatever becomes of them: nothing may appear once the folder is removed."""
        while self._running:
            with suppress(StorageError, OSError):
                self._settle_first()
        self._chunks.close()

    def _settle_first(self) -> None:
        """Wait for the oldest write."""
        file, future = self._running.popleft()
        growth = _Growth((self._root / file).parent, self._progress)
        with _naming_errors(f"write {self._root / file}"):
            _wait(future, growth.look)
        push(self._root / file, 0, self._written.files[file].size)
        self._progress(self._written.files[file].size)


class _Chunks:
    """Hands whole chunks to TensorStore without reading, and mostly without copying, anything."""

    def __init__(self, kvstore: dict[str, Any], context: ts.Context, transaction: ts.Transaction | None = None) -> None:
        self._kvstore = kvstore
        self._context = context
        self._transaction = transaction
        self._bytes: ts.KvStore | None = None
        self._last: tuple[str, ts.TensorStore] | None = None

    def write(self, array: ArraySpec, chunk: int, host: torch.Tensor) -> ts.Future[Any]:
        """Return the future of the write. `host` must keep its values until everything is committed."""
        box = chunk_box(array.shape, array.grid, chunk)
        assert tuple(host.shape) == box.shape and host.is_contiguous(), f"{array.path}: {host.shape} for {box}"
        if _cell_bytes(array, host) <= SMALL_BYTES:
            return self._values().write(_below(array.path, chunk_key(array, chunk)), _padded(array, host))
        opened = self._array(array)
        values = bits_of(host).view(opened.dtype.numpy_dtype)
        return opened[box.slices].write(values, can_reference_source_data_indefinitely=True).commit

    def close(self) -> None:
        """Let go of what was opened, and of the memory it refers to."""
        self._bytes = self._last = self._transaction = None

    def _values(self) -> ts.KvStore:
        if self._bytes is None:
            self._bytes = ts.KvStore.open(self._kvstore, context=self._context, transaction=self._transaction).result()
        return self._bytes

    def _array(self, array: ArraySpec) -> ts.TensorStore:
        """Return the array, opened by what its metadata will be: the lead writes that at some other time."""
        if self._last is None or self._last[0] != array.path:
            spec = {
                "driver": "zarr3",
                "kvstore": {**self._kvstore, "path": f"{self._kvstore.get('path', '')}{array.path}/"},
                "metadata": array_document(array),
                "store_data_equal_to_fill_value": True,
            }
            opened = ts.open(
                spec, open=True, assume_metadata=True, context=self._context, transaction=self._transaction
            ).result()
            self._last = array.path, opened
        return self._last[1]


class _Growth:
    """Looks at files that someone else is writing: what is new counts as progress, and is sent on its way to the disk."""

    def __init__(self, folder: Path, progress: Callable[[int], None]) -> None:
        self._folder = folder
        self._progress = progress
        self._seen: dict[str, int] = {}

    def look(self) -> None:
        # What is not made yet, or renamed at this moment, the next look will see.
        with suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                self._look_at(entry)

    def _look_at(self, entry: os.DirEntry[str]) -> None:
        name = entry.name.removesuffix(".__lock")  # while it is being written
        seen, size = self._seen.get(name, 0), entry.stat().st_size
        if size > seen:
            self._seen[name] = size
            push(Path(entry.path), seen, size - seen)
            self._progress(size - seen)


@dataclass(frozen=True, slots=True)
class _Value:
    """Where the value of one key lies; `file` is relative to the database."""

    key: str
    file: str
    offset: int
    length: int


def _values_of(database: Path) -> Iterator[_Value]:
    """Yield every value of the newest version of a database, in the order of the keys.

    Raises:
        StorageError: a value lies inside a node of the B-tree, where no extent can name it.
    """
    base = ts.KvStore.open(_folder(database)).result()
    newest = ts.ocdbt.dump(base).result()["versions"][-1]["root"]
    if "location" in newest:
        yield from _values_below(base, newest["location"], b"")


def _values_below(base: ts.KvStore, location: str, prefix: bytes) -> Iterator[_Value]:
    """Yield the values under one node, whose keys lack `prefix`."""
    node = ts.ocdbt.dump(base, location).result()
    for entry in node["entries"]:
        if node["height"] > 0:
            yield from _values_below(base, entry["location"], prefix + entry["subtree_common_prefix"])
            continue
        key = (prefix + entry["key"]).decode()
        if "indirect_value" not in entry:
            raise StorageError(f"{key!r} lies inside a B-tree node of {base.url}, without an extent of its own")
        kind_and_folder, file, offset, length = entry["indirect_value"].rsplit(":", 3)
        yield _Value(key, kind_and_folder.split(":", 1)[1] + file, int(offset), int(length))


def _join_databases(
    root: Path, documents: Mapping[str, bytes], writers: Sequence[int], progress: Callable[[int], None]
) -> list[str]:
    """Write `documents` into the joined database and add what the ranks committed, by reference. Returns its files."""
    context = _unsynced()  # one for both sides: copying by reference needs that
    database = root / DATABASE
    folders = [_database_of(root, rank) for rank in writers]
    for rank, folder in zip(writers, folders, strict=True):
        if not (folder / "manifest.ocdbt").is_file():
            raise StorageError(f"{folder} is missing, where rank {rank} has committed its arrays")
    with _naming_errors(f"join the databases in {database}"):
        joined = ts.KvStore.open(_new_database(database), context=context).result()
        # Not in a transaction: the references would be dropped, silently, and every value be empty.
        copies = [_opened_database(folder, context).experimental_copy_range_to(joined) for folder in folders]
        for copy in copies:
            _wait(copy)
        transaction = ts.Transaction()
        described = joined.with_transaction(transaction)
        for key, document in documents.items():
            described.write(key, document).result()
            progress(len(document))
        _wait(transaction.commit_async())
        _check_joined(database, len(documents), folders)
    sizes = _sizes_below(database, root, below_ranks=False)
    make_durable(root, sizes, _folders_above(root, sizes), progress)
    return list(sizes)


def _check_joined(database: Path, num_documents: int, folders: Sequence[Path]) -> None:
    """Raise a `StorageError` unless every value of the ranks' databases is a value of the joined one, in the same place."""
    expected = {
        (value.key, f"{folder.name}/{value.file}", value.offset) for folder in folders for value in _values_of(folder)
    }
    found = {(value.key, value.file, value.offset) for value in _values_of(database)}
    if not expected <= found or len(found) != len(expected) + num_documents:
        raise StorageError(
            f"{database} holds {len(found)} values where {len(expected)} chunks and {num_documents} descriptions were "
            "joined. Save with ckpt.kvstore=file, and report the version of tensorstore."
        )


def _records(root: Path, sizes: Mapping[str, int], chunks: Collection[ChunkExtent]) -> dict[str, FileRecord]:
    """Return the record of each file: its size, and a digest of those of its bytes that no chunk covers."""
    covered: dict[str, list[tuple[int, int]]] = {file: [] for file in sizes}
    for chunk in chunks:
        covered[chunk.file].append((chunk.offset, chunk.offset + chunk.length))
    return {file: FileRecord(size, _digest_of_rest(root / file, size, covered[file])) for file, size in sizes.items()}


def _digest_of_rest(path: Path, size: int, covered: Sequence[tuple[int, int]]) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        at = 0
        for start, stop in [*sorted(covered), (size, size)]:
            file.seek(at)
            while at < start:
                piece = file.read(min(start - at, PIECE_BYTES))
                if not piece:
                    raise StorageError(f"{path} ends at byte {at}, {size} were written")
                digest.update(piece)
                at += len(piece)
            at = max(at, stop)
    return digest.hexdigest()


def _sizes_below(folder: Path, root: Path, *, below_ranks: bool = True) -> dict[str, int]:
    """Return the files below `folder`, by path below `root`, with their sizes; perhaps without those of the ranks."""
    sizes = {}
    for where, folders, files in os.walk(folder):
        if not below_ranks:
            folders[:] = [name for name in folders if not name.startswith("rank-")]
        for name in files:
            path = Path(where, name)
            sizes[path.relative_to(root).as_posix()] = path.stat().st_size
    return sizes


def _folders_above(root: Path, files: Collection[str]) -> set[Path]:
    """Return `root` and every folder between it and one of `files`."""
    folders = {root}
    for file in files:
        folder = (root / file).parent
        while folder not in folders:
            folders.add(folder)
            folder = folder.parent
    return folders


def _wait(future: ts.Future[Any], look: Callable[[], None] = lambda: None) -> Any:
    """Return the result of a future; until then `look` now and then, and let signals and other threads have their turn."""
    while True:
        try:
            return future.result(timeout=POLL_S)
        except TimeoutError:
            look()


@contextmanager
def _naming_errors(attempt: str) -> Iterator[None]:
    """Turn what TensorStore raises for a failed file operation into an `OSError` of the file, or a `StorageError`."""
    try:
        yield
    except OSError:
        raise  # as it is: ours, or the file system's own
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
    """Return the paths of the arrays among the keys of a store, sorted; groups have metadata too."""
    documents = [key.decode() for key in kvstore.list().result() if key.endswith(f"/{DOCUMENT}".encode())]
    values = [kvstore.read(key) for key in documents]
    return sorted(
        key.removesuffix(f"/{DOCUMENT}")
        for key, value in zip(documents, values, strict=True)
        if json.loads(value.result().value)["node_type"] == "array"
    )


def _opened(kvstore: dict[str, Any], path: str, context: ts.Context) -> ts.TensorStore:
    spec = {
        "driver": "zarr3",
        "kvstore": {**kvstore, "path": f"{kvstore.get('path', '')}{path}/"},
        "fill_missing_data_reads": False,  # by default a lost chunk reads as zeros
    }
    return ts.open(spec, open=True, read=True, context=context).result()


def _spec_of(path: str, opened: ts.TensorStore) -> ArraySpec:
    grid = opened.chunk_layout.write_chunk.shape
    return ArraySpec(path, opened.dtype.name, tuple(opened.shape), tuple(side or 1 for side in grid or ()))


def _unsynced() -> ts.Context:
    """Return a context that leaves syncing to us: once for all files, not once for each."""
    return ts.Context({"file_io_sync": False})


def _folder(folder: Path) -> dict[str, Any]:
    return {"driver": "file", "path": f"{folder.resolve()}/"}  # not a URL: those are percent-decoded


def _database(folder: Path) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": _folder(folder)}


def _new_database(folder: Path) -> dict[str, Any]:
    return {**_database(folder), "config": _CONFIG}


def _opened_database(folder: Path, context: ts.Context) -> ts.KvStore:
    return ts.KvStore.open(_database(folder), context=context).result()


def _database_of(root: Path, rank: int) -> Path:
    return root / DATABASE / f"rank-{rank:05d}"


def _below(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document).encode()


def _cell_bytes(array: ArraySpec, host: torch.Tensor) -> int:
    """Return the bytes of a whole chunk, padding included."""
    return math.prod(array.grid) * host.element_size()


def _padded(array: ArraySpec, host: torch.Tensor) -> bytes:
    return b"".join(padded_pieces(host, array.grid))


def _digests(array: ArraySpec, host: torch.Tensor) -> tuple[int, ...]:
    """Return the digests of a whole chunk, from memory."""
    stream = BlockDigests(BLOCK_BYTES)
    for piece in padded_pieces(host, array.grid):
        stream.update(piece)
    return stream.close()
