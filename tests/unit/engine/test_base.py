"""The contract of an engine, and the registry of engines by name."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import sys
from collections.abc import AsyncIterator
from dataclasses import FrozenInstanceError
from importlib import metadata
from typing import Any

import pytest

from ckpt.engine import (
    BroadcastCheckpointEngine,
    CheckpointEngine,
    CheckpointEngineRegistry,
    CheckpointEngineWithCache,
    KimiCheckpointEngine,
    MasterMetadata,
    NaiveCheckpointEngine,
    SyncReport,
)
from ckpt.errors import ConfigurationError
from ckpt.ranks.topology import Topology
from tests.support.ranks import run_ranks

ENGINES = {
    "naive": NaiveCheckpointEngine,
    "broadcast": BroadcastCheckpointEngine,
    "kimi_ckpt_engine": KimiCheckpointEngine,
}


@pytest.fixture(autouse=True)
def _registry_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CheckpointEngineRegistry, "engines", dict(CheckpointEngineRegistry.engines))
    monkeypatch.setattr(CheckpointEngineRegistry, "missing", dict(CheckpointEngineRegistry.missing))


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_an_engine_is_had_by_its_name(name: str) -> None:
    assert CheckpointEngineRegistry.get(name) is ENGINES[name]
    assert type(CheckpointEngineRegistry.new(name, 1 << 20, timeout_s=5.0)) is ENGINES[name]


def test_a_decorated_class_is_an_engine_and_stays_what_it_is() -> None:
    @CheckpointEngineRegistry.register("mine")
    class Mine(NaiveCheckpointEngine):
        pass

    assert Mine.__name__ == "Mine"
    assert CheckpointEngineRegistry.get("mine") is Mine
    engine = CheckpointEngineRegistry.new("mine", 512, timeout_s=3.0)
    assert isinstance(engine, Mine) and engine.timeout_s == 3.0


def test_a_later_engine_takes_the_place_of_one_of_its_name() -> None:
    @CheckpointEngineRegistry.register("broadcast")
    class Other(BroadcastCheckpointEngine):
        pass

    assert CheckpointEngineRegistry.get("broadcast") is Other


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        ConfigurationError, match="no weight sync engine nixl; there are broadcast, kimi_ckpt_engine, naive$"
    ):
        CheckpointEngineRegistry.get("nixl")


def test_an_engine_whose_package_is_missing_is_remembered_with_the_reason() -> None:
    cause = ImportError("No module named 'nixl'")
    CheckpointEngineRegistry.record_import_error("nixl", cause)
    with pytest.raises(
        ConfigurationError, match="engine nixl could not be imported: No module named 'nixl'; .* naive$"
    ) as told:
        CheckpointEngineRegistry.new("nixl", 1 << 20)
    assert told.value.__cause__ is cause
    with pytest.raises(
        ConfigurationError, match="no weight sync engine other; .*; nixl could not be imported: No module"
    ):
        CheckpointEngineRegistry.get("other")


def test_an_engine_that_could_be_imported_after_all_is_missing_no_more() -> None:
    CheckpointEngineRegistry.record_import_error("late", ImportError("not yet"))
    CheckpointEngineRegistry.register("late")(NaiveCheckpointEngine)
    assert CheckpointEngineRegistry.get("late") is NaiveCheckpointEngine
    with pytest.raises(ConfigurationError) as told:
        CheckpointEngineRegistry.get("other")
    assert "not yet" not in str(told.value)


@pytest.mark.full
def test_kimi_ckpt_engine_without_its_package_says_so_and_the_others_work() -> None:
    ((refusal, other, exported),) = run_ranks(1, _without_checkpoint_engine)
    assert refusal.startswith("the weight sync engine kimi_ckpt_engine could not be imported: ")
    assert "checkpoint-engine" in refusal and refusal.endswith("engines that can be had: broadcast, naive")
    assert other == "BroadcastCheckpointEngine"
    assert "BroadcastCheckpointEngine" in exported and "KimiCheckpointEngine" not in exported


def _without_checkpoint_engine(topology: Topology) -> tuple[str, str, list[str]]:
    """In a process of its own, which imports the engines anew, and finds no such package."""
    for name in [name for name in sys.modules if name.startswith(("ckpt.engine", "checkpoint_engine"))]:
        del sys.modules[name]
    found = metadata.version

    def version(name: str) -> str:
        if name == "checkpoint-engine":
            raise metadata.PackageNotFoundError(name)
        return found(name)

    metadata.version = version
    engine = importlib.import_module("ckpt.engine")
    exported: dict[str, Any] = {}
    exec("from ckpt.engine import *", exported)
    try:
        engine.CheckpointEngineRegistry.get("kimi_ckpt_engine")
    except ValueError as error:
        return str(error), engine.CheckpointEngineRegistry.get("broadcast").__name__, sorted(exported)
    raise AssertionError("it was found")


@pytest.mark.parametrize("name", sorted(ENGINES))
def test_every_engine_has_the_methods_of_the_contract(name: str) -> None:
    engine = ENGINES[name]
    assert issubclass(engine, CheckpointEngineWithCache) and not inspect.isabstract(engine)
    assert inspect.iscoroutinefunction(engine.send_weights)
    assert [*inspect.signature(engine.send_weights).parameters][:3] == ["self", "weights", "global_steps"]
    assert inspect.isasyncgenfunction(engine.get_weights)
    assert [*inspect.signature(engine.receive_weights).parameters] == ["self", "global_steps"]
    assert inspect.ismethod(engine.build_topology), "a class method"
    assert callable(engine.prepare) and callable(engine.finalize) and callable(engine.init_process_group)


def test_the_contract_is_abstract() -> None:
    for contract in (CheckpointEngine, CheckpointEngineWithCache):
        with pytest.raises(TypeError, match="abstract"):
            contract()


def test_only_the_master_says_where_to_meet() -> None:
    with (
        NaiveCheckpointEngine(512, is_master=True, timeout_s=5.0) as master,
        NaiveCheckpointEngine(512, timeout_s=5.0) as other,
    ):
        assert other.prepare() is None
        met = master.prepare()
        assert met is not None and met.address and "[" not in met.address and 0 < met.port < 1 << 16
        assert master.prepare() == met, "prepare may be called again"


@pytest.mark.parametrize(("num_trainers", "num_rollouts"), [(1, 1), (2, 3), (4, 1)])
def test_trainers_come_first_and_all_are_told_where_the_master_is(num_trainers: int, num_rollouts: int) -> None:
    where = MasterMetadata("host-0", 1234)
    metadata = [where, *[None] * (num_trainers + num_rollouts - 1)]
    trainers, rollouts = BroadcastCheckpointEngine.build_topology(num_trainers, num_rollouts, metadata)
    assert trainers.keys() == rollouts.keys()
    assert trainers["rank"] == [*range(num_trainers)]
    assert rollouts["rank"] == [*range(num_trainers, num_trainers + num_rollouts)]
    for given, count in ((trainers, num_trainers), (rollouts, num_rollouts)):
        assert all(len(values) == count for values in given.values())
        assert given["master_metadata"] == [where] * count
        assert given["actor_wg_world_size"] == [num_trainers] * count
        assert given["rollout_world_size"] == [num_rollouts] * count
    assert trainers.keys() <= inspect.signature(BroadcastCheckpointEngine.init_process_group).parameters.keys()


def test_without_a_master_nobody_can_meet() -> None:
    with pytest.raises(
        ConfigurationError, match="no rank says where to meet: make the first trainer's engine with is_master"
    ):
        BroadcastCheckpointEngine.build_topology(1, 1, [None, None])


@pytest.mark.parametrize(
    ("bucket_size", "settings", "sentence"),
    [
        (255, {}, "a bucket of 255 bytes is too small: give at least 256"),
        (0, {}, "a bucket of 0 bytes is too small"),
        (-5, {}, "a bucket of -5 bytes is too small"),
        (1 << 20, {"memory_fraction": 0.0}, "memory_fraction=0.0: expected more than 0"),
        (1 << 20, {"memory_fraction": 1.5}, "memory_fraction=1.5: expected more than 0 and at most 1"),
        (1 << 20, {"timeout_s": 0.0}, "timeout_s=0.0: expected more than 0 seconds"),
        (
            1 << 20,
            {"rollout_dtype": "float8_e4m3fn"},
            "rollout_dtype=float8_e4m3fn: expected one of bfloat16, float16, ",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(bucket_size: int, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        BroadcastCheckpointEngine(bucket_size, **settings)


async def _take(weights: AsyncIterator[object]) -> list[object]:
    return [named async for named in weights]


def test_an_engine_that_has_joined_nobody_says_what_to_do() -> None:
    engine = BroadcastCheckpointEngine(512)
    for call in (engine.send_weights([]), _take(engine.receive_weights())):
        with pytest.raises(ConfigurationError, match="has not joined any ranks: call init_process_group first"):
            asyncio.run(call)
    engine.finalize()
    engine.close()


def test_an_engine_without_cache_and_one_with_an_empty_cache_give_nothing() -> None:
    with pytest.raises(ConfigurationError, match="keeps no weights: make it with cached=True"):
        asyncio.run(_take(BroadcastCheckpointEngine(512).get_weights()))
    with pytest.raises(ConfigurationError, match="no weights have been received yet"):
        asyncio.run(_take(BroadcastCheckpointEngine(512, cached=True).get_weights()))


def test_a_report_says_what_it_measured_and_cannot_be_changed() -> None:
    seconds = {"offload_s": 1.0, "gather_s": 0.5, "transfer_s": 2.0, "reload_s": 0.25, "blocked_s": 4.0}
    report = SyncReport(step=7, num_tensors=3, num_bytes=4_000_000_000, sent_bytes=5, num_buckets=2, **seconds)
    assert report.as_dict() == {
        "step": 7, "num_tensors": 3, "num_bytes": 4_000_000_000, "sent_bytes": 5, "num_buckets": 2, **seconds,
        "bandwidth_gb_s": 2.0,
    }  # fmt: skip
    with pytest.raises(FrozenInstanceError):
        report.step = 8  # type: ignore[misc]
    at_once = SyncReport(
        step=1, num_tensors=0, num_bytes=0, sent_bytes=0, num_buckets=0, **{**seconds, "transfer_s": 0.0}
    )
    assert at_once.as_dict()["bandwidth_gb_s"] is None
