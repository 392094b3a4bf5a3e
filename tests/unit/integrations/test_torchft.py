"""`KeeperTransport` without torchft: what arrives is what was sent, or an error in time, and the memory of a sender ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt.errors import CheckpointNotFoundError, ConfigurationError, CorruptCheckpointError
from ckpt.integrations.torchft import KeeperTransport
from ckpt.storage.keeper.hosts import HostsStore
from tests.support.pace import patience
from tests.support.states import ALL_DTYPES, random_bits, require_equal_states, same_bits

_LONG = timedelta(seconds=patience(20.0))
_SHORT = timedelta(seconds=0.3)


@pytest.fixture
def transport(tmp_path: Path) -> Iterator[Callable[[], KeeperTransport]]:
    """Makes transports, which are shut down at the end."""
    made: list[KeeperTransport] = []

    def make() -> KeeperTransport:
        made.append(KeeperTransport(path=tmp_path))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


def _state(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    other = {
        "dtypes": {str(dtype): random_bits((4, 3), dtype, seed) for dtype in ALL_DTYPES},
        "shapes": [torch.empty(0), torch.empty(3, 0, 2), torch.tensor(7), torch.arange(12.0).view(3, 4).T, torch.arange(9)[::2]],
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "plain": (None, True, seed, 2.5, float("inf"), "a", b"b", {1, 2}, (1, (2,))),
        "numpy": np.float32(2.5),
        "ordered": OrderedDict(b=torch.ones(2), a=[1, {"x": torch.zeros(1)}]),
        "default": defaultdict(list, {3: [torch.ones(1)]}),
        "nothing": {},
        "none": [],
    }
    user = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "other": other}
    return {"user": {"default": user}, "torchft": {"step": seed, "batches_committed": 2 * seed}}


def _kinds(state: Any) -> Any:
    """The types of all values of a nested state."""
    inner = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list | tuple) else ()
    return type(state), [(key, _kinds(value)) for key, value in inner]


@contextmanager
def _waiting(receiver: KeeperTransport, metadata: str, step: int) -> Iterator[Callable[[], Any]]:
    """A receiver waits for a step in another thread; yields what returns its state."""
    with ThreadPoolExecutor(1) as threads:
        coming = threads.submit(receiver.recv_checkpoint, 0, metadata, step, _LONG)
        time.sleep(0.2)
        yield coming.result


def _soon(is_so: Callable[[], bool]) -> bool:
    until = time.monotonic() + patience(20.0)
    while not is_so() and time.monotonic() < until:
        time.sleep(0.02)
    return is_so()


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("step-*/**/*") if path.is_file()]


def test_a_state_arrives_to_the_bit_with_its_containers(transport: Callable[[], KeeperTransport]) -> None:
    sender, receiver = transport(), transport()
    for step in (3, 4):
        sender.send_checkpoint([1], step, _state(step), _LONG)
        got = receiver.recv_checkpoint(0, sender.metadata(), step, _LONG)
        require_equal_states(_state(step), got)
        assert _kinds(got) == _kinds(_state(step))


@pytest.mark.parametrize("state", [torch.arange(3.0), [torch.ones(2), 1], {}, None, {1: {}}])
def test_a_state_needs_not_be_a_dictionary(transport: Callable[[], KeeperTransport], state: Any) -> None:
    sender = transport()
    sender.send_checkpoint([1], 0, state, _LONG)
    require_equal_states(state, sender.recv_checkpoint(0, sender.metadata(), 0, _LONG))


def test_several_receive_from_two_senders_at_once(transport: Callable[[], KeeperTransport]) -> None:
    senders, receivers = [transport(), transport()], [transport() for _ in range(4)]
    for number, sender in enumerate(senders):
        sender.send_checkpoint([2, 3], 5, _state(number), _LONG)
    pairs = [(receiver, number) for receiver in receivers for number in range(2)]
    with ThreadPoolExecutor(len(pairs)) as threads:
        coming = [
            threads.submit(receiver.recv_checkpoint, number, senders[number].metadata(), 5, _LONG)
            for receiver, number in pairs
        ]
        for (_, number), got in zip(pairs, coming, strict=True):
            require_equal_states(_state(number), got.result())


def test_what_is_sent_is_a_copy_and_is_waited_for(transport: Callable[[], KeeperTransport]) -> None:
    sender, weight = transport(), torch.zeros(1000)
    with _waiting(transport(), sender.metadata(), 7) as received:
        sender.send_checkpoint([1], 7, {"weight": weight}, _LONG)
        sender.disallow_checkpoint()
        weight.fill_(1.0)
        assert same_bits(received()["weight"], torch.zeros(1000))


def test_a_step_that_is_not_sent_is_an_error_in_time(transport: Callable[[], KeeperTransport]) -> None:
    sender = transport()
    sender.send_checkpoint([1], 1, {"a": 1}, _LONG)
    began = time.monotonic()
    with pytest.raises(CheckpointNotFoundError, match="timed out: step-2 was not sent within 0.3 s"):
        sender.recv_checkpoint(0, sender.metadata(), 2, _SHORT)
    assert time.monotonic() - began < patience(2.0)


@pytest.mark.parametrize("metadata", ["<n/a>", "http://host:1234/checkpoint/", "[1]", "7", ""])
def test_another_transport_is_named(transport: Callable[[], KeeperTransport], metadata: str) -> None:
    with pytest.raises(ConfigurationError, match="rank 3 sends its state otherwise than by KeeperTransport"):
        transport().recv_checkpoint(3, metadata, 1, _LONG)


def test_what_is_neither_a_tensor_nor_plain_is_one_sentence(transport: Callable[[], KeeperTransport]) -> None:
    sender = transport()
    with pytest.raises(ConfigurationError, match=r"user\.default\.lock.*lock") as raised:
        sender.send_checkpoint([1], 1, {"user": {"default": {"lock": threading.Lock()}}}, _LONG)
    assert "\n" not in str(raised.value)
    with pytest.raises(CheckpointNotFoundError):
        sender.recv_checkpoint(0, sender.metadata(), 1, _SHORT)


def test_a_changed_byte_is_noticed(transport: Callable[[], KeeperTransport], tmp_path: Path) -> None:
    sender = transport()
    sender.send_checkpoint([1], 1, {"weight": torch.randn(1000), "rate": 0.5}, _LONG)
    for file in _files(tmp_path):
        data = file.read_bytes()
        if data:
            file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
            with pytest.raises(CorruptCheckpointError):
                sender.recv_checkpoint(0, sender.metadata(), 1, _LONG)
            file.write_bytes(data)
    assert sender.recv_checkpoint(0, sender.metadata(), 1, _LONG)["rate"] == 0.5


def test_a_sender_that_is_shut_down_ends_those_who_wait_and_those_who_read(
    transport: Callable[[], KeeperTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = transport(), transport()
    with _waiting(receiver, sender.metadata(), 1) as received:
        sender.shutdown()
        with pytest.raises(OSError):
            received()
    sender = transport()
    sender.send_checkpoint([1], 1, {"a": torch.ones(1000), "b": torch.ones(1000)}, _LONG)
    read = HostsStore.get_into

    def read_and_shut_down(store: HostsStore, key: str, *arguments: Any) -> int:
        count = read(store, key, *arguments)
        if key.endswith("manifest.json"):
            sender.shutdown()
        return count

    metadata = sender.metadata()
    monkeypatch.setattr(HostsStore, "get_into", read_and_shut_down)
    with pytest.raises(OSError):
        receiver.recv_checkpoint(0, metadata, 1, _LONG)


def test_the_memory_is_free_a_step_later_and_after_a_shutdown(transport: Callable[[], KeeperTransport], tmp_path: Path) -> None:
    sender = transport()
    sender.send_checkpoint([1], 1, {"a": torch.ones(1000)}, _LONG)
    sender.disallow_checkpoint()
    assert sender.recv_checkpoint(0, sender.metadata(), 1, _LONG)["a"].sum() == 1000
    sender.disallow_checkpoint()
    assert _files(tmp_path) == []
    sender.send_checkpoint([1], 2, {"a": torch.ones(1000)}, _LONG)
    sender.send_checkpoint([1], 2, {"a": torch.zeros(1000)}, _LONG)
    assert sender.recv_checkpoint(0, sender.metadata(), 2, _LONG)["a"].sum() == 0
    sender.shutdown()
    assert [*tmp_path.glob("*/*")] == []


_SENDER = """
import sys, time, torch
from datetime import timedelta
from ckpt.integrations.torchft import KeeperTransport
transport = KeeperTransport(path=sys.argv[1])
transport.send_checkpoint([1], 1, {"a": torch.ones(1000)}, timedelta(seconds=20))
print(transport.metadata(), flush=True)
time.sleep(300)
"""


def test_the_memory_of_a_sender_that_is_killed_is_free_soon(transport: Callable[[], KeeperTransport], tmp_path: Path) -> None:
    receiver = transport()
    folder = tmp_path / "other"
    folder.mkdir()
    with subprocess.Popen([sys.executable, "-c", _SENDER, str(folder)], stdout=subprocess.PIPE, text=True) as sender:
        try:
            assert sender.stdout is not None
            metadata = sender.stdout.readline()
            assert receiver.recv_checkpoint(0, metadata, 1, _LONG)["a"].sum() == 1000
        finally:
            sender.kill()
    assert _soon(lambda: [*folder.glob("*/*")] == [])
    with pytest.raises(OSError):
        receiver.recv_checkpoint(0, metadata, 1, _LONG)


def test_a_keeper_that_was_killed_is_started_again(transport: Callable[[], KeeperTransport]) -> None:
    sender = transport()
    old = sender.metadata()
    os.kill(sender._keeper.pid, signal.SIGKILL)
    assert _soon(lambda: not sender._keeper.is_there())
    assert sender.metadata() != old
    sender.send_checkpoint([1], 1, {"a": 1}, _LONG)
    assert sender.recv_checkpoint(0, sender.metadata(), 1, _LONG) == {"a": 1}
