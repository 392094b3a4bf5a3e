"""Every rank reads just the boxes it wants, straight into the memory that wants them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ckpt.collector import collector_paused
from ckpt.device import Device
from ckpt.extents import ExtentReader, ReadAt
from ckpt.strategies.reading import ReadRequest, ReadStats, Stored, StoredPart, by_chunk
from ckpt.topology import Topology


class DirectLoad:
    """Load without talking to other ranks. Ranks start at different places, so that a cold disk serves them side by side.

    Args:
        read_at: how bytes come from an open file.
    """

    def __init__(self, *, read_at: ReadAt = os.preadv) -> None:
        self._read_at = read_at

    def prepare(
        self, requests: Sequence[ReadRequest], checkpoint: Stored, topology: Topology, device: Device, *, verify: bool
    ) -> DirectReading:
        """See `LoadingStrategy.prepare`; there is nothing to agree on, so any rank may call it, anywhere."""
        return DirectReading(requests, checkpoint, topology, device, verify, self._read_at)


@dataclass(frozen=True, slots=True)
class DirectReading:
    """See `Reading`."""

    requests: Sequence[ReadRequest]
    checkpoint: Stored
    topology: Topology
    device: Device
    verify: bool
    read_at: ReadAt

    def run(self) -> ReadStats:
        """See `Reading.run`; it talks to nobody."""
        with collector_paused():
            chunks = by_chunk([part for request in self.requests for part in self.checkpoint.parts(request)])
        start = len(chunks) * self.topology.rank // self.topology.world_size
        root, progress = self.checkpoint.root, self.topology.progress
        verify = self.verify and self.checkpoint.has_digests
        with ExtentReader(root, verify=verify, progress=progress, read_at=self.read_at) as reader:
            for parts in chunks[start:] + chunks[:start]:
                read_chunk(parts, reader, self.checkpoint, self.device)
            return ReadStats(reader.bytes_read, bytes_of(self.requests))

    def close(self) -> None:
        """Nothing is held."""


def bytes_of(requests: Sequence[ReadRequest]) -> int:
    """How many bytes are wanted."""
    return sum(request.out.numel() * request.out.element_size() for request in requests)


def read_chunk(stored: Sequence[StoredPart], reader: ExtentReader, checkpoint: Stored, device: Device) -> None:
    """Fill the parts of one chunk: on the host directly, elsewhere through a host buffer."""
    staged = [_on_host(one) for one in stored]
    if stored[0].chunk.raw:
        reader.read(stored[0].chunk, [one.part for one in staged])
    else:
        reader.check(stored[0].chunk, stored[0].part.name)
        for one in staged:
            _decode(one, checkpoint)
    for one, host in zip(stored, staged, strict=True):
        if host is not one:
            device.fill(one.part.out, host.part.out)


def _on_host(stored: StoredPart) -> StoredPart:
    """The same part with host memory to fill, where its own is on a device."""
    out = stored.part.out
    if out.device.type == "cpu":
        return stored
    return replace(stored, part=replace(stored.part, out=torch.empty(out.shape, dtype=out.dtype)))


def _decode(stored: StoredPart, checkpoint: Stored) -> None:
    """Read an encoded part through its format's own library; a packed piece is unrolled and cut here."""
    part = stored.part
    if stored.source.shape == tuple(part.out.shape):
        checkpoint.decode(stored, stored.source, part.out)
        return
    flat = torch.empty(stored.source.shape, dtype=part.out.dtype)
    checkpoint.decode(stored, stored.source, flat)
    part.out.copy_(flat.view(part.region)[part.box.slices])
