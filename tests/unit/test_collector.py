"""The garbage collector stays out of the way for as long as it was asked to, and no longer."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from ckpt.collector import collector_paused


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_nothing_is_collected_in_a_block_or_in_a_decorated_function_and_afterwards_again() -> None:
    collections: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        collections.append(phase)

    @collector_paused()
    def many() -> int:
        return len([[number] for number in range(50_000)])

    gc.callbacks.append(note)
    try:
        collections.clear()
        assert many() == 50_000
        with collector_paused():
            kept = [[number] for number in range(50_000)]
            assert collections == []
        kept += [[number] for number in range(50_000)]
        assert "stop" in collections
    finally:
        gc.callbacks.remove(note)


def test_blocks_nest_and_an_error_ends_one_like_any_other() -> None:
    with pytest.raises(KeyError), collector_paused():
        with collector_paused():
            pass
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_a_function_that_calls_itself_leaves_the_collector_as_it_was() -> None:
    @collector_paused()
    def down(steps: int) -> bool:
        return down(steps - 1) if steps else gc.isenabled()

    assert down(3) is False
    assert gc.isenabled()


def test_who_has_turned_the_collector_off_finds_it_off() -> None:
    gc.disable()
    with collector_paused():
        pass
    assert not gc.isenabled()
