"""How much memory and time something takes.

Importing it imports nothing of `ckpt`, which does not run in the environment of recipes/benchmark/megatron_peer.py.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from ckpt.ranks.topology import Topology


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


def timed(work: Callable[[], None], topology: Topology, group: dist.ProcessGroup | None = None) -> float:
    """Do what all ranks do together, and return the seconds of the slowest. Collective.

    Args:
        group: torch's process group of the topology's ranks; None: the default one. Its barrier lets go of all ranks within
            a few ms, which the topology's own agreement does not promise.
    """
    together(topology)
    if dist.is_initialized() and topology.world_size > 1:
        dist.barrier(group)
    started = time.perf_counter()
    work()
    seconds = time.perf_counter() - started
    with topology.phase("round") as phase:
        phase.payload = seconds
    return max(phase.payloads)


def together(topology: Topology) -> None:
    """Wait for all ranks."""
    with topology.phase("round"):
        pass


def forget_cache(folder: Path, topology: Topology) -> None:
    """Drop the files from the page cache, so that the next read comes from the disk (as far as the host lets it).

    They are synced before: what is not on the disk yet stays in the cache.
    """
    if topology.is_lead:
        for path in folder.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
    together(topology)


def sync_entries(folder: Path, topology: Topology) -> None:
    """Return when the entries of a folder and of all folders in it are on the disk, once all ranks are here. Collective."""
    with topology.phase("sync the folders"):
        pass
    if topology.is_lead:
        for path in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def make_durable(folder: Path) -> None:
    """Return when all that was written on the folder's file system is on its disk, by whichever process."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            raise OSError(ctypes.get_errno(), f"cannot sync the file system of {folder}")
    finally:
        os.close(descriptor)
