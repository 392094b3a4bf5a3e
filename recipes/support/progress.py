"""A progress bar of bytes, on a terminal; nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


@contextmanager
def progress_bar(what: str, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on stderr in the block, and yield the function that moves it on by a number of bytes.

    Args:
        what: stands before the bar.
        num_bytes: in all.
    """
    columns = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    bar = Progress(
        TextColumn(what, markup=False), *columns, console=console, transient=True, disable=not sys.stderr.isatty()
    )
    with bar:
        task = bar.add_task(what, total=num_bytes)
        yield lambda moved: bar.advance(task, moved)
