"""A wait ends with an answer, with what a look finds out, or when its time is up."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from ckpt.errors import RankLeftError
from ckpt.ranks.waiting import OutOfTimeError, in_thread, poll_until, unless_timeout


def clock_of(*times: float) -> Callable[[], float]:
    """A clock that goes on by what is asked of it; the last time stays."""
    rest: Iterator[float] = iter(times)
    last = times[-1]
    return lambda: next(rest, last)


def test_the_first_answer_that_is_not_none_ends_a_wait() -> None:
    answers = iter([None, None, b"", b"late"])
    assert poll_until(lambda: next(answers), nap=None) == b""


def test_a_look_ends_a_wait_by_an_answer_or_an_error() -> None:
    def gone() -> None:
        raise RankLeftError("rank 3 left")

    assert poll_until(lambda: None, look=lambda: "found by the look", nap=None) == "found by the look"
    with pytest.raises(RankLeftError, match="rank 3 left"):
        poll_until(lambda: None, look=gone, nap=None)


def test_looks_are_as_far_apart_as_asked_for() -> None:
    now, looks = [0.0], []

    def ask() -> bool | None:
        now[0] += 1.0
        return True if now[0] > 40.0 else None

    poll_until(ask, look=lambda: looks.append(now[0]), look_s=10.0, nap=None, clock=lambda: now[0])
    assert looks == [5.0, 15.0, 25.0, 35.0]


@pytest.mark.parametrize(
    ("given", "kind"), [({}, OutOfTimeError), ({"failure": lambda: RankLeftError("no bucket came")}, RankLeftError)]
)
def test_a_wait_ends_when_its_time_is_up(given: dict[str, Callable[[], Exception]], kind: type[Exception]) -> None:
    asked = []
    with pytest.raises(kind):
        poll_until(lambda: asked.append(1), nap=None, timeout_s=3.0, clock=clock_of(0.0, 1.0, 1.0, 2.0, 4.0), **given)
    assert len(asked) == 2, "one more after the first, and none when the time is up"


def test_naps_grow_with_the_wait() -> None:
    waited: list[float] = []

    def nap(waited_s: float) -> float:
        waited.append(waited_s)
        return 0.0

    answers = iter([None, None, 1])
    poll_until(lambda: next(answers), nap=nap, clock=clock_of(0.0, 1.0, 1.0, 1.0, 5.0))
    assert waited == [1.0, 5.0]


def test_a_call_that_blocks_for_its_time_has_no_answer_yet() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(0.01)
        assert unless_timeout(lambda: ours.recv(1)) is None
        theirs.send(b"x")
        assert unless_timeout(lambda: ours.recv(1)) == b"x"
        theirs.close()
        assert unless_timeout(lambda: ours.recv(1)) == b"", "the other end is closed, which is an answer"


def test_a_call_in_a_thread_that_hangs_is_not_waited_for() -> None:
    go_on = threading.Event()
    hanging = in_thread(lambda: go_on.wait(20.0), "ckpt-test")
    with pytest.raises(TimeoutError):
        hanging.result(0.01)
    go_on.set()
    assert hanging.result(20.0) is True


def test_what_a_call_in_a_thread_raises_comes_back() -> None:
    with pytest.raises(ZeroDivisionError):
        in_thread(lambda: 1 / 0, "ckpt-test").result(20.0)
