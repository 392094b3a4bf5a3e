"""The plug-in for NeMo-RL: of its interface, and driven as its synchronizer drives an engine. NeMo-RL itself is not installed."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Generator
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch

from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.ranks.topology import Topology
from tests.support.ranks import run_ranks

PATH = "ckpt.engine.nemo_rl_plugin:RefitEngine"
JOIN = ("train_world_size", "rollout_world_size", "metadata")


class _Interface(ABC):
    """The base class of NeMo-RL's checkpoint engines, as its design document of August 2026 describes it."""

    cleanup_after_load = True
    shard_expert_weights = False

    def get_target_weight_layout(self) -> dict[str, Any] | None:
        return None

    @abstractmethod
    def prepare(self) -> Any: ...

    @abstractmethod
    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None: ...

    @abstractmethod
    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None: ...

    def finalize(self) -> None:
        return

    @abstractmethod
    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None]) -> None: ...

    @abstractmethod
    def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]: ...


def _plugged_in(put: Callable[[str, ModuleType], None]) -> type[Any]:
    """The class that the path names, in a NeMo-RL that has nothing but the base class."""
    base = ModuleType("nemo_rl.utils.checkpoint_engines.base")
    base.CheckpointEngine = _Interface  # type: ignore[attr-defined]
    for name in ("nemo_rl", "nemo_rl.utils", "nemo_rl.utils.checkpoint_engines"):
        put(name, ModuleType(name))
    put(base.__name__, base)
    sys.modules.pop("ckpt.engine.nemo_rl_plugin", None)
    module, _, name = PATH.partition(":")
    kind: type[Any] = getattr(importlib.import_module(module), name)
    return kind


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    monkeypatch.setitem(sys.modules, "ckpt.engine.nemo_rl_plugin", ModuleType("taken away at the end"))
    return _plugged_in(partial(monkeypatch.setitem, sys.modules))


def test_every_method_of_the_interface_takes_what_the_workers_give_it(kind: type[Any]) -> None:
    assert issubclass(kind, _Interface) and not inspect.isabstract(kind)
    for name in _Interface.__abstractmethods__:
        wanted = inspect.signature(getattr(_Interface, name)).parameters
        own = inspect.signature(getattr(kind, name)).parameters
        assert {*wanted} <= {*own}, name
        required = {p.name for p in own.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
        assert required <= {*wanted}, f"{name} needs {required - {*wanted}}"
    assert inspect.iscoroutinefunction(kind.send_weights)


def test_a_part_of_the_experts_and_a_missing_address_are_refused(kind: type[Any]) -> None:
    with pytest.raises(ConfigurationError, match="shard_expert_weights=true: this engine sends whole weights"):
        kind(bucket_size=1 << 20, shard_expert_weights=True)
    with kind(bucket_size=1 << 20, shard_hf_weights=False) as engine:
        with pytest.raises(ConfigurationError, match="the first policy worker has given no address"):
            engine.init_policy_process_group(worker_rank=0, train_world_size=1, rollout_world_size=1, metadata=[None, None])
        assert engine.get_target_weight_layout() is None


@pytest.mark.parametrize(("num_policies", "num_rollouts"), [(2, 2), (1, 3)])
def test_refits_and_a_new_synchronizer_bring_every_bit_in_batches(num_policies: int, num_rollouts: int) -> None:
    """prepare on all, join with all metadata, both sides at once, twice; finalize; then a second synchronizer with the same engines."""
    batches = run_ranks(num_policies + num_rollouts, _worker, num_policies)[num_policies:]
    assert all(of_rank == [[2, 2, 1]] * 4 for of_rank in batches), batches


def test_a_rollout_that_cannot_load_the_last_batch_fails_the_refit_on_all_workers() -> None:
    policy, _, other = run_ranks(3, _worker, 1, True)
    assert "failed before phase load on rank 1" in policy and "failed before phase load on rank 1" in other, (policy, other)


def _worker(topology: Topology, num_policies: int, fails: bool = False) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "ckpt.engine.nemo_rl_plugin", ModuleType("taken away at the end"))
        kind = _plugged_in(partial(patch.setitem, sys.modules))
        patch.setattr("torch.distributed.is_initialized", lambda: True)  # of each side, which counts its own workers
        patch.setattr("torch.distributed.get_rank", lambda: topology.rank - num_policies * (topology.rank >= num_policies))
        with kind(bucket_size=4096, timeout_s=20) as engine:
            return _failed(topology, engine, num_policies) if fails else _refits(topology, engine, num_policies)


def _join(topology: Topology, engine: Any, num_policies: int) -> bool:
    """As the synchronizer does; return whether this is a policy worker."""
    with topology.phase("prepare") as phase:
        phase.payload = engine.prepare()
    assert [rank for rank, said in enumerate(phase.payloads) if said is not None] == [0, num_policies]
    given = dict(zip(JOIN, (num_policies, topology.world_size - num_policies, list(phase.payloads)), strict=True))
    if topology.rank < num_policies:
        engine.init_policy_process_group(worker_rank=topology.rank, **given)
    else:
        engine.init_rollout_process_group(rollout_rank=topology.rank - num_policies, **given)
    return topology.rank < num_policies


def _weights(number: int) -> dict[str, torch.Tensor]:
    return {f"layer.{n}": torch.arange(700, dtype=torch.float32) * number + n for n in range(5)}


def _refits(topology: Topology, engine: Any, num_policies: int) -> list[list[int]]:
    found = []
    for synchronizer in range(2):
        is_policy = _join(topology, engine, num_policies)
        for number in (1, 2):
            weights = _weights(10 * synchronizer + number)
            if is_policy:
                asyncio.run(engine.send_weights(item for item in weights.items()))
                continue
            batches = asyncio.run(_received(engine))
            found.append([len(batch) for batch in batches])
            got = {name: weight for batch in batches for name, weight in batch}
            assert got.keys() == weights.keys() and all(torch.equal(got[name], weights[name]) for name in weights)
        engine.finalize()
    return found


async def _received(engine: Any) -> list[list[tuple[str, torch.Tensor]]]:
    return [[(name, weight.clone()) for name, weight in batch] async for batch in engine.receive_weight_batches()]


def _failed(topology: Topology, engine: Any, num_policies: int) -> str:
    is_policy = _join(topology, engine, num_policies)
    with pytest.raises((CheckpointError, MemoryError)) as failure:
        asyncio.run(engine.send_weights(iter(_weights(1).items())) if is_policy else _load(engine, fails=topology.rank == 1))
    assert engine.version is None
    return str(failure.value) if topology.rank != 1 else ""


async def _load(engine: Any, *, fails: bool) -> None:
    async for batch in engine.receive_weight_batches():
        if fails and batch[-1][0] == "layer.4":
            raise MemoryError("no room for layer.4")
