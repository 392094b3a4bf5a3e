"""Commits in an object store: a run is killed, stopped or refused at a request of a save, and no reader finds half a checkpoint."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.covering import sampled
from tests.support.object_server import ObjectServer
from tests.support.object_writers import (
    FAILED,
    SCENARIOS,
    ended,
    generations,
    go_on,
    orphans,
    start,
    stop,
    take_over,
    write,
)

BEFORE = {"1": 1, "2": 2}
AFTER = {
    "new": {**BEFORE, "3": 3},
    "new by tensorstore": {**BEFORE, "3": 3},
    "replace": {"1": 1, "2": 9},
    "retention": {"2": 2, "3": 3},
    "incremental": {**BEFORE, "3": 3},
    "async": {**BEFORE, "3": 3},
    "convert": {**BEFORE, "3": 2},
}
BETWEEN = {"retention": [{**BEFORE, "3": 3}]}
WOKEN = {"retention": [{"3": 3}]}
"""It may have slept before it looked: then it goes on from the other's checkpoint, and keeps that and its own."""
FAULTS = ("kill before", "kill after", "lost", "500", "dead from", "lost and away")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with ObjectServer() as server:
        assert ended(start(write, server.environment, tmp_path_factory.mktemp("setup") / "log", "setup")) == 0
        yield server


@pytest.fixture(scope="module")
def objects(server: ObjectServer) -> dict[str, object]:
    return dict(server.objects["bucket"])


class Case:
    """One run that meets one fault, and what is found afterwards."""

    def __init__(self, server: ObjectServer, objects: dict[str, object], folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.log = folder / "log"
        server.objects["bucket"] = dict(objects)  # type: ignore[arg-type]
        server.forget()

    def found(self, name: str) -> dict[str, int]:
        folder = self.folder / name
        folder.mkdir()
        return generations(self.server, folder)

    def write(self, scenario: str, fault: str, at: int) -> int:
        process = start(write, self.server.environment, self.log, scenario)
        until: list[float] = []

        def meet(number: int, operation: str, key: str) -> str | None:
            if number == at and fault == "kill before":
                os.kill(process.pid or 0, signal.SIGKILL)
                return "drop"
            if number >= at and fault == "dead from":
                return "drop"
            if fault == "lost and away" and number >= at:  # done, not answered, and then the store is away for longer than is tried
                until.append(time.monotonic() + 0.9)
                away = until[0]
                return "lost" if number == at else "drop" if time.monotonic() < away else None
            return fault if number == at and fault in ("lost", "500") else None

        def after(number: int, operation: str, key: str) -> None:
            if number == at and fault == "kill after":
                os.kill(process.pid or 0, signal.SIGKILL)

        self.server.fault, self.server.after = meet, after
        return ended(process)

    def clean_up(self) -> None:
        self.server.forget()
        assert ended(start(take_over, self.server.environment, self.log)) == 0, self.log.read_text()


def num_requests(server: ObjectServer, objects: dict[str, object], folder: Path, scenario: str) -> int:
    case = Case(server, objects, folder)
    assert case.write(scenario, "none", -1) == 0, case.log.read_text()
    assert case.found("whole") == AFTER[scenario]
    assert orphans(server) == []
    return len(server.requests)


def run_at_each(server: ObjectServer, objects: dict[str, object], folder: Path, scenario: str, fault: str, step: int) -> Counter[str]:
    """Meet the fault at every `step`-th request; return how often there was what."""
    (folder / "first").mkdir()
    total = num_requests(server, objects, folder / "first", scenario)
    tally: Counter[str] = Counter()
    for at in range(hash_free(scenario + fault) % step, total, step):
        here = folder / str(at)
        here.mkdir()
        case = Case(server, objects, here)
        code = case.write(scenario, fault, at)
        seen = case.found("seen")
        assert seen in [BEFORE, AFTER[scenario], *BETWEEN.get(scenario, ())], f"{scenario}, {fault} at {at}: {seen}"
        if code == 0:  # where the store has died after the commit, the next save removes what retention does not keep
            assert seen in [AFTER[scenario], *BETWEEN.get(scenario, ())], f"{scenario}, {fault} at {at}: it said that it had committed"
        elif fault in ("lost", "500"):
            assert code == FAILED, f"{scenario}, {fault} at {at}: {case.log.read_text()}"
        case.clean_up()
        after = case.found("after")
        assert after.pop("9") == 8
        assert after == seen, f"{scenario}, {fault} at {at}: a sweep changed what is committed"
        assert orphans(server) == [], f"{scenario}, {fault} at {at}"
        assert "a-secret" not in case.log.read_text()
        tally["after" if seen == AFTER[scenario] else "before" if seen == BEFORE else "between"] += 1
        tally["failed" if code else "went on"] += 1
    return tally


def hash_free(text: str) -> int:
    """A number that follows from a text in every process."""
    return sum(text.encode())


@sampled(
    ("scenario", "fault"),
    [
        ("new", "kill before"),
        ("new by tensorstore", "dead from"),
        ("replace", "lost and away"),
        ("incremental", "500"),
        ("retention", "kill before"),
        ("convert", "kill before"),
        ("replace", "kill after"),
        ("async", "lost"),
    ],
    4,
)
def test_a_fault_at_a_request_leaves_the_checkpoints_before_or_after_and_never_half_of_one(
    server: ObjectServer, objects: dict[str, object], tmp_path: Path, scenario: str, fault: str
) -> None:
    """A sample of the requests; the next test has all."""
    tally = run_at_each(server, objects, tmp_path, scenario, fault, 23)
    assert tally.total() >= 2


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_fault_at_every_request(
    server: ObjectServer, objects: dict[str, object], tmp_path: Path, scenario: str, fault: str
) -> None:
    tally = run_at_each(server, objects, tmp_path, scenario, fault, 1)
    if fault in ("lost", "500"):
        assert tally["failed"] == 0, "a passing failure is tried again"
    assert tally["before"] > 0 or fault in ("lost", "500")
    assert tally["after"] > 0


def sleep_at_each(server: ObjectServer, objects: dict[str, object], folder: Path, scenario: str, step: int, first: int) -> Counter[str]:
    """Stop the run at a request; let another take the root, clean up and save; then let the first one go on."""
    (folder / "first").mkdir()
    total = num_requests(server, objects, folder / "first", scenario)
    tally: Counter[str] = Counter()
    for at in range(first, total, step):
        here = folder / str(at)
        here.mkdir()
        case = Case(server, objects, here)
        process = start(write, server.environment, case.log, scenario)
        slept: list[int] = []

        def meet(number: int, operation: str, key: str, at: int = at, case: Case = case, process: object = process) -> str | None:
            if number == at:
                stop(process)  # type: ignore[arg-type]
                slept.append(at)  # noqa: B023  # of this case
                server.fault = lambda number, operation, key: None
                assert ended(start(take_over, server.environment, case.log)) == 0, case.log.read_text()
                go_on(process)  # type: ignore[arg-type]
            return None

        server.fault = meet
        code = ended(process)
        seen = case.found("seen")
        if not slept:  # its lease beat less often than that of the run that was counted, so it had ended before
            assert code == 0 and seen == AFTER[scenario] and at > total // 2
            continue
        assert seen.pop("9") == 8
        committed = [AFTER[scenario], *WOKEN.get(scenario, ())]
        assert seen in [BEFORE, *committed, *BETWEEN.get(scenario, ())], f"{scenario} slept at {at}: {seen}"
        if code == 0:
            assert seen in committed, f"{scenario} slept at {at}: {seen}, {case.log.read_text()}"
        case.clean_up()
        assert orphans(server) == [], f"{scenario} slept at {at}"
        tally["after" if seen in committed else "before"] += 1
    return tally


@pytest.mark.parametrize("scenario", ["new", "replace"])
def test_a_run_that_slept_while_another_cleaned_up_commits_nothing_that_has_lost_objects(
    server: ObjectServer, objects: dict[str, object], tmp_path: Path, scenario: str
) -> None:
    assert sleep_at_each(server, objects, tmp_path, scenario, 31, 12).total() >= 2


@pytest.mark.full
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_run_that_slept_at_any_request(
    server: ObjectServer, objects: dict[str, object], tmp_path: Path, scenario: str, part: int
) -> None:
    """A third of the requests each, so that none takes longer than a hang is waited for."""
    tally = sleep_at_each(server, objects, tmp_path, scenario, 3, part)
    assert tally["after"] > 0
    assert tally["before"] > 0 or scenario == "convert", "nobody takes a process without a claim for dead while it lives"
