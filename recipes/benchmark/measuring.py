"""Time of the slowest rank, memory of this process, figures of all ranks; and the page cache, synced and dropped.

Importing it imports nothing of `ckpt`, which does not run in the environment of recipes/benchmark/megatron_peer.py.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist

if TYPE_CHECKING:
    from ckpt.ranks.topology import Topology

T = TypeVar("T")


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


def timed(work: Callable[[], object], topology: Topology, group: dist.ProcessGroup | None = None) -> float:
    """Do a piece of work on all ranks at once, and return the seconds of the slowest. Collective.

    Args:
        group: torch's process group of the topology's ranks; None: the default one. Its barrier lets go of all ranks within
            a few ms, which the topology's own agreement does not promise.
    """
    wait_for_ranks(topology)
    if dist.is_initialized() and topology.world_size > 1:
        dist.barrier(group)
    started = time.perf_counter()
    work()
    return max(gathered(time.perf_counter() - started, topology))


def gathered(mine: T, topology: Topology) -> list[T]:
    """Return the values of all ranks, by rank; JSON values. Collective."""
    with topology.phase("figures") as phase:
        phase.payload = mine
    return phase.payloads


def wait_for_ranks(topology: Topology) -> None:
    """Wait for all ranks."""
    gathered(None, topology)


def largest(of_ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the largest value of each figure, over the ranks that have it."""
    names = dict.fromkeys(name for figures in of_ranks for name in figures)
    return {name: max(figures[name] for figures in of_ranks if name in figures) for name in names}


def forget_cache(folder: Path, topology: Topology) -> None:
    """Drop the files from the page cache, so that the next read comes from the disk, as far as the host lets it. Collective.

    They are synced before, because unwritten pages stay in the cache. They are read before, too: the pages are free memory that was in
    use just now, as the pages of files are that were written through the cache. A virtual machine may give memory that has been
    free for two seconds back to its host, and gets it again at 0.2 GB/s (measured), which a read of any other contender would pay for.
    """
    if topology.is_lead:
        memory = bytearray(8 << 20)
        for path in [path for path in folder.rglob("*") if path.is_file()]:
            with opened(path) as descriptor:
                os.fsync(descriptor)
                at = 0
                while num_bytes := os.preadv(descriptor, [memory], at):
                    at += num_bytes
        for path in [path for path in folder.rglob("*") if path.is_file()]:
            with opened(path) as descriptor:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    wait_for_ranks(topology)


def sync_file(path: Path) -> None:
    """Return when the bytes of a file, or the entries of a folder, are on the disk."""
    with opened(path) as descriptor:
        os.fsync(descriptor)


def sync_entries(folder: Path, topology: Topology) -> None:
    """Sync the entries of a folder and of all folders in it, once all ranks are here. Collective; the lead returns when it is done."""
    wait_for_ranks(topology)
    if topology.is_lead:
        for path in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
            sync_file(path)


def make_durable(folder: Path) -> None:
    """Return when all that any process wrote on the folder's file system is on its disk."""
    with opened(folder) as descriptor:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            raise OSError(ctypes.get_errno(), f"cannot sync the file system of {folder}")


@contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    """Open a file or a folder; the descriptor is closed at the end of the block."""
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
