"""Runs that end by a callback, the best checkpoint that stays, and saves by time and by epoch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import ConfigurationError
from ckpt.ranks.topology import Topology
from recipes.support.config import Every
from recipes.training import training
from recipes.training.callbacks import Callbacks, EarlyStop
from recipes.training.training import settle_start, train
from tests.conf.configs import config
from tests.e2e.runs import SMALL, TEXT, committed

STOP = ["callbacks=early_stop", "callbacks.early_stop.min_delta=100", "callbacks.early_stop.patience=3"]


def trained(run_dir: Path, *overrides: str) -> dict[str, Any]:
    return train(settle_start(config(run_dir, *SMALL, "parallel=single", *overrides)), Topology.alone())


def steps_saved(run_dir: Path) -> list[int]:
    return [int(path.name.removeprefix("checkpoint-")) for path in committed(run_dir)]


def test_a_metric_that_gets_no_better_ends_the_wait() -> None:
    stop = EarlyStop(patience=2, min_delta=0.5)
    assert [stop.after_step(at, {"loss": loss}) for at, loss in enumerate([3.0, 2.0, 1.6, 1.4, 1.0, 1.0])] == [
        False, False, False, False, False, True,
    ]  # fmt: skip
    rising = EarlyStop(patience=1, greater_is_better=True)
    assert [rising.after_step(at, {"loss": at}) for at in range(3)] == [False] * 3
    with pytest.raises(ConfigurationError, match="early_stop.metric=accuracy: expected one of loss, lr"):
        EarlyStop(metric="accuracy").after_step(1, {"loss": 1.0, "lr": 1.0})
    with pytest.raises(ConfigurationError, match="patience=0 and min_delta=0.0; expected at least 1"):
        EarlyStop(patience=0)
    with pytest.raises(ConfigurationError, match=r"callbacks.x: a dict has no method after_step"):
        Callbacks({"x": {"_target_": "builtins.dict"}})


def test_a_run_ends_early_with_a_save_also_if_it_was_resumed_meanwhile(tmp_path: Path) -> None:
    straight = trained(tmp_path / "straight", *STOP, "train.steps=9")
    assert straight["final_step"] == 4 and steps_saved(tmp_path / "straight") == [4]
    trained(tmp_path / "parts", *STOP, "train.steps=2")
    rest = trained(tmp_path / "parts", *STOP, "train.steps=9", "resume=latest")
    assert (rest["first_step"], rest["final_step"]) == (3, 4)
    assert rest["state_digest"] == straight["state_digest"]


def test_the_checkpoint_with_the_least_loss_stays_beside_the_last(tmp_path: Path) -> None:
    found = trained(tmp_path, "callbacks=keep_best", "save.every=1", "train.steps=6", "optimizer.lr=1.0")
    best = 1 + found["losses"].index(min(found["losses"]))
    assert steps_saved(tmp_path) == sorted({best, 6})


@pytest.mark.parametrize(
    ("value", "number", "unit"),
    [(5, 5, "steps"), ("7steps", 7, "steps"), ("30s", 30, "seconds"), ("2min", 120, "seconds"), ("1h", 3600, "seconds"),
     ("2epochs", 2, "epochs"), ("1 epoch", 1, "epochs")],
)  # fmt: skip
def test_saves_are_due_by_steps_time_or_epochs(value: Any, number: int, unit: str) -> None:
    assert Every.of(value) == Every(number, unit)


@pytest.mark.parametrize("value", ["often", "3 weeks", None, True, 1.5, "0s", -1])
def test_nothing_else_is_taken(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^save\.every=.*: expected (a whole number of steps|at least 1)"):
        Every.of(value)


def test_a_save_by_epochs_is_the_first_step_of_a_new_one(tmp_path: Path) -> None:
    windows = TEXT.stat().st_size // 65
    trained(tmp_path, "save.every=2epochs", "train.steps=30", "train.batch_size=12")
    of_epoch = [step for step in range(1, 31) if 12 * step // windows // 2 != 12 * (step - 1) // windows // 2]
    assert steps_saved(tmp_path) == sorted({*of_epoch, 30}) and len(of_epoch) > 1


def test_a_save_by_time_is_due_when_it_has_passed_since_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10_000, 4))
    monkeypatch.setattr(training, "time", type("Clock", (), {"monotonic": staticmethod(lambda: next(clock))}))
    trained(tmp_path, "save.every=10s", "train.steps=10")
    assert steps_saved(tmp_path) == [3, 6, 9, 10]


def test_a_trace_of_the_steps_is_left_in_the_folder_of_the_run(tmp_path: Path) -> None:
    trained(tmp_path, "train.steps=1", "profile=true", "tags=[a,b]")
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["rank-00000.json"]
    assert not math.isnan(trained(tmp_path / "again", "train.steps=1")["losses"][0])
