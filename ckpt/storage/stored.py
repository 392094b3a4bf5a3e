"""Read the records of a committed checkpoint: the manifest, its indexes and small files, each checked against its digest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from ckpt.errors import CheckpointGoneError, CheckpointNotFoundError, CorruptCheckpointError
from ckpt.format.consistency import MAX_FILE_BYTES, check_index
from ckpt.format.digests import StreamDigest, digest_of
from ckpt.format.manifest import MANIFEST_NAME, CheckpointManifest, Index, index_name, is_fence
from ckpt.format.manifest_parsing import parse_index, parse_manifest
from ckpt.format.places import ObjectPath, Place
from ckpt.format.records import ChunkExtent, FileRecord
from ckpt.format.strict_json import refusing
from ckpt.storage.checkpoint_files import Files, OpenedFile, files_below, is_file
from ckpt.storage.host_memory import NOTHING_HELD, HeldFiles
from ckpt.storage.metadata import other_format

_PIECE_BYTES = 4 << 20
_MOST_NAMED = 3


def read_manifest(checkpoint_dir: Place) -> CheckpointManifest:
    """Read and check the manifest of a checkpoint folder. Any process.

    Raises:
        CheckpointNotFoundError: the folder is missing, or has no manifest.
        CorruptCheckpointError: the manifest was changed after the save.
    """
    return parse_manifest(read_manifest_bytes(checkpoint_dir), str(checkpoint_dir / MANIFEST_NAME))


def require_place(checkpoint_dir: Place, manifest: CheckpointManifest, place: str) -> None:
    """Require that a part of a save is of that very save: that its files are in this place.

    Raises:
        CorruptCheckpointError: it is of another one.
    """
    if manifest.data != place:
        raise CorruptCheckpointError(f"{checkpoint_dir} is of another save than metadata.json tells of; take another checkpoint")


def files_root(checkpoint_dir: Place, manifest: CheckpointManifest) -> Place:
    """Return where the files of a checkpoint are, to which the paths in its records are relative.

    In an object store, which cannot rename, each attempt to save a checkpoint has a place of its own, and the manifest names the one that
    was committed.
    """
    return checkpoint_dir if manifest.data is None else checkpoint_dir / manifest.data


def data_of(place: Place) -> str | None:
    """Return `CheckpointManifest.data` of a checkpoint whose other files are at a place: the inverse of `files_root`."""
    return None if isinstance(place, Path) else place.name


def recorded_sizes(checkpoint_dir: Place, manifest: CheckpointManifest) -> dict[str, int]:
    """Return path -> bytes of every file that manifest and indexes list. Those of a checkpoint inside of it are in its own records."""
    sizes = {path: size for path, (size, _) in manifest.files.items()}
    for rank in manifest.index_ranks():
        sizes |= {path: record.size for path, record in read_index(checkpoint_dir, manifest, rank).files.items()}
    return sizes


def read_manifest_bytes(checkpoint_dir: Place) -> bytes:
    """Read the manifest unchecked: the lead reads it once and hands these bytes to all ranks.

    Raises:
        CheckpointNotFoundError: as `read_manifest`.
        CorruptCheckpointError: it is longer than any manifest.
    """
    try:
        with files_below(checkpoint_dir) as files:
            data = files.read(MANIFEST_NAME, MAX_FILE_BYTES)
            if is_fence(data):
                raise FileNotFoundError(MANIFEST_NAME)
            return data
    except (FileNotFoundError, NotADirectoryError) as error:
        if isinstance(checkpoint_dir, ObjectPath):
            what = f"{checkpoint_dir} is not a checkpoint: it has no {MANIFEST_NAME}"
            raise CheckpointNotFoundError(f"{what}. Give the address of a committed checkpoint.") from error
        raise CheckpointNotFoundError(
            other_format(checkpoint_dir)
            or f"{not_a_checkpoint(checkpoint_dir)}. Give the folder of a committed checkpoint."
        ) from error


def not_a_checkpoint(folder: Path) -> str:
    """Return that a path without a manifest is not a checkpoint, and which ones lie below it, the newest first; without full stop.

    Of a path that does not exist, the ones beside it.
    """
    if folder.is_file():
        return f"{folder} is not a checkpoint: it is a file"
    if folder.exists():
        reason, holder, named = f"it has no {MANIFEST_NAME}", folder, "it"
    else:
        reason, holder = "it does not exist", folder.parent
        named = str(holder)
    below = checkpoints_below(holder) if holder is folder else _newest_first(holder, ("*",))
    names = [str(path.relative_to(holder)) for path in below]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    held = f"; {named} holds {', '.join(names[:_MOST_NAMED])}{more}" if names else ""
    return f"{folder} is not a checkpoint: {reason}{held}"


def checkpoints_below(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, or in that of a run, or of several runs; the newest first."""
    return _newest_first(folder, ("*", "checkpoints/*", "*/checkpoints/*"))


def _newest_first(folder: Path, patterns: Iterable[str]) -> list[Path]:
    times = {}
    for pattern in patterns:
        with suppress(OSError):  # folders go while they are looked through
            for manifest in folder.glob(f"{pattern}/{MANIFEST_NAME}"):
                path = manifest.parent
                if not any(name.startswith(".") for name in path.relative_to(folder).parts):
                    with suppress(OSError):
                        times[path] = manifest.stat().st_mtime_ns
    return sorted(times, key=lambda path: (times[path], path.name), reverse=True)


def has_manifest(checkpoint_dir: Place) -> bool:
    """Whether there is a manifest, whole or not."""
    manifest = checkpoint_dir / MANIFEST_NAME
    return manifest.exists() if isinstance(manifest, Path) else is_file(manifest)


def identity_of(checkpoint_dir: Place) -> tuple[object, ...] | None:
    """Return a value that differs between the checkpoint at this path and a later one there; None: none can be read."""
    try:
        with files_below(checkpoint_dir) as files, files.opened(MANIFEST_NAME) as manifest:
            return manifest.version  # opening makes network file systems ask the server
    except (OSError, CorruptCheckpointError):
        return None


def gone(checkpoint_dir: Place) -> CheckpointGoneError:
    """Return the error for a checkpoint that another process removed while it was read."""
    return CheckpointGoneError(
        f"{checkpoint_dir} was removed or replaced while it was read, as retention does; it is not damaged. Read a newer one."
    )


@contextmanager
def noticing_removal(checkpoint_dir: Place, before: tuple[object, ...] | None = None) -> Iterator[Callable[[], None]]:
    """Tell removal from damage in a block that reads a checkpoint. For one process; loads of several ranks agree on it.

    Args:
        before: its `identity_of` from when reading began; None: it begins here.

    Yields:
        a function to call before damage is told in another way than by an error; it raises, too.

    Raises:
        CheckpointGoneError: the block failed, and the checkpoint at this path is not the one from when it began.
    """
    began = before or identity_of(checkpoint_dir)

    def look(error: Exception | None = None) -> None:
        if began is not None and identity_of(checkpoint_dir) != began:
            raise gone(checkpoint_dir) from error

    try:
        yield look
    except CheckpointGoneError:
        raise
    except (CorruptCheckpointError, OSError) as error:
        look(error)
        raise


def read_listed_file(
    checkpoint_dir: Place, manifest: CheckpointManifest, path: str, held: HeldFiles = NOTHING_HELD
) -> bytes:
    """Read one of the small files in the manifest's list whole, and check size and digest.

    Args:
        held: files in memory.

    Raises:
        CorruptCheckpointError: the file is not listed, missing, or not as it was written.
    """
    if path not in manifest.files:
        raise CorruptCheckpointError(f"{path} should be part of {checkpoint_dir}, but its manifest does not list it")
    size, digest = manifest.files[path]

    def read() -> bytes:
        data = _read_if_there(files_root(checkpoint_dir, manifest), path, size, held)
        if data is None:
            raise CorruptCheckpointError(f"{path} is missing from {checkpoint_dir}")
        if len(data) != size:
            raise CorruptCheckpointError(f"{path} has {len(data)} bytes, the manifest says {size}", file=path)
        if digest_of(data) != digest:
            raise CorruptCheckpointError(
                f"{path} does not match its digest in the manifest; it was changed after the save", file=path
            )
        return data

    return held.or_disk(path, read)


def read_index(checkpoint_dir: Place, manifest: CheckpointManifest, rank: int, held: HeldFiles = NOTHING_HELD) -> Index:
    """Read and check the index of one writing rank.

    Raises:
        CorruptCheckpointError: it is missing, or not as it was written.
    """
    path = index_name(rank)
    if path not in manifest.files:  # a later generation, or none
        path = manifest.index_paths().get(rank, path)
    return checked_index(read_listed_file(checkpoint_dir, manifest, path, held), manifest, rank, path)


def checked_index(data: bytes, manifest: CheckpointManifest, rank: int, path: str) -> Index:
    """Parse the index of a rank, and check it against the manifest.

    Raises:
        CorruptCheckpointError: it is inconsistent: see `ckpt.format.consistency`.
    """
    index = parse_index(data, path)
    with refusing(path):
        check_index(index, manifest, rank)
    return index


def read_plain_file(
    checkpoint_dir: Place,
    manifest: CheckpointManifest,
    path: str,
    index_of: Callable[[], Index],
    held: HeldFiles = NOTHING_HELD,
    *,
    component: str | None = None,
) -> bytes:
    """Read a file of plain values and check its digest, which is in the manifest for the lead's, else in the rank's index.

    Args:
        index_of: returns the index of the rank that wrote the file; called only if needed.
        held: files in memory.
        component: named in the error.

    Raises:
        CorruptCheckpointError: it is missing, or not as it was written.
    """
    if path in manifest.files:
        return read_listed_file(checkpoint_dir, manifest, path, held)
    index = index_of()

    def read() -> bytes:
        record = index.files.get(path)
        root = files_root(checkpoint_dir, manifest)
        data = _read_if_there(root, path, record.size, held) if record is not None else None
        if record is None or data is None or (record.size, record.rest) != (len(data), digest_of(data)):
            raise CorruptCheckpointError(
                f"{path} is missing or not as rank {index.rank} wrote it", component=component, file=path
            )
        return data

    return held.or_disk(path, read)


def check_file(
    files: Files,
    path: str,
    record: FileRecord,
    covered: Collection[ChunkExtent],
    held: HeldFiles = NOTHING_HELD,
) -> None:
    """Check the size of a file that an index lists, and the digest of its bytes outside of chunks.

    Cheap for data files, whose bytes lie in chunks: loads check those as they read them.

    Args:
        files: of the checkpoint.
        covered: extents in the file with digests of their own, as `Index.covered` gives them.
        held: files in memory, which are checked there.

    Raises:
        CorruptCheckpointError: naming the file.
    """

    def check() -> None:
        with held.opened(path) or nullcontext() as in_memory:
            try:
                size = files.size(path) if in_memory is None else in_memory.size
            except (FileNotFoundError, NotADirectoryError) as error:
                raise CorruptCheckpointError(f"{path} is missing", file=path) from error
            if size != record.size:
                raise CorruptCheckpointError(f"{path} has {size} bytes, its index says {record.size}", file=path)
            opened = (lambda: files.opened(path)) if in_memory is None else lambda: nullcontext(in_memory)
            if _digest_of_rest(opened, size, covered) != record.rest:
                raise CorruptCheckpointError(
                    f"{path} does not match its digest; bytes outside of any array were changed after the save",
                    file=path,
                )

    held.or_disk(path, check)


def rest_digest(files: Files, path: str, size: int, covered: Iterable[ChunkExtent]) -> str:
    """Return the xxh3-128 of a file's bytes outside of `covered`. Opens the file only if there are any."""
    return _digest_of_rest(lambda: files.opened(path), size, covered)


def _digest_of_rest(
    open_file: Callable[[], AbstractContextManager[OpenedFile]], size: int, covered: Iterable[ChunkExtent]
) -> str:
    gaps = []
    at = 0
    for extent in sorted(covered, key=lambda e: e.offset):
        if extent.offset > at:
            gaps.append((at, extent.offset - at))
        at = max(at, extent.offset + extent.length)
    if at < size:
        gaps.append((at, size - at))
    state = StreamDigest()
    if gaps:
        buffer = memoryview(bytearray(min(max(length for _, length in gaps), _PIECE_BYTES)))
        with open_file() as opened:
            for offset, length in gaps:
                while length and (count := opened.read_at([buffer[:length]], offset)):
                    state.update(buffer[:count])
                    offset, length = offset + count, length - count
    return state.hexdigest()


def _read_if_there(root: Place, path: str, size: int, held: HeldFiles) -> bytes | None:
    """Read a file of at most this size, from memory if it is held; return None if it is missing."""
    if (data := held.read(path)) is not None:
        return data
    try:
        with files_below(root) as files:
            return files.read(path, size)
    except (FileNotFoundError, NotADirectoryError):
        return None
