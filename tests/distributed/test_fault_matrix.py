"""{raises, hangs, is killed, is absent} x every phase of save and load x every pattern: all other ranks say the same.

By default, on three ranks, each phase of each pattern meets one fault, so chosen that a phase which all patterns have meets every
fault in one of them. The tests marked full are the whole matrix, on four, with the lead and with another rank as the one that fails.
"""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import ckpt
from ckpt.errors import CheckpointError, RankAbsentError, StorageError
from ckpt.ranks.topology import Topology
from tests.distributed.test_patterns import PATTERNS
from tests.support.faults import (
    BY_OTHERS,
    FAULTS,
    Case,
    Job,
    State,
    Step,
    Told,
    find_steps,
    names_in,
    run_cases,
    run_jobs,
    works,
)
from tests.support.ranks import Dead, run_ranks

NODES = (2, 1)
NODES_IN_FULL = (2, 2)
VICTIMS = (0, 2)
AGREE_S = 2.0
IN_A_ROW = 12  # faults of one call, on the same ranks
SLACK_S = 15.0  # for a machine that is busy with something else; how long it really took is reported
ALL_PATTERNS = (*PATTERNS, BY_OTHERS)
TOGETHER = (("sharded",), *((pattern,) for pattern in ALL_PATTERNS if pattern != "sharded"))  # in one launch

KINDS = {"raises": StorageError, "raises before": StorageError, "goes elsewhere": CheckpointError}
CALLS = "(save|load|search) .*"
ALIKE = "(all ranks|every rank) must make the same calls"
STANDS = r"; checkpoint-\S+ is committed all the same"
AFTER_THE_COMMIT = ("publish", "retention")


class Outcome(NamedTuple):
    """A case, what the ranks that live say of it by rank, its folder if one is dead, and when the fault began."""

    case: Case
    told: dict[int, Told]
    root: Path | None
    fault_at_s: float


class _Worst:
    """The longest time from fault to the last rank's error, told at the end of pytest's output."""

    def __init__(self) -> None:
        self.of: dict[str, tuple[float, str]] = {}
        self.cases = 0

    def note(self, outcome: Outcome) -> float:
        others = [told.raised_at_s for rank, told in outcome.told.items() if rank != outcome.case.victim]
        seconds = max(others) - outcome.fault_at_s
        before = self.of.get(outcome.case.fault, (0.0, ""))
        self.of[outcome.case.fault] = max(before, (seconds, str(outcome.case)))
        self.cases += 1
        return seconds

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_sep("-", f"worst time to error of {self.cases} faults, agree.timeout_s {AGREE_S:g}")
        for fault in FAULTS:
            if fault in self.of:
                terminalreporter.write_line(f"{self.of[fault][0]:5.2f} s  {self.of[fault][1]}")


@pytest.fixture(scope="module")
def worst(pytestconfig: pytest.Config) -> Iterator[_Worst]:
    """Not unregistered: it speaks when all tests are over."""
    times = _Worst()
    pytestconfig.pluginmanager.register(times, "worst times to error")
    yield times


def _some_of_each(steps: Mapping[str, Sequence[Step]], dies: int) -> list[Case]:
    """One case per step. A phase that all six patterns have meets each fault, and fails on the lead and on another rank."""
    cases = []
    for pattern, its_steps in steps.items():
        start = ALL_PATTERNS.index(pattern)
        for step in its_steps:
            number = zlib.crc32(f"{step.call} {step.phase}".encode())
            fault = FAULTS[(number + start) % len(FAULTS)]
            victim = dies if fault == "is killed" else VICTIMS[(number // len(FAULTS) + start) % len(VICTIMS)]
            cases.append(Case(pattern, fault, step, victim))
    assert any(case.fault == "is killed" for case in cases), "run_ranks waits for a death"
    return cases


def _every(steps: Mapping[str, Sequence[Step]], fault: str, victim: int) -> list[Case]:
    return [Case(pattern, fault, step, victim) for pattern, its_steps in steps.items() for step in its_steps]


def _befall(topology: Topology, root: Path, patterns: Sequence[str], fault: str | None, victim: int) -> Any:
    """Run the cases; those that kill come last, for they end one of the processes."""
    steps = {pattern: find_steps(topology, root / "healthy" / pattern, pattern) for pattern in patterns}
    cases = _some_of_each(steps, victim) if fault is None else _every(steps, fault, victim)
    cases = [case for case in cases if case.step.what is not None or case.fault != "raises before"]  # before any call
    alive = [case for case in cases if case.fault != "is killed"]
    killed = [case for case in cases if case.fault == "is killed"]
    with topology.phase("tell of those that live") as phase:
        in_a_row = IN_A_ROW if fault is None else 1
        told = run_cases(topology, root / "alive", alive, agree_s=AGREE_S, in_a_row=in_a_row)
        phase.payload = [asdict(one) for one in told]
    return alive, phase.payloads, killed, run_cases(topology, root / "killed", killed, agree_s=AGREE_S)


def _outcomes(
    root: Path, patterns: Sequence[str], fault: str | None, victim: int, nodes: Sequence[int]
) -> list[Outcome]:
    """Run the cases of one fault, or of a mixture in which `victim` is the one to die."""
    dead = {victim} if fault in (None, "is killed") else set()
    ranks = run_ranks(
        sum(nodes),
        _befall,
        root,
        patterns,
        fault,
        victim,
        nodes=nodes,
        expect_dead=dead,
        agree_s=90,
        timeout_s=90,
    )
    living = {rank: said for rank, said in enumerate(ranks) if not isinstance(said, Dead)}
    assert len(living) == sum(nodes) - len(dead)
    alive, payloads, killed, _ = next(iter(living.values()))
    outcomes = []
    for number, case in enumerate(alive):
        told = {rank: Told(**said[number]) for rank, said in enumerate(payloads)}
        fault_at_s = told[case.victim].fault_at_s
        assert fault_at_s is not None, f"{case}: the fault did not happen"
        outcomes.append(Outcome(case, told, None, fault_at_s))
    for number, case in enumerate(killed):
        told = {rank: said[3][number] for rank, said in living.items()}
        killed_at_s = float((root / "killed" / "killed-at").read_text())
        outcomes.append(Outcome(case, told, root / "killed" / str(number), killed_at_s))
    return outcomes


def _check(outcome: Outcome, worst: _Worst) -> None:
    case, told = outcome.case, outcome.told
    said = {(one.kind, one.message, one.rank, one.phase) for one in told.values()}
    assert len(said) == 1, f"{case}: every rank raises the same: {said}"
    kind, message, rank, phase = said.pop()
    assert kind == KINDS.get(case.fault, RankAbsentError).__name__, message
    assert (rank, phase) == (case.victim, case.step.phase), message
    assert re.fullmatch(f"{_sentence(case)}({STANDS})?", message), f"{case}: {message}"
    assert f"rank {case.victim}" in message
    assert worst.note(outcome) < AGREE_S + SLACK_S, case
    if case.fault != "is killed":
        assert all(one.recovered for one in told.values()), f"{case}: the same ranks save and load again"
        assert told[0].left == [], f"{case}: nothing is left of what failed"
    if case.step.call == "save":
        _check_what_is_committed(outcome, message)


def _sentence(case: Case) -> str:
    """What all ranks should say of a case, as a pattern."""
    phase, within = case.step.phase, f"within {AGREE_S:g} s"
    who = rf"rank {case.victim} \(pid \d+ on host-\d\)"
    full = f"on rank {case.victim}: No space left on device: 'a file'"
    of = f" of {CALLS}" if case.step.what else ""
    match case.fault:
        case "raises":
            return f"{CALLS} failed in phase {phase} {full}" if of else f"phase {phase} failed {full}"
        case "raises before":
            return f"{CALLS} failed before phase {phase} {full}"
        case "goes elsewhere":
            return rf"ranks? [\d, ]+ in phase .*{of}; ranks? [\d, ]+ in phase .*{of}: {ALIKE} in the same order"
        case "is absent":
            return f"{who} did not come to phase {phase}{of} {within} and (is|was last seen) .*: {ALIKE}"
        case "hangs":
            return f"{who} made no progress for {AGREE_S:g} s in phase {phase}{of}"
    return f"{who} was killed or ended in phase {phase}{of}"


def _check_what_is_committed(outcome: Outcome, message: str) -> None:
    """Nothing, unless all was done before something else failed, and then the error says so."""
    committed = [one.committed for one in outcome.told.values()]
    if outcome.root is not None:
        committed = [sorted(path.name for path in outcome.root.glob("checkpoint-*"))]
    assert all(names == committed[0] for names in committed)
    assert bool(committed[0]) == bool(re.search(STANDS, message)), f"{outcome.case}: {committed[0]}: {message}"
    if committed[0]:
        assert outcome.case.step.phase in AFTER_THE_COMMIT
        assert committed[0][0] in message


@pytest.mark.parametrize("together", [0, *(pytest.param(at, marks=pytest.mark.full) for at in range(1, len(TOGETHER)))])
def test_every_phase_that_goes_wrong_on_one_rank_raises_one_error_that_names_both(
    tmp_path: Path, worst: _Worst, together: int
) -> None:
    outcomes = _outcomes(tmp_path, TOGETHER[together], None, VICTIMS[together % len(VICTIMS)], NODES)
    assert len(outcomes) > 5 * len(TOGETHER[together])
    for outcome in outcomes:
        _check(outcome, worst)


@pytest.mark.full
@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("pattern", ALL_PATTERNS)
def test_every_fault_at_every_phase_of_every_pattern_raises_one_error(
    tmp_path: Path, worst: _Worst, pattern: str, fault: str, victim: int
) -> None:
    outcomes = _outcomes(tmp_path, [pattern], fault, victim, NODES_IN_FULL)
    assert len(outcomes) > 5
    for outcome in outcomes:
        _check(outcome, worst)


def _phases(topology: Topology, root: Path) -> list[str]:
    found: set[str] = set()
    for pattern in ALL_PATTERNS:
        found |= {step.phase for step in find_steps(topology, root / pattern, pattern)}
    return sorted(found)


NO_SAVE_OR_LOAD = (
    "topology",
    "state_digest",
    "async_utils",
    "tiered",
    "drains",
    "host_folder",
    "new_folder",
)  # joining, naming groups, digesting the state for a test, tiers (test_tier_faults.py), requests of other programs (test_async_queue.py),
# saves of one state dict (test_checkpointer_ranks.py), and those that a framework names (test_folder_saves.py)
OTHER_WAY_IN = (
    "dist_checkpointing",  # see test_dist_checkpointing_faults.py
    "api",
    "integrations",  # see test_checkpointer_ranks.py
    "interop",  # see test_importing.py and test_exporting_dcp.py
    "cli",
)
NO_CHECKPOINT = ("engine",)  # see test_engine_faults.py
ONLY_WHERE_COPIES_DIFFER = {"values", "distances"}  # and are compared number by number: the save fails anyway
OF_OTHER_CALLS = {
    "adapters",  # of a PEFT model, when its components are made: tests/unit/state/test_adapters.py
    "sharing",  # where a pattern is inferred: test_checkpointer_ranks.py
    "look again",  # where a load has failed: tests/unit/catalog/test_shared_roots.py
    "look for newer",  # where a checkpoint is loaded by its path: test_coordinator.py
    "look for links",  # where a damaged file is met in the search for the newest checkpoint: test_incremental_ranks.py
    "indexes",
    "open records",  # of a checkpoint that is opened to be read, and of an export: test_checkpointer_ranks.py
    "report",  # of a save in the background: test_async_faults.py
    "summarize the times",  # of a two-stage load, when they are asked for
    "look into memory",
    "open the memory",  # of a publication: test_publish.py
}
BY_TORCH = {
    "name the data-parallel groups",
    "make process groups",
}  # which these ranks, being threads, have not: test_two_stage.py


def test_the_matrix_goes_through_every_phase_that_the_code_of_save_and_load_names(tmp_path: Path) -> None:
    named = set()
    package = Path(ckpt.__file__).parent
    for path in package.rglob("*.py"):
        top = path.relative_to(package).parts[0].removesuffix(".py")
        if path.stem == "two_stage" or (
            path.stem not in NO_SAVE_OR_LOAD and top not in (*OTHER_WAY_IN, *NO_CHECKPOINT)
        ):
            named |= set(
                re.findall(r"""(?:\.(?:phase|exchange)\(|exchange_distinct\(.*, )"([^"]+)\"""", path.read_text())
            )
    assert {"collect", "write", "publish", "open", "read", "apply"} <= named
    found = run_ranks(sum(NODES), _phases, tmp_path, nodes=list(NODES))
    assert found == [sorted(named - ONLY_WHERE_COPIES_DIFFER - OF_OTHER_CALLS - BY_TORCH)] * sum(NODES)


# A rank that makes another call than the others, or none


class Calls(NamedTuple):
    """What one rank calls and what the others call, in (save or load, id), and where those wait."""

    one: tuple[str, str] | None
    others: tuple[str, str] | None


SAVE, OTHER_SAVE, LOAD, OTHER_LOAD = ("save", "3"), ("save", "4"), ("load", "1"), ("load", "2")
FIRST_PHASE = {"save": "collect", "load": "open"}
DIFFERENT = [Calls(SAVE, LOAD), Calls(LOAD, SAVE), Calls(SAVE, OTHER_SAVE), Calls(LOAD, OTHER_LOAD)]
MISSING = [Calls(None, SAVE), Calls(None, LOAD), Calls(OTHER_SAVE, None)]
"""Of different names in a row: a rank that makes the call which it has missed is late, and told what the others were."""
ROWS = [[(calls, odd_one) for calls in row] for row in (DIFFERENT, MISSING) for odd_one in VICTIMS]


def _call(job: Job, row: Sequence[tuple[Calls, int]]) -> list[tuple[Any, bool]]:
    """Call what this rank is to call, time after time, note what comes of it, and then save and load with all."""
    topology = job.topology
    for checkpoint_id in ("1", "2"):
        State(topology, job.root, "sharded").coordinator.save_checkpoint(checkpoint_id=checkpoint_id)
    said = [_call_once(job, calls, odd_one, f"raised/{number}") for number, (calls, odd_one) in enumerate(row)]
    works_again = works(job, "sharded") and names_in(job) == ["checkpoint-1", "checkpoint-2", "checkpoint-again"]
    return [(one, works_again) for one in said]


def _call_once(job: Job, calls: Calls, odd_one: int, raised: str) -> Any:
    topology = job.topology
    state = State(topology, job.root, "sharded", empty=True)
    mine = calls.one if topology.rank == odd_one else calls.others
    callers = [rank for rank in range(topology.world_size) if (calls.one if rank == odd_one else calls.others)]
    topology.be_patient(AGREE_S)
    said = None
    began = time.monotonic()
    if mine is not None:
        with pytest.raises(CheckpointError) as caught:
            if mine[0] == "save":
                State(topology, job.root, "sharded").coordinator.save_checkpoint(checkpoint_id=mine[1])
            else:
                state.coordinator.load_checkpoint(job.root / f"checkpoint-{mine[1]}")
        error = caught.value
        said = (type(error).__name__, str(error), error.rank, error.phase), time.monotonic() - began
        job.mailbox.put(f"{raised}/{topology.rank}", b"")
    while not job.mailbox.has([f"{raised}/{rank}" for rank in callers]):  # whoever called nothing does something else
        time.sleep(0.05)
    topology.recover()
    return said


def _call_different_things(topology: Topology, root: Path) -> list[tuple[Any, bool]]:
    def job_of(row: Sequence[tuple[Calls, int]]) -> Callable[[Job], list[tuple[Any, bool]]]:
        return lambda job: _call(job, row)

    told = run_jobs(topology, root / "jobs", [job_of(row) for row in ROWS], agree_s=AGREE_S)
    return [one for row in told for one in row]


def test_a_rank_that_calls_nothing_or_something_else_is_named_and_joins_the_next_save(
    tmp_path: Path,
) -> None:
    outcomes = run_ranks(sum(NODES), _call_different_things, tmp_path, nodes=list(NODES))
    for number, (calls, odd_one) in enumerate([one for row in ROWS for one in row]):
        told = [outcome[number] for outcome in outcomes]
        assert all(works_again for _, works_again in told), (calls, odd_one)
        said = {one[0] for one, _ in told if one is not None}
        assert len(said) == 1, f"{calls}: all that called say the same: {said}"
        assert max(one[1] for one, _ in told if one is not None) < AGREE_S + SLACK_S
        _check_calls(calls, odd_one, *said.pop())


def _check_calls(calls: Calls, odd_one: int, kind: str, message: str, rank: int | None, phase: str | None) -> None:
    others = [one for one in range(sum(NODES)) if one != odd_one]
    if calls.others is None:
        assert calls.one is not None
        first_absent = min(others)
        assert (kind, rank, phase) == (RankAbsentError.__name__, first_absent, "collect")
        assert message.startswith(f"rank {first_absent} (pid ")
        assert f"did not come to phase collect of save of checkpoint-{calls.one[1]} within" in message
        return
    where = f"in phase {FIRST_PHASE[calls.others[0]]} of {calls.others[0]} of checkpoint-{calls.others[1]}"
    assert (rank, phase) == (odd_one, FIRST_PHASE[calls.others[0]]), message
    if calls.one is None:
        assert kind == RankAbsentError.__name__
        assert re.fullmatch(
            rf"rank {odd_one} \(pid \d+ on host-\d\) did not come {where.replace('in', 'to', 1)} within {AGREE_S:g} s and is "
            f"outside of any save or load: {ALIKE}",
            message,
        ), message
        return
    assert kind == CheckpointError.__name__
    here = f"rank {odd_one} in phase {FIRST_PHASE[calls.one[0]]} of {calls.one[0]} of checkpoint-{calls.one[1]}"
    there = f"ranks {', '.join(map(str, others))} {where}"
    assert message.startswith(f"{here}; {there}: all" if odd_one == 0 else f"{there}; {here}: all"), message
