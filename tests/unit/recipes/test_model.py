"""How a batch becomes a loss, and what a model may leave out."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ckpt.errors import ConfigurationError
from recipes.support.config import loss_of, made_model
from recipes.training.model import Model, Step, member

BATCH = torch.ones(3, 2), torch.tensor([0, 1, 0])


class Plain(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)


class WithLoss(Plain):
    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target) + 1


class WithStep(Plain):
    def train_step(self, batch: Any) -> torch.Tensor:
        return self(batch["x"]).mean()


class Returning(Plain):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
        return SimpleNamespace(loss=F.cross_entropy(super().forward(x), labels))


class Scaled(Plain):
    """Draws its weights from all generators, and takes no seed."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = random.random() + np.random.rand()


def test_a_loss_is_that_of_the_config_or_the_model_s() -> None:
    plain = WithLoss()
    expected = F.cross_entropy(plain(BATCH[0]), BATCH[1])
    assert Step(plain)(BATCH) == expected + 1
    for node in ({"_target_": "torch.nn.CrossEntropyLoss"}, {"_target_": "torch.nn.functional.cross_entropy"}):
        assert Step(plain, loss_of(node))(BATCH) == expected
    assert Step(WithStep())({"x": BATCH[0]}).shape == ()
    assert Step(Returning())({"x": BATCH[0], "labels": BATCH[1]}).dim() == 0


def test_every_member_has_a_default() -> None:
    names = list(Model.__annotations__)
    assert names == ["loss", "train_step", "blocks", "tensor_plan", "keep_stage"]
    assert [member(nn.Linear(1, 1), name) for name in names] == [None, None, (), None, None]


@pytest.mark.parametrize(
    ("make", "batch", "said"),
    [
        (lambda: Step(Plain()), None, r"Plain has neither loss\(output, target\) nor train_step\(batch\): give loss=cross_entropy, "),
        (lambda: Step(WithStep(), F.cross_entropy), None, "loss: WithStep.train_step computes the loss already"),
        (lambda: Step(WithLoss()), (1, 2, 3), r"a batch is a tuple of 3; expected \(inputs, target\)"),
        (lambda: Step(WithLoss()), BATCH[0], r"a batch is a tensor of shape \(3, 2\); expected"),
        (lambda: Step(Returning()), BATCH, r"Returning made a NoneType of a batch, a tuple of 2; expected a loss"),
        (lambda: Step(Plain(), lambda output, target: output), BATCH, r"Plain made a tensor of shape \(3, 2\) of a batch"),
    ],
)
def test_where_no_loss_follows_one_sentence_says_what_to_give(make: Any, batch: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make()(batch)


def test_a_model_without_a_seed_has_equal_weights_for_equal_seeds_and_the_generators_go_on() -> None:
    node = {"_target_": f"{__name__}.Scaled"}
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    first, other, again = (made_model(node, seed) for seed in (0, 1, 0))
    after = random.random(), np.random.rand(), torch.rand(1)
    assert torch.equal(first.weight, again.weight) and first.scale == again.scale  # type: ignore[arg-type]
    assert not torch.equal(first.weight, other.weight) and first.scale != other.scale  # type: ignore[arg-type]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    assert after == (random.random(), np.random.rand(), torch.rand(1))
