"""The processes of a run, found by a mark in the environment that all of them inherit."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.support.pace import patience

VARIABLE = "CKPT_TEST_RUN"


def mark(run_dir: Path) -> dict[str, str]:
    """The environment that marks a run's processes."""
    return {VARIABLE: str(run_dir)}


def marked(run_dir: Path) -> list[psutil.Process]:
    """Every living process of a run, whoever its parent is now."""
    return [process for process in psutil.process_iter() if _is_of(process, run_dir)]


def left_after(seconds: float, find: Callable[[], list[psutil.Process]]) -> list[str]:
    """Return the result of `find` when it is empty, or when the time is up."""
    deadline = time.monotonic() + seconds
    while (found := find()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [_described(process) for process in found]


def a_second() -> float:
    """A second, where nothing else waits for a processor."""
    return patience(1.0)


def _is_of(process: psutil.Process, run_dir: Path) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(VARIABLE) == str(run_dir)
    except psutil.Error:  # it has just ended, or is somebody else's
        return False


def _described(process: psutil.Process) -> str:
    try:
        return f"{process.pid}: {' '.join(process.cmdline())}"
    except psutil.Error:
        return f"{process.pid}"
