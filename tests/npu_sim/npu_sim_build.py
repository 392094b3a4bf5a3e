"""Builds the C++ part of the stand-in, once for each state of its sources, and finds it again. Needs no torch that runs."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

SOURCES = Path(__file__).parent / "torch_npu" / "csrc"
_FLAGS = ("-O1", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-D_GLIBCXX_USE_CXX11_ABI=1")
_LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")


class BuildError(ImportError):
    """The stand-in cannot be built here. An ImportError, because importing `torch_npu` is what builds it."""


def why_not() -> str:
    """Why this machine cannot build the stand-in, as one sentence; "" if it can."""
    if not sys.platform.startswith("linux"):
        return f"the npu stand-in runs on Linux only, this is {sys.platform}"
    if find_spec("torch") is None:
        return "the npu stand-in needs torch, which is not installed"
    if _compiler() is None:
        return "the npu stand-in needs a C++ compiler: install g++, or name one in CXX"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.is_file():
        return f"the npu stand-in needs Python's headers, and there is no {header}: install python3-dev"
    return ""


def build() -> Path:
    """Return the shared library of these sources, this torch and this compiler; the first call compiles it (20 s or so).

    Processes that call this at once compile once. A build that was killed leaves nothing that the next one minds.

    Raises:
        BuildError: it cannot be built; the sentence says why.
    """
    if reason := why_not():
        raise BuildError(reason)
    folder = Path(os.environ.get("NPU_SIM_BUILD") or Path.home() / ".cache" / "npu_sim")
    library = folder / f"npu_sim_c-{_key()}.so"
    if library.is_file():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(library.with_suffix(".lock")):
            if not library.is_file():
                _compile(library)
    except OSError as error:
        raise BuildError(
            f"the npu stand-in cannot be built in {folder} ({error}): name another in NPU_SIM_BUILD"
        ) from error
    return library


def _compile(library: Path) -> None:
    unfinished = library.with_suffix(".unfinished")
    command = [*_command(), str(SOURCES / "module.cpp"), "-o", str(unfinished), *(f"-l{name}" for name in _LIBRARIES)]
    outcome = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if outcome.returncode != 0:
        said = next((line for line in outcome.stderr.splitlines() if "error" in line), outcome.stderr.strip()[-300:])
        raise BuildError(f"the npu stand-in does not compile with torch {metadata.version('torch')}: {said}")
    os.rename(unfinished, library)  # whole or not there


def _command() -> list[str]:
    compiler = _compiler()
    assert compiler is not None
    torch = _torch_folder()
    includes = [torch / "include", torch / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
    return [*compiler, *_FLAGS, *(f"-isystem{path}" for path in includes), f"-L{torch / 'lib'}"]


def _compiler() -> list[str] | None:
    command = shlex.split(os.environ.get("CXX") or "g++")
    return command if shutil.which(command[0]) else None


def _torch_folder() -> Path:
    spec = find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def _key() -> str:
    """One name for everything that the library depends on."""
    compiler = _compiler()
    assert compiler is not None
    version = subprocess.run([*compiler, "--version"], capture_output=True, stdin=subprocess.DEVNULL).stdout
    parts = [metadata.version("torch"), sys.version, *compiler, *_FLAGS]  # wherever torch is installed
    digest = hashlib.sha256("\n".join(parts).encode() + version)
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that the system takes back from a process that dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    print(build())
