"""The iterator that `receive_weights` returns: it fails the update as soon as its consumer is gone.

An async generator would serve a consumer that iterates to the end. If it is abandoned half-way, its event loop closes it on a later turn;
if that loop has ended, the other ranks wait until they time out. This object needs no loop to fail an update.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.engine.base import NamedTensor
from ckpt.engine.wire.layout import aligned
from ckpt.errors import CheckpointError
from ckpt.memory.device import device_memory, wait_for


@dataclass(frozen=True, slots=True)
class OpenUpdate:
    """A committed update, as the consumer's iterator uses it.

    Attributes:
        weights: each valid until the next one is requested.
        progress: reports that the consumer moves.
        finish: ends the update on all ranks, after the last weight (None), or with an error of this rank.
        withdraw: ends it because the consumer stopped. Any thread; does not wait.
    """

    weights: Iterator[NamedTensor]
    progress: Callable[[], None]
    finish: Callable[[Exception | None], Awaitable[object]]
    withdraw: Callable[[str], None]


class WeightStream(AsyncIterator[NamedTensor]):
    """Iterator over the weights of one update; for one consumer.

    The update fails on all ranks if the consumer stops before the last weight: when the stream is closed or garbage collected, as after an
    `async for` that ends by an exception or a `break`, or when the iterating task ends.

    Args:
        receive: receives the update, up to the commit.
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
        """Fail the update. After the last weight it does nothing."""
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
        """Give up when the iterating task ends: an exception's traceback may keep this object alive."""
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


def on_device(weights: Iterable[NamedTensor], device: torch.device, ring_bytes: int) -> Iterator[NamedTensor]:
    """Yield host weights on a device, in memory that is reused: a tensor is valid until the next one is requested.

    Args:
        ring_bytes: size of that memory, unless a tensor is larger.
    """
    if device.type == "cpu":
        yield from weights
        return
    ring = device_memory(0, device)
    used = 0
    for name, host in weights:
        if used + aligned(host.nbytes) > len(ring):
            wait_for(device)  # the consumer's copies from this memory are done
            if len(ring) < aligned(host.nbytes):
                ring = device_memory(max(aligned(host.nbytes), ring_bytes), device)
            used = 0
        there = ring[used : used + host.nbytes].view(host.dtype).view(host.shape)
        there.copy_(host, non_blocking=True)
        wait_for(device)
        used += aligned(host.nbytes)
        yield name, there
    wait_for(device)  # the same, of the last
