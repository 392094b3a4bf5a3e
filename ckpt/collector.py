"""Python's garbage collector, kept from walking over many thousands of small objects, of which none is garbage yet."""

from __future__ import annotations

import gc
from contextlib import ContextDecorator
from types import TracebackType
from typing import Self


class collector_paused(ContextDecorator):  # used as a decorator, like contextlib's own
    """Let no garbage be looked for while a block runs, or a function that this decorates.

    Whoever makes an object for each of 20,000 tensors makes the collector walk over all of them, and over everything else
    that the process holds, again and again: half of the time of such a load. For work that ends soon and waits for nobody.
    What has no cycles is freed at once all the same. Blocks may nest.
    """

    def __init__(self) -> None:
        self._was_enabled: list[bool] = []

    def __enter__(self) -> Self:
        self._was_enabled.append(gc.isenabled())
        gc.disable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._was_enabled.pop():
            gc.enable()

    def _recreate_cm(self) -> collector_paused:
        return type(self)()
