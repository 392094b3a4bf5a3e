"""`launch=ray` on a Ray of several nodes on this machine: a node that is lost in a save, a launcher that is told to end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from ckpt.catalog.verify import verify_checkpoint
from ckpt.ranks.sigterm import TOLD_TO_END

REPO = Path(__file__).parents[2]
RUN = ("model.size=tiny", "train.steps=30", "save.every=2", "save.keep_last=null")
_NODE_CPUS = 2


class RayCluster:
    """A head without processors, and nodes with two each.

    Attributes:
        address: of the head.
        nodes: that have not been lost.
    """

    def __init__(self, num_nodes: int) -> None:
        from ray.cluster_utils import Cluster

        options: dict[str, Any] = {"include_dashboard": False, "object_store_memory": 100 << 20}
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **options})
        self._options = options
        self.address = self._cluster.address
        self.nodes: list[Any] = []
        for _ in range(num_nodes):
            self.add()

    def add(self) -> None:
        self.nodes.append(self._cluster.add_node(num_cpus=_NODE_CPUS, object_store_memory=self._options["object_store_memory"]))

    def lose(self, with_actor: psutil.Process | None = None) -> None:
        """Kill a raylet, and with it the processes of its actors: the last one that was added, or that of an actor."""
        raylets = {one.all_processes["raylet"][0].process.pid: one for one in self.nodes}
        node = self.nodes[-1] if with_actor is None else raylets[with_actor.ppid()]
        self.nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        self._cluster.shutdown()


@pytest.fixture
def ray_cluster() -> Iterator[RayCluster]:
    pytest.importorskip("ray", reason="needs Ray: pip install -e '.[ray]'")
    cluster = RayCluster(2)
    try:
        yield cluster
    finally:
        cluster.close()


@contextmanager
def started(cluster: RayCluster, folder: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "recipes.train", "launch=ray", f"output_dir={folder}/run", *RUN, *overrides]
    environment = {**os.environ, "RAY_ADDRESS": cluster.address, "OMP_NUM_THREADS": "1"}
    run = subprocess.Popen(command, cwd=REPO, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield run
    finally:
        run.kill()
        run.wait()


def wait_until(run: subprocess.Popen[str], is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not is_so():
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def is_inside_a_save(root: Path) -> bool:
    """Whether a root has three checkpoints, and another on its way."""
    names = [path.name for path in root.iterdir()] if root.exists() else []
    return sum(bool(re.fullmatch(r"checkpoint-\d+", name)) for name in names) >= 3 and any(".unpublished" in name for name in names)


def summary_of(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "run" / "summary.json").read_text())
    return summary


@pytest.mark.full
def test_a_run_whose_node_is_lost_in_a_save_goes_on_with_the_ranks_that_are_left_to_the_bit(
    ray_cluster: RayCluster, tmp_path: Path
) -> None:
    with started(ray_cluster, tmp_path, "launch.nproc_per_node=4") as run:
        wait_until(run, lambda: is_inside_a_save(tmp_path / "run" / "checkpoints"))
        ray_cluster.lose()
        said, _ = run.communicate(timeout=400)
    assert run.returncode == 0, said
    (restart,) = [line for line in said.splitlines() if line.endswith("; the ranks start again")]
    assert "rank" in restart, restart
    print(restart)
    summary = summary_of(tmp_path)
    assert (summary["world_size"], summary["final_step"]) == (2, 30)
    resumed = Path(summary["resumed_from"])
    overrides = [f"output_dir={tmp_path}/alone/run", *RUN, f"resume={resumed}", "launch.nproc_per_node=2"]
    alone = [sys.executable, "-m", "recipes.train", *overrides]
    subprocess.run(alone, cwd=REPO, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True, timeout=300)
    assert summary_of(tmp_path / "alone")["state_digest"] == summary["state_digest"]


@pytest.mark.full
def test_a_launcher_that_is_told_to_end_has_its_ranks_save_and_end(ray_cluster: RayCluster, tmp_path: Path) -> None:
    with started(ray_cluster, tmp_path, "launch.nproc_per_node=2", "train.steps=100000", "save.every=100000") as run:
        wait_until(run, lambda: (tmp_path / "run" / "checkpoints").exists())
        time.sleep(15.0)
        run.send_signal(signal.SIGTERM)
        said, _ = run.communicate(timeout=120)
    assert run.returncode == TOLD_TO_END, said
    assert "SIGTERM: the run ends at step" in said
    (saved,) = (tmp_path / "run" / "checkpoints").glob("checkpoint-*")
    assert verify_checkpoint(saved) == []


@pytest.mark.full
def test_too_little_room_is_one_sentence(ray_cluster: RayCluster, tmp_path: Path) -> None:
    with started(ray_cluster, tmp_path, "launch.nproc_per_node=6", "launch.least_ranks=5", "launch.max_restarts=0") as run:
        said, _ = run.communicate(timeout=200)
    assert run.returncode == 1
    assert "launch=ray: the cluster has room for 4 ranks with 1 CPU each, and the run needs 6 (launch.least_ranks" in said


@pytest.mark.full
def test_jobs_of_a_sweep_run_on_the_nodes_of_a_cluster(ray_cluster: RayCluster, tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_ray_launcher", reason="needs Hydra's launcher for Ray: pip install hydra-ray-launcher")
    overrides = ["ckpt=zarr,tensorstore", f"output_dir={tmp_path}/sweep", "model.size=nano", "train.steps=4", "save.every=2"]
    command = [sys.executable, "-m", "recipes.train", "-m", "hydra/launcher=ray", f"hydra.launcher.ray.init.address={ray_cluster.address}"]
    command += ["+hydra.launcher.ray.init.object_store_memory=null"]  # the launcher gives one, which Ray takes for a new cluster alone
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run([*command, *overrides], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400)
    summaries = sorted(tmp_path.glob("sweep/*/summary.json"))
    assert len(summaries) == 2, done.stdout + done.stderr
    assert {json.loads(one.read_text())["final_step"] for one in summaries} == {4}
    assert (tmp_path / "sweep" / "sweep.json").exists()


@pytest.mark.full
def test_ray_train_calls_the_loop_again_after_a_node_is_lost_in_a_save(ray_cluster: RayCluster, tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason="needs Ray Train: pip install 'ray[train]'")
    saves = tmp_path / "saves"
    command = [sys.executable, "examples/ray_train.py", "--folder", str(saves), "--steps", "60", "--every", "1", "--workers", "2", "4"]
    environment = {**os.environ, "RAY_ADDRESS": ray_cluster.address, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=REPO, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        try:
            wait_until(run, lambda: is_inside_a_save(saves))
            newest = max(int(path.name.removeprefix("checkpoint-")) for path in saves.glob("checkpoint-*"))
            ray_cluster.lose()
            said, _ = run.communicate(timeout=400)
        finally:
            run.kill()
    assert run.returncode == 0, said
    first, *_, last = map(int, re.findall(r"begins after step (\d+)", said))
    assert first == 0 and newest <= last <= newest + 1, "no step that was committed is done again"
    assert "step 60: loss" in said
    assert verify_checkpoint(saves / "checkpoint-00000060") == []
