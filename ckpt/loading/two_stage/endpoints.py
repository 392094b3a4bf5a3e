"""Both ends of the way of one rank: where its bytes come from in storage, and where they belong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ckpt.format.box import Box, chunk_box, num_chunks
from ckpt.format.dtypes import item_bytes, raw_bytes, torch_dtype
from ckpt.format.gc_pause import gc_paused
from ckpt.format.records import ChunkExtent
from ckpt.loading.direct import bytes_of, read_chunk
from ckpt.loading.strategy import ReadRequest, Stored, StoredPart, by_chunk
from ckpt.loading.two_stage.spread_blocks import ChunkKey, ChunkRange, Want
from ckpt.memory.copies import Filling
from ckpt.ranks.topology import Topology
from ckpt.storage.extents import ALIGNMENT, ExtentReader, ReadAt, WantedBox, WantedBytes


class RankEndpoints:
    """What one rank wants, chunk by chunk, and how it gets it from storage. See `ckpt.loading.two_stage.spread_worker.Endpoints`.

    Args:
        slab_bytes: memory for what this rank alone wants, where that cannot be read into tensors as it is.
    """

    @gc_paused()
    def __init__(
        self,
        requests: Sequence[ReadRequest],
        checkpoint: Stored,
        topology: Topology,
        verify: bool,
        read_at: ReadAt,
        slab_bytes: int,
    ) -> None:
        self.bytes_needed = bytes_of(requests)
        self._checkpoint = checkpoint
        self._verify = verify
        self._own_filling = Filling(slab_bytes, "filling by the reader thread")
        self._filling = Filling(slab_bytes)
        self._reader = ExtentReader(
            checkpoint.root,
            verify=verify,
            progress=topology.progress,
            read_at=read_at,
            slab_bytes=slab_bytes,
            landing=self._own_filling,
            held=checkpoint.held,
        )
        chunks = by_chunk(requests, checkpoint)
        self._held = [parts for parts in chunks if parts[0].chunk.file in checkpoint.held]
        chunks = [parts for parts in chunks if parts[0].chunk.file not in checkpoint.held]
        self._stored = {_key_of(parts[0].chunk): parts for parts in chunks}
        self._wanted = {key: WantedBytes(_delivered(parts[0]), _parts_of(parts)) for key, parts in self._stored.items()}
        self._decoded: tuple[ChunkKey, torch.Tensor] | None = None
        self._bytes_unchecked = 0  # read by a library alone

    @property
    def bytes_read(self) -> int:
        return self._reader.bytes_read + self._bytes_unchecked

    def wants(self) -> list[Want]:
        """What this rank wants, for the others to know; not what is in memory that it can read itself."""
        rows = []
        for key, parts in self._stored.items():
            chunk = parts[0].chunk
            unit = self._reader.unit_of(chunk) if chunk.raw else ALIGNMENT
            stretches = self._wanted[key].stretches(unit)
            if stretches:
                rows.append(Want(*key, unit, not chunk.raw, tuple(stretches)))
        return rows

    def begin(self) -> None:
        """Wait for what is queued on the devices of what this rank wants: later that could mean waiting for other ranks."""
        devices = {device for wanted in self._wanted.values() for device in wanted.devices}
        devices |= {stored.part.out.device for parts in self._held for stored in parts}
        self._own_filling.begin(devices)
        self._filling.begin(devices)

    def read_held(self) -> None:
        """Read what is in memory of this host to where it belongs."""
        for parts in self._held:
            read_chunk(parts, self._reader, self._checkpoint, self._own_filling)

    def fetch(self, piece: ChunkRange, memory: torch.Tensor) -> None:
        """See `Endpoints.fetch`."""
        stored = self._stored[piece.key][0]
        if stored.chunk.raw:
            self._reader.fetch(stored.chunk, piece.start, _memory_of(memory), self._wanted[piece.key].name_of)
            return
        if self._decoded is None or self._decoded[0] != piece.key:
            self._decoded = piece.key, self._decode(stored)
        memory.copy_(self._decoded[1][piece.start : piece.stop])

    def place(self, piece: ChunkRange, memory: torch.Tensor) -> None:
        """See `Endpoints.place`."""
        place = self._filling.place if memory.device.type == "cpu" else self._filling.place_within
        place(self._wanted[piece.key], piece.start, piece.stop, memory)

    def read_own(self, pieces: Sequence[ChunkRange]) -> None:
        """See `Endpoints.read_own`."""
        stored = self._stored[pieces[0].key]
        chunk = stored[0].chunk
        if not chunk.raw:
            self._bytes_unchecked += 0 if self._verify else chunk.length
            read_chunk(stored, self._reader, self._checkpoint, self._own_filling)
        else:
            self._reader.read(chunk, _parts_of(stored), [(piece.start, piece.stop) for piece in pieces])

    def close(self) -> None:
        """Wait for what is on its way to devices, close the files, and let go of a decoded chunk."""
        self._own_filling.close()
        self._filling.close()
        self._reader.close()
        self._decoded = None

    def _decode(self, stored: StoredPart) -> torch.Tensor:
        """All bytes of an encoded chunk, checked before and decoded by its format's own library, with an edge chunk's padding."""
        self._reader.check(stored.chunk, stored.part.name)
        self._bytes_unchecked += 0 if self._verify else stored.chunk.length
        array = stored.array
        decoded = torch.zeros(array.grid, dtype=torch_dtype(array.dtype))
        box = _chunk_of(stored)
        out = decoded[tuple(slice(0, side) for side in box.shape)]
        whole = out if out.is_contiguous() else torch.empty(box.shape, dtype=out.dtype)
        self._checkpoint.decode(stored, box, whole)
        if whole is not out:
            out.copy_(whole)
        return raw_bytes(decoded)


def _key_of(chunk: ChunkExtent) -> ChunkKey:
    return chunk.file, chunk.offset


def _parts_of(stored: Sequence[StoredPart]) -> list[WantedBox]:
    return [one.part for one in stored]


def _delivered(stored: StoredPart) -> ChunkExtent:
    """The chunk as its bytes are delivered: an encoded one is decoded by who reads it."""
    chunk = stored.chunk
    if chunk.raw:
        return chunk
    length = math.prod(stored.array.grid) * item_bytes(stored.array.dtype)
    return ChunkExtent(chunk.file, chunk.offset, length, ())


def _chunk_of(stored: StoredPart) -> Box:
    """The box of the chunk that a part lies in."""
    array = stored.array
    number = 0
    for side, cell, first in zip(num_chunks(array.shape, array.grid), array.grid, stored.source.offsets, strict=True):
        number = number * side + first // cell
    return chunk_box(array.shape, array.grid, number)


def _memory_of(memory: torch.Tensor) -> memoryview:
    flat: Any = memory.numpy()
    return memoryview(flat)
