"""What the records of a save cost, by the number of its writers: made-up indexes in real folders, without the bytes that they list."""

from __future__ import annotations

import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from ckpt.catalog.ledger import Ledger
from ckpt.format.box import chunk_box
from ckpt.format.dtypes import item_bytes
from ckpt.format.manifest import (
    ArrayEntry,
    CheckpointManifest,
    ComponentManifest,
    Index,
    PackedPiece,
    digest_of,
    index_name,
)
from ckpt.format.records import BLOCK_BYTES, ChunkExtent, FileRecord, stored_shape
from ckpt.loading.loader import committed_newest_first
from ckpt.loading.strategy import StoredCheckpoint
from ckpt.planning.plan import SavePlan, needed_chunks
from ckpt.planning.tables import Table
from ckpt.ranks.topology import Topology
from ckpt.saving.manifest_writer import await_indexes, entries_of
from ckpt.saving.writing import WriteResult
from ckpt.state.sharing import StateComponent
from ckpt.storage.stored import read_manifest
from recipes.benchmark.harness import Figures

_DIGEST = 0x9E3779B97F4A7C15
_STORE = "zarr"


def measure(plan: SavePlan, components: Mapping[str, StateComponent], own: Table, world_size: int) -> Figures:
    """Return the seconds of the lead's commit and of readers, and the bytes of the records.

    Args:
        own: what one rank of a load wants.
    """
    with tempfile.TemporaryDirectory() as root:
        ledger = Ledger(Path(root), run_id="benchmark")
        folder = ledger.open("1")
        results = _write_indexes(plan, entries_of(plan, components, _STORE), folder, world_size)
        began = time.perf_counter()
        await_indexes(folder, results, Topology(0, ["here"] * world_size, timeout_s=300.0, grace_s=0.0))
        seen = time.perf_counter()
        arrays = entries_of(plan, components, _STORE)
        files = {index_name(rank): (size, digest) for rank, (size, digest) in enumerate(one.index or (0, "") for one in results)}
        listed = {key: ComponentManifest(key, one.pattern.value, [0]) for key, one in components.items()}
        data = CheckpointManifest("1", datetime.now(UTC), world_size, {}, listed, arrays, files).to_bytes()
        made = time.perf_counter()
        ledger.record(folder, data)
        ledger.publish(folder, "1")
        committed = time.perf_counter()
        newest = committed_newest_first(Path(root))[0]
        found = time.perf_counter()
        manifest = read_manifest(newest)
        opened = time.perf_counter()
        ranks = _writers_of(own, manifest)
        checkpoint = StoredCheckpoint(newest, manifest)
        looked = time.perf_counter()
        for rank in ranks:
            checkpoint.index(rank)
        own_read = time.perf_counter()
        checkpoint = StoredCheckpoint(newest, manifest)
        checkpoint.require_chunks()
        all_read = time.perf_counter()
    return {
        "manifest_bytes": len(data),
        "index_bytes": sum(one.index[0] for one in results if one.index),
        "await_s": seen - began,
        "manifest_write_s": made - seen,
        "commit_s": committed - began,
        "find_latest_s": found - committed,
        "manifest_read_s": opened - found,
        "own_indexes": len(ranks),
        "own_indexes_s": own_read - looked,
        "all_indexes_s": all_read - own_read,
    }


def _write_indexes(plan: SavePlan, arrays: Mapping[str, ArrayEntry], folder: Path, world_size: int) -> list[WriteResult]:
    """Write the index that each rank would write, as far as the plan tells; return what the ranks would tell the lead."""
    indexes = {rank: Index(rank) for rank in range(world_size)}
    ends: dict[int, int] = defaultdict(int)

    def extent(rank: int, num_bytes: int) -> ChunkExtent:
        blocks = (_DIGEST,) * -(-num_bytes // BLOCK_BYTES)
        ends[rank] += num_bytes
        return ChunkExtent(f"data-{rank:05d}", ends[rank] - num_bytes, num_bytes, blocks)

    packed: dict[tuple[int, str, str], int] = defaultdict(int)  # rank, path, data type -> elements
    for name, array in plan.arrays.items():
        item = item_bytes(array.dtype)
        for box, rank in array.packs.items():
            path = f"{name.partition('/')[0]}/packed-{array.dtype}-{rank:05d}"
            piece = PackedPiece(path, array.shape, box, packed[rank, path, array.dtype])
            indexes[rank].pieces.setdefault(name, []).append(piece)
            packed[rank, path, array.dtype] += box.num_elements
        for number, rank in enumerate(array.writers):
            assert array.grid is not None, "packed arrays have no chunks"
            region = stored_shape(_STORE, array.grid, chunk_box(array.shape, array.grid, number).shape)
            indexes[rank].chunks.setdefault(arrays[name].path or "", {})[number] = extent(rank, math.prod(region) * item)
    for (rank, path, dtype), num_elements in packed.items():
        indexes[rank].packed[path] = num_elements
        indexes[rank].chunks[path] = {0: extent(rank, num_elements * item_bytes(dtype))}
    results = []
    for rank, index in indexes.items():
        index.files[f"data-{rank:05d}"] = FileRecord(ends[rank], digest_of(b""))
        data = index.to_bytes()
        (folder / index_name(rank)).write_bytes(data)
        results.append(WriteResult(index=[len(data), digest_of(data)]))
    return results


def _writers_of(own: Table, manifest: CheckpointManifest) -> set[int]:
    """Return the ranks whose indexes a rank reads that wants these boxes."""
    ranks: set[int] = set()
    for part in own.parts:
        for name, place in part.names:
            entry, box = manifest.arrays[name], part.places[place].box
            if entry.grid is None:
                ranks.update(entry.packed_in)
            elif box.num_elements:
                ranks.update(entry.writer_of(number) for number, _, _ in needed_chunks(entry.shape, entry.grid, box))
    return ranks
