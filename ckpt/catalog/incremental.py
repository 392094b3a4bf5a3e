"""Incremental saves: the files of an earlier checkpoint that a save may link, and the checkpoints that share files.

Every checkpoint stands alone: a shared file is hard-linked in each, and exists as long as one of them does. Damage to it is shared.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ckpt.backends.base import Previous
from ckpt.catalog.ledger import Ledger
from ckpt.errors import CheckpointError, sentence
from ckpt.format.manifest import covered_by
from ckpt.format.places import Place
from ckpt.storage.objects.files import ObjectFiles
from ckpt.storage.stored import files_root, read_index, read_manifest

_log = logging.getLogger("ckpt")

_Inode = tuple[int, int]


def previous_of(folder: Place, rank: int, min_live: float) -> Previous | None:
    """Return a rank's chunks and files in a committed checkpoint, for its next save. Reads the manifest and the rank's index.

    Args:
        min_live: see `Previous`.

    Returns:
        None if the rank wrote nothing of it; also, with a warning, if the manifest or the index is damaged.
    """
    try:
        manifest = read_manifest(folder)
        if rank not in manifest.index_paths():
            return None
        index = read_index(folder, manifest, rank)
        return Previous(files_root(folder, manifest), index.chunks, index.files, index.dead, min_live)
    except (CheckpointError, OSError) as error:
        _log.warning("rank %d links nothing to %s, which is damaged: %s", rank, folder, sentence(error))
        return None


def same_files(one: Previous | None, other: Previous | None) -> dict[str, Place]:
    """Path -> the other's folder, for each file with chunks that a rank has in two checkpoints, byte for byte, as their digests say."""
    if one is None or other is None:
        return {}
    mine, its = (covered_by(given.chunks, given.dead) for given in (one, other))
    return {
        path: other.folder
        for path, extents in mine.items()
        if set(extents) == set(its.get(path, ())) and one.files[path] == other.files[path]
    }


def linked_with(root: Place, damaged: Place, files: Iterable[str]) -> list[Path]:
    """Return the committed checkpoints below a root that share a damaged file of another one, the oldest commit first.

    Args:
        damaged: the damaged checkpoint, which is left out.
        files: damaged files, by path below it, such as `CorruptCheckpointError.file`.
    """
    if not isinstance(root, Path) or not isinstance(damaged, Path):
        return []  # each checkpoint in an object store stands alone
    wanted = {file: inode for file in files if (inode := _shared_inode(damaged / file)) is not None}
    if not wanted:
        return []
    committed = [commit.path for commit in Ledger(root, run_id="reader").committed()]
    others = [path for path in committed if os.path.abspath(path) != os.path.abspath(damaged)]
    # A link has the same path in every checkpoint.
    return [path for path in others if any(_shared_inode(path / file) == inode for file, inode in wanted.items())]


def _shared_inode(file: Path) -> _Inode | None:
    """Return device and inode of a file with more than one link; None for any other."""
    try:
        found = os.lstat(file)
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if found.st_nlink > 1 else None


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Disk space of a checkpoint.

    Attributes:
        apparent_bytes: of all its files: the size of a copy.
        unique_bytes: of the files without links elsewhere: freed by removing it.
    """

    apparent_bytes: int
    unique_bytes: int


def disk_use(folders: Iterable[Place]) -> tuple[dict[Place, DiskUse], int]:
    """Return the disk space of each checkpoint, and of all together, where each file counts once. Writes nothing."""
    each: dict[Place, DiskUse] = {}
    everywhere: dict[_Inode, int] = {}
    in_stores = 0
    for folder in folders:
        if not isinstance(folder, Path):
            size = sum(ObjectFiles(folder).sizes())
            each[folder] = DiskUse(size, size)
            in_stores += size
            continue
        names = list(_files_below(folder))
        found = Counter(inode for inode, _ in names)
        apparent = sum(file.st_size for _, file in names)
        unique = sum(file.st_size for inode, file in dict(names).items() if file.st_nlink <= found[inode])
        each[folder] = DiskUse(apparent, unique)
        everywhere |= {inode: file.st_size for inode, file in names}
    return each, in_stores + sum(everywhere.values())


def files_of(folder: Place) -> dict[Hashable, int]:
    """Return the bytes of each file of a checkpoint, by what is equal in all checkpoints that share the file. Objects are not shared."""
    if not isinstance(folder, Path):
        return {(folder, number): size for number, size in enumerate(ObjectFiles(folder).sizes())}
    return {inode: file.st_size for inode, file in _files_below(folder)}


def _files_below(folder: Path) -> Iterator[tuple[_Inode, os.stat_result]]:
    for inside, _, names in os.walk(folder):
        for name in names:
            try:
                found = os.lstat(os.path.join(inside, name))
            except FileNotFoundError:  # a save may be removing it
                continue
            yield (found.st_dev, found.st_ino), found
