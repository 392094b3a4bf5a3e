"""When a rank that is waited for counts as absent, second by second on a clock that the test drives."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from ckpt.ranks.addresses import machine
from ckpt.ranks.agreement import Absence, Beat, FailureDetector, PhaseIndex
from ckpt.ranks.heartbeat import _born, beat_key, sights
from ckpt.ranks.store_client import StoreClient

SAVE = "save of checkpoint-00000020"
HERE = PhaseIndex(3, 1)
TIMEOUT_S = 20.0
PATIENCE_S = 18.5
"""Word has to get around: 1.5 s of 20 are left for that."""


class Job:
    """A rank 7 that says what the test has it say, and a detector for it."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.now = 1000.0
        self._client = StoreClient(dist.HashStore(), writer=7)
        self._detector = FailureDetector(HERE, f"phase write of {SAVE}", timeout_s)
        self.beat = Beat(7, os.getpid(), _born(os.getpid()) or "", "node-1", machine("pid"), 0, HERE, SAVE, "write")

    def says(self, *, moved: bool = False, **changes: Any) -> None:
        for name, value in changes.items():
            setattr(self.beat, name, value)
        self.beat.number += 1
        self.beat.moves += moved
        self._client.put(beat_key(7), self.beat.encode())

    def absent(self, *, hinted: bool = False) -> Absence | None:
        self._detector.look(sights(self._client, [7]), self.now)
        return self._detector.absent([7], self.now, hinted=hinted).get(7)

    def cause_after(self, seconds: float, each_s: float, act: Callable[[], None], *, hinted: bool = False) -> str:
        """Look every `each_s`, after `act`, until the rank is absent; the cause. It is to be found in the last look, and in no other."""
        end = self.now + seconds
        while (found := self.absent(hinted=hinted)) is None:
            assert self.now <= end, f"not absent after {seconds} s"
            self.now += each_s
            act()
        assert self.now > end - each_s, f"absent {end - self.now} s early: {found.cause}"
        return found.cause


@pytest.fixture
def job() -> Job:
    return Job()


def nothing() -> None:
    pass


WHO = f"rank 7 (pid {os.getpid()} on node-1)"


def test_a_rank_that_never_joined_has_the_whole_time(job: Job) -> None:
    assert job.cause_after(TIMEOUT_S + 0.1, 0.1, nothing) == "rank 7 did not join the job within 20 s"


def test_a_rank_that_beats_and_moves_is_waited_for_as_long_as_it_takes(job: Job) -> None:
    for _ in range(1000):
        job.says(moved=True)
        assert job.absent() is None
        job.now += 10.0


def test_a_rank_that_is_silent_is_absent_when_patience_ends(job: Job) -> None:
    job.says()
    cause = job.cause_after(PATIENCE_S + 0.1, 0.1, nothing)
    assert cause == f"{WHO} has been silent for 20 s, last seen in phase write of {SAVE}"


def test_a_rank_that_beats_and_does_not_move_is_absent_when_patience_ends(job: Job) -> None:
    job.says()
    cause = job.cause_after(PATIENCE_S + 0.1, 0.1, job.says)
    assert cause == f"{WHO} made no progress for 20 s in phase write of {SAVE}"


@pytest.mark.parametrize(
    ("phase", "seen"),
    [("plan", f"was last seen in phase plan of {SAVE}"), (None, f"is in {SAVE}, between two phases")],
)
def test_a_rank_that_stays_at_an_earlier_place_is_told_where_it_was_wanted(
    job: Job, phase: str | None, seen: str
) -> None:
    job.says(at=PhaseIndex(3, 0), phase=phase)
    assert job.cause_after(PATIENCE_S + 0.1, 0.1, job.says) == (
        f"{WHO} did not come to phase write of {SAVE} within 20 s and {seen}: every rank must make the same calls"
    )


def test_one_move_begins_patience_anew(job: Job) -> None:
    job.says()
    job.absent()
    job.now += PATIENCE_S - 0.5
    job.says(moved=True)
    job.cause_after(PATIENCE_S + 0.1, 0.1, job.says)


def test_after_a_hint_silence_is_believed_after_three_seconds_and_standing_still_is_not(job: Job) -> None:
    job.says()
    cause = job.cause_after(3.1, 0.1, nothing, hinted=True)
    assert cause == f"{WHO} has been silent for 3 s, last seen in phase write of {SAVE}"
    job = Job()
    job.says()
    job.cause_after(PATIENCE_S + 0.1, 0.1, job.says, hinted=True)


def test_silence_before_the_first_look_does_not_count(job: Job) -> None:
    job.says()
    job.now += 1000.0
    job.cause_after(PATIENCE_S + 0.1, 0.1, nothing)


@pytest.mark.parametrize(("timeout_s", "patience_s"), [(2.0, 1.8), (15.0, 13.5), (300.0, 298.5)])
def test_patience_is_a_tenth_shorter_than_the_time_and_at_most_a_second_and_a_half(
    timeout_s: float, patience_s: float
) -> None:
    job = Job(timeout_s)
    job.says()
    job.cause_after(patience_s + 0.1, 0.1, nothing)


def test_a_rank_that_has_left_or_is_past_this_place_is_absent_at_once(job: Job) -> None:
    job.says(at=PhaseIndex(3, 2), phase="commit")
    found = job.absent()
    assert found is not None and found.elsewhere and found.cause == f"{WHO} is in phase commit of {SAVE}"
    job.says(left=True)
    found = job.absent()
    assert found is not None and found.cause == f"{WHO} has left the job"


@pytest.fixture
def ended() -> Iterator[Beat]:
    """The beat of a process of this machine that has ended by the time of the test."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield Beat(7, process.pid, _born(process.pid) or "", "node-1", machine("pid"), 0, HERE, SAVE, "write")
    process.communicate(b"\n")


def test_a_process_of_this_machine_that_has_ended_is_absent_at_once(job: Job, ended: Beat) -> None:
    job.beat = ended
    job.says()
    assert job.absent() is None
    os.kill(ended.pid, 9)
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie has ended
    found = job.absent()
    assert found is not None and found.names_phase
    assert found.cause == f"rank 7 (pid {ended.pid} on node-1) was killed or ended in phase write of {SAVE}"


def test_a_process_of_another_machine_is_judged_by_its_heartbeat_alone(job: Job) -> None:
    job.says(machine="another", pid=1 << 30)
    job.cause_after(PATIENCE_S + 0.1, 0.1, nothing)


@given(st.lists(st.tuples(st.floats(0.01, 17.0), st.booleans(), st.booleans()), max_size=60))
def test_a_rank_is_absent_only_after_patience_without_a_beat_or_without_a_move(
    looks: list[tuple[float, bool, bool]],
) -> None:
    job = Job()
    job.says()
    assert job.absent() is None
    heard = moved = job.now
    for pause_s, beats, moves in looks:
        job.now += pause_s
        if beats:
            job.says(moved=moves)
            heard, moved = job.now, job.now if moves else moved
        wanted = max(job.now - heard, job.now - moved) > PATIENCE_S
        assert (job.absent() is not None) == wanted
