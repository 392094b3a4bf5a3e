"""The figures that `logger=` writes: which ones, in what order, and what is said where the package is missing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt.errors import ConfigurationError
from ckpt.loading.report import LoadReport
from ckpt.saving.prepared_save import SaveReport
from recipes.support import metrics
from recipes.support.metrics import Csv, Mlflow, TensorBoard, Wandb, check_loggers
from recipes.support.report import Report


def run(folder: Path, *loggers: type) -> dict[str, Any]:
    nodes = {logger.__name__.lower(): {"_target_": f"{logger.__module__}.{logger.__name__}"} for logger in loggers}
    return {"logger": nodes, "run_dir": str(folder), "train": {"steps": 9, "batch_size": 1}}


@pytest.mark.parametrize("logger", [TensorBoard, Wandb, Mlflow])
def test_a_missing_package_is_one_sentence_before_anything_begins(
    monkeypatch: pytest.MonkeyPatch, logger: type, tmp_path: Path
) -> None:
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    name = logger.__name__.lower()
    with pytest.raises(ConfigurationError) as caught:
        check_loggers(run(tmp_path, Csv, logger)["logger"])
    assert str(caught.value) == f"logger={name} needs the package {name}, which is not installed: pip install {name}, or leave logger= out"


def test_without_a_logger_nothing_is_written(tmp_path: Path) -> None:
    made = metrics.Metrics(run(tmp_path))
    made.add(1, {"train/loss": 2.0})
    made.close()
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_cannot_be_imported_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigurationError, match="^logger=wandb needs the package wandb, which is not installed"):
        Report(run(tmp_path, Wandb), shown=True)
    Report(run(tmp_path, Wandb), shown=False).close()  # other ranks import nothing


class FakeWandb:
    """The calls of W&B that are made, in order."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def Settings(self, **options: object) -> object:
        return options

    def init(self, **options: Any) -> SimpleNamespace:
        self.calls.append(("init", options["mode"], options["project"], options["name"], options["dir"]))
        return SimpleNamespace(
            define_metric=lambda name, step_metric: self.calls.append(("define", name, step_metric)),
            log=lambda values: self.calls.append(values),
            finish=lambda: self.calls.append("finish"),
        )


def test_figures_come_with_the_step_that_they_are_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)  # type: ignore[arg-type]
    folder = tmp_path / "outputs" / "dev"
    report = Report(run(folder, Wandb), shown=True)
    assert fake.calls == []
    report.resumed(LoadReport("/runs/checkpoint-4", "4", 0.5, 10, 20, ""))
    report.step(5, 2.5, [])
    report.step(6, 2.25, [SaveReport("/runs/checkpoint-5", "5", 99, 0.25, 0.125)])
    report.updated(6, {"blocked_s": 0.5, "num_bytes": 7, "other": 1}, 0.75)
    report.updated(7, {"blocked_s": 0.5, "num_bytes": 0}, 0.75)
    report.close()
    report.close()
    assert fake.calls == [
        ("init", "offline", "outputs", "dev", str(folder)),
        ("define", "*", "step"),
        {"step": 4, "checkpoint/load_s": 0.5, "checkpoint/bytes_read": 10},
        {"step": 5, "train/loss": 2.5},
        {"step": 6, "train/loss": 2.25},
        {"step": 5, "checkpoint/save_s": 0.25, "checkpoint/blocked_s": 0.125, "checkpoint/bytes": 99},
        {"step": 6, "sync/blocked_s": 0.5, "sync/bytes": 7, "sync/staleness_s": 0.75},
        "finish",
    ]


class FakeMlflow:
    """The calls of MLflow's client that are made, in order."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def MlflowClient(self, *, tracking_uri: str) -> FakeMlflow:
        self.calls.append(tracking_uri)
        return self

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        self.calls.append(name)
        return "1"

    def create_run(self, experiment: str, *, run_name: str, tags: dict[str, str]) -> SimpleNamespace:
        self.calls.append((experiment, run_name, tags))
        return SimpleNamespace(info=SimpleNamespace(run_id="r"))

    def log_metric(self, run_id: str, name: str, value: float, *, step: int) -> None:
        self.calls.append((run_id, name, value, step))

    def set_terminated(self, run_id: str) -> None:
        self.calls.append(f"end of {run_id}")


def test_several_loggers_get_the_same_figures_and_a_table_drops_what_a_resumed_run_makes_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake, folder = FakeMlflow(), tmp_path / "outputs" / "dev"
    monkeypatch.setitem(sys.modules, "mlflow", fake)  # type: ignore[arg-type]
    cfg = run(folder, Csv, Mlflow) | {"tags": ["try"]}
    first = Report(cfg, shown=True)
    for step in (1, 2, 3):
        first.trained(step, step / 2)
    first.close()
    assert fake.calls == [
        f"sqlite:///{folder}/mlflow.db", "outputs", ("1", "dev", {"try": "true"}),
        *(("r", "train/loss", step / 2, step) for step in (1, 2, 3)), "end of r",
    ]  # fmt: skip
    again = Report(cfg, shown=True)
    again.resumed(LoadReport("/runs/checkpoint-2", "2", 0.5, 10, 20, ""))
    again.trained(3, 7.0)
    again.close()
    assert (folder / "metrics.csv").read_text().split() == [
        "step,name,value", "1,train/loss,0.5", "2,train/loss,1.0", "2,checkpoint/load_s,0.5", "2,checkpoint/bytes_read,10",
        "3,train/loss,7.0",
    ]  # fmt: skip
