"""What writes beside training is low in priority, on few cores, and slow if it is asked to be; nothing of it fails a save."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ckpt.saving.background import priority
from ckpt.saving.background.priority import BURST_S, NICE, Throttle, in_background, last_cores, write_throttled
from ckpt.saving.writing import WriteJob

MIB = 1 << 20
_T = TypeVar("_T")


def _in_thread(work: Callable[[], _T]) -> _T:
    results: list[_T] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def _nice() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_a_thread_and_what_it_starts_are_low_and_the_others_stay_as_they_were() -> None:
    before = _nice(), os.sched_getaffinity(0)

    def work() -> tuple[int, set[int], int, set[int]]:
        in_background(1)
        below = _in_thread(lambda: (_nice(), os.sched_getaffinity(0)))
        return _nice(), os.sched_getaffinity(0), *below

    low = max(NICE, before[0])
    cores = {max(before[1])}
    assert _in_thread(work) == (low, cores, low, cores)
    assert (_nice(), os.sched_getaffinity(0)) == before


def test_asked_again_it_is_no_higher_and_on_no_other_cores() -> None:
    def work() -> tuple[int, int, set[int]]:
        in_background(1)
        first = _nice()
        in_background(1, local_rank=1)
        return first, _nice(), os.sched_getaffinity(0)

    low = max(NICE, _nice())
    assert _in_thread(work) == (low, low, {max(os.sched_getaffinity(0))})


def test_more_cores_than_there_are_is_all_of_them() -> None:
    assert _in_thread(lambda: (in_background(4096), os.sched_getaffinity(0))[1]) == os.sched_getaffinity(0)


def test_ranks_of_one_host_take_cores_from_the_last_downwards_and_round_again() -> None:
    assert [last_cores(range(6), 2, rank) for rank in range(4)] == [{4, 5}, {2, 3}, {0, 1}, {4, 5}]
    assert last_cores([3, 8], 3, 5) == {3, 8}
    assert last_cores([7], 1, 9) == {7}


def test_what_the_system_refuses_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", refuse)
    before = _nice(), os.sched_getaffinity(0)
    assert _in_thread(lambda: (in_background(1), (_nice(), os.sched_getaffinity(0)))[1]) == before


def test_elsewhere_the_priority_of_the_whole_process_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priority.sys, "platform", "darwin")
    before = _nice()
    assert _in_thread(lambda: (in_background(1), _nice())[1]) == before


def test_bytes_from_several_threads_stay_under_the_rate_together() -> None:
    throttle = Throttle(100)
    heard: list[int] = []
    progress = throttle.wrap(heard.append)
    threads = [threading.Thread(target=lambda: [progress(MIB) for _ in range(15)]) for _ in range(4)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.monotonic() - began
    assert took >= 60 / 100 - BURST_S, "60 MiB at 100 MiB/s"
    assert took < 5, "it sleeps as long as it must, not more"
    assert sum(num for num in heard if num > 1) == 60 * MIB


def test_a_pause_earns_a_small_burst_and_no_more() -> None:
    throttle = Throttle(100)
    time.sleep(3 * BURST_S)
    assert throttle.due_in_s(5 * MIB) < 0
    assert throttle.due_in_s(20 * MIB) == pytest.approx(0.25 - BURST_S, abs=0.05)


def test_who_sleeps_gives_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priority, "SIGN_S", 0.05)
    heard: list[int] = []
    Throttle(10).wrap(heard.append)(5 * MIB)
    assert heard[0] == 5 * MIB
    assert len(heard) > 3 and set(heard[1:]) == {1}


def test_a_sleep_ends_at_once_when_the_save_is_given_up() -> None:
    given_up = threading.Event()
    progress = Throttle(1).wrap(lambda num_bytes: None, given_up)
    threading.Timer(0.1, given_up.set).start()
    began = time.monotonic()
    progress(600 * MIB)
    progress(600 * MIB)
    assert time.monotonic() - began < 5


def test_a_sleep_ends_with_what_progress_raises() -> None:
    heard: list[int] = []

    def progress(num_bytes: int) -> None:
        heard.append(num_bytes)
        if len(heard) == 2:
            raise InterruptedError("given up")

    with pytest.raises(InterruptedError, match="given up"):
        Throttle(1).wrap(progress)(600 * MIB)
    assert heard == [600 * MIB, 1]


_JOB = WriteJob(Path(), None, {})  # type: ignore[arg-type]


class _CountsTwice:
    """A share whose bytes count once more when they are durable."""

    def write(self, job: Any, staged: Any, progress: Any) -> Any:
        taken = []
        for item in staged:
            taken.append(item)
            progress(10 * MIB)
        progress(1000 * MIB)
        return taken


def test_bytes_that_count_again_when_they_are_durable_are_not_waited_for() -> None:
    began = time.monotonic()
    write_plan: Any = _CountsTwice()
    taken: Any = write_throttled(
        Throttle(100),
        threading.Event(),
        write_plan,
        _JOB,
        iter("abc"),  # type: ignore[arg-type]
        lambda _: None,
    )
    assert taken == ["a", "b", "c"]
    assert 0.3 - BURST_S <= time.monotonic() - began < 5


def test_without_a_limit_nobody_is_asked_to_wait() -> None:
    write_plan: Any = _CountsTwice()
    began = time.monotonic()
    write_throttled(None, threading.Event(), write_plan, _JOB, iter("abc"), lambda _: None)  # type: ignore[arg-type]
    assert time.monotonic() - began < 1
