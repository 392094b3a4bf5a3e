"""Every rank reads just the boxes it wants, straight into the memory that wants them."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from ckpt.backends.base import Backend
from ckpt.format.gc_pause import gc_paused
from ckpt.loading.strategy import ReadRequest, ReadStats, Stored, StoredPart, by_chunk, in_flight_bytes
from ckpt.memory.copies import Filling
from ckpt.memory.device import Device
from ckpt.ranks.topology import Topology
from ckpt.storage.extents import ExtentReader, ReadAt


class DirectLoad:
    """Load without talking to other ranks. Ranks start at different places, so that a cold disk serves them side by side.

    Args:
        max_in_flight_mib: bytes that a rank asks for at once, in MiB: its memory for those that cannot be read into tensors as they
            are; for tensors on a device twice that, page-locked, and as much once on the device. At least a block is (4 MiB); an
            encoded chunk is decoded whole.
        read_at: how bytes come from an open file.

    Raises:
        ConfigurationError: `max_in_flight_mib` is not positive.
    """

    def __init__(self, *, max_in_flight_mib: int = 8, read_at: ReadAt = os.preadv) -> None:
        self._slab_bytes = in_flight_bytes(max_in_flight_mib)
        self._read_at = read_at

    def prepare(
        self, requests: Sequence[ReadRequest], checkpoint: Stored, topology: Topology, device: Device, *, verify: bool
    ) -> DirectReading:
        """See `LoadingStrategy.prepare`; there is nothing to agree on, so any rank may call it, anywhere."""
        return DirectReading(requests, checkpoint, topology, verify, self._slab_bytes, self._read_at)

    def bind(self, backend: Backend) -> None:
        """See `LoadingStrategy.bind`: nothing travels between ranks."""

    def close(self) -> None:
        """See `LoadingStrategy.close`: nothing is kept."""


@dataclass(frozen=True, slots=True)
class DirectReading:
    """See `Reading`."""

    requests: Sequence[ReadRequest]
    checkpoint: Stored
    topology: Topology
    verify: bool
    slab_bytes: int
    read_at: ReadAt

    @gc_paused()
    def run(self) -> ReadStats:
        """See `Reading.run`; it talks to nobody."""
        chunks = by_chunk(self.requests, self.checkpoint)
        start = _start(chunks, self.topology.rank / self.topology.world_size)
        root, progress = self.checkpoint.root, self.topology.progress
        verify = self.verify and self.checkpoint.has_digests
        with (
            Filling(self.slab_bytes) as filling,
            ExtentReader(
                root,
                verify=verify,
                progress=progress,
                read_at=self.read_at,
                slab_bytes=self.slab_bytes,
                landing=filling,
                held=self.checkpoint.held,
            ) as reader,
        ):
            for parts in chunks[start:] + chunks[:start]:
                read_chunk(parts, reader, self.checkpoint, filling)
        return ReadStats(reader.bytes_read, bytes_of(self.requests))

    def close(self) -> None:
        """Nothing is held."""


def _start(chunks: Sequence[Sequence[StoredPart]], share: float) -> int:
    """The chunk before which this share of all chunks' bytes lies: equal shares, or ranks run into each other on a cold disk."""
    ends = list(accumulate(parts[0].chunk.length for parts in chunks))
    return bisect_right(ends, share * ends[-1]) if ends else 0


def bytes_of(requests: Sequence[ReadRequest]) -> int:
    """How many bytes are wanted."""
    return sum(request.out.numel() * request.out.element_size() for request in requests)


def read_chunk(stored: Sequence[StoredPart], reader: ExtentReader, checkpoint: Stored, filling: Filling) -> None:
    """Fill the parts of one chunk, wherever their memory is."""
    if stored[0].chunk.raw:
        reader.read(stored[0].chunk, [one.part for one in stored])
        return
    reader.check(stored[0].chunk, stored[0].part.name)
    for one in stored:
        _decode(one, checkpoint, filling)


def _decode(stored: StoredPart, checkpoint: Stored, filling: Filling) -> None:
    """Read an encoded part through its format's own library; a packed piece is unrolled and cut here."""
    part = stored.part
    is_box = stored.source.shape == tuple(part.out.shape)
    if is_box and part.out.device.type == "cpu":
        checkpoint.decode(stored, stored.source, part.out)
        return
    host = torch.empty(stored.source.shape, dtype=part.out.dtype)
    checkpoint.decode(stored, stored.source, host)
    filling.fill(part.out, host if is_box else host.view(part.region)[part.box.slices])
