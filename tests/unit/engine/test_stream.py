"""When does an update learn that the consumer of its weights is gone?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing

import pytest
import torch

from ckpt.engine.base import NamedTensor
from ckpt.engine.stream import OpenUpdate, WeightStream
from ckpt.errors import CheckpointError


class Told:
    """An update of three weights, and what it is told, in order."""

    def __init__(self, fails_at: int = 3) -> None:
        self.words: list[str] = []
        self.fails_at = fails_at

    def stream(self) -> WeightStream:
        return WeightStream(self._receive)

    async def _receive(self) -> OpenUpdate:
        self.words.append("received")
        return OpenUpdate(self._weights(), lambda: self.words.append("moves"), self._finish, self.words.append)

    def _weights(self) -> Iterator[NamedTensor]:
        for number in range(3):
            if number == self.fails_at:
                raise MemoryError("on the device")
            yield f"w{number}", torch.empty(0)

    async def _finish(self, error: Exception | None) -> None:
        self.words.append("finished" if error is None else f"failed: {error}")


async def take(weights: AsyncIterator[NamedTensor], until: str | None = None) -> list[str]:
    taken = []
    async for name, _ in weights:
        taken.append(name)
        if name == until:
            raise ZeroDivisionError("a bug of the consumer")
    return taken


def test_a_consumer_that_takes_everything_ends_the_update() -> None:
    told = Told()
    assert asyncio.run(take(told.stream())) == ["w0", "w1", "w2"]
    assert told.words == ["received", "moves", "moves", "moves", "finished"]


def test_nothing_is_received_before_the_first_weight_is_asked_for() -> None:
    told = Told()
    asyncio.run(told.stream().aclose())
    assert told.words == []


def test_an_error_of_the_engine_is_told_to_all_and_raised() -> None:
    told = Told(fails_at=1)
    with pytest.raises(MemoryError):
        asyncio.run(take(told.stream()))
    assert told.words == ["received", "moves", "failed: on the device"]


async def raises(told: Told) -> None:
    async for name, _ in told.stream():
        if name == "w1":
            raise ZeroDivisionError("a bug of the consumer")


async def raises_and_a_variable_refers_to_the_stream(told: Told) -> None:
    stream = told.stream()
    await take(stream, "w1")


async def breaks(told: Told) -> None:
    async for name, _ in told.stream():
        if name == "w1":
            break


async def closes(told: Told) -> None:
    async with aclosing(told.stream()) as stream:
        await anext(stream)
        await anext(stream)


async def is_cancelled(told: Told) -> None:
    async for name, _ in told.stream():
        if name == "w1":
            asyncio.current_task().cancel()  # type: ignore[union-attr]
            await asyncio.sleep(60)


@pytest.mark.parametrize(
    "consume",
    [raises, raises_and_a_variable_refers_to_the_stream, breaks, closes, is_cancelled],
    ids=lambda f: f.__name__,
)
def test_an_update_is_given_up_as_soon_as_its_consumer_is_gone(consume: Callable[[Told], Awaitable[None]]) -> None:
    """The loop does not run again, and the error, with its traceback, is still there."""
    told, loop, caught = Told(), asyncio.new_event_loop(), None
    try:
        loop.run_until_complete(consume(told))  # type: ignore[arg-type]
    except (ZeroDivisionError, asyncio.CancelledError) as error:
        caught = error
    assert told.words == ["received", "moves", "the consumer of the weights stopped after 1 of them"], caught
    loop.close()


def test_weights_are_not_taken_from_an_update_that_was_given_up() -> None:
    told = Told()

    async def goes_on() -> None:
        stream = told.stream()
        with pytest.raises(ZeroDivisionError):
            await asyncio.create_task(take(stream, "w1"))
        await asyncio.sleep(0)
        await anext(stream)

    with pytest.raises(
        CheckpointError, match="no weights are left to take: the consumer of the weights stopped after 1"
    ):
        asyncio.run(goes_on())
    assert told.words[-1] == "the consumer of the weights stopped after 1 of them"


def test_each_weight_may_be_taken_in_a_task_of_its_own() -> None:
    """As `asyncio.wait_for` does."""
    told = Told()

    async def patient() -> list[str]:
        stream = told.stream()
        return [(await asyncio.wait_for(anext(stream), 60))[0] for _ in range(3)]

    assert asyncio.run(patient()) == ["w0", "w1", "w2"]
    assert told.words[-1] == "the consumer of the weights stopped after 2 of them", "the end was not asked for"
