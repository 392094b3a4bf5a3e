"""When an engine calls its transport, and which state an update is in: one rank, trainer and rollout at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckpt.engine import NaiveCheckpointEngine, WeightVersion
from ckpt.engine.base import NamedTensor
from ckpt.engine.naive import InProcessTransport
from ckpt.engine.update import Update
from ckpt.engine.wire.pool import ReceivedStream
from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.ranks.topology import Topology


class RecordingTransport(InProcessTransport):
    """Says what has been called, and fails a carry on demand."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.connections: list[str] = []
        self.fails = False

    def join(self, topology: Topology) -> None:
        self.calls.append("join")

    def leave(self) -> None:
        self.calls.append("leave")

    def ready(self, update: Update) -> None:
        self.calls.append("ready")

    def carry(self, update: Update) -> None:
        self.calls.append("carry")
        self.connections.append(update.connections)
        if self.fails:
            raise ZeroDivisionError("a bug in the transport")
        super().carry(update)

    def reset(self, receive_buffer: ReceivedStream) -> None:
        self.calls.append("reset")


class Dictionary:
    """A sink that keeps copies, or raises."""

    def __init__(self, *, fails: bool = False) -> None:
        self.held: dict[str, torch.Tensor] = {}
        self.fails = fails

    def check(self, layout: Any) -> None: ...

    def load(self, weights: Iterable[NamedTensor], version: WeightVersion) -> None:
        if self.fails:
            raise ZeroDivisionError("a bug in the sink")
        self.held = {name: tensor.clone() for name, tensor in weights}


@pytest.fixture
def engine() -> Iterator[NaiveCheckpointEngine]:
    with NaiveCheckpointEngine(512, timeout_s=20.0) as made:
        made.transport = RecordingTransport()
        made.init_process_group(0, 1, 1, store=dist.HashStore())
        yield made


def weights_of(step: int, num_elements: int = 700) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(num_elements, dtype=torch.float32) * step}


def send(engine: NaiveCheckpointEngine, step: int, num_elements: int = 700) -> None:
    asyncio.run(engine.send_weights(weights_of(step, num_elements).items(), step))


def receive(engine: NaiveCheckpointEngine, sink: Any = None) -> Any:
    taker = sink or Dictionary()
    asyncio.run(engine.receive_into(taker))
    return taker


def calls_since(engine: NaiveCheckpointEngine) -> list[str]:
    """Those since this was asked last."""
    transport = engine.transport
    assert isinstance(transport, RecordingTransport)
    found, transport.calls = transport.calls, []
    return found


def test_a_transport_is_made_ready_for_each_layout_once(engine: NaiveCheckpointEngine) -> None:
    assert calls_since(engine) == ["join"]
    for step, num_elements, calls in ((1, 700, ["ready", "carry"]), (2, 700, ["carry"]), (3, 80, ["ready", "carry"])):
        send(engine, step, num_elements)
        assert torch.equal(receive(engine).held["w"], weights_of(step, num_elements)["w"])
        assert calls_since(engine) == calls
    engine.leave()
    assert calls_since(engine) == ["leave"]


@pytest.mark.parametrize("where", ["the transport", "the sink"])
def test_after_a_failure_a_transport_is_reset_and_made_ready_anew(engine: NaiveCheckpointEngine, where: str) -> None:
    transport = engine.transport
    assert isinstance(transport, RecordingTransport)
    send(engine, 1)
    receive(engine)
    calls_since(engine)
    transport.fails = where == "the transport"
    with pytest.raises(CheckpointError, match=f"a bug in {where}"):
        send(engine, 2)
        receive(engine, Dictionary(fails=True))
    assert calls_since(engine) == ["carry", "reset"]
    assert engine.version is not None and engine.version.step == 1, "everybody keeps what it had"
    transport.fails = False
    send(engine, 2)
    assert torch.equal(receive(engine).held["w"], weights_of(2)["w"])
    assert calls_since(engine) == ["ready", "carry"]
    first, failed, second = transport.connections
    assert first == failed != second, "what a failure has left behind shall not meet the next update"


def test_a_task_that_is_cancelled_after_its_engine_has_left_ends_as_cancelled(engine: NaiveCheckpointEngine) -> None:
    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights_of(1).items()
        engine.leave()
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(engine.send_weights(weights(), 1))


def test_an_update_is_open_until_the_weights_are_taken(engine: NaiveCheckpointEngine) -> None:
    with pytest.raises(ConfigurationError, match="nothing has been sent"):
        receive(engine)
    send(engine, 1)
    assert engine.version is None
    with pytest.raises(ConfigurationError, match="the weights of step 1 have arrived and have not been taken"):
        send(engine, 2)
    receive(engine)
    assert engine.version is not None and engine.version.step == 1
    calls_since(engine)
    send(engine, 2)
    engine.leave()
    assert calls_since(engine) == ["carry", "reset", "leave"], "an update that is open fails as the ranks part"
    assert engine.version.step == 1
