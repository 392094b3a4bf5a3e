"""verl's manager and workers in actors of a real Ray, with the engines of this package: `.ci/engines` makes the environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl has an environment of its own: see .ci/engines")

import ray
from verl.checkpoint_engine import CheckpointEngineManager
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.config import CheckpointEngineConfig, RolloutConfig

from tests.servers.verl_actors import Replica, Rollout, Trainer, digests, model

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


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


@pytest.fixture(params=["ckpt_broadcast", "ckpt_kimi"])
def make(cluster: None, request: pytest.FixtureRequest) -> Iterator[Callable[[int], Job]]:
    jobs = []

    def made(num_replicas: int) -> Job:
        jobs.append(Job(request.param, num_replicas))
        return jobs[-1]

    yield made
    for job in jobs:
        job.end()


def holds(replica: Replica) -> tuple[int, dict[str, str]]:
    (found,) = replica.group.holds()
    return found[0], found[1]


def test_rollouts_hold_the_trainers_bits_after_each_update(make: Callable[[int], Job]) -> None:
    job = make(2)
    for step in (1, 2, 7):
        metrics = job.update(step)
        assert [holds(replica) for replica in job.replicas] == [(step, digests(model(step)))] * 2
        assert metrics["weight_sync/step"] == step and metrics["weight_sync/num_tensors"] == 7


def test_replicas_are_added_and_removed(make: Callable[[int], Job]) -> None:
    job = make(1)
    job.update(1)
    (first,), second = job.replicas, job.replica()
    job.manager.add_replicas([second])
    job.update(2)
    assert holds(first) == holds(second) == (2, digests(model(2)))
    job.manager.remove_replicas([first])
    job.update(3)
    assert holds(first) == (2, digests(model(2))) and holds(second) == (3, digests(model(3)))


def test_a_replica_whose_actor_is_killed_is_told_and_the_others_go_on_without_it(make: Callable[[int], Job]) -> None:
    job = make(2)
    job.update(1)
    stays, dies = job.replicas
    for worker in dies.workers:
        ray.kill(worker)
    with pytest.raises(ray.exceptions.RayError):
        job.update(2)
    assert holds(stays) == (1, digests(model(1)))
    job.manager.remove_replicas([dies])
    new = job.replica()
    job.manager.add_replicas([new])
    job.update(3)
    assert holds(stays) == holds(new) == (3, digests(model(3)))


def test_an_actor_that_is_killed_in_an_update_is_told(make: Callable[[int], Job]) -> None:
    job = make(2)
    job.update(1)
    stays, dies = job.replicas
    job.trainers.train(2)
    ray.get(stays.workers[0].__ray_ready__.remote())
    rollouts = [replica.workers[0] for replica in job.replicas]
    group = RayWorkerGroup(worker_handles=rollouts, ray_cls_with_init=RayClassWithInitArgs(cls=ray.remote(Rollout)))
    job.manager.build_process_group(group)
    receiving = stays.group.update_weights(global_steps=2)
    ray.kill(dies.workers[0])
    sending = job.trainers.update_weights(global_steps=2, mode="auto")
    for one in (*receiving, *sending):
        with pytest.raises(ray.exceptions.RayError, match="rank 3|left|gone|absent"):
            ray.get(one, timeout=120)
    assert holds(stays) == (1, digests(model(1)))
