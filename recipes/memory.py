"""How much memory something takes."""

from __future__ import annotations

from pathlib import Path


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
