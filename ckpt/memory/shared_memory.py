"""Host memory that another process may map too. It is gone with the last who has it, however they end: no name, no file."""

from __future__ import annotations

import itertools
import os
import weakref
from typing import NamedTuple

import torch

from ckpt.errors import ConfigurationError
from ckpt.storage import host_memory
from ckpt.storage.host_memory import can_be_shared, shared, whole_huge_pages


class Segment(NamedTuple):
    """A piece of shared memory that this process has made and still has mapped.

    Attributes:
        number: no other one of this process ever has the same.
        fd: to be handed to who shall map it; closed when the last tensor in it is gone.
        address: of its first byte.
    """

    number: int
    fd: int
    address: int
    num_bytes: int


_numbers = itertools.count()
_segments: dict[int, Segment] = {}


def shared_memory(num_bytes: int) -> torch.Tensor:
    """Return memory that can be shared, flat bytes, all zeros.

    Raises:
        ConfigurationError: this system has none.
        OSError: there is not enough of it.
    """
    if not can_be_shared():
        raise ConfigurationError("saves.writer='process' needs Linux, for memfd_create; give saves.writer='thread'")
    fd = shared("ckpt-staging", whole_huge_pages(max(num_bytes, 1)))
    try:
        whole = host_memory.mapped(fd, os.fstat(fd).st_size)
    except BaseException:
        os.close(fd)
        raise
    memory = torch.frombuffer(whole, dtype=torch.uint8)
    number = next(_numbers)
    _segments[number] = Segment(number, fd, memory.data_ptr(), memory.nbytes)
    weakref.finalize(whole, _forget, number).atexit = False
    return memory[:num_bytes]


def segment_of(host: torch.Tensor) -> tuple[Segment, int] | None:
    """Return the segment that a contiguous tensor lies in, and its first byte there; None: it lies in none."""
    if host.numel():
        first = host.data_ptr()
        for segment in list(_segments.values()):
            if segment.address <= first and first + host.nbytes <= segment.address + segment.num_bytes:
                return segment, first - segment.address
    return None


def mapped(fd: int) -> torch.Tensor:
    """Return all of the memory behind a descriptor of a segment, flat bytes; the descriptor may be closed then."""
    return torch.frombuffer(host_memory.mapped(fd, os.fstat(fd).st_size), dtype=torch.uint8)


def _forget(number: int) -> None:
    os.close(_segments.pop(number).fd)
