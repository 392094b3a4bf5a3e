"""Safetensors on a shared file system: one file for each rank, folder and data type, which any tool opens by tensor name.

The files on disk equal the host memory that a rank writes from, and that memory is kept (storage/pool.py): the newest save can be
loaded, or sent to rollouts, without reading files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count, islice
from pathlib import Path

import torch

from ckpt.backends.base import Contents, Previous, Written, no_contents
from ckpt.backends.linked_values import LinkedValues
from ckpt.backends.safetensors_format import (
    INDEX_NAME,
    MOST_HEADER_BYTES,
    SUFFIX,
    Entry,
    Header,
    SafetensorsFile,
    entries_of,
    index_bytes,
    read_shard,
)
from ckpt.errors import LOAD_EARLIER, Argument, CorruptCheckpointError, StorageError, importing
from ckpt.format.box import Box, chunk_box, overlap
from ckpt.format.digests import digest_of
from ckpt.format.dtypes import torch_dtype
from ckpt.format.places import Place, encode_key
from ckpt.format.records import ArraySpec, ChunkExtent, Expected, FileRecord
from ckpt.storage.checkpoint_files import Files, files_below
from ckpt.storage.direct_io import Buffers
from ckpt.storage.files import make_durable
from ckpt.storage.host_memory import can_be_shared
from ckpt.storage.pool import Memories
from ckpt.storage.sink import DIRECT_BYTES, FileSink, Pieces, Sink, SinkWriter, Stream, padded_pieces, sink_below

_FULL_HEADER_BYTES = MOST_HEADER_BYTES // 2
"""Above this header size the entries of one folder and type are split over several files."""

_Kind = tuple[str, str]
"""Folder and data type."""

_Place = tuple[str, int]
"""Path of an array, and number of a chunk."""


class KimiEngineBackend:
    """Reads and writes safetensors.

    Args:
        direct_io: see `ckpt.backends.zarr.ZarrBackend`.
        pool: each rank keeps its files in host memory until the next save (ckpt/storage/pool.py).

    Attributes:
        buffers: of its writers, kept from save to save.
        memories: hands the memory of kept saves to the writers; None: no save is kept.
    """

    store = "safetensors"
    transport = "engine"

    def __init__(self, *, direct_io: bool = True, pool: bool = True) -> None:
        self.buffers = Buffers(direct_io=direct_io)
        self.memories = Memories() if pool and can_be_shared() else None

    def writer(
        self, root: Place, rank: int, progress: Callable[[int], None], previous: Previous | None = None
    ) -> SafetensorsWriter:
        """Return this rank's writer below the unpublished folder `root`."""
        memory = self.memories.take(root, rank) if self.memories and isinstance(root, Path) else None
        return SafetensorsWriter(root, rank, sink_below(root, rank, progress, self.buffers, memory), previous)

    def places(self, rank: int, chunks: Iterable[Expected]) -> Mapping[_Place, tuple[str, int]]:
        """Return where this rank's writer will put chunks in this order, if it links none: place -> file, and offset in it."""
        writer = SafetensorsWriter(Path(), rank, FileSink(Path(), rank, lambda _: None, self.buffers))
        writer.expect(chunks)
        return writer.places()

    def join(
        self,
        root: Place,
        writers: Sequence[int],
        progress: Callable[[int], None] = lambda _: None,
        contents: Contents = no_contents,
    ) -> list[str] | Mapping[str, bytes]:
        """Write an index of tensors into every folder. Reads the headers of all files of these ranks."""
        made = {}
        with files_below(root) as opened:
            for folder, files in _files_below(opened, writers).items():
                name = f"{folder}/{INDEX_NAME}"
                data = index_bytes(root / folder, files, progress)
                opened.write(name, data)
                made[name] = data
                progress(len(data))
        if not isinstance(root, Path):
            return made
        sizes = {name: len(data) for name, data in made.items()}
        make_durable(root, sizes, {(root / name).parent for name in made}, progress)
        return list(made)

    def read(self, root: Place, array: ArraySpec, box: Box, out: torch.Tensor) -> None:
        """Fill `out` (host, shape box.shape) through the safetensors library.

        Raises:
            CorruptCheckpointError: the array, or a part of it that `box` meets, is missing or cannot be read.
        """
        folder, _, name = array.path.rpartition("/")
        is_known, found = False, 0
        assert isinstance(root, Path), "safetensors are raw: they are read by their extents"
        for file in sorted((root / folder).glob(f"*{SUFFIX}")):
            for entry in read_shard(file).entries:
                if encode_key(entry.content.key) != name:
                    continue
                is_known = True
                meeting = overlap(entry.content.box, box) if box.shape else box
                if meeting is not None:
                    values = _values(file, entry)
                    out[meeting.relative_to(box).slices] = values[meeting.relative_to(entry.content.box).slices]
                    found += meeting.num_elements
        if not is_known or found != box.num_elements:
            raise CorruptCheckpointError(
                f"{array.path}: the safetensors files in {root / folder} have {found} of the {box.num_elements} elements that "
                "are asked for",
                LOAD_EARLIER,
            )


def _values(file: Path, entry: Entry) -> torch.Tensor:
    """The elements of an entry, as the safetensors library reads them."""
    with importing(f"reading {file}"):
        from safetensors import SafetensorError, safe_open  # which nothing else needs
    try:
        with safe_open(file, "pt") as opened:
            stored: torch.Tensor = opened.get_tensor(entry.name)
    except (SafetensorError, OSError) as error:
        raise CorruptCheckpointError(f"{entry.content.key}: safetensors cannot read {file}: {error}") from error
    return stored.view(torch_dtype(entry.dtype)).reshape(entry.content.box.shape)


class _ShardFile:
    """One safetensors file of this rank. Its header is written last, into space reserved at its start.

    Args:
        num_bytes: of all its tensors; None: unknown, and large.

    Attributes:
        data_start: offset of the first byte after the header.
    """

    def __init__(self, sink: Sink, path: str, header: Header, num_bytes: int | None) -> None:
        self.path = path
        self.data_start = header.num_bytes
        self._sink = sink
        self._header = header
        self._num_bytes = num_bytes
        self._placed: list[tuple[int, Sequence[Entry]]] = []
        self._stream: Stream | None = None
        self._record: FileRecord | None = None

    @property
    def size(self) -> int:
        return self._stream.size if self._stream is not None else 0

    def append(self, entries: Sequence[Entry], pieces: Iterable[memoryview]) -> int:
        """Append a chunk; return its offset in the file."""
        if self._stream is None:
            all_bytes = self.data_start + self._num_bytes if self._num_bytes is not None else None
            self._stream = self._sink.open(self.path, all_bytes)
            self._stream.append([memoryview(bytes(self.data_start))])
        at = self._stream.size
        self._stream.append(pieces)
        self._placed.append((at - self.data_start, entries))
        return at

    def finish(self) -> FileRecord:
        """End the file with its header, once; return its record."""
        if self._record is None:
            assert self._stream is not None
            header = self._header.to_bytes(self._placed)
            self._stream.close(header)
            self._record = FileRecord(self.size, digest_of(header))
        return self._record


_Files = tuple[_ShardFile, _ShardFile]
"""The main file, and the file for unchanged chunks that are written again."""


class SafetensorsWriter(SinkWriter):
    """Appends one rank's chunks to the file of their folder and data type. See `ckpt.backends.base.Writer`.

    Unchanged chunks that must be written again go to a separate file, which the next save can probably link. A file is linked only
    if all its tensors are in this checkpoint, because other tools open it by its header.
    """

    def __init__(self, root: Place, rank: int, sink: Sink, previous: Previous | None = None) -> None:
        super().__init__(sink)
        self._rank = rank
        self._before = _Before(previous) if previous is not None else None
        self._linked = LinkedValues(previous, sink, root, "", whole=True) if previous is not None else None
        self._entries: dict[_Place, Sequence[Entry]] = {}
        self._files: dict[_Place, _Files] = {}
        self._empty: dict[_Kind, tuple[Collection[Entry], _Files]] = {}
        self._left: dict[_ShardFile, int] = {}  # chunks that are still to come
        self._with_empty: set[_ShardFile] = set()  # that get the tensors without elements, at the end
        self._written = Written()

    def expect(self, chunks: Iterable[Expected]) -> None:
        """Reserve headers long enough for all chunks. See `Writer.expect`.

        Raises:
            StorageError: the names of a chunk's tensors do not fit a header.
        """
        by_kind: dict[_Kind, dict[_Place | None, list[Entry]]] = defaultdict(lambda: {None: []})
        for array, chunk, contents in ((expected.array, expected.chunk, expected.contents) for expected in chunks):
            expected = by_kind[array.path.rpartition("/")[0], array.dtype]
            entries = entries_of(array.dtype, contents, 0)
            expected[None] += [entry._replace(start=0) for entry in entries if 0 in entry.content.shape]
            if chunk is not None:
                expected[array.path, chunk] = [entry for entry in entries if entry.num_bytes]
        for kind, expected in by_kind.items():
            names = self._new_names(*kind)
            for header, some in self._files_for(list(expected.items())):
                most = sum(entry.num_bytes for _, entries in some for entry in entries)
                known = most if self._before is None or most < DIRECT_BYTES or self._sink.segment_bytes else None
                main, unchanged = (_ShardFile(self._sink, name, header, known) for name in islice(names, 2))
                self._left[main] = sum(place is not None for place, _ in some)
                for place, entries in some:
                    if place is None:
                        self._empty[kind] = dict.fromkeys(entries), (main, unchanged)
                        self._with_empty |= {main} if entries else set()
                    else:
                        self._entries[place], self._files[place] = entries, (main, unchanged)

    def _files_for(self, expected: _Expected) -> Iterator[tuple[Header, _Expected]]:
        """Divide the expected entries among files: as few as readable headers allow, and in an object store of a segment at most."""
        for some in _cut(expected, self._sink.segment_bytes):
            yield from _filling_headers(some)

    def places(self) -> dict[_Place, tuple[str, int]]:
        """Return place -> file and offset of every expected chunk, if all are written in the order of `expect`."""
        places: dict[_Place, tuple[str, int]] = {}
        ends: dict[_ShardFile, int] = {}
        for place, (main, _) in self._files.items():
            start = ends.get(main, main.data_start)
            places[place] = main.path, start
            ends[main] = start + sum(entry.num_bytes for entry in self._entries[place])
        return places

    def write(self, array: ArraySpec, chunk: int, host: torch.Tensor, digests: tuple[int, ...] | None = None) -> None:
        """Write or link chunk number `chunk` of `array`; `host` is contiguous and has the chunk's clipped shape."""
        box = chunk_box(array.shape, array.grid, chunk)
        assert tuple(host.shape) == box.shape and host.is_contiguous(), f"{array.path}: {host.shape} for {box}"
        source = Pieces(padded_pieces(host, box.shape), digests)
        if not self._take(array, chunk, source, host.nbytes):
            self._put(array.path, chunk, source, 0)
        main, _ = self._files[array.path, chunk]
        self._left[main] -= 1
        if self._sink.segment_bytes and not self._left[main] and main.size and main not in self._with_empty:
            main.finish()  # its memory is free for the next one

    def describe(self, arrays: Sequence[ArraySpec], groups: Collection[str] | None = None) -> None:
        """Do nothing: the headers describe the tensors."""

    def finish(self) -> Written:
        """Write all bytes, headers last; return the chunks and files."""
        if self._linked is not None:
            for path, chunk, _, _, source in self._linked.settle():
                self._put(path, chunk, source, 1)
            self._linked.add_to(self._written)
        self._put_empty()
        all_files = dict.fromkeys([*self._files.values(), *(files for _, files in self._empty.values())])
        files = [file for both in all_files for file in both if file.size]
        self._written.files |= {file.path: file.finish() for file in files}
        self._sink.flush()
        return self._written

    def _take(self, array: ArraySpec, chunk: int, source: Pieces, size: int) -> bool:
        """Link the chunk if a file of the previous checkpoint has it under the same names; return whether that worked."""
        if self._linked is None or self._before is None:
            return False
        kind = array.path.rpartition("/")[0], array.dtype
        if not self._before.has(array.path, chunk, self._entries[array.path, chunk], self._empty[kind][0]):
            return False
        return self._linked.take(array.path, chunk, array.dtype, source, size)

    def _put(self, path: str, chunk: int, source: Pieces, which: int) -> None:
        """Append a chunk to a file: 0, the main one, or 1, the one for unchanged chunks."""
        file = self._files[path, chunk][which]
        at = file.append(self._entries[path, chunk], source.digested())
        self._written.chunks[path, chunk] = ChunkExtent(file.path, at, file.size - at, source.written(path))

    def _put_empty(self) -> None:
        """Add the tensors without elements that no linked file names to the main files."""
        there = self._before.empty_in(self._written.files) if self._before is not None else set()
        for (folder, _), (entries, (main, _)) in self._empty.items():
            missing = [entry for entry in entries if (folder, entry) not in there]
            if missing:
                main.append(missing, ())

    def _new_names(self, folder: str, dtype: str) -> Iterator[str]:
        """Yield names that differ from all files of the previous checkpoint, which may be linked."""
        taken = self._before.files if self._before is not None else ()
        base = f"{folder}/rank-{self._rank:05d}-{dtype}"
        numbered = (f"{base}{f'-{number}' if number else ''}{SUFFIX}" for number in count())
        return (name for name in numbered if name not in taken)


class _Before:
    """The tensors in this rank's files of the previous checkpoint, by name."""

    def __init__(self, previous: Previous) -> None:
        self.files = previous.files
        self._previous = previous
        self._shards: dict[str, _OldShard | None] = {}

    def has(self, path: str, chunk: int, entries: Sequence[Entry], empty: Collection[Entry]) -> bool:
        """Whether a file holds the chunk under the same names, and names no empty tensor that has gone."""
        old = self._previous.chunks.get(path, {}).get(chunk)
        shard = self._shard(old.file) if old is not None else None
        if old is None or shard is None or not all(entry in empty for entry in shard.empty):
            return False
        at = old.offset - shard.data_start
        return all(shard.by_start.get(at + entry.start) == entry._replace(start=at + entry.start) for entry in entries)

    def empty_in(self, files: Iterable[str]) -> set[tuple[str, Entry]]:
        """Return (folder, entry) of the empty tensors that these files name."""
        shards = ((file.rpartition("/")[0], self._shards.get(file)) for file in files)
        return {(folder, entry) for folder, shard in shards if shard is not None for entry in shard.empty}

    def _shard(self, file: str) -> _OldShard | None:
        """Return the header of a file; None: it is damaged or no safetensors file, and is not linked."""
        if file not in self._shards:
            self._shards[file] = None
            if file.endswith(SUFFIX):
                with suppress(CorruptCheckpointError, OSError):
                    self._shards[file] = _OldShard(read_shard(self._previous.folder / file, self._previous.folder))
        return self._shards[file]


class _OldShard:
    """A header as lookup tables."""

    def __init__(self, shard: SafetensorsFile) -> None:
        self.data_start = shard.data_start
        self.by_start = {entry.start: entry for entry in shard.entries if entry.num_bytes}
        self.empty = [entry._replace(start=0) for entry in shard.entries if entry.num_bytes == 0]


_Expected = Sequence[tuple[_Place | None, list[Entry]]]
"""The entries of each chunk, and of the tensors without elements."""


def _cut(expected: _Expected, most_bytes: int | None) -> Iterator[_Expected]:
    """Cut expected entries into runs of at most so many bytes with their header, or of one chunk; None: any number."""
    if most_bytes is None:
        yield expected
        return
    some: list[tuple[_Place | None, list[Entry]]] = []
    size = 0
    for chunk in expected:
        added = Header(chunk[1]).num_bytes + sum(entry.num_bytes for entry in chunk[1])
        if some and size + added > most_bytes:
            yield some
            some, size = [], 0
        some.append(chunk)
        size += added
    if some:
        yield some


def _filling_headers(expected: _Expected) -> Iterator[tuple[Header, _Expected]]:
    """Split the expected entries over as many files as needed for readable headers: one, unless there are very many."""
    header = Header(entry for _, entries in expected for entry in entries)
    if len(expected) > 1 and header.num_bytes > _FULL_HEADER_BYTES:
        half = len(expected) // 2
        yield from _filling_headers(expected[:half])
        yield from _filling_headers(expected[half:])
    elif header.num_bytes > MOST_HEADER_BYTES:
        raise StorageError(
            f"{len(expected[0][1])} tensors, of which {expected[0][1][0].content.key!r} is one, would lie in one safetensors file "
            f"whose header takes {header.num_bytes} bytes; readers take {MOST_HEADER_BYTES}. ",
            "Save with ", Argument("backend", "zarr"), " or ", Argument("backend", "tensorstore"), ".",
        )
    else:
        yield header, expected


def _files_below(files: Files, writers: Collection[int]) -> dict[str, list[str]]:
    """Folder -> the names of the safetensors files in it that these ranks wrote or linked, in order.

    Each folder is listed once, by a rank that has not listed it before, so that no cached listing is outdated.
    """
    wanted = tuple(f"rank-{rank:05d}-" for rank in writers)
    found: dict[str, list[str]] = defaultdict(list)
    for path in files.below():
        folder, _, name = path.rpartition("/")
        if folder and name.startswith(wanted) and name.endswith(SUFFIX):
            found[folder].append(name)
    return {folder: sorted(names) for folder, names in found.items()}
