"""Arrays for tests of the storage backends: saved by some ranks, read back through the library or through extents."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ckpt.backends.base import ArraySpec, Backend, ChunkExtent, FileRecord, Written
from ckpt.box import Box, chunk_box, chunks_meeting, num_chunks, overlap
from ckpt.dtypes import zarr_name
from ckpt.extents import ExtentReader, Part


@dataclass
class Saved:
    """What a save has left behind, as the manifest and the indexes would have it."""

    root: Path
    arrays: dict[ArraySpec, torch.Tensor]
    chunks: dict[tuple[str, int], ChunkExtent] = field(default_factory=dict)
    rank_files: dict[str, FileRecord] = field(default_factory=dict)
    lead_files: list[str] = field(default_factory=list)

    def files_found(self) -> set[str]:
        return {path.relative_to(self.root).as_posix() for path in self.root.rglob("*") if path.is_file()}


def array(path: str, value: torch.Tensor, *grid: int) -> tuple[ArraySpec, torch.Tensor]:
    return ArraySpec(
        path, zarr_name(value.dtype), tuple(value.shape), grid or tuple(max(n, 1) for n in value.shape)
    ), value


def save(
    backend: Backend, root: Path, arrays: Mapping[ArraySpec, torch.Tensor], ranks: Sequence[int] = (0, 3)
) -> Saved:
    """Save every array: chunks and descriptions dealt out to `ranks` in turn, then joined by the lead."""
    saved = Saved(root, dict(arrays))
    writers = {rank: backend.writer(root, rank, lambda num_bytes: None) for rank in ranks}
    turn = 0
    for spec, value in arrays.items():
        for number in range(math.prod(num_chunks(spec.shape, spec.grid))):
            host = value[chunk_box(spec.shape, spec.grid, number).slices].contiguous()
            writers[ranks[turn % len(ranks)]].write(spec, number, host)
            turn += 1
    for at, (rank, writer) in enumerate(writers.items()):
        groups = [spec.path.rpartition("/")[0] for spec in arrays] if rank == ranks[-1] else None
        writer.describe(list(arrays)[at :: len(ranks)], groups)
    written: dict[int, Written] = {rank: writer.finish() for rank, writer in writers.items()}
    for writer in writers.values():
        writer.make_durable()
    for one in written.values():
        saved.chunks |= one.chunks
        saved.rank_files |= one.files
    saved.lead_files = backend.join(root, [rank for rank in ranks if written[rank].files], lambda num_bytes: None)
    return saved


def read_by_extents(saved: Saved, spec: ArraySpec, box: Box) -> torch.Tensor:
    """Return `box` of an array, put together from raw chunks."""
    out = torch.zeros(box.shape, dtype=saved.arrays[spec].dtype)
    with ExtentReader(saved.root) as reader:
        for number in chunks_meeting(spec.shape, spec.grid, box):
            chunk = chunk_box(spec.shape, spec.grid, number)
            here = overlap(chunk, box) if box.shape else box
            assert here is not None
            part = Part(0, spec.grid, here.relative_to(chunk), out[here.relative_to(box).slices], spec.path)
            reader.read(saved.chunks[spec.path, number], [part])
    return out
