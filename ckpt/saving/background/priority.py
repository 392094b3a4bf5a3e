"""Work beside the training: how low in priority, on which cores, and how many bytes a second.

Priorities are a thread's own on Linux, and what a thread starts inherits them. Low is not lowest. A thread that holds the interpreter's
lock and gets no core makes the training of its process wait, and a save that gets no core holds back the next. Measured on 2 cores that
4 ranks train on, each writing 96 MB by a thread: at 0 and 5 a save takes 0.4 s, at 10 0.5 s, at 15 1.6 s, at 19 3 s; the longest step
takes 60 ms up to 10, and 250 ms from 15 on. By a process of its own, in the same way: 0.3 s at 0, 2 s at 10, 4 s at 19, 6 s with
SCHED_IDLE; SCHED_BATCH made no difference; and the steps beside it were no faster for it. The disk's queue needs no word of ours: there
the priority follows the one here.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from ckpt.errors import ConfigurationError

if TYPE_CHECKING:
    from ckpt.saving.writing import RankWritePlan, Staged, WriteJob, WriteResult

NICE = 5

BURST_S = 0.1
"""After a pause, so much of the rate may pass at once."""

SIGN_S = 0.25
"""Between two signs of life of who waits for his turn."""

_log = logging.getLogger("ckpt")
_T = TypeVar("_T")


def in_background(num_cores: int | None = None, *, local_rank: int = 0) -> None:
    """Make the calling thread, and all that it will start, low in priority. What the system refuses stays as it is.

    It is never raised again: the thread is to be one that does nothing else.

    Args:
        num_cores: of those it may use now; the last ones. None: all.
        local_rank: ranks of one host take other cores than the one before, as long as there are any.

    Raises:
        ConfigurationError: no core is left.
    """
    if num_cores is not None and num_cores < 1:
        raise ConfigurationError(f"saves.writer_cores={num_cores}: give 1 or more, or nothing for all cores")
    if sys.platform != "linux":  # elsewhere priorities are the process's
        return
    thread = threading.get_native_id()
    try:
        os.setpriority(os.PRIO_PROCESS, thread, max(NICE, os.getpriority(os.PRIO_PROCESS, thread)))
        if num_cores is not None:
            os.sched_setaffinity(thread, last_cores(sorted(os.sched_getaffinity(thread)), num_cores, local_rank))
    except OSError as error:
        _log.debug("the system leaves the background's priority and cores as they are: %s", error)


def last_cores(usable: Sequence[int], num_cores: int, local_rank: int) -> set[int]:
    """Return the cores of one rank, from the last one on downwards, and round again.

    Example:
        >>> last_cores([0, 1, 2, 3, 4], 2, 0), last_cores([0, 1, 2, 3, 4], 2, 1), last_cores([0, 1, 2, 3, 4], 2, 2)
        ({3, 4}, {1, 2}, {0, 4})
    """
    first = local_rank * num_cores
    return {usable[-1 - number % len(usable)] for number in range(first, first + min(num_cores, len(usable)))}


class Throttle:
    """Keeps the bytes of a rank, in the long run, under a rate; whoever has moved some sleeps until the next are due.

    Args:
        mib_s: MiB per second, of all that are wrapped together.

    Raises:
        ConfigurationError: nothing could ever pass.
    """

    def __init__(self, mib_s: float) -> None:
        if not mib_s > 0:
            raise ConfigurationError(f"saves.writer_mib_s={mib_s}: give more than 0, or nothing for no limit")
        self._bytes_s = mib_s * (1 << 20)
        self._lock = threading.Lock()
        self._due = time.monotonic()

    def wrap(self, progress: Callable[[int], None], given_up: threading.Event | None = None) -> Throttled:
        """Return a `progress` that any thread may call; it calls the given one, and then sleeps if it must.

        Args:
            progress: hears of a byte every so often from who sleeps, and ends the sleep if it raises.
            given_up: once it is set, nobody sleeps any more.
        """
        return Throttled(self, progress, given_up or threading.Event())

    def due_in_s(self, num_bytes: int) -> float:
        """Count bytes that have moved; return how long, if above 0, to wait with the next."""
        with self._lock:
            now = time.monotonic()
            self._due = max(self._due, now - BURST_S) + num_bytes / self._bytes_s
            return self._due - now


class Throttled:
    """A `progress` that sleeps. Made by `Throttle.wrap`, for one save."""

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
        """Yield the items; when no more are asked for, sleep no more.

        What follows is little, and the wait until the disk has it all, in which bytes count as moved once more.
        """
        yield from items
        self._lifted = True


def write_throttled(
    throttle: Throttle | None,
    given_up: threading.Event,
    share: RankWritePlan,
    job: WriteJob,
    staged: Iterable[Staged],
    progress: Callable[[int], None],
) -> WriteResult:
    """Write a share in this thread, no faster than the throttle allows; None: as fast as it goes.

    Args:
        given_up: see `Throttle.wrap`; what follows is as in `RankWritePlan.write`.
    """
    if throttle is None:
        return share.write(job, staged, progress)
    slowed = throttle.wrap(progress, given_up)
    return share.write(job, slowed.until_taken(staged), slowed)
