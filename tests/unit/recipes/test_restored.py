"""A resumed run goes on with the values that the checkpoint restored."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ckpt.errors import ConfigurationError
from recipes.support.config import GIVEN
from recipes.training.restored import Settled, settle


def settled(*given: str) -> Settled:
    """With a schedule of 60 steps, of which the checkpoint has one of 40."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    node = {"_target_": "torch.optim.lr_scheduler.CosineAnnealingLR", "T_max": 60, "eta_min": 0.0}
    cfg: dict[str, Any] = {"optimizer": {"lr": 0.1}, "schedule": node, GIVEN: given}
    return settle(cfg, "checkpoint-1", ["scheduler"], {}, optimizer, schedule)


def test_a_schedule_keeps_its_length_and_says_so() -> None:
    run = settled("train.steps")
    assert run.lines == ["schedule.T_max=40 as in the checkpoint: the config says 60"]
    assert run.cfg["schedule"]["T_max"] == 40


def test_another_length_on_the_command_line_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match=r"^schedule\.T_max=60 given on the command line: the checkpoint goes on with 40"
    ):
        settled("schedule.T_max")
