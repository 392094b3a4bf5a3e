"""What looks at each step of a run: the nodes of `callbacks`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from ckpt.errors import ConfigurationError
from ckpt.state.abilities import refusing_state
from recipes.support.config import made


class Callback(Protocol):
    """What a node of `callbacks` makes on every rank. It may have `state_dict` and `load_state_dict`, which are then saved."""

    def after_step(self, step: int, figures: Mapping[str, float]) -> bool:
        """Look at the figures of a step, equal on all ranks; return whether the run ends with it, after a save. Equal on all ranks."""


class Callbacks:
    """All callbacks of a run, as one component of its checkpoints."""

    def __init__(self, nodes: Mapping[str, Mapping[str, Any]]) -> None:
        self._made: dict[str, Any] = {name: made(node) for name, node in nodes.items()}
        for name, callback in self._made.items():
            if not callable(getattr(callback, "after_step", None)):
                raise ConfigurationError(f"callbacks.{name}: a {type(callback).__name__} has no method after_step(step, figures)")

    @property
    def has_state(self) -> bool:
        return bool(self.state_dict())

    def after_step(self, step: int, figures: Mapping[str, float]) -> bool:
        """Ask all of them; return whether one ends the run."""
        ends = [callback.after_step(step, figures) for callback in self._made.values()]
        return any(ends)

    def state_dict(self) -> dict[str, Any]:
        return {name: callback.state_dict() for name, callback in self._made.items() if hasattr(callback, "state_dict")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, saved in state.items():
            if name in self._made:
                self._made[name].load_state_dict(saved)


class EarlyStop:
    """Ends a run whose metric has not got better for `patience` steps."""

    def __init__(
        self, *, metric: str = "loss", patience: int = 50, min_delta: float = 0.0, greater_is_better: bool = False
    ) -> None:
        if patience < 1 or not min_delta >= 0:
            raise ConfigurationError(
                f"callbacks.early_stop: patience={patience} and min_delta={min_delta}; expected at least 1, and at least 0"
            )
        self.metric, self.patience, self.min_delta = metric, patience, min_delta
        self.sign = -1.0 if greater_is_better else 1.0
        self.best, self.waited = math.inf, 0

    def after_step(self, step: int, figures: Mapping[str, float]) -> bool:
        if self.metric not in figures:
            raise ConfigurationError(f"callbacks.early_stop.metric={self.metric}: expected one of {', '.join(figures)}")
        value = self.sign * figures[self.metric]
        is_better = value < self.best - self.min_delta
        self.best, self.waited = (value, 0) if is_better else (self.best, self.waited + 1)
        return self.waited >= self.patience

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited}

    @refusing_state("callbacks.early_stop")
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.waited = float(state["best"]), int(state["waited"])
