"""Limits of work beside the training: CPU priority, cores, and bytes a second.

On Linux each thread has a priority, which the threads that it starts inherit. The priority here is low, not the lowest: a thread that holds
the interpreter's lock and gets no core makes the training of its process wait, and a save that gets no core delays the next. Measured on
2 cores that 4 ranks train on, each writing 96 MB by a thread: at nice 0 and 5 a save takes 0.4 s, at 10 0.5 s, at 15 1.6 s, at 19 3 s; the
longest step takes 60 ms up to 10, and 250 ms from 15 on. The priority of disk requests follows this one.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from ckpt.saving.writing import RankWritePlan, Staged, WriteJob, WriteResult

NICE = 5

BURST_S = 0.1
"""Seconds' worth of bytes that may pass at once after a pause."""

SIGN_S = 0.25
"""Seconds between two signs of life of a thread that waits for its turn."""

_log = logging.getLogger("ckpt")
_T = TypeVar("_T")


def in_background(num_cores: int | None = None, *, local_rank: int = 0) -> None:
    """Lower the priority of the calling thread, and of the threads that it will start; ignore a refusal of the system.

    The priority is never raised again: call it in a thread that does nothing else.

    Args:
        num_cores: number of cores to use, the last ones of those the thread may use now. None: all.
        local_rank: ranks of one host take different cores, as long as there are enough.
    """
    if sys.platform != "linux":  # on other systems only processes have priorities
        return
    thread = threading.get_native_id()
    try:
        os.setpriority(os.PRIO_PROCESS, thread, max(NICE, os.getpriority(os.PRIO_PROCESS, thread)))
        if num_cores is not None:
            os.sched_setaffinity(thread, last_cores(sorted(os.sched_getaffinity(thread)), num_cores, local_rank))
    except OSError as error:
        _log.debug("the system leaves the background's priority and cores as they are: %s", error)


def last_cores(usable: Sequence[int], num_cores: int, local_rank: int) -> set[int]:
    """Return the cores of one rank, counted from the last one downwards, and round again.

    Example:
        >>> last_cores([0, 1, 2, 3, 4], 2, 0), last_cores([0, 1, 2, 3, 4], 2, 1), last_cores([0, 1, 2, 3, 4], 2, 2)
        ({3, 4}, {1, 2}, {0, 4})
    """
    first = local_rank * num_cores
    return {usable[-1 - number % len(usable)] for number in range(first, first + min(num_cores, len(usable)))}


class Throttle:
    """Limits the bytes a second of a rank: a thread that has moved bytes sleeps until the next are due.

    Args:
        mib_s: MiB per second, of all saves together.
    """

    def __init__(self, mib_s: float) -> None:
        self._bytes_s = mib_s * (1 << 20)
        self._lock = threading.Lock()
        self._due = time.monotonic()

    def wrap(self, progress: Callable[[int], None], given_up: threading.Event | None = None) -> Throttled:
        """Return a `progress` that any thread may call; it calls the given one, and then sleeps until the next bytes are due.

        Args:
            progress: called with one byte now and then by a thread that sleeps; an exception ends the sleep.
            given_up: once it is set, no thread sleeps any more.
        """
        return Throttled(self, progress, given_up or threading.Event())

    def due_in_s(self, num_bytes: int) -> float:
        """Count bytes that have moved; return the seconds to wait before the next, if above 0."""
        with self._lock:
            now = time.monotonic()
            self._due = max(self._due, now - BURST_S) + num_bytes / self._bytes_s
            return self._due - now


class Throttled:
    """The `progress` of one save, which sleeps. Made by `Throttle.wrap`."""

    def __init__(self, throttle: Throttle, progress: Callable[[int], None], given_up: threading.Event) -> None:
        self._throttle = throttle
        self._progress = progress
        self._given_up = given_up
        self._lifted = False

    def __call__(self, num_bytes: int) -> None:
        self._progress(num_bytes)
        if self._lifted:
            return
        until = time.monotonic() + self._throttle.due_in_s(num_bytes)
        while (left := until - time.monotonic()) > 0 and not self._given_up.wait(min(left, SIGN_S)):
            if left > SIGN_S:
                self._progress(1)

    def until_taken(self, items: Iterable[_T]) -> Iterator[_T]:
        """Yield the items; after the last one, sleep no more.

        The rest of a save is small files and the sync to disk, in which bytes count a second time.
        """
        yield from items
        self._lifted = True


def write_throttled(
    throttle: Throttle | None,
    given_up: threading.Event,
    write_plan: RankWritePlan,
    job: WriteJob,
    staged: Iterable[Staged],
    progress: Callable[[int], None],
) -> WriteResult:
    """Write what a plan says in this thread, at most at the rate of the throttle; None: no limit.

    Args:
        given_up: see `Throttle.wrap`. The arguments after it are those of `RankWritePlan.write`.
    """
    if throttle is None:
        return write_plan.write(job, staged, progress)
    slowed = throttle.wrap(progress, given_up)
    return write_plan.write(job, slowed.until_taken(staged), slowed)
