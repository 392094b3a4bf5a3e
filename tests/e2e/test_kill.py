"""`kill -9` in the middle of a save, of the launcher alone or of every process: nothing stays, and nothing is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from ckpt.catalog.verify import verify_checkpoint
from tests.e2e.conftest import STEPS, Run
from tests.e2e.processes import a_second, left_after, mark, marked
from tests.e2e.runs import BACKENDS, SMALL, Forked, committed, root_of, run, start

RANKS = 2


def test_a_run_whose_launcher_is_killed_in_a_save_goes_on_to_the_same_end(tmp_path: Path, straight: Run) -> None:
    """The launcher is forked of a process that has loaded torch; the next test starts it as a user does."""
    run_dir = tmp_path / "run"
    _killed_then_resumed(run_dir, straight.summary, lambda keys: _kill_forked_launcher(run_dir, keys), BACKENDS["zarr"])


@pytest.mark.full
@pytest.mark.parametrize("moment", range(3))
@pytest.mark.parametrize("victims", ["launcher", "everybody"])
@pytest.mark.parametrize("backend", ["zarr", "ocdbt", "safetensors"])
def test_a_run_killed_at_any_moment_of_a_save_goes_on_to_the_same_end(
    tmp_path: Path, straight: Run, victims: str, backend: str, moment: int
) -> None:
    run_dir, random = tmp_path / "run", Random(f"{victims} {backend} {moment}")
    _killed_then_resumed(
        run_dir, straight.summary, lambda keys: _kill_in_a_save(run_dir, victims, random, keys), BACKENDS[backend]
    )


@pytest.mark.full
def test_a_run_killed_again_and_again_while_it_replaces_its_checkpoints_keeps_one(
    tmp_path: Path, straight: Run
) -> None:
    """`overwrite=true` at each start: every save replaces what the life before has left under its name."""
    run_dir = tmp_path / "run"
    for life in range(6):
        random = Random(f"life {life}")
        _kill_in_a_save(run_dir, "everybody", random, ["train.steps=6", "save.every=1", "overwrite=true"])
        newest = committed(run_dir)
        assert newest or life == 0
        if newest:
            assert verify_checkpoint(newest[-1]) == []
    found = run(run_dir, "resume=latest", f"train.steps={STEPS}", ranks=RANKS)
    assert found["state_digest"] == straight.summary["state_digest"]


def _killed_then_resumed(
    run_dir: Path, straight: dict[str, Any], kill: Callable[[list[str]], int], overrides: list[str]
) -> None:
    """`kill` starts a run, kills it in a save, and returns how many checkpoints it had then."""
    overrides = [f"train.steps={STEPS}", "save.every=1", *overrides]
    before = kill(overrides)
    found = committed(run_dir)
    newest = found[-1] if found else None
    if newest is not None:
        assert verify_checkpoint(newest) == []
        assert len(found) in (before, before + 1), "a commit may just have come through, but none is lost"
    rest = run(run_dir, "resume=latest", *overrides, ranks=RANKS)
    assert rest["resumed_from"] == (None if newest is None else str(newest))
    assert rest["fell_back_from"] == []
    assert rest["losses"] == straight["losses"][rest["first_step"] - 1 :]
    assert rest["state_digest"] == straight["state_digest"]
    left = [path.name for path in root_of(run_dir).iterdir() if not path.name.startswith("checkpoint-")]
    assert left == [], "the next save clears away what the killed one left"


def _kill_in_a_save(run_dir: Path, victims: str, random: Random, overrides: list[str]) -> int:
    """Start a run, kill it at some moment of one of its first saves, and return how many checkpoints it had then.

    A save takes some 0.1 s from the making of its unpublished folder, so the moment lies in it or just after.
    """
    command = start(run_dir, *overrides, ranks=RANKS, environment=mark(run_dir))
    try:
        seen = _nth_save_begins(run_dir, lambda: command.process.poll() is None, random.randint(1, STEPS - 2))
        time.sleep(random.uniform(0, 0.12))
        before = len(committed(run_dir))
        ours = marked(run_dir)
        assert len(ours) >= RANKS + 2, "launcher, forkserver, ranks"
        if victims == "launcher":
            os.kill(command.process.pid, signal.SIGKILL)
        else:
            for process in ours:
                with contextlib.suppress(psutil.NoSuchProcess):  # some end by themselves when the first are gone
                    process.kill()
        left = left_after(a_second(), lambda: [process for process in ours if _lives(process)])
        assert left == [], f"a second later there are {left}"
        assert left_after(0.0, lambda: marked(run_dir)) == []
    finally:
        for process in marked(run_dir):
            process.kill()
        command.ended()
    assert command.code == -signal.SIGKILL, f"{seen}: {command.out}{command.err}"
    assert not (run_dir / "summary.json").exists()
    return before


def _kill_forked_launcher(run_dir: Path, overrides: list[str]) -> int:
    others = set(psutil.Process().children(recursive=True))
    random = Random()
    words = [f"output_dir={run_dir}", *SMALL, f"launch.nproc_per_node={RANKS}", *overrides]
    command = Forked("recipes.train", words, run_dir.parent)
    _nth_save_begins(run_dir, command.process.is_alive, random.randint(1, STEPS - 2))
    time.sleep(random.uniform(0, 0.12))
    before = len(committed(run_dir))
    ours = set(psutil.Process().children(recursive=True)) - others
    assert len(ours) >= RANKS + 1, "launcher, ranks"
    os.kill(command.pid, signal.SIGKILL)
    left = left_after(a_second(), lambda: [process for process in ours if _lives(process)])
    assert left == [], f"a second later there are {left}"
    assert command.ended().code == -signal.SIGKILL, f"{command.out}{command.err}"
    assert not (run_dir / "summary.json").exists()
    return before


def _nth_save_begins(run_dir: Path, lives: Callable[[], bool], number: int) -> set[str]:
    """Wait until the `number`-th unpublished folder has been seen."""
    seen: set[str] = set()
    deadline = time.monotonic() + 60
    while len(seen) < number:
        assert lives() and time.monotonic() < deadline, f"it saved {seen} only"
        root = root_of(run_dir)
        names = os.listdir(root) if root.is_dir() else []
        seen |= {name for name in names if name.startswith(".unpublished-") and not name.endswith(".json")}
        time.sleep(0.001)
    return seen


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
