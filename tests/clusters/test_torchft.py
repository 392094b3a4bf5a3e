"""`KeeperTransport` under torchft itself: its lighthouse and managers on loopback, a replica group that is killed and comes back."""

from __future__ import annotations

import inspect
import os
import re
import signal
import subprocess
import sys
import time
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from ckpt.integrations.torchft import KeeperTransport
from ckpt.ranks.addresses import LOOPBACK, interface_of
from tests.support.pace import patience
from tests.support.real_stores import free_ports

pytest.importorskip("torchft", reason="needs torchft: pip install torchft")
pytestmark = pytest.mark.filterwarnings("default")  # torchft's own

REPO = Path(__file__).parents[2]
_DIGEST = """tensors = [*model.parameters(), *(each for of_one in optimizer.state.values() for each in of_one.values())]
    digest = hashlib.sha256(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)).hexdigest()
    print(f"step {manager.current_step()}: {digest}", flush=True)
    time.sleep(0.03)"""


_LAST_STEP = """
import hashlib
import time
from pathlib import Path

def last_step():
    file = Path(__file__).with_name("last_step")
    return int(file.read_text()) if file.exists() else 10**9

"""


def test_it_has_the_methods_of_the_interface() -> None:
    from torchft.checkpointing import CheckpointTransport

    names = {name for name, value in vars(CheckpointTransport).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert CheckpointTransport.__abstractmethods__ <= names
    for name in names:
        theirs = inspect.signature(getattr(CheckpointTransport, name)).parameters.values()
        ours = inspect.signature(getattr(KeeperTransport, name)).parameters.values()
        assert [(each.name, each.kind, each.default) for each in ours] == [(each.name, each.kind, each.default) for each in theirs], name


def test_it_passes_torchfts_own_test_of_transports(tmp_path: Path) -> None:
    from torchft.checkpointing.transport_test import run_multi_recovery_test

    run_multi_recovery_test(unittest.TestCase(), lambda rank, world_size: KeeperTransport(path=tmp_path), torch.device("cpu"))
    assert [*tmp_path.glob("*/*")] == []


class _Group:
    """A replica group of one rank under an agent of torchrun.

    Attributes:
        digests: step -> digest of the state after it, as printed.
    """

    def __init__(self, number: int, program: Path, environment: dict[str, str], port: int) -> None:
        self._log = program.with_name(f"group-{number}-{port}.log")
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", f"--master-port={port}", str(program)]
        with self._log.open("wb") as log:
            self._agent = subprocess.Popen(
                command,
                env={**environment, "REPLICA_GROUP_ID": str(number)},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def digests(self) -> dict[int, str]:
        return {int(step): digest for step, digest in re.findall(r"^step (\d+): (\w{64})$", self._log.read_text(), re.MULTILINE)}

    def await_step(self, is_so: Callable[[dict[int, str]], bool]) -> dict[int, str]:
        until = time.monotonic() + patience(90.0)
        while not is_so(self.digests):
            assert self._agent.poll() is None and time.monotonic() < until, self._log.read_text()[-8000:]
            time.sleep(0.02)
        return self.digests

    def kill(self) -> None:
        """Kill the agent and its rank with -9, and no keeper."""
        if self._agent.poll() is None:
            ranks = psutil.Process(self._agent.pid).children()
            os.killpg(self._agent.pid, signal.SIGKILL)
            for rank in ranks:
                if rank.is_running():
                    rank.kill()
        self._agent.wait()

    def await_end(self) -> None:
        assert self._agent.wait(timeout=patience(120.0)) == 0, self._log.read_text()[-8000:]


@contextmanager
def _lighthouse(port: int) -> Iterator[str]:
    binary = Path(sys.executable).with_name("torchft_lighthouse")
    options = ["--min_replicas", "1", "--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "2000", "--bind", f"{LOOPBACK}:{port}"]
    with subprocess.Popen([binary, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as lighthouse:
        try:
            yield f"http://{LOOPBACK}:{port}"
        finally:
            lighthouse.kill()


def test_a_group_that_is_killed_comes_back_with_the_state_of_the_healthy_one_to_the_bit(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    (text,) = re.findall(r"```python\n(import os\n.*?KeeperTransport.*?)```", (REPO / "docs/guides/tiers.md").read_text(), re.DOTALL)
    assert len(text.splitlines()) <= 30
    shown = re.search(r"print\(f\"step.*\)", text)
    assert shown is not None
    for old, new in ((shown[0], _DIGEST), ("KeeperTransport()", f"KeeperTransport(path={str(memory)!r})"), ("< 300", "< last_step()")):
        assert old in text
        text = text.replace(old, new)
    program = tmp_path / "train.py"
    program.write_text(_LAST_STEP + text)
    ports = iter(free_ports(4))
    with _lighthouse(next(ports)) as address:
        environment = {
            **os.environ,
            "TORCHFT_LIGHTHOUSE": address,
            "PYTHONPATH": str(REPO),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": interface_of(LOOPBACK) or "",
        }
        groups = [_Group(number, program, environment, next(ports)) for number in range(2)]
        try:
            for group in groups:
                group.await_step(lambda digests: len(digests) >= 10)
            groups[1].kill()
            at = max(groups[1].digests)
            groups[0].await_step(lambda digests: max(digests) >= at + 10)
            groups.append(_Group(1, program, environment, next(ports)))
            back = groups[2].await_step(lambda digests: len(digests) >= 10)
            assert min(back) > at + 10, "it goes on where the healthy one is"
            last_step = max(back) + 100
            (tmp_path / "new").write_text(str(last_step))
            (tmp_path / "new").rename(tmp_path / "last_step")
            for group in (groups[0], groups[2]):
                group.await_end()
            healthy, back = groups[0].digests, groups[2].digests
            common = back.keys() & healthy.keys()
            assert len(common) >= 10 and max(healthy) == max(back) == last_step
            assert {step: back[step] for step in common} == {step: healthy[step] for step in common}
            print(f"killed after step {at}, back at step {min(back)}, {len(common)} steps in common")
        finally:
            for group in groups:
                group.kill()
    until = time.monotonic() + patience(20.0)
    while [*memory.glob("*/*")] and time.monotonic() < until:
        time.sleep(0.1)
    assert [*memory.glob("*/*")] == []
