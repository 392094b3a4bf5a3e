"""New host memory for many tensors at once. Tensors smaller than a huge page get one only if they lie side by side."""

from __future__ import annotations

import math
import mmap

import torch

from ckpt.memory.device import pinned, uses_accelerator
from ckpt.storage.host_memory import private, whole_huge_pages

ARENA_BYTES = 64 << 20
"""Tensors that are smaller than half of it share one, which is freed with the last of them."""
_ALIGNED = 64


class HostMemory:
    """Gives out memory, tensor after tensor. Not to be kept: what is left of an arena when this object goes is never used."""

    def __init__(self) -> None:
        self._arena: mmap.mmap | None = None
        self._used = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous host tensor with zeros in it, whose storage is its own and cannot be resized."""
        count = math.prod(shape)
        num_bytes = count * dtype.itemsize
        if num_bytes == 0:
            return torch.empty(shape, dtype=dtype)
        if num_bytes >= ARENA_BYTES // 2:
            return torch.frombuffer(private(whole_huge_pages(num_bytes)), dtype=dtype, count=count).view(shape)
        if self._arena is None or self._used + num_bytes > ARENA_BYTES:
            self._arena, self._used = private(ARENA_BYTES), 0
        tensor = torch.frombuffer(self._arena, dtype=dtype, count=count, offset=self._used).view(shape)
        self._used += -(-num_bytes // _ALIGNED) * _ALIGNED
        return tensor


def staging_memory(num_bytes: int) -> torch.Tensor:
    """Return memory to copy tensors to, flat uint8: page-locked where this process has an accelerator in use."""
    return pinned(num_bytes) if uses_accelerator() else HostMemory().empty((num_bytes,), torch.uint8)


class Scratch:
    """Memory for one thing after the other, each in the place of the one before; it grows. One thread."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor with any values. Tensors that were given out before are not to be used any more."""
        return self.flat(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def flat(self, num_bytes: int) -> torch.Tensor:
        """So many bytes, flat uint8, with anything in them; those that were given out before are not to be used any more."""
        if len(self._memory) < num_bytes:
            self._memory = staging_memory(num_bytes)
        return self._memory[:num_bytes]
