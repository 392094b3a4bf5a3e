"""The plug-in for verl: registered in its registry, of its kind, and driven as its manager drives an engine."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints
from unittest.mock import MagicMock

import pytest
import torch

from ckpt.engine import MasterMetadata
from ckpt.ranks.topology import Topology
from tests.support.ranks import run_ranks

INTERFACE = {
    "prepare": ["self"],
    "build_topology": ["actor_wg_world_size", "rollout_world_size", "metadata"],
    "init_process_group": ["self", "kwargs"],
    "finalize": ["self"],
    "send_weights": ["self", "weights", "global_steps"],
    "receive_weights": ["self", "global_steps"],
}
"""The abstract methods of verl's CheckpointEngine and their arguments, as of verl 0.9.1."""

IMPORTED = (
    "ray",
    "verl",
    "verl.checkpoint_engine",
    "verl.single_controller",
    "verl.single_controller.base",
    "verl.single_controller.base.decorator",
    "verl.single_controller.ray",
    "verl.utils",
    "verl.utils.distributed",
    "verl.utils.import_utils",
    "verl.utils.ray_utils",
    "verl.workers",
    "verl.workers.config",
    "verl.workers.rollout",
    "verl.workers.rollout.utils",
)
"""What verl's module of the base class imports, and a test of its interface does not need."""


class Registry:
    """What a plug-in uses of verl's registry."""

    def __init__(self) -> None:
        self.engines: dict[str, Any] = {}
        self.errors: dict[str, ImportError] = {}

    def register(self, name: str) -> Any:
        return lambda engine: self.engines.setdefault(name, engine)

    def record_import_error(self, name: str, error: ImportError) -> None:
        self.errors[name] = error


class Base:
    """In place of verl's own class."""

    wire_format = "named_tensors"


def _made_up_verl(put: Callable[[str, ModuleType], None]) -> Registry:
    """A verl that has nothing but a registry and a base class."""
    base = ModuleType("verl.checkpoint_engine.base")
    base.CheckpointEngine, base.CheckpointEngineRegistry = Base, Registry()  # type: ignore[attr-defined]
    for name in ("verl", "verl.checkpoint_engine"):
        put(name, ModuleType(name))
    put("verl.checkpoint_engine.base", base)
    made: Registry = base.CheckpointEngineRegistry
    return made


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    """The registry of a made-up verl that has imported the plug-in."""
    made = _made_up_verl(partial(monkeypatch.setitem, sys.modules))
    _plug_in_anew(monkeypatch)
    return made


def _plug_in_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.engine.verl_plugin", None, raising=False)
    monkeypatch.delitem(sys.modules, "ckpt.engine.verl_plugin", raising=False)
    monkeypatch.setitem(sys.modules, "ckpt.engine.verl_plugin", importlib.import_module("ckpt.engine.verl_plugin"))


def test_importing_it_registers_the_engines_under_names_of_their_own(registry: Registry) -> None:
    assert set(registry.engines) == {"ckpt_broadcast", "ckpt_kimi"}
    assert all(issubclass(engine, Base) for engine in registry.engines.values())
    assert all(engine.wire_format == "named_tensors" for engine in registry.engines.values())


def test_an_engine_whose_package_is_missing_is_named_with_the_reason(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckpt.engine.base import CheckpointEngineRegistry

    monkeypatch.delitem(CheckpointEngineRegistry.engines, "kimi_ckpt_engine")
    monkeypatch.setitem(CheckpointEngineRegistry.missing, "kimi_ckpt_engine", ImportError("no checkpoint-engine here"))
    registry.engines.clear()
    _plug_in_anew(monkeypatch)
    assert set(registry.engines) == {"ckpt_broadcast"}
    assert str(registry.errors["ckpt_kimi"]) == "no checkpoint-engine here"


def test_every_abstract_method_takes_what_verl_gives_it(registry: Registry) -> None:
    _require_interface(registry.engines["ckpt_kimi"], INTERFACE)


def _require_interface(engine: type, interface: dict[str, list[str]]) -> None:
    for name, arguments in interface.items():
        own = inspect.signature(getattr(engine, name)).parameters
        missing = set(arguments) - set(own) - {"kwargs"}
        assert not missing, f"{name} takes no {missing}"
        required = {p.name for p in own.values() if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
        assert "kwargs" in arguments or required <= set(arguments), name
    assert issubclass(get_type_hints(engine.receive_weights)["return"], AsyncIterator)
    assert inspect.iscoroutinefunction(engine.send_weights)
    assert isinstance(inspect.getattr_static(engine, "build_topology"), classmethod)


@pytest.mark.parametrize("name", ["ckpt_broadcast", "ckpt_kimi"])
def test_two_updates_in_the_order_of_verls_manager(name: str) -> None:
    """prepare on all, build_topology once, init_process_group with each rank's own, both sides at once, finalize; and again."""
    *trainers, _, _ = run_ranks(4, _worker, name)
    assert [metrics["weight_sync/num_bytes"] for metrics in trainers[0]] == [5 * 2800] * 2
    assert [metrics["weight_sync/step"] for metrics in trainers[0]] == [1, 2]


def _worker(topology: Topology, name: str) -> list[dict[str, Any]]:
    """Two trainers and two rollouts; the test's own agreement stands for Ray."""
    with pytest.MonkeyPatch.context() as patch:
        _made_up_verl(partial(patch.setitem, sys.modules))
        _plug_in_anew(patch)
        return _two_updates(topology, name)


def _two_updates(topology: Topology, name: str) -> list[dict[str, Any]]:
    kind = sys.modules["verl.checkpoint_engine.base"].CheckpointEngineRegistry.engines[name]
    is_trainer = topology.rank < 2
    engine = kind(bucket_size=4096, timeout_s=20, **({"is_master": topology.rank == 0} if is_trainer else {}))
    found = []
    with engine:
        for step in (1, 2):
            with topology.phase("prepare") as phase:
                meeting = engine.prepare()
                phase.payload = None if meeting is None else list(meeting)
            metadata = [None if said is None else MasterMetadata(*said) for said in phase.payloads]
            assert [one is not None for one in metadata] == [True, False, False, False]
            parts = kind.build_topology(2, 2, metadata)
            assert all(len(values) == 2 for part in parts for values in part.values())
            part = parts[0 if is_trainer else 1]
            engine.init_process_group(**{key: values[topology.rank % 2] for key, values in part.items()})
            weights = {f"layer.{n}": torch.arange(700, dtype=torch.float32) * step + n for n in range(5)}
            if is_trainer:
                found.append(asyncio.run(_sent(engine, weights, step)))
            else:
                got = asyncio.run(_received(engine, step))
                assert got.keys() == weights.keys()
                assert all(torch.equal(got[key], weights[key]) for key in weights)
            engine.finalize()
    return found


async def _sent(engine: Any, weights: dict[str, torch.Tensor], step: int) -> dict[str, Any]:
    metrics: dict[str, Any] = await engine.send_weights(iter(weights.items()), global_steps=step)
    return metrics


async def _received(engine: Any, step: int) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() async for name, tensor in engine.receive_weights(global_steps=step)}


@pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="verl is not installed")
def test_verls_own_classes_take_the_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real base class and registry. What else their module imports, Ray before all, is not looked at."""
    found = importlib.util.find_spec("verl")
    assert found is not None
    assert found.submodule_search_locations
    base = _loaded(Path(found.submodule_search_locations[0], "checkpoint_engine", "base.py"), monkeypatch)
    abstract = base.CheckpointEngine.__abstractmethods__
    own = {name: [*inspect.signature(getattr(base.CheckpointEngine, name)).parameters] for name in abstract}
    assert own == INTERFACE
    _plug_in_anew(monkeypatch)
    engine = base.CheckpointEngineRegistry.get("ckpt_kimi")
    assert issubclass(engine, base.CheckpointEngine)
    with base.CheckpointEngineRegistry.new("ckpt_kimi", bucket_size=1 << 20, is_master=True) as made:
        assert made.wire_format == "named_tensors"
    _require_interface(engine, own)


def _loaded(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in IMPORTED:
        monkeypatch.setitem(sys.modules, name, MagicMock(__spec__=None))
    monkeypatch.setattr(sys.modules["verl.single_controller.base"], "Worker", object)
    spec = importlib.util.spec_from_file_location("verl.checkpoint_engine.base", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "verl.checkpoint_engine.base", module)
    spec.loader.exec_module(module)
    return module
