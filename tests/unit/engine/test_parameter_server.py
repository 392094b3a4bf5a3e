"""What is changed in the checkpoint-engine package, and that it is so for our threads only, and only while they need it."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import sys
import threading
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckpt.engine import CheckpointEngineRegistry, LiveModel
from ckpt.errors import CheckpointError, ConfigurationError
from tests.states import Held, global_index

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
    """One rank that is trainer and rollout, and goes through the package's own update all the same."""
    with KimiCheckpointEngine(4096, transport="update", colocated=True, timeout_s=20.0) as made:
        made.init_process_group(0, 1, 1, store=dist.HashStore())
        yield made


def update(engine: KimiCheckpointEngine, step: int, sink: _Sink) -> None:
    async def both() -> None:
        await engine.send_weights(weights_of(step).items(), step)
        await engine.receive_into(sink, step)

    asyncio.run(both())
    held = sink.live.state_dict()
    assert all(torch.equal(held[name], one) for name, one in weights_of(step).items())


def names() -> list[Any]:
    return [getattr(module, name) for module, name in parameter_server.REBOUND]


def test_kimi_every_name_of_the_package_that_is_re_bound_or_private_is_there() -> None:
    for module, name in parameter_server.REBOUND:
        assert hasattr(module, name), f"{module.__name__}.{name}"
    server = parameter_server.ce_ps.ParameterServer
    made = inspect.getsource(server.__init__)
    for name in parameter_server.PRIVATE:
        is_there = callable(getattr(server, name, None)) or f"self.{name} = " in made or f"self.{name}: " in made
        assert is_there, f"ParameterServer.{name}"
    for name in (
        "register_checkpoint",
        "unregister_checkpoint",
        "gather_metas",
        "get_metas",
        "update",
        "store_based_barrier",
    ):
        assert callable(getattr(server, name)), name
    assert "torch.distributed.TCPStore(" in made, "which is replaced by a store of ours"
    assert list(inspect.signature(parameter_server.ce_worker.update_weights_from_ipc).parameters)[:3] == [
        "zmq_ctx",
        "zmq_handle",
        "device_id",
    ]


def test_kimi_names_and_environment_are_as_before_after_an_update_and_to_other_threads_all_the_time(
    engine: KimiCheckpointEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, environment = names(), dict(os.environ)
    server, seen = parameter_server.BucketServer, []
    real = server.update

    def look(self: Any, *args: Any) -> None:
        """Another thread works with the package while our update runs."""

        def work() -> None:
            seen.append(parameter_server.ce_distributed.is_initialized())
            seen.append(type(parameter_server.ce_ps.DeviceManager).__name__)

        def take(number: int, bucket: torch.Tensor) -> None:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            args[3](number, bucket)

        real(self, *args[:3], take)

    monkeypatch.setattr(server, "update", look)
    sink = _Sink()
    update(engine, 1, sink)
    update(engine, 2, sink)
    assert seen and seen[0] is False, "to others the package's collectives are torch's, which has no process group"
    assert all(one is other for one, other in zip(names(), before, strict=True))
    assert dict(os.environ) == environment


def test_kimi_starts_where_the_environment_says_nothing_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FORGOTTEN:
        monkeypatch.delenv(name, raising=False)
    with KimiCheckpointEngine(4096, transport="update", colocated=True, timeout_s=20.0) as made:
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

    def listen(self: Any, object_list: list[Any], obj: Any, group: Any = None) -> None:
        gather(self, object_list, obj, group)
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
        KimiCheckpointEngine(4096, transport="update", colocated=True) as first,
        KimiCheckpointEngine(8192, transport="update", colocated=True) as second,
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
    server = engine._server
    assert server is not None and server.metas()[0].memory_buffer_metas_list
    registered = server._server._memory_pool
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
    monkeypatch.setattr(CheckpointEngineRegistry, "_engines", {})
    monkeypatch.setattr(CheckpointEngineRegistry, "_missing", {})
    CheckpointEngineRegistry.record_import_error("kimi_ckpt_engine", caught.value)
    with pytest.raises(
        ConfigurationError,
        match="the weight sync engine kimi_ckpt_engine could not be imported: checkpoint-engine 0.5.1 is installed, and 0.4.2 or later, "
        "before 0.5, is needed: pip install 'checkpoint-engine>=0.4.2,<0.5'",
    ):
        CheckpointEngineRegistry.get("kimi_ckpt_engine")
