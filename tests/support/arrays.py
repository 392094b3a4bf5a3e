"""Arrays for tests of the storage backends: saved by some ranks, read back through the library or through extents."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

import torch

from ckpt.backends.base import Backend, Written
from ckpt.format.box import Box, chunk_box, chunks_meeting, num_chunks, overlap, whole
from ckpt.format.dtypes import zarr_name
from ckpt.format.records import ArraySpec, ChunkExtent, Content, Expected, FileRecord, stored_shape
from ckpt.storage.checkpoint_files import files_below
from ckpt.storage.extents import ExtentReader
from ckpt.storage.wanted_bytes import WantedBox
from tests.support.states import zero_bits


@dataclass
class Saved:
    """What a save has left behind, as the manifest and the indexes would have it."""

    root: Path
    arrays: dict[ArraySpec, torch.Tensor]
    store: str
    chunks: dict[tuple[str, int], ChunkExtent] = field(default_factory=dict)
    rank_files: dict[str, FileRecord] = field(default_factory=dict)
    lead_files: list[str] = field(default_factory=list)

    def files_found(self) -> set[str]:
        with files_below(self.root) as files:
            return set(files.below())


SAVES: list[Saved] = []
"""Registry: all saves of this process."""


def array(path: str, value: torch.Tensor, *grid: int) -> tuple[ArraySpec, torch.Tensor]:
    return ArraySpec(
        path, zarr_name(value.dtype), tuple(value.shape), grid or tuple(max(n, 1) for n in value.shape)
    ), value


def save(
    backend: Backend,
    root: Path,
    arrays: Mapping[ArraySpec, torch.Tensor],
    ranks: Sequence[int] = (0, 3),
    keys: Mapping[str, str] | None = None,
) -> Saved:
    """Save every array: chunks and descriptions dealt out to `ranks` in turn, then joined by the lead.

    Args:
        keys: path -> key, where the path does not tell.
    """
    saved = Saved(root, dict(arrays), backend.store)
    SAVES.append(saved)
    writers = {rank: backend.writer(root, rank, lambda num_bytes: None) for rank in ranks}
    shares = dealt(arrays, len(ranks))
    for writer, share in zip(writers.values(), shares, strict=True):
        writer.expect(expected(spec, number, keys) for spec, number in share)
        for spec, number in share:
            if number is not None:
                writer.write(spec, number, arrays[spec][chunk_box(spec.shape, spec.grid, number).slices].contiguous())
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


def dealt(arrays: Mapping[ArraySpec, torch.Tensor], ranks: int) -> list[list[tuple[ArraySpec, int | None]]]:
    """By rank, its chunks: all of them in turn, and the arrays that have none to the first rank."""
    shares: list[list[tuple[ArraySpec, int | None]]] = [[] for _ in range(ranks)]
    chunks = [(spec, n) for spec in arrays for n in range(math.prod(num_chunks(spec.shape, spec.grid)))]
    for turn, chunk in enumerate(chunks):
        shares[turn % ranks].append(chunk)
    shares[0] += [(spec, None) for spec in arrays if 0 in spec.shape]
    return shares


def expected(spec: ArraySpec, number: int | None, keys: Mapping[str, str] | None = None) -> Expected:
    """What a writer is told of a chunk before it comes; of an array without any: None."""
    box = whole(spec.shape) if number is None else chunk_box(spec.shape, spec.grid, number)
    key = (keys or {}).get(spec.path, key_of(spec.path))
    return Expected(spec, number, [Content(key, spec.shape, box)])


def key_of(path: str) -> str:
    """The key of an array, if it is not too long for a name."""
    name = path.rpartition("/")[2]
    return "" if name == "%" else unquote(name, errors="surrogatepass")


def read_by_extents(saved: Saved, spec: ArraySpec, box: Box) -> torch.Tensor:
    """Return `box` of an array, put together from raw chunks."""
    out = zero_bits(box.shape, saved.arrays[spec].dtype)
    with ExtentReader(saved.root) as reader:
        for number in chunks_meeting(spec.shape, spec.grid, box):
            chunk = chunk_box(spec.shape, spec.grid, number)
            here = overlap(chunk, box) if box.shape else box
            assert here is not None
            stored = stored_shape(saved.store, spec.grid, chunk.shape)
            part = WantedBox(0, stored, here.relative_to(chunk), out[here.relative_to(box).slices], spec.path)
            reader.read(saved.chunks[spec.path, number], [part])
    return out
