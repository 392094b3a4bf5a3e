"""Remove tensors from a checkpoint; manifest, indexes and digests then describe the rest."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from ckpt.backends.base import DATABASE, ForgetsArrays, database_files
from ckpt.backends.registry import backend_of_store
from ckpt.backends.zarr import DOCUMENT
from ckpt.catalog.removing import replace_indexes
from ckpt.dist_checkpointing.folder.claim import OWNER, STAGED, SaveClaim
from ckpt.dist_checkpointing.folder.destination import BESIDE, INDEX
from ckpt.errors import ConfigurationError, CorruptCheckpointError, FolderInUseError
from ckpt.format.consistency import MAX_FILE_BYTES
from ckpt.format.digests import digest_of
from ckpt.format.manifest import (
    MANIFEST_NAME,
    SHARDED,
    ArrayEntry,
    CheckpointManifest,
    Index,
)
from ckpt.format.manifest_parsing import parse_index
from ckpt.format.records import FileRecord
from ckpt.interop.megatron.zarr import MegatronZarr, is_megatron_zarr
from ckpt.ranks.topology import Topology
from ckpt.saving.writing import checksums_of, joined_checksum
from ckpt.storage.checkpoint_files import CheckpointFolder
from ckpt.storage.files import Proof, empty, listed, own_name, remove, replace_durably, write_durably
from ckpt.storage.stored import read_index, read_listed_file, read_manifest, rest_digest

_HEAD = f"{DATABASE}/manifest.ocdbt"
_LOCK = re.compile(r"(manifest\.ocdbt|[0-9a-f]+)\.__lock")
"""A temporary file that TensorStore renames over another."""
_IN_ARRAY = re.compile(r"\.zarray|\.zattrs|[0-9]+(\.[0-9]+)*")


def remove_tensors(checkpoint_dir: Path, key_prefix: str, topology: Topology) -> None:
    """Remove the sharded tensors whose key starts with `key_prefix`. Collective; the lead rank does it.

    The manifest changes at one moment, by a rename. A process killed before that has changed nothing that a load sees. It may leave
    files that belong to no checkpoint: `verify` names them, and the next call removes them, whatever its prefix.

    In OCDBT the bytes stay in the ranks' data files. The database, which our loads do not read, changes just before the manifest. A
    process killed in between leaves a database without names that the manifest still has: other readers miss those tensors, loads find
    them, and `verify` says that `manifest.ocdbt` does not match. The next call lists the database as it is then.

    Raises:
        CheckpointNotFoundError: the folder is no checkpoint.
        CorruptCheckpointError: its records are damaged, or its database is.
        ConfigurationError: the tensors lie in safetensors files, which hold several each.
    """
    with topology.operation(f"removal of {key_prefix}* from {checkpoint_dir}"), topology.phase("remove"):
        if topology.is_lead:
            if is_megatron_zarr(checkpoint_dir):
                _remove_of_megatron(checkpoint_dir, key_prefix, topology)
            else:
                _remove(checkpoint_dir, key_prefix, topology)


def _remove_of_megatron(checkpoint_dir: Path, key_prefix: str, topology: Topology) -> None:
    """Remove each array after the folder of its locks, which alone would look like a damaged array. Files of others in these stay."""
    for key in MegatronZarr(checkpoint_dir, "zarr").arrays:
        if key.startswith(key_prefix):
            owned: dict[str, Proof] = {}
            folders: list[str] = []
            for name, proof in ((f"{key}.sync", empty), (key, _is_of_array)):
                for inside, _, files in os.walk(checkpoint_dir / name, topdown=False):
                    topology.progress()
                    above = Path(inside).relative_to(checkpoint_dir)
                    owned |= {(above / each).as_posix(): proof for each in files}
                    folders.append(above.as_posix())
            _remove_all(owned | dict.fromkeys(folders, empty), checkpoint_dir, topology)


def _remove_all(owned: Mapping[str, Proof], folder: Path, topology: Topology) -> None:
    """Remove files, and folders that are empty, by their paths, in order. Nothing else is ever removed."""
    with CheckpointFolder(folder) as opened:
        for path, proof in owned.items():
            topology.progress()
            try:
                with opened.parent(path) as (above, name):
                    remove(Path(name), proof, dir_fd=above)
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno != errno.ENOTEMPTY:  # somebody has put a file there
                    raise


def _is_of_array(path: Path, found: os.stat_result) -> bool:
    """Proof: it is a file of a Zarr v2 array, which the caller is to remove."""
    return _IN_ARRAY.fullmatch(path.name) is not None and listed(path, found)


def _remove(checkpoint_dir: Path, key_prefix: str, topology: Topology) -> None:
    _require_own_files(checkpoint_dir, topology)
    manifest = read_manifest(checkpoint_dir)
    gone = {name: entry for name, entry in manifest.arrays.items() if name.startswith(f"{SHARDED}/{key_prefix}")}
    if any(entry.store == "safetensors" for entry in gone.values()):
        raise ConfigurationError(
            f"tensors cannot be removed from the safetensors files of {checkpoint_dir}: load the others, and save them"
        )
    is_as_listed = _require_sound_database(checkpoint_dir, manifest, topology)
    if gone:
        _take_out(gone, checkpoint_dir, manifest, topology)
        manifest = replace(manifest, arrays={n: entry for n, entry in manifest.arrays.items() if n not in gone})
    if gone or not is_as_listed:
        _list_database(checkpoint_dir, manifest, topology)
        replace_durably(checkpoint_dir / MANIFEST_NAME, manifest.to_bytes())
    _sweep(checkpoint_dir, manifest, [entry.path for entry in gone.values() if entry.path is not None], topology)


def _require_own_files(checkpoint_dir: Path, topology: Topology) -> None:
    """Refuse symbolic links below the checkpoint: they could lead reads, writes and removals outside.

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
    """Update all of `manifest` but its arrays for a checkpoint without `gone`. New indexes are written beside the old ones, and the
    database forgets the arrays; other files stay as they are."""
    indexes = {}
    for rank in manifest.index_ranks():
        topology.progress()
        indexes[rank] = read_index(checkpoint_dir, manifest, rank)
        _forget(indexes[rank], gone, checkpoint_dir, topology)
    replace_indexes(manifest, indexes, lambda path, data: write_durably(checkpoint_dir / path, data), topology.progress)
    for entry in gone.values():
        manifest.files.pop(f"{entry.path}/{DOCUMENT}", None)
    _correct_component(manifest, indexes, gone)
    named = [entry.path for entry in gone.values() if entry.store == "ocdbt" and entry.path is not None]
    if named:
        topology.progress()
        _database_backend().remove(checkpoint_dir, named)


def _sweep(checkpoint_dir: Path, manifest: CheckpointManifest, gone: Collection[str], topology: Topology) -> None:
    """Remove the files that only an index lists which the manifest has no more, also those that a killed removal left, and hidden folders.

    Args:
        gone: paths of the arrays that were removed.
    """
    on_record = set(manifest.files)
    for rank in manifest.index_ranks():
        topology.progress()
        on_record.update(read_index(checkpoint_dir, manifest, rank).files)
    arrays, files, proofs = set(gone), set[str](), []
    for name in sorted(os.listdir(checkpoint_dir)):
        topology.progress()
        if INDEX.fullmatch(name) and name not in on_record:
            with (
                suppress(CorruptCheckpointError),
                CheckpointFolder(checkpoint_dir) as folder,
            ):  # else it is no index of ours
                index = parse_index(folder.read(name, MAX_FILE_BYTES), name)
                arrays.update(index.chunks)
                files.update(index.files)
                proofs.append(name)
        elif BESIDE.fullmatch(name):
            proofs.append(name)
        elif STAGED.fullmatch(name):  # of a save that was killed at its very end
            remove(checkpoint_dir / name, own_name)
    files |= {f"{path}/{DOCUMENT}" for path in arrays}
    unlisted = sorted(path for path in files - on_record if path.startswith(f"{SHARDED}/"))
    folders = {str(above) for path in unlisted for above in Path(path).parents if len(above.parts) > 1}
    in_order = sorted(folders, key=len, reverse=True)
    owned = dict.fromkeys(unlisted, listed) | dict.fromkeys(in_order, empty) | dict.fromkeys(proofs, listed)
    _remove_all(owned, checkpoint_dir, topology)
    if os.path.lexists(checkpoint_dir / OWNER):
        with suppress(FolderInUseError):
            SaveClaim(checkpoint_dir, topology.progress).let_go()


def _forget(index: Index, gone: Mapping[str, ArrayEntry], checkpoint_dir: Path, topology: Topology) -> None:
    """Remove arrays from an index. Files of these arrays alone leave it too; of a shared file the digest of uncovered bytes changes."""
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
    """Return whether the manifest lists the joined database as it is; False: a killed removal changed it.

    A killed removal leaves new files, and another `manifest.ocdbt`, the only file that is ever rewritten, which TensorStore must be able
    to read. Any other difference is damage.

    Raises:
        CorruptCheckpointError: the database is damaged.
    """
    listed = [path for path in manifest.files if _is_of_database(path)]
    is_as_listed = set(listed) == set(database_files(checkpoint_dir))
    for path in listed:
        topology.progress()
        try:
            read_listed_file(checkpoint_dir, manifest, path)
        except CorruptCheckpointError:
            if path != _HEAD or not (checkpoint_dir / path).is_file():
                raise
            is_as_listed = False
            _database_backend().list_arrays(checkpoint_dir)
    return is_as_listed


def _database_backend() -> ForgetsArrays:
    backend = backend_of_store("ocdbt")
    assert isinstance(backend, ForgetsArrays)
    return backend


def _list_database(checkpoint_dir: Path, manifest: CheckpointManifest, topology: Topology) -> None:
    """List the present files of the joined database in the manifest; remove locks that a killed writer left."""
    for path in [path for path in manifest.files if _is_of_database(path)]:
        del manifest.files[path]
    for path in database_files(checkpoint_dir):
        topology.progress()
        if remove(checkpoint_dir / path, _is_lock):
            continue
        data = (checkpoint_dir / path).read_bytes()
        manifest.files[path] = len(data), digest_of(data)


def _is_lock(path: Path, found: os.stat_result) -> bool:
    """Proof: it is such a temporary file, which a killed writer left."""
    return _LOCK.fullmatch(path.name) is not None and listed(path, found)


def _is_of_database(path: str) -> bool:
    return path.startswith(f"{DATABASE}/") and not path.startswith(f"{DATABASE}/rank-")


def _correct_component(
    manifest: CheckpointManifest, indexes: Mapping[int, Index], gone: Mapping[str, ArrayEntry]
) -> None:
    """Update ranks, size and checksum of the component."""
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
