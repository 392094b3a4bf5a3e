"""Host memory that another process can map, too (memfd). The kernel frees it with the last process that has it."""

from __future__ import annotations

import os
import secrets
import weakref
from typing import NamedTuple

import torch

from ckpt.errors import ConfigurationError
from ckpt.storage import host_memory
from ckpt.storage.held import MemoryFile
from ckpt.storage.host_memory import can_be_shared, shared, whole_huge_pages


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
