"""Every rank reads just the boxes it wants, straight into the memory that wants them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ckpt.backends.registry import backend_of_store
from ckpt.device import Device
from ckpt.extents import ExtentReader
from ckpt.strategies.reading import ReadRequest, ReadStats, StoredCheckpoint, StoredPart, by_chunk
from ckpt.topology import Topology


class DirectLoad:
    """Load without talking to other ranks. Ranks start at different places, so that a cold disk serves them side by side."""

    def load(
        self,
        requests: Sequence[ReadRequest],
        checkpoint: StoredCheckpoint,
        topology: Topology,
        device: Device,
        *,
        verify: bool,
    ) -> ReadStats:
        """See `LoadingStrategy.load`.

        Raises:
            CorruptCheckpointError: bytes are missing or, under `verify`, not as they were written.
        """
        chunks = by_chunk([part for request in requests for part in checkpoint.parts(request)])
        start = len(chunks) * topology.rank // topology.world_size
        with ExtentReader(checkpoint.root, verify=verify, progress=topology.progress) as reader:
            for parts in chunks[start:] + chunks[:start]:
                _read_chunk(parts, reader, checkpoint, device)
            needed = sum(request.out.numel() * request.out.element_size() for request in requests)
            return ReadStats(reader.bytes_read, needed)


def _read_chunk(
    stored: Sequence[StoredPart], reader: ExtentReader, checkpoint: StoredCheckpoint, device: Device
) -> None:
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


def _decode(stored: StoredPart, checkpoint: StoredCheckpoint) -> None:
    """Read an encoded part through its format's own library; a packed piece is unrolled and cut here."""
    backend = backend_of_store(stored.store)
    part = stored.part
    if stored.source.shape == tuple(part.out.shape):
        backend.read(checkpoint.root, stored.array, stored.source, part.out)
        return
    flat = torch.empty(stored.source.shape, dtype=part.out.dtype)
    backend.read(checkpoint.root, stored.array, stored.source, flat)
    part.out.copy_(flat.view(part.region)[part.box.slices])
