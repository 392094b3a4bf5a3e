"""Configs of the training command for tests, composed as the command composes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from recipes.cli import CONF
from recipes.config import checked


def composed(run_dir: Path, *overrides: str) -> DictConfig:
    """Return the config before any check. Under `compose` there is no `${hydra:...}`, so the run's folder is given."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("train", [f"run_dir={run_dir}", *overrides])


def config(run_dir: Path, *overrides: str, num_ranks: int | None = None) -> dict[str, Any]:
    """Return the checked, plain config; the run's folder exists, as it does after Hydra."""
    run_dir.mkdir(parents=True, exist_ok=True)
    return checked(composed(run_dir, *overrides), num_ranks=num_ranks)
