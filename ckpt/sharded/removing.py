"""Takes tensors out of a checkpoint, so that manifest, indexes and digests stay true of what remains."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ckpt.backends.base import ChunkExtent, FileRecord
from ckpt.backends.registry import backend_of_store
from ckpt.backends.tensorstore import DATABASE
from ckpt.backends.zarr_format import DOCUMENT
from ckpt.dtypes import item_bytes
from ckpt.durable import replace_durably, write_durably
from ckpt.manifest import (
    MANIFEST_NAME,
    SHARDED,
    ArrayEntry,
    CheckpointManifest,
    Index,
    digest_of,
    index_generation,
    index_name,
)
from ckpt.megatron.zarr import MegatronZarr, is_megatron_zarr
from ckpt.sharded.folder import BESIDE_FILES, INDEX_FILES, holds_array
from ckpt.stored import read_index, read_manifest, rest_digest
from ckpt.topology import Topology
from ckpt.writing import checksums_of, joined_checksum


def remove_tensors(checkpoint_dir: Path, key_prefix: str, topology: Topology) -> list[str]:
    """Remove the sharded tensors whose key starts with `key_prefix`; return their keys. Collective; the lead does it.

    The manifest changes at one moment, by a rename. Whoever is killed before has changed nothing that a load sees; files may be
    left that belong to nothing, which `verify` names, and the next call removes. Where the arrays lie in OCDBT, their bytes stay in
    the data files; the database, which no load reads, changes just before the manifest.

    Raises:
        CheckpointNotFoundError: the folder is no checkpoint.
        CorruptCheckpointError: its records are damaged.
    """
    with (
        topology.operation(f"removal of {key_prefix}* from {checkpoint_dir}"),
        topology.phase("remove") as phase,
    ):
        if topology.is_lead:
            if is_megatron_zarr(checkpoint_dir):
                phase.payload = _remove_of_megatron(checkpoint_dir, key_prefix)
            else:
                phase.payload = _remove(checkpoint_dir, key_prefix)
    keys: list[str] = phase.payloads[0]
    return keys


def _remove_of_megatron(checkpoint_dir: Path, key_prefix: str) -> list[str]:
    """Each with the folder of locks beside it, which without it would look like an array that is damaged."""
    keys = [key for key in MegatronZarr(checkpoint_dir, "zarr").arrays if key.startswith(key_prefix)]
    for key in keys:
        for folder in (checkpoint_dir / f"{key}.sync", checkpoint_dir / key):
            if folder.is_dir():
                shutil.rmtree(folder)
    return keys


def _remove(checkpoint_dir: Path, key_prefix: str) -> list[str]:
    manifest = read_manifest(checkpoint_dir)
    gone = {name: entry for name, entry in manifest.arrays.items() if name.startswith(f"{SHARDED}/{key_prefix}")}
    if gone:
        _take_out(gone, checkpoint_dir, manifest)
    _sweep(checkpoint_dir, manifest)
    return [name.removeprefix(f"{SHARDED}/") for name in gone]


def _take_out(gone: Mapping[str, ArrayEntry], checkpoint_dir: Path, manifest: CheckpointManifest) -> None:
    """Put the checkpoint on record without these arrays; `manifest` becomes the new one."""
    old_indexes = manifest.index_paths()
    indexes = {rank: read_index(checkpoint_dir, manifest, rank) for rank in old_indexes}
    for index in indexes.values():
        _forget(index, gone, checkpoint_dir)
    for rank, path in old_indexes.items():
        data = indexes[rank].to_bytes()
        later = index_name(rank, index_generation(path) + 1)
        write_durably(checkpoint_dir / later, data)
        del manifest.files[path]
        manifest.files[later] = len(data), digest_of(data)
    for name, entry in gone.items():
        del manifest.arrays[name]
        manifest.files.pop(f"{entry.path}/{DOCUMENT}", None)
    if "ocdbt" in {entry.store for entry in gone.values()}:
        _remove_from_database(checkpoint_dir, manifest, gone)
    _correct_component(manifest, indexes, gone)
    replace_durably(checkpoint_dir / MANIFEST_NAME, manifest.to_bytes())


def _sweep(checkpoint_dir: Path, manifest: CheckpointManifest) -> None:
    """Remove the files that the manifest does not name any more, those too that an earlier removal left when it was killed."""
    for pattern in (INDEX_FILES, *BESIDE_FILES):
        for file in checkpoint_dir.glob(pattern):
            if file.name not in manifest.files:
                file.unlink()
    for folder in (checkpoint_dir / SHARDED).glob("*/"):
        if f"{SHARDED}/{folder.name}/{DOCUMENT}" not in manifest.files and holds_array(folder):
            shutil.rmtree(folder)


def _forget(index: Index, gone: Mapping[str, ArrayEntry], checkpoint_dir: Path) -> None:
    """Take arrays out of an index. A file of theirs alone goes, too; one that others share has more loose bytes now."""
    paths = {entry.path for entry in gone.values() if entry.path is not None}
    covered: dict[str, list[ChunkExtent]] = {}
    for path in paths & set(index.chunks):
        for extent in index.chunks.pop(path).values():
            if extent.file.startswith(f"{path}/"):
                del index.files[extent.file]
            else:
                covered[extent.file] = []
    for name in set(gone) & set(index.pieces):
        del index.pieces[name]
    for by_number in index.chunks.values():
        for extent in by_number.values():
            if extent.file in covered:
                covered[extent.file].append(extent)
    for file, extents in covered.items():
        size = index.files[file].size
        index.files[file] = FileRecord(size, rest_digest(checkpoint_dir / file, size, extents))


def _remove_from_database(checkpoint_dir: Path, manifest: CheckpointManifest, gone: Mapping[str, ArrayEntry]) -> None:
    """Take the arrays' keys out of the joined database, and list the files that it is made of now."""
    backend = backend_of_store("ocdbt")
    for entry in gone.values():
        if entry.path is not None:
            backend.remove(checkpoint_dir, entry.path)
    top = f"{DATABASE}/"
    ranks = f"{DATABASE}/rank-"
    for path in [path for path in manifest.files if path.startswith(top) and not path.startswith(ranks)]:
        del manifest.files[path]
    for folder, folders, files in os.walk(checkpoint_dir / DATABASE):
        folders[:] = [name for name in folders if not name.startswith("rank-")]
        for name in files:
            file = Path(folder, name)
            data = file.read_bytes()
            manifest.files[file.relative_to(checkpoint_dir).as_posix()] = len(data), digest_of(data)


def _correct_component(
    manifest: CheckpointManifest, indexes: Mapping[int, Index], gone: Mapping[str, ArrayEntry]
) -> None:
    """Say of the component what is true of the rest of it."""
    component = manifest.components[SHARDED]
    num_bytes = sum(math.prod(entry.shape) * item_bytes(entry.dtype) for entry in gone.values())
    wrote = [rank for rank in sorted(indexes) if indexes[rank].chunks]
    checksums = [
        checksums_of(indexes[rank], {}, [SHARDED])[SHARDED] if rank in wrote else ""
        for rank in range(manifest.world_size)
    ]
    manifest.components[SHARDED] = replace(
        component, ranks=wrote, size_bytes=component.size_bytes - num_bytes, checksum=joined_checksum(checksums)
    )
