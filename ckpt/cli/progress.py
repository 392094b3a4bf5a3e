"""The bytes of work under way, on a terminal, once it takes more than two seconds; nothing elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ckpt.errors import printable

SHOWN_AFTER_S = 2.0
"""Shorter work is not shown."""
_REFRESH_S = 0.25


@contextmanager
def watched(show: Callable[[int, float], object]) -> Iterator[Callable[[int], None]]:
    """Yield a function that counts bytes, for any thread; a call is one addition.

    Args:
        show: called with bytes and seconds so far, in a thread of its own: first after `SHOWN_AFTER_S`, then four times a second, until
            the block is left.
    """
    moved, began, is_over = 0, time.monotonic(), threading.Event()

    def count(num_bytes: int) -> None:
        nonlocal moved
        moved += num_bytes  # two threads at once may lose a piece, which nobody sees

    def look() -> None:
        wait_s = SHOWN_AFTER_S
        while not is_over.wait(wait_s):
            show(moved, time.monotonic() - began)
            wait_s = _REFRESH_S

    thread = threading.Thread(target=look, name="progress", daemon=True)
    thread.start()
    try:
        yield count
    finally:
        is_over.set()
        thread.join()


@contextmanager
def progress_bar(what: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr in the block, and yield the function that moves it on by a number of bytes.

    Args:
        what: stands before the bar.
        num_bytes: in all, about: the bar stays full while more move.
    """
    if not sys.stderr.isatty():
        yield lambda moved: None
        return
    # A text of `TextColumn` is a format, and a name may hold braces.
    columns = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        *columns,
        console=Console(stderr=True),
        transient=True,
        auto_refresh=False,
    )
    task = bar.add_task(printable(what), total=num_bytes)

    def show(moved: int, _: float) -> None:
        bar.start()  # does nothing the second time
        bar.update(task, completed=min(moved, num_bytes), refresh=True)

    try:
        with watched(show) as count:
            yield count
    finally:
        if bar.live.is_started:
            bar.stop()
