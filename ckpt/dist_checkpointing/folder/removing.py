"""Takes tensors out of a checkpoint, so that manifest, indexes and digests stay true of what remains."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ckpt.backends.base import DATABASE
from ckpt.backends.registry import backend_of_store
from ckpt.backends.zarr_format import DOCUMENT
from ckpt.dist_checkpointing.folder.destination import BESIDE_FILES, INDEX_FILES, holds_array
from ckpt.dist_checkpointing.folder.removing_shards import copy_shards, list_shards, require_sound_shards, sweep_shards
from ckpt.dist_checkpointing.megatron.zarr import MegatronZarr, is_megatron_zarr
from ckpt.errors import CorruptCheckpointError
from ckpt.format.checkpoint_files import CheckpointFolder
from ckpt.format.durable import replace_durably, write_durably
from ckpt.format.manifest import (
    MANIFEST_NAME,
    SHARDED,
    ArrayEntry,
    CheckpointManifest,
    Index,
    digest_of,
    index_generation,
    index_name,
)
from ckpt.format.records import FileRecord
from ckpt.format.stored import read_index, read_listed_file, read_manifest, rest_digest
from ckpt.ranks.topology import Topology
from ckpt.saving.writing import checksums_of, joined_checksum

_HEAD = f"{DATABASE}/manifest.ocdbt"
_LOCK = ".__lock"
"""Ends the names of files that TensorStore is about to put in the place of others."""


def remove_tensors(checkpoint_dir: Path, key_prefix: str, topology: Topology) -> list[str]:
    """Remove the sharded tensors whose key starts with `key_prefix`; return their keys. Collective; the lead does it.

    The manifest changes at one moment, by a rename. Whoever is killed before has changed nothing that a load sees; files may be
    left that belong to nothing, which `verify` names, and the next call removes, whatever it is asked to remove.

    Where the arrays lie in OCDBT, their bytes stay in the data files. The database, which no load of ours reads, changes just
    before the manifest. Whoever is killed in between leaves it without names that the manifest still has; `verify` says that its
    `manifest.ocdbt` does not match. The next call, again whatever it is asked to remove, puts the database on record as it is;
    other readers find those names no more, loads find them until they are removed.

    A safetensors file is written anew, by another name, without what goes, and then stands in the manifest instead of the old one. The
    file that names its neighbours for other tools changes just after the manifest. Whoever is killed in between leaves the old one;
    `verify` says that it does not match, and the next call puts it right.

    Raises:
        CheckpointNotFoundError: the folder is no checkpoint.
        CorruptCheckpointError: its records are damaged, or its database is.
    """
    with (
        topology.operation(f"removal of {key_prefix}* from {checkpoint_dir}"),
        topology.phase("remove") as phase,
    ):
        if topology.is_lead:
            if is_megatron_zarr(checkpoint_dir):
                phase.payload = _remove_of_megatron(checkpoint_dir, key_prefix, topology)
            else:
                phase.payload = _remove(checkpoint_dir, key_prefix, topology)
    keys: list[str] = phase.payloads[0]
    return keys


def _remove_of_megatron(checkpoint_dir: Path, key_prefix: str, topology: Topology) -> list[str]:
    """Each with the folder of locks beside it, which without it would look like an array that is damaged."""
    keys = [key for key in MegatronZarr(checkpoint_dir, "zarr").arrays if key.startswith(key_prefix)]
    for key in keys:
        for folder in (checkpoint_dir / f"{key}.sync", checkpoint_dir / key):
            if folder.is_dir():
                _remove_folder(folder, topology)
    return keys


def _remove(checkpoint_dir: Path, key_prefix: str, topology: Topology) -> list[str]:
    _require_own_files(checkpoint_dir, topology)
    manifest = read_manifest(checkpoint_dir)
    gone = {name: entry for name, entry in manifest.arrays.items() if name.startswith(f"{SHARDED}/{key_prefix}")}
    is_as_listed = _require_sound_database(checkpoint_dir, manifest, topology)
    if gone:
        _take_out(gone, checkpoint_dir, manifest, topology)
        manifest = replace(manifest, arrays={n: entry for n, entry in manifest.arrays.items() if n not in gone})
    if gone or not is_as_listed:
        _list_database(checkpoint_dir, manifest, topology)
        replace_durably(checkpoint_dir / MANIFEST_NAME, manifest.to_bytes())
    _sweep(checkpoint_dir, manifest, topology)
    return [name.removeprefix(f"{SHARDED}/") for name in gone]


def _require_own_files(checkpoint_dir: Path, topology: Topology) -> None:
    """Refuse links where files are about to be read, written and removed by their paths, which could lie outside.

    Raises:
        CorruptCheckpointError: it names one.
    """
    with CheckpointFolder(checkpoint_dir) as folder:
        for name in (SHARDED, DATABASE):
            if os.path.lexists(checkpoint_dir / name):
                folder.require_regular_below(name, topology.progress)


def _take_out(
    gone: Mapping[str, ArrayEntry], checkpoint_dir: Path, manifest: CheckpointManifest, topology: Topology
) -> None:
    """Make `manifest`, but for its arrays, that of the checkpoint without these, with indexes beside the old ones; only the database
    changes."""
    old_indexes = manifest.index_paths()
    indexes = {}
    for rank in old_indexes:
        topology.progress()
        indexes[rank] = read_index(checkpoint_dir, manifest, rank)
    for index in indexes.values():
        require_sound_shards(index, checkpoint_dir, topology)
    for index in indexes.values():
        copy_shards(index, gone, checkpoint_dir, topology)
        _forget(index, gone, checkpoint_dir, topology)
    for rank, path in old_indexes.items():
        topology.progress()
        data = indexes[rank].to_bytes()
        later = index_name(rank, index_generation(path) + 1)
        write_durably(checkpoint_dir / later, data)
        del manifest.files[path]
        manifest.files[later] = len(data), digest_of(data)
    for entry in gone.values():
        manifest.files.pop(f"{entry.path}/{DOCUMENT}", None)
    _correct_component(manifest, indexes, gone)
    list_shards(manifest, indexes.values(), checkpoint_dir, topology)
    named = [entry.path for entry in gone.values() if entry.store == "ocdbt" and entry.path is not None]
    if named:
        topology.progress()
        backend_of_store("ocdbt").remove(checkpoint_dir, named)


def _sweep(checkpoint_dir: Path, manifest: CheckpointManifest, topology: Topology) -> None:
    """Remove the files that neither the manifest nor an index names any more, those too that an earlier removal left when it was killed."""
    for pattern in (INDEX_FILES, *BESIDE_FILES):
        for file in checkpoint_dir.glob(pattern):
            topology.progress()
            if file.name not in manifest.files:
                file.unlink()
    listed = set(manifest.files)
    for rank in manifest.index_ranks():
        topology.progress()
        listed.update(read_index(checkpoint_dir, manifest, rank).files)
    sweep_shards(checkpoint_dir, manifest, listed, topology)
    for folder in (checkpoint_dir / SHARDED).glob("*/"):
        topology.progress()
        if f"{SHARDED}/{folder.name}/{DOCUMENT}" not in listed and holds_array(folder):
            _remove_folder(folder, topology)


def _remove_folder(folder: Path, topology: Topology) -> None:
    """One by one, since there may be as many chunks in an array that the others would wait too long for all."""
    for inside, folders, files in os.walk(folder, topdown=False):
        for name in files:
            topology.progress()
            Path(inside, name).unlink()
        for name in folders:
            topology.progress()
            Path(inside, name).rmdir()
    topology.progress()
    folder.rmdir()


def _forget(index: Index, gone: Mapping[str, ArrayEntry], checkpoint_dir: Path, topology: Topology) -> None:
    """Take arrays out of an index. A file of theirs alone goes, too; one that others share has more loose bytes now."""
    paths = {entry.path for entry in gone.values() if entry.path is not None}
    shared: set[str] = set()
    for path in paths:
        index.files.pop(f"{path}/{DOCUMENT}", None)  # an older save has it in the manifest
    for path in paths & set(index.chunks):
        for extent in index.chunks.pop(path).values():
            if extent.file.startswith(f"{path}/"):
                del index.files[extent.file]
            else:
                shared.add(extent.file)
    for name in set(gone) & set(index.pieces):
        del index.pieces[name]
    still_covered = index.covered()
    with CheckpointFolder(checkpoint_dir) as folder:
        for file in sorted(shared):
            topology.progress()
            size = index.files[file].size
            digest = rest_digest(folder, file, size, still_covered.get(file, ()))
            index.files[file] = FileRecord(size, digest)


def _require_sound_database(checkpoint_dir: Path, manifest: CheckpointManifest, topology: Topology) -> bool:
    """Return whether the joined database is as the manifest lists it, or only what a removal made of it that was killed.

    What such a one leaves are new files, and another `manifest.ocdbt`, the one file that is ever written again: it must be one
    that TensorStore understands. Anything else is damage, which must not be put on record as if it were sound.

    Raises:
        CorruptCheckpointError: the database is damaged.
    """
    listed = [path for path in manifest.files if _is_of_database(path)]
    is_as_listed = set(listed) == set(_files_of_database(checkpoint_dir))
    for path in listed:
        topology.progress()
        try:
            read_listed_file(checkpoint_dir, manifest, path)
        except CorruptCheckpointError:
            if path != _HEAD or not (checkpoint_dir / path).is_file():
                raise
            is_as_listed = False
            backend_of_store("ocdbt").list_arrays(checkpoint_dir)
    return is_as_listed


def _list_database(checkpoint_dir: Path, manifest: CheckpointManifest, topology: Topology) -> None:
    """Put on record the files that the joined database is made of now, without the locks that a killed writer has left."""
    for path in [path for path in manifest.files if _is_of_database(path)]:
        del manifest.files[path]
    for path in _files_of_database(checkpoint_dir):
        topology.progress()
        if path.endswith(_LOCK):
            (checkpoint_dir / path).unlink()
            continue
        data = (checkpoint_dir / path).read_bytes()
        manifest.files[path] = len(data), digest_of(data)


def _files_of_database(checkpoint_dir: Path) -> Iterator[str]:
    """Yield the files of the joined database, without those of the ranks' own ones, by path below the checkpoint."""
    for inside, folders, files in os.walk(checkpoint_dir / DATABASE):
        folders[:] = [name for name in folders if not name.startswith("rank-")]
        for name in files:
            yield Path(inside, name).relative_to(checkpoint_dir).as_posix()


def _is_of_database(path: str) -> bool:
    return path.startswith(f"{DATABASE}/") and not path.startswith(f"{DATABASE}/rank-")


def _correct_component(
    manifest: CheckpointManifest, indexes: Mapping[int, Index], gone: Mapping[str, ArrayEntry]
) -> None:
    """Say of the component what is true of the rest of it."""
    component = manifest.components[SHARDED]
    num_bytes = sum(entry.num_bytes for entry in gone.values())
    wrote = [rank for rank in sorted(indexes) if indexes[rank].chunks]
    checksums = [
        checksums_of(indexes[rank], {}, [SHARDED])[SHARDED] if rank in wrote else ""
        for rank in range(manifest.world_size)
    ]
    manifest.components[SHARDED] = replace(
        component, ranks=wrote, size_bytes=component.size_bytes - num_bytes, checksum=joined_checksum(checksums)
    )
