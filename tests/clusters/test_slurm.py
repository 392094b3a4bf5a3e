"""Recipes under a real Slurm: `srun` alone makes ranks, jobs are requeued and go on to the bit, and sweeps run as jobs."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clusters.slurm_cluster import PYTHON, SlurmCluster, why_not

REPO = Path(__file__).parents[2]
JOB = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --requeue --open-mode=append --time={minutes}
#SBATCH --output={folder}/job.out {options}

srun --kill-on-bad-exit=1 {python} -m recipes.train output_dir={folder}/run resume=latest model.size=tiny {overrides}
code=$?
[ $code -ne 0 ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt 20 ] && scontrol requeue "$SLURM_JOB_ID"
exit $code
"""
"""As docs/guides/clusters.md shows it."""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    if (reason := why_not()) is not None:
        pytest.skip(f"Slurm: {reason}")
    with SlurmCluster(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


def summary_of(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return summary


def submit(slurm: SlurmCluster, folder: Path, overrides: str, *, options: str = "", minutes: int = 10) -> str:
    folder.mkdir(exist_ok=True)
    script = folder / "job.sh"
    script.write_text(JOB.format(folder=folder, python=PYTHON, overrides=overrides, options=options, minutes=minutes))
    return slurm.run("sbatch", "--parsable", str(script), cwd=REPO).strip()


def saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in (folder / "run" / "checkpoints").glob("checkpoint-*"))


def wait_for_step(slurm: SlurmCluster, folder: Path, job: str, step: int) -> None:
    deadline = time.monotonic() + 300
    while max(saved_steps(folder), default=0) < step:
        state = slurm.state_of(job).get("JobState")
        assert time.monotonic() < deadline and state not in ("FAILED", "COMPLETED"), (state, (folder / "job.out").read_text())
        time.sleep(0.05)


@pytest.fixture(scope="module")
def alone(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run of 60 steps on two nodes comes to, which nothing has interrupted, started by `srun` alone."""
    folder = tmp_path_factory.mktemp("alone")
    command = [PYTHON, "-m", "recipes.train", f"output_dir={folder}/run", "model.size=tiny", "train.steps=60", "save.every=30"]
    said = slurm.run("srun", "-N2", "-n2", "--ntasks-per-node=1", *command, cwd=REPO)
    assert "trained 60 of 60 steps" in said
    return summary_of(folder)


def test_tasks_of_srun_are_ranks(alone: dict[str, Any]) -> None:
    assert alone["world_size"] == 2
    assert alone["final_step"] == 60


@pytest.mark.full
def test_a_job_that_is_told_to_end_is_requeued_and_goes_on_to_the_bit(slurm: SlurmCluster, tmp_path: Path, alone: dict[str, Any]) -> None:
    """The ranks save the step at hand, and the script has the job queued again."""
    job = submit(slurm, tmp_path, "train.steps=60 save.every=5")
    wait_for_step(slurm, tmp_path, job, 5)
    slurm.run("scancel", "--signal=TERM", job)
    ended = slurm.wait_for(job, "COMPLETED", "FAILED", "CANCELLED", seconds=400)
    said = (tmp_path / "job.out").read_text()
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "1"), said
    assert "SIGTERM: the run ends at step" in said
    assert summary_of(tmp_path)["state_digest"] == alone["state_digest"]


@pytest.mark.full
def test_a_job_near_its_time_limit_saves_and_goes_on_in_the_next(slurm: SlurmCluster, tmp_path: Path) -> None:
    """As docs/guides/clusters.md has it, with `#SBATCH --signal=TERM@<seconds>`."""
    job = submit(slurm, tmp_path, "train.steps=1000000 save.every=1000000", options="\n#SBATCH --signal=TERM@80", minutes=2)
    said, deadline = "", time.monotonic() + 400
    while (resumed := re.search(r"restored \S+ at step (\d+)", said)) is None:
        assert time.monotonic() < deadline, said
        time.sleep(0.5)
        said = (tmp_path / "job.out").read_text() if (tmp_path / "job.out").exists() else ""
    slurm.run("scancel", job)
    ended = re.search(r"SIGTERM: the run ends at step (\d+)", said)
    assert ended is not None and ended[1] == resumed[1] != "0", said


@pytest.mark.full
def test_a_job_whose_node_is_lost_in_a_save_goes_on_elsewhere_to_the_bit(
    slurm: SlurmCluster, tmp_path: Path, alone: dict[str, Any]
) -> None:
    job = submit(slurm, tmp_path, "train.steps=60 save.every=1")
    wait_for_step(slurm, tmp_path, job, 7)
    before = slurm.state_of(job)["NodeList"]
    slurm.lose(slurm.nodes[1])
    ended = slurm.wait_for(job, "COMPLETED", "FAILED", "CANCELLED", seconds=400)
    said = (tmp_path / "job.out").read_text()
    assert ended["JobState"] == "COMPLETED" and int(ended["Restarts"]) >= 1, said
    assert ended["NodeList"] != before
    assert summary_of(tmp_path)["state_digest"] == alone["state_digest"]


@pytest.mark.full
def test_jobs_of_a_sweep_are_jobs_of_slurm(slurm: SlurmCluster, tmp_path: Path) -> None:
    overrides = ["ckpt=zarr,tensorstore", f"output_dir={tmp_path}/sweep", "model.size=tiny", "train.steps=4", "save.every=2"]
    command = [PYTHON, "-m", "recipes.train", "-m", "hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=10", *overrides]
    said = slurm.run(*command, cwd=tmp_path, environment={"PYTHONPATH": str(REPO)})
    summaries = sorted(tmp_path.glob("sweep/*/summary.json"))
    assert len(summaries) == 2, said
    assert {json.loads(one.read_text())["final_step"] for one in summaries} == {4}
    assert (tmp_path / "sweep" / "sweep.json").exists()
