"""Allocate host memory for many tensors on huge pages. Small tensors share an arena, so that they get huge pages, too."""

from __future__ import annotations

import math
import mmap

import torch

from ckpt.memory.device import pinned, uses_accelerator
from ckpt.storage.host_memory import private, whole_huge_pages

ARENA_BYTES = 64 << 20
"""Size of an arena. Tensors below half of it share one, which is freed with the last of them."""
_ALIGNED = 64


class HostMemory:
    """Allocates tensors, one after another. Short-lived: the unused rest of its last arena is lost with it."""

    def __init__(self) -> None:
        self._arena: mmap.mmap | None = None
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous host tensor of zeros, whose storage cannot be resized."""
        count = math.prod(shape)
        num_bytes = count * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        if num_bytes >= ARENA_BYTES // 2:
            return torch.frombuffer(private(whole_huge_pages(num_bytes)), dtype=dtype, count=count).view(shape)
        if self._arena is None or self._used + num_bytes > ARENA_BYTES:
            self._arena, self._used = private(ARENA_BYTES), 0
        tensor = torch.frombuffer(self._arena, dtype=dtype, count=count, offset=self._used).view(shape)
        self._used += -(-num_bytes // _ALIGNED) * _ALIGNED
        return tensor


def staging_memory(num_bytes: int) -> torch.Tensor:
    """Return memory to copy tensors to, flat uint8: page-locked if this process uses an accelerator."""
    return pinned(num_bytes) if uses_accelerator() else HostMemory().empty((num_bytes,), torch.uint8)


class Scratch:
    """One growing buffer, reused for each allocation. One thread."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous uninitialized tensor. It replaces the one returned before."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if len(self._memory) < num_bytes:
            self._memory = staging_memory(num_bytes)
        return self._memory[:num_bytes].view(dtype).view(shape)
