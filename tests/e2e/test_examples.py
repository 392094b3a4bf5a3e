"""Every program of `examples/` is killed at a random moment, and started again: it goes on to the same bits."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import processes
from tests.support.pace import patience

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
        ("plain_loop.py", 0),
        pytest.param("plain_loop.py", 2, marks=pytest.mark.full),
        pytest.param("fsdp2.py", 2, marks=pytest.mark.full),
        pytest.param("pipeline.py", 2, marks=pytest.mark.full),
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
    command += ["--steps", "90", "--folder"]
    straight = losses_of([*command, str(tmp_path / "straight")], tmp_path)
    # Behind step 40: the save of step 20 is then committed in the background, too. Far from the end: it goes on while its line is read.
    killed_at = random.randrange(41, 61)
    before = losses_of([*command, str(tmp_path / "killed")], tmp_path, kill_at=killed_at)
    after = losses_of([*command, str(tmp_path / "killed")], tmp_path)
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
