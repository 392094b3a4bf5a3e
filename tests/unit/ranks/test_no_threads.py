"""A system that gives a process no more threads: one sentence, and nothing is left open, locked or installed."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ckpt import Checkpointer
from ckpt.errors import CheckpointError
from ckpt.ranks.topology import Topology
from tests.support.pace import patience


def open_files() -> set[str]:
    gc.collect()
    return {f"{one} {os.readlink(one)}" for one in Path("/proc/self/fd").iterdir() if os.path.islink(one)}


def refused_after(num: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let `num` threads start, and no more; return the names of those refused."""
    start, refused, left = threading.Thread.start, [], [num]

    def start_or_refuse(self: threading.Thread) -> None:
        if left[0] == 0:
            refused.append(self.name)
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start_or_refuse)
    return refused


@pytest.mark.parametrize("num", range(4))
def test_a_run_that_gets_no_thread_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num: int
) -> None:
    def run() -> None:
        with Checkpointer(tmp_path, model=torch.nn.Linear(2, 2)) as checkpoints:
            checkpoints.restore()
            checkpoints.save(1)

    before, handler = open_files(), signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        refused = refused_after(num, patch)
        try:
            run()
        except CheckpointError as error:
            assert "gives this process no more threads" in str(error) and "\n" not in str(error)
        else:
            assert not refused
    assert signal.getsignal(signal.SIGTERM) == handler
    deadline = time.monotonic() + patience(5)  # a thread closes its pipe when it ends
    while not open_files() <= before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert open_files() <= before
    with Checkpointer(tmp_path, model=torch.nn.Linear(2, 2), overwrite=True) as checkpoints:  # nothing is held
        checkpoints.restore()
        checkpoints.save(2)
    assert [one.name for one in tmp_path.glob("*.owner.json")] == []


@pytest.mark.parametrize("num", range(4))
def test_ranks_that_get_no_thread_do_not_join(monkeypatch: pytest.MonkeyPatch, num: int) -> None:
    store = dist.TCPStore("localhost", 0, 1, True)
    join: Callable[[], Topology] = lambda: Topology.join(store, 0, 1)  # noqa: E731
    with monkeypatch.context() as patch:
        refused = refused_after(num, patch)
        try:
            join().close()
        except CheckpointError as error:
            assert "gives this process no more threads" in str(error)
        else:
            assert not refused
