"""Room in an arena: never twice the same, all of it to be had again, and no new memory for a save that is no larger than the last."""

from __future__ import annotations

import threading

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt.memory.host import Arena, room_for, staging_memory

PAGE = room_for(1)


def arena(num_bytes: int) -> Arena:
    made = Arena(lambda size: torch.empty(size, dtype=torch.uint8))
    made.grow(num_bytes, lambda: None)
    return made


@given(st.lists(st.tuples(st.integers(1, 5 * PAGE), st.integers(0, 10)), min_size=1, max_size=40))
def test_room_that_is_taken_is_nobody_elses_until_it_is_given_back(steps: list[tuple[int, int]]) -> None:
    one = arena(64 * PAGE)
    taken: list[torch.Tensor] = []
    for number, (num_bytes, which) in enumerate(steps):
        if sum(room_for(len(room)) for room in taken) + room_for(num_bytes) > 32 * PAGE or (taken and which > 7):
            one.give_back(taken.pop(which % len(taken)))
            continue
        try:
            room = one.take(num_bytes, _never)
        except TimeoutError:  # what is free lies in pieces that are all too small
            continue
        room.fill_(number)
        taken.append(room)
        assert all(len(room.unique()) == 1 for room in taken), "two have the same byte"
    for room in taken:
        one.give_back(room)
    assert len(one.take(64 * PAGE, _never)) == 64 * PAGE, "the pieces are one again"


def _never() -> None:
    raise TimeoutError("there is no room")


def test_who_finds_no_room_gets_that_which_another_thread_gives_back() -> None:
    one = arena(4 * PAGE)
    rooms = [one.take(2 * PAGE, _never) for _ in range(2)]
    looked = threading.Event()
    giver = threading.Thread(target=lambda: (looked.wait(), one.give_back(rooms[1])))
    giver.start()
    again = one.take(2 * PAGE, looked.set)
    giver.join()
    assert again.data_ptr() == rooms[1].data_ptr()


def test_an_arena_that_is_large_enough_stays_and_one_that_grows_waits_until_nothing_is_taken() -> None:
    made: list[int] = []

    def make(num_bytes: int) -> torch.Tensor:
        made.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    one = Arena(make)
    one.grow(3 * PAGE - 1, _never)
    one.grow(2 * PAGE, _never)
    assert made == [3 * PAGE] and one.num_bytes == 3 * PAGE
    room = one.take(1, _never)
    with pytest.raises(TimeoutError):
        one.grow(4 * PAGE, _never)
    one.give_back(room)
    one.grow(4 * PAGE, _never)
    assert made == [3 * PAGE, 4 * PAGE]


def test_nothing_has_room_in_an_arena_without_memory() -> None:
    one = arena(0)
    nothing = one.take(0, _never)
    one.give_back(nothing)
    assert len(nothing) == 0


def test_a_block_that_is_touched_has_its_pages_and_keeps_its_bytes() -> None:
    one = Arena(staging_memory)
    one.grow(64 << 20, _never)
    room = one.take(16, _never)
    room.fill_(7)
    before = psutil.Process().memory_info().rss
    one.prepare(1 << 20, lambda: False)
    assert one.num_bytes == 64 << 20, "there was one already"
    assert psutil.Process().memory_info().rss - before > 48 << 20
    assert room.tolist() == [7] * 16


def test_touching_ends_when_nobody_wants_the_block_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[int] = []
    monkeypatch.setattr("ckpt.memory.host.populate", lambda address, num_bytes: touched.append(num_bytes))
    one = arena(256 << 20)
    one.prepare(1, lambda: len(touched) == 2)
    assert touched == [32 << 20] * 2
    other = arena(0)
    other.prepare(1 << 20, lambda: True)
    assert other.num_bytes == 0


def test_touching_ends_when_another_block_has_taken_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    one = arena(256 << 20)
    touched: list[int] = []

    def populate(address: int, num_bytes: int) -> None:
        touched.append(num_bytes)
        one.let_go()

    monkeypatch.setattr("ckpt.memory.host.populate", populate)
    one.prepare(1, lambda: False)
    assert touched == [32 << 20]
