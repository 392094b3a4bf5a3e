"""Weights on their way from host memory to a consumer on a device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ckpt.engine.base import NamedTensor
from ckpt.engine.wire.layout import aligned
from ckpt.memory.device import device_memory, wait_for


def on_device(weights: Iterable[NamedTensor], device: torch.device, ring_bytes: int) -> Iterator[NamedTensor]:
    """Yield host weights on a device, in memory that is reused: a tensor is valid until the next one is requested.

    Args:
        ring_bytes: size of that memory, unless a tensor is larger.
    """
    if device.type == "cpu":
        yield from weights
        return
    ring = device_memory(0, device)
    used = 0
    for name, host in weights:
        if used + aligned(host.nbytes) > len(ring):
            wait_for(device)  # the consumer's copies from this memory are done
            if len(ring) < aligned(host.nbytes):
                ring = device_memory(max(aligned(host.nbytes), ring_bytes), device)
            used = 0
        there = ring[used : used + host.nbytes].view(host.dtype).view(host.shape)
        there.copy_(host, non_blocking=True)
        wait_for(device)
        used += aligned(host.nbytes)
        yield name, there
    wait_for(device)  # the same, of the last
