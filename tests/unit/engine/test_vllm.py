"""vLLM's servers as rollouts: a version reaches the answers of all, or of none. On a stand-in; tests/servers has the real vLLM."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from ckpt.engine.inference.vllm_servers import VllmServers, VllmTrainer
from ckpt.errors import CheckpointError, ConfigurationError, MissingStateError
from ckpt.ranks.waiting import in_thread
from tests.support.covering import sampled
from tests.support.stand_in_vllm import Model, Server, Source, installed

TIMEOUT_S = 20.0
_PATIENCE_S = 3 * TIMEOUT_S  # workers may take TIMEOUT_S to notice that the trainers are gone


@pytest.fixture
def plugin() -> Iterator[Any]:
    with installed() as made:
        yield made


@pytest.fixture(scope="module")
def two_servers() -> Iterator[list[Server]]:
    with ExitStack() as stack:
        made = [Server() for _ in range(2)]
        for server in made:
            stack.callback(server.close)
        yield made


class Job:
    """Servers of two workers each, and one trainer that has joined them."""

    def __init__(self, servers: list[Server]) -> None:
        self.servers, self.source = servers, Source()
        self.client = VllmServers([server.url for server in servers], timeout_s=TIMEOUT_S)
        self.trainer = self.joined()

    def joined(self) -> VllmTrainer:
        return VllmTrainer(self.client, self.source, settings={"timeout_s": TIMEOUT_S})

    def send(self, step: int) -> None:
        self.source.step = step
        self.trainer.send_weights(step)


@pytest.fixture
def make(two_servers: list[Server]) -> Iterator[Callable[..., Job]]:
    """Make a job on one or two of the servers. `gates`: see `Server`."""
    jobs = []

    def made(num_servers: int = 2, gates: dict[str, threading.Event] | None = None) -> Job:
        for server in two_servers:
            server.asked.clear()
            server.gates = gates or {}
        jobs.append(Job(two_servers[:num_servers]))
        return jobs[-1]

    yield made
    for job in jobs:
        job.trainer.shutdown()


def generated(server: Server) -> tuple[str, list[int]]:
    said = httpx.post(f"{server.url}/generate", timeout=TIMEOUT_S).json()
    return said["weight_version"], said["holds"]


def test_a_version_reaches_the_answers_of_all_servers_to_the_bit(make: Callable[..., Job]) -> None:
    job = make()
    for step in (3, 4, 9):
        job.send(step)
        assert [generated(server) for server in job.servers] == [(str(step), [step, step])] * 2
    assert job.trainer.report["step"] == 9 and job.trainer.report["num_bytes"] == (300 * 70 + 1000) * 4


def test_vllms_own_client_of_four_methods_does_it_too(plugin: Any, make: Callable[..., Job]) -> None:
    job = make(1)
    job.trainer.shutdown()
    (server,) = job.servers

    class Client:
        """As vLLM's for its HTTP routes."""

        def _post(self, route: str, **body: Any) -> None:
            httpx.post(f"{server.url}/{route}", json=body, timeout=TIMEOUT_S).raise_for_status()

        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            self._post("init_weight_transfer_engine", init_info=init_info)

        def start_weight_update(self) -> None:
            self._post("start_weight_update")

        def update_weights(self, update_info: Any) -> None:
            self._post("update_weights", update_info=update_info)

        def finish_weight_update(self, weight_version: str | None = None) -> None:
            self._post("finish_weight_update", **({"weight_version": weight_version} if weight_version else {}))

    info = plugin.CkptTrainerInitInfo(rank=0, num_workers=2, settings={"timeout_s": TIMEOUT_S})
    job.trainer = plugin.CkptTrainerWeightTransferEngine.trainer_init(info, client=Client(), source=job.source)
    assert job.trainer.is_sender
    job.send(5)
    assert generated(server) == ("5", [5, 5])
    assert "pause" not in server.asked, "this client cannot"


def test_requests_in_flight_end_on_the_version_before_and_others_wait_for_the_next(make: Callable[..., Job]) -> None:
    may_load = threading.Event()
    job = make(gates={"update_weights": may_load})
    may_load.set()
    job.send(1)
    may_load.clear()
    sending = in_thread(lambda: job.send(2), "sends")
    one, _ = job.servers
    assert wait_until(lambda: not one.running.is_set())
    asked = in_thread(lambda: generated(one), "asks")
    may_load.set()
    sending.result(TIMEOUT_S)
    assert asked.result(TIMEOUT_S) == ("2", [2, 2])


def test_servers_serve_while_a_version_arrives(make: Callable[..., Job]) -> None:
    job = make(1)
    job.send(1)
    may_yield, asked = threading.Event(), threading.Event()

    class Slow(Source):
        def __iter__(self) -> Iterator[Any]:
            asked.set()
            may_yield.wait(TIMEOUT_S)
            yield from super().__iter__()

    job.trainer.source = job.source = Slow()
    sending = in_thread(lambda: job.send(2), "sends")
    assert asked.wait(TIMEOUT_S)
    assert wait_until(lambda: job.servers[0].asked.count("start_weight_update") == 2)
    assert generated(job.servers[0]) == ("1", [1, 1])
    may_yield.set()
    sending.result(TIMEOUT_S)
    assert generated(job.servers[0]) == ("2", [2, 2])


def test_trainers_that_are_gone_after_the_commit_are_not_needed(make: Callable[..., Job]) -> None:
    may_load = threading.Event()
    job = make(gates={"update_weights": may_load})
    sending = in_thread(lambda: job.send(6), "sends")
    assert wait_until(lambda: all("pause" in server.asked for server in job.servers))
    job.trainer.shutdown()  # as a process that ends: it leaves the others
    with pytest.raises(CheckpointError):
        sending.result(_PATIENCE_S)
    may_load.set()
    for server in job.servers:
        assert wait_until(lambda server=server: server.version == "6" and server.running.is_set())
    assert [generated(server) for server in job.servers] == [("6", [6, 6])] * 2
    job.trainer = job.joined()
    job.send(7)
    assert [generated(server) for server in job.servers] == [("7", [7, 7])] * 2


@sampled("failing", [0, 1])
def test_a_server_whose_worker_cannot_load_serves_no_half_version_if_the_trainers_are_gone(make: Callable[..., Job], failing: int) -> None:
    may_load = threading.Event()
    job = make(gates={"update_weights": may_load})
    worker = job.servers[0].workers[failing]
    worker.call("set_fails", True)
    sending = in_thread(lambda: job.send(6), "sends")
    assert wait_until(lambda: all("pause" in server.asked for server in job.servers))
    job.trainer.shutdown()
    with pytest.raises(CheckpointError):
        sending.result(_PATIENCE_S)
    may_load.set()
    assert wait_until(lambda: [server.version for server in job.servers] == ["6: not loaded", "6"])
    assert not job.servers[0].running.is_set() and generated(job.servers[1]) == ("6", [6, 6])
    worker.call("set_fails", False)
    job.trainer = job.joined()
    job.send(7)
    assert [generated(server) for server in job.servers] == [("7", [7, 7])] * 2


def test_trainers_that_are_gone_before_the_commit_leave_the_version_before(make: Callable[..., Job]) -> None:
    job = make()
    job.send(1)

    class Ends(Source):
        def __iter__(self) -> Iterator[Any]:
            yield next(super().__iter__())
            assert wait_until(lambda: all("start_weight_update" in server.asked[-1:] for server in job.servers))
            job.trainer.shutdown()
            raise RuntimeError("the trainer ends")

    job.trainer.source = Ends()
    with pytest.raises((CheckpointError, RuntimeError)):
        job.send(2)
    assert [generated(server) for server in job.servers] == [("1", [1, 1])] * 2
    job.trainer = job.joined()  # in a new process; vLLM's session of the one before is still open
    job.send(3)
    assert [generated(server) for server in job.servers] == [("3", [3, 3])] * 2


def test_a_worker_that_cannot_load_is_named_and_no_server_serves_until_the_next_version(make: Callable[..., Job]) -> None:
    job = make()
    job.send(1)
    worker = job.servers[1].workers[1]
    worker.call("set_fails", True)
    with pytest.raises(CheckpointError, match="rank 4.*the model does not take this"):
        job.send(2)
    assert not any(server.running.is_set() for server in job.servers)
    worker.call("set_fails", False)
    job.send(3)
    assert [generated(server) for server in job.servers] == [("3", [3, 3])] * 2


def test_weights_that_the_served_model_misses_are_refused(make: Callable[..., Job]) -> None:
    job = make(1)
    job.source.names = ["one"]
    with pytest.raises(MissingStateError, match="no weights for 1 parameters of the served model, such as two"):
        job.send(1)
    job.source.names = ["one", "two"]
    job.send(2)
    assert generated(job.servers[0]) == ("2", [2, 2])


def test_an_error_of_the_source_leaves_the_version_before(make: Callable[..., Job]) -> None:
    job = make()
    job.send(1)

    class Fails(Source):
        def __iter__(self) -> Iterator[Any]:
            yield next(super().__iter__())
            raise ValueError("no more weights")

    working, job.trainer.source = job.source, Fails()
    with pytest.raises(CheckpointError, match="no more weights"):
        job.trainer.send_weights(2)
    assert [generated(server) for server in job.servers] == [("1", [1, 1])] * 2
    job.trainer.source = working
    job.send(3)
    assert [generated(server) for server in job.servers] == [("3", [3, 3])] * 2


def test_a_server_that_was_started_again_catches_up(two_servers: list[Server], make: Callable[..., Job]) -> None:
    there, gone, new = two_servers[0], Server(num_workers=1), Server(num_workers=1)
    job = Job([there, gone])
    try:
        job.send(1)
        gone.kill()
        with pytest.raises(CheckpointError, match=f"the inference engine at {gone.url}/start_weight_update did not answer|rank 3"):
            job.send(2)
        assert generated(there) == ("1", [1, 1])
        job.client = job.trainer.client = VllmServers([there.url, new.url], timeout_s=TIMEOUT_S)
        job.trainer.rejoin()
        job.send(2)
        assert generated(there) == ("2", [2, 2]) and generated(new) == ("2", [2])
    finally:
        job.trainer.shutdown()
        new.close()


def test_bad_arguments_are_refused_in_one_sentence(plugin: Any, make: Callable[..., Job]) -> None:
    job = make(1)
    init = plugin.CkptTrainerWeightTransferEngine.trainer_init
    info = plugin.CkptTrainerInitInfo
    with pytest.raises(ConfigurationError, match="expected a source of all weights"):
        init(info(rank=0), client=job.client, source=Source(held={"one"}))
    with pytest.raises(ConfigurationError, match="rank=1: this is rank 0"):
        init(info(rank=1), client=job.client, source=Source())
    with pytest.raises(ConfigurationError, match="engine=naive: expected one that sends to other processes"):
        init(info(rank=0, engine="naive"), client=job.client, source=Source())
    with pytest.raises(CheckpointError, match="is not up after 0.1 s"):
        init(info(rank=0), client=VllmServers(["http://127.0.0.1:9"], timeout_s=0.1), source=Source())
    with pytest.raises(ConfigurationError, match="pause_mode=stop: expected"):
        VllmServers(["http://127.0.0.1:9"], pause_mode="stop")
    job.trainer.shutdown()
    with pytest.raises(ConfigurationError, match="call rejoin"):
        job.send(1)


@pytest.mark.parametrize("quantized_by", ["UnquantizedLinearMethod", "GPTQLinearMethod"])
def test_a_quantization_that_an_update_on_a_cpu_would_break_is_refused(plugin: Any, quantized_by: str) -> None:
    model = Model()
    model.quant_method = type(quantized_by, (), {})()
    parallel = SimpleNamespace(rank=0, world_size=1, world_size_across_dp=1, data_parallel_index=0)
    configs = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(quantization="gptq"))
    worker = plugin.CkptWeightTransferEngine(None, configs, torch.device("cpu"), model)
    join = partial(worker.init_transfer_engine, worker.parse_init_info({}))
    if quantized_by.startswith("Un"):
        join()
        return
    with pytest.raises(ConfigurationError, match="quantized by GPTQLinearMethod: on CPUs, expected int8 with a scale per output"):
        join()


def test_registering_twice_is_registering_once(plugin: Any) -> None:
    plugin.register()
    plugin.register()
    assert plugin.factory.WeightTransferEngineFactory._registry == {
        "ckpt": ("ckpt.engine.inference.vllm", "CkptWeightTransferEngine")
    }


def wait_until(holds: Callable[[], bool]) -> bool:
    """Return whether it holds in time."""
    waiting = threading.Event()
    for _ in range(int(_PATIENCE_S * 100)):
        if holds():
            return True
        waiting.wait(0.01)
    return False
