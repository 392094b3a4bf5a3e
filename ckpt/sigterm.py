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
