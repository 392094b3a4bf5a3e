"""The campaign's process, and its table at the end of the session: tried, held, fell."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from tests.adversarial import shim
from tests.adversarial.driver import Case, Driver, Outcome

_OUTCOMES = pytest.StashKey[list[Outcome]]()
_SEED = pytest.StashKey[int]()
_SHOWN = 60

Campaign = Callable[[Sequence[Case]], None]


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    if reason := shim.why_not():
        pytest.skip(reason)
    workers = 2 if "PYTEST_XDIST_WORKER" in os.environ else 4  # of pytest's workers several may run one
    return Driver(tmp_path_factory.mktemp("adversarial"), workers)


@pytest.fixture
def campaign(driver: Driver, pytestconfig: pytest.Config) -> Campaign:
    """Run cases, count them for the table, and fail if one fell."""

    def run(cases: Sequence[Case]) -> None:
        outcomes = driver.run(cases)
        pytestconfig.stash.setdefault(_OUTCOMES, []).extend(outcomes)
        fell = [f"{one.name}\n    {_short(one.fell)}" for one in outcomes if one.fell]
        assert outcomes, "nothing was tried"
        assert not fell, f"{len(fell)} of {len(outcomes)} fell:\n" + "\n".join(fell[:_SHOWN])

    return run


def _short(text: str) -> str:
    """The first and the last line: of a traceback, what it is and what was raised."""
    lines = text.strip().splitlines()
    return " ... ".join(line.strip()[:400] for line in dict.fromkeys((lines[0], lines[-1])))


@pytest.fixture
def seed(pytestconfig: pytest.Config) -> int:
    """Of everything that is drawn by lot: CKPT_SEED, or the same every time."""
    chosen = int(os.environ.get("CKPT_SEED", "20"))
    pytestconfig.stash[_SEED] = chosen
    return chosen


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    outcomes = config.stash.get(_OUTCOMES, [])
    if not outcomes:
        return
    tried, fell = Counter(one.row for one in outcomes), Counter(one.row for one in outcomes if one.fell)
    terminalreporter.section(f"campaign, CKPT_SEED={config.stash.get(_SEED, 0)}")
    terminalreporter.line(f"{'':44} {'tried':>6} {'held':>6} {'fell':>6}")
    for row in [*tried, "all"]:
        counts = (tried[row], fell[row]) if row != "all" else (tried.total(), fell.total())
        terminalreporter.line(f"{row:44} {counts[0]:6} {counts[0] - counts[1]:6} {counts[1]:6}")
