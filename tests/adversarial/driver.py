"""The process that runs the cases: it has torch and the storage libraries loaded, runs under the shim, and forks for every try.

A test hands it cases (`Driver.run`) and gets an outcome for each try. Inside, a few workers take the cases in turn. A worker never
calls the code under test itself: what may die, hang, or take all memory runs in a child (`in_child`), which costs some 20 ms.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

from tests.adversarial import shim
from tests.adversarial.shim import Orders

REPO = Path(__file__).parents[2]
_PR_SET_PDEATHSIG = 1
_LATE_S = 60.0
"""For one child, on a machine with others on it."""


@dataclass(frozen=True)
class Case:
    """What a worker calls: `function(folder, **arguments)`, by its name below tests.adversarial; it yields outcomes."""

    function: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def run(self, folder: Path) -> Iterator[Outcome]:
        module, _, name = self.function.partition(":")
        function = getattr(importlib.import_module(f"tests.adversarial.{module}"), name)
        yield from function(folder, **self.arguments)


@dataclass(frozen=True)
class Outcome:
    """One try.

    Attributes:
        row: where the table counts it.
        name: what was tried.
        fell: what was wrong afterwards; "" if nothing was.
    """

    row: str
    name: str
    fell: str = ""


class Driver:
    """The process, as a test sees it.

    Args:
        folder: for the shim and for what the cases write.
        workers: how many cases run at a time.
    """

    def __init__(self, folder: Path, workers: int) -> None:
        self._folder = folder
        self._workers = workers
        self._library = shim.compiled(folder)

    def run(self, cases: Sequence[Case]) -> list[Outcome]:
        """Run the cases and return what all of them yielded. A case that raises is an outcome that fell."""
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            work, found = Path(folder, "cases"), Path(folder, "outcomes")
            work.write_bytes(pickle.dumps(list(cases)))
            command = [sys.executable, "-m", "tests.adversarial.driver", str(work), str(found), str(self._workers)]
            environment = os.environ | {
                "LD_PRELOAD": str(self._library),
                "PYTHONPATH": str(REPO),
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",  # a process with threads should not be forked
                "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
                "PYTHONMALLOC": "malloc",
                "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # a fork copies the table of pages
                "RES_OPTIONS": "timeout:1",
            }
            subprocess.run(command, cwd=REPO, env=environment, stdin=subprocess.DEVNULL, check=True)
            outcomes: list[Outcome] = pickle.loads(found.read_bytes())
        return outcomes


# Children of a worker


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    Attributes:
        how: "returned", "raised", "died" or "late".
        value: what it returned; the traceback; the signal; what it was doing.
    """

    how: str
    value: Any = None

    def require_result(self) -> Any:
        """Return what it returned; anything else is a mistake of the case, not of what is tested."""
        assert self.how == "returned", f"the child {self.how}: {self.value}"
        return self.value


class Child:
    """A fork that calls a function.

    Args:
        orders: what the shim does in it.
        group: of processes, by its leader; 0: one of its own; None: the worker's.
        memory_bytes: of address space, more than it has at its start; None: no limit.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *args: Any,
        orders: Orders | None = None,
        group: int | None = 0,
        memory_bytes: int | None = None,
    ) -> None:
        self._pipe, there = Pipe(duplex=False)
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        self.pid = os.fork()
        if self.pid == 0:
            self._pipe.close()
            with suppress(BaseException):
                self._become(there, function, args, orders, group, memory_bytes)
            os._exit(3)
        there.close()
        self._status: int | None = None
        if group is not None:
            with suppress(OSError):  # done by both, so that it is done when either goes on; the child may be gone
                os.setpgid(self.pid, group)

    def _become(
        self,
        pipe: Connection,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        orders: Orders | None,
        group: int | None,
        memory_bytes: int | None,
    ) -> None:
        _die_with_parent()
        if group is not None:
            os.setpgid(0, group)
        os.dup2(self._said.fileno(), 1)
        os.dup2(self._said.fileno(), 2)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        if memory_bytes is not None:
            with open("/proc/self/statm") as file:
                limit = int(file.read().split()[0]) * resource.getpagesize() + memory_bytes
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        shim.use(orders)
        try:
            outcome = ("returned", function(*args))
        except BaseException:
            outcome = ("raised", traceback.format_exc())
        shim.use(None)
        pipe.send(outcome)
        os._exit(0)

    @property
    def is_running(self) -> bool:
        """It has neither said how it ended, nor died."""
        return not self._pipe.poll()

    @property
    def has_died(self) -> bool:
        """It ended and said nothing."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status not in (None, 0)

    def terminate(self) -> None:
        """Send SIGTERM, if it still runs."""
        if self._status is None:
            os.kill(self.pid, signal.SIGTERM)

    def ended(self, timeout_s: float = _LATE_S) -> Ended:
        """Wait for its end. One that does not come is killed, and what it did is told."""
        try:
            if not self._pipe.poll(max(0.0, timeout_s)):
                return self._late(timeout_s)
            try:
                outcome = Ended(*self._pipe.recv())
            except (EOFError, ConnectionResetError):
                outcome = None
        finally:
            self._pipe.close()
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return outcome or Ended("died", self._status)

    def said(self) -> str:
        """The end of what it printed."""
        self._said.seek(0)
        return self._said.read()[-3000:].decode(errors="replace")

    def _late(self, timeout_s: float) -> Ended:
        os.kill(self.pid, signal.SIGUSR1)
        os.kill(self.pid, signal.SIGCONT)
        time.sleep(0.3)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        return Ended("late", f"still running after {timeout_s:g} s: {self.said()}")


def in_child(function: Callable[..., Any], *args: Any, timeout_s: float = _LATE_S, **options: Any) -> Ended:
    """Call a function in a child and wait for it; the options are those of `Child`."""
    return Child(function, *args, **options).ended(timeout_s)


# The process itself


def serve(work: Path, found: Path, num_workers: int) -> None:
    """Run the cases of a file on some workers, and write down what they yield."""
    cases = pickle.loads(work.read_bytes())
    _load_libraries({case.function.partition(":")[0] for case in cases})
    gc.collect()
    gc.freeze()  # or a child's first collection touches, and so copies, all memory
    shares = [cases[number::num_workers] for number in range(num_workers)]
    left = {_start_worker(number, share, work.parent): len(share) for number, share in enumerate(shares)}
    outcomes = []
    while left:
        for pipe in wait(left):
            assert isinstance(pipe, Connection)
            try:
                outcomes += pipe.recv()
                left[pipe] -= 1
            except EOFError:
                assert left.pop(pipe) == 0, "a worker died"
                os.wait()
    found.write_bytes(pickle.dumps(outcomes))


def _load_libraries(modules: Iterable[str]) -> None:
    import tensorstore  # noqa: F401
    import torch
    import zarr  # noqa: F401

    torch.set_num_threads(1)
    for module in modules:
        importlib.import_module(f"tests.adversarial.{module}")


def _start_worker(number: int, cases: Sequence[Case], folder: Path) -> Connection:
    here, there = Pipe(duplex=False)
    if os.fork():
        there.close()
        return here
    _die_with_parent()
    try:
        for at, case in enumerate(cases):
            there.send(_outcomes_of(case, folder / f"{number}-{at}"))
    except BaseException:
        traceback.print_exc()
    os._exit(0)


def _die_with_parent() -> None:
    """Whoever stops the campaign stops all of it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _outcomes_of(case: Case, folder: Path) -> list[Outcome]:
    folder.mkdir()
    outcomes: list[Outcome] = []
    try:
        outcomes.extend(case.run(folder))
    except BaseException:
        outcomes.append(Outcome("mistakes of the campaign", str(case), traceback.format_exc()))
    return outcomes


if __name__ == "__main__":
    from tests.adversarial import driver  # not __main__, which an outcome would then be of

    driver.serve(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
