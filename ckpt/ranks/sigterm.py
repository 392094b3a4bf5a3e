"""Deferral of SIGTERM while a save or a load is under way."""

from __future__ import annotations

import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from ckpt.errors import CheckpointError
from ckpt.ranks.waiting import start

TOLD_TO_END = 128 + signal.SIGTERM
"""Exit code of a process that ended itself after SIGTERM; shells report the same for one that died of the signal."""

_LAST_WORDS_S = 2.0
_LOOK_S = 0.25
_SAME_S = 5.0


class Termination:
    """Defers SIGTERM inside an operation of `Topology`, in the main thread.

    Launchers end all ranks a moment after one has died; the others must live long enough to report which one. A rank that the others
    have timed out ends sooner.

    Attributes:
        asked: SIGTERM has come since `put_off` was last entered, or another handler has seen it.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self.asked = False
        self._over = threading.Event()

    @contextmanager
    def put_off(self, is_given_up: Callable[[], bool]) -> Iterator[None]:
        """Defer SIGTERM inside the block, at most `grace_s`. Does nothing outside of the main thread.

        Args:
            is_given_up: returns whether the others have timed this rank out; called from another thread.
        """
        previous = signal.getsignal(signal.SIGTERM)
        here = threading.current_thread() is threading.main_thread()
        if not here or previous is None or previous is signal.SIG_IGN:  # not ours to handle
            yield
            return
        self.asked = False
        self._over.clear()

        def note(_signum: int, _frame: FrameType | None) -> None:
            if not self.asked:
                self.asked = True
                thread = threading.Thread(target=self._lose_patience, args=(is_given_up,), name="SIGTERM", daemon=True)
                with suppress(RuntimeError):  # the system gives no more threads: the agreement's own deadline remains
                    thread.start()

        signal.signal(signal.SIGTERM, note)
        failed = True
        try:
            yield
            failed = False
        finally:
            self._over.set()
            signal.signal(signal.SIGTERM, previous)
            if self.asked:
                _end_process(_LAST_WORDS_S if failed else 0.0)

    def _lose_patience(self, is_given_up: Callable[[], bool]) -> None:
        """End the process, even if its main thread hangs, when the grace is over or no rank waits for it."""
        grace_ends = time.monotonic() + self._grace_s
        given_up_since: float | None = None
        while not self._over.wait(_LOOK_S):
            now = time.monotonic()
            given_up_since = (given_up_since or now) if is_given_up() else None
            if now > grace_ends or (given_up_since is not None and now - given_up_since > _LAST_WORDS_S):
                os._exit(TOLD_TO_END)


def _end_process(after_s: float) -> None:
    """Deliver the deferred signal; after a failure 2 s later, so that the error can propagate and be printed."""
    if not after_s:
        os.kill(os.getpid(), signal.SIGTERM)
        return
    timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()


class SigtermDeferral:
    """Defers SIGTERM until work is over: saves in the background, or a training loop that saves and ends by itself.

    The main thread may be inside a collective that never returns, and Python runs handlers only between its own instructions. So the
    signal also wakes a thread, which ends the process if the main thread does not. A second signal ends the wait; launchers and
    schedulers send the first one twice, so one that comes within `_SAME_S` counts as the first.

    Args:
        grace_s: longest deferral.
        is_over: returns whether the work has ended.
        hurry: called once when the signal comes, to shorten waits for absent ranks.
        give_up: called when the grace is over; the work then has 2 s to clean up.

    Attributes:
        came: the signal has come since `arm`. Read it in the main thread: the handler runs there.
    """

    def __init__(
        self, grace_s: float, *, is_over: Callable[[], bool], hurry: Callable[[], None], give_up: Callable[[], None]
    ) -> None:
        self._grace_s = grace_s
        self._is_over = is_over
        self._hurry = hurry
        self._give_up = give_up
        self._ends: tuple[int, int] | None = None
        self.came = False
        self._may_end = False
        self._called_off = False

    def arm(self) -> None:
        """Install the handler. Does nothing outside of the main thread, or if the program handles the signal itself."""
        if self._ends is not None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(reader, True)
        self._may_end = self.came = self._called_off = False
        try:
            start(threading.Thread(target=self._watch, args=(reader,), name="SIGTERM beside saves", daemon=True))
        except CheckpointError:
            os.close(reader)
            os.close(writer)
            raise
        self._ends = reader, writer
        self._wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        if self._wakeup != -1:  # an event loop's, which keeps it
            signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._handle)

    def disarm(self) -> None:
        """Restore the signal's default. If it has come, the process still ends when the work is over. Main thread."""
        if self._ends is None or threading.current_thread() is not threading.main_thread():
            return
        _, writer = self._ends
        self._ends = None
        if self._wakeup == -1:
            signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(writer)  # which ends the thread

    def call_off(self) -> None:
        """Disarm; the caller ends the process, also if the signal has come. Main thread."""
        self._called_off = True
        self.disarm()

    def _handle(self, _signum: int, _frame: FrameType | None) -> None:
        self.came = True
        if self._may_end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        elif self._wakeup != -1 and self._ends is not None:
            os.write(self._ends[1], bytes([signal.SIGTERM]))

    def _is_ours(self) -> bool:
        """Whether the signal is this object's to handle, or was before another handler was installed."""
        return self.came or signal.getsignal(signal.SIGTERM) == self._handle

    def _watch(self, reader: int) -> None:
        """Wait for the signal, then for the end of the work; then end the process.

        A signal may belong to another handler by now: the program's, or `Termination`'s, which sends it again later. The grace counts
        from that one.
        """
        try:
            came_at = self._came_at(reader)
            if came_at is None:
                return
            self._hurry()
            self._wait(reader, came_at, came_at + self._grace_s)
            if not self._is_over() and not self._called_off:
                self._give_up()
            self._wait(reader, math.inf, time.monotonic() + _LAST_WORDS_S)
            if not self._called_off:
                self._end()
        finally:
            os.close(reader)

    def _came_at(self, reader: int) -> float | None:
        """Wait for the signal, and return the time of the first one; None: disarmed."""
        first: float | None = None
        while signals := os.read(reader, 1):
            if signals[0] == signal.SIGTERM:
                first = first or time.monotonic()
                if self._is_ours():
                    return first
        return None

    def _wait(self, reader: int, came_at: float, ends_at: float) -> None:
        """Return when the work is over, at `ends_at`, or when the signal comes a second time."""
        poll = select.poll()
        poll.register(reader, select.POLLIN)
        while not self._is_over() and not self._called_off and (left_s := ends_at - time.monotonic()) > 0:
            ready = poll.poll(1000 * min(left_s, _LOOK_S / 5))
            signals = os.read(reader, 1) if ready else b""
            if signals and signals[0] == signal.SIGTERM and time.monotonic() - came_at > _SAME_S:
                return
            if ready and not signals:  # disarmed
                time.sleep(_LOOK_S / 5)

    def _end(self) -> None:
        self._may_end = True
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_LAST_WORDS_S)
        os._exit(TOLD_TO_END)


@contextmanager
def sigterm_noted(
    grace_s: float, *, hurry: Callable[[], None] = lambda: None, give_up: Callable[[], None] = lambda: None
) -> Iterator[Callable[[], bool]]:
    """Record SIGTERM inside the block, in place of ending the process; gives a function that returns whether it has come.

    The process still ends by the signal if it is in the block `grace_s` later, if an error has ended the block and the process is still
    running by then, or when a second signal comes. Outside of the main thread, and if the program handles the signal itself, nothing
    is done, and the function returns False.

    Args: see `SigtermDeferral`.
    """
    deferral = SigtermDeferral(grace_s, is_over=lambda: False, hurry=hurry, give_up=give_up)
    deferral.arm()
    try:
        yield lambda: deferral.came
    except BaseException:
        deferral.disarm()
        raise
    deferral.call_off()
