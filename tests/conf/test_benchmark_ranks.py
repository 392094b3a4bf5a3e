"""The benchmark of agreements as a user types it: its output, and that what is measured and what is reckoned agree."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import recipes.benchmark.__main__
from recipes.benchmark import reckoned_agreements
from recipes.benchmark.reckoned_agreements import PER_HOST, bytes_for_the_lead, reckon, reckon_saves, request_costs
from tests.support.ranks import forkserver

KEYS = ("ranks=[2,3]", "reckoned=[2,3,40]", "processes=2", "phases=2", "repeats=1", "payload_bytes=500")


@pytest.fixture(autouse=True, scope="module")
def _processes_have_all_loaded() -> None:
    forkserver()


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Call the recipe as the command line would; return its exit code."""
    keys = [f"benchmark.{one}" for one in arguments]
    monkeypatch.setattr(sys, "argv", ["recipes/benchmark/__main__.py", "measure=ranks", *keys])
    try:
        recipes.benchmark.__main__.main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    return code


def test_measured_and_reckoned_phases_move_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *KEYS) == 0
    result = json.loads(Path("outputs/benchmark_ranks/benchmark.json").read_text())
    assert list(result["medians"]) == ["2", "3"] and list(result["reckoned"]) == ["2", "3", "40"]
    for name, measured in result["medians"].items():
        reckoned = result["reckoned"][name]
        assert measured["least_bytes"] == reckoned["least_bytes"] == int(name) * 500
        assert measured["requests"] <= 12, "and not hundreds, as of a rank that asks again and again"
        assert reckoned["requests"] <= measured["requests"]
        assert reckoned["bytes"] <= measured["bytes"], "ranks of one host have sockets"
    printed = " ".join(capsys.readouterr().out.split())
    assert "a phase with 500 bytes of each rank for the lead, " in printed and "one round" in printed
    assert "reckoned; agreements of a save" in printed and "a first save, s" in printed


def test_bytes_grow_with_the_ranks_and_not_with_their_square() -> None:
    costs = request_costs(16_000)
    few, many = (reckon(num, bytes_for_the_lead(2000), costs) for num in (64, 256))
    assert few["bytes"] <= 0.3e6 and many["bytes"] <= 1.2e6
    assert max(few["requests"], many["requests"]) <= 8


def test_saves_are_reckoned_with_what_their_ranks_say_and_a_first_one_with_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    each_look_at_the_clock = itertools.count(step=1e-5).__next__
    monkeypatch.setattr(reckoned_agreements, "time", SimpleNamespace(perf_counter=each_look_at_the_clock))
    costs = dict.fromkeys(("push", "pop", "pop_waiting", "set", "first", "store", "socket"), 0.0)
    free, dear = (reckon_saves(40, {**costs, "byte": second}) for second in (0.0, 1.0))
    assert 0.0 < free["steady_save_s"] < free["first_save_s"] < 1.0, "only the lead's own work is counted"
    hosts = 40 // PER_HOST - 1
    read_once_by_each_other_host = hosts * (190 * 40 + 800_000) // 10
    assert read_once_by_each_other_host <= dear["first_save_s"] <= 4 * read_once_by_each_other_host
    assert dear["steady_save_s"] < 1.0, "nothing long is told"


def test_numbers_below_one_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("processes=0", "ranks=[4, 0]"):
        assert run(monkeypatch, wrong) == 2
        assert capsys.readouterr().err == f"benchmark.{wrong}: expected at least 1\n"
    assert list(Path.cwd().iterdir()) == []
