"""Every program of `examples/` is killed at a random moment, and started again: it goes on to the same bits."""

from __future__ import annotations

import os
import random
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.e2e import processes
from tests.support.pace import patience
from tests.support.ranks import forkserver

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
_LOSS = re.compile(r"step (\d+): loss (\S+)")


def losses_of(command: list[str], run: Path, *, kill_at: int | None = None) -> dict[int, str]:
    """Run a program; step -> loss as it printed them. It is killed, with all its processes, when it prints the step `kill_at`."""
    found = {}
    environment = {**os.environ, **processes.mark(run), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, *command], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as program:
        assert program.stdout is not None
        printed, killed = [], False
        for line in program.stdout:
            printed.append(line)
            if match := _LOSS.search(line):
                found[int(match[1])] = match[2]
            if kill_at is not None and kill_at in found and not killed:  # it has said more meanwhile
                for process in processes.marked(run):
                    process.kill()
                killed = True
        code = program.wait(patience(60.0))
    assert (code == 0) == (kill_at is None), "".join(printed)
    assert not processes.left_after(patience(10.0), lambda: processes.marked(run))
    return found


@pytest.mark.parametrize(
    ("example", "ranks"),
    [
        pytest.param("plain_loop.py", 0, marks=pytest.mark.full),
        pytest.param("plain_loop.py", 2, marks=pytest.mark.full),
        pytest.param("fsdp2.py", 2, marks=pytest.mark.full),
        pytest.param("pipeline.py", 2, marks=pytest.mark.full),
        pytest.param("peft_lora.py", 2, marks=pytest.mark.full),
        pytest.param("rl_weight_sync.py", 0, marks=pytest.mark.full),
        pytest.param("lightning_trainer.py", 0, marks=pytest.mark.full),
        pytest.param("lightning_trainer.py", 2, marks=pytest.mark.full),
        pytest.param("accelerate_loop.py", 0, marks=pytest.mark.full),
        pytest.param("accelerate_loop.py", 2, marks=pytest.mark.full),
        pytest.param("hf_trainer.py", 0, marks=pytest.mark.full),
        pytest.param("hf_trainer.py", 2, marks=pytest.mark.full),
    ],
)
def test_an_example_goes_on_to_the_bit_after_a_kill(tmp_path: Path, example: str, ranks: int) -> None:
    command = [*TORCHRUN, str(ranks), str(EXAMPLES / example)] if ranks else [str(EXAMPLES / example)]
    require_goes_on(lambda words, kill_at=None: losses_of([*command, *words], tmp_path, kill_at=kill_at), tmp_path)


def test_the_plain_loop_goes_on_to_the_bit_after_a_kill(tmp_path: Path) -> None:
    """Here in processes that have loaded torch."""
    require_goes_on(lambda words, kill_at=None: forked_losses_of(words, tmp_path / "said", kill_at=kill_at), tmp_path)


def forked_losses_of(words: list[str], said: Path, *, kill_at: int | None = None) -> dict[int, str]:
    """Run `plain_loop.py`; step -> loss as it printed them. It is killed when it prints the step `kill_at`."""
    os.mkfifo(said)
    program = forkserver().Process(target=_be_plain_loop, args=(words, said))
    program.start()
    found = {}
    with said.open() as lines:
        for line in lines:
            if match := _LOSS.search(line):
                found[int(match[1])] = match[2]
            if kill_at is not None and kill_at in found:
                program.kill()
    program.join()
    said.unlink()
    assert program.exitcode == (0 if kill_at is None else -signal.SIGKILL)
    return found


def _be_plain_loop(words: list[str], said: Path) -> None:
    for stream in (1, 2):
        os.dup2(os.open(said, os.O_WRONLY), stream)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    torch.set_num_threads(1)
    path = str(EXAMPLES / "plain_loop.py")
    sys.argv = [path, *words]
    runpy.run_path(path, run_name="__main__")


def require_goes_on(losses: Callable[..., dict[int, str]], folder: Path) -> None:
    """`losses` runs a program with words more, to its end or until it is killed."""
    words = ["--steps", "90", "--folder"]
    straight = losses([*words, str(folder / "straight")])
    # Behind step 40: the save of step 20 is then committed in the background, too. Far from the end: it goes on while its line is read.
    killed_at = random.randrange(41, 61)
    before = losses([*words, str(folder / "killed")], kill_at=killed_at)
    after = losses([*words, str(folder / "killed")])
    assert max(before) >= killed_at
    assert 1 < min(after) <= max(before) + 2, (
        "it went on, and did not begin anew"
    )  # a step is saved before it is printed
    assert after == {step: straight[step] for step in range(min(after), 91)}


def test_each_example_has_a_folder_of_its_own_that_git_ignores() -> None:
    folders = {
        path.stem: re.findall(r'"--folder", default="(.*?)"', path.read_text()) for path in EXAMPLES.glob("*.py")
    }
    assert {name: found for name, found in folders.items() if found} == {
        name: [f"outputs/{name}"]
        for name, found in folders.items()
        if "argparse" in (EXAMPLES / f"{name}.py").read_text()
    }


@pytest.mark.full
def test_fsdp2_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    command = [str(EXAMPLES / "fsdp2.py"), "--folder", str(tmp_path / "saved"), "--steps"]
    losses_of([*TORCHRUN, "2", *command, "50"], tmp_path)
    assert sorted(losses_of([*TORCHRUN, "3", *command, "60"], tmp_path)) == list(range(51, 61))
