"""A training whose saves go to memory first: all ranks are killed, and the next go on from there to the bit, in other layouts, too."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from ckpt.ranks.topology import Topology
from recipes.training.training import Training, train
from tests.e2e.runs import committed, run

STEPS = 6
KILLED_AT = 4


def _killed(cfg: dict[str, Any], topology: Topology) -> Any:
    """Train, and be killed after a save that is in memory alone."""
    save = Training.save

    def saving(training: Training, coordinator: Any, step: int, *others: Any) -> bool:
        is_saved = save(training, coordinator, step, *others)
        if step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
        return is_saved

    with patch.object(Training, "save", saving):
        return train(cfg, topology)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ((2, ["parallel=fsdp"]), (2, ["parallel=fsdp"])),
        pytest.param((3, ["parallel=fsdp", "ckpt=tensorstore"]), (2, ["parallel=fsdp", "strategy=two-stage"]), marks=pytest.mark.full),
        pytest.param((2, ["parallel=ddp", "save.mode=async"]), (1, ["parallel=single", "ckpt=kimi-engine"]), marks=pytest.mark.full),
    ],
    ids=["alike", "fewer", "one"],
)
def test_ranks_that_are_killed_go_on_from_memory_to_the_bit(
    tmp_path: Path, first: tuple[int, list[str]], then: tuple[int, list[str]]
) -> None:
    always = [f"train.steps={STEPS}", "train.batch_size=6", "save.every=3"]
    tiers = [*always, "tiers=memory", f"tiers.memory.path={tmp_path}", "tiers.memory.keep_s=60"]
    straight = run(tmp_path / "straight", *always, *then[1], ranks=then[0])
    with pytest.raises(Exception, match="SIGKILL|killed|signal"):
        run(tmp_path / "run", *tiers, *first[1], ranks=first[0], job=_killed)
    resumed = run(tmp_path / "run", *tiers, *then[1], "resume=latest", ranks=then[0])
    lost = KILLED_AT + 1 - resumed["first_step"]
    assert 0 <= lost <= ("save.mode=async" in first[1]), "a save in the background may not be committed yet"
    assert resumed["resumed_from"] == f"hosts://memory/checkpoint-{KILLED_AT - lost:08d}"
    if first[0] == then[0]:
        assert resumed["state_digest"] == straight["state_digest"]
    names = [f"checkpoint-{step:08d}" for step in (3, resumed["first_step"], STEPS)]
    found = [path.name for path in committed(tmp_path / "run")]
    assert found in (names, names[1:]), "the copy of step 3 was on its way at the end of the ranks, or had arrived"
    assert not [*tmp_path.glob("ckpt-*/*")], "the run has ended, and its memory is there"


def test_a_run_that_finds_nothing_in_any_tier_begins_anew(tmp_path: Path) -> None:
    begun = run(tmp_path / "run", "train.steps=2", "tiers=memory", f"tiers.memory.path={tmp_path}", "resume=latest")
    assert begun["first_step"] == 1 and len(committed(tmp_path / "run")) == 1
