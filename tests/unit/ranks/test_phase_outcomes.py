"""From what every rank says at the end of a phase to the one error that all of them raise."""

from __future__ import annotations

import errno
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, RankLeftError, StorageError, describe, rebuild
from ckpt.ranks.agreement import Absence, Answer, PhaseOutcome, Result, conclude

SAVE = "save of checkpoint-00000020"


def _failed(error: Exception, *, phase: str | None = "write", what: str | None = SAVE) -> PhaseOutcome:
    return PhaseOutcome(what, phase, describe(error))


def _ok(phase: str = "write", what: str | None = SAVE) -> PhaseOutcome:
    return PhaseOutcome(what, phase)


def _message(verdicts: dict[int, PhaseOutcome], gone: dict[int, Absence] | None = None, world_size: int = 0) -> str:
    error = conclude(verdicts, gone or {}, world_size or len(verdicts) + len(gone or {}))
    assert error is not None
    return str(rebuild(error))


def test_one_rank_that_raised_is_named_with_phase_and_cause() -> None:
    full = _failed(OSError(errno.ENOSPC, "No space left on device", "w"))
    error = conclude({0: _ok(), 1: full, 2: _ok()}, {}, 3)
    assert error is not None
    assert error["message"] == f"{SAVE} failed in phase write on rank 1: No space left on device: 'w'"
    assert (error["kind"], error["rank"], error["phase"]) == (StorageError.__name__, 1, "write")


def _missed(rank: int) -> PhaseOutcome:
    return _failed(RankLeftError(f"rank {rank} left", rank=rank), phase="read")


def test_what_a_rank_left_for_is_told_and_not_that_others_missed_it() -> None:
    damaged = _failed(CorruptCheckpointError("w is damaged"), phase="read")
    assert (
        _message({0: _missed(1), 1: damaged, 2: _missed(0)}) == f"{SAVE} failed in phase read on rank 1: w is damaged"
    )


def test_a_rank_that_is_gone_is_the_cause_of_all_who_missed_it() -> None:
    assert _message({0: _missed(1), 2: _missed(0)}, {1: Absence("rank 1 was killed")}).endswith("rank 1 was killed")


def test_of_ranks_that_missed_each_other_the_one_that_nobody_here_explains_is_told() -> None:
    stalled = _failed(RankLeftError("nothing came from rank 2 for 300 s"), phase="read")
    assert _message({0: _missed(1), 1: stalled, 2: _ok("read")}) == (
        f"{SAVE} failed in phase read on rank 1: nothing came from rank 2 for 300 s"
    )
    assert "rank 0 left" in _message({0: _missed(1), 1: _missed(0)})


def test_what_all_ranks_say_alike_names_none_of_them() -> None:
    missing = CheckpointNotFoundError("there is no checkpoint in /data")
    error = conclude({rank: _failed(missing, what="load of newest") for rank in range(3)}, {}, 3)
    assert error is not None
    assert error["message"] == "load of newest: there is no checkpoint in /data"
    assert error["rank"] is None


def test_a_world_of_one_is_all_ranks() -> None:
    assert _message({0: _failed(ValueError("no"))}) == f"{SAVE}: ValueError: no"


def test_several_ranks_that_say_alike_are_one_part_of_the_sentence() -> None:
    verdicts = {0: _ok(), 1: _failed(ValueError("a")), 2: _failed(ValueError("b")), 3: _failed(ValueError("a"))}
    assert _message(verdicts) == f"{SAVE} failed in phase write on ranks 1, 3: ValueError: a; on rank 2: ValueError: b"


def test_a_sentence_stays_short_when_a_thousand_ranks_fail_each_in_its_own_way() -> None:
    verdicts: dict[int, PhaseOutcome] = {rank: _failed(ValueError(str(rank))) for rank in range(1000)}
    assert _message(verdicts).endswith("; on rank 3: ValueError: 3; and 996 more failures")
    assert len(_message({rank: _failed(ValueError("x")) for rank in range(999)} | {999: _ok()})) < 120


def test_what_a_rank_raised_comes_before_who_is_missing_and_both_are_said() -> None:
    gone = {2: Absence("rank 2 (pid 7 on a) was killed or ended in phase write of " + SAVE, names_phase=True)}
    message = _message({0: _ok(), 1: _failed(ValueError("a"))}, gone)
    assert message == f"{SAVE} failed in phase write on rank 1: ValueError: a; {gone[2].cause}"


def test_a_missing_rank_is_named_and_the_phase_too_unless_its_own_sentence_has_it() -> None:
    there = Absence(f"rank 1 (pid 7 on a) was killed or ended in phase write of {SAVE}", names_phase=True)
    before = Absence("rank 1 (pid 7 on a) was killed or ended outside of any save or load")
    assert _message({0: _ok()}, {1: there}) == there.cause
    assert _message({0: _ok()}, {1: before}) == f"{SAVE} failed in phase write: {before.cause}"


def test_ranks_in_different_calls_are_told_who_is_where() -> None:
    verdicts = {0: _ok(), 1: _ok(), 2: _ok("open", "load of checkpoint-00000010")}
    assert _message(verdicts) == (
        f"ranks 0, 1 in phase write of {SAVE}; rank 2 in phase open of load of checkpoint-00000010: all ranks must make the "
        "same calls in the same order"
    )


def test_a_failure_between_two_phases_is_no_disagreement_about_the_phase() -> None:
    verdicts = {0: _ok(), 1: _failed(ValueError("a"), phase=None)}
    assert _message(verdicts) == f"{SAVE} failed before phase write on rank 1: ValueError: a"


def test_a_failure_before_a_phase_of_another_call_is_not_put_down_to_that_phase() -> None:
    verdicts = {0: _ok(), 1: _failed(ValueError("a"), phase=None, what="load of x")}
    assert _message(verdicts) == "load of x failed between two phases on rank 1: ValueError: a"


def test_one_rank_that_is_elsewhere_than_all_the_others_is_the_one_that_is_named() -> None:
    stray = _ok("open", "load of checkpoint-00000010")
    past = Absence("rank 2 (pid 7 on a) is in phase read of load of checkpoint-00000010", elsewhere=True)
    verdict_lists: list[tuple[dict[int, PhaseOutcome], dict[int, Absence], int | None]] = [
        ({0: stray, 1: _ok(), 2: _ok()}, {}, 0),
        ({0: _ok(), 1: _ok(), 2: stray}, {}, 2),
        ({0: _ok(), 1: _ok()}, {2: past}, 2),
        ({0: _ok(), 1: stray}, {}, None),
        ({0: _ok(), 1: _ok(), 2: stray, 3: _ok("commit")}, {}, None),
    ]
    for verdicts, gone, odd_one in verdict_lists:
        error = conclude(verdicts, gone, len(verdicts) + len(gone))
        assert error is not None
        assert (error["rank"], error["phase"]) == (odd_one, "write"), verdicts


def test_what_stands_whatever_failed_is_said_at_the_end() -> None:
    done = PhaseOutcome(SAVE, "publish", stands="checkpoint-00000020 is committed")
    full = _failed(OSError(errno.ENOSPC, "No space left on device", "w"), phase="publish")
    assert _message({0: done, 1: full}) == (
        f"{SAVE} failed in phase publish on rank 1: No space left on device: 'w'; checkpoint-00000020 is committed all the same"
    )
    assert conclude({0: done, 1: done}, {}, 2) is None


def test_a_phase_outside_of_any_operation_is_named_alone() -> None:
    assert (
        _message({0: _ok(what=None), 1: _failed(ValueError("a"), what=None)})
        == "phase write failed on rank 1: ValueError: a"
    )
    assert _message({0: _failed(ValueError("a"), what=None)}) == "ValueError: a"


VERDICTS = st.builds(
    lambda phase, message: PhaseOutcome(SAVE, phase, None if message is None else describe(ValueError(message))),
    phase=st.sampled_from(["write", "write", "write", "commit"]),
    message=st.none() | st.text(min_size=1),
)


@given(verdicts=st.lists(VERDICTS, min_size=1, max_size=6), lost=st.integers(0, 2))
def test_all_is_well_exactly_if_all_are_there_in_one_phase_and_none_raised(
    verdicts: list[PhaseOutcome], lost: int
) -> None:
    given_verdicts = dict(enumerate(verdicts))
    gone = {len(verdicts) + number: Absence("gone") for number in range(lost)}
    well = not lost and len({verdict.phase for verdict in verdicts}) == 1 and not any(v.error for v in verdicts)
    error = conclude(given_verdicts, gone, len(verdicts) + lost)
    assert (error is None) == well
    raised = [rank for rank, verdict in given_verdicts.items() if verdict.error]
    if error is not None and raised:
        assert error["rank"] in (raised[0], None)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner, max_size=3), max_leaves=5
)


@given(what=st.none() | st.text(), phase=st.none() | st.text(), payload=JSON, stands=st.none() | st.text())
def test_verdicts_and_results_come_back_as_they_were_written(
    what: str | None, phase: str | None, payload: Any, stands: str | None
) -> None:
    said = json.dumps(payload).encode()
    verdict = PhaseOutcome(what, phase, None, said, b"", said + b"\n", stands)
    assert PhaseOutcome.decode(verdict.encode()) == verdict
    result = Result(what, {"message": "two\nlines"}, Answer(said, b""), b"[" + said + b"]")
    assert Result.decode(result.encode()) == result
