"""measure=plan as a user types it: its output, and the file that it leaves."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

import recipes.benchmark.__main__
from tests.support.ranks import forkserver

SMALL = tuple(f"benchmark.{key}" for key in ("tp=2", "pp=2", "layers=2", "width=64", "vocab=64"))


@pytest.fixture(autouse=True, scope="module")
def _processes_have_all_loaded() -> None:
    forkserver()


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Call the recipe as the command line would; return its exit code."""
    monkeypatch.setattr(sys, "argv", ["recipes/benchmark/__main__.py", "measure=plan", *arguments])
    try:
        recipes.benchmark.__main__.main()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    return code


def test_it_leaves_json_with_rounds_per_case_and_prints_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, *SMALL, "benchmark.dp=[3,3]", "benchmark.optimizer_state=[sharded]") == 0
    out, err = capsys.readouterr()
    result = json.loads(Path("outputs/benchmark_plan/benchmark.json").read_text())
    assert err == ""
    assert list(result["rounds"]) == list(result["medians"]) == ["12 ranks, sharded"]
    row, _ = result["rounds"]["12 ranks, sharded"]
    layer = 12 * 64 * 64 + 13 * 64
    assert row["parameters"] == 2 * layer + 64 * 64 + 2 * 64
    assert (row["ranks"], row["distinct_tables"], row["arrays"]) == (12, 12, 5 * (2 * 12 + 3))
    assert row["bytes"] == 14 * row["parameters"] + 4 * (2 * 12 + 3)
    assert row["min_to_mean"] <= 1 <= row["max_to_mean"]
    assert row["total_s"] == pytest.approx(row["tables_s"] + row["plan_s"] + row["own_s"])
    assert (result["tensors"], result["bytes"]) == (row["arrays"], row["bytes"])
    assert result["machine"]["cores"] >= 1
    printed = " ".join(out.split())
    assert "0.000 billion parameters, TP 2 x PP 2, 135 arrays, " in printed and "medians of 2 rounds" in printed
    assert "12 ranks, sharded" in printed and f"{row['max_to_mean']:.4f}" in printed


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("dp=[0]", "benchmark.dp=[0]: expected at least 1"),
        ("dp=[]", "benchmark.dp=[]: expected at least one number of replicas"),
        ("width=-5", "benchmark.width=-5: expected at least 1"),
        ("pp=many", "benchmark.pp=many: expected a whole number; the benchmark has benchmark.tp, benchmark.pp, "),
        ("optimizer_state=[halved]", "benchmark.optimizer_state=['halved']: expected some of replicated, sharded"),
        ("vocabulary=5", "benchmark.vocabulary: there is no such key; did you mean benchmark.vocab?"),
    ],
)
def test_a_mistake_is_one_sentence_exit_code_2_and_no_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argument: str, sentence: str
) -> None:
    assert run(monkeypatch, f"benchmark.{argument}") == 2 and list(Path.cwd().iterdir()) == []
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(sentence) and err.count("\n") == 1, err


def test_help_shows_every_key_with_its_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--help") == 0 and list(Path.cwd().iterdir()) == []
    out = capsys.readouterr().out
    assert "python -m recipes.benchmark measure=plan benchmark.dp=[16] benchmark.optimizer_state=[sharded]" in out
    for key in ("tp=8", "pp=16", "layers=128", "width=25600", "vocab=32000"):
        assert f"\n  benchmark.{key} " in out, out
