"""Layouts that cut inside a model of a user's own, by a plan: they train as the whole model does, and load what it saved."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt.ranks.topology import Topology
from recipes.support import CONF
from recipes.training.training import train
from tests.conf.configs import config
from tests.support.ranks import run_ranks

EXAMPLE = CONF.parent / "examples" / "own_project"
OWN = [
    f"data._target_={__name__}.points", "model._target_=own_project.model.Net", "~model.size", "~model.tie_embeddings", "model.dropout=0",
    "+model.classes=3", "+model.width=16", "+model.depth=2",
]  # fmt: skip
PLAN, STAGES = "parallel.plan._target_=own_project.plans.tensor_plan", "parallel.stages._target_=own_project.plans.keep_stage"


def points(**of_text: Any) -> Any:
    """The example's data, whatever keys the config has."""
    from own_project.data import make_loader  # type: ignore[import-not-found]

    return make_loader(points=90, classes=3, noise=0.1)


class Normed(nn.Module):
    """Batch norm keeps statistics of each rank's own rows; the first rank's count."""

    def __init__(self, *, classes: int, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, classes))
        self.loss = nn.CrossEntropyLoss()

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.body(points)


class Stepping(nn.Module):
    """Calls its parts in `train_step`, and has no forward."""

    def __init__(self, *, classes: int, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(2, width), nn.Linear(width, classes)

    @property
    def blocks(self) -> list[nn.Module]:
        return [self.enter]

    def train_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(self.leave(self.enter(batch[0]).relu()), batch[1])


def _train(topology: Topology, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    sys.path.insert(0, str(EXAMPLE))
    return [train(cfg, topology) for cfg in runs]


@pytest.mark.parametrize(
    ("layout", "plan", "ranks"),
    [
        ("ddp_tp", PLAN, 2),
        ("pipeline", STAGES, 2),
        pytest.param("fsdp", "parallel.dp=null", 2, marks=pytest.mark.full),
        pytest.param("tp_fsdp", PLAN, 4, marks=pytest.mark.full),
        pytest.param("ddp_pipeline", STAGES, 4, marks=pytest.mark.full),
    ],
)
def test_a_plan_cuts_a_model_that_knows_of_none(
    tmp_path: Path, layout: str, plan: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    whole = train(config(tmp_path / "whole", *OWN, "train.steps=3"), Topology.alone())
    path = tmp_path / "whole" / "checkpoints" / "checkpoint-00000003"
    cut = [*OWN, f"parallel={layout}", plan]
    runs = [
        config(tmp_path / "cut", *cut, "train.steps=3", num_ranks=ranks),
        config(tmp_path / "on", *cut, "train.steps=4", f"resume={path}", num_ranks=ranks),
    ]
    first, then = run_ranks(ranks, _train, runs, process_group=True, timeout_s=120.0)[0]
    assert first["losses"] == pytest.approx(whole["losses"], rel=1e-4), "dropout apart, as the whole model"
    assert then["loaded_digest"] == whole["state_digest"] and len(then["losses"]) == 1


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("Normed", "ddp"),
        ("Stepping", "fsdp"),
        pytest.param("Stepping", "ddp", marks=pytest.mark.full),
        pytest.param("Normed", "accelerate", marks=pytest.mark.full),
    ],
)
def test_buffers_of_each_rank_and_a_step_without_forward_go_on_to_the_bit(
    tmp_path: Path, model: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    own = [*OWN, f"model._target_={__name__}.{model}", f"parallel={layout}"]
    runs = [
        config(tmp_path / "straight", *own, "train.steps=6", num_ranks=2),
        config(tmp_path / "parts", *own, "train.steps=3", num_ranks=2),
        config(tmp_path / "parts", *own, "train.steps=6", "resume=latest", num_ranks=2),
    ]
    straight, _, resumed = run_ranks(2, _train, runs, process_group=True, timeout_s=120.0)[0]
    assert resumed["losses"] == straight["losses"][3:] and resumed["state_digest"] == straight["state_digest"]
