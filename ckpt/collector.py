"""Python's garbage collector, kept from walking over many thousands of small objects, of which none is garbage yet."""

from __future__ import annotations

import gc
import os
import threading
from contextlib import ContextDecorator
from types import TracebackType
from typing import Self


class collector_paused(ContextDecorator):  # used as a decorator, like contextlib's own
    """Let no garbage be looked for while a block runs, or a function that this decorates.

    Whoever makes an object for each of 20,000 tensors makes the collector walk over all of them, and over everything else
    that the process holds, again and again: half of the time of such a load. For work that ends soon and waits for nobody.
    What has no cycles is freed at once all the same. Blocks may nest, and run in several threads: the process has one
    collector, which is on again when the last of them ends, if it was on when the first began.
    """

    def __enter__(self) -> Self:
        _pauses.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _pauses.end()


class _OfThread(threading.local):
    count = 0


class _Pauses:
    """Those of the process that have begun and not ended."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a collection may begin while it is held, and run what pauses
        self._count = 0
        self._own = _OfThread()
        self._was_enabled = False
        os.register_at_fork(
            before=self._lock.acquire, after_in_parent=self._lock.release, after_in_child=self._end_of_others
        )

    def begin(self) -> None:
        with self._lock:
            if self._count == 0:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._count += 1
            self._own.count += 1

    def end(self) -> None:
        with self._lock:
            self._own.count -= 1
            self._end(1)

    def _end(self, number: int) -> None:
        self._count -= number
        if self._count == 0 and self._was_enabled:
            gc.enable()

    def _end_of_others(self) -> None:
        """A child of a fork has this thread alone: the pauses of the others would never end there."""
        if self._count > self._own.count:
            self._end(self._count - self._own.count)
        self._lock.release()


_pauses = _Pauses()
