"""Train for some minutes while something kills the launcher, one process, or all: `.ci/soak MINUTES [SEED [VICTIMS]]`.

Each round is a training run of its own, killed in a few of its lives and resumed with `resume=latest` until it ends; or one that torchrun
restarts (`VICTIMS=torchrun` chooses these alone), which must end without another command. Then its state
and losses must be those of a run that nobody disturbed, its checkpoints sound, and nothing may be left: processes, files in the
temporary folder, segments of shared memory, folders in the checkpoint root. Every few rounds one process saves and loads all the
while, and its memory, descriptors and threads must stay as they are. Ends with a table, and with exit code 1 if anything fell.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import psutil

from ckpt.catalog.verify import verify_checkpoint
from ckpt.ranks.topology import Topology
from ckpt.saving.save_settings import SaveSettings
from tests.adversarial import held_state
from tests.e2e.processes import left_after, mark, marked
from tests.e2e.runs import BACKENDS, Command, committed, root_of, start, summary_of

STEPS = 8
RANKS = 2
LIVES = 3
WAYS = {
    "sync": [],
    "incremental": ["save.incremental=true"],
    "async": ["save.mode=async"],
    "keep_last": ["save.keep_last=2"],
}
VICTIMS = ("launcher", "one process", "everybody")
BY_TORCHRUN = ("one rank of torchrun", "all ranks of torchrun")
_GRACE_S = 20.0
"""For processes to end, on a machine with others on it."""
_LONG_RUN_S = 10.0
_GROWTH_MIB = 32


@dataclass(frozen=True)
class Flat:
    """What of a process must not grow."""

    descriptors: int
    threads: int
    mib: int

    @classmethod
    def now(cls) -> Flat:
        gc.collect()
        return cls(len(os.listdir("/proc/self/fd")), threading.active_count(), psutil.Process().memory_info().rss >> 20)

    def why_grown(self, later: Flat) -> str:
        is_flat = later.descriptors <= self.descriptors and later.threads <= self.threads
        return "" if is_flat and later.mib - self.mib <= _GROWTH_MIB else f"{self} became {later}"


class Soak:
    """The rounds.

    Args:
        folder: for the runs, and their temporary files.
        seed: of everything that is drawn by lot.
        victims: a part of the names of those that are killed; "": any.
    """

    def __init__(self, folder: Path, seed: int, victims: str) -> None:
        self._folder = folder
        self._victims = [one for one in (*VICTIMS, *BY_TORCHRUN) if victims in one]
        self._random = Random(seed)
        self._straight = self._undisturbed()
        self.tried: Counter[str] = Counter()
        self.fell: Counter[str] = Counter()

    def round(self, number: int) -> None:
        """One run with some lives, and now and then a long one."""
        way, victims = self._random.choice(list(WAYS)), self._random.choice(self._victims)
        backend = self._random.choice(list(BACKENDS))
        row = f"{victims} killed, {way}"
        self._count(
            row, f"round {number}: {backend}, {row}", lambda: self._disturbed(number, backend, WAYS[way], victims)
        )
        if number % 4 == 1:
            for backend, saves in LONG_RUNS.items():
                row = f"saves and loads for long, {backend}"
                self._count(row, row, lambda backend=backend, saves=saves: self._long_run(number, backend, saves))

    def table(self) -> str:
        """How much was tried, and what came of it."""
        lines = [f"{'soak':44} {'tried':>6} {'held':>6} {'fell':>6}"]
        for row in [*sorted(self.tried), "all"]:
            tried, fell = (self.tried.total(), self.fell.total()) if row == "all" else (self.tried[row], self.fell[row])
            lines.append(f"{row:44} {tried:6} {tried - fell:6} {fell:6}")
        return "\n".join(lines)

    def _count(self, row: str, name: str, attempt: Callable[[], None]) -> None:
        self.tried[row] += 1
        try:
            attempt()
        except AssertionError as error:
            self.fell[row] += 1
            print(f"FELL {name}: {error}", flush=True)
        else:
            print(f"held {name}", flush=True)

    def _undisturbed(self) -> dict[str, Any]:
        run_dir = self._folder / "straight"
        command = self._start(run_dir, [f"train.steps={STEPS}"]).ended(300)
        assert command.code == 0, command.err
        return summary_of(run_dir)

    def _start(self, run_dir: Path, overrides: list[str], launcher: list[str] | None = None) -> Command:
        temporary = run_dir.parent / f"{run_dir.name}.tmp"
        temporary.mkdir(exist_ok=True)
        environment = mark(run_dir) | {"TMPDIR": str(temporary), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        return start(run_dir, *overrides, ranks=RANKS, environment=environment, launcher=launcher or [])

    def _disturbed(self, number: int, backend: str, overrides: list[str], victims: str) -> None:
        run_dir = self._folder / f"run-{number}"
        overrides = [f"train.steps={STEPS}", "save.every=1", "resume=latest", *BACKENDS[backend], *overrides]
        shared_before = _segments()
        if victims in BY_TORCHRUN:
            self._restarted(run_dir, overrides, victims)
        else:
            for _ in range(self._random.randint(1, LIVES)):
                self._life(run_dir, overrides, victims)
                _require_sound(run_dir)
            command = self._start(run_dir, overrides).ended(300)
            assert command.code == 0, f"it does not go on: {command.err}"
        _require_sound(run_dir)
        self._require_same_end(run_dir)
        names = [path.name for path in root_of(run_dir).iterdir() if not path.name.startswith("checkpoint-")]
        assert not names, f"in the checkpoint root is left: {names}"
        _require_nothing_left(run_dir, shared_before)

    def _restarted(self, run_dir: Path, overrides: list[str], victims: str) -> None:
        """Start a run under torchrun, and kill ranks in or after some of its saves; it must end well by itself."""
        torchrun = [
            "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", f"--max-restarts={LIVES}", "--rdzv-backend=c10d",
            "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1", "--monitor-interval=0.1",
        ]  # fmt: skip
        command = self._start(run_dir, overrides, torchrun)
        try:
            for _ in range(self._random.randint(1, LIVES)):
                self._wait_for_saves(run_dir, command, self._random.randint(1, 3))
                time.sleep(self._random.uniform(0, 0.4))
                ranks = [process for process in marked(run_dir) if process.pid != command.process.pid]
                for process in ranks if victims.startswith("all") else self._random.sample(ranks, min(1, len(ranks))):
                    with contextlib.suppress(psutil.Error):
                        process.kill()
            command.ended(300)
            assert command.code == 0, f"torchrun gave up: {command.err[-3000:]}"
        finally:
            for process in marked(run_dir):
                with contextlib.suppress(psutil.Error):
                    process.kill()
            command.ended(30)

    def _life(self, run_dir: Path, overrides: list[str], victims: str) -> None:
        """Start a run, and kill some of it in or after one of its next saves."""
        command = self._start(run_dir, overrides)
        try:
            self._wait_for_saves(run_dir, command, self._random.randint(1, 3))
            time.sleep(self._random.uniform(0, 0.4))
            if command.process.poll() is None:
                self._kill(run_dir, command, victims)
            command.ended(120)
            left = left_after(_GRACE_S, lambda: marked(run_dir))
            assert not left, f"processes are left after {victims} was killed: {left}"
        finally:
            for process in marked(run_dir):
                with contextlib.suppress(psutil.Error):
                    process.kill()
            command.ended(30)

    def _kill(self, run_dir: Path, command: Command, victims: str) -> None:
        others = [process for process in marked(run_dir) if process.pid != command.process.pid]
        if victims == "launcher" or not others:
            os.kill(command.process.pid, signal.SIGKILL)
            return
        chosen = (
            [*others, psutil.Process(command.process.pid)] if victims == "everybody" else [self._random.choice(others)]
        )
        for process in chosen:
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _wait_for_saves(self, run_dir: Path, command: Command, number: int) -> None:
        """Wait until so many new folders have been seen, or the run is over."""
        root, seen, before = root_of(run_dir), set(), set(_names(root_of(run_dir)))
        deadline = time.monotonic() + 120
        while len(seen) < number and command.process.poll() is None:
            assert time.monotonic() < deadline, f"{number} saves did not come: {seen}"
            seen |= {name for name in _names(root) if name.startswith((".unpublished-", "checkpoint-"))} - before
            time.sleep(0.002)

    def _require_same_end(self, run_dir: Path) -> None:
        found = summary_of(run_dir)
        assert found["state_digest"] == self._straight["state_digest"], "it ends in another state"
        assert found["losses"] == self._straight["losses"][found["first_step"] - 1 :], "its losses are other ones"
        assert found["fell_back_from"] == [], found["fell_back_from"]

    def _long_run(self, number: int, backend: str, saves: SaveSettings) -> None:
        """Save and load in one process, after some saves that fill pools and caches."""
        root = self._folder / f"long-{number}-{backend}"
        with held_state.Run(root, backend, saves=saves, keep_last=2) as run:
            before, until = Flat.now(), 0.0
            for at in range(10**9):
                run.save(str(at))
                run.coordinator.wait()
                if at % 5 == 0:
                    held_state.load(None, root, Topology.alone(), 1)
                if at == 20:
                    before, until = Flat.now(), time.monotonic() + _LONG_RUN_S
                elif at > 20 and time.monotonic() > until:
                    break
            deadline = time.monotonic() + 5  # what the last save has opened is closed a moment later
            while (grown := before.why_grown(Flat.now())) and time.monotonic() < deadline:
                time.sleep(0.1)
        assert not grown, f"after {at} saves {grown}"


LONG_RUNS = {
    "zarr": SaveSettings(incremental=True),
    "tensorstore": SaveSettings(mode="async"),
    "kimi-engine": SaveSettings(mode="async", when_busy="queue"),
}


def _require_sound(run_dir: Path) -> None:
    for path in committed(run_dir):
        assert verify_checkpoint(path) == [], path


def soak(minutes: float, seed: int, victims: str = "") -> int:
    """Run rounds for so many minutes, at least one; print the table and return the exit code."""
    print(f"soak of {minutes:g} minutes, seed {seed}", flush=True)
    until = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        rounds = Soak(Path(folder), seed, victims)
        for number in _numbers(until):
            rounds.round(number)
        print(rounds.table())
    return 1 if rounds.fell else 0


def _numbers(until: float) -> Iterator[int]:
    number = 1
    while number == 1 or time.monotonic() < until:
        yield number
        number += 1


def _names(folder: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return os.listdir(folder)
    return []


def _segments() -> set[str]:
    return set(_names(Path("/dev/shm")))


def _require_nothing_left(run_dir: Path, shared_before: set[str]) -> None:
    names = _names(run_dir.parent / f"{run_dir.name}.tmp")
    of_torch = ("torchinductor_", "torchelastic_")  # its cache, and a folder of each torchrun
    left = [name for name in names if not name.startswith(of_torch)]
    assert not left, f"in the temporary folder is left: {left}"
    shared = {name for name in _segments() - shared_before if not _is_mapped(name)}
    assert not shared, f"in /dev/shm is left: {shared}"


def _is_mapped(name: str) -> bool:
    """Another program's, that is running."""
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if name in Path(f"/proc/{process.pid}/maps").read_text():
                return True
    return False


if __name__ == "__main__":
    given = dict(enumerate(sys.argv[1:]))
    sys.exit(soak(float(given[0]), int(given.get(1, time.time())), given.get(2, "")))
