"""verl's manager and workers in actors of a real Ray, with the engines of this package: `.ci/engines` makes the environment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl has an environment of its own: see .ci/engines")

import ray
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.config import CheckpointEngineConfig, RolloutConfig

from tests.servers.verl_actors import Replica, Rollout, Trainer, digests, model

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=8, include_dashboard=False, runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}})
    yield
    ray.shutdown()


class Job:
    """Two trainers, and replicas of one rollout each."""

    def __init__(self, backend: str, num_replicas: int) -> None:
        config = CheckpointEngineConfig(
            backend=backend,
            update_weights_bucket_megabytes=1,
            custom_backend_module="ckpt.engine.verl_plugin",
            engine_kwargs={backend: {"rebuild_group": True, "timeout_s": 30.0}},
        )
        self._config = RolloutConfig(name="vllm", checkpoint_engine=config)
        self.groups: list[Any] = []
        self.trainers = self._group(2, Trainer, config)
        self.replicas = [self.replica() for _ in range(num_replicas)]
        self.manager = CheckpointEngineManager(config, self.trainers, [*self.replicas])

    def _group(self, num: int, cls: type, config: Any) -> Any:
        pool = RayResourcePool([num], use_gpu=False, max_colocate_count=1)
        made = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=RayClassWithInitArgs(ray.remote(cls), config), device_name="cpu")
        self.groups.append((made, pool))
        return made

    def replica(self) -> Replica:
        """Start another one."""
        made = Replica(len(self.groups), self._config, None)
        made.group = self._group(1, Rollout, self._config)
        made.workers = made.group.workers
        return made

    def update(self, step: int) -> Any:
        """Train to other weights, and send them."""
        self.trainers.train(step)
        return self.manager.update_weights(global_steps=step)

    def end(self) -> None:
        for group, pool in self.groups:
            for worker in group.workers:
                ray.kill(worker)
            for placed in pool.pgs or ():
                ray.util.remove_placement_group(placed)


@pytest.fixture(scope="module", params=["ckpt_broadcast", "ckpt_kimi"])
def job(cluster: None, request: pytest.FixtureRequest) -> Iterator[Job]:
    made = Job(request.param, 2)
    yield made
    made.end()


def holds(replica: Replica) -> tuple[int, dict[str, str]]:
    (found,) = replica.group.holds()
    return found[0], found[1]


def test_replicas_hold_the_trainers_bits_while_they_are_added_removed_and_killed(job: Job) -> None:
    """One life of a job, for each actor takes long to start."""
    first, second = job.replicas
    for step in (1, 2, 7):
        metrics = job.update(step)
        assert [holds(replica) for replica in job.replicas] == [(step, digests(model(step)))] * 2
        assert metrics["weight_sync/step"] == step and metrics["weight_sync/num_tensors"] == 7

    # An actor is killed in an update, after all have joined.
    job.trainers.train(8)
    workers = [replica.workers[0] for replica in job.replicas]
    job.manager.build_process_group(
        RayWorkerGroup(worker_handles=workers, ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(Rollout)))
    )
    receiving = first.group.update_weights(global_steps=8)
    ray.kill(second.workers[0])
    for one in (*receiving, *job.trainers.update_weights(global_steps=8, mode="auto")):
        with pytest.raises(ray.exceptions.RayTaskError, match="rank 3"):
            ray.get(one, timeout=120)
    assert holds(first) == (7, digests(model(7)))
    ray.get(job.trainers.execute_checkpoint_engine(["finalize"] * 2) + first.group.execute_checkpoint_engine(["finalize"]))

    # The manager is told by Ray that it is gone, and goes on with another one in its place.
    with pytest.raises(ray.exceptions.RayError):
        job.manager.update_weights(global_steps=8)
    job.manager.remove_replicas([second])
    third = job.replica()
    job.manager.add_replicas([third])
    job.update(9)
    assert holds(first) == holds(third) == (9, digests(model(9)))

    # One is removed, and keeps what it has.
    job.manager.remove_replicas([first])
    job.update(10)
    assert holds(first) == (9, digests(model(9))) and holds(third) == (10, digests(model(10)))
