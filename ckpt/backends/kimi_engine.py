"""Safetensors on a shared file system: of each rank one file per folder and data type, which any tool opens by tensor name.

The files lie on disk as the bytes lay in the host memory of the rank that wrote them, and that memory is kept (ckpt/pool/): what the
newest save holds can be loaded, or sent to rollouts, without a file being read.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

import torch
import xxhash
from safetensors import safe_open

from ckpt.backends.base import BLOCK_BYTES, ArraySpec, ChunkExtent, Content, Expected, FileRecord, Previous, Written
from ckpt.backends.files import make_durable, padded_pieces
from ckpt.backends.linked_values import LinkedValues
from ckpt.backends.outlet import Buffers, Outlet, OutletWriter, Stream
from ckpt.backends.pieces import Pieces
from ckpt.backends.safetensors_format import (
    INDEX_NAME,
    Entry,
    entries_of,
    header_bytes,
    index_document,
    read_header,
    room_for_header,
)
from ckpt.box import Box, chunk_box, overlap
from ckpt.dtypes import torch_dtype
from ckpt.errors import CorruptCheckpointError
from ckpt.manifest import encode_key

_SUFFIX = ".safetensors"


class KimiEngineBackend:
    """Reads and writes safetensors.

    Args:
        direct_io, buffer_mib: see `ckpt.backends.zarr.ZarrBackend`.
    """

    store = "safetensors"

    def __init__(self, *, direct_io: bool = True, buffer_mib: int = 32) -> None:
        self._buffers = Buffers(buffer_mib=buffer_mib, direct_io=direct_io)

    def writer(
        self, root: Path, rank: int, progress: Callable[[int], None], previous: Previous | None = None
    ) -> SafetensorsWriter:
        """Return this rank's writer below the unpublished folder `root`."""
        return SafetensorsWriter(root, rank, Outlet(root, rank, progress, self._buffers), previous)

    def join(self, root: Path, writers: Sequence[int], progress: Callable[[int], None] = lambda _: None) -> list[str]:
        """Say, in every folder, which tensor lies in which file."""
        made = {}
        for folder, files in _files_below(root, writers).items():
            document = index_document({name: read_header(root / folder / name) for name in files})
            path = root / folder / INDEX_NAME
            path.write_text(json.dumps(document))
            made[f"{folder}/{INDEX_NAME}"] = path.stat().st_size
            progress(made[f"{folder}/{INDEX_NAME}"])
        make_durable(root, made, {(root / name).parent for name in made}, progress)
        return list(made)

    def read(self, root: Path, array: ArraySpec, box: Box, out: torch.Tensor) -> None:
        """Fill `out` (host, shape box.shape) through the safetensors library.

        Raises:
            CorruptCheckpointError: the array, or a part of it that `box` meets, is missing.
        """
        folder, _, name = array.path.rpartition("/")
        found = 0
        for file in sorted((root / folder).glob(f"*{_SUFFIX}")):
            for entry in read_header(file):
                meeting = overlap(entry.content.box, box) if encode_key(entry.content.key) == name else None
                if meeting is None:
                    continue
                with safe_open(file, "pt") as opened:
                    values = (
                        opened.get_tensor(entry.name).view(torch_dtype(entry.dtype)).reshape(entry.content.box.shape)
                    )
                out[meeting.relative_to(box).slices] = values[meeting.relative_to(entry.content.box).slices]
                found += meeting.num_elements
        if found != box.num_elements:
            raise CorruptCheckpointError(
                f"{array.path}: the files of {root / folder} hold {found} of the {box.num_elements} elements of {box}. "
                "Load an earlier checkpoint."
            )

    def list_arrays(self, root: Path) -> dict[str, ArraySpec]:
        """Return every array below `root` as the headers have it, by path; the grid is the shape of its largest part.

        Raises:
            CorruptCheckpointError: a file is not what it should be.
        """
        arrays: dict[str, ArraySpec] = {}
        for file in sorted(root.rglob(f"*{_SUFFIX}")):
            folder = file.parent.relative_to(root).as_posix()
            for entry in read_header(file):
                key, shape, box = entry.content
                path = f"{folder}/{encode_key(key)}"
                grid = tuple(max(side, 1) for side in box.shape)
                known = arrays.get(path)
                if known is None or math.prod(known.grid) < math.prod(grid):
                    arrays[path] = ArraySpec(path, entry.dtype, shape, grid)
        return arrays

    def remove(self, root: Path, paths: Collection[str]) -> None:
        raise NotImplementedError  # H1


class _ShardFile:
    """A file that grows; its header comes last, into room that was left for it."""

    def __init__(self, outlet: Outlet, path: str, dtype: str, room: int) -> None:
        self.path = path
        self.dtype = dtype
        self.room = room
        self.entries: list[Entry] = []
        self._outlet = outlet
        self._stream: Stream | None = None

    @property
    def size(self) -> int:
        return self._stream.size if self._stream is not None else 0

    def append(self, contents: Sequence[Content], pieces: Iterable[memoryview]) -> int:
        """Put a chunk behind the others; return where it begins in the file."""
        if self._stream is None:
            self._stream = self._outlet.open(self.path)
            self._stream.append([memoryview(bytes(self.room))])
        at = self._stream.size
        self._stream.append(pieces)
        self.entries += entries_of(self.dtype, contents, at - self.room)
        return at

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def finish(self) -> FileRecord:
        """Write the header. All other bytes have been flushed."""
        header = header_bytes(self.entries, self.room)
        self._outlet.overwrite(self.path, header)
        return FileRecord(self.size, xxhash.xxh3_128_hexdigest(header))


class SafetensorsWriter(OutletWriter):
    """One rank's side of one save: chunks go, end to end, to the file of their folder and type as they come.

    What has not changed since the save before, and must be written again, goes to a file of its own, which will most likely be linked by
    the next one. A file is linked only whole: tools that open it find no tensor in it that is not of this checkpoint.
    """

    def __init__(self, root: Path, rank: int, outlet: Outlet, previous: Previous | None = None) -> None:
        super().__init__(outlet)
        self._rank = rank
        self._previous = previous
        self._contents: dict[tuple[str, int], Sequence[Content]] = {}
        self._files: dict[tuple[str, str], tuple[_ShardFile, ...]] = {}
        self._dtype_of: dict[str, str] = {}
        self._linked: LinkedValues | None = None
        self._old_entries: dict[str, dict[int, Entry]] = {}
        if previous is not None:
            self._linked = LinkedValues(replace(previous, min_live=math.inf), outlet, root, "")
        self._written = Written()

    def expect(self, chunks: Iterable[Expected]) -> None:
        """See `Writer.expect`: the header is as long as it needs to be for all of it."""
        entries: dict[tuple[str, str], list[Entry]] = defaultdict(list)
        empty: dict[tuple[str, str], list[Content]] = defaultdict(list)
        for array, chunk, contents in ((one.array, one.chunk, one.contents) for one in chunks):
            kind = array.path.rpartition("/")[0], array.dtype
            self._dtype_of[array.path] = array.dtype
            entries[kind] += entries_of(array.dtype, contents, 0)
            if chunk is None:
                empty[kind] += contents
            else:
                self._contents[array.path, chunk] = contents
        for kind, some in entries.items():
            room = room_for_header(some)
            self._files[kind] = tuple(_ShardFile(self._outlet, name, kind[1], room) for name in self._new_names(*kind))
        for kind, contents in empty.items():
            self._files[kind][0].append(contents, ())

    def write(self, array: ArraySpec, chunk: int, host: torch.Tensor, digests: tuple[int, ...] | None = None) -> None:
        """Write or link chunk number `chunk` of `array`; `host` is contiguous and has the chunk's clipped shape."""
        box = chunk_box(array.shape, array.grid, chunk)
        assert tuple(host.shape) == box.shape and host.is_contiguous(), f"{array.path}: {host.shape} for {box}"
        source = Pieces(padded_pieces(host, box.shape), digests)
        if not self._take(array, chunk, source, host.nbytes):
            self._put(self._file_of(array.path, 0), array.path, chunk, source)

    def describe(self, arrays: Sequence[ArraySpec], groups: Collection[str] | None = None) -> None:
        """Nothing: a file's header describes what is in it."""

    def finish(self) -> Written:
        """Hand all bytes to the file system, headers last, and say where the chunks lie."""
        if self._linked is not None:
            for path, chunk, _, source in self._linked.settle():
                self._put(self._file_of(path, 1), path, chunk, source)
            self._add_linked(self._linked)
        files = [file for both in self._files.values() for file in both if file.size]
        for file in files:
            file.close()
        self._outlet.flush()
        for file in files:
            self._written.files[file.path] = file.finish()
        return self._written

    def _take(self, array: ArraySpec, chunk: int, source: Pieces, size: int) -> bool:
        """Whether the chunk stays in a file of the checkpoint before, which has it under the same names."""
        if self._linked is None or not self._is_named_alike(array, chunk):
            return False
        return self._linked.take(array.path, chunk, array.dtype, source, size)

    def _is_named_alike(self, array: ArraySpec, chunk: int) -> bool:
        assert self._previous is not None
        old = self._previous.chunks.get(array.path, {}).get(chunk)
        if old is None or not old.file.endswith(_SUFFIX):
            return False
        if old.file not in self._old_entries:
            self._old_entries[old.file] = _by_place(self._previous.folder / old.file)
        wanted = entries_of(array.dtype, self._contents[array.path, chunk], old.offset)
        return all(self._old_entries[old.file].get(one.start) == one for one in wanted if one.num_bytes)

    def _file_of(self, path: str, which: int) -> _ShardFile:
        """The file that takes a chunk of the array at `path`: 0, the main one, or 1, that of what has not changed."""
        return self._files[path.rpartition("/")[0], self._dtype_of[path]][which]

    def _new_names(self, folder: str, dtype: str) -> tuple[str, str]:
        """Two names that no file of the checkpoint before has, which may become a file of this one."""
        taken = self._previous.files if self._previous is not None else {}
        base = f"{folder}/rank-{self._rank:05d}-{dtype}"
        numbered = (f"{base}{f'-{number}' if number else ''}{_SUFFIX}" for number in count())
        first, second = islice((name for name in numbered if name not in taken), 2)
        return first, second

    def _put(self, file: _ShardFile, path: str, chunk: int, source: Pieces) -> None:
        """Put a chunk behind the others in a file."""
        at = file.append(self._contents[path, chunk], source.digested())
        self._written.chunks[path, chunk] = ChunkExtent(
            file.path, at, file.size - at, source.written(path), BLOCK_BYTES
        )

    def _add_linked(self, linked: LinkedValues) -> None:
        """Refer to what stays where it is."""
        for (path, chunk), (_, extent) in linked.kept.items():
            self._written.chunks[path, chunk] = extent
        self._written.files |= linked.files
        self._written.linked_bytes = sum(record.size for record in linked.files.values())


def _by_place(file: Path) -> dict[int, Entry]:
    """First byte in the file -> entry; nothing of a file that is none, which `take` will find out."""
    try:
        with file.open("rb") as stream:
            behind = 8 + int.from_bytes(stream.read(8), "little")
        entries = [replace(entry, start=behind + entry.start) for entry in read_header(file)]
    except (OSError, CorruptCheckpointError):
        return {}
    return {entry.start: entry for entry in entries if entry.num_bytes}


def _files_below(root: Path, writers: Sequence[int]) -> dict[str, list[str]]:
    """Folder -> the names of the safetensors files in it that these ranks wrote or linked."""
    wanted = {f"rank-{rank:05d}" for rank in writers}
    found: dict[str, list[str]] = defaultdict(list)
    for file in sorted(root.rglob(f"*{_SUFFIX}")):
        if file.name[: len("rank-00000")] in wanted:
            found[file.parent.relative_to(root).as_posix()].append(file.name)
    return found
