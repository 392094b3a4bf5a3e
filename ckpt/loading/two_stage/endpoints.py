"""The two ends of one rank's way: bytes it reads from storage, and the tensors that its bytes belong to."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ckpt.format.gc_pause import gc_paused
from ckpt.loading.chunk_reader import ChunkReader, delivered
from ckpt.loading.strategy import ReadRequest, ReadStats, Stored, StoredPart, by_chunk, bytes_of
from ckpt.loading.two_stage.spread_blocks import ChunkKey, ChunkRange, Want
from ckpt.memory.copies import Filling
from ckpt.storage.extents import WantedBytes


class RankEndpoints:
    """What one rank wants, by chunk: where its bytes come from, and where they belong.

    Args:
        reader: reads for the reader thread.
        slab_bytes: see `Filling`, for what the calling thread places.

    Attributes:
        held: chunks that lie in memory of this host: this rank reads them itself, and no rank spreads them.
    """

    @gc_paused()
    def __init__(
        self, requests: Sequence[ReadRequest], checkpoint: Stored, reader: ChunkReader, slab_bytes: int
    ) -> None:
        self._bytes_needed = bytes_of(requests)
        self._reader = reader
        self._filling = Filling(slab_bytes)
        self._devices = {request.out.device for request in requests}
        self._parts = {_key_of(parts): parts for parts in by_chunk(requests, checkpoint)}
        self.held = [
            ChunkRange(key, 0, parts[0].chunk.length)
            for key, parts in self._parts.items()
            if parts[0].chunk.file in checkpoint.held
        ]
        held = {whole.key for whole in self.held}
        self._wanted = {
            key: WantedBytes(delivered(parts[0]), [one.part for one in parts])
            for key, parts in self._parts.items()
            if key not in held
        }

    def stats(self) -> ReadStats:
        """The bytes that this rank has read from storage, and needs."""
        return ReadStats(self._reader.bytes_read, self._bytes_needed)

    def wants(self) -> list[Want]:
        """What this rank wants of the chunks in storage, for all ranks to know."""
        wants = []
        for key, wanted in self._wanted.items():
            chunk = self._parts[key][0].chunk
            unit = self._reader.unit_of(chunk)
            if stretches := wanted.stretches(unit):
                wants.append(Want(*key, unit, not chunk.raw, tuple(stretches)))
        return wants

    def begin(self) -> None:
        """Wait for what is queued on the devices of this rank's tensors: later that could mean waiting for other ranks."""
        self._reader.filling.begin(self._devices)
        self._filling.begin(self._devices)

    def fetch(self, piece: ChunkRange, memory: torch.Tensor) -> None:
        """Read a piece from storage, checked, into host memory. The reader thread calls it."""
        self._reader.fetch(self._parts[piece.key][0], piece.start, memory, self._wanted[piece.key].name_of)

    def place(self, piece: ChunkRange, memory: torch.Tensor) -> None:
        """Copy a piece from memory, on the host or a device, to the tensors of this rank. The calling thread calls it."""
        place = self._filling.place if memory.device.type == "cpu" else self._filling.place_within
        place(self._wanted[piece.key], piece.start, piece.stop, memory)

    def read_own(self, pieces: Sequence[ChunkRange]) -> None:
        """Read pieces of one chunk, which this rank reads for itself, into its tensors. The reader thread calls it."""
        key = pieces[0].key
        ranges = [(piece.start, piece.stop) for piece in pieces] if key in self._wanted else None
        self._reader.read(self._parts[key], ranges)

    def close(self) -> None:
        """Wait for copies to devices, and let go of files and memory."""
        self._reader.close()
        self._filling.close()


def _key_of(parts: Sequence[StoredPart]) -> ChunkKey:
    return parts[0].chunk.file, parts[0].chunk.offset
