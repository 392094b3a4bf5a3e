"""Rewrite a committed checkpoint in the format of another backend: the same arrays, chunks, packs and writers in other files.

The ranks of the job share the work of those that saved it. Each goes saved rank by saved rank and chunk by chunk, with memory for one
chunk and a writer's buffers. Everything but the bytes of arrays (holders, plain values, the config, the time of the commit) is copied
unchanged. So the new checkpoint does not depend on the number of ranks that convert.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch

from ckpt.backends.base import Backend
from ckpt.catalog.copying import copy_files
from ckpt.catalog.verify import TensorNames, examine, uncommitted
from ckpt.errors import ConfigurationError, CorruptCheckpointError, StorageError, sentence
from ckpt.format.box import chunk_box, whole
from ckpt.format.dtypes import torch_dtype
from ckpt.format.manifest import (
    COMMON,
    CONFIG_NAME,
    MANIFEST_NAME,
    OBJECTS,
    SHARDED,
    ArrayEntry,
    CheckpointManifest,
    Index,
    PackedPiece,
)
from ckpt.format.manifest_parsing import parse_manifest
from ckpt.format.places import Place, is_inner_path
from ckpt.format.records import BLOCK_BYTES, ArraySpec, ChunkExtent, stored_shape
from ckpt.interop.new_files import shared_place
from ckpt.loading.strategy import StoredCheckpoint
from ckpt.memory.host import Scratch
from ckpt.planning.plan import ChunkTask, PackTask, PlannedArray, RankPlan, SavePlan
from ckpt.ranks.topology import Topology
from ckpt.saving.manifest_writer import await_indexes, contents_of, copied, join_arrays, listed_files, write_beside
from ckpt.saving.writing import Item, Pack, RankWritePlan, Staged, WriteJob, WriteResult, folders_of
from ckpt.state.sharing import StateComponent
from ckpt.state.statefuls import Given
from ckpt.storage.checkpoint_files import CheckpointFolder
from ckpt.storage.extents import ExtentReader
from ckpt.storage.files import read_once
from ckpt.storage.metadata import CheckpointingConfig, maybe_load_config, save_config
from ckpt.storage.stored import read_index, read_listed_file, read_manifest, read_plain_file, recorded_sizes
from ckpt.storage.wanted_bytes import WantedBox

_SHARDED_BACKENDS = {"zarr": "zarr", "ocdbt": "tensorstore"}
"""Store -> its name in `metadata.json` of a sharded state dict."""


def rewrite(src: Place, dst: Place, backend: Backend, topology: Topology) -> None:
    """Write the checkpoint at `src` with `backend`, read it back, and then rename it to `dst`. Collective.

    Checks every digest of `src`. Where both formats store a chunk alike, the new one has the same digests. Small tensors stay packed as
    they are, without the gaps that a removal has left. Nothing is linked.

    Args:
        dst: nothing is there, or an empty folder.

    Raises:
        CheckpointNotFoundError: `src` is no checkpoint.
        CheckpointExistsError: there is something at `dst`.
        CorruptCheckpointError: a part of `src` is missing or damaged.
        ConfigurationError: `src` is of a sharded state dict, which loads do not read in this format.
        StorageError: the new checkpoint, read back, has problems.
    """
    with topology.operation(f"rewrite into {dst}"):
        with topology.phase("plan"):
            manifest = read_manifest(src)
            config = _config_of(src, manifest, backend)
            saved_ranks = sorted({0, *manifest.index_paths()})[topology.rank :: topology.world_size]
        with shared_place(dst, topology) as made:
            folder = made.folder
            with topology.phase("write") as writing:
                rewriting = _Rewriting(src, folder, manifest, backend, topology.progress)
                writing.to_lead = {rank: rewriting.write_rank(rank).to_json() for rank in saved_ranks}
            with topology.phase("commit") as phase:
                if topology.is_lead:
                    written = {int(rank): tree for mine in writing.gathered for rank, tree in mine.items()}
                    results = [WriteResult(**written.get(rank, {})) for rank in range(manifest.world_size)]
                    await_indexes(folder, results, topology)
                    data = rewriting.commit(results)
                    made.record(data)
                    phase.from_lead = None if isinstance(folder, Path) else data.decode()
                    if config is not None:
                        save_config(config, require_folder(folder))
            with topology.phase("read back"):
                text = phase.from_lead
                place, parsed = uncommitted(folder, text and parse_manifest(text.encode(), str(dst)))
                examined = examine(place, writers=saved_ranks, manifest=parsed, progress=topology.progress)
                if examined.problems:
                    raise StorageError(f"what was written for {dst} is not what is read back: {examined.problems[0]}")


def _config_of(src: Place, manifest: CheckpointManifest, backend: Backend) -> CheckpointingConfig | None:
    """Return the content of the new `metadata.json`; None if there is none."""
    config = maybe_load_config(require_folder(src)) if SHARDED in manifest.components else None
    if config is None:
        return None
    if backend.store not in _SHARDED_BACKENDS:
        raise ConfigurationError(
            f"{src} is the checkpoint of a sharded state dict, which its load knows as {' or '.join(_SHARDED_BACKENDS.values())} alone, "
            f"not as {backend.store}; choose one of these"
        )
    return replace(config, sharded_backend=_SHARDED_BACKENDS[backend.store])


class _StoredItem(NamedTuple):
    """An item of a rank's writes, and the place of its bytes in `src`.

    Attributes:
        array: spec in `src`.
        extent: of the chunk, or of the packed array; None: it has no elements.
        pieces: of a pack, in the order of its tasks.
    """

    item: Item
    array: ArraySpec
    number: int
    extent: ChunkExtent | None
    pieces: Sequence[PackedPiece] = ()


class _Rewriting:
    """Rewrites one checkpoint into a new folder."""

    def __init__(
        self, src: Place, folder: Place, manifest: CheckpointManifest, backend: Backend, progress: Callable[[int], None]
    ) -> None:
        self._src = src
        self._stored = StoredCheckpoint(src, manifest)
        self._folder = folder
        self._manifest = manifest
        self._backend = backend
        self._progress = progress
        self._components = {
            key: StateComponent(key, Given({}), component.sharing_pattern, component.group_name)
            for key, component in manifest.components.items()
        }
        _require_inner_names(manifest, self._components)
        arrays = {name: entry for name, entry in manifest.arrays.items() if entry.alias_of is None}
        self._name_of = {entry.path: name for name, entry in arrays.items() if entry.path is not None}
        self._plan = SavePlan(
            {
                name: PlannedArray(array.dtype, array.shape, array.grid, [run[0] for run in array.writers])
                for name, array in arrays.items()
            },
            {},
        )
        self._first_written_by: dict[int, list[str]] = defaultdict(list)
        for name, planned in self._plan.arrays.items():
            if planned.writers:
                self._first_written_by[planned.writers[0]].append(name)
        self._memory = Scratch()

    def commit(self, results: Sequence[WriteResult]) -> bytes:
        """Write the remaining files, durably; return the manifest. The lead, after all saved ranks are written."""
        entries = _in_store(self._manifest.arrays, self._backend.store)
        files = self._lead_files(results, entries)
        return copied(self._manifest, results, entries, files, self._folder).to_bytes()

    def write_rank(self, rank: int) -> WriteResult:
        """Write the files of one saved rank, durably. The lead of those describes the groups."""
        index = Index(rank)
        if rank in self._manifest.index_paths():
            index = read_index(self._src, self._manifest, rank)
        items = [*self._chunks(index), *self._packs(index)]
        plan = self._rank_plan(rank, items)
        with ExtentReader(self._stored.root, progress=self._progress, read_at=read_once) as reader:
            staged = self._staged(items, reader, TensorNames(self._manifest, index))
            return plan.write(WriteJob(self._folder, self._backend, self._plain(index)), staged, self._progress)

    def _rank_plan(self, rank: int, items: Sequence[_StoredItem]) -> RankWritePlan:
        """Return the same writes for a rank as in `src`."""
        packed = [task for item in items if isinstance(item.item, Pack) for task in item.item.tasks]
        tasks = RankPlan([item.item for item in items if isinstance(item.item, ChunkTask)], packed)
        topology = Topology.supposed(rank, [""] * self._manifest.world_size, {})
        of_rank = self._plan
        if not topology.is_lead:  # the lead describes the groups of all arrays; for all ranks that costs ranks x arrays
            written = [*(task.name for task in tasks.chunks), *(task.name for task in packed)]
            of_rank = SavePlan(
                {name: self._plan.arrays[name] for name in [*self._first_written_by[rank], *written]}, {}
            )
        plan = RankWritePlan(of_rank, tasks, self._components, topology, store=self._backend.store)
        plan.items = [item.item for item in items]  # with the packs of `src`
        return plan

    def _chunks(self, index: Index) -> Iterator[_StoredItem]:
        """Yield the chunks in the order of the index, which is mostly that in the files."""
        for path in index.chunks:
            if path not in self._name_of:
                continue
            name = self._name_of[path]
            entry = self._manifest.arrays[name]
            assert entry.grid is not None
            array = ArraySpec(path, entry.dtype, entry.shape, entry.grid)
            for number, extent in index.chunks[path].items():
                box = chunk_box(entry.shape, entry.grid, number)
                yield _StoredItem(ChunkTask(name, number, box, (box,)), array, number, extent)

    def _packs(self, index: Index) -> Iterator[_StoredItem]:
        contents: dict[str, list[tuple[str, PackedPiece]]] = {path: [] for path in index.packed}
        for name, pieces in index.pieces.items():
            for piece in pieces:
                contents[piece.packed].append((name, piece))
        for path, alike in contents.items():
            if not alike:
                continue
            alike.sort(key=lambda one: one[1].first)
            dtype = self._manifest.arrays[alike[0][0]].dtype
            pack = Pack(path, dtype, [PackTask(name, piece.box) for name, piece in alike])
            num_elements = index.packed[path]
            extent = index.chunks[path][0] if num_elements else None
            array = ArraySpec(path, dtype, (num_elements,), (num_elements,))
            yield _StoredItem(pack, array, 0, extent, [piece for _, piece in alike])

    def _staged(self, items: Sequence[_StoredItem], reader: ExtentReader, names: TensorNames) -> Iterator[Staged]:
        """Read one item after the other into one reused buffer."""
        for number, item in enumerate(items):
            if item.extent is None:
                yield Staged(number, [torch.empty(0, dtype=torch_dtype(item.array.dtype), device="cpu")])
                continue
            host = self._read(item, item.extent, reader, names)
            if item.pieces and not _lie_end_to_end(item.pieces, item.array.shape[0]):
                ends = ((piece.first, piece.first + piece.box.num_elements) for piece in item.pieces)
                yield Staged(number, [torch.cat([host[first:end] for first, end in ends])])
                continue
            yield Staged(number, [host], self._digests(item, item.extent, tuple(host.shape)))

    def _read(self, one: _StoredItem, extent: ChunkExtent, reader: ExtentReader, names: TensorNames) -> torch.Tensor:
        """Read and check a chunk, without padding."""
        name = names.of_arrays([one.array.path])
        box = chunk_box(one.array.shape, one.array.grid, one.number)
        host = self._memory.empty(box.shape, torch_dtype(one.array.dtype))
        if extent.raw:
            region = stored_shape(self._store_of(one.item), one.array.grid, box.shape)
            reader.read(extent, [WantedBox(0, region, whole(box.shape), host, name)])
        else:
            reader.check(extent, name)
            self._stored.read_encoded(self._store_of(one.item), one.array, box, host)
        return host

    def _digests(self, one: _StoredItem, extent: ChunkExtent, clipped: tuple[int, ...]) -> list[tuple[int, ...]] | None:
        """Return the digests that the chunk will have in the new checkpoint, if both formats store it alike."""
        stores = self._store_of(one.item), self._backend.store
        shapes = {stored_shape(store, one.array.grid, clipped) for store in stores}
        alike = extent.raw and extent.block_bytes == BLOCK_BYTES and len(shapes) == 1
        return [extent.digests] if alike else None

    def _store_of(self, item: Item) -> str:
        store = self._manifest.arrays[item.tasks[0].name if isinstance(item, Pack) else item.name].store
        assert store is not None
        return store

    def _plain(self, index: Index) -> dict[str, tuple[str, bytes]]:
        """Return path -> (component, bytes) of the plain values that the rank wrote."""
        paths = {
            path: key
            for key, component in self._manifest.components.items()
            for path, writer in component.plain_paths().items()
            if writer == index.rank
        }
        return {
            path: (key, read_plain_file(self._src, self._manifest, path, lambda: index)) for path, key in paths.items()
        }

    def _lead_files(
        self, results: Sequence[WriteResult], entries: Mapping[str, ArrayEntry]
    ) -> dict[str, tuple[int, str]]:
        """Join the arrays and write the remaining files; return all files of the manifest."""
        parts = (f"{name}/{MANIFEST_NAME}" for name in (COMMON, OBJECTS))  # checkpoints that are always in one format
        listed = [path for path in (*parts, CONFIG_NAME) if path in self._manifest.files]
        beside = {path: read_listed_file(self._src, self._manifest, path) for path in listed}
        for path, data in beside.items():
            if path == CONFIG_NAME:
                write_beside(self._folder, path, data)
            else:
                self._copy_below(path.partition("/")[0])
        contents = partial(contents_of, self._folder, entries, results)
        made = join_arrays(self._folder, self._backend, results, self._progress, contents)
        return listed_files(made | beside, results)

    def _copy_below(self, name: str) -> None:
        """Copy the listed files of a nested checkpoint. They are examined together with the whole."""
        src, folder = require_folder(self._src), require_folder(self._folder)
        with CheckpointFolder(src) as above:
            above.require_folder(name)
        sizes = {MANIFEST_NAME: self._manifest.files[f"{name}/{MANIFEST_NAME}"][0]}
        sizes |= recorded_sizes(src / name, read_manifest(src / name))
        try:
            copy_files(src, folder, {f"{name}/{path}": size for path, size in sizes.items()}, self._progress)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise CorruptCheckpointError(f"{name}: {sentence(error)}") from error


def require_folder(place: Place) -> Path:
    """The checkpoints of sharded state dicts lie in folders alone."""
    if not isinstance(place, Path):
        raise ConfigurationError(f"{place}: checkpoints of sharded state dicts are not supported in object stores")
    return place


def _require_inner_names(manifest: CheckpointManifest, components: Mapping[str, StateComponent]) -> None:
    """Refuse array names that lead out of their component's folder, such as `rng/../w`."""
    names = [name for name, entry in manifest.arrays.items() if entry.alias_of is None]
    for name, folder in zip(names, folders_of(names, components), strict=True):
        if not is_inner_path(folder.removesuffix("/")):
            raise CorruptCheckpointError(
                f"the array {name!r:.200} would lie in {folder!r:.200}, which is no folder of a checkpoint"
            )


def _in_store(arrays: Mapping[str, ArrayEntry], store: str) -> dict[str, ArrayEntry]:
    """Return the same entries in another store. Shared entries stay shared."""
    moved = {id(entry): entry if entry.store is None else replace(entry, store=store) for entry in arrays.values()}
    return {name: moved[id(entry)] for name, entry in arrays.items()}


def _lie_end_to_end(pieces: Sequence[PackedPiece], num_elements: int) -> bool:
    """Whether the pieces, in order, fill the packed array without gaps."""
    ends = [piece.first + piece.box.num_elements for piece in pieces]
    is_joined = all(end == after.first for end, (_, after) in zip(ends, pairwise(pieces), strict=False))
    return is_joined and (pieces[0].first, ends[-1]) == (0, num_elements)
