"""Wait for another process or thread in short steps: a wait ends when the other one is gone, or the time is up."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ckpt.errors import CheckpointError

Answer = TypeVar("Answer")

_SHORTEST_NAP_S = 0.0002
_LONGEST_NAP_S = 0.005


class OutOfTimeError(Exception):
    """The time of a wait is up, and its caller named no error of its own."""


def nap_s(waited_s: float, world_size: int = 1) -> float:
    """Seconds to sleep before asking again: a fraction of the wait so far, so that neither the wait grows much nor the asking costs.

    Ranks that wait share their cores with those that still write. To ask a store takes 0.1 ms of a processor; 5 ms between two times is
    2 % of one. From 16 ranks on the store's own thread is spared: all ranks together ask it 3,200 times a second at most.
    """
    return min(max(waited_s / 16, _SHORTEST_NAP_S), max(_LONGEST_NAP_S, world_size / 3200))


class AwakeClock:
    """Counts the seconds in which this process looks: of a longer gap between two looks, `longest_s` of it.

    Whoever measures another one's silence by it does not count the time in which it was stopped itself: a job that goes on after Ctrl-Z,
    or after its scheduler has suspended it, misses nobody.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._now_s = 0.0
        self._looked_s = time.monotonic()

    def __call__(self) -> float:
        now_s = time.monotonic()
        self._now_s += min(now_s - self._looked_s, self._longest_s)
        self._looked_s = now_s
        return self._now_s


def poll_until(
    ask: Callable[[], Answer | None],
    *,
    look: Callable[[], Answer | None] = lambda: None,
    look_s: float = 0.0,
    nap: Callable[[float], float] | None = nap_s,
    timeout_s: float = math.inf,
    failure: Callable[[], Exception] = OutOfTimeError,
    clock: Callable[[], float] = time.monotonic,
) -> Answer:
    """Ask until the answer is not None, and return it.

    Args:
        ask: asks once. Its errors end the wait.
        look: checks every `look_s` seconds whether an answer can still come: raises if not, or returns the answer.
        nap: seconds to sleep before asking again, by the seconds waited so far; None: `ask` itself blocks for a moment.
        failure: makes the error that is raised after `timeout_s`.
    """
    began_s = clock()
    look_at_s = began_s + look_s / 2
    while (found := ask()) is None:
        if clock() >= look_at_s:
            if (found := look()) is not None:
                return found
            look_at_s = clock() + look_s
        waited_s = clock() - began_s
        if waited_s > timeout_s:
            raise failure()
        if nap is not None:
            time.sleep(nap(waited_s))
    return found


def unless_timeout(call: Callable[[], Answer]) -> Answer | None:
    """Make a call that raises `TimeoutError` when it has blocked for its time, as those of sockets do; None: it has."""
    try:
        return call()
    except TimeoutError:
        return None


def start(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        CheckpointError: the system gives this process no more threads.
    """
    try:
        thread.start()
    except RuntimeError:
        raise CheckpointError(
            f"the system gives this process no more threads, here for {thread.name}: allow it more (ulimit -u; pids of the container), or "
            "let the program have fewer"
        ) from None


def in_thread(call: Callable[[], Answer], name: str) -> Future[Answer]:
    """Make a call in a daemon thread of its own: if it hangs, neither its caller nor the end of the process has to wait."""
    future: Future[Answer] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    start(threading.Thread(target=run, name=name, daemon=True))
    return future
