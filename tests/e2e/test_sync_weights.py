"""The weight sync recipe as a user runs it: what trainers and rollouts hold in the end, and how a failure reads."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from ckpt.errors import CheckpointError
from ckpt.topology import Topology
from recipes.launch import launch
from recipes.syncing import checked_sync, sync_weights
from tests.conf.configs import composed
from tests.e2e.runs import TEXT, Command

STEPS = 3


def sync(run_dir: Path, *overrides: str, job: Any = sync_weights) -> dict[str, Any]:
    cfg = composed(run_dir, f"data.path={TEXT}", f"train.steps={STEPS}", *overrides, root="sync_weights")
    summary = launch(job, checked_sync(cfg))
    assert summary is not None
    return summary


def digests(summary: dict[str, Any]) -> set[str]:
    return {summary["trainer"]["digest"], *(rollout["digest"] for rollout in summary["rollouts"])}


def test_kimi_rollouts_end_with_the_trainers_weights(tmp_path: Path) -> None:
    summary = sync(tmp_path, "roles.trainer=2", "roles.rollout=2", "engine.bucket_mib=1")
    assert len(digests(summary)) == 1
    assert summary["trainer"]["version"] == STEPS
    assert [(one["rank"], one["version"]) for one in summary["rollouts"]] == [(2, STEPS), (3, STEPS)]
    assert [one["step"] for one in summary["updates"]] == [1, 2, 3]
    assert all(one["num_buckets"] == 5 for one in summary["updates"])
    assert len(summary["losses"]) == STEPS
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def test_what_rollouts_get_does_not_depend_on_how_it_comes(tmp_path: Path) -> None:
    """Sharded, cut into stages, colocated: one model, so one digest for each number of trainers."""
    ways = {
        "plain": ["roles.rollout=1"],
        "colocated": ["roles.colocated=true"],
        "naive": ["engine=naive", "roles.colocated=true"],
    }
    found = [digests(sync(tmp_path / name, *overrides)) for name, overrides in ways.items()]
    assert len(found[0]) == 1
    assert found == [found[0]] * len(ways)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["parallel=fsdp"], id="fsdp"),
        pytest.param(["parallel=pipeline", "model.tie_embeddings=true"], id="tied-pipeline"),
        pytest.param(
            ["engine=broadcast", "engine.rollout_dtype=bfloat16", "engine.keep_dtype=['*ln*']"], id="bfloat16"
        ),
        pytest.param(["engine.transport=update"], id="update", marks=pytest.mark.full),
        pytest.param(["parallel=tp_fsdp", "roles.trainer=4"], id="tp_fsdp", marks=pytest.mark.full),
        pytest.param(["parallel=hsdp", "roles.trainer=4"], id="hsdp", marks=pytest.mark.full),
        pytest.param(["parallel=ddp_tp", "roles.trainer=4"], id="ddp_tp", marks=pytest.mark.full),
        pytest.param(["parallel=ddp_pipeline", "roles.trainer=4"], id="ddp_pipeline", marks=pytest.mark.full),
        pytest.param(["parallel=accelerate"], id="accelerate", marks=pytest.mark.full),
    ],
)
def test_every_layout_of_the_trainers_publishes_the_whole_model(overrides: list[str], tmp_path: Path) -> None:
    summary = sync(tmp_path, "roles.trainer=2", *overrides)
    assert len(digests(summary)) == 1


def _dies(cfg: dict[str, Any], topology: Topology) -> dict[str, Any]:
    if topology.rank == 1:
        import os
        import threading

        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return sync_weights(cfg, topology)


def test_a_rollout_that_is_killed_ends_the_run_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="rank 1 was killed by SIGKILL"):
        sync(tmp_path, "train.steps=100000", job=_dies)
    assert not (tmp_path / "summary.json").exists()


def test_as_a_command_it_says_what_it_does(tmp_path: Path) -> None:
    start = ["-m", "recipes.sync_weights", f"output_dir={tmp_path / 'run'}", f"data.path={TEXT}"]
    command = Command(start, ("train.steps=2",), tmp_path, {}).ended()
    assert (command.code, command.err) == (0, "")
    assert "step      1/2  loss" in command.out
    assert "1 rollouts hold version 2 with the trainers' digest" in command.out
