"""Takes tensors out of the safetensors files of a checkpoint, and out of what stands on record of them.

A file is written anew, by another name, without what goes. What other tools read of the folder changes just after the manifest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path

from ckpt.backends.safetensors_format import INDEX_NAME, SUFFIX, index_bytes, read_shard
from ckpt.backends.safetensors_removal import copy_without, names_of
from ckpt.format.checkpoint_files import CheckpointFolder
from ckpt.format.durable import replace_durably, sync_folder
from ckpt.format.manifest import SHARDED, ArrayEntry, CheckpointManifest, Index, digest_of
from ckpt.format.stored import check_file
from ckpt.ranks.topology import Topology

_NAMES = f"{SHARDED}/{INDEX_NAME}"
"""What other tools read of a folder of safetensors files."""


def require_sound_shards(index: Index, checkpoint_dir: Path, topology: Topology) -> None:
    """Refuse a header that is damaged, before anything is written that goes by it."""
    covered = index.covered()
    with CheckpointFolder(checkpoint_dir) as folder:
        for path in (f"{SHARDED}/{path}" for path in _shards_in(index.files)):
            topology.progress()
            check_file(folder, path, index.files[path], covered.get(path, ()))


def copy_shards(index: Index, gone: Mapping[str, ArrayEntry], checkpoint_dir: Path, topology: Topology) -> None:
    """Have a rank's safetensors files written anew without these arrays, and refer to the new ones in its index."""
    names = {entry.path.removeprefix(f"{SHARDED}/") for entry in gone.values() if entry.path is not None}
    for path in _shards_in(index.files):
        topology.progress()
        old = f"{SHARDED}/{path}"
        if names & names_of(read_shard(checkpoint_dir / old).entries):
            _copy_shard(index, old, names, checkpoint_dir, topology)


def _copy_shard(index: Index, old: str, names: Collection[str], checkpoint_dir: Path, topology: Topology) -> None:
    base = old.removesuffix(SUFFIX)
    new = next(name for n in count(1) if not (checkpoint_dir / (name := f"{base}-{n}{SUFFIX}")).exists())
    remains = copy_without(checkpoint_dir / old, checkpoint_dir / new, names, lambda _: topology.progress())
    sync_folder(checkpoint_dir / SHARDED)
    del index.files[old]
    if remains is not None:
        index.files[new] = remains.record
    for path in list(index.chunks):
        by_number = index.chunks[path]
        is_gone = path.removeprefix(f"{SHARDED}/") in names
        for number, extent in list(by_number.items()):
            if extent.file == old and is_gone:
                del by_number[number]
            elif extent.file == old:
                assert remains is not None
                by_number[number] = replace(extent, file=new, offset=remains.moved[extent.offset])
        if not by_number:
            del index.chunks[path]


def list_shards(
    manifest: CheckpointManifest, indexes: Iterable[Index], checkpoint_dir: Path, topology: Topology
) -> None:
    """Put on record what other tools shall read of the safetensors files that are left, if there are any."""
    if manifest.files.pop(_NAMES, None) is None:
        return
    if shards := _shards_in(path for index in indexes for path in index.files):
        data = index_bytes(checkpoint_dir / SHARDED, shards, lambda _: topology.progress())
        manifest.files[_NAMES] = len(data), digest_of(data)


def sweep_shards(checkpoint_dir: Path, manifest: CheckpointManifest, listed: set[str], topology: Topology) -> None:
    """Remove the safetensors files that nothing names any more; first, what other tools read is made that of those that are left."""
    path = checkpoint_dir / _NAMES
    if _NAMES in manifest.files and not (path.is_file() and digest_of(path.read_bytes()) == manifest.files[_NAMES][1]):
        data = index_bytes(path.parent, _shards_in(listed), lambda _: topology.progress())
        if digest_of(data) == manifest.files[_NAMES][1]:  # else the headers are not those that were saved
            replace_durably(path, data)
    for pattern in (f"*{SUFFIX}", INDEX_NAME, f".{INDEX_NAME}.*"):
        for file in path.parent.glob(pattern):
            topology.progress()
            if f"{SHARDED}/{file.name}" not in listed and file.is_file():
                file.unlink()


def _shards_in(paths: Iterable[str]) -> list[str]:
    """The names of the safetensors files among these of a checkpoint."""
    return sorted(path.removeprefix(f"{SHARDED}/") for path in paths if path.endswith(SUFFIX))
