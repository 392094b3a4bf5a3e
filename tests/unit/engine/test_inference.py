"""What an inference engine is asked, word for word, and what an outlet does before and without any worker."""

from __future__ import annotations

import json
import os
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt.engine.base import WeightVersion
from ckpt.engine.wire.layout import WeightLayout
from ckpt.errors import CheckpointError, ConfigurationError

pytest.importorskip("zmq", reason="pyzmq comes with checkpoint-engine")
import zmq

from ckpt.engine.inference import inference, inference_requests
from ckpt.engine.inference.worker_line import WorkerLine

VERSION = WeightVersion(7, "0" * 32)
HANDLES = {"GPU-1": "ipc://@one.sock", "GPU-2": "ipc://@two.sock"}


class _Server:
    """An inference engine's server: it notes what it is asked, and answers as it is told."""

    def __init__(self, uds: Path | None = None) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.answer: tuple[int, str] = 200, "{}"
        noted = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                noted.asked.append((self.path, json.loads(body)))
                status, text = noted.answer
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: Any) -> None: ...

            def address_string(self) -> str:
                return ""

        class UnixServer(socketserver.UnixStreamServer):
            def get_request(self) -> Any:
                return self.socket.accept()[0], ("local", 0)

        self.server: Any = HTTPServer(("127.0.0.1", 0), Handler) if uds is None else UnixServer(str(uds), Handler)
        self.url = "http://localhost" if uds is not None else f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[_Server]:
    made = _Server()
    yield made
    made.close()


def test_sglang_is_asked_to_update_and_told_the_step(server: _Server) -> None:
    inference_requests.SglangRequest(server.url)(HANDLES, VERSION)
    body = {"zmq_handles": HANDLES, "flush_cache": True, "weight_version": "7"}
    assert server.asked == [("/update_weights_from_ipc", body)]


def test_a_server_behind_a_unix_socket_is_asked_there(tmp_path: Path) -> None:
    path = tmp_path / "server"
    server = _Server(path)
    try:
        inference_requests.SglangRequest(server.url, uds=str(path), flush_cache=False)(HANDLES, VERSION)
        assert [(where, body["flush_cache"]) for where, body in server.asked] == [("/update_weights_from_ipc", False)]
    finally:
        server.close()


def test_a_server_that_refuses_or_is_not_there_is_told_in_a_sentence(server: _Server) -> None:
    server.answer = 400, '{"success": false, "message": "Device UUID GPU-3 not found"}'
    with pytest.raises(CheckpointError, match=r"/update_weights_from_ipc refused \(400\): .*GPU-3 not found"):
        inference_requests.SglangRequest(server.url)(HANDLES, VERSION)
    with pytest.raises(CheckpointError, match="/update_weights_from_ipc did not answer: ConnectError"):
        inference_requests.SglangRequest("http://127.0.0.1:9")(HANDLES, VERSION)


def _never(*_: Any) -> None:
    raise AssertionError("it was asked")


def _layout(*sizes: int) -> WeightLayout:
    layout = WeightLayout(1 << 10, [0])
    for number, size in enumerate(sizes):
        layout.add(f"w{number}", torch.uint8, (size,))
    return layout


CPU = {"any name": torch.device("cpu")}


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="at least one worker"):
        inference.InferenceOutlet({}, _never)
    with pytest.raises(ConfigurationError, match=r"timeout_s=0, bucket_mib=256: expected more than 0"):
        inference.InferenceOutlet(CPU, _never, timeout_s=0)


def test_the_buffer_holds_the_largest_tensor_twice_is_no_larger_than_all_and_is_kept() -> None:
    with inference.InferenceOutlet(CPU, _never, bucket_mib=1) as outlet:
        outlet.check(_layout(100, 100))
        assert [one.nbytes for one in outlet.buffers.values()] == [2 * 512]
        outlet.check(_layout(5 << 20, 100))
        (first,) = outlet.buffers.values()
        assert first.nbytes == 2 * (5 << 20)
        outlet.check(_layout(2 << 20, 2 << 20))
        assert [one.data_ptr() for one in outlet.buffers.values()] == [first.data_ptr()]
    assert not outlet.buffers


def test_a_handle_of_host_memory_is_opened_once_and_says_if_it_is_gone() -> None:
    buffer = inference._buffer(1000, torch.device("cpu"))
    buffer.copy_(torch.arange(1000) % 251)
    opened, arguments = inference._handle(buffer)
    given = list(arguments)
    given[6] = 3  # what the package writes there
    there = opened(*given)
    assert torch.equal(there[:1000], buffer)
    buffer[500] = 99
    assert there[500] == 99, "it is the same memory"
    with pytest.raises(CheckpointError, match=f"memory of the weights in process {os.getpid()} is gone"):
        opened(given[0], given[1], given[2] + 1)
    del buffer
    with pytest.raises(CheckpointError, match="is gone"):
        opened(*given)
    assert there[500] == 99, "who has it mapped keeps it"


def test_a_model_beside_an_inference_engine_keeps_what_it_has_if_that_fails() -> None:
    seen: list[str] = []

    class One:
        def __init__(self, name: str, fails: bool = False) -> None:
            self.name, self.fails = name, fails

        def check(self, layout: Any) -> None:
            seen.append(f"{self.name} checks")

        def load(self, weights: Any, version: Any) -> None:
            names = "".join(name for name, _ in weights)
            seen.append(f"{self.name} loads {names}")
            if self.fails:
                raise ZeroDivisionError(self.name)

    weights = [("a", torch.zeros(1)), ("b", torch.zeros(1))]
    both = inference.Sinks(One("engine"), One("model"))
    both.check(_layout(1))
    both.load(iter(weights), VERSION)
    assert seen == ["engine checks", "model checks", "engine loads ab", "model loads ab"]
    seen.clear()
    with pytest.raises(ZeroDivisionError, match="engine"):
        inference.Sinks(One("engine", fails=True), One("model")).load(iter(weights), VERSION)
    assert seen == ["engine loads ab"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user for a moment")
def test_a_worker_of_another_user_hears_nothing() -> None:
    with zmq.Context() as context:
        line = WorkerLine(context, "GPU-1")
        line.say("weights")
        for user, hears in ((65534, False), (0, True)):
            os.seteuid(user)
            try:
                # in a context of its own, which ends with its last attempt to connect, while this is still that user
                with zmq.Context() as own, own.socket(zmq.REP) as worker:
                    worker.connect(line.address)
                    for _ in range(30):
                        line.look()
                        if worker.poll(10):
                            break
                    assert bool(worker.poll(0)) is hears
            finally:
                os.seteuid(0)
        line.close()
