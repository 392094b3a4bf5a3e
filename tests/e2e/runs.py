"""Small runs of the training recipe: in this process, which starts their ranks, or as the command that a user types."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import recipes.train
from ckpt.ledger import Ledger
from ckpt.topology import Topology
from recipes.launch import launch
from recipes.training import settle_start, train
from tests.conf.configs import config

REPO = Path(recipes.train.__file__).parent.parent
TEXT = Path(sysconfig.get_path("stdlib"), "stat.py")
"""Five kilobytes: every seven steps or so the text begins anew, so resumed runs cross that border too."""

BACKENDS = {
    "zarr": ["ckpt=zarr"],
    "ocdbt": ["ckpt=tensorstore"],
    "file": ["ckpt=tensorstore", "ckpt.kvstore=file"],
    "safetensors": ["ckpt=kimi-engine"],
}

Job = Callable[[dict[str, Any], Topology], dict[str, Any] | None]


def run(run_dir: Path, *overrides: str, ranks: int = 1, job: Job = train) -> dict[str, Any]:
    """Do what `python -m recipes.train` does once Hydra has composed, on new ranks, and return the summary."""
    cfg = config(run_dir, f"data.path={TEXT}", f"launch.nproc_per_node={ranks}", *overrides)
    summary = launch(job, settle_start(cfg))
    assert summary is not None
    return summary


def start(run_dir: Path, *overrides: str, ranks: int = 1, environment: dict[str, str] | None = None) -> Command:
    """Start `python -m recipes.train` in a process group of its own, in the folder above `run_dir`."""
    return Command(
        ["-m", "recipes.train", f"output_dir={run_dir}", f"data.path={TEXT}", f"launch.nproc_per_node={ranks}"],
        overrides,
        run_dir.parent,
        environment or {},
    )


class Command:
    """A recipe as a process."""

    def __init__(self, start: list[str], overrides: tuple[str, ...], cwd: Path, environment: dict[str, str]) -> None:
        cwd.mkdir(parents=True, exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, *start, *overrides],
            cwd=cwd,
            env=os.environ | {"PYTHONPATH": str(REPO)} | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.out = self.err = ""

    def ended(self, timeout_s: float = 120.0) -> Command:
        """Wait for its end; past the time it is killed, and the test fails."""
        try:
            self.out, self.err = self.process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.out, self.err = self.process.communicate()
            raise AssertionError(f"still running after {timeout_s} s; it had said:\n{self.out}\n{self.err}") from None
        return self

    @property
    def code(self) -> int:
        assert self.process.returncode is not None
        return self.process.returncode

    def refused(self) -> str:
        """Assert that it failed with one sentence and nothing else on stderr, and return the sentence."""
        assert self.code == 1, f"exit code {self.code}\n{self.out}\n{self.err}"
        assert self.err.count("\n") == 1 and self.err.endswith("\n"), self.err
        assert "Traceback" not in self.err + self.out
        return self.err.strip()


def summary_of(run_dir: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((run_dir / "summary.json").read_text())
    return loaded


def root_of(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def committed(run_dir: Path) -> list[Path]:
    """The committed checkpoints of a run, the oldest first."""
    return [one.path for one in Ledger(root_of(run_dir), run_id="reader").committed()]


def checkpoint(run_dir: Path, step: int) -> Path:
    return root_of(run_dir) / f"checkpoint-{step:08d}"
