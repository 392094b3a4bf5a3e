"""`save.mode=async` as a user types it: what the run says of its saves, how it goes on, and how it ends when it is killed or told to."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest

from ckpt.catalog.verify import verify_checkpoint
from ckpt.errors import StorageError
from tests.e2e.conftest import STEPS, Run
from tests.e2e.processes import a_second, left_after, mark, marked
from tests.e2e.runs import SMALL, TEXT, Command, Forked, checkpoint, committed, root_of, run, start, summary_of
from tests.support.async_runs import SETTINGS, Left
from tests.support.pace import patience

RANKS = 2
TOLD = -signal.SIGTERM


def _done(command: Command) -> str:
    command.ended()
    assert (command.code, command.err) == (0, ""), command.out + command.err
    return command.out


def _require_saves(run_dir: Path, steps: list[int]) -> None:
    """The summary lists every checkpoint, each of which is there and whole, with what its save took."""
    saves = summary_of(run_dir)["checkpoints"]
    assert [(save["step"], save["path"]) for save in saves] == [
        (step, str(checkpoint(run_dir, step))) for step in steps
    ]
    for save in saves:
        assert 0 < save["blocked_s"] < save["save_s"], save
        assert verify_checkpoint(Path(save["path"])) == []
        files = [path for path in Path(save["path"]).rglob("*") if path.is_file()]
        assert save["bytes"] == sum(path.stat().st_size for path in files)
    assert sorted(path.name for path in root_of(run_dir).iterdir()) == [
        checkpoint(run_dir, step).name for step in steps
    ]


@pytest.mark.full
@pytest.mark.parametrize("setting", SETTINGS)
def test_the_command_trains_as_without_saves_in_the_background_and_tells_of_each_and_goes_on(
    tmp_path: Path, straight: Run, setting: str
) -> None:
    run_dir = tmp_path / "run"
    own = [*SETTINGS[setting], "save.every=1"]
    left = Left()
    out = _done(start(run_dir, *own, f"train.steps={STEPS - 2}", ranks=RANKS, environment=mark(run_dir)))
    assert left_after(a_second(), lambda: marked(run_dir)) == []
    left.require_nothing()
    for step in range(1, STEPS - 1):
        assert f"checkpoint-{step:08d}" in out
    _require_saves(run_dir, [*range(1, STEPS - 1)])
    assert summary_of(run_dir)["losses"] == straight.summary["losses"][: STEPS - 2]
    after = run(run_dir, *own, f"train.steps={STEPS}", "resume=latest", ranks=RANKS)
    assert after == summary_of(run_dir)
    assert (after["first_step"], after["losses"]) == (STEPS - 1, straight.summary["losses"][STEPS - 2 :])
    assert after["state_digest"] == straight.summary["state_digest"]
    assert [save["step"] for save in after["checkpoints"]] == [STEPS - 1, STEPS]


@pytest.mark.full
def test_one_rank_alone_saves_in_the_background_too(tmp_path: Path) -> None:
    for setting, own in SETTINGS.items():
        run_dir = tmp_path / setting.replace(", ", "-")
        _done(start(run_dir, *own, "save.every=1", "train.steps=3", environment=mark(run_dir)))
        assert left_after(a_second(), lambda run_dir=run_dir: marked(run_dir)) == []  # type: ignore[misc]
        _require_saves(run_dir, [1, 2, 3])


@pytest.mark.full
def test_a_write_error_in_the_background_is_one_sentence_and_the_run_can_be_resumed(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    faulty = ["ckpt._target_=tests.e2e.misbehaving.FaultyZarr", "+ckpt.fault=full_disk"]
    with pytest.raises(StorageError) as caught:
        run(run_dir, "train.steps=6", "save.every=2", "save.mode=async", *faulty, ranks=3)
    assert caught.value.rank == 1 and caught.value.phase == "write"
    sentence = "save of checkpoint-00000004 failed in phase write on rank 1: "
    assert sentence in str(caught.value) and "No space left on device: 'model/wte.weight/c/0/0'" in str(caught.value)
    assert committed(run_dir) == [checkpoint(run_dir, 2)]
    assert not (run_dir / "summary.json").exists()
    found = run(run_dir, "resume=latest", "train.steps=4", "load.strict=false", "save.mode=async", ranks=3)
    assert found["first_step"] == 3
    assert sorted(path.name for path in root_of(run_dir).iterdir()) == ["checkpoint-00000002", "checkpoint-00000004"]


def test_the_last_step_is_saved_though_the_save_before_it_is_under_way_and_others_are_skipped(tmp_path: Path) -> None:
    slow = ["save.mode=async", "save.when_busy=skip", "save.writer_mib_s=2", "save.every=1"]
    found = run(tmp_path / "run", "train.steps=4", *slow)
    saved = [save["step"] for save in found["checkpoints"]]
    assert saved[-1] == 4
    assert found["skipped"], "saves of one second each, and steps of a tenth"
    assert sorted(saved + found["skipped"]) == [1, 2, 3, 4]
    assert committed(tmp_path / "run") == [checkpoint(tmp_path / "run", step) for step in saved]


def _faulty(fault: str) -> list[str]:
    """A run of three ranks, of which rank 1 meets the fault in the second save."""
    backend = ["ckpt._target_=tests.e2e.misbehaving.FaultyZarr", f"+ckpt.fault={fault}"]
    return ["train.steps=6", "save.every=2", "save.mode=async", "agree.timeout_s=3", *backend]


def _require_one_line(command: Command | Forked, run_dir: Path) -> None:
    assert command.code == 1, command.out + command.err
    assert command.err.count("\n") == 1, command.err
    assert "rank 1" in command.err and "save of checkpoint-00000004" in command.err
    assert committed(run_dir) == [checkpoint(run_dir, 2)]
    assert verify_checkpoint(checkpoint(run_dir, 2)) == []


def test_a_rank_that_is_killed_in_the_background_ends_the_command_with_one_line(tmp_path: Path) -> None:
    """The command is forked of a process that has loaded torch."""
    run_dir = tmp_path / "run"
    words = [f"output_dir={run_dir}", *SMALL, "launch.nproc_per_node=3", *_faulty("killed")]
    _require_one_line(Forked("recipes.train", words, tmp_path).ended(), run_dir)


@pytest.mark.full
@pytest.mark.parametrize("fault", ["killed", "full_disk", "hung", "ended"])
def test_each_fault_in_the_background_ends_the_command_with_one_line(tmp_path: Path, fault: str) -> None:
    run_dir = tmp_path / "run"
    command = start(run_dir, *_faulty(fault), ranks=3, environment=mark(run_dir)).ended()
    assert left_after(a_second(), lambda: marked(run_dir)) == []
    _require_one_line(command, run_dir)


# kill -9 and SIGTERM


def _stopped(run_dir: Path, sign: signal.Signals, random: Random, overrides: list[str], grace_s: float = 20.0) -> None:
    """Start a run that saves after each step, and end it at some moment, in or between its saves."""
    left = Left()
    command = start(
        run_dir, f"train.steps={1000 * STEPS}", "save.every=1", f"save.grace_s={grace_s}", *overrides,
        ranks=RANKS, environment=mark(run_dir),
    )  # fmt: skip
    try:
        deadline = time.monotonic() + patience(60)
        while len(committed(run_dir)) < 2:
            assert command.process.poll() is None and time.monotonic() < deadline, "it saved nothing"
            time.sleep(0.01)
        time.sleep(random.uniform(0, 1))
        ours = marked(run_dir)
        os.kill(command.process.pid, sign)
        asked = time.monotonic()
        command.ended(grace_s + 20)
        took_s = time.monotonic() - asked
        assert took_s < grace_s + a_second() + 7, f"it took {took_s:.1f} s"
        assert left_after(a_second(), lambda: [one for one in ours if _lives(one)]) == []
    finally:
        for process in marked(run_dir):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        command.ended()
    ends = (
        {-sign} if sign == signal.SIGKILL else {-sign, 128 + sign}
    )  # by itself, after a save; past its grace by the signal
    assert command.code in ends, command.out + command.err
    left.require_nothing()
    assert not (run_dir / "summary.json").exists()


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _goes_on(run_dir: Path, straight: dict[str, Any]) -> None:
    """From its newest checkpoint, which is whole; and the first six steps of those that are there are the straight run's."""
    newest = committed(run_dir)[-1]
    assert verify_checkpoint(newest) == []
    step = int(newest.name.removeprefix("checkpoint-"))
    on = run(run_dir, "resume=latest", f"train.steps={max(STEPS, step + 1)}", "ledger.stale_s=1", ranks=RANKS)
    assert (on["resumed_from"], on["fell_back_from"]) == (str(newest), [])
    if step < STEPS:
        assert on["losses"] == straight["losses"][step:]
        assert on["state_digest"] == straight["state_digest"]
    left = [path.name for path in root_of(run_dir).iterdir() if not path.name.startswith("checkpoint-")]
    assert left == []


@pytest.mark.full
@pytest.mark.parametrize(("moment", "setting"), [(moment, [*SETTINGS][moment % 2]) for moment in range(12)])
def test_a_run_told_to_end_at_any_moment_ends_and_goes_on(
    tmp_path: Path, straight: Run, moment: int, setting: str
) -> None:
    random = Random(f"told {moment}")
    _stopped(tmp_path / "run", signal.SIGTERM, random, SETTINGS[setting], grace_s=random.choice([0.0, 1.0, 20.0]))
    _goes_on(tmp_path / "run", straight.summary)


@pytest.mark.full
@pytest.mark.parametrize("moment", range(3))
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_run_whose_launcher_is_killed_leaves_no_process_and_goes_on(
    tmp_path: Path, straight: Run, setting: str, moment: int
) -> None:
    _stopped(tmp_path / "run", signal.SIGKILL, Random(f"killed {moment} {setting}"), SETTINGS[setting])
    _goes_on(tmp_path / "run", straight.summary)


# A sweep


@pytest.mark.full
def test_a_sweep_over_ways_to_save_ends_with_one_table(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    arguments = [
        "-m",
        "recipes.train",
        "-m",
        f"output_dir={folder}",
        f"data.path={TEXT}",
        "train.steps=3",
        "save.every=1",
    ]
    command = Command(arguments, ("save.mode=sync,async", "launch.nproc_per_node=2"), tmp_path, mark(folder)).ended()
    assert (command.code, command.err) == (0, ""), command.out + command.err
    assert left_after(a_second(), lambda: marked(folder)) == []
    sync, in_background = json.loads((folder / "sweep.json").read_text())
    assert (sync["overrides"][-2], in_background["overrides"][-2]) == ("save.mode=sync", "save.mode=async")
    assert sync["error"] is None and in_background["error"] is None
    assert sync["state_digest"] == in_background["state_digest"]
    assert 0 < in_background["blocked_s"] < in_background["save_s"]
    assert sync["blocked_s"] == pytest.approx(sync["save_s"])
    for text in (command.out, (folder / "sweep.txt").read_text()):
        assert text.count("2 jobs: ") == 1 and "mode=async" in text and "keys in full: save.mode\n" in text
