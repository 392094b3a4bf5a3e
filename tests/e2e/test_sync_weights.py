"""The weight sync recipe as a user runs it: what trainers and rollouts hold in the end, and how a failure reads."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hydra import compose, initialize_config_dir

from ckpt.engine.elastic.elastic import ElasticEngine
from ckpt.errors import CheckpointError, RankAbsentError
from ckpt.ranks.topology import Topology
from recipes.support import CONF
from recipes.support.launch import launch
from recipes.training import syncing
from recipes.training.joining import join_rollout
from recipes.training.sync_config import checked_join, checked_sync
from recipes.training.syncing import settle_sync, sync_weights
from recipes.training.training import Training
from tests.conf.configs import composed
from tests.e2e.runs import SMALL, Command, Forked, checkpoint, committed
from tests.support.async_runs import until
from tests.support.covering import sampled

STEPS = 3


def sync(run_dir: Path, *overrides: str, job: Any = sync_weights) -> dict[str, Any]:
    cfg = checked_sync(composed(run_dir, *SMALL, f"train.steps={STEPS}", *overrides, root="sync_weights"))
    summary = launch(job, settle_sync(cfg))
    assert summary is not None
    return summary


def digests(summary: dict[str, Any]) -> set[str]:
    return {summary["trainer"]["digest"], *(rollout["digest"] for rollout in summary["rollouts"])}


def test_kimi_rollouts_end_with_the_trainers_weights(tmp_path: Path) -> None:
    summary = sync(tmp_path, "model.size=tiny", "roles.trainer=2", "roles.rollout=2", "engine.bucket_mib=1")
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
        pytest.param(["parallel=fsdp"], id="fsdp", marks=pytest.mark.full),
        pytest.param(["parallel=pipeline", "model.tie_embeddings=true"], id="tied-pipeline", marks=pytest.mark.full),
        pytest.param(
            ["engine=broadcast", "engine.rollout_dtype=bfloat16", "engine.keep_dtype=['*ln*']"], id="bfloat16"
        ),
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


# Checkpoints

SAVING = ["ckpt=kimi-engine", "save.every=2", "roles.trainer=2", "strategy=two-stage", "engine=broadcast"]


def test_a_run_that_is_killed_goes_on_to_the_bit_with_its_rollouts(tmp_path: Path) -> None:
    """They get the version of the checkpoint before the next step. What all trainers together read of it is one checkpoint."""
    run_dir = tmp_path / "killed"
    with pytest.raises(CheckpointError, match="was killed by SIGKILL"):
        sync(run_dir, *SAVING, "train.steps=100000", job=_is_killed_behind_two_saves)
    newest = committed(run_dir)[-1]
    step = int(newest.name.removeprefix("checkpoint-"))
    more = f"train.steps={step + 2}"
    summary = sync(run_dir, *SAVING, more, "resume=latest")
    assert summary["resumed_from"] == str(newest)
    assert [one["step"] for one in summary["updates"]] == [step, step + 1, step + 2]
    assert len(digests(summary)) == 1
    assert [one["version"] for one in summary["rollouts"]] == [step + 2]
    straight = sync(tmp_path / "straight", "roles.trainer=2", more)
    assert summary["trainer"] == straight["trainer"]
    assert summary["losses"] == straight["losses"][step:]

    resumed = f"resume={newest}"
    alone = sync(tmp_path / "alone", "ckpt=zarr", resumed, f"train.steps={step}", "roles.rollout=2")
    assert alone["bytes_read"] == alone["bytes_needed"] == summary["bytes_read"] == summary["bytes_needed"] // 2
    assert {one["version"] for one in alone["rollouts"]} == {step}
    assert len(digests(alone)) == 1


def _is_killed_behind_two_saves(cfg: dict[str, Any], topology: Topology) -> dict[str, Any] | None:
    """Every rank ends at about the same moment, wherever it is; no launcher has to tell it."""

    def kill() -> None:
        until(lambda: len(committed(Path(cfg["run_dir"]))) > 1, seconds=90.0)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    return sync_weights(cfg, topology)


@pytest.mark.full
def test_trainers_of_any_number_read_one_checkpoint(tmp_path: Path) -> None:
    own = ["ckpt=kimi-engine", "strategy=two-stage", "engine=broadcast", "train.steps=2"]
    sync(tmp_path / "saved", *own, "roles.trainer=2")
    resumed = f"resume={checkpoint(tmp_path / 'saved', 2)}"
    found = [sync(tmp_path / f"{n}", *own, resumed, f"roles.trainer={n}") for n in (1, 2, 3, 4)]
    assert len({one["bytes_read"] for one in found}) == 1
    assert len(set.union(*map(digests, found))) == 1


@pytest.mark.parametrize(
    "overrides",
    [
        ["publish=saved", "save.mode=async"],
        pytest.param(["publish=saved", "parallel=fsdp"], marks=pytest.mark.full),
        pytest.param(["publish=saved", "parallel=pipeline", "model.tie_embeddings=true"], marks=pytest.mark.full),
        pytest.param(["ckpt=zarr", "save.incremental=true"], marks=pytest.mark.full),
        pytest.param(["ckpt=tensorstore", "save.mode=async", "save.overlap=true"], marks=pytest.mark.full),
    ],
)
def test_what_rollouts_hold_is_the_same_however_it_is_saved_and_published(overrides: list[str], tmp_path: Path) -> None:
    own = [one for one in overrides if not one.startswith(("ckpt", "save", "publish"))]
    saved = sync(tmp_path / "saved", *SAVING, *overrides)
    assert digests(saved) == digests(sync(tmp_path / "not", "roles.trainer=2", "engine=broadcast", *own))
    assert [one["step"] for one in saved["checkpoints"]] == [2, 3]


@pytest.mark.full
def test_colocated_trainers_save_and_resume_too(tmp_path: Path) -> None:
    own = ["engine=naive", "roles.colocated=true", "ckpt=kimi-engine", "save.every=2"]
    sync(tmp_path, *own, "train.steps=2")
    summary = sync(tmp_path, *own, "train.steps=3", "resume=latest")
    assert digests(summary) == digests(sync(tmp_path / "straight", *own))
    assert [one["step"] for one in summary["updates"]] == [2, 3]


def _is_told_at_step_2(cfg: dict[str, Any], topology: Topology) -> dict[str, Any] | None:
    """As launchers do it: all ranks are told, at about the same time; a rollout when it has the weights of step 1."""
    step, receive = Training.step, ElasticEngine.receive_into

    def trains(training: Training) -> float:
        if training.steps_done == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(training)

    async def receives(member: ElasticEngine, live: Any, *args: Any) -> Any:
        if live.version is not None and live.version.step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return await receive(member, live, *args)

    with patch.object(Training, "step", trains), patch.object(ElasticEngine, "receive_into", receives):
        return sync_weights(cfg, topology)


@pytest.mark.full
@pytest.mark.parametrize(
    "own", [["publish=saved", "save.mode=async"], ["ckpt=zarr"], ["publish=saved", "roles.trainer=1"]]
)
def test_trainers_that_are_told_to_end_save_the_step_and_end_their_rollouts(tmp_path: Path, own: list[str]) -> None:
    overrides = ["ckpt=kimi-engine", "roles.trainer=2", "save.every=100", "train.steps=4", "engine=broadcast", *own]
    with pytest.raises(SystemExit) as ended:
        sync(tmp_path, *overrides, job=_is_told_at_step_2)
    assert ended.value.code == 143
    assert committed(tmp_path) == [checkpoint(tmp_path, 2)]
    assert not (tmp_path / "rendezvous.json").exists()
    rest = sync(tmp_path, *overrides, "resume=latest")
    assert rest["first_step"] == 3
    whole = sync(tmp_path / "whole", *overrides)
    assert digests(rest) == digests(whole) and rest["losses"] == whole["losses"][2:]


# Rollouts that come to a running job, each a command of its own

OPENED, WENT = 4, 6
"""Steps: before the first all comers have come; before the second some are told to go."""


def _with_comers(cfg: dict[str, Any], topology: Topology) -> dict[str, Any] | None:
    """The run, which rollouts find when some versions are out, and which waits for them."""
    open_, step_ = syncing._Separate.open, syncing._Trainer._step
    victims = json.loads((Path(cfg["run_dir"]) / "victims.json").read_text())

    def step(trainer: syncing._Trainer, number: int) -> None:
        assert isinstance(trainer.updates, syncing._Separate)
        if number == OPENED:
            open_(trainer.updates, Path(cfg["run_dir"]))
            until(lambda: trainer.updates.sender._membership.num_requests() == 4, "four rollouts", seconds=100.0)  # type: ignore[union-attr]
        if number == WENT:
            for pid, signum in victims:
                os.kill(pid, signum)
        step_(trainer, number)

    syncing._Separate.open = lambda *_: None  # type: ignore[method-assign]
    syncing._Trainer._step = step  # type: ignore[method-assign]
    return sync_weights(cfg, topology)


@sampled("typed", [False, True])
def test_rollouts_come_to_a_running_job_and_leave_it_in_any_way(tmp_path: Path, typed: bool) -> None:
    """They come of a process that has torch loaded; if `typed`, one of them is the command as a user types it."""
    run = f"run={tmp_path}"
    leaves, told, killed = (
        Forked("recipes.join_rollout", [run, *more], tmp_path) for more in (["updates=2"], [], ["catch_up=false"])
    )
    stays: Command | Forked
    if typed:
        stays = Command(["-m", "recipes.join_rollout", run], (), tmp_path, {"OMP_NUM_THREADS": "1"})
    else:
        stays = Forked("recipes.join_rollout", [run], tmp_path)
    victims = [[told.pid, signal.SIGTERM], [killed.pid, signal.SIGKILL]]
    (tmp_path / "victims.json").write_text(json.dumps(victims))
    summary = sync(tmp_path, "train.steps=10", "ckpt=kimi-engine", "save.every=3", job=_with_comers)
    for one in (stays, leaves, told):
        one.ended()
        assert (one.code, one.err) == (0, ""), one.err
        assert f"caught up with version 3 from {checkpoint(tmp_path, 3)}" in one.out
        assert "has version 4, one of 5 rollouts" in one.out
    assert killed.ended().code == -signal.SIGKILL
    assert "caught up" not in killed.out
    assert "has left with version 5 after 2 updates" in leaves.out
    assert "has left with version" in told.out and "version 10" not in told.out
    digest = summary["trainer"]["digest"]
    assert f"holds version 10 with the trainers' digest {digest}, after 7 updates" in stays.out
    assert [one["version"] for one in summary["rollouts"]] == [10, 10]
    assert digests(summary) == {digest}
    assert [one["num_rollouts"] for one in summary["updates"]][:5] == [1, 1, 1, 5, 5]
    assert [one["num_rollouts"] for one in summary["updates"]][7:] == [2, 2, 2]
    assert not (tmp_path / "rendezvous.json").exists()


def test_a_rollout_of_a_run_that_is_not_there_says_so_in_a_sentence(tmp_path: Path) -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = checked_join(compose("join_rollout", [f"run={tmp_path}", "wait_s=0"]))
    with pytest.raises(RankAbsentError) as told:
        join_rollout(cfg)
    assert str(told.value).startswith(
        f"there is no {tmp_path / 'rendezvous.json'}: recipes.sync_weights is not running"
    )


# A launcher ends what it has started when one of that ends


def _dies(cfg: dict[str, Any], topology: Topology) -> dict[str, Any]:
    if topology.rank == 1:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return sync_weights(cfg, topology)


def test_a_rollout_that_is_killed_ends_the_run_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="rank 1 was killed by SIGKILL"):
        sync(tmp_path, "train.steps=100000", job=_dies)
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.full
def test_as_a_command_it_says_what_it_does(tmp_path: Path) -> None:
    start = ["-m", "recipes.sync_weights", f"output_dir={tmp_path / 'run'}", *SMALL]
    command = Command(start, ("train.steps=2",), tmp_path, {}).ended()
    assert (command.code, command.err) == (0, "")
    assert "step      1/2  loss" in command.out
    assert "1 rollout holds version 2 with the trainers' digest" in command.out
