"""How much memory and time something takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

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
