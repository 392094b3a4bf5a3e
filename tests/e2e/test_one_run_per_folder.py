"""One run per folder: a second one is told who is there, and begins once all of the first one's processes are gone."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import psutil
import pytest

import recipes.train
from tests.e2e.processes import a_second, left_after, mark, marked
from tests.e2e.runs import SMALL, Command, committed, start, summary_of


def test_a_second_run_is_refused_while_the_first_lives_and_begins_when_all_of_it_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second run is this process."""
    run_dir = tmp_path / "run"
    first = start(run_dir, "train.steps=100000", "save.every=2", "save.keep_last=2", ranks=2, environment=mark(run_dir))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys,
        "argv",
        ["recipes/train.py", f"output_dir={run_dir}", *SMALL, "resume=latest", "train.steps=1"],
    )
    try:
        _wait_for_a_checkpoint(run_dir, first)
        config = (run_dir / ".hydra" / "config.yaml").read_bytes()
        with pytest.raises(SystemExit, match="1"):
            recipes.train.main()
        sentence = capsys.readouterr().err
        who = f"by run dev (pid {first.process.pid} on {socket.gethostname()}), whose last sign of life was "
        assert sentence.startswith(f"the folder of the run, {run_dir}, is in use since 20") and who in sentence, (
            sentence
        )
        assert (run_dir / ".hydra" / "config.yaml").read_bytes() == config
        assert first.process.poll() is None
        ranks = [process for process in marked(run_dir) if _may_write(process) and process.pid != first.process.pid]
        os.kill(first.process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, first.process.pid, os.WEXITED | os.WNOWAIT)  # its ranks still run
        recipes.train.main()
        assert not set(ranks) & set(marked(run_dir))
    finally:
        for process in marked(run_dir):
            process.kill()
        first.ended()
    assert left_after(a_second(), lambda: marked(run_dir)) == []
    assert summary_of(run_dir)["resumed_from"] == str(committed(run_dir)[-1])
    assert not (run_dir / ".folder.owner.json").exists()


def _may_write(process: psutil.Process) -> bool:
    """Whether it is there, and more than Python's own helper, which ends when the last of the others has."""
    try:
        return not any("resource_tracker" in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _wait_for_a_checkpoint(run_dir: Path, command: Command) -> None:
    deadline = time.monotonic() + 90
    while not committed(run_dir):
        assert command.process.poll() is None and time.monotonic() < deadline, "no checkpoint"
        time.sleep(0.02)


@pytest.mark.full
def test_ranks_of_torchrun_hear_of_a_refusal_from_rank_0(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    first = start(run_dir, "train.steps=100000", "save.every=2", "save.keep_last=2", environment=mark(run_dir))
    try:
        _wait_for_a_checkpoint(run_dir, first)
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "recipes.train"]
        second = Command([*launcher, f"output_dir={run_dir}", "resume=latest"], (), tmp_path, {}).ended()
        told = [line for line in second.err.splitlines() if line.startswith("the folder of the run, ")]
        assert second.code == 1 and len(told) == 1 and f"pid {first.process.pid} " in told[0], second.err
    finally:
        for process in marked(run_dir):
            process.kill()
        first.ended()
