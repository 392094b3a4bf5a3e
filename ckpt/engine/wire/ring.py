"""Weights on their way from host memory to who loads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ckpt.engine.base import NamedTensor
from ckpt.engine.wire.layout import aligned
from ckpt.memory.device import device_memory, wait_for


def on_device(weights: Iterable[NamedTensor], device: torch.device, ring_bytes: int) -> Iterator[NamedTensor]:
    """Yield host weights on a device, in memory that is used again: a tensor is good until the next one is asked for.

    Args:
        ring_bytes: of that memory; more, where a tensor is larger.
    """
    if device.type == "cpu":
        yield from weights
        return
    ring = device_memory(0, device)
    used = 0
    for name, host in weights:
        if used + aligned(host.nbytes) > len(ring):
            wait_for(device)  # whoever copies from what was yielded has done so
            if len(ring) < aligned(host.nbytes):
                ring = device_memory(max(aligned(host.nbytes), ring_bytes), device)
            used = 0
        there = ring[used : used + host.nbytes].view(host.dtype).view(host.shape)
        there.copy_(host, non_blocking=True)
        wait_for(device)
        used += aligned(host.nbytes)
        yield name, there
    wait_for(device)  # the same, of the last
