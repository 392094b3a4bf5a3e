"""A step that has just been saved goes to rollouts out of the memory of the trainers that saved it."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckpt import CheckpointCoordinator, StateComponent
from ckpt.backends.kimi_engine import KimiEngineBackend
from ckpt.backends.zarr import ZarrBackend
from ckpt.engine import WholeWeights
from ckpt.engine.base import NamedTensor
from ckpt.errors import CorruptCheckpointError, MissingStateError, RankAbsentError, StorageError
from ckpt.ranks.topology import Topology
from ckpt.saving.save_settings import SaveSettings
from ckpt.saving.tiers import local, memory
from ckpt.state.statefuls import ModelState
from tests.support.covering import sampled
from tests.support.engines import MixedModel, joined, live_model, put, receive, require_holds
from tests.support.ranks import run_ranks
from tests.support.states import BACKENDS, Held, backend_named, coordinator, random_bits, same_bits

MODES = {
    "sync": SaveSettings(),
    "async": SaveSettings(mode="async", when_busy="queue"),
    "incremental": SaveSettings(incremental=True),
}


GATHERED = (torch.float16, torch.float32, torch.float64, torch.int64, torch.uint8)
"""What gloo gathers."""


class Taken:
    """In place of an engine: what it was sent, copied."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.tied_names: dict[str, str] = {}
        self.weights: list[NamedTensor] = []

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, Any]:
        self.step, self.tied_names = global_steps, dict(weights.tied_names)
        self.weights = [(name, tensor.clone()) for name, tensor in weights]
        return {"step": global_steps}


def made(topology: Topology, root: Path, model: torch.nn.Module, mode: str, **options: Any) -> CheckpointCoordinator:
    components = [
        StateComponent("model", ModelState(model), options.pop("pattern", "replicated")),
        StateComponent("rng", Held({"s": random_bits((9,), torch.uint8, topology.rank)}), "per_rank"),
    ]
    if mode in BACKENDS:  # in the memory of the hosts
        host = root / f"host-{topology.node_rank}"
        host.mkdir(exist_ok=True)
        options |= {"backend": backend_named(mode), "tiers": [memory(path=host, keep_s=20.0, copies=len(topology.nodes) - 1)]}
    options = {"backend": KimiEngineBackend(), "saves": MODES.get(mode, "sync"), "pattern_check": "off"} | options
    return coordinator(topology, root, components, **options)


def become(model: torch.nn.Module, other: torch.nn.Module) -> None:
    others = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.copy_(others[name])


def publish(checkpoints: CheckpointCoordinator, engine: Any, step: int) -> dict[str, Any]:
    return asyncio.run(checkpoints.publish(engine, step))


def train_and_publish(topology: Topology, root: Path, num_trainers: int, mode: str, name: str, pattern: str) -> None:
    trainers = topology.part("trainers", range(num_trainers)) if topology.rank < num_trainers else None
    with joined(topology, num_trainers, topology.world_size - num_trainers, name) as engine:
        if trainers is None:
            live = live_model()
            for step in (1, 2, 3):
                receive(engine, live, step)
                require_holds(live, engine, step)
            return
        model = MixedModel(99)
        with made(trainers, root, model, mode, pattern=pattern) as checkpoints:
            for step in (1, 2, 3):
                become(model, MixedModel(step))
                checkpoints.save_checkpoint(checkpoint_id=f"{step:08d}")
                checkpoints.wait_for_snapshot()
                become(model, MixedModel(99))  # training goes on
                assert publish(checkpoints, engine, step)["step"] == step
        trainers.close()


@sampled(("mode", "pattern"), [("async", "auto"), ("sync", "replicated")])
@pytest.mark.parametrize("name", ["broadcast", pytest.param("kimi_ckpt_engine", marks=pytest.mark.full)])
def test_rollouts_get_a_step_as_it_was_saved_whatever_training_does_since(
    tmp_path: Path, mode: str, pattern: str, name: str
) -> None:
    run_ranks(3, train_and_publish, tmp_path, 2, mode, name, pattern)


def publish_shards(topology: Topology, root: Path, mode: str, pattern: str) -> None:
    """Parts of tensors on every rank, of several types, cut unevenly; some tensors whole."""
    mesh = init_device_mesh("cpu", (topology.world_size,))
    whole = MixedModel(3)
    model = torch.nn.Module()
    for number, (name, tensor) in enumerate(whole.state_dict().items()):
        if name == "head.weight":
            tensor = model.get_parameter("embed.weight")
        elif tensor.dim() and tensor.numel() > 1 and tensor.dtype in GATHERED:
            tensor = distribute_tensor(tensor, mesh, [Shard(number % tensor.dim())])
        put(model, name, tensor if name == "head.weight" else torch.nn.Parameter(tensor, requires_grad=False))
    given = WholeWeights(ModelState(model), topology)
    wanted = [(name, tensor.clone()) for name, tensor in given]
    with made(topology, root, model, mode, pattern=pattern) as checkpoints:
        for step in (1, 2):
            checkpoints.save_checkpoint(checkpoint_id=f"{step}")
            taken = Taken()
            assert publish(checkpoints, taken, step) == {"step": step}
            assert [name for name, _ in taken.weights] == [name for name, _ in wanted]
            assert taken.tied_names == given.tied_names
            for (name, tensor), (_, expected) in zip(taken.weights, wanted, strict=True):
                assert same_bits(tensor, expected), name


@sampled(("mode", "pattern"), [("sync", "auto"), ("async", "sharded"), ("incremental", "auto")])
def test_it_yields_what_whole_weights_would_have_gathered(tmp_path: Path, mode: str, pattern: str) -> None:
    run_ranks(3, publish_shards, tmp_path, mode, pattern, process_group=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_yields_the_same_from_the_memory_of_the_hosts(tmp_path: Path, backend: str) -> None:
    run_ranks(2, publish_shards, tmp_path, backend, "auto", process_group=True, nodes=[1, 1] if backend == "zarr" else [2])


def refuse_tiers(topology: Topology, root: Path) -> None:
    with made(topology, root, MixedModel(1), "sync", tiers=[local(root / "disk")]) as checkpoints:
        checkpoints.save_checkpoint(checkpoint_id="1")
        with pytest.raises(MissingStateError, match=r"rank 0 holds nothing in memory.* or with memory\(\) as the first of tiers"):
            publish(checkpoints, Taken(), 1)
    compressed = ZarrBackend(compressors=[{"name": "zstd", "configuration": {"level": 1, "checksum": False}}])
    with made(topology, root, MixedModel(1), "sync", backend=compressed, tiers=[memory(path=root)]) as checkpoints:
        checkpoints.save_checkpoint(checkpoint_id="2")
        with pytest.raises(MissingStateError, match=r"checkpoint-2 cannot be published: .* is encoded; give engine.send_weights"):
            publish(checkpoints, Taken(), 2)


def test_tiers_without_memory_or_with_compression_are_refused(tmp_path: Path) -> None:
    run_ranks(1, refuse_tiers, tmp_path)


def refuse(topology: Topology, root: Path) -> None:
    model, taken = MixedModel(1), Taken()
    with (
        made(topology, root, model, "sync", backend=ZarrBackend()) as checkpoints,
        pytest.raises(MissingStateError, match="keeps nothing in memory for that. Give it backend=KimiEngineBackend"),
    ):
        publish(checkpoints, taken, 1)
    with made(topology, root, model, "sync") as checkpoints:
        with pytest.raises(MissingStateError, match="step 1 cannot be published: rank 0 holds nothing in memory"):
            publish(checkpoints, taken, 1)
        checkpoints.save_checkpoint(checkpoint_id="1")
        with pytest.raises(MissingStateError, match="step 2 cannot be published: rank 0 holds checkpoint-1 in memory"):
            publish(checkpoints, taken, 2)
        with pytest.raises(MissingStateError, match="rng is per_rank: there are several states"):
            asyncio.run(checkpoints.publish(taken, 1, "rng"))
        with pytest.raises(MissingStateError, match="no component ema to publish; this run has model, rng"):
            asyncio.run(checkpoints.publish(taken, 1, "ema"))
        if topology.rank == 1:  # one that has lost its memory
            checkpoints._host_cache.pool.begin()  # type: ignore[union-attr]
        with pytest.raises(MissingStateError, match="rank 1 holds nothing in memory"):
            publish(checkpoints, taken, 1)
        checkpoints.save_checkpoint(checkpoint_id="by-hand")
        with pytest.raises(MissingStateError, match="rank 0 holds checkpoint-by-hand in memory"):
            publish(checkpoints, taken, 1)
        assert taken.step is None
        checkpoints.save_checkpoint(checkpoint_id="00000003")
        assert publish(checkpoints, taken, 3) == {"step": 3}


def test_what_cannot_be_published_is_one_sentence_on_every_trainer(tmp_path: Path) -> None:
    run_ranks(2, refuse, tmp_path)


def publish_from_two_hosts(topology: Topology, root: Path) -> None:
    with made(topology, root, MixedModel(1), "sync") as checkpoints:
        checkpoints.save_checkpoint(checkpoint_id="1")
        with pytest.raises(MissingStateError, match="wrote a part of it on another host"):
            publish(checkpoints, Taken(), 1)


def test_what_lies_on_several_hosts_is_refused(tmp_path: Path) -> None:
    run_ranks(2, publish_from_two_hosts, tmp_path, nodes=[1, 1])


def publish_damaged(topology: Topology, root: Path) -> None:
    with made(topology, root, MixedModel(1), "sync") as checkpoints:
        checkpoints.save_checkpoint(checkpoint_id="1")
        if topology.rank == 1:
            file = checkpoints._host_cache.held.save.files["model/rank-00001-float32.safetensors"]  # type: ignore[union-attr]
            file._memory[file.size - 1] ^= 1
        with pytest.raises(CorruptCheckpointError, match="changed in memory since it was saved, and is not published"):
            publish(checkpoints, Taken(), 1)


def test_memory_that_has_changed_is_not_published(tmp_path: Path) -> None:
    run_ranks(2, publish_damaged, tmp_path)


class Slow(Taken):
    """Takes one tensor, lets a save go by, and takes the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, Any]:
        for number, (name, tensor) in enumerate(weights):
            self.weights.append((name, tensor.clone()))
            if number == 0:
                self.has_begun.set()
                assert await asyncio.to_thread(self.may_go_on.wait, 30)
        return {}


def save_while_publishing(topology: Topology, root: Path, mode: str) -> None:
    model, slow = MixedModel(1), Slow()
    with made(topology, root, model, mode) as checkpoints:
        checkpoints.save_checkpoint(checkpoint_id="1")
        checkpoints.wait()
        publishing = threading.Thread(target=publish, args=(checkpoints, slow, 1))
        publishing.start()
        assert slow.has_begun.wait(30)
        for step in (2, 3):
            become(model, MixedModel(step))
            checkpoints.save_checkpoint(checkpoint_id=f"{step}")
        checkpoints.wait()
        slow.may_go_on.set()
        publishing.join()
        expected = dict(MixedModel(1).state_dict())
        assert len(slow.weights) == len(expected) - 1  # one is tied
        assert all(same_bits(tensor, expected[name]) for name, tensor in slow.weights)
        taken = Taken()
        publish(checkpoints, taken, 3)
        assert all(same_bits(tensor, MixedModel(3).state_dict()[name]) for name, tensor in taken.weights)


@sampled("mode", ["sync", "async", "zarr"])
def test_saves_may_go_by_while_a_step_is_published(tmp_path: Path, mode: str) -> None:
    run_ranks(2, save_while_publishing, tmp_path, mode)


def die_before_publishing(topology: Topology, root: Path) -> float:
    with made(topology, root, MixedModel(1), "sync") as checkpoints:
        checkpoints.save_checkpoint(checkpoint_id="1")
        if topology.rank == 1:
            os._exit(3)
        began, taken = time.monotonic(), Taken()
        with pytest.raises(RankAbsentError, match="rank 1"):
            publish(checkpoints, taken, 1)
        assert taken.step is None
        return time.monotonic() - began


@pytest.mark.full
def test_a_trainer_that_is_gone_is_named_by_the_others_and_nothing_is_sent(tmp_path: Path) -> None:
    took = run_ranks(3, die_before_publishing, tmp_path, expect_dead=[1], agree_s=5.0)
    assert max(seconds for seconds in took if isinstance(seconds, float)) < 15


class Refusing(Taken):
    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, Any]:
        raise StorageError("no rollout has room")


def fail_and_publish_again(topology: Topology, root: Path) -> None:
    with made(topology, root, MixedModel(1), "sync") as checkpoints:
        checkpoints.save_checkpoint(checkpoint_id="1")
        for _ in range(2):
            with pytest.raises(StorageError, match="no rollout has room"):
                publish(checkpoints, Refusing(), 1)
        taken = Taken()
        publish(checkpoints, taken, 1)
        expected = MixedModel(1).state_dict()
        assert all(same_bits(tensor, expected[name]) for name, tensor in taken.weights)
        assert not checkpoints._host_cache.pool._readers  # type: ignore[union-attr]


def test_a_publication_that_fails_can_be_made_again(tmp_path: Path) -> None:
    run_ranks(2, fail_and_publish_again, tmp_path)
