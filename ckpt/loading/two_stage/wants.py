"""The bytes that one rank wants, by chunk: a value that all ranks exchange, and the places of these bytes in the rank's tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ckpt.format.dtypes import item_bytes
from ckpt.format.gc_pause import gc_paused
from ckpt.format.records import ALIGNMENT, ChunkExtent
from ckpt.loading.chunk_reader import ChunkReader
from ckpt.loading.strategy import ReadRequest, Stored, StoredPart, by_chunk, bytes_of
from ckpt.storage.wanted_bytes import WantedBytes

ChunkKey = tuple[str, int]
"""File and offset: no two chunks share them."""


class Want(NamedTuple):
    """The bytes that a rank wants of one chunk. Travels as JSON.

    Attributes:
        unit: bytes that are read as one.
        whole: the chunk is decoded as one, by the rank that reads of it.
        stretches: ascending [start, stop), of whole units but for the end of the chunk.
    """

    file: str
    offset: int
    unit: int
    whole: bool
    stretches: tuple[tuple[int, int], ...]

    @property
    def key(self) -> ChunkKey:
        return self.file, self.offset


class ChunkRange(NamedTuple):
    """The bytes [start, stop) of one chunk."""

    key: ChunkKey
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class RankWants:
    """Everything that one rank wants.

    Attributes:
        parts: chunk -> parts of the requests in it.
        places: chunk -> where its bytes belong; not of chunks in `held`.
        wants: of the chunks that are read from storage, for all ranks to know.
        held: chunks that lie in memory of this host: this rank reads them itself, and no rank spreads them.
        devices: of the rank's tensors.
        num_bytes: that the requests want.
    """

    parts: Mapping[ChunkKey, Sequence[StoredPart]]
    places: Mapping[ChunkKey, WantedBytes]
    wants: Sequence[Want]
    held: Sequence[ChunkRange]
    devices: AbstractSet[torch.device]
    num_bytes: int

    def are_cached(self, reader: ChunkReader) -> bool:
        """Return whether the page cache of this host has all that is to be read from storage."""
        chunks = [self.parts[want.key][0].chunk for want in self.wants]
        return all(map(reader.is_cached, chunks, [want.stretches for want in self.wants]))

    def by_itself(self) -> RankWants:
        """Return the same, with nothing to spread: this rank reads all of it."""
        held = [*self.held, *(ChunkRange(want.key, 0, want.stretches[-1][1]) for want in self.wants)]
        return replace(self, places={}, wants=(), held=held)


@gc_paused()
def wants_of(requests: Sequence[ReadRequest], checkpoint: Stored, *, verify: bool) -> RankWants:
    """Find the chunks that requests want bytes of, and which bytes.

    Raises:
        CorruptCheckpointError: an index contradicts the manifest, or a part does not lie in its chunk.
    """
    parts = {(some[0].chunk.file, some[0].chunk.offset): some for some in by_chunk(requests, checkpoint)}
    places, wants, held = {}, [], []
    for key, some in parts.items():
        chunk = some[0].chunk
        if chunk.file in checkpoint.held:
            held.append(ChunkRange(key, 0, chunk.length))
            continue
        unit = chunk.block_bytes if chunk.raw and verify else ALIGNMENT
        if not chunk.raw:  # it travels decoded
            array = some[0].array
            chunk = ChunkExtent(*key, math.prod(array.grid) * item_bytes(array.dtype), ())
        places[key] = WantedBytes(chunk, [want.part for want in some])
        if stretches := places[key].stretches(unit):
            wants.append(Want(*key, unit, not some[0].chunk.raw, tuple(stretches)))
    devices = {request.out.device for request in requests}
    return RankWants(parts, places, wants, held, devices, bytes_of(requests))
