"""Agreements under faults, in simulated jobs: thousands of schedules, mistakes that must be found, and traps one by one."""

from __future__ import annotations

import os
import re

import pytest

from ckpt.errors import StorageError, describe
from ckpt.ranks.agreement import (
    Agreement,
    Answer,
    Beat,
    Conclude,
    Decided,
    Forget,
    PhaseIndex,
    PhaseOutcome,
    Result,
    Send,
    Settle,
    Sight,
    Told,
    Vote,
    concluded,
)
from tests.simulation.mutants import MUTANTS, TellsWithoutTruth
from tests.simulation.schedules import Schedule
from tests.simulation.world import BrokenPromiseError
from tests.support.covering import sampled

NUM_SCHEDULES = int(os.environ.get("CKPT_SCHEDULES", "10000"))
FIRST_SEED = int(os.environ.get("CKPT_FIRST_SEED", "0"))
NUM_PARTS = 16


@sampled("part", range(NUM_PARTS))
def test_no_schedule_breaks_a_promise(part: int) -> None:
    seeds = range(FIRST_SEED + part, FIRST_SEED + NUM_SCHEDULES, NUM_PARTS)
    failed = 0
    for seed in seeds:
        schedule = Schedule(seed)
        try:
            schedule.run()
        except BrokenPromiseError as error:
            pytest.fail(f"seed {seed}: {error}\nReplay it: python -m tests.simulation.replay {seed}")
        failed += schedule.has_failed
    assert 0.4 < failed / len(seeds) < 0.8, "of the schedules some fail phases, and some do not"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_machine_with_a_mistake_is_found_out(mutant: type[Agreement]) -> None:
    for seed in range(3000):
        try:
            Schedule(seed, machine=mutant).run()
        except BrokenPromiseError:
            return
    pytest.fail(f"{mutant.__name__}: {mutant.__doc__} No schedule of 3,000 shows it.")


def _replayed(seed: int, machine: type[Agreement]) -> list[str]:
    steps: list[str] = []
    try:
        Schedule(seed, machine=machine, tell=steps.append).run()
    except BrokenPromiseError as error:
        steps.append(str(error))
    return steps


def test_a_seed_replays_to_the_message() -> None:
    broken = re.compile(r"rank \d+ hears Result.* rank \d+ has heard Result")
    seed = next(seed for seed in range(400) if broken.search(_replayed(seed, TellsWithoutTruth)[-1]))
    first, again = _replayed(seed, TellsWithoutTruth), _replayed(seed, TellsWithoutTruth)
    assert first == again and len(first) > 20


# Traps, one by one. The machine alone, fed by hand.

AT, NEXT = PhaseIndex(0, 0), PhaseIndex(0, 1)


def _verdict(error: str | None = None, phase: str = "write") -> PhaseOutcome:
    return PhaseOutcome("save 1", phase, None if error is None else describe(StorageError(error)))


def _beat(rank: int, at: PhaseIndex = AT, *, number: int = 1, moves: int = 1, waits: bool = False) -> Sight:
    return Sight(Beat(rank, 100 + rank, "b", "h", "", number, at, "save 1", "write", moves, waits))


def _votes(machine: Agreement, *ranks: int, error: str | None = None) -> list[object]:
    return [do for rank in ranks for do in machine.hear(Vote(AT, rank, _verdict(error).encode()))]


def test_the_lead_makes_no_result_once_another_rank_has_settled() -> None:
    """It was stopped, and reads the last vote and the others' result at once."""
    lead = Agreement(0, 2, 15.0)
    assert lead.vote(AT, _verdict()) == []
    (conclude,) = _votes(lead, 1)
    assert isinstance(conclude, Conclude)
    failed = Result("save 1", describe(StorageError("rank 0 is gone"))).encode()
    assert lead.hear(Told(AT, failed)) == [Decided(AT, failed)]
    assert lead.concluded(AT, concluded(conclude.verdicts, lambda _: Answer())) == []


def test_the_truth_of_another_rank_is_obeyed_and_told_by_the_lead() -> None:
    lead = Agreement(0, 3, 15.0)
    lead.vote(AT, _verdict())
    (conclude,) = _votes(lead, 1, 2)
    (settle,) = lead.concluded(AT, concluded(conclude.verdicts, lambda _: Answer()))  # type: ignore[union-attr]
    assert isinstance(settle, Settle)
    theirs = Result("save 1", describe(StorageError("rank 0 is gone"))).encode()
    told = Told(AT, theirs)
    assert lead.truth(AT, theirs) == [Send([1, 2], told), Decided(AT, theirs)]


def test_a_rank_that_reads_another_ones_truth_leaves_the_telling_to_it() -> None:
    one = Agreement(1, 3, 15.0)
    one.vote(AT, _verdict())
    (settle,) = one.look({0: Sight(_beat(0).beat, has_ended=True)}, 0.0, hinted=False)
    assert isinstance(settle, Settle) and b"rank 0 (pid 100 on h) was killed or ended" in settle.result
    assert one.truth(AT, b"theirs") == [Decided(AT, b"theirs")]
    one.vote(NEXT, _verdict())
    (settle,) = one.look({0: Sight(_beat(0).beat, has_ended=True)}, 0.0, hinted=False)
    assert isinstance(settle, Settle)
    told, decided = one.truth(NEXT, settle.result)
    assert isinstance(told, Send) and told.to == [0, 2] and isinstance(decided, Decided)


def test_a_truth_is_kept_until_all_ranks_have_voted_again() -> None:
    lead = Agreement(0, 2, 15.0)
    lead.vote(AT, _verdict())
    (conclude,) = _votes(lead, 1)
    (settle,) = lead.concluded(AT, concluded(conclude.verdicts, lambda _: Answer()))  # type: ignore[union-attr]
    lead.truth(AT, settle.result)  # type: ignore[union-attr]
    assert lead.vote(NEXT, _verdict()) == []
    assert lead.hear(Vote(NEXT, 1, _verdict().encode()))[0] == Forget(AT)


def test_a_vote_that_comes_before_its_agreement_counts_in_it_and_one_that_comes_after_does_not() -> None:
    lead = Agreement(0, 2, 15.0)
    assert lead.hear(Vote(NEXT, 1, _verdict().encode())) == []
    lead.vote(AT, _verdict())
    (settle,) = _votes(lead, 1, error="full")
    lead.truth(AT, settle.result)  # type: ignore[union-attr]
    assert _votes(lead, 1) == []
    assert isinstance(lead.vote(NEXT, _verdict())[-1], Conclude)


def test_the_lead_waits_for_those_inside_before_it_fails_a_phase_and_a_late_vote_counts() -> None:
    lead = Agreement(0, 4, 15.0)
    lead.vote(AT, _verdict())
    assert lead.waits_for() == [1, 2, 3]
    dead = Sight(_beat(1).beat, has_ended=True)
    assert lead.look({1: dead, 2: _beat(2), 3: _beat(3)}, 0.0, hinted=False) == [], "ranks 2 and 3 may still write"
    _votes(lead, 1)  # it died after its vote, which was on its way
    assert lead.waits_for() == [2, 3]
    _votes(lead, 2)
    (settle,) = lead.look({3: Sight(_beat(3).beat, has_ended=True)}, 0.0, hinted=False)
    assert isinstance(settle, Settle) and b"rank 3 " in settle.result and b"rank 1 " not in settle.result


def test_standstill_is_counted_by_the_one_that_waits_and_not_for_ranks_that_have_voted() -> None:
    one = Agreement(1, 3, 15.0)
    detector = one.detector(AT, "save 1", "write")
    detector.look({0: _beat(0, waits=True), 2: _beat(2, waits=True)}, 0.0)
    detector.look({0: _beat(0, number=20, waits=True), 2: _beat(2, number=20, waits=True)}, 20.0)
    assert detector.absent([0, 2], 20.0, hinted=False).keys() == {0}, "the lead gathers, and shows that it does"
