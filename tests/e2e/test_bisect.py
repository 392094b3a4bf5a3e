"""`recipes.bisect` finds a planted change of one element, one option, one seed: its step, component and cause."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt.ranks.sigterm import TOLD_TO_END
from ckpt.ranks.topology import Topology
from recipes.bisect import main
from recipes.commands import bisecting
from recipes.support.report import Report, Summary
from recipes.training.training import resume, set_up
from tests.e2e.runs import checkpoint, run

STEPS = 6


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str

    @property
    def told(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found


Bisect = Callable[..., Outcome]


@pytest.fixture
def bisect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bisect:
    """The command, called in an empty folder; it leaves nothing there, and no temporary folder."""
    for name in ("here", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))

    def call(*words: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["recipes.bisect", *words])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
        assert not list(Path.cwd().iterdir())
        assert not list((tmp_path / "tmp").glob("ckpt-bisect-*"))
        return Outcome(code, *capsys.readouterr())

    return call


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("good") / "run"
    run(run_dir, f"train.steps={STEPS}", "save.every=2")
    return run_dir


@pytest.fixture(scope="module")
def fork(good: Path) -> Path:
    """A run that continued the good one at step 4, with another learning rate."""
    run_dir = good.parent / "fork"
    start = f"resume={checkpoint(good, 4)}"
    run(run_dir, f"train.steps={STEPS + 1}", "save.every=2", start, "optimizer.lr=1e-3")
    return run_dir


@pytest.fixture(scope="module")
def element(good: Path) -> Path:
    """The good run with one element of its checkpoint of step 4 changed, from which it was resumed."""
    run_dir = good.parent / "element"
    shutil.copytree(good, run_dir)
    shutil.rmtree(checkpoint(run_dir, 6))
    run(run_dir, f"resume={checkpoint(run_dir, 4)}", job=change_one_element)
    run(run_dir, "resume=latest", f"train.steps={STEPS}", "save.every=2")
    return run_dir


def change_one_element(cfg: dict[str, Any], topology: Topology) -> dict[str, Any]:
    training, coordinator = set_up(cfg, topology)
    with coordinator, torch.no_grad():
        resume(training, coordinator, Summary(world_size=1), Report(cfg, shown=False))
        dict(training.model.named_parameters())["h.1.mlp.c_fc.weight"][3, 5] += 0.5
        coordinator.save_checkpoint(checkpoint_id="00000004")
    return {}


def words(good: Path, bad: Path) -> tuple[str, str]:
    return f"run={good}", f"bad={bad}"


def test_a_changed_element_of_a_checkpoint_is_found_where_the_run_departs_from_its_replay(
    good: Path, element: Path, bisect: Bisect
) -> None:
    outcome = bisect(*words(good, element), "json=true")
    told = outcome.told
    assert (outcome.code, outcome.err, told["equal"]) == (1, "", False)
    assert (told["equal_up_to"], told["differ_at"], told["step"], told["components"]) == (2, 4, 4, ["model"])
    assert (told["replays_part"], told["not_reproduced"]) == (False, {"bad": 4})
    (one,) = told["differences"]
    assert (one["component"], one["name"], one["num_differ"]) == ("model", "h.1.mlp.c_fc.weight", 1)
    assert one["largest"] == pytest.approx(0.5)
    assert told["config"] == [row for row in told["config"] if row["name"].startswith("save.")]
    assert "bad departs from its own replay at step 4, in model" in told["sentence"]


@pytest.mark.full
def test_a_later_equal_checkpoint_does_not_hide_one_that_was_changed_by_hand(
    good: Path, element: Path, tmp_path: Path, bisect: Bisect
) -> None:
    shutil.copytree(good, tmp_path / "hand")
    shutil.rmtree(checkpoint(tmp_path / "hand", 4))
    shutil.copytree(checkpoint(element, 4), checkpoint(tmp_path / "hand", 4))
    told = bisect(*words(tmp_path / "hand", good), "json=true").told
    assert (told["equal_up_to"], told["step"], told["components"], told["not_reproduced"]) == (
        2,
        4,
        ["model"],
        {"run": 4},
    )


def test_a_learning_rate_changed_on_a_resume_is_found_at_the_step_after_it(
    good: Path, fork: Path, tmp_path: Path, bisect: Bisect
) -> None:
    outcome = bisect(*words(good, fork), f"work_dir={tmp_path / 'kept'}")
    lines = outcome.out.splitlines()
    assert (outcome.code, outcome.err) == (1, "")
    assert lines[:2] == ["replaying run from step 4 to step 6", "replaying bad from step 4 to step 6"]
    lines = [line for line in lines if not line.startswith("replaying ")]
    assert lines[0] == "the runs part at step 5, in model, optimizer, scheduler; their configs differ in optimizer.lr"
    rows = [line.split() for line in lines if line.startswith("config ")]
    assert rows == [["config", "optimizer.lr", "value", "0.002", "0.001"]]
    assert lines[-1].endswith(" more differences: give all=true to see them")
    kept = {path.relative_to(tmp_path / "kept").parts[::2] for path in (tmp_path / "kept").glob("*/*/*-*")}
    assert kept == {(name, f"checkpoint-0000000{step}") for name in ("run", "bad") for step in (5, 6)}
    again = bisect(*words(good, fork), f"work_dir={tmp_path / 'kept'}")
    assert (again.code, again.out) == (2, "")
    assert again.err == f"work_dir={tmp_path / 'kept'} is not empty: give a new folder\n"


def test_losses_tell_where_runs_part_that_have_no_later_checkpoint_in_common(
    good: Path, fork: Path, tmp_path: Path, bisect: Bisect
) -> None:
    shutil.copytree(fork, tmp_path / "fork")
    shutil.rmtree(checkpoint(tmp_path / "fork", 6))
    told = bisect(*words(good, tmp_path / "fork"), "json=true").told
    assert (told["equal_up_to"], told["differ_at"], told["losses_part_at"]) == (4, None, 6)
    assert (told["step"], told["not_reproduced"]) == (5, {})
    summary = tmp_path / "fork" / "summary.json"
    summary.unlink()
    killed = bisect(*words(good, tmp_path / "fork"))
    assert (killed.code, killed.out) == (0, "the runs are equal up to step 4, the last that can be compared\n")
    summary.write_text("{}")
    damaged = bisect(*words(good, tmp_path / "fork"))
    assert (damaged.code, damaged.err) == (1, f"{summary} is not the summary of a run: 'losses'\n")


def test_another_seed_is_found_before_the_first_step(good: Path, tmp_path: Path, bisect: Bisect) -> None:
    run(tmp_path / "seed", "train.steps=2", "train.seed=1")
    told = bisect(*words(good, tmp_path / "seed"), "json=true").told
    assert (told["equal_up_to"], told["differ_at"], told["step"]) == (None, 2, 0)
    assert told["components"] == ["dataset", "model", "rng"]
    seed = told["config"][0]
    assert (seed["name"], seed["a"], seed["b"]) == ("train.seed", 0, 1)
    assert told["sentence"] == (
        "the runs part at step 0, before the first one, in dataset, model, rng; their configs differ in train.seed"
    )


@pytest.mark.full
def test_another_dropout_is_found_at_the_first_step_by_halving(good: Path, tmp_path: Path, bisect: Bisect) -> None:
    run(tmp_path / "dropout", "train.steps=4", "model.dropout=0.2")
    outcome = bisect(*words(good, tmp_path / "dropout"))
    assert outcome.code == 1
    assert "the runs part at step 1, in model, optimizer; their configs differ in model.dropout" in outcome.out.splitlines()
    ends = [
        line.rsplit(" ", 1)[1]
        for line in outcome.out.splitlines()
        if line.startswith("replaying bad from the beginning")
    ]
    assert ends == ["4", "1", "0"]


def test_equal_runs_are_equal_and_nothing_is_replayed(
    good: Path, tmp_path: Path, bisect: Bisect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(bisecting, "launch")
    again = tmp_path / "again"
    shutil.copytree(good, again)
    said = bisect(*words(good, again))
    assert (said.code, said.out, said.err) == (
        0,
        f"the runs are equal up to step {STEPS}, the last that can be compared\n",
        "",
    )
    told = bisect(f"run={good / 'checkpoints'}", f"bad={again}", "json=true").told
    assert (told["equal"], told["equal_up_to"], told["step"]) == (True, STEPS, None)


def test_what_cannot_be_told_is_one_sentence_and_exit_code_2(
    good: Path, tmp_path: Path, bisect: Bisect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*given: str) -> str:
        outcome = bisect(f"run={good}", *given)
        assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1), outcome.err
        return outcome.err.rstrip("\n")

    other = tmp_path / "other"
    other.mkdir()
    assert refused() == "no bad is given; add bad=<the folder of a run, or the address of its checkpoints>"
    assert refused(f"bad={other}") == (
        f"{other} is no run: neither it nor its folder checkpoints holds a checkpoint; give bad=<the folder of a run>"
    )
    ckpt.save({"w": torch.ones(2)}, other / "checkpoint-1")
    assert refused(f"bad={other}") == (
        f"{other}/checkpoint-1 has no config of recipes.train: bisect replays its runs, and no others"
    )
    assert refused("bad=hdfs://bucket/run").startswith("bad is hdfs://bucket/run: ")
    monkeypatch.setenv("RANK", "0")
    assert refused(f"bad={good}").startswith("bisect starts the ranks of its replays")


@pytest.mark.full
def test_a_run_whose_beginning_is_gone_cannot_be_replayed(good: Path, tmp_path: Path, bisect: Bisect) -> None:
    origin = tmp_path / "origin"
    shutil.copytree(good, origin)
    run(tmp_path / "fork", f"train.steps={STEPS}", f"resume={checkpoint(origin, 4)}", "optimizer.lr=1e-3")
    shutil.rmtree(origin)
    outcome = bisect(*words(good, tmp_path / "fork"))
    oldest = checkpoint(tmp_path / "fork", STEPS)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(
        f"{oldest}, the oldest of bad, is of a run resumed from {checkpoint(origin, 4)}, which is gone"
    )


def test_a_damaged_checkpoint_is_named(good: Path, element: Path, tmp_path: Path, bisect: Bisect) -> None:
    bad = tmp_path / "bad"
    shutil.copytree(element, bad)
    (chunk, *_) = sorted((checkpoint(bad, 4) / "model").rglob("c/0/0"))
    chunk.write_bytes(bytes(len(chunk.read_bytes())))
    outcome = bisect(*words(good, bad))
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
    assert str(chunk.parent.parent.name) in outcome.err


def test_sigterm_removes_the_temporary_folder(
    good: Path, fork: Path, bisect: Bisect, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(job: Any, cfg: dict[str, Any]) -> None:
        Path(cfg["run_dir"]).mkdir(parents=True)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(bisecting, "launch", killed)
    assert bisect(*words(good, fork)).code == TOLD_TO_END
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.full
def test_ranks_are_replayed_as_many_as_there_were(tmp_path: Path, bisect: Bisect) -> None:
    options = ["train.steps=6", "save.every=3", "parallel=fsdp"]
    run(tmp_path / "good", *options, ranks=2)
    beside = ["ckpt=kimi-engine", "save.mode=async", "save.overlap=true"]
    start = f"resume={checkpoint(tmp_path / 'good', 3)}"
    run(tmp_path / "same", *options, *beside, start, ranks=2)
    assert bisect(*words(tmp_path / "good", tmp_path / "same")).code == 0
    run(tmp_path / "decay", *options, *beside, start, "optimizer.weight_decay=0.3", ranks=2)
    told = bisect(*words(tmp_path / "good", tmp_path / "decay"), "json=true").told
    assert (told["equal_up_to"], told["step"], told["not_reproduced"]) == (3, 4, {})
    assert told["config"][0]["name"] == "optimizer.weight_decay"
    run(tmp_path / "three", "train.steps=3", "parallel=fsdp", ranks=3)
    told = bisect(*words(tmp_path / "good", tmp_path / "three"), "json=true").told
    assert told["step"] == 0
    assert told["not_reproduced"] == {}
    assert [row["name"] for row in told["config"][:1]] == ["launch.nproc_per_node"]


@pytest.mark.full
def test_a_learning_rate_that_differed_from_the_beginning_is_found_in_optimizer_and_scheduler(
    good: Path, tmp_path: Path, bisect: Bisect
) -> None:
    run(tmp_path / "lr", "train.steps=2", "optimizer.lr=1e-3")
    told = bisect(*words(good, tmp_path / "lr"), "json=true").told
    assert (told["step"], told["components"]) == (0, ["optimizer", "scheduler"])
    assert [row["name"] for row in told["config"]] == ["optimizer.lr"] + [
        row["name"] for row in told["config"] if row["name"].startswith("save.")
    ]
