"""Which checkpoints raise an alarm because their tensors are those of an earlier step."""

from __future__ import annotations

import pytest
import torch

from ckpt.saving.checkpoint_root import StaleStateCheck
from ckpt.saving.writing import WriteResult
from ckpt.state.sharing import SharingPattern, StateComponent
from ckpt.state.statefuls import ModelState, OptimizerState


def components() -> list[StateComponent]:
    trained, frozen = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(trained.parameters())
    objects = {
        "model": ModelState(trained),
        "teacher": ModelState(frozen),
        "optimizer": OptimizerState(optimizer, trained),
    }
    return [StateComponent(key, stateful, SharingPattern.REPLICATED) for key, stateful in objects.items()]


def votes(**digests: str) -> list[WriteResult]:
    """Two ranks, each with one half of every component."""
    return [
        WriteResult(tensor_checksums={key: f"{digest}{rank}" for key, digest in digests.items()}) for rank in range(2)
    ]


def test_the_same_tensors_under_a_later_step_raise_an_alarm_that_names_both_checkpoints() -> None:
    known = StaleStateCheck(components())
    assert known.alarms("90", votes(model="a", teacher="t", optimizer="b")) == []
    (alarm,) = known.alarms("110", votes(model="a", teacher="t", optimizer="b"))
    assert "checkpoint-110" in alarm and "checkpoint-90" in alarm and "every tensor" in alarm


def test_a_trained_model_or_optimizer_that_stands_still_raises_and_a_frozen_model_does_not() -> None:
    known = StaleStateCheck(components())
    known.alarms("1", votes(model="a", teacher="t", optimizer="b"))
    (alarm,) = known.alarms("2", votes(model="c", teacher="t", optimizer="b"))
    assert alarm.startswith("optimizer in checkpoint-2 is, bit for bit, what it was in checkpoint-1")
    (alarm,) = known.alarms("3", votes(model="c", teacher="t", optimizer="d"))
    assert alarm.startswith("model in checkpoint-3")
    assert known.alarms("4", votes(model="e", teacher="t", optimizer="f")) == []


def test_one_half_that_differs_is_another_state() -> None:
    known = StaleStateCheck(components())
    first, second = votes(model="a", optimizer="b"), votes(model="a", optimizer="b")
    second[1].tensor_checksums = {"model": "x", "optimizer": "y"}
    known.alarms("1", first)
    assert known.alarms("2", second) == []


@pytest.mark.parametrize(
    ("before", "now", "alarms"), [("7", "7", 0), ("8", "7", 0), ("noon", "noon", 0), ("noon", "one", 1)]
)
def test_the_same_step_saved_again_or_an_earlier_one_is_no_alarm(before: str, now: str, alarms: int) -> None:
    known = StaleStateCheck(components())
    known.alarms(before, votes(model="a", optimizer="b"))
    assert len(known.alarms(now, votes(model="a", optimizer="b"))) == alarms
