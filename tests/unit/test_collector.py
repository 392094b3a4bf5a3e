"""The garbage collector stays out of the way for as long as it was asked to, and no longer."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ckpt.collector import collector_paused


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def num_collections() -> int:
    """How often garbage is looked for by this thread while it makes many objects."""
    phases: list[str] = []
    this = threading.get_ident()

    def note(phase: str, info: dict[str, int]) -> None:
        if threading.get_ident() == this:
            phases.append(phase)

    gc.callbacks.append(note)
    try:
        kept = [[number] for number in range(50_000)]
    finally:
        gc.callbacks.remove(note)
    assert len(kept) == 50_000
    return phases.count("start")


def test_nothing_is_collected_in_a_block_or_in_a_decorated_function_and_afterwards_again() -> None:
    assert collector_paused()(num_collections)() == 0
    with collector_paused():
        assert num_collections() == 0
    assert num_collections() > 0


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


@contextmanager
def paused_elsewhere() -> Iterator[None]:
    """Another thread is in such a block until this one ends."""
    begun, done = threading.Event(), threading.Event()

    def work() -> None:
        with collector_paused():
            begun.set()
            done.wait()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    try:
        yield
    finally:
        done.set()
        thread.join()


def test_threads_may_pause_at_the_same_time_and_the_last_one_to_end_goes_back_to_what_was() -> None:
    with paused_elsewhere():
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
        own = collector_paused()
        own.__enter__()
    assert not gc.isenabled()
    own.__exit__(None, None, None)
    assert gc.isenabled()


def test_many_threads_that_come_and_go_leave_the_collector_on_and_meet_it_off() -> None:
    met: list[bool] = []

    def work() -> None:
        for _ in range(2000):
            with collector_paused():
                met.append(gc.isenabled())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert met == [False] * 8000
    assert gc.isenabled()


def enabled_in_a_child() -> bool:
    child = os.fork()
    if child == 0:
        os._exit(int(gc.isenabled()))
    return bool(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def test_a_child_of_a_fork_keeps_the_pause_of_the_thread_that_it_comes_from_alone() -> None:
    with paused_elsewhere():
        assert enabled_in_a_child()
        with collector_paused():
            assert not enabled_in_a_child()
        assert not gc.isenabled()
    gc.disable()
    assert not enabled_in_a_child()
