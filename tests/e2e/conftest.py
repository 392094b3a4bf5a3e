"""Runs that several tests look at. They copy what they want to change."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import BACKENDS, checkpoint, run
from tests.support.ranks import forkserver

STEPS = 6


@dataclass(frozen=True)
class Run:
    """A finished run and its summary."""

    dir: Path
    summary: dict[str, Any]


@pytest.fixture(autouse=True, scope="session")
def _ranks_have_all_loaded() -> None:
    forkserver()


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks that trained STEPS steps without a break, and saved after each by zarr."""
    run_dir = tmp_path_factory.mktemp("straight") / "run"
    return Run(run_dir, run(run_dir, f"train.steps={STEPS}", "save.every=1", ranks=2))


@pytest.fixture(scope="session")
def in_ocdbt(tmp_path_factory: pytest.TempPathFactory, straight: Run) -> Run:
    """The same run from step 4 on, saved by TensorStore after steps 5 and 6."""
    return _last_steps(tmp_path_factory, straight, "ocdbt")


@pytest.fixture(scope="session")
def in_safetensors(tmp_path_factory: pytest.TempPathFactory, straight: Run) -> Run:
    """The same, saved as safetensors."""
    return _last_steps(tmp_path_factory, straight, "safetensors")


def _last_steps(tmp_path_factory: pytest.TempPathFactory, straight: Run, backend: str) -> Run:
    run_dir = tmp_path_factory.mktemp(backend) / "run"
    path = checkpoint(straight.dir, STEPS - 2)
    overrides = [f"train.steps={STEPS}", "save.every=1", f"resume={path}", *BACKENDS[backend]]
    return Run(run_dir, run(run_dir, *overrides, ranks=2))
