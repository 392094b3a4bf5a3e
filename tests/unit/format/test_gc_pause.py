"""The garbage collector stays out of the way for as long as it was asked to, and no longer."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ckpt import StateComponent
from ckpt.format.gc_pause import gc_paused
from ckpt.ranks.topology import Topology
from tests.support.async_runs import Troubled, has_come, let_go, settings, until
from tests.support.states import Held, coordinator


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    before = gc.get_threshold()
    gc.enable()
    yield
    gc.enable()
    gc.set_threshold(*before)


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
    assert gc_paused()(num_collections)() == 0
    with gc_paused():
        assert num_collections() == 0
    assert num_collections() > 0


def is_paused() -> bool:
    """Whether objects that are made now start no collection."""
    return num_collections() == 0


def test_blocks_nest_and_an_error_ends_one_like_any_other() -> None:
    with pytest.raises(KeyError), gc_paused():
        with gc_paused():
            pass
        assert is_paused()
        raise KeyError
    assert not is_paused()


def test_a_function_that_calls_itself_leaves_the_collector_as_it_was() -> None:
    @gc_paused()
    def down(steps: int) -> bool:
        return down(steps - 1) if steps else is_paused()

    assert down(3)
    assert not is_paused()


def test_who_has_turned_the_collector_off_finds_it_off() -> None:
    gc.disable()
    with gc_paused():
        pass
    assert not gc.isenabled()


def test_what_the_program_sets_inside_of_a_block_stays_set() -> None:
    with gc_paused():
        assert gc.isenabled()
        gc.disable()
    assert not gc.isenabled()
    with gc_paused():
        gc.enable()
        assert is_paused()
    assert gc.isenabled()
    with gc_paused():
        gc.set_threshold(123, 4, 5)
    assert gc.get_threshold() == (123, 4, 5)


def test_the_collector_runs_for_training_while_a_save_is_written_in_the_background(tmp_path: Path) -> None:
    backend = Troubled("waits", tmp_path, rank=0)
    component = StateComponent("model", Held({"w": torch.ones(1000)}), "replicated")
    with coordinator(Topology.alone(), tmp_path / "root", [component], backend=backend, saves=settings()) as made:
        made.save_checkpoint(checkpoint_id="1")
        until(lambda: has_come(tmp_path, "1"), "the write")
        paused = is_paused()
        gc.disable()
        let_go(tmp_path)
        made.wait()
    assert not paused
    assert not gc.isenabled(), "the program turned it off while the save was written"


@contextmanager
def paused_elsewhere() -> Iterator[None]:
    """Another thread is in such a block until this one ends."""
    begun, done = threading.Event(), threading.Event()

    def work() -> None:
        with gc_paused():
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
        with gc_paused():
            assert is_paused()
        assert is_paused()
        own = gc_paused()
        own.__enter__()
    assert is_paused()
    own.__exit__(None, None, None)
    assert not is_paused()


def test_many_threads_that_come_and_go_leave_the_collector_on_and_meet_it_off() -> None:
    usual = gc.get_threshold()
    met: list[bool] = []

    def work() -> None:
        for _ in range(2000):
            with gc_paused():
                met.append(gc.get_threshold() == usual)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert met == [False] * 8000
    assert gc.get_threshold() == usual


def paused_in_a_child() -> bool:
    child = os.fork()
    if child == 0:
        os._exit(int(is_paused()))
    return bool(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def test_a_child_of_a_fork_keeps_the_pause_of_the_thread_that_it_comes_from_alone() -> None:
    with paused_elsewhere():
        assert not paused_in_a_child()
        with gc_paused():
            assert paused_in_a_child()
        assert is_paused()
    gc.disable()
    assert paused_in_a_child()
