"""Every sample of an epoch is trained on exactly once, though the number of ranks changes in the middle of it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.ranks.topology import Topology
from recipes.training import text
from recipes.training.training import train
from tests.conf.configs import config
from tests.support.ranks import run_ranks

WINDOW = 65  # bytes of a sample: the small model's context, and the last target
WINDOWS = 62  # of an epoch: no multiple of the batch, so the last batch reaches into the next epoch
BATCH = 12
LEGS = [(4, 2), (3, 4), (2, 6)]
"""Number of ranks, and the step at which the run ends and goes on with the next number."""


def _train_and_tell(topology: Topology, cfg: dict[str, Any]) -> list[list[int]]:
    """Train, and return the numbers of the windows that this rank was given, step by step."""
    given: list[list[int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text.TextLoader, "next_batch", _spied(text.TextLoader.next_batch, given))
        train(cfg, topology)
    return given


def _spied(next_batch: Any, given: list[list[int]]) -> Any:
    def spy(self: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, following = next_batch(self)
        given.append([int(bytes(row.tolist())[:5]) for row in tokens])
        return tokens, following

    return spy


@pytest.mark.parametrize(
    "dispatched",
    [
        pytest.param((True, True, True), id="dispatched", marks=pytest.mark.full),
        pytest.param((False, False, False), id="each rank its own"),
        pytest.param((True, False, True), id="by turns", marks=pytest.mark.full),
    ],
)
def test_four_then_three_then_two_ranks_see_each_sample_of_an_epoch_once(
    tmp_path: Path, dispatched: tuple[bool, ...]
) -> None:
    path = tmp_path / "text"
    path.write_text("".join(f"{number:05d}".ljust(WINDOW, "x") for number in range(WINDOWS)))
    steps: list[list[int]] = []
    resume: list[str] = []
    for (ranks, last), dispatch in zip(LEGS, dispatched, strict=True):
        overrides = [
            "model.size=nano",
            f"data.path={path}",
            f"data.dispatch={dispatch}",
            f"train.batch_size={BATCH}",
            f"train.steps={last}",
        ]
        cfg = config(tmp_path / f"{ranks}", *overrides, *resume, num_ranks=ranks)
        by_rank = run_ranks(ranks, _train_and_tell, cfg, process_group=True, timeout_s=120.0)
        assert {len(rows) for given in by_rank for rows in given} == {BATCH // ranks}
        steps += [[window for rows in step for window in rows] for step in zip(*by_rank, strict=True)]
        resume = [f"resume={tmp_path / f'{ranks}'}/checkpoints/checkpoint-{last:08d}"]
    assert [len(step) for step in steps] == [BATCH] * LEGS[-1][1]
    seen = [window for step in steps for window in step]
    epoch, begun = seen[:WINDOWS], seen[WINDOWS:]
    assert Counter(epoch) == dict.fromkeys(range(WINDOWS), 1)
    assert len(set(begun)) == len(begun) == LEGS[-1][1] * BATCH - WINDOWS
    assert epoch != sorted(epoch), "shuffled"
