"""Copy a checkpoint between any two storages: byte by byte, read back, and committed at the end. Needs no ranks.

note the copy --> copy each file that is not there with its size --> read all of it back --> commit

A copy that was killed, or that a storage has refused, goes on: its place is named after the manifest of the source, so that the same copy
finds what the one before has left. Of a damaged source nothing is left. A file of the right size that does not hold the right bytes is
found when it is read back, and copied once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from ckpt.catalog.catalog import catalog_at
from ckpt.catalog.verify import Verification, examine, uncommitted
from ckpt.errors import CheckpointError, ConfigurationError, CorruptCheckpointError, describe, is_unread, rebuild
from ckpt.format.digests import digest_of
from ckpt.format.manifest import MANIFEST_NAME, SHARDED, CheckpointManifest
from ckpt.format.manifest_parsing import parse_manifest
from ckpt.format.places import Place
from ckpt.storage.checkpoint_files import Files, files_below
from ckpt.storage.direct_io import Buffers
from ckpt.storage.files import empty, listed, remove
from ckpt.storage.metadata import CONFIG_FNAME
from ckpt.storage.objects.files import ObjectFiles
from ckpt.storage.sink import sink_below
from ckpt.storage.stored import (
    data_of,
    files_root,
    noticing_removal,
    read_manifest,
    read_manifest_bytes,
    recorded_sizes,
)

_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Copied:
    """What a copy has moved.

    Attributes:
        num_files, num_bytes: of the checkpoint.
        num_found: those of the files that an interrupted copy had left.
    """

    num_files: int
    num_bytes: int
    num_found: int


def copy_checkpoint(src: Place, dst: Place, *, progress: Callable[[int], None] = lambda _: None) -> Copied:
    """Copy the checkpoint at `src` to `dst`, where nothing is, or an empty folder.

    Args:
        progress: called with the number of bytes just moved: each one is copied and read back.

    Raises:
        CheckpointNotFoundError: `src` is no checkpoint of this project.
        CheckpointExistsError: there is something at `dst`.
        CheckpointGoneError: `src` was removed or replaced meanwhile.
        ConfigurationError: `src` is a sharded state dict, and `dst` an address in an object store.
        CorruptCheckpointError: `src` is damaged. Nothing is committed, nor left.
        FolderInUseError: another process makes the same copy.
        StorageError: a storage refuses. What is copied stays, and the same copy goes on from it.
    """
    with noticing_removal(src):
        raw = read_manifest_bytes(src)
        manifest = parse_manifest(raw, str(src))
        if SHARDED in manifest.components and not (isinstance(src, Path) and isinstance(dst, Path)):
            raise ConfigurationError(f"{dst}: checkpoints of sharded state dicts are not supported in object stores")
        sizes = dict(_files_of(src, manifest))
        catalog = catalog_at(dst.parent, run_id=f"copy of {src}")
        catalog.require_free(dst)
        made = [folder for folder in dst.parents if not folder.exists()] if isinstance(dst, Path) else []
        place = catalog.open_again(dst, digest_of(raw)[:16])
        try:
            found = _copy(files_root(src, manifest), place, sizes, progress)
            data = _manifest_for(place, manifest, raw)
            catalog.record(place, data)
            _require_same(src, place, data, sizes, progress)
            catalog.publish_at(place, dst)
        except BaseException as error:
            goes_on = _goes_on(error) and _is_begun(place, sizes)
            if goes_on:
                catalog.leave(place)
            else:
                catalog.discard(place)
                with suppress(OSError):  # one that is not empty
                    for folder in made:
                        remove(folder, empty)
            if not isinstance(error, CheckpointError | OSError):
                raise
            raise _worded(error, src, place, dst, "; what is copied stays, and the same copy goes on from it" if goes_on else "") from error
    return Copied(len(sizes) + 1, sum(sizes.values()) + len(data), found)


def _goes_on(error: BaseException) -> bool:
    """Whether the same copy may go on: a storage refused, or the process is to end."""
    refuses = is_unread(error) and not isinstance(error, ConfigurationError | FileExistsError)
    return refuses or not isinstance(error, Exception)


def _is_begun(place: Place, sizes: Iterable[str]) -> bool:
    with suppress(OSError):
        return bool(_sizes_at(place, sizes))
    return True


def _worded(error: CheckpointError | OSError, src: Place, place: Place, dst: Place, advice: str) -> CheckpointError:
    """Return the error in the words of the caller, who does not know the copy's own place."""
    description = describe(error)
    text = description["message"].replace(str(place), str(dst)).replace(place.name, dst.name)
    what = "" if isinstance(error, CheckpointError) else f"{src} could not be copied to {dst}: "
    return rebuild(description | {"message": f"{what}{text}{advice}"})


def _manifest_for(place: Place, manifest: CheckpointManifest, raw: bytes) -> bytes:
    data = data_of(place)
    return raw if data == manifest.data and manifest.fence is None else replace(manifest, data=data, fence=None).to_bytes()


def _files_of(place: Place, manifest: CheckpointManifest) -> Iterator[tuple[str, int]]:
    """Yield path and size of every file of a checkpoint but its manifest, those of checkpoints inside of it included."""
    yield from recorded_sizes(place, manifest).items()
    for path in manifest.files:
        folder, _, name = path.rpartition("/")
        if name == MANIFEST_NAME:
            with files_below(place) as above:
                above.require_folder(folder)
            for inner, size in _files_of(place / folder, read_manifest(place / folder)):
                yield f"{folder}/{inner}", size
    if SHARDED in manifest.components:
        with files_below(place) as files:
            yield CONFIG_FNAME, files.size(CONFIG_FNAME)


def _copy(src: Place, place: Place, sizes: Mapping[str, int], progress: Callable[[int], None]) -> int:
    """Copy the files that are not there with their size; return how many were."""
    there = _sizes_at(place, sizes)
    missing = {path: size for path, size in sizes.items() if there.get(path) != size}
    for path in there.keys() & missing.keys():
        _remove(place, path)
    for path in sizes.keys() - missing.keys():
        progress(sizes[path])
    copy_files(src, place, missing, progress)
    return len(sizes) - len(missing)


def _sizes_at(place: Place, wanted: Iterable[str]) -> dict[str, int]:
    with files_below(place) as files:
        return {path: files.size(path) for path in set(files.below()) & set(wanted)}


def _remove(place: Place, path: str) -> None:
    """Remove a file that the copy has left, which the record of the source lists. An object is replaced by the next one."""
    if isinstance(place, Path):
        remove(place / path, listed)


def copy_files(
    src: Place,
    place: Place,
    sizes: Mapping[str, int],
    progress: Callable[[int], None] = lambda _: None,
    *,
    rank: int = 0,
    written: Callable[[int], None] = lambda _: None,
    buffers: Buffers | None = None,
    same: Mapping[str, Place] = MappingProxyType({}),
) -> int:
    """Copy files, which must have these sizes, durably; return the bytes of those that were linked instead.

    Args:
        src: where the files are, not the checkpoint in an object store that they are of.
        progress: called with the bytes that have just been read.
        rank, written, buffers: of the sink; see `sink_below`. None: buffers for a copy that has the machine for itself.
        same: path -> where the files of a checkpoint are that has the same file, in the storage of `place`: see `Sink.link`.
    """
    linked = 0
    if buffers is None:
        buffers = Buffers(direct_io=True)
        buffers.num_bytes = 64 << 20
    sink = sink_below(place, rank, written, buffers)
    with files_below(src) as files:
        if isinstance(files, ObjectFiles):
            files.read_soon((path, 0, size) for path, size in sizes.items())
        try:
            for path, size in sizes.items():
                if path in same and sink.link(path, same[path], size):
                    linked += size
                else:
                    sink.write(path, _pieces(files, path, size, progress), size)
            sink.make_durable()
        except BaseException:
            sink.abort()
            raise
    return linked


def _pieces(files: Files, path: str, size: int, progress: Callable[[int], None]) -> Iterator[memoryview]:
    """Yield the bytes of a file, which must have this size. The memory of a piece is used again for the next."""
    memory = memoryview(bytearray(min(size, _PIECE_BYTES)))
    try:
        opened = files.opened(path, once=True)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptCheckpointError(f"{files.root}/{path} is missing", file=path) from error
    with opened as file:
        at = 0
        while at < size:
            count = file.read_at([memory[: size - at]], at)
            if count == 0:
                break
            yield memory[:count]
            progress(count)
            at += count
        if at < size or file.size != size:
            raise CorruptCheckpointError(f"{files.root}/{path} has {file.size} bytes, its record says {size}", file=path)


def _require_same(src: Place, place: Place, manifest: bytes, sizes: Mapping[str, int], progress: Callable[[int], None]) -> None:
    """Read the copy back; files with other bytes than their records say are copied once more, and read back again."""
    found = _examined(place, manifest, src, progress)
    again = {path: sizes[path] for path in found.damaged if path in sizes}
    if again:
        for path in again:
            _remove(place, path)
        copy_files(files_root(src, read_manifest(src)), place, again)
        found = _examined(place, manifest, src, lambda _: None)
    if found.problems:
        raise CorruptCheckpointError(f"{src}, as it was copied, is damaged, so nothing is committed: {found.problems[0]}")


def _examined(place: Place, manifest: bytes, src: Place, progress: Callable[[int], None]) -> Verification:
    at, parsed = uncommitted(place, parse_manifest(manifest, str(src)))
    return examine(at, manifest=parsed, progress=progress)
