"""Small runs of the training recipe: in this process, which starts their ranks, or as the command that a user types."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import recipes.train
from ckpt.catalog.ledger import Ledger
from ckpt.ranks.topology import Topology
from recipes.support.launch import launch
from recipes.training.training import settle_start, train
from tests.conf.configs import config
from tests.device.devices import make_importable
from tests.support.pace import patience
from tests.support.ranks import forkserver

REPO = Path(recipes.train.__file__).parent.parent
TEXT = Path(sysconfig.get_path("stdlib"), "stat.py")
"""Five kilobytes: every seven steps or so the text begins anew, so resumed runs cross that border too."""

SMALL = [f"data.path={TEXT}", "model.size=nano"]
"""The first overrides of every run here; later ones may replace them."""

BACKENDS = {
    "zarr": ["ckpt=zarr"],
    "ocdbt": ["ckpt=tensorstore"],
    "file": ["ckpt=tensorstore", "ckpt.kvstore=file"],
    "safetensors": ["ckpt=kimi-engine"],
}

Job = Callable[[dict[str, Any], Topology], dict[str, Any] | None]


def run(run_dir: Path, *overrides: str, ranks: int = 1, job: Job = train) -> dict[str, Any]:
    """Do what `python -m recipes.train` does once Hydra has composed, on new ranks, and return the summary."""
    cfg = config(run_dir, *SMALL, f"launch.nproc_per_node={ranks}", *overrides)
    summary = launch(job, settle_start(cfg))
    assert summary is not None
    return summary


def start(
    run_dir: Path,
    *overrides: str,
    ranks: int = 1,
    environment: dict[str, str] | None = None,
    launcher: Sequence[str] = (),
) -> Command:
    """Start `python -m recipes.train` in a process group of its own, in the folder above `run_dir`.

    Args:
        launcher: such as `-m torch.distributed.run` and its options, after which the same arguments come.
    """
    return Command(
        [*launcher, "-m", "recipes.train", f"output_dir={run_dir}", *SMALL, f"launch.nproc_per_node={ranks}"],
        overrides,
        run_dir.parent,
        environment or {},
    )


class Command:
    """A recipe as a process, each with one thread to calculate unless its environment says otherwise."""

    def __init__(self, start: list[str], overrides: tuple[str, ...], cwd: Path, environment: dict[str, str]) -> None:
        cwd.mkdir(parents=True, exist_ok=True)
        self.process = subprocess.Popen(
            [sys.executable, *start, *overrides],
            cwd=cwd,
            env=os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"} | environment,
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
            self.out, self.err = self.process.communicate(timeout=patience(timeout_s))
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


class Forked:
    """A recipe as a process that has torch loaded already: `main` as a command calls it, with a process of its own for signals.

    Its name is that of the module, such as "recipes.train"; `cwd` is where it begins; `device`, which plugin it finds.
    """

    def __init__(self, name: str, overrides: Sequence[str], cwd: Path, device: str = "cpu") -> None:
        context = forkserver()
        self._said = tempfile.TemporaryDirectory()
        self.process = context.Process(
            target=_recipe_main, args=(name, tuple(overrides), cwd, Path(self._said.name), device)
        )
        self.process.start()
        self.out = self.err = ""

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def ended(self, timeout_s: float = 120.0) -> Forked:
        """Wait for its end; past the time it is killed, and the test fails."""
        self.process.join(patience(timeout_s))
        is_late = self.process.exitcode is None
        if is_late:
            self.process.kill()
            self.process.join()
        with self._said as said:
            self.out, self.err = (Path(said, name).read_text() for name in ("out", "err"))
        assert not is_late, f"still running after {timeout_s} s; it had said:\n{self.out}\n{self.err}"
        return self

    @property
    def code(self) -> int:
        assert self.process.exitcode is not None
        return self.process.exitcode


@functools.cache
def _recipe_main(name: str, overrides: Sequence[str], cwd: Path, said: Path, device: str) -> None:
    os.chdir(cwd)
    make_importable(device)
    sys.argv = [name, *overrides]
    for stream, path in ((1, "out"), (2, "err")):
        os.dup2(os.open(said / path, os.O_WRONLY | os.O_CREAT), stream)
    torch.set_num_threads(1)
    import_module(name).main()


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
