"""Committed checkpoints made of chunks by a few ranks that take turns, each save linking what it can to the one before."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import tensorstore as ts
import torch
import zarr

from ckpt.backends.base import Backend, Writer, Written, staged_digests
from ckpt.catalog.incremental import previous_of
from ckpt.catalog.ledger import Ledger
from ckpt.format import zarr_dtypes
from ckpt.format.box import chunk_box, num_chunks
from ckpt.format.digests import digest_of
from ckpt.format.dtypes import bits_of
from ckpt.format.manifest import MANIFEST_NAME, ArrayEntry, CheckpointManifest, ComponentManifest, Index, index_name
from ckpt.format.records import ArraySpec, stored_shape
from ckpt.storage.stored import read_index, read_manifest
from tests.support import plain_safetensors
from tests.support.arrays import Saved, dealt, expected, key_of

Arrays = Mapping[ArraySpec, torch.Tensor]


@dataclass
class Shelf:
    """A checkpoint root with its saves.

    Attributes:
        stages: give the digests of every chunk, as a save in the background does.
        saved: id -> the arrays, as they were.
        written: id -> what each rank said of the save.
    """

    root: Path
    backend: Backend
    ranks: Sequence[int] = (0, 3)
    min_live: float = 0.5
    stages: bool = False
    saved: dict[str, Arrays] = field(default_factory=dict)
    written: dict[str, list[Written]] = field(default_factory=dict)
    before_finish: Callable[[Writer], None] = lambda writer: None

    def folder(self, checkpoint_id: str) -> Path:
        return self.root / f"checkpoint-{checkpoint_id}"

    def save(self, checkpoint_id: str, arrays: Arrays, previous: str | None = None) -> Path:
        """Save, and commit; chunks are dealt out to the ranks in turn."""
        ledger = Ledger(self.root, run_id="test")
        folder = ledger.open(checkpoint_id)
        try:
            self.written[checkpoint_id] = [self._write(folder, arrays, at, previous) for at in range(len(self.ranks))]
            wrote = [
                rank for rank, written in zip(self.ranks, self.written[checkpoint_id], strict=True) if written.files
            ]
            self._record(folder, checkpoint_id, arrays, self.backend.join(folder, wrote, lambda num_bytes: None))
        except BaseException:
            ledger.discard(folder)
            raise
        self.saved[checkpoint_id] = {spec: value.clone() for spec, value in arrays.items()}
        return ledger.publish(folder, checkpoint_id)

    def linked_bytes(self, checkpoint_id: str) -> int:
        return sum(written.linked_bytes for written in self.written[checkpoint_id])

    def written_bytes(self, checkpoint_id: str) -> int:
        """Of the arrays: files that are not linked."""
        all_files = [record.size for one in self.written[checkpoint_id] for record in one.files.values()]
        return sum(all_files) - self.linked_bytes(checkpoint_id)

    def reads_back(self, checkpoint_id: str) -> bool:
        """Whether the plain library of the store, and extents by hand, give every array to the bit."""
        folder = self.folder(checkpoint_id)
        manifest = read_manifest(folder)
        chunks = {}
        for rank in manifest.index_ranks():
            index = read_index(folder, manifest, rank)
            chunks |= {(path, n): e for path, by_number in index.chunks.items() for n, e in by_number.items()}
        context = ts.Context()
        for spec, value in self.saved[checkpoint_id].items():
            if plain(folder, spec, self.backend.store, context).tobytes() != bits_of(value).tobytes():
                return False
            for number in range(math.prod(num_chunks(spec.shape, spec.grid))):
                extent = chunks[spec.path, number]
                host = value[chunk_box(spec.shape, spec.grid, number).slices].contiguous()
                if extent.raw and extent.digests != self._digests(spec, host):
                    return False
        return True

    def _write(self, folder: Path, arrays: Arrays, at: int, previous: str | None) -> Written:
        rank = self.ranks[at]
        before = previous_of(self.folder(previous), rank, self.min_live) if previous is not None else None
        writer = self.backend.writer(folder, rank, lambda num_bytes: None, before)
        try:
            share = dealt(arrays, len(self.ranks))[at]
            writer.expect(expected(spec, number) for spec, number in share)
            for spec, number in share:
                if number is not None:
                    host = arrays[spec][chunk_box(spec.shape, spec.grid, number).slices].clone().contiguous()
                    writer.write(spec, number, host, self._digests(spec, host) if self.stages else None)
                    host.view(-1).view(torch.uint8).fill_(0xEE)  # its memory is used again
            groups = [spec.path.rpartition("/")[0] for spec in arrays] if at == 0 else None
            writer.describe(list(arrays)[at :: len(self.ranks)], groups)
            self.before_finish(writer)
            written = writer.finish()
            index = Index(rank, written.files, dead=written.dead)
            for (path, number), extent in written.chunks.items():
                index.chunks.setdefault(path, {})[number] = extent
            if index.files:
                writer.add(index_name(rank), index.to_bytes())
            writer.make_durable()
        except BaseException:
            writer.abort()
            raise
        return written

    def _digests(self, spec: ArraySpec, host: torch.Tensor) -> tuple[int, ...]:
        return staged_digests(host, stored_shape(self.backend.store, spec.grid, tuple(host.shape)))

    def _record(self, folder: Path, checkpoint_id: str, arrays: Arrays, joined: Sequence[str]) -> None:
        files = [*joined, *(index_name(rank) for rank in self.ranks if (folder / index_name(rank)).exists())]
        listed = {path: (folder / path).read_bytes() for path in files}
        manifest = CheckpointManifest(
            checkpoint_id=checkpoint_id,
            timestamp=datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=len(self.saved)),
            world_size=max(self.ranks) + 1,
            topology={},
            components={key: ComponentManifest(key, "replicated", list(self.ranks)) for key in ("model", "optimizer")},
            arrays=self._entries(arrays),
            files={path: (len(data), digest_of(data)) for path, data in listed.items()},
        )
        (folder / MANIFEST_NAME).write_bytes(manifest.to_bytes())

    def _entries(self, arrays: Arrays) -> dict[str, ArrayEntry]:
        entries = {}
        turn = 0
        for spec in arrays:
            count = math.prod(num_chunks(spec.shape, spec.grid))
            runs = tuple((self.ranks[(turn + at) % len(self.ranks)], at, 1) for at in range(count))
            turn += count
            entries[spec.path] = ArrayEntry(spec.dtype, spec.shape, self.backend.store, spec.path, spec.grid, runs)
        return entries


def plain(folder: Path, spec: ArraySpec, store: str, context: ts.Context) -> np.ndarray:
    """An array as the library of the store reads it, knowing nothing of us."""
    if store == "safetensors":
        return bits_of(plain_safetensors.read(folder / spec.path.rpartition("/")[0], key_of(spec.path)))
    if store == "ocdbt":
        kvstore = {"driver": "ocdbt", "base": f"file://{folder}/arrays.ocdbt/", "path": f"{spec.path}/"}
        return np.asarray(ts.open({"driver": "zarr3", "kvstore": kvstore}, context=context).result().read().result())
    zarr_dtypes.register()
    return np.asarray(zarr.open_array(folder / spec.path, mode="r")[...])


def bytes_on_disk(root: Path) -> int:
    """What `du` counts: every file below, once however many names it has."""
    inodes = {}
    for inside, _, names in os.walk(root):
        for name in names:
            found = os.lstat(os.path.join(inside, name))
            inodes[found.st_dev, found.st_ino] = found.st_size
    return sum(inodes.values())


def as_saved(shelf: Shelf, checkpoint_id: str, ranks: Sequence[int]) -> Saved:
    """A checkpoint as `tests.support.arrays` has it."""
    saved = Saved(shelf.folder(checkpoint_id), dict(shelf.saved[checkpoint_id]), shelf.backend.store)
    manifest = read_manifest(saved.root)
    for rank in ranks:
        for path, by_number in read_index(saved.root, manifest, rank).chunks.items():
            saved.chunks |= {(path, number): extent for number, extent in by_number.items()}
    return saved
