"""Figures of a run by step, for TensorBoard or Weights & Biases: the key `report`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ckpt.errors import ConfigurationError
from ckpt.errors.imports import importing

TENSORBOARD, WANDB = "tensorboard", "wandb"
_MODULES = {TENSORBOARD: "torch.utils.tensorboard", WANDB: "wandb"}


def check_report(kind: str | None) -> None:
    """Refuse a `report` that is not known, or whose package is not installed. Imports nothing.

    Raises:
        ConfigurationError: it is refused.
    """
    if kind is not None and kind not in _MODULES:
        raise ConfigurationError(f"report={kind}: expected {TENSORBOARD}, {WANDB} or null")
    if kind is not None and find_spec(kind) is None:
        raise ConfigurationError(
            f"report={kind} needs the package {kind}, which is not installed: pip install {kind}, or leave report= out"
        )


class Metrics:
    """Writes figures into the folder of a run. The lead of a run has one; without `report` it does nothing.

    Attributes:
        first_step: of this process. What an earlier one has reported of this step and later ones is not shown any more.

    Raises:
        ConfigurationError: the package cannot be imported.
    """

    def __init__(self, cfg: Mapping[str, Any]) -> None:
        self._cfg = cfg
        self._kind: str | None = cfg.get("report")
        self._writer: _TensorBoard | _Wandb | None = None
        self.first_step = 1
        if self._kind is not None:
            with importing(f"report={self._kind}"):
                self._module = import_module(_MODULES[self._kind])

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        """Report figures of a step by name, such as "checkpoint/save_s"."""
        if self._kind is None:
            return
        if self._writer is None:
            made = _TensorBoard if self._kind == TENSORBOARD else _Wandb
            self._writer = made(self._module, self._cfg, self.first_step)
        self._writer.add(step, figures)

    def close(self) -> None:
        """Write what is buffered."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class _TensorBoard:
    """Event files in `<run_dir>/tensorboard`; they hold float32."""

    def __init__(self, module: Any, cfg: Mapping[str, Any], first_step: int) -> None:
        self._events = module.SummaryWriter(str(Path(cfg["run_dir"], TENSORBOARD)), purge_step=first_step)

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._events.add_scalar(name, value, step)

    def close(self) -> None:
        self._events.close()


class _Wandb:
    """A run of Weights & Biases in `<run_dir>/wandb`, offline: `wandb sync` uploads it."""

    def __init__(self, module: Any, cfg: Mapping[str, Any], first_step: int) -> None:
        run_dir = Path(cfg["run_dir"])
        self._run = module.init(
            mode="offline",
            project=run_dir.parent.name,
            name=run_dir.name,
            dir=str(run_dir),
            config=dict(cfg),
            settings=module.Settings(silent=True),
        )
        self._run.define_metric("*", step_metric="step")  # saves in the background are reported after later steps

    def add(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({"step": step, **figures})

    def close(self) -> None:
        self._run.finish()
