"""measure=compare: what is slower beyond doubt is reported, what only varies is not."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import recipes.benchmark.__main__
from ckpt.errors import ConfigurationError
from recipes.benchmark.comparison import CompareKeys, compare, ratios
from recipes.benchmark.harness import machine_facts

Rows = Sequence[Mapping[str, Any]]


def _result(path: Path, **rounds: Rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"workload": "gpt2_ddp", "rounds": rounds}))
    return path


def _rows(*seconds: float, figure: str = "save_s") -> Rows:
    return [{figure: one, "of_ranks": [one, one]} for one in seconds]


def _found(capsys: pytest.CaptureFixture[str], a: Path, b: Path, **keys: Any) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of a comparison."""
    code = compare(CompareKeys(str(a), str(b), json=True, **keys))
    return code, json.loads(capsys.readouterr().out)


def test_a_figure_that_is_larger_beyond_doubt_is_marked_and_the_exit_code_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a = _result(tmp_path / "a.json", zarr=_rows(1.0, 1.01, 0.99, 1.02, 0.98), raw=_rows(0.9, 0.9, 0.9))
    b = _result(tmp_path / "b.json", zarr=_rows(1.2, 1.19, 1.21, 1.22, 1.18), raw=_rows(0.91, 0.9, 0.89))

    def command(*overrides: str) -> int:
        monkeypatch.setattr(sys, "argv", ["recipes/benchmark/__main__.py", "measure=compare", *overrides])
        with pytest.raises(SystemExit) as ended:
            recipes.benchmark.__main__.main()
        return int(ended.value.code or 0)

    assert command(f"a={a}", f"b={b}") == 1
    printed = capsys.readouterr().out
    assert "* zarr" in printed and "* raw" not in printed and "1.200" in printed
    assert command(f"a={a}", "b=nowhere.json") == 2
    assert capsys.readouterr().err == "b=nowhere.json does not exist\n"
    assert _found(capsys, b, a)[0] == 0, "faster is no fault"
    assert _found(capsys, a, b, tolerance=0.3)[0] == 0


def test_figures_that_only_vary_are_not_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = _result(tmp_path / "a.json", zarr=_rows(1.0, 1.6, 0.9, 1.1, 1.3))
    b = _result(tmp_path / "b.json", zarr=_rows(1.2, 1.0, 1.5, 0.9, 1.3))
    code, found = _found(capsys, a, b)
    (one,) = found["ratios"]
    assert code == 0 and one["least"] < 1 < one["most"] and (one["a"], one["b"]) == (1.1, 1.2)


def test_rounds_of_the_results_in_two_folders_are_paired(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both became ten times as slow in the third round: each ratio is 1.1, whichever rounds are drawn."""
    for number, seconds in enumerate((1.0, 2.0, 10.0)):
        _result(tmp_path / "before" / str(number) / "benchmark.json", zarr=_rows(seconds))
        _result(tmp_path / "after" / str(number) / "benchmark.json", zarr=_rows(seconds * 1.1))
    code, found = _found(capsys, tmp_path / "before", tmp_path / "after")
    (one,) = found["larger"]
    assert one["least"] == pytest.approx(1.1) and one["most"] == pytest.approx(1.1) and code == 1


def test_figures_may_be_those_of_a_limit_in_the_same_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = _result(tmp_path / "a.json", zarr=_rows(2.0, 4.0, 6.0), raw=_rows(1.0, 2.0, 3.0))
    b = _result(tmp_path / "b.json", zarr=_rows(6.0, 9.0, 3.0), raw=_rows(2.0, 3.0, 1.0))
    (one,) = _found(capsys, a, b, relative_to="raw")[1]["ratios"]
    assert (one["contender"], one["a"], one["b"], one["ratio"]) == ("zarr", 2.0, 3.0, 1.5)


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=7), st.floats(0.25, 4.0))
def test_a_run_beside_itself_is_equal_and_a_multiple_of_it_is_that_multiple(seconds: list[float], factor: float) -> None:
    rounds = {"zarr": _rows(*seconds)}
    (same,) = ratios(rounds, rounds)
    assert (same.ratio, same.least, same.most) == (1.0, 1.0, 1.0)
    (more,) = ratios(rounds, {"zarr": _rows(*(one * factor for one in seconds))})
    assert (more.ratio, more.least, more.most) == pytest.approx((factor,) * 3)


def test_an_interval_holds_the_true_ratio_about_as_often_as_it_says() -> None:
    draw = random.Random(5)
    held = 0
    for _ in range(40):
        a, b = ([{"s": draw.gauss(mean, 0.1)} for _ in range(9)] for mean in (1.0, 1.3))
        (one,) = ratios({"x": a}, {"x": b})
        held += one.least <= 1.3 <= one.most
    assert held >= 34


@pytest.mark.parametrize(
    ("b", "keys", "sentence"),
    [
        ("nowhere.json", {}, "nowhere.json does not exist"),
        ("other.json", {}, "is not the JSON file of a benchmark, which has rounds"),
        ("empty", {}, "there is no benchmark.*json below it"),
        ("b.json", {"relative_to": "dcp"}, "relative_to=dcp is no contender of a, which has zarr"),
        ("c.json", {}, "have no figure of a contender in common"),
    ],
)
def test_a_wrong_input_is_one_sentence(tmp_path: Path, b: str, keys: dict[str, Any], sentence: str) -> None:
    a = _result(tmp_path / "a.json", zarr=_rows(1.0))
    _result(tmp_path / "b.json", zarr=_rows(1.0))
    _result(tmp_path / "c.json", zarr=_rows(1.0, figure="load_s"))
    (tmp_path / "other.json").write_text("[1]")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigurationError, match=sentence):
        compare(CompareKeys(str(a), str(tmp_path / b), **keys))


def test_the_facts_of_a_machine_name_its_processor_and_disk_and_nothing_of_its_owner(tmp_path: Path) -> None:
    facts = machine_facts(tmp_path)
    assert facts["processor"] and facts["cores"] and facts["file_system"] and facts["memory_bytes"] > 1 << 30
    assert json.loads(json.dumps(facts)) == facts
    assert Path("/proc/sys/kernel/hostname").read_text().strip() not in json.dumps(facts).split('"')
