"""SIGTERM, put off while a save or load is under way."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_LAST_WORDS_S = 2.0
_LOOK_S = 0.25


class Termination:
    """Puts SIGTERM off while a save or load is under way.

    Launchers end all ranks a moment after one has died; the others must live long enough to say which one it was. A rank
    that the others have given up has nothing to say, and ends sooner.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._asked = False
        self._over = threading.Event()

    def was_asked(self) -> bool:
        """Has SIGTERM come since `put_off` was last entered?"""
        return self._asked

    def note(self) -> None:
        """Take it that it has: somebody else has seen it."""
        self._asked = True

    @contextmanager
    def put_off(self, is_given_up: Callable[[], bool]) -> Iterator[None]:
        """Put SIGTERM off inside the block, at most `grace_s`. Does nothing outside of the main thread.

        Args:
            is_given_up: have the others gone on without this rank? Called from another thread.
        """
        previous = signal.getsignal(signal.SIGTERM)
        here = threading.current_thread() is threading.main_thread()
        if not here or previous is None or previous is signal.SIG_IGN:  # not ours to handle
            yield
            return
        self._asked = False
        self._over.clear()

        def note(_signum: int, _frame: FrameType | None) -> None:
            if not self._asked:
                self._asked = True
                threading.Thread(target=self._lose_patience, args=(is_given_up,), name="SIGTERM", daemon=True).start()

        signal.signal(signal.SIGTERM, note)
        failed = True
        try:
            yield
            failed = False
        finally:
            self._over.set()
            signal.signal(signal.SIGTERM, previous)
            if self._asked:
                _end_process(_LAST_WORDS_S if failed else 0.0)

    def _lose_patience(self, is_given_up: Callable[[], bool]) -> None:
        """End the process, whatever its main thread is stuck in, once the grace is over or nobody waits for it."""
        grace_ends = time.monotonic() + self._grace_s
        given_up_since: float | None = None
        while not self._over.wait(_LOOK_S):
            now = time.monotonic()
            given_up_since = (given_up_since or now) if is_given_up() else None
            if now > grace_ends or (given_up_since is not None and now - given_up_since > _LAST_WORDS_S):
                os._exit(128 + signal.SIGTERM)


def _end_process(after_s: float) -> None:
    """Deliver the signal at last; after a failure a little later, for the error on its way up should be read."""
    if not after_s:
        os.kill(os.getpid(), signal.SIGTERM)
        return
    timer = threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGTERM))
    timer.daemon = True
    timer.start()


class Epilogue:
    """Puts the end by SIGTERM off while work goes on in the background, where nobody else handles the signal.

    The thread that trains may be inside a collective that never returns, and Python runs handlers between its own instructions
    only. So the signal wakes a thread, too, which ends the process if the other one does not.

    Args:
        grace_s: longest time that the end is put off.
        is_over: has the work ended?
        hurry: called once when the signal comes: ranks that are gone need not be waited for long.
        give_up: called when the grace is over; the work then has a moment to clean up.
    """

    def __init__(
        self, grace_s: float, *, is_over: Callable[[], bool], hurry: Callable[[], None], give_up: Callable[[], None]
    ) -> None:
        self._grace_s = grace_s
        self._is_over = is_over
        self._hurry = hurry
        self._give_up = give_up
        self._ends: tuple[int, int] | None = None
        self._came = False
        self._may_end = False

    def arm(self) -> None:
        """Be there when the signal comes. Does nothing outside of the main thread, or where the program handles the signal itself."""
        if self._ends is not None or threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        self._ends = reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(reader, True)
        self._may_end = self._came = False
        self._wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        if self._wakeup != -1:  # an event loop's: it is to hear of signals, not we
            signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._handle)
        threading.Thread(target=self._watch, args=(reader,), name="SIGTERM beside saves", daemon=True).start()

    def disarm(self) -> None:
        """Let the signal do again what it did. Main thread."""
        if self._ends is None or threading.current_thread() is not threading.main_thread():
            return
        _, writer = self._ends
        self._ends = None
        if self._wakeup == -1:
            signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(writer)  # which ends the thread

    def _handle(self, _signum: int, _frame: FrameType | None) -> None:
        self._came = True
        if self._may_end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        elif self._wakeup != -1 and self._ends is not None:
            os.write(self._ends[1], bytes([signal.SIGTERM]))

    def _is_ours(self) -> bool:
        """Whether the signal is ours to handle; or was, and has been handled, before somebody else took over."""
        return self._came or signal.getsignal(signal.SIGTERM) == self._handle

    def _watch(self, reader: int) -> None:
        """Wait for the signal, then for the end of the work; then end the process, or see that it ends.

        A signal that somebody else handles by now is not ours: the program, or a call that puts it off and will send it again.
        """
        while (told := os.read(reader, 1)) and not (told[0] == signal.SIGTERM and self._is_ours()):
            continue
        if not told:
            os.close(reader)
            return
        ends_at = time.monotonic() + self._grace_s
        self._hurry()
        while not self._is_over() and time.monotonic() < ends_at:
            time.sleep(_LOOK_S / 5)
        if not self._is_over():
            self._give_up()
        last = time.monotonic() + _LAST_WORDS_S
        while not self._is_over() and time.monotonic() < last:
            time.sleep(_LOOK_S / 5)
        self._may_end = True
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_LAST_WORDS_S)
        os._exit(128 + signal.SIGTERM)
