"""Pause Python's garbage collector around short bursts that make many thousands of small objects, of which none is garbage yet."""

from __future__ import annotations

import gc
import os
import threading
from contextlib import ContextDecorator
from typing import Self

_NEVER = (1 << 30) + 7
"""A threshold that no process reaches and that nobody else sets, so a pause can tell its own threshold from the program's."""


class gc_paused(ContextDecorator):  # used as a decorator, like contextlib's own
    """Start no automatic garbage collection while a block, or a function that this decorates, runs.

    Code that makes an object for each of 20,000 tensors makes the collector traverse all of them, and everything else that the
    process holds, again and again: half of the time of such a load. Use it for pure Python work that ends soon, never around a wait or
    a write: the process has one collector, and a pause in a background thread stops it for training, too.

    Blocks may nest and run in several threads: the collector runs again when the last of them ends. The pause raises the
    collector's threshold and leaves its switch alone, so `gc.disable`, `gc.enable`, `gc.isenabled` and `gc.set_threshold` mean in a block
    what they mean outside, and what the program sets there stays set.
    """

    def __enter__(self) -> Self:
        _pauses.begin()
        return self

    def __exit__(self, *_: object) -> None:
        _pauses.end()


class _OfThread(threading.local):
    count = 0


class _Pauses:
    """The pauses of this process that have begun and not ended."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a collection may begin while it is held, and run what pauses
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
        if self._count == 0 and gc.get_threshold()[0] == _NEVER:  # else the program has set its own meanwhile
            gc.set_threshold(*self._before)

    def _end_of_others(self) -> None:
        """A child of a fork has this thread alone: the pauses of the others would never end there."""
        if self._count > self._own.count:
            self._end(self._count - self._own.count)
        self._lock.release()


_pauses = _Pauses()
