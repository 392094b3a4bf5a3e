"""{raises, hangs, is absent, goes elsewhere} x every phase of a save in the background: the next call of every rank says the same.

As test_fault_matrix.py has it for what training waits for: phases are found out, not listed, and many cases run side by side, as threads of
the same ranks. Ranks that are killed are in test_async_faults.py.
"""

from __future__ import annotations

import errno
import os
import re
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ckpt.errors import CheckpointError, RankAbsentError, StorageError
from ckpt.ranks.topology import Topology
from tests.distributed.test_patterns import PATTERNS
from tests.support.async_runs import settings, until
from tests.support.covering import sampled
from tests.support.faults import Case, FaultyTopology, Job, State, Step, names_in, run_jobs
from tests.support.ranks import run_ranks

NODES = (2, 2)
VICTIMS = (0, 2)
AGREE_S = 3.0
SLACK_S = 20.0
FAULTS = ("raises", "goes elsewhere", "is absent", "hangs")
KINDS = {"raises": StorageError, "goes elsewhere": CheckpointError}
AFTER_THE_COMMIT = ("publish", "retention")


class Told(NamedTuple):
    """What one rank can say of a case.

    Attributes:
        took_s: from the fault, or from the call that waits for the save, to the error.
        committed: once every rank had raised.
        recovered: the same coordinator then saved in the background, and the ranks loaded the same bits.
        left: what lies beside the checkpoints after that.
    """

    kind: str
    message: str
    rank: int | None
    phase: str | None
    took_s: float
    committed: list[str]
    recovered: bool
    left: list[str]


def _find_steps(topology: Topology, root: Path, pattern: str) -> list[Step]:
    """Save in good health, twice, and return every phase in the background of the second save."""

    def note(job: Job) -> list[Step]:
        branches: list[FaultyTopology] = []
        job.topology.on_branch = branches.append
        with State(job.topology, job.root, pattern, saves=settings()).coordinator as made:
            made.save_checkpoint(checkpoint_id="1")
            made.wait()
            branches[0].steps.clear()
            made.save_checkpoint(checkpoint_id="2")
            made.wait()
        return [Step("background", number, *step) for number, step in enumerate(branches[0].steps)]

    return run_jobs(topology, root, [note], agree_s=60)[0]


def _run_case(job: Job, case: Case) -> Told:
    topology = job.topology
    others = [f"raised/{rank}" for rank in range(topology.world_size) if rank != case.victim]
    branches: list[FaultyTopology] = []

    def befall(number: int, where: str) -> None:
        if (number, where) != (case.step.number, "before" if case.fault == "is absent" else "inside"):
            return
        match case.fault:
            case "raises":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a file")
            case "hangs" | "is absent":
                until(lambda: job.mailbox.has(others), "the others' errors", 3 * SLACK_S)

    topology.on_branch = branches.append
    state = State(topology, job.root, case.pattern, saves=settings())
    made = state.coordinator
    made.save_checkpoint(checkpoint_id="1")
    made.wait()
    (branch,) = branches
    branch.recover()
    branch.short_at = case.step.number
    if topology.rank == case.victim:
        branch.befall = befall
        branch.stray_at = case.step.number if case.fault == "goes elsewhere" else -1
    made.save_checkpoint(checkpoint_id="2")
    topology.be_patient(AGREE_S + 1)
    began = time.monotonic()
    try:
        made.wait()
    except CheckpointError as error:
        raised = error
    else:
        raise AssertionError(f"{case}: nothing was raised")
    took_s = time.monotonic() - began
    job.mailbox.put(f"raised/{topology.rank}", b"")
    until(lambda: job.mailbox.has([*others, f"raised/{case.victim}"]), "all ranks' errors", 3 * SLACK_S)
    until(lambda: made._background is None or made._background._last.over.is_set(), "the thread", 3 * SLACK_S)
    topology.recover()
    branch.recover()
    committed = names_in(job)
    recovered = _works(job, case, state)
    left = [name for name in names_in(job) if not name.startswith("checkpoint-")]
    kind = type(raised).__name__
    return Told(kind, str(raised), raised.rank, raised.phase, took_s, committed, recovered, left)


def _raised_by(call: Callable[[], object]) -> CheckpointError:
    try:
        call()
    except CheckpointError as error:
        return error
    raise AssertionError("nothing was raised")


def _works(job: Job, case: Case, state: State) -> bool:
    made = state.coordinator
    made.save_checkpoint(checkpoint_id="3")
    made.close()
    loaded = State(job.topology, job.root, case.pattern, empty=True)
    loaded.coordinator.load_checkpoint()
    report = loaded.coordinator.last_load
    return loaded.is_whole(job.topology.world_size) and report is not None and report.checkpoint_id == "3"


def _befall(topology: Topology, root: Path, patterns: Sequence[str], faults: Sequence[str] | None) -> Any:
    cases = []
    for pattern in patterns:
        for step in _find_steps(topology, root / "healthy" / pattern, pattern):
            number = zlib.crc32(f"{pattern} {step.phase}".encode())
            chosen = faults or [FAULTS[number % len(FAULTS)]]
            victims = VICTIMS if faults else [VICTIMS[number // len(FAULTS) % len(VICTIMS)]]
            cases += [Case(pattern, fault, step, victim) for fault in chosen for victim in victims]

    def job_of(case: Case) -> Callable[[Job], Told]:
        return lambda job: _run_case(job, case)

    return cases, run_jobs(topology, root / "cases", [job_of(case) for case in cases], agree_s=AGREE_S)


def _check(case: Case, told: list[Told]) -> None:
    said = {(one.kind, one.message, one.rank, one.phase) for one in told}
    assert len(said) == 1, f"{case}: every rank raises the same: {said}"
    kind, message, rank, phase = said.pop()
    assert kind == KINDS.get(case.fault, RankAbsentError).__name__, f"{case}: {message}"
    assert (rank, phase) == (case.victim, case.step.phase), f"{case}: {message}"
    assert re.search(_sentence(case), message), f"{case}: {message}"
    assert message.count("checkpoint-2") <= 3 and len(message) < 400, f"{case}: it is said once: {message}"
    assert max(one.took_s for one in told) < AGREE_S + SLACK_S, case
    committed = told[0].committed
    assert all(one.committed == committed for one in told)
    assert all(one.recovered for one in told), f"{case}: the same ranks save and load again"
    assert told[0].left == [], f"{case}: nothing is left of what failed"
    assert committed[0] == "checkpoint-1", "the one before is untouched"
    stands = "checkpoint-2 is committed" in message
    assert committed == ["checkpoint-1", "checkpoint-2"][: 1 + stands], f"{case}: {committed}: {message}"
    assert not stands or case.step.phase in AFTER_THE_COMMIT, case


def _sentence(case: Case) -> str:
    phase, what = case.step.phase, "save of checkpoint-2"
    who = rf"rank {case.victim} \(pid \d+ on host-\d\)"
    match case.fault:
        case "raises":
            return f"{what} failed in phase {phase} on rank {case.victim}: No space left on device: 'a file'"
        case "goes elsewhere":
            return rf"ranks? [\d, ]+ in phase .* of {what}; ranks? [\d, ]+ in phase .* of {what}: "
        case "is absent":
            return f"{who} did not come to phase {phase} of {what} within {AGREE_S:g} s and "
    return f"{who} made no progress for {AGREE_S:g} s in phase {phase} of {what}"


def _require_all(root: Path, patterns: Sequence[str], faults: Sequence[str] | None, least: int) -> None:
    by_rank = run_ranks(sum(NODES), _befall, root, patterns, faults, nodes=list(NODES), agree_s=90, timeout_s=100)
    cases = by_rank[0][0]
    assert len(cases) >= least
    wrong = []
    for number, case in enumerate(cases):
        try:
            _check(case, [told[number] for _, told in by_rank])
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, f"{len(wrong)} of {len(cases)} cases: " + "\n".join(wrong)


@sampled("pattern", ["sharded", "replicated"])
def test_a_phase_in_the_background_that_fails_on_one_rank_raises_one_error_naming_both(
    tmp_path: Path, pattern: str
) -> None:
    _require_all(tmp_path, [pattern], None, 5)


@pytest.mark.full
@pytest.mark.parametrize(
    ("pattern", "fault"),
    [(pattern, fault) for p, pattern in enumerate(PATTERNS) for f, fault in enumerate(FAULTS) if (p + f) % 2 == 0],
)
def test_each_fault_at_every_phase_in_the_background_of_half_of_the_patterns_raises_one_error(
    tmp_path: Path, pattern: str, fault: str
) -> None:
    _require_all(tmp_path, [pattern], [fault], 10)


def test_the_phases_in_the_background_are_those_of_writing_and_committing(tmp_path: Path) -> None:
    found = run_ranks(sum(NODES), _find_steps, tmp_path, "sharded", nodes=list(NODES))
    assert [step.phase for step in found[0]] == ["open", "exchange", "write", "commit", "publish", "retention"]
