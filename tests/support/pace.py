"""How long a step may take here: deadlines in tests are those of a quiet machine, times how much slower this one is now."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

_START_S, _SYNC_S = 0.015, 0.010
"""What it takes on a quiet machine to start Python, and to have a mebibyte on the disk."""
_MOST = 30.0
_TIMES = 3
_VARIABLE = "CKPT_TESTS_PACE"
"""Hands what was measured on to all processes that tests start."""


def patience(seconds: float) -> float:
    """How long to wait for something that takes at most so long on a quiet machine. For deadlines that shall not run out."""
    return seconds * max(pace_at_start(), os.getloadavg()[0] / len(os.sched_getaffinity(0)))


@functools.cache
def pace_at_start() -> float:
    """How much slower than a quiet machine this one was when the run began; at least 1."""
    if _VARIABLE not in os.environ:
        os.environ[_VARIABLE] = f"{min(_MOST, max(1.0, _fastest(_start) / _START_S, _fastest(_sync) / _SYNC_S)):.2f}"
    return float(os.environ[_VARIABLE])


def _fastest(step: Callable[[], None]) -> float:
    took = []
    for _ in range(_TIMES):
        began = time.perf_counter()
        step()
        took.append(time.perf_counter() - began)
    return min(took)


def _start() -> None:
    subprocess.run([sys.executable, "-I", "-S", "-c", ""], check=True)


def _sync() -> None:
    with tempfile.TemporaryFile() as file:
        file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
