"""Verify a checkpoint: read every byte and list the problems. Needs no ranks, and no storage library."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ckpt.backends.decoded_size import require_decodes_within
from ckpt.backends.zarr import DOCUMENT, below, compressors_in, require_spec, spec_in
from ckpt.errors import LOAD_EARLIER, CheckpointError, CorruptCheckpointError, is_unread, printable, sentence
from ckpt.format.consistency import MAX_FILE_BYTES, check_whole
from ckpt.format.digests import BlockDigests, StreamDigest
from ckpt.format.dtypes import item_bytes
from ckpt.format.manifest import COMMON, MANIFEST_NAME, SHARDED, CheckpointManifest, Index
from ckpt.format.places import PLAIN_NAME, Place
from ckpt.format.records import ArraySpec, ChunkExtent, FileRecord
from ckpt.format.strict_json import Refused
from ckpt.state.flatten import check_plain_file
from ckpt.storage.checkpoint_files import Files, OpenedFile, files_below
from ckpt.storage.metadata import CONFIG_FNAME, MOST_CONFIG_BYTES, config_and_parts_at, config_bytes
from ckpt.storage.stored import (
    checked_index,
    files_root,
    has_manifest,
    noticing_removal,
    read_listed_file,
    read_manifest,
    read_plain_file,
    require_place,
)

_READ_BYTES = 4 << 20
_NAMED = 3
"""Number of tensors that a sentence names; it counts the others."""


@dataclass(slots=True)
class Verification:
    """The result of reading a whole checkpoint.

    Attributes:
        problems: one sentence each, naming the file and the affected tensors; empty if the checkpoint is sound.
        unread: those of them that are no damage: what could not be read, such as for lack of permission.
        num_files: files that belong to the checkpoint, its manifest included.
        num_bytes: bytes read.
        damaged: damaged data files, by path below the checkpoint. Other checkpoints may link them.
        removed: components that retention has taken out, which is no problem.
    """

    problems: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    damaged: set[str] = field(default_factory=set)
    removed: list[str] = field(default_factory=list)
    num_files: int = 0
    num_bytes: int = 0

    def note(self, error: Exception, where: str = "") -> None:
        """Record an error as a problem.

        Args:
            where: comes before it.
        """
        self.problems.append(where + sentence(error, lambda argument: "" if argument == LOAD_EARLIER else argument))
        self.unread += self.problems[-1:] if is_unread(error) else []

    def add(self, inner: Verification, folder: str) -> None:
        """Add the result of a part of the checkpoint, whose manifest was counted already."""
        self.problems += [f"{folder}: {problem}" for problem in inner.problems]
        self.unread += [f"{folder}: {problem}" for problem in inner.unread]
        self.damaged |= {f"{folder}/{path}" for path in inner.damaged}
        self.num_files += inner.num_files - 1
        self.num_bytes += inner.num_bytes


def verify_checkpoint(checkpoint_dir: Place, *, progress: Callable[[int], None] = lambda _: None) -> list[str]:
    """Return the problems of a checkpoint, one sentence each; an empty list if every byte is as it was saved.

    Raises:
        CheckpointNotFoundError: the folder holds no manifest.
        CheckpointGoneError: the checkpoint was removed or replaced while it was read.
        ConfigurationError: it was written by a newer version of the format.
    """
    with noticing_removal(checkpoint_dir) as require_there:
        if problems := examine(checkpoint_dir, progress=progress).problems:
            require_there()
        return list(map(printable, problems))


def examine(
    checkpoint_dir: Place,
    *,
    writers: Collection[int] | None = None,
    manifest: CheckpointManifest | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Verification:
    """Check every file that manifest and indexes list, block by block, and list files that they do not name.

    Args:
        writers: read the data files of these ranks alone; None: of all that have written.
        manifest: of the checkpoint, where it is not committed yet (see `uncommitted`); None: it is read.
        progress: called with the number of bytes just read.

    Files that another process removes meanwhile are problems.

    Raises: as `verify_checkpoint`.
    """
    result = Verification(num_files=1)
    try:
        manifest = manifest or read_manifest(checkpoint_dir)
    except CorruptCheckpointError as error:
        result.note(error)
        return result
    result.removed = manifest.removed
    root = files_root(checkpoint_dir, manifest)
    listed = {MANIFEST_NAME, *manifest.files}
    index_paths = manifest.index_paths()
    indexes: dict[int, Index] = {}
    for path in manifest.files:
        with _noting(path, result):
            data = read_listed_file(checkpoint_dir, manifest, path)
            result.num_bytes += len(data)
            progress(len(data))
            indexes |= {
                rank: checked_index(data, manifest, rank, path) for rank, name in index_paths.items() if name == path
            }
    for rank, index in indexes.items():
        listed.update(index.files)
        if writers is not None and rank not in writers:
            continue
        with _noting(index_paths[rank], result), files_below(root) as opened:
            _RankFiles(opened, manifest, index, result, progress).check()
    if SHARDED in manifest.components:
        listed.add(CONFIG_FNAME)
        with _noting(CONFIG_FNAME, result):
            parts = _checked_parts(checkpoint_dir, manifest)
            _examine_parts(checkpoint_dir, manifest, parts, result, progress)
    result.num_files = len(listed)
    below = [Path(path).parent for path in manifest.files if Path(path).name == MANIFEST_NAME]
    for folder in below:
        _examine_below(root, folder, result, progress)
    if len(indexes) == len(index_paths):  # else the set of files and chunks is unknown
        result.problems += _scattered(manifest, indexes)
        _check_plain(checkpoint_dir, manifest, indexes, result)
        with _noting("the folder", result):
            there = set(_files_of(root))
            _check_descriptions(root, manifest, indexes, result, there)
            extra = _extra(there, listed, {str(folder) for folder in below})
            result.problems += [f"{path} does not belong to the checkpoint" for path in extra]
    return result


def uncommitted(folder: Place, manifest: CheckpointManifest | None) -> tuple[Place, CheckpointManifest | None]:
    """Return what `examine` takes for a checkpoint that is written and not committed: in an object store its manifest is not there yet."""
    return (folder, None) if isinstance(folder, Path) else (folder.parent, manifest)


def _checked_parts(checkpoint_dir: Place, manifest: CheckpointManifest) -> Mapping[str, str]:
    """Check `metadata.json`, which is written after the manifest and is not listed, and return its parts. Saves by a strategy alone write
    none."""
    config, parts = config_and_parts_at(checkpoint_dir)
    with files_below(checkpoint_dir) as folder:
        data = folder.read(CONFIG_FNAME, MOST_CONFIG_BYTES) if config is not None else b""
    if config is not None and data != config_bytes(config, parts):
        raise CorruptCheckpointError(f"{CONFIG_FNAME} is not as it was written; it was changed after the save")
    has_common = has_manifest(checkpoint_dir / COMMON) if manifest.data else f"{COMMON}/{MANIFEST_NAME}" in manifest.files
    if config is None and has_common:
        raise CorruptCheckpointError(f"{CONFIG_FNAME} is missing, so no load takes this for a whole checkpoint")
    return parts


def _examine_parts(
    checkpoint_dir: Place,
    manifest: CheckpointManifest,
    parts: Mapping[str, str],
    result: Verification,
    progress: Callable[[int], None],
) -> None:
    """Examine the other parts of a save in an object store, or of a copy out of it, which its manifest does not list."""
    for name, place in parts.items():
        if name == SHARDED:
            require_place(checkpoint_dir, manifest, place)
            continue
        with _noting(f"{name}/{MANIFEST_NAME}", result):
            require_place(checkpoint_dir / name, read_manifest(checkpoint_dir / name), place)
            result.num_files += 1
            _examine_below(checkpoint_dir, Path(name), result, progress)


def _examine_below(checkpoint_dir: Place, folder: Path, result: Verification, progress: Callable[[int], None]) -> None:
    """Examine a nested checkpoint and add the result. Its manifest was counted already."""
    with _noting(f"{folder}/{MANIFEST_NAME}", result):
        with files_below(checkpoint_dir) as opened:
            opened.require_folder(folder.as_posix())
        result.add(examine(checkpoint_dir / folder.as_posix(), progress=progress), str(folder))


@contextmanager
def _noting(path: str, result: Verification) -> Iterator[None]:
    """Record an error in the block, which reads `path`, as a problem."""
    try:
        yield
    except (CheckpointError, OSError) as error:
        result.note(error, "" if isinstance(error, CheckpointError) else f"{path} cannot be read: ")


class _RankFiles:
    """Checks the data files of one writing rank. Each is read once, from first to last byte."""

    def __init__(
        self,
        folder: Files,
        manifest: CheckpointManifest,
        index: Index,
        result: Verification,
        progress: Callable[[int], None],
    ) -> None:
        self._folder = folder
        self._index = index
        self._result = result
        self._progress = progress
        self._names = TensorNames(manifest, index)
        self._buffer = memoryview(bytearray(_READ_BYTES))  # reused: memory touched for the first time is slow
        self._chunks: dict[str, list[tuple[str | None, ChunkExtent]]] = defaultdict(list)
        for array, by_number in index.chunks.items():
            for extent in by_number.values():
                self._chunks[extent.file].append((array, extent))
        for path, extents in index.dead.items():
            self._chunks[path] += [(None, extent) for extent in extents]

    def check(self) -> None:
        for path, record in self._index.files.items():
            chunks = sorted(self._chunks[path], key=lambda chunk: chunk[1].offset)
            with _noting(path, self._result):
                self._check_file(path, record, chunks)

    def _check_file(self, path: str, record: FileRecord, chunks: Sequence[tuple[str | None, ChunkExtent]]) -> None:
        arrays = list(dict.fromkeys(array for array, _ in chunks if array is not None))
        try:
            file = self._folder.opened(path, once=True)
        except (FileNotFoundError, NotADirectoryError):
            self._say(path, self._names.of_arrays(arrays), f"{path} is missing")
            return
        with file:
            size = file.size
            if size != record.size:
                whose = self._names.of_arrays(arrays)
                self._say(path, whose, f"{path} has {size} bytes, {record.size} were saved")
                return
            self._check_bytes(path, file, record, chunks)

    def _check_bytes(
        self, path: str, file: OpenedFile, record: FileRecord, chunks: Sequence[tuple[str | None, ChunkExtent]]
    ) -> None:
        rest = StreamDigest()
        at = 0
        for array, extent in chunks:
            for piece in self._read(file, at, max(at, extent.offset)):
                rest.update(piece)
            self._check_chunk(path, file, array, extent)
            at = max(at, extent.offset + extent.length)
        for piece in self._read(file, at, record.size):
            rest.update(piece)
        if rest.hexdigest() != record.rest:
            what = "bytes outside of any array were" if chunks else "it was"
            self._say(path, "", f"{path} does not match its digest: {what} changed after the save")

    def _check_chunk(self, path: str, file: OpenedFile, array: str | None, extent: ChunkExtent) -> None:
        """Check the blocks of a chunk; `array` is None for a dead chunk of an earlier checkpoint."""
        bad: list[tuple[int, int]] = []
        for number, digest in enumerate(extent.digests):
            begin = extent.offset + number * extent.block_bytes
            end = min(begin + extent.block_bytes, extent.offset + extent.length)
            stream = BlockDigests(extent.block_bytes)
            for piece in self._read(file, begin, end):
                stream.update(piece)
            if stream.close() != (digest,):
                bad.append((begin, end))
        for begin, end in _joined(bad):
            if array is None:
                self._say(path, "", f"bytes {begin} to {end} of {path}, not in use here, are not those that were saved")
                continue
            whose = self._names.of_bytes(array, begin - extent.offset, end - extent.offset)
            self._say(path, whose, f"bytes {begin} to {end} of {path} are not those that were saved")

    def _read(self, file: OpenedFile, begin: int, end: int) -> Iterator[memoryview]:
        """Yield the bytes [begin, end) in pieces of a few MiB, each valid until the next; fewer if the file is shorter."""
        while begin < end and (num := file.read_at([self._buffer[: end - begin]], begin)):
            begin += num
            self._result.num_bytes += num
            self._progress(num)
            yield self._buffer[:num]

    def _say(self, path: str, whose: str, what: str) -> None:
        self._result.damaged.add(path)
        self._result.problems.append(f"{whose}: {what}" if whose else what)


class TensorNames:
    """Tensor names for stored arrays: of the array itself, or of the tensors packed into it."""

    def __init__(self, manifest: CheckpointManifest, index: Index) -> None:
        self._index = index
        self._by_path = {entry.path: name for name, entry in manifest.arrays.items() if entry.path is not None}
        self._packed: dict[str, list[tuple[int, int, str]]] = defaultdict(list)
        for name, pieces in index.pieces.items():
            width = item_bytes(manifest.arrays[name].dtype)
            for piece in pieces:
                first = piece.first * width
                self._packed[piece.packed].append((first, first + piece.box.num_elements * width, name))

    def of_arrays(self, arrays: Sequence[str]) -> str:
        return _list_names([name for array in arrays for name in self._in(array, 0, None)])

    def of_file(self, path: str) -> str:
        """Return the tensors with bytes in a file that the index lists, for a sentence."""
        chunks = self._index.chunks
        return self.of_arrays([array for array in chunks if any(e.file == path for e in chunks[array].values())])

    def of_bytes(self, array: str, begin: int, end: int) -> str:
        """Return the tensors with bytes in [begin, end) of a chunk of this array, for a sentence."""
        return _list_names(self._in(array, begin, end))

    def _in(self, array: str, begin: int, end: int | None) -> list[str]:
        if array in self._by_path:
            return [self._by_path[array]]
        pieces = sorted(self._packed[array])
        return [name for first, last, name in pieces if last > begin and (end is None or first < end)] or [array]


def _list_names(names: Sequence[str]) -> str:
    """Format names of the form `<component>/<key>` as `model: h.0.w, h.1.w and 7 more`."""
    distinct = list(dict.fromkeys(names))
    if not distinct:
        return ""
    component = distinct[0].partition("/")[0]
    shown = ", ".join(name.removeprefix(f"{component}/") for name in distinct[:_NAMED])
    more = f" and {len(distinct) - _NAMED} more" if len(distinct) > _NAMED else ""
    return f"{component}: {shown}{more}"


def _joined(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join adjacent ranges, so that a destroyed chunk is one sentence."""
    joined: list[tuple[int, int]] = []
    for begin, end in ranges:
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined


def _scattered(manifest: CheckpointManifest, indexes: Mapping[int, Index]) -> Iterator[str]:
    """Yield the problems of packed tensors with pieces in several indexes. Each index alone was checked before."""
    for name, entry in manifest.arrays.items():
        if len(entry.packed_in) > 1:
            pieces = [piece for rank in entry.packed_in for piece in indexes[rank].pieces[name]]
            try:
                check_whole(name, entry, pieces)
            except Refused as error:
                yield str(error)


def _check_plain(
    checkpoint_dir: Place, manifest: CheckpointManifest, indexes: Mapping[int, Index], result: Verification
) -> None:
    """Check that the plain values, whose bytes match their digests, form a state dict."""
    for key, component in manifest.components.items():
        for prefix, rank in component.plain_in.items():
            path, tensors = f"{key}/{prefix}{PLAIN_NAME}", manifest.arrays_of(f"{key}/{prefix}".removesuffix("/"))
            if not any(printable(path) in problem for problem in result.problems):
                with _noting(path, result):
                    data = read_plain_file(checkpoint_dir, manifest, path, partial(indexes.__getitem__, rank))
                    check_plain_file(data, path, tensors)


def _check_descriptions(
    checkpoint_dir: Place, manifest: CheckpointManifest, indexes: Mapping[int, Index], result: Verification, listed: set[str]
) -> None:
    """Check the metadata of arrays in Zarr directories, and the decoded size of their encoded chunks."""
    with files_below(checkpoint_dir) as files:
        for entry in manifest.arrays.values():
            if entry.store != "zarr" or entry.path is None or entry.grid is None:
                continue
            path = below(entry.path, DOCUMENT)
            with _noting(path, result):
                is_told = any(printable(path) in problem for problem in result.problems)
                if not is_told and path in listed:
                    described, codecs = spec_in(files.read(path, MAX_FILE_BYTES), entry.path)
                    require_spec(described, ArraySpec(entry.path, entry.dtype, entry.shape, entry.grid))
                    for file in _encoded_in(entry.path, indexes):
                        compressors = compressors_in(codecs, entry.path)
                        require_decodes_within(files, file, compressors, entry.chunk_bytes)


def _encoded_in(path: str, indexes: Mapping[int, Index]) -> list[str]:
    """Return the files of an array's encoded chunks."""
    extents = (extent for index in indexes.values() for extent in index.chunks.get(path, {}).values())
    return [extent.file for extent in extents if not extent.raw]


def _files_of(root: Place) -> Iterator[str]:
    with files_below(root) as files:
        yield from files.below()


def _extra(there: set[str], listed: set[str], without: set[str]) -> list[str]:
    """Return the files below the checkpoint that are not listed, in order.

    Args:
        without: folders to skip.
    """
    return sorted(path for path in there - listed if not any(path.startswith(f"{folder}/") for folder in without))
