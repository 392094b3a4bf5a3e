"""Pause Python's garbage collector around short bursts that create thousands of small objects."""

from __future__ import annotations

import gc
import os
import threading
from contextlib import ContextDecorator
from typing import Self

_NEVER = (1 << 30) + 7
"""A threshold that is never reached. Its odd value tells a pause's threshold from the program's."""


class gc_paused(ContextDecorator):  # used as a decorator, like contextlib's own
    """Disable automatic garbage collection in a block, or in a function that this decorates.

    Creating an object for each of 20,000 tensors makes the collector traverse the whole process again and again: half of the time
    of such a load. Use it for short pure Python work, never around a wait or a write: the process has one collector, and a pause in a
    background thread stops it for training, too.

    Blocks may nest and run in several threads: the collector runs again when the last of them ends. The pause raises the
    collector's threshold and leaves its switch alone, so `gc.disable`, `gc.enable`, `gc.isenabled` and `gc.set_threshold` work in a block
    as they do outside, and keep their effect.
    """

    def __enter__(self) -> Self:
        _pauses.begin()
        return self

    def __exit__(self, *_: object) -> None:
        _pauses.end()


class _OfThread(threading.local):
    count = 0


class _Pauses:
    """Counts the active pauses of this process. The collector is the process's, so there is one such object."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a collection while it is held may run code that pauses
        self._count = 0
        self._own = _OfThread()
        self._before = gc.get_threshold()
        os.register_at_fork(
            before=self._lock.acquire, after_in_parent=self._lock.release, after_in_child=self._end_of_others
        )

    def begin(self) -> None:
        with self._lock:
            if self._count == 0:
                self._before = gc.get_threshold()
                gc.set_threshold(_NEVER, *self._before[1:])
            self._count += 1
            self._own.count += 1

    def end(self) -> None:
        with self._lock:
            self._own.count -= 1
            self._end(1)

    def _end(self, number: int) -> None:
        self._count -= number
        if self._count == 0 and gc.get_threshold()[0] == _NEVER:  # else the program has set its own threshold
            gc.set_threshold(*self._before)

    def _end_of_others(self) -> None:
        """End the pauses of other threads in a forked child, which has this thread only."""
        if self._count > self._own.count:
            self._end(self._count - self._own.count)
        self._lock.release()


_pauses = _Pauses()
