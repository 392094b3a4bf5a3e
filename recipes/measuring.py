"""How much memory and time something takes.

Importing it imports nothing of `ckpt`, which does not run in the environment of recipes/megatron_peer.py.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt.topology import Topology


class PeakMemory:
    """The most memory this process took on top of what it had when this object was made, by the kernel's own count."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self._before_kib = _status_kib("VmRSS")

    def mib(self) -> float:
        return max(0.0, _status_kib("VmHWM") - self._before_kib) / 1024


def _status_kib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith(name + ":")))


def timed(work: Callable[[], None], topology: Topology) -> float:
    """Do what all ranks do together, and return the seconds until the slowest was done. Collective."""
    together(topology)
    started = time.perf_counter()
    work()
    together(topology)
    return time.perf_counter() - started


def together(topology: Topology) -> None:
    """Wait for all ranks."""
    with topology.phase("round"):
        pass


def forget_cache(folder: Path, topology: Topology) -> None:
    """Drop the files from the page cache, so that the next read comes from the disk (as far as the host lets it)."""
    if topology.is_lead:
        for path in folder.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
    together(topology)


def make_durable(folder: Path) -> None:
    """Return when all that was written on the folder's file system is on its disk, by whichever process."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            raise OSError(ctypes.get_errno(), f"cannot sync the file system of {folder}")
    finally:
        os.close(descriptor)
