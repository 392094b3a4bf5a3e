"""What a type checker knows of the library in a program outside of its checkout."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
from pathlib import Path
from typing import Any, assert_type

import torch

import ckpt
from ckpt import Checkpointer, CheckpointCoordinator, SharingPattern, StateComponent
from ckpt.format.places import ObjectPath

model = torch.nn.Linear(3, 1)
with Checkpointer("checkpoints", model=model, optimizer=torch.optim.AdamW(model.parameters()), keep_last=3) as checkpoints:
    start: int = checkpoints.restore()
    assert_type(checkpoints.step(start + 1, metrics={"loss": 1.0}), bool)
    assert_type(checkpoints.save(2, metadata={"note": "x"}), Path | ObjectPath | None)
    assert_type(checkpoints.list()[0].step, int | None)
component = StateComponent("model", model, SharingPattern.REPLICATED)
with CheckpointCoordinator([component], None, None, "runs", backend="zarr", strategy="direct", device="cpu") as coordinator:
    assert_type(coordinator.save_checkpoint(checkpoint_id=1), str | None)
assert_type(ckpt.save({"a": torch.zeros(2)}, "state").bytes, int)
assert_type(ckpt.load("state"), dict[str, Any])
assert_type(ckpt.__version__, str)
"""
WRONG = 'import ckpt\n\nckpt.save({}, "state", fromat="zarr")\n'


@pytest.mark.full
@pytest.mark.parametrize("checker", [["mypy", "--strict"], ["pyright"]], ids=["mypy", "pyright"])
def test_a_program_outside_of_the_checkout_is_checked_against_the_librarys_types(
    tmp_path: Path, checker: list[str]
) -> None:
    if importlib.util.find_spec(checker[0]) is None:
        pytest.skip(f"{checker[0]} is not installed")
    (tmp_path / "program.py").write_text(PROGRAM)
    (tmp_path / "wrong.py").write_text(WRONG)
    command = [sys.executable, "-m", *checker]
    right = subprocess.run([*command, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert right.returncode == 0, right.stdout + right.stderr
    wrong = subprocess.run([*command, "wrong.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert wrong.returncode == 1 and "fromat" in wrong.stdout, wrong.stdout
