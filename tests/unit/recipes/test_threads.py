"""How many threads a rank may use: of cores, quotas, and what Slurm was asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ckpt.cli.environment import torch_variables
from recipes.support import ranks

BOUND = len(os.sched_getaffinity(0))


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Control groups of a container: its own one has no limit, the one above has."""
    (tmp_path / "job" / "step").mkdir(parents=True)
    own = tmp_path / "own"
    own.write_text("9:name=systemd:/elsewhere\n0::/job/step\n")
    (tmp_path / "job" / "step" / "cpu.max").write_text("max 100000\n")
    monkeypatch.setattr(ranks, "_GROUPS", tmp_path)
    monkeypatch.setattr(ranks, "_OWN_GROUPS", own)
    for name in ("OMP_NUM_THREADS", "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", BOUND), ("150000 100000", 1), ("20000 100000", 1), ("9900000 100000", BOUND)])
def test_cores_are_those_of_the_affinity_within_the_quota(groups: Path, quota: str, cores: int) -> None:
    (groups / "job" / "cpu.max").write_text(quota)
    assert ranks.usable_cores() == min(cores, BOUND)


@pytest.mark.parametrize(
    ("of_task", "num_ranks", "threads"),
    [(None, 1, 8), (None, 3, 2), (None, 20, 1), ("8", 4, 8), ("4", 2, 4), ("junk", 2, 4)],
    ids=["alone", "three", "too many", "bound to the 8 cores of this task", "not bound: all tasks see all cores", "not as Slurm writes it"],
)
def test_ranks_share_the_cores_of_their_machine_unless_slurm_has_bound_each_to_its_own(
    monkeypatch: pytest.MonkeyPatch, groups: Path, of_task: str | None, num_ranks: int, threads: int
) -> None:
    set_to: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    monkeypatch.setattr(ranks, "usable_cores", lambda: 8)
    if of_task is not None:
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", of_task)
    ranks.take_threads(num_ranks)
    assert set_to == [threads]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    ranks.take_threads(num_ranks)
    assert set_to == [threads], "the user has said how many"
    assert ranks.threads_of(2) is None


def test_ranks_that_we_start_in_one_task_share_its_cores(monkeypatch: pytest.MonkeyPatch, groups: Path) -> None:
    monkeypatch.setattr(ranks, "usable_cores", lambda: 8)
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")
    assert ranks.threads_of(4) == 2


def test_torch_is_never_given_more_threads_than_it_has(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    for cores in (16, 4, 2):
        monkeypatch.setattr(ranks, "usable_cores", lambda cores=cores: cores)
        ranks.take_threads(1)
    assert set_to == [2]


def test_how_threads_wait_is_the_users_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    ours = torch_variables()
    assert (ours["OMP_WAIT_POLICY"], ours["GOMP_SPINCOUNT"]) == ("PASSIVE", "5000")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    theirs = torch_variables()
    assert theirs["OMP_WAIT_POLICY"] == "ACTIVE" and "GOMP_SPINCOUNT" not in theirs
