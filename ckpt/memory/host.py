"""Host memory: on huge pages, kept from save to save, or shared with other processes.

Small tensors share an arena, so that they get huge pages, too. Memory for snapshots is kept: memory touched for the first time is slow.
Memory that another process can map is a memfd: the kernel frees it with the last process that has it.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch

from ckpt.errors import ConfigurationError
from ckpt.memory.device import pinned, uses_accelerator
from ckpt.storage import host_memory
from ckpt.storage.host_memory import MemoryFile, can_be_shared, populate, private, shared, whole_huge_pages

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


_ARENA_ALIGNED = 4096
_AT_ONCE_BYTES = 32 << 20


class Arena:
    """An allocator over one block of memory. One thread grows it and takes ranges, another gives them back in any order.

    Args:
        make: allocates a number of bytes, flat uint8.
    """

    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        self._make = make
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._free: list[tuple[int, int]] = []
        self._changed = threading.Condition()

    @property
    def num_bytes(self) -> int:
        return len(self._memory)

    def grow(self, num_bytes: int, look: Callable[[], None]) -> None:
        """Make the block at least this large. Waits until no range is taken if it must be reallocated.

        Args:
            look: called every 0.2 s while waiting; may raise.
        """
        with self._changed:
            if num_bytes <= len(self._memory):
                return
            while self._free != ([(0, len(self._memory))] if len(self._memory) else []):
                self._wait(look)
            self._free, self._memory = [], torch.empty(0, dtype=torch.uint8, device="cpu")  # before the new memory is there
            self._allocate(num_bytes)

    def prepare(self, num_bytes: int, is_over: Callable[[], bool]) -> None:
        """Allocate the block, if there is none yet, and give it its pages, so that the first copies into it are as fast as later ones.

        Any thread, beside all others.

        Args:
            is_over: whether nobody wants it any more. Looked at before each few pages.
        """
        with self._changed:
            if not len(self._memory) and not is_over():
                self._allocate(num_bytes)
            memory = self._memory
        for start in range(0, len(memory), _AT_ONCE_BYTES):
            if memory is not self._memory or is_over():
                return  # another block has taken its place
            populate(memory.data_ptr() + start, min(_AT_ONCE_BYTES, len(memory) - start))

    def let_go(self) -> None:
        """Free the block, of which no range is taken. The next `grow` allocates a new one."""
        with self._changed:
            self._free, self._memory = [], torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, num_bytes: int, look: Callable[[], None]) -> torch.Tensor:
        """Return a range of this many bytes, flat uint8, waiting for one. More than the block's size is never available.

        Args:
            look: called every 0.2 s while waiting; may raise.
        """
        wanted = room_for(num_bytes)
        if wanted == 0:
            return self._memory[:0]
        with self._changed:
            while True:
                for at, (start, size) in enumerate(self._free):
                    if size >= wanted:
                        self._free[at : at + 1] = [(start + wanted, size - wanted)] if size > wanted else []
                        return self._memory[start : start + num_bytes]
                assert wanted <= len(self._memory), f"{wanted} bytes are more than the {len(self._memory)} there are"
                self._wait(look)

    def give_back(self, room: torch.Tensor) -> None:
        """Give a range back. Any thread."""
        if not len(room):
            return
        start = room.data_ptr() - self._memory.data_ptr()
        size = room_for(len(room))
        with self._changed:
            joined: list[tuple[int, int]] = []
            for begin, length in sorted([*self._free, (start, size)]):
                if joined and sum(joined[-1]) == begin:
                    joined[-1] = joined[-1][0], joined[-1][1] + length
                else:
                    joined.append((begin, length))
            self._free = joined
            self._changed.notify_all()

    def _allocate(self, num_bytes: int) -> None:
        self._memory = self._make(room_for(num_bytes))
        self._free = [(0, len(self._memory))]

    def _wait(self, look: Callable[[], None]) -> None:
        look()
        self._changed.wait(0.2)


def room_for(num_bytes: int) -> int:
    """Return the bytes that a range takes in an arena, rounded up to a page."""
    return -(-num_bytes // _ARENA_ALIGNED) * _ARENA_ALIGNED


class Segment(NamedTuple):
    """Shared memory that this process has allocated and still has mapped.

    Attributes:
        fd: for the process that shall map it; closed with the last tensor in it.
        address: of its first byte.
        name: of the memfd, unique on this host.
    """

    fd: int
    address: int
    num_bytes: int
    name: str


_segments: dict[int, Segment] = {}
"""Registry: descriptor -> the segments of this process that are mapped."""


def shared_memory(num_bytes: int) -> torch.Tensor:
    """Return new shared memory, flat uint8, all zeros.

    Raises:
        ConfigurationError: this system has no memfd_create.
        OSError: there is not enough of it.
    """
    if not can_be_shared():
        raise ConfigurationError("memory that two processes share needs Linux, for memfd_create")
    name = f"ckpt-staging-{secrets.token_hex(8)}"
    fd = shared(name, whole_huge_pages(max(num_bytes, 1)))
    try:
        whole = host_memory.mapped(fd, os.fstat(fd).st_size)
    except BaseException:
        os.close(fd)
        raise
    memory = torch.frombuffer(whole, dtype=torch.uint8)
    _segments[fd] = Segment(fd, memory.data_ptr(), memory.nbytes, name)
    weakref.finalize(whole, _forget, fd).atexit = False
    return memory[:num_bytes]


def segment_of(host: torch.Tensor) -> tuple[Segment, int] | None:
    """Return the segment of a contiguous tensor, and the tensor's offset in it in bytes; None: it lies in none."""
    if host.numel():
        first = host.data_ptr()
        for segment in list(_segments.values()):
            if segment.address <= first and first + host.nbytes <= segment.address + segment.num_bytes:
                return segment, first - segment.address
    return None


def place_of(host: torch.Tensor) -> MemoryFile | None:
    """Return the place of the segment that a tensor lies in, for `memory_at` in another process; None: it lies in none."""
    found = segment_of(host)
    if found is None:
        return None
    segment = found[0]
    return MemoryFile(os.getpid(), segment.fd, os.fstat(segment.fd).st_ino, segment.num_bytes, segment.name)


def memory_at(place: MemoryFile) -> torch.Tensor | None:
    """Map a segment of another process of this host, flat uint8; None: it is not there any more, or belongs to another user."""
    memory = host_memory.mapped_at(place)
    return None if memory is None else torch.frombuffer(memory, dtype=torch.uint8)


def mapped(fd: int) -> torch.Tensor:
    """Map the segment behind a descriptor, flat uint8. The descriptor may be closed afterwards."""
    return torch.frombuffer(host_memory.mapped(fd, os.fstat(fd).st_size), dtype=torch.uint8)


def _forget(fd: int) -> None:
    del _segments[fd]
    os.close(fd)
