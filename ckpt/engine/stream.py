"""The iterator that `receive_weights` returns: it tells the other ranks as soon as its consumer is gone.

An async generator would do for a consumer that takes everything. One that is left half-way is closed by its event loop, on a later
turn; if that loop does not run any more, the other ranks wait until they time out. This object needs no loop to give up an update.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from ckpt.engine.base import NamedTensor
from ckpt.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class OpenUpdate:
    """An update whose weights are here and wait for the consumer.

    Attributes:
        weights: each good until the next one is asked for.
        progress: says that the consumer moves.
        finish: ends the update on all ranks, after the last weight (None), or with an error of this rank.
        withdraw: ends it because the consumer stopped. Any thread; waits for nothing.
    """

    weights: Iterator[NamedTensor]
    progress: Callable[[], None]
    finish: Callable[[Exception | None], Awaitable[object]]
    withdraw: Callable[[str], None]


class WeightStream(AsyncIterator[NamedTensor]):
    """The weights of one update. For one consumer, and once.

    The update fails on all ranks as soon as the consumer stops before the last weight: when the stream is closed, when nothing refers
    to it any more, as behind an `async for` that is left by an exception or a `break`, or when the task ends that iterates over it.

    Args:
        receive: gets the update, up to the commit.
    """

    def __init__(self, receive: Callable[[], Awaitable[OpenUpdate]]) -> None:
        self._receive = receive
        self._update: OpenUpdate | None = None
        self._taken = 0
        self._state = "new"  # -> "open" -> "over", or "given up" in place of the last

    def __aiter__(self) -> WeightStream:
        self._watch_task()
        return self

    async def __anext__(self) -> NamedTensor:
        if self._state == "new":
            self._state = "over"  # should it fail
            self._update = await self._receive()
            self._state = "open"
        elif self._state == "given up":
            raise CheckpointError(f"no weights are left to take: {self._why}")
        elif self._state == "over":
            raise StopAsyncIteration
        else:
            self._taken += 1
        assert self._update is not None
        return await self._next(self._update)

    async def aclose(self) -> None:
        """Stop here. After the last weight it does nothing."""
        self._give_up()

    def __del__(self) -> None:
        self._give_up()

    async def _next(self, update: OpenUpdate) -> NamedTensor:
        try:
            if self._taken:
                update.progress()
            return next(update.weights)
        except StopIteration:
            self._state = "over"
        except Exception as error:
            self._state = "over"
            await update.finish(error)
            raise
        await update.finish(None)
        raise StopAsyncIteration

    @property
    def _why(self) -> str:
        return f"the consumer of the weights stopped after {self._taken} of them"

    def _give_up(self) -> None:
        if self._state == "open" and self._update is not None:
            self._state = "given up"
            self._update.withdraw(self._why)

    def _watch_task(self) -> None:
        """Give up when the task ends that begins to iterate: an exception's traceback may keep this object alive."""
        try:
            task = asyncio.current_task()
        except RuntimeError:  # no event loop runs: the iterator is driven by hand
            return
        if task is not None:
            mine = weakref.ref(self)

            def ended(_: asyncio.Task[Any]) -> None:
                if (stream := mine()) is not None:
                    stream._give_up()

            task.add_done_callback(ended)
