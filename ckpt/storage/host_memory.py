"""Maps host memory, on huge pages where the system has them: for this process alone, or behind a descriptor that others can map.

A page of 4 KiB is cleared and mapped one fault at a time, which takes longer than filling it (measured: 2.5 GB/s against 10 GB/s on
pages of 2 MiB).
"""

from __future__ import annotations

import mmap
import os
import sys
from contextlib import suppress

HUGE_PAGE = 2 << 20


def can_be_shared() -> bool:
    """Whether this system has memory that processes can share without a file."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def private(num_bytes: int) -> mmap.mmap:
    """Map new memory, all zeros, for this process: a child of a fork that writes there has pages of its own."""
    return _on_huge_pages(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def shared(name: str, num_bytes: int) -> int:
    """Make memory that processes can share; return its descriptor. It is gone with the last who has it, however they end.

    Args:
        name: as /proc shows it; no file has it.

    Raises:
        OSError: there is not enough memory.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, num_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd


def mapped(fd: int, num_bytes: int) -> mmap.mmap:
    """Map shared memory; the descriptor may be closed then."""
    return _on_huge_pages(mmap.mmap(fd, num_bytes))


def whole_huge_pages(num_bytes: int) -> int:
    """Return the bytes of as many huge pages as it takes. Memory of which nobody touches the end costs nothing there."""
    return -(-num_bytes // HUGE_PAGE) * HUGE_PAGE


def _on_huge_pages(memory: mmap.mmap) -> mmap.mmap:
    with suppress(OSError, AttributeError):  # a kernel that has none, or none for memory that is shared
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
