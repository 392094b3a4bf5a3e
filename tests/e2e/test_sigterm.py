"""SIGTERM to a run, whichever rank hears of it: the step that it interrupts is saved, the run ends with 143, and goes on to the bit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ckpt.catalog.verify import verify_checkpoint
from ckpt.ranks.topology import Topology
from recipes.training.training import Training, train
from tests.e2e.conftest import STEPS, Run
from tests.e2e.processes import a_second, left_after, mark, marked
from tests.e2e.runs import Command, Job, checkpoint, committed, root_of, run, start
from tests.support.async_runs import SETTINGS, until

TOLD_TO_END = 143
AT = 2


def _at_step(number: int, act: Callable[[Topology], None], cfg: dict[str, Any], topology: Topology) -> Any:
    """Train; do something in the middle of a step."""
    step = Training.step

    def acting(training: Training) -> float:
        if training.steps_done == number - 1:
            act(topology)
        return step(training)

    with patch.object(Training, "step", acting):
        return train(cfg, topology)


def _tell(topology: Topology) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _tell_the_last(topology: Topology) -> None:
    if topology.rank == topology.world_size - 1:
        _tell(topology)


def _tell_twice(topology: Topology) -> None:
    _tell(topology)
    _tell(topology)


def all_are_told(cfg: dict[str, Any], topology: Topology) -> Any:
    return _at_step(AT, _tell, cfg, topology)


def the_last_is_told(cfg: dict[str, Any], topology: Topology) -> Any:
    return _at_step(AT, _tell_the_last, cfg, topology)


def all_are_told_twice(cfg: dict[str, Any], topology: Topology) -> Any:
    return _at_step(AT, _tell_twice, cfg, topology)


def _ends_told(run_dir: Path, *overrides: str, job: Job, ranks: int = 1) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        run(run_dir, *overrides, job=job, ranks=ranks)
    assert ended.value.code == TOLD_TO_END
    assert signal.getsignal(signal.SIGTERM) is before
    assert not (run_dir / "summary.json").exists()


def _goes_on(run_dir: Path, straight: Run, newest: int) -> None:
    """From the step that was interrupted, which is the newest, to the bits of the run that never was."""
    assert committed(run_dir)[-1] == checkpoint(run_dir, newest)
    assert verify_checkpoint(checkpoint(run_dir, newest)) == []
    assert [one.name for one in root_of(run_dir).iterdir() if not one.name.startswith("checkpoint-")] == []
    rest = run(run_dir, f"train.steps={STEPS}", "resume=latest", ranks=2)
    assert rest["first_step"] == newest + 1
    assert rest["losses"] == straight.summary["losses"][newest:]
    assert rest["state_digest"] == straight.summary["state_digest"]


def test_one_rank_that_is_told_to_end_ends_all_after_the_step_is_saved(tmp_path: Path, straight: Run) -> None:
    _ends_told(tmp_path / "run", f"train.steps={STEPS}", job=the_last_is_told, ranks=2)
    _goes_on(tmp_path / "run", straight, AT)


def test_a_run_of_one_process_saves_a_step_once_though_it_was_due(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    _ends_told(run_dir, "train.steps=50", "save.every=2", "save.mode=async", job=all_are_told_twice)
    assert committed(run_dir) == [checkpoint(run_dir, AT)]
    said = capsys.readouterr().out
    assert said.count(f"saved checkpoint-{AT:08d}") == 1
    assert f"SIGTERM: the run ends at step {AT}, which is saved; go on from it with resume=latest" in said


@pytest.mark.full
@pytest.mark.parametrize("job", [all_are_told, the_last_is_told, all_are_told_twice])
@pytest.mark.parametrize(
    "setting", [["save.mode=sync"], *SETTINGS.values(), ["save.mode=async", "save.when_busy=skip"]]
)
def test_any_ranks_in_any_mode(tmp_path: Path, straight: Run, job: Job, setting: list[str]) -> None:
    _ends_told(tmp_path / "run", f"train.steps={STEPS}", "save.every=1", *setting, job=job, ranks=2)
    _goes_on(tmp_path / "run", straight, AT)


def _told(run_dir: Path, tell: Callable[[Command], None], *overrides: str, ranks: int) -> Command:
    """Start a long run, and tell its processes to end once it has saved something."""
    environment = mark(run_dir) | {"OMP_NUM_THREADS": "1"}  # as in this process: sums of other threads are other bits
    command = start(run_dir, "train.steps=100000", "save.every=3", *overrides, ranks=ranks, environment=environment)
    until(lambda: committed(run_dir) or command.process.poll() is not None, "a checkpoint", 60)
    time.sleep(0.3)
    tell(command)
    command.ended(60)
    assert left_after(a_second(), lambda: marked(run_dir)) == []
    return command


def _tell_launcher(command: Command) -> None:
    command.process.terminate()


def _tell_group(command: Command) -> None:
    """As schedulers do: launcher and ranks, which the launcher tells once more."""
    os.killpg(command.process.pid, signal.SIGTERM)


@pytest.mark.full
@pytest.mark.parametrize("tell", [_tell_launcher, _tell_group])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("setting", [[], ["save.mode=async"]])
def test_the_command_that_is_told_to_end(
    tmp_path: Path, straight: Run, tell: Callable[[Command], None], ranks: int, setting: list[str]
) -> None:
    run_dir = tmp_path / "run"
    command = _told(run_dir, tell, *setting, ranks=ranks)
    assert (command.code, command.err) == (TOLD_TO_END, ""), command.out + command.err
    newest = committed(run_dir)[-1]
    step = int(newest.name.removeprefix("checkpoint-"))
    assert f"SIGTERM: the run ends at step {step}, which is saved" in command.out
    rest = run(run_dir, f"train.steps={step + 2}", "resume=latest", "save.every=1000", ranks=ranks)
    whole = run(tmp_path / "whole", f"train.steps={step + 2}", "save.every=1000", ranks=ranks)
    assert (rest["losses"], rest["state_digest"]) == (whole["losses"][step:], whole["state_digest"])


@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 2])
def test_where_it_is_turned_off_the_run_ends_by_the_signal_without_a_save(tmp_path: Path, ranks: int) -> None:
    run_dir = tmp_path / "run"
    command = _told(run_dir, _tell_launcher, "save.on_sigterm=false", ranks=ranks)
    assert (command.code, command.err) == (-signal.SIGTERM, "")
    assert all(int(path.name.removeprefix("checkpoint-")) % 3 == 0 for path in committed(run_dir))


def _hangs(cfg: dict[str, Any], topology: Topology) -> Any:
    def hang(topology: Topology) -> None:
        _tell(topology)
        time.sleep(60)

    return _at_step(AT, hang, cfg, topology)


def test_a_step_that_takes_longer_than_the_grace_is_given_up(tmp_path: Path) -> None:
    from ckpt.errors import RankAbsentError

    began = time.monotonic()
    with pytest.raises(RankAbsentError, match="was killed by SIGTERM"):
        run(tmp_path / "run", "train.steps=5", "save.grace_s=1", job=_hangs, ranks=2)
    assert time.monotonic() - began < 30
    assert committed(tmp_path / "run") == []
