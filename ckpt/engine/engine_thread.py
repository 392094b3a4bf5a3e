"""The thread that makes an engine's collective calls, so that the event loop does not block."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, TypeVar

from ckpt.memory.device import same_device

Result = TypeVar("Result")


class EngineThread:
    """Makes calls one after the other, in a daemon thread: a call that never ends does not keep the process alive."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._stopped = Event()
        Thread(target=self._run, args=(same_device(),), name="ckpt-engine", daemon=True).start()

    def submit(self, call: Callable[..., Result], *args: Any) -> Future[Result]:
        """Queue a call; return its future."""
        future: Future[Result] = Future()
        self._calls.put((future, lambda: call(*args)))
        return future

    def stop(self) -> None:
        """End after the call under way, and cancel those that are queued. Does not wait."""
        self._stopped.set()
        self._calls.put(None)

    def _run(self, begin: Callable[[], None]) -> None:
        begin()
        while (queued := self._calls.get()) is not None:
            future, call = queued
            if self._stopped.is_set():
                future.cancel()
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del queued, future, call  # a result may hold much memory until the next call


async def done(future: Future[Result], cancelled: Callable[[], object] = lambda: None) -> Result:
    """Wait for another thread, which goes on if this task is cancelled.

    Args:
        cancelled: called if it is.
    """
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def tell(_: Future[Result]) -> None:
        with suppress(RuntimeError):  # the loop is closed, and no task waits
            loop.call_soon_threadsafe(ended.set)

    future.add_done_callback(tell)
    try:
        await ended.wait()
    except asyncio.CancelledError:
        cancelled()
        raise
    return future.result()
