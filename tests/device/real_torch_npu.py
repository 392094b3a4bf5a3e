"""Runs our code on the real torch_npu: a virtual environment with its wheel, stub CANN libraries, and a process for each case.

Both are made once and kept in ~/.cache/ckpt-torch-npu, under names that change with whatever they are made of. TORCH_NPU_VENV names
another environment: it is used as it is, or made there if there is none.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.torch_npu_stub import build

CHECKOUT = Path(__file__).resolve().parents[2]
CACHE = Path.home() / ".cache" / "ckpt-torch-npu"
CASES = "tests.torch_npu_stub.cases"
KEPT = ("HOME", "PATH", "TMPDIR")
"""Environment variables that a process gets from us; all others might say something to torch_npu."""


class UnavailableError(Exception):
    """Why the real torch_npu cannot run here, in one sentence."""


@dataclass(frozen=True)
class Finished:
    """How a process ended, and what it printed on stdout and stderr."""

    returncode: int
    printed: str


@dataclass(frozen=True)
class RealTorchNpu:
    """An environment with the wheel in it, and the libraries that stand for CANN."""

    python: Path
    libraries: Path

    def case(self, name: str, *args: object, **settings: Any) -> Any:
        """Run a function of cases.py on the stub libraries and return what it returns. It must not fail.

        Args:
            settings: environment variables, and what `run` takes.
        """
        with tempfile.NamedTemporaryFile("r") as result:
            finished = self.run("-m", CASES, result.name, name, *args, **settings)
            assert finished.returncode == 0, f"{name} ended with {finished.returncode}:\n{finished.printed}"
            sys.stderr.write(finished.printed)
            return json.load(result)

    def run(self, *args: object, with_cann: bool = True, path: Path | None = None, **settings: object) -> Finished:
        """Run Python with the environment's own packages and this checkout.

        Args:
            with_cann: let it find the stub libraries.
            path: a folder whose packages come before all others.
        """
        folders = [str(CHECKOUT)] if path is None else [str(path), str(CHECKOUT)]
        environment = {name: os.environ[name] for name in KEPT if name in os.environ}
        environment |= {"PYTHONPATH": os.pathsep.join(folders), "OMP_NUM_THREADS": "1"}
        environment |= {"LD_LIBRARY_PATH": str(self.libraries)} if with_cann else {}
        environment |= {name: str(value) for name, value in settings.items()}
        done = subprocess.run(
            [str(self.python), *(str(arg) for arg in args)],
            cwd=CHECKOUT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=300,
            check=False,
        )
        return Finished(done.returncode, done.stdout.decode(errors="replace"))


def prepare() -> RealTorchNpu:
    """Return the environment and the libraries, making what is not there yet: some 250 MB to download, a minute or two.

    Raises:
        UnavailableError: they cannot be made here.
    """
    if missing := build.missing_tools():
        raise UnavailableError(f"stub CANN libraries need {', '.join(missing)}: install gcc and binutils")
    named = os.environ.get("TORCH_NPU_VENV")
    venv = Path(named) if named else CACHE / f"venv-{_key(sys.version, *_requirements())}"
    once(venv, _make_venv)
    site_packages = Path(sysconfig.get_path("purelib", vars={"base": str(venv), "platbase": str(venv)}))
    wheel = next(iter(site_packages.glob("torch_npu-*.dist-info")), None)
    if wheel is None:
        raise UnavailableError(f"there is no torch_npu in {site_packages}: name another environment in TORCH_NPU_VENV")
    sources = [source.read_text() for source in build.SOURCES]
    libraries = CACHE / f"stub-{_key(str(site_packages), (wheel / 'RECORD').read_text(), *sources)}"
    once(libraries, lambda folder: build.build(site_packages, folder))
    return RealTorchNpu(venv / "bin" / "python", libraries)


def _requirements() -> list[str]:
    """What goes into the environment: the two at the versions that were tested, and what ckpt itself needs."""
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["project"]
    lines = (CHECKOUT / "constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    return [f"torch=={pinned['torch']}", f"torch_npu=={pinned['torch_npu']}", *project["dependencies"]]


def _make_venv(folder: Path) -> None:
    _succeed("an environment for torch_npu cannot be made", sys.executable, "-m", "venv", folder)
    install = [folder / "bin" / "python", "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    _succeed("torch_npu cannot be installed", *install, "-c", CHECKOUT / "constraints.txt", *_requirements())


def _succeed(otherwise: str, *command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()] or ["it said nothing"]
        reason = next((line for line in said if line.startswith("ERROR")), said[-1])
        raise UnavailableError(f"{otherwise}: {reason}")


def once(folder: Path, make: Callable[[Path], None]) -> None:
    """Make a folder unless it is there, one process at a time; what was begun and not finished is never seen."""
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(folder.with_name(f".{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            partial = folder.with_name(f".{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            make(partial)
            partial.rename(folder)


def _key(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
