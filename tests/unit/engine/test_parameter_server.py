"""What is used of the checkpoint-engine package, which stays as it is."""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import inspect
import json
import os
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckpt.engine import CheckpointEngineRegistry, LiveModel
from ckpt.engine.wire.layout import WeightLayout
from ckpt.engine.wire.pool import digest_of_bucket
from ckpt.errors import CheckpointError, ConfigurationError, RankLeftError
from ckpt.ranks.topology import Topology
from tests.support.ranks import run_ranks
from tests.support.states import Held, global_index

parameter_server = pytest.importorskip("ckpt.engine.parameter_server")

from ckpt.engine.kimi import KimiCheckpointEngine  # noqa: E402

FORGOTTEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PS_MAX_BUCKET_SIZE_GB")


def weights_of(step: int) -> dict[str, torch.Tensor]:
    return {f"w{n}": global_index((30, 100)) + 1000 * step + n for n in range(3)}


class _Sink:
    """A live model, and what is looked at in the middle of an update."""

    def __init__(self, look: Any = lambda: None) -> None:
        self.live = LiveModel(Held(weights_of(0)))
        self._look = look

    def check(self, layout: Any) -> None:
        self._look()
        self.live.check(layout)

    def load(self, weights: Any, version: Any) -> None:
        self.live.load(weights, version)


@pytest.fixture
def engine() -> Iterator[KimiCheckpointEngine]:
    """One rank that is trainer and rollout."""
    with KimiCheckpointEngine(4096, colocated=True, timeout_s=20.0) as made:
        made.init_process_group(0, 1, 1, store=dist.HashStore())
        yield made


def update(engine: KimiCheckpointEngine, step: int, sink: _Sink) -> None:
    async def both() -> None:
        await engine.send_weights(weights_of(step).items(), step)
        await engine.receive_into(sink, step)

    asyncio.run(both())
    held = sink.live.state_dict()
    assert all(torch.equal(held[name], one) for name, one in weights_of(step).items())


def names() -> dict[str, Any]:
    """Every name of the package's modules, and its object; and the environment."""
    modules = (parameter_server.ce_ps, parameter_server.ce_worker, parameter_server.ce_pin_memory)
    found = {f"{module.__name__}.{name}": value for module in modules for name, value in vars(module).items()}
    return found | dict(os.environ)


def test_kimi_every_name_of_the_package_that_is_replaced_or_private_is_there() -> None:
    server = parameter_server.ce_ps.ParameterServer
    for method, replaced in parameter_server.REPLACED.items():
        assert set(replaced) <= set(method.__code__.co_names), method
    made = inspect.getsource(server.__init__)
    for name in parameter_server.PRIVATE:
        is_there = callable(getattr(server, name, None)) or f"self.{name} = " in made or f"self.{name}: " in made
        assert is_there, f"ParameterServer.{name}"
    for name in ("unregister_checkpoint", "get_metas"):
        assert callable(getattr(server, name)), name
    assert callable(parameter_server.ce_ps.P2PStore) and callable(parameter_server.ce_ps._get_physical_gpu_id)
    assert "torch.distributed.TCPStore(" in made, "which makes no store here"


def test_kimi_names_and_environment_are_as_before_at_all_times(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    gather, begin = parameter_server._Collectives.all_gather_object, _NoPeers.__init__

    def look_when_gathering(*args: Any) -> None:
        seen.append(names())
        gather(*args)

    def look_when_beginning(*args: Any) -> None:
        seen.append(names())
        begin(*args)

    monkeypatch.setattr(parameter_server._Collectives, "all_gather_object", look_when_gathering)
    monkeypatch.setattr(_NoPeers, "__init__", look_when_beginning)
    monkeypatch.setattr(parameter_server.ce_ps, "P2PStore", _NoPeers)
    before = names()
    with KimiCheckpointEngine(4096, colocated=True, timeout_s=20.0) as made:
        made.init_process_group(0, 1, 1, store=dist.HashStore())
        sink = _Sink()
        update(made, 1, sink)
        update(made, 2, sink)
    seen.append(names())
    assert len(seen) == 3
    for found in seen:
        assert found.keys() == before.keys()
        assert [name for name, one in before.items() if found[name] is not one and found[name] != one] == []


class _NoPeers:
    """In place of the package's P2P store, where its package is missing."""

    def __init__(self, manager: Any) -> None:
        raise ImportError("it is not installed")


def test_kimi_starts_where_the_environment_says_nothing_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FORGOTTEN:
        monkeypatch.delenv(name, raising=False)
    with KimiCheckpointEngine(4096, colocated=True, timeout_s=20.0) as made:
        made.init_process_group(0, 1, 1, store=dist.HashStore())
        update(made, 1, _Sink())
    assert not set(FORGOTTEN) & set(os.environ)


@pytest.mark.parametrize("exists", [False, True])
def test_kimi_neither_needs_the_default_process_group_nor_touches_it(
    engine: KimiCheckpointEngine, exists: bool
) -> None:
    if exists:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.group.WORLD
        number = group._get_sequence_number_for_group() if group is not None else None
        sink = _Sink()
        for step in (1, 2):
            update(engine, step, sink)
        assert dist.is_initialized() == exists and dist.group.WORLD is group
        if group is not None:
            assert group._get_sequence_number_for_group() == number, "no collective went through it"
            dist.barrier()
    finally:
        if exists:
            dist.destroy_process_group()


def test_kimi_tells_other_hosts_json_and_no_pickles(
    engine: KimiCheckpointEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []
    gather = parameter_server._Collectives.all_gather_object

    def listen(self: Any, object_list: list[Any], obj: Any) -> None:
        gather(self, object_list, obj)
        said.append((obj, object_list[0], json.loads(json.dumps(obj.model_dump(mode="json")))))

    monkeypatch.setattr(parameter_server._Collectives, "all_gather_object", listen)
    update(engine, 1, _Sink())
    ((told, understood, plain),) = said
    assert told == understood == type(told).model_validate(plain)
    metas = [meta for buffer in understood.memory_buffer_metas_list for meta in buffer.metas]
    assert [meta.name for meta in metas] == [f"bucket-{n:05d}" for n in range(len(metas))] and len(metas) > 5
    assert all(meta.dtype == torch.uint8 and isinstance(meta.shape, torch.Size) for meta in metas)


def test_kimi_two_jobs_of_one_host_do_not_meet() -> None:
    with (
        KimiCheckpointEngine(4096, colocated=True) as first,
        KimiCheckpointEngine(8192, colocated=True) as second,
    ):
        sinks = [_Sink(), _Sink()]
        for one in (first, second):
            one.init_process_group(0, 1, 1, store=dist.HashStore())

        async def both() -> None:
            await asyncio.gather(
                first.send_weights(weights_of(1).items(), 1), second.send_weights(weights_of(2).items(), 2)
            )
            await asyncio.gather(first.receive_into(sinks[0], 1), second.receive_into(sinks[1], 2))

        asyncio.run(both())
        for number, sink in enumerate(sinks, 1):
            held = sink.live.state_dict()
            assert all(torch.equal(held[name], one) for name, one in weights_of(number).items())


def test_kimi_is_quiet(engine: KimiCheckpointEngine, capfd: pytest.CaptureFixture[str]) -> None:
    update(engine, 1, _Sink())

    def refuse() -> None:
        raise ZeroDivisionError("a bug")

    with pytest.raises(CheckpointError):
        update(engine, 2, _Sink(refuse))
    assert capfd.readouterr() == ("", "")


def test_kimi_leaves_nothing_registered_after_a_failure(engine: KimiCheckpointEngine) -> None:
    sink = _Sink()
    update(engine, 1, sink)
    server = engine.transport.server
    assert server is not None and server.get_metas()[0].memory_buffer_metas_list
    registered = server._memory_pool
    assert "weights" in registered

    def refuse() -> None:
        raise ZeroDivisionError("a bug")

    with pytest.raises(CheckpointError, match="a bug"):
        update(engine, 2, _Sink(refuse))
    assert "weights" not in registered
    update(engine, 2, sink)
    assert "weights" in registered


def test_kimi_refuses_another_version_of_the_package_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.5.1" if name == "checkpoint-engine" else versions(name))
    monkeypatch.delitem(sys.modules, "ckpt.engine.parameter_server")
    with pytest.raises(ImportError) as caught:
        importlib.import_module("ckpt.engine.parameter_server")
    monkeypatch.setattr(CheckpointEngineRegistry, "engines", {})
    monkeypatch.setattr(CheckpointEngineRegistry, "missing", {})
    CheckpointEngineRegistry.record_import_error("kimi_ckpt_engine", caught.value)
    with pytest.raises(
        ConfigurationError,
        match="the weight sync engine kimi_ckpt_engine could not be imported: checkpoint-engine 0.5.1 is installed, and 0.4.2 or later, "
        "before 0.5, is needed: pip install 'checkpoint-engine>=0.4.2,<0.5'",
    ):
        CheckpointEngineRegistry.get("kimi_ckpt_engine")


# Weights that are read from the trainers' memory by who is in no group


class _PeersOfThisProcess:
    """The package's P2P store, as far as it is used, where all peers are this process."""

    addr = "127.0.0.1:17"
    device = ""
    answers = True

    def __init__(self, manager: Any) -> None:
        self.registered: dict[str, torch.Tensor] = {}

    def register_named_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        self.registered.update(tensors)

    def unregister_named_tensors(self, names: list[str]) -> int:
        return len([self.registered.pop(name) for name in names])

    def batch_transfer_sync_read(self, address: str, to: list[int], come_from: list[int], sizes: list[int]) -> None:
        assert self.answers and address == self.addr
        ours = [(one.data_ptr(), one.nbytes) for one in self.registered.values()]
        for there, here, size in zip(to, come_from, sizes, strict=True):
            assert any(start <= there and there + size <= start + length for start, length in ours), "not registered"
            ctypes.memmove(there, here, size)


@pytest.mark.parametrize("delta", [False, True])
def test_kimi_buckets_are_read_from_the_memory_of_trainers_and_are_what_their_digests_say(
    monkeypatch: pytest.MonkeyPatch, delta: bool
) -> None:
    monkeypatch.setattr(parameter_server.ce_ps, "P2PStore", _PeersOfThisProcess)
    with KimiCheckpointEngine(4096, colocated=True, timeout_s=20.0, delta=delta, delta_block_kib=1) as engine:
        engine.init_process_group(0, 1, 1, store=dist.HashStore())
        assert engine.peers is None and engine.layout is None and engine.bucket_digests == {}
        sink = _Sink()
        for step in (1, 2):
            update(engine, step, sink)
            peers = json.loads(json.dumps(engine.peers))
            assert engine.layout is not None
            sizes = {bucket: engine.layout.extent(bucket) for bucket in range(engine.layout.num_buckets)}
            buckets = {bucket: torch.zeros(stop - start, dtype=torch.uint8) for bucket, (start, stop) in sizes.items()}
            parameter_server.read_from_peers(peers, buckets, device_type="cpu")
            assert {bucket: engine.digest_of(host) for bucket, host in buckets.items()} == engine.bucket_digests
            assert engine.version is not None and engine.version.step == step
        with pytest.raises(RankLeftError, match="the trainers have other buckets than the 1 that are to be read"):
            parameter_server.read_from_peers(peers, {99: buckets[0]}, device_type="cpu")
        with pytest.raises(RankLeftError, match="the trainers have other buckets"):
            parameter_server.read_from_peers(peers, {0: buckets[0][1:]}, device_type="cpu")
        monkeypatch.setattr(_PeersOfThisProcess, "answers", False)
        with pytest.raises(RankLeftError, match="could not be read from a trainer's memory: it is gone"):
            parameter_server.read_from_peers(peers, buckets, device_type="cpu")


def test_kimi_without_mooncake_has_no_peers_and_reading_from_some_says_what_is_missing(
    engine: KimiCheckpointEngine,
) -> None:
    if find_spec("mooncake") is not None:
        pytest.skip("mooncake is installed here")
    update(engine, 1, _Sink())
    assert engine.peers is None
    buckets = {0: torch.zeros(4, dtype=torch.uint8)}
    with pytest.raises(ConfigurationError, match="by the package mooncake, which could not be imported: No module"):
        parameter_server.read_from_peers([["here", [[0, 1, 4]]]], buckets, device_type="cpu")


def test_kimi_the_name_of_a_worker_is_told_or_asked_for() -> None:
    with pytest.raises(
        ConfigurationError, match="the name of device 0 .* cannot be found out here: .*; set it yourself"
    ):
        parameter_server.worker_name(0)


@pytest.mark.npu
def test_kimi_the_name_of_a_worker_is_the_packages_own_for_this_device() -> None:
    (name,) = run_ranks(1, _worker_name, device="npu")
    assert re.fullmatch(r"NPU-.+-\d+", name), name


def _worker_name(topology: Topology) -> str:
    torch.zeros(1, device="npu")
    from ckpt.engine.parameter_server import worker_name

    return worker_name(0)


@pytest.mark.skipif(find_spec("mooncake") is None, reason="mooncake is not installed")
def test_kimi_buckets_are_read_through_mooncake_itself_and_a_trainer_that_is_gone_is_told() -> None:
    *_, (read, gone) = run_ranks(3, _read_through_mooncake)
    assert read is True
    assert gone == "weights could not be read from a trainer's memory: it is gone, or does not answer"


def _read_through_mooncake(topology: Topology) -> Any:
    """Two trainers that are rollouts, too, and a rank that is in no group."""
    store = topology.store_for("p2p")
    if topology.rank < 2:
        with KimiCheckpointEngine(4096, colocated=True, timeout_s=20.0) as engine:
            engine.init_process_group(topology.rank, 2, 2, store=topology.store_for("engine"))
            for step in (1, 2):
                update(engine, step, _Sink())
            assert engine.layout is not None
            if topology.rank == 0:
                said = {"peers": engine.peers, "rows": engine.layout.as_rows(), "digests": engine.bucket_digests}
                store.set("said", json.dumps(said))
            store.get("read")
        return None
    said = json.loads(store.get("said"))
    layout = WeightLayout.from_rows(said["rows"])
    stream = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    buckets = {bucket: stream[slice(*layout.extent(bucket))] for bucket in range(layout.num_buckets)}
    parameter_server.read_from_peers(said["peers"], buckets, device_type="cpu")
    read = {str(bucket): digest_of_bucket(host) for bucket, host in buckets.items()} == said["digests"]
    store.set("read", "")
    with pytest.raises(RankLeftError) as gone:
        elsewhere = [["127.0.0.1:1", of] for _, of in said["peers"]]
        parameter_server.read_from_peers(elsewhere, buckets, device_type="cpu")
    return read, str(gone.value)
