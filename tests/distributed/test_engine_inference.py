"""Weights handed to the workers of an inference engine: what checkpoint-engine's own worker code loads, in other processes, bit for bit.

Every run has one rank that is a rollout, and ranks that stand for the inference engine's workers: those run the package's extension class
for vLLM, around which vLLM is played by a few lines.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ckpt.engine import BroadcastCheckpointEngine, LiveModel
from ckpt.engine.base import NamedTensor, WeightVersion
from ckpt.engine.inference.inference import InferenceOutlet, Sinks
from ckpt.engine.wire.layout import WeightLayout
from ckpt.errors import CheckpointError, RankAbsentError
from ckpt.ranks.topology import Topology
from tests.device.devices import ADVERSARY, CUDA, NPU
from tests.device.saves import torch_device
from tests.support.ranks import run_ranks
from tests.support.states import Held, random_bits, same_bits

BUCKET_MIB = 1 / 16
SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "embed.weight": ((301, 211), torch.float32),  # 248 KiB: a buffer is as large as the largest
    "layers.0.weight": ((130, 77), torch.bfloat16),
    "layers.0.experts": ((3, 40, 31), torch.float8_e4m3fn),
    "layers.0.scale": ((), torch.float32),
    "layers.0.nothing": ((0, 4), torch.float32),
    "layers.1.weight": ((301, 200), torch.float32),
    "layers.1.rotation": ((65, 7), torch.complex64),
    "layers.1.mask": ((3001,), torch.bool),
    "layers.1.steps": ((), torch.int64),
    "layers.2.weight": ((290, 200), torch.float32),
    "norm": ((301,), torch.float32),
}
BATCHES = 4
"""So many times the workers are given something: the three large tensors do not fit beside each other."""
TIED = {"head.weight": "embed.weight"}
FAILED = "Some workers failed to update weights"
"""What the package says to workers that shall stop, and we do."""
STOPPED = f"RuntimeError: {FAILED}"


def weights_of(step: int) -> dict[str, torch.Tensor]:
    return {
        name: random_bits(shape, dtype, seed=100 * step + number)
        for number, (name, (shape, dtype)) in enumerate(SHAPES.items())
    }


def layout_of(weights: Mapping[str, torch.Tensor]) -> WeightLayout:
    layout = WeightLayout(1 << 16, [0], TIED)
    for name, tensor in weights.items():
        layout.add(name, tensor.dtype, tensor.shape)
    return layout


# The inference engine


class Model:
    """What vLLM calls a model: it loads what it is given, and looks at it no more."""

    def __init__(self) -> None:
        self.held: dict[str, torch.Tensor] = {}
        self.batches: list[list[str]] = []
        self.finished = 0
        self.trouble: Callable[[Model], None] | None = None

    def load_weights(self, weights: Iterable[NamedTensor]) -> None:
        named = list(weights)
        self.batches.append([name for name, _ in named])
        if self.trouble is not None:
            self.trouble(self)
        self.held |= {name: tensor.cpu().clone() for name, tensor in named}


def _play_vllm(name: str) -> None:
    """The two modules of vLLM that the extension imports."""
    platforms, utils = ModuleType("vllm.platforms"), ModuleType("vllm.model_executor.model_loader.utils")
    platforms.current_platform = SimpleNamespace(device_type="cuda", get_device_uuid=lambda index: name)  # type: ignore[attr-defined]

    def finish(model: Model, config: Any, device: torch.device) -> None:
        if model.trouble is not None and model.trouble.__name__ == "_in_the_end":
            raise ZeroDivisionError("a bug behind the load")
        model.finished += 1

    utils.process_weights_after_loading = finish  # type: ignore[attr-defined]
    for module in (
        platforms,
        utils,
        *map(ModuleType, ("vllm", "vllm.model_executor", "vllm.model_executor.model_loader")),
    ):
        sys.modules[module.__name__] = module


@contextmanager
def _without_vllm_behind() -> Iterator[None]:
    """Around a case: the modules of `_play_vllm` go at its end."""
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]


def _extension(topology: Topology, model: Model, device: str) -> Any:
    """A worker of vLLM with the package's extension, as far as that looks at it."""
    from checkpoint_engine.worker import VllmColocateWorkerExtension

    if device == "cpu":
        from ckpt.engine.parameter_server import use_host_memory

        use_host_memory()  # the package knows no CPU
    _play_vllm(f"worker-{topology.rank}")
    worker = VllmColocateWorkerExtension()
    worker.device = torch.device("cpu", 0) if device == "cpu" else torch_device(device, topology)
    worker.model_runner = SimpleNamespace(model=model)
    worker.model_config = None
    return worker


class Engine:
    """The collective call of an inference engine: what the workers are asked and what became of it goes through the ranks' store."""

    def __init__(self, topology: Topology, num_workers: int, *, waits: bool = True) -> None:
        self._store = topology.store_for("inference")
        self._waits = waits
        self._ranks = range(topology.world_size - num_workers, topology.world_size)
        self.calls = 0

    def workers(self, device: str = "cpu") -> dict[str, torch.device]:
        return {
            f"worker-{rank}": torch.device("cpu") if device == "cpu" else torch.device(device, rank)
            for rank in self._ranks
        }

    def request(self, handles: Mapping[str, str], version: WeightVersion) -> object:
        """Ask all workers, and wait for them, as `collective_rpc` does; or return at once with something, as a future."""
        self.calls += 1
        call, store = self.calls, self._store.clone()  # type: ignore[attr-defined]  # a call that failed may still wait
        store.set(f"asked/{call}", json.dumps(dict(handles)))
        if not self._waits:
            return "sent"
        said = [store.get(f"done/{call}/{rank}").decode() for rank in self._ranks]
        if any(said):
            raise RuntimeError("; ".join(filter(None, said)))
        return None

    def answer(self, number: int, rank: int, call: Callable[[dict[str, str]], None]) -> str:
        """One worker's part of the call of this number."""
        self._store.set_timeout(timedelta(seconds=30))
        handles = json.loads(self._store.get(f"asked/{number}"))
        try:
            call(handles)
            said = ""
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        self._store.set(f"done/{number}/{rank}", said)
        return said


# Updates


@pytest.mark.parametrize("device", ["cpu", NPU, CUDA])
def test_the_packages_own_extension_loads_every_bit_of_three_updates(device: str) -> None:
    """The last worker takes its time; what it is given stays there until it has answered, and is there before it is told."""
    num_ranks = 2 if device == "cuda" else 3
    _, *workers = run_ranks(num_ranks, _three_updates, device, True, device=device, environment=ADVERSARY)
    for batches, finished in workers:
        assert finished == 3
        assert [name for batch in batches[: len(batches) // 3] for name in batch] == [*SHAPES]
        assert len(batches) == 3 * BATCHES


def test_a_request_that_returns_at_once_does_not_end_the_wait_for_the_workers() -> None:
    _, *workers = run_ranks(3, _three_updates, "cpu", False)
    assert [finished for _, finished in workers] == [3, 3]


@_without_vllm_behind()
def _three_updates(topology: Topology, device: str, waits: bool) -> Any:
    num_workers = topology.world_size - 1
    engine = Engine(topology, num_workers, waits=waits)
    if topology.rank:
        model = Model()
        model.trouble = _slow if topology.rank == num_workers else None
        worker = _extension(topology, model, device)
        for step in (1, 2, 3):
            assert engine.answer(step, topology.rank, worker.update_weights_from_ipc) == ""
            assert sorted(model.held) == sorted(SHAPES)
            assert all(same_bits(model.held[name], one) for name, one in weights_of(step).items())
        return model.batches, model.finished
    with InferenceOutlet(engine.workers(device), engine.request, bucket_mib=BUCKET_MIB, timeout_s=20.0) as outlet:
        for step in (1, 2, 3):
            weights = weights_of(step)
            if device != "cpu":  # as those in a receive buffer are there: copies from it are late
                weights = {name: one.pin_memory() for name, one in weights.items()}
            outlet.check(layout_of(weights))
            outlet.load(weights.items(), WeightVersion(step, "d"))
            assert outlet.version == (step, "d")
            assert [one.type for one in outlet.buffers] == (["cpu"] if device == "cpu" else []), (
                "a device's is given back"
            )
    return None


def _slow(model: Model) -> None:
    time.sleep(0.05)


def test_tied_weights_come_under_their_first_name_or_under_all() -> None:
    _, *workers = run_ranks(2, _tied)
    assert workers == [[[*SHAPES], [*SHAPES, *TIED]]]


@_without_vllm_behind()
def _tied(topology: Topology) -> Any:
    engine = Engine(topology, 1)
    if topology.rank:
        model, found = Model(), []
        worker = _extension(topology, model, "cpu")
        for number in (1, 2):
            assert engine.answer(number, topology.rank, worker.update_weights_from_ipc) == ""
            found.append([name for batch in model.batches for name in batch])
            model.batches.clear()
        assert same_bits(model.held["head.weight"], weights_of(2)["embed.weight"])
        return found
    for step, aliases in ((1, False), (2, True)):
        weights = weights_of(step)
        with InferenceOutlet(engine.workers(), engine.request, aliases=aliases, timeout_s=20.0) as outlet:
            outlet.check(layout_of(weights))
            outlet.load([*weights.items(), ("head.weight", weights["embed.weight"])], WeightVersion(step, "d"))
    return None


@pytest.mark.parametrize("delta", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_rollout_hands_what_comes_to_its_inference_engine_and_to_a_live_model(delta: bool) -> None:
    """In the second of four updates its worker fails: all ranks are told, and the live model keeps what it has."""
    trainer, rollout, worker = run_ranks(3, _rollout, delta)
    assert trainer == rollout and [version.step for version in trainer] == [1, 1, 2, 3]
    assert worker == 3


@_without_vllm_behind()
def _rollout(topology: Topology, delta: bool) -> Any:
    inference = Engine(topology, 1)
    if topology.rank == 2:
        model = Model()
        worker = _extension(topology, model, "cpu")
        for number, step in enumerate((1, 2, 2, 3), start=1):
            model.trouble = _in_the_second_batch if number == 2 else None
            model.batches.clear()
            said = inference.answer(number, topology.rank, worker.update_weights_from_ipc)
            assert said == ("" if number != 2 else STOPPED)
            assert number == 2 or all(same_bits(model.held[name], one) for name, one in weights_of(step).items())
        return model.finished
    versions = []
    with (
        BroadcastCheckpointEngine(1 << 16, timeout_s=20.0, delta=delta, delta_block_kib=4) as engine,
        InferenceOutlet(inference.workers(), inference.request, bucket_mib=BUCKET_MIB, timeout_s=15.0) as outlet,
    ):
        engine.init_process_group(topology.rank, 1, 1, store=topology.store_for("engine"))
        live = LiveModel(Held({name: torch.zeros_like(one) for name, one in weights_of(0).items()}))
        for number, step in enumerate((1, 2, 2, 3), start=1):
            with pytest.raises(CheckpointError) if number == 2 else nullcontext() as caught:
                if topology.rank == 0:
                    asyncio.run(engine.send_weights(weights_of(step).items(), step))
                else:
                    asyncio.run(engine.receive_into(Sinks(outlet, live), step))
            if caught is not None:
                why = (
                    "failed in phase load on rank 1: .*worker on worker-2 failed: ZeroDivisionError: a bug in the load"
                )
                assert re.search(why, str(caught.value)), caught.value
            if topology.rank:
                assert (outlet.version, live.version) == (None if number == 2 else engine.version, engine.version)
                now = weights_of(1 if number == 2 else step)
                assert all(same_bits(live.state_dict()[name], one) for name, one in now.items())
            versions.append(engine.version)
    return versions


# What goes wrong


def _in_the_second_batch(model: Model) -> None:
    if len(model.batches) == 2:
        raise ZeroDivisionError("a bug in the load")


def _in_the_end(model: Model) -> None:
    """Raised by the hook behind the load."""


def _killed(model: Model) -> None:
    if len(model.batches) == 2:
        os.kill(os.getpid(), signal.SIGKILL)


def _asleep(model: Model) -> None:
    if len(model.batches) == 2:
        time.sleep(1.4)


class Trouble:
    """What happens in one update.

    Args:
        sentence: of the error at the rollout.
        worker: what happens in the second worker's load.
        late_s: that it comes late by; None: not at all.
        told: the end of each worker.
    """

    def __init__(
        self,
        sentence: str,
        told: tuple[str, str],
        worker: Callable[[Model], None] | None = None,
        late_s: float | None = 0.0,
        refused: bool = False,
    ) -> None:
        self.sentence, self.told, self.worker, self.late_s, self.refused = sentence, told, worker, late_s, refused


TROUBLES = {
    "a load raises": Trouble(
        "worker on worker-2 failed: ZeroDivisionError: a bug in the load", (STOPPED, STOPPED), _in_the_second_batch
    ),
    "a hook raises": Trouble(
        "worker on worker-2 has ended in the middle|a bug behind the load",
        ("", "ZeroDivisionError: a bug behind the load"),
        _in_the_end,
    ),
    "a worker is killed": Trouble("worker on worker-2 has ended in the middle", (STOPPED, "killed by 9"), _killed),
    "a worker stands still": Trouble("worker on worker-2 did not answer for 0.7 s", (STOPPED, STOPPED), _asleep),
    "a worker comes late": Trouble(
        "worker on worker-2 did not answer for 0.7 s", (STOPPED, "AssertionError: "), None, 1.2
    ),
    "a worker does not come": Trouble("worker on worker-2 did not answer for 0.7 s", (STOPPED, "away"), None, None),
    "the request is refused": Trouble(
        "no such method", ("AssertionError: ", "AssertionError: "), None, 0.5, refused=True
    ),
}


@pytest.mark.parametrize(
    "troubles",
    [[*TROUBLES][:4], pytest.param([*TROUBLES][4:], marks=pytest.mark.full)],
    ids=["of workers that are there", "of others"],
)
def test_workers_that_fail_end_or_hang_fail_the_update_in_a_sentence_and_the_next_one_works(
    troubles: list[str],
) -> None:
    found, *workers = run_ranks(3, _troubles, troubles, timeout_s=60)
    for trouble in troubles:
        expected = TROUBLES[trouble]
        kind, sentence, took_s = found[trouble]
        assert any(part in sentence for part in expected.sentence.split("|")), (trouble, sentence)
        assert kind == ("RankAbsentError" if "did not answer" in expected.sentence else kind)
        assert took_s < 4.0, (trouble, took_s)
        told = tuple(worker[trouble] for worker in workers)
        # Both workers come late to a request that is refused; the others' loops end as the package's do.
        assert told[1] == expected.told[1] and (told[0] == expected.told[0] or expected.refused), (trouble, told)


@_without_vllm_behind()
def _troubles(topology: Topology, troubles: list[str]) -> dict[str, Any]:
    engine = Engine(topology, 2)
    found: dict[str, Any] = {}
    if topology.rank:
        model = Model()
        worker = _extension(topology, model, "cpu")
        for number, name in enumerate(troubles):
            trouble = TROUBLES[name]
            model.batches.clear()
            found[name] = _in_trouble(engine, topology.rank, 2 * number + 1, worker, model, trouble)
            model.trouble = None
            assert engine.answer(2 * number + 2, topology.rank, worker.update_weights_from_ipc) == ""
            assert all(same_bits(model.held[name], one) for name, one in weights_of(2 * number + 2).items())
        worker._zmq_ctx.destroy(linger=0)  # what one said that stood still may be for nobody
        return found
    with InferenceOutlet(engine.workers(), engine.request, bucket_mib=BUCKET_MIB) as outlet:
        for number, name in enumerate(troubles):
            trouble, step = TROUBLES[name], 2 * number + 1
            outlet.timeout_s = 0.7 if "did not answer" in trouble.sentence else 20.0
            weights = weights_of(step)
            outlet.check(layout_of(weights))
            outlet.request = _refusing(engine) if trouble.refused else engine.request
            began = time.monotonic()
            with pytest.raises((CheckpointError, RuntimeError)) as caught:
                outlet.load(weights.items(), WeightVersion(step, "d"))
            found[name] = type(caught.value).__name__, str(caught.value), time.monotonic() - began
            absent = isinstance(caught.value, RankAbsentError)
            assert absent == ("did not answer" in trouble.sentence), (name, found[name])
            assert outlet.version is None and not outlet.buffers
            outlet.request, outlet.timeout_s = engine.request, 20.0
            again = weights_of(step + 1)
            outlet.check(layout_of(again))
            outlet.load(again.items(), WeightVersion(step + 1, "d"))
            assert outlet.version == (step + 1, "d")
    return found


def _refusing(engine: Engine) -> Callable[[Mapping[str, str], WeightVersion], None]:
    """The server answers with an error, and has asked its workers all the same."""

    def request(handles: Mapping[str, str], version: WeightVersion) -> None:
        engine.calls += 1
        engine._store.set(f"asked/{engine.calls}", json.dumps(dict(handles)))
        raise CheckpointError("no such method")

    return request


def _in_trouble(engine: Engine, rank: int, number: int, worker: Any, model: Model, trouble: Trouble) -> str:
    is_victim = rank == 2
    if is_victim and trouble.late_s is None:
        return engine.answer(number, rank, lambda handles: None) or "away"
    if is_victim or trouble.refused:
        time.sleep(trouble.late_s or 0.0)
        model.trouble = trouble.worker if is_victim else None
    if is_victim and trouble.worker is _killed:
        handles = json.loads(engine._store.get(f"asked/{number}"))
        child = os.fork()
        if not child:
            worker.__dict__.pop("_zmq_ctx", None)  # a context is not for a process that was forked
            worker.update_weights_from_ipc(handles)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        engine._store.set(f"done/{number}/{rank}", "its worker was killed")
        return f"killed by {os.WTERMSIG(status)}"
    return engine.answer(number, rank, worker.update_weights_from_ipc)
