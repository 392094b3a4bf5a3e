"""Figures of a run by step, for the loggers of `logger=`: TensorBoard, Weights & Biases, MLflow, or a CSV file."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Protocol

from hydra.utils import get_class, instantiate

from ckpt.errors import ConfigurationError, importing


class Logger(Protocol):
    """What a node of `logger` makes, of its keys and `run`, the config, and `first_step`, that of this process.

    What an earlier process has written of that step and later ones is not shown any more.

    Attributes:
        needs: the package without which it is refused before a rank starts; a class may leave it out.
    """

    needs: ClassVar[str]

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Write figures of a step by name, such as "checkpoint/save_s"."""

    def close(self) -> None:
        """Write what is buffered."""


class Metrics:
    """Gives figures to all loggers of a run. The lead of a run has one; without `logger` it does nothing.

    Attributes:
        first_step: of this process.

    Raises:
        ConfigurationError: the package of a logger cannot be imported.
    """

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        self._cfg = cfg
        self._nodes: Mapping[str, Mapping[str, Any]] = cfg.get("logger") or {}
        self._writers: list[Logger] | None = None
        self.first_step = 1
        for name, node in self._nodes.items():
            if (package := _needs(node)) is not None:
                with importing(f"logger={name}"):
                    import_module(package)

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Report figures of a step by name, such as "checkpoint/save_s"."""
        if self._writers is None:
            made = (instantiate({**node, "_partial_": True, "_convert_": "all"}) for node in self._nodes.values())
            self._writers = [make(run=self._cfg, first_step=self.first_step) for make in made]
        for writer in self._writers:
            writer.add(step, figures)

    def close(self) -> None:
        """Write what is buffered."""
        for writer in self._writers or ():
            writer.close()
        self._writers = None


def check_loggers(nodes: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a logger, of the nodes of `logger`, whose package is not installed. Imports none of these packages.

    Raises:
        ConfigurationError: it is refused.
    """
    for name, node in nodes.items():
        if (package := _needs(node)) is not None and find_spec(package) is None:
            raise ConfigurationError(
                f"logger={name} needs the package {package}, which is not installed: pip install {package}, or leave logger= out"
            )


def _needs(node: Mapping[str, Any]) -> str | None:
    return getattr(get_class(node["_target_"]), "needs", None)


class TensorBoard:
    """Event files in `<run_dir>/tensorboard`; they hold float32."""

    needs = "tensorboard"

    def __init__(self, *, run: Mapping[str, Any], first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._events = SummaryWriter(str(Path(run["run_dir"], "tensorboard")), purge_step=first_step)

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._events.add_scalar(name, value, step)

    def close(self) -> None:
        self._events.close()


class Wandb:
    """A run of Weights & Biases in `<run_dir>/wandb`; with mode="offline" `wandb sync` uploads it."""

    needs = "wandb"

    def __init__(self, *, run: Mapping[str, Any], first_step: int, mode: str = "offline") -> None:
        import wandb

        run_dir = Path(run["run_dir"])
        self._run = wandb.init(
            mode=mode,
            project=run_dir.parent.name,
            name=run_dir.name,
            dir=str(run_dir),
            config=dict(run),
            tags=list(run.get("tags", ())),
            settings=wandb.Settings(silent=True),
        )
        self._run.define_metric("*", step_metric="step")  # saves in the background are reported after later steps

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({"step": step, **figures})

    def close(self) -> None:
        self._run.finish()


class Mlflow:
    """A run of MLflow, in `<run_dir>/mlflow.db`, or where `tracking_uri` says."""

    needs = "mlflow"

    def __init__(self, *, run: Mapping[str, Any], first_step: int, tracking_uri: str | None = None) -> None:
        import mlflow

        run_dir = Path(run["run_dir"])
        self._client = mlflow.MlflowClient(tracking_uri=tracking_uri or f"sqlite:///{run_dir.absolute() / 'mlflow.db'}")
        name = run_dir.parent.name
        known = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if known is None else known.experiment_id
        tags = dict.fromkeys(run.get("tags", ()), "true")
        self._id = self._client.create_run(experiment, run_name=run_dir.name, tags=tags).info.run_id

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._client.log_metric(self._id, name, value, step=step)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class Csv:
    """`<run_dir>/metrics.csv`: a line for each figure, with its step and name."""

    def __init__(self, *, run: Mapping[str, Any], first_step: int) -> None:
        path = Path(run["run_dir"], "metrics.csv")
        kept: list[list[str]] = []
        if path.exists():
            with path.open(newline="") as file:
                kept = [row for row in csv.reader(file) if len(row) == 3 and row[0].isdigit() and int(row[0]) < first_step]
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", newline="", buffering=1)
        self._rows = csv.writer(self._file)
        self._rows.writerows([["step", "name", "value"], *kept])

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        self._rows.writerows([step, name, value] for name, value in figures.items())

    def close(self) -> None:
        self._file.close()
