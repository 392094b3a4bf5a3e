"""Take something out of a committed checkpoint: its indexes and its manifest then describe the rest. Needs no ranks.

next generation of indexes written --> manifest replaced, which is the moment of the change --> old indexes and files removed

Before that moment nothing that a load sees has changed; after it the checkpoint is whole without what was taken out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import TypeVar

from ckpt.errors import logger_of
from ckpt.format.digests import digest_of
from ckpt.format.manifest import MANIFEST_NAME, CheckpointManifest, Index, index_generation, index_name, index_rank
from ckpt.format.manifest_parsing import parse_manifest
from ckpt.format.places import Place
from ckpt.storage.stored import read_index

_Value = TypeVar("_Value")

_log = logger_of(__name__)

Put = Callable[[str, bytes], object]
"""Writes a small file durably, by its path below the place of the checkpoint's files."""


def replace_indexes(manifest: CheckpointManifest, indexes: Mapping[int, Index], put: Put, progress: Callable[[], object]) -> None:
    """Write indexes beside those that are there, as their next generation, and list them in the manifest in place of these."""
    old = manifest.index_paths()
    for rank, index in indexes.items():
        progress()
        data = index.to_bytes()
        later = index_name(rank, index_generation(old[rank]) + 1)
        put(later, data)
        del manifest.files[old[rank]]
        manifest.files[later] = len(data), digest_of(data)


def without(
    checkpoint: Place, manifest: CheckpointManifest, keys: Collection[str], put: Put, progress: Callable[[], object]
) -> CheckpointManifest | None:
    """Return the manifest of a checkpoint without these components, whose indexes are written; None: it has none, or cannot be without.

    Args:
        manifest: of the checkpoint, as it is.

    Raises:
        CorruptCheckpointError: an index is damaged.
    """
    gone = [key for key in keys if key in manifest.components]
    arrays = _left(manifest.arrays, gone)
    if any(entry.store == "ocdbt" for name, entry in manifest.arrays.items() if name not in arrays):
        _tell_of_database(checkpoint, ", ".join(gone))
        return None
    if not gone:
        return None
    left = replace(
        manifest,
        components={key: component for key, component in manifest.components.items() if key not in gone},
        arrays=arrays,
        files=_left(manifest.files, gone),
        removed=sorted({*manifest.removed, *gone}),
    )
    replace_indexes(left, dict(_indexes_without(checkpoint, manifest, gone, progress)), put, progress)
    return parse_manifest(left.to_bytes(), str(checkpoint / MANIFEST_NAME))


def left_over(manifest: CheckpointManifest, names: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the indexes, and the folders of components, which are removed already, among the names at the place of a checkpoint's files.

    Folders are to be removed last: as long as one is there, the removal is not finished.
    """
    indexes = [name for name in names if index_rank(name) in manifest.index_ranks() and name not in manifest.files]
    return indexes, [key for key in manifest.removed if key in names]


def _indexes_without(
    checkpoint: Place, manifest: CheckpointManifest, gone: Collection[str], progress: Callable[[], object]
) -> Iterator[tuple[int, Index]]:
    """Yield the indexes that change, as they are without these components."""
    for rank in manifest.index_ranks():
        progress()
        index = read_index(checkpoint, manifest, rank)
        left = Index(
            rank,
            _left(index.files, gone),
            _left(index.chunks, gone),
            _left(index.packed, gone),
            _left(index.pieces, gone),
            _left(index.dead, gone),
        )
        if left != index:
            yield rank, left


def _left(table: dict[str, _Value], gone: Collection[str]) -> dict[str, _Value]:
    return {name: value for name, value in table.items() if not _is_of(gone, name)}


def _is_of(keys: Collection[str], name: str) -> bool:
    """Whether a tensor, an array or a file, by its path below the checkpoint, belongs to one of these components."""
    key, slash, _ = name.partition("/")
    return bool(slash) and key in keys


@cache
def _tell_of_database(checkpoint: Place, keys: str) -> None:
    _log.warning("%s stays in %s: its database holds all components, and cannot free the bytes of one", keys, checkpoint)
