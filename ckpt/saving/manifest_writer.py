"""The lead's part of a save: join the arrays of all ranks, and write the manifest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ckpt.backends.base import Backend, Contents, no_contents
from ckpt.catalog.committed import Commit
from ckpt.errors import StorageError
from ckpt.format.consistency import MAX_FILE_BYTES
from ckpt.format.digests import digest_of
from ckpt.format.manifest import CONFIG_NAME, ArrayEntry, CheckpointManifest, ComponentManifest, index_name
from ckpt.format.manifest_parsing import parse_index
from ckpt.format.places import PLAIN_NAME, Place
from ckpt.format.records import ArraySpec, ChunkExtent
from ckpt.planning.plan import SavePlan
from ckpt.ranks.topology import Topology
from ckpt.saving.prepared_save import PreparedSave
from ckpt.saving.writing import WriteResult, joined_checksum, path_of
from ckpt.state.sharing import EQUAL_COPIES, StateComponent, holders_of
from ckpt.storage.checkpoint_files import files_below
from ckpt.storage.files import write_durably
from ckpt.storage.stored import data_of
from ckpt.version import __version__


@dataclass
class ManifestWriter:
    """Writes the manifest of one save, once every rank's bytes are durable. Lead rank only.

    Attributes:
        results: of every rank, in order.
        config_text: stored as config.yaml; None: no such file.
        commit: its place in the order of commits; None: it is in no checkpoint root.
        run_id, history: see `CheckpointManifest`.
        metrics, metadata: as in the manifest.
        beside: path -> content of files that are there already and belong to the checkpoint.
        manifest_digest: of the bytes of the manifest, once it is written.
        made: path -> content of the small files that no rank's index lists.
        manifest: what was written.
        like: the manifest of the checkpoint that is copied: ranks, sharing, commit and notes are as in it; None: they are of this save.
        in_parts: each host's folder has a part of the files, so none that joins the arrays of all ranks is made.
    """

    save: PreparedSave[Any]
    results: Sequence[WriteResult]
    topology: Topology
    config_text: str | None = None
    commit: Commit | None = None
    run_id: str | None = None
    history: Mapping[str, int] = field(default_factory=dict)
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    beside: Mapping[str, bytes] = field(default_factory=dict)
    manifest_digest: str = ""
    made: dict[str, bytes] = field(default_factory=dict)
    manifest: CheckpointManifest | None = None
    like: CheckpointManifest | None = None
    in_parts: bool = False

    def write(self, checkpoint_id: str, record: Callable[[bytes], None]) -> int:
        """Join the arrays, write the config and, last, the manifest; return the bytes that this adds.

        Args:
            record: takes the bytes of the manifest: see `ckpt.catalog.committed.Catalog.record`.

        Raises:
            StorageError: the file of some rank is not visible here.
        """
        folder = self.save.destination.folder
        if not self.in_parts:
            await_indexes(folder, self.results, self.topology)
        config = {} if self.config_text is None else {CONFIG_NAME: self.config_text.encode()}
        for name, text in config.items():
            write_beside(folder, name, text)
        entries = entries_of(self.save.plan, self.save.mine.components, self.save.backend.store)
        contents = partial(contents_of, folder, entries, self.results)
        made = {}
        if not self.in_parts:
            made = join_arrays(folder, self.save.backend, self.results, self.topology.progress, contents)
        self.made = made | config | dict(self.beside)
        self.manifest = self._manifest(checkpoint_id, entries)
        data = self.manifest.to_bytes()
        self.manifest_digest = digest_of(data)
        self.topology.require_awaited()
        record(data)
        plain: int = sum(size for size, _ in self.results[0].plain_files.values())
        return sum(map(len, self.made.values())) + plain + len(data)

    def _manifest(self, checkpoint_id: str, entries: dict[str, ArrayEntry]) -> CheckpointManifest:
        topology, folder = self.topology, self.save.destination.folder
        config = self.config_text
        files = listed_files(self.made, self.results)
        if self.like is not None:
            return copied(self.like, self.results, entries, files, folder)
        return CheckpointManifest(
            checkpoint_id=checkpoint_id,
            timestamp=self.commit.timestamp if self.commit is not None else datetime.now(UTC),
            commit_number=self.commit.number if self.commit is not None else None,
            run_id=self.run_id,
            history=dict(self.history),
            world_size=topology.world_size,
            topology={
                "nodes": [list(ranks) for ranks in topology.nodes],
                "groups": {name: [list(ranks) for ranks in group.instances] for name, group in topology.groups.items()},
            },
            components={key: self._component(component) for key, component in self.save.mine.components.items()},
            arrays=entries,
            data=data_of(folder),
            files=files,
            training_args_hash=digest_of(config.encode()) if config is not None else None,
            ckpt_version=__version__,
            pytorch_version=torch.__version__,
            metrics=self.metrics,
            metadata=self.metadata,
        )

    def _component(self, component: StateComponent) -> ComponentManifest:
        holders = holders_of(component, self.topology)
        return ComponentManifest(
            key=component.key,
            sharing_pattern=component.pattern.value,
            ranks=[rank for rank, result in enumerate(self.results) if component.key in result.sizes],
            replicated_across=sorted(r for ranks in holders for r in ranks)
            if component.pattern in EQUAL_COPIES
            else None,
            group_name=component.process_group_name,
            size_bytes=sum(result.sizes.get(component.key, 0) for result in self.results),
            checksum=joined_checksum(result.checksums.get(component.key, "") for result in self.results),
            plain_in=plain_in(component.key, self.results),
        )


def copied(
    like: CheckpointManifest,
    results: Sequence[WriteResult],
    arrays: Mapping[str, ArrayEntry],
    files: Mapping[str, tuple[int, str]],
    folder: Place,
) -> CheckpointManifest:
    """The manifest of a copy, into a folder, in another format: ranks, sharing, commit and notes are those of the old one.

    Args:
        results: of the ranks that wrote the copy.
    """
    components = {
        key: replace(
            component,
            ranks=[rank for rank, result in enumerate(results) if key in result.sizes],
            size_bytes=sum(result.sizes.get(key, 0) for result in results),
            checksum=joined_checksum(result.checksums.get(key, "") for result in results),
            plain_in=plain_in(key, results),
        )
        for key, component in like.components.items()
    }
    return replace(
        like,
        components=components,
        arrays=dict(arrays),
        files=dict(files),
        data=data_of(folder),
        fence=None,
        ckpt_version=__version__,
    )


def plain_in(key: str, results: Sequence[WriteResult]) -> dict[str, int]:
    """Prefix -> the rank that wrote the plain values of that copy of a component."""
    return {
        path.removeprefix(f"{key}/").removesuffix(PLAIN_NAME): rank
        for rank, result in enumerate(results)
        for path in result.plain_files
        if path.startswith(f"{key}/")
    }


def contents_of(
    folder: Place, entries: Mapping[str, ArrayEntry], results: Sequence[WriteResult]
) -> Iterator[tuple[ArraySpec, Mapping[int, ChunkExtent]]]:
    """Yield every array of a save with the extents of its chunks, by the indexes of all ranks. See `ckpt.backends.base.Contents`."""
    own = {own_entry.path: own_entry for own_entry in entries.values() if own_entry.path is not None}
    chunks: dict[str, dict[int, ChunkExtent]] = {path: {} for path in own}
    packed: dict[str, ArraySpec] = {}
    with files_below(folder) as files:
        for rank, result in enumerate(results):
            if result.index is not None:
                index = parse_index(files.read(index_name(rank), result.index[0]), index_name(rank))
                for path, by_number in index.chunks.items():
                    chunks.setdefault(path, {}).update(by_number)
                dtypes = {piece.packed: entries[name].dtype for name, some in index.pieces.items() for piece in some}
                packed |= {path: ArraySpec(path, dtypes[path], (n,), (n,)) for path, n in index.packed.items() if n}
    for path, by_number in chunks.items():
        entry = own.get(path)
        if entry is None:
            yield packed[path], by_number
        elif entry.grid is not None:
            yield ArraySpec(path, entry.dtype, entry.shape, entry.grid), by_number


def write_beside(folder: Place, name: str, data: bytes) -> None:
    """Write a small file that no rank's index lists, durably."""
    if isinstance(folder, Path):
        write_durably(folder / name, data)
        return
    with files_below(folder) as files:
        files.write(name, data)


def join_arrays(
    folder: Place,
    backend: Backend,
    results: Sequence[WriteResult],
    progress: Callable[[int], None],
    contents: Contents = no_contents,  # of a save into an object store
) -> dict[str, bytes]:
    """Join the arrays of all ranks; return path -> content of the small files that this makes."""
    writers = [rank for rank, result in enumerate(results) if result.wrote_arrays]
    found = {}
    given = () if isinstance(folder, Path) else (contents,)
    joined = backend.join(folder, writers, progress, *given)
    if isinstance(joined, Mapping):
        return dict(joined)
    for path in joined:
        with files_below(folder) as below:
            found[path] = below.read(path, MAX_FILE_BYTES)
        progress(len(found[path]))
    return found


def listed_files(made: Mapping[str, bytes], results: Sequence[WriteResult]) -> dict[str, tuple[int, str]]:
    """Path -> size and digest of the files that a manifest lists: those that the lead made, its plain values, and every index."""
    files = {path: (len(data), digest_of(data)) for path, data in made.items()}
    files |= {path: (size, digest) for path, (size, digest) in results[0].plain_files.items()}
    return files | index_files(results)


def index_files(results: Sequence[WriteResult]) -> dict[str, tuple[int, str]]:
    """Path -> size and digest of the indexes of all ranks."""
    return {index_name(rank): (result.index[0], result.index[1]) for rank, result in enumerate(results) if result.index}


def entries_of(plan: SavePlan, components: Mapping[str, StateComponent], store: str) -> dict[str, ArrayEntry]:
    """The manifest's entries for the arrays of a save; the same on every rank.

    Args:
        store: the manifest's name for the format.
    """
    packed: dict[tuple[Any, ...], ArrayEntry] = {}
    arrays = {}
    for name, array in plan.arrays.items():
        if array.grid is not None:
            path = path_of(name, components)
            arrays[name] = ArrayEntry(array.dtype, array.shape, store, path, array.grid, array.runs())
        else:
            alike = array.dtype, array.shape, tuple(sorted(set(array.packs.values())))
            if alike not in packed:
                packed[alike] = ArrayEntry(array.dtype, array.shape, store, packed_in=alike[2])
            arrays[name] = packed[alike]
    for alias, first in plan.aliases.items():
        if first in arrays:
            arrays[alias] = ArrayEntry(arrays[first].dtype, arrays[first].shape, alias_of=first)
    return arrays


def await_indexes(folder: Place, results: Sequence[WriteResult], topology: Topology) -> None:
    """Wait until the lead sees every index in full length: network file systems show files late. An object store shows them at once."""
    if not isinstance(folder, Path):
        return
    deadline = time.monotonic() + topology.timeout_s
    for rank, result in enumerate(results):
        path = folder / index_name(rank)
        while result.index is not None and not (path.exists() and path.stat().st_size == result.index[0]):
            if time.monotonic() > deadline:
                raise StorageError(
                    f"rank {rank} wrote {path.name} with {result.index[0]} bytes, but rank 0 does not see it so in {folder}"
                )
            time.sleep(0.01)
