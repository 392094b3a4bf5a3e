"""Take something out of a committed checkpoint: its indexes and its manifest then describe the rest. Needs no ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckpt.format.digests import digest_of
from ckpt.format.manifest import CheckpointManifest, Index, index_generation, index_name

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
