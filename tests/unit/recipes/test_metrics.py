"""The figures that `report=` writes: which ones, in what order, and what is said where the package is missing."""

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
from recipes.support.metrics import Metrics, check_report
from recipes.support.report import Report


def run(kind: str | None, folder: Path) -> dict[str, Any]:
    return {"report": kind, "run_dir": str(folder), "train": {"steps": 9, "batch_size": 1}}


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_a_missing_package_is_one_sentence_before_anything_begins(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError) as caught:
        check_report(kind)
    said = f"report={kind} needs the package {kind}, which is not installed: pip install {kind}, or leave report= out"
    assert str(caught.value) == said


def test_only_known_reports_are_taken(tmp_path: Path) -> None:
    check_report(None)
    with pytest.raises(ConfigurationError, match="^report=mlflow: expected tensorboard, wandb or null$"):
        check_report("mlflow")
    made = Metrics(run(None, tmp_path))
    made.add(1, {"train/loss": 2.0})
    made.close()
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_cannot_be_imported_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigurationError, match="^report=wandb needs the package wandb, which is not installed"):
        Report(run("wandb", tmp_path), shown=True)
    Report(run("wandb", tmp_path), shown=False).close()  # other ranks import nothing


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
    report = Report(run("wandb", folder), shown=True)
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
