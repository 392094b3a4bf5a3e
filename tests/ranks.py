"""Real ranks for tests: processes from a forkserver that has torch loaded already, with a store and a topology each.

The first call starts the forkserver (seconds), each later one takes a fraction of a second.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckpt.device import Device
from ckpt.topology import Topology
from tests.device import devices

_PRELOAD = [
    "torch",
    "torch.distributed.tensor",
    "torch._dynamo",
    "pytest",
    "recipes.training",
    "tests.engines",
    "tests.ranks",
    "tests.states",
]


@dataclass(frozen=True)
class Dead:
    """What a rank of `expect_dead` leaves instead of a result; a negative exit code is a signal."""

    exitcode: int


@dataclass(frozen=True)
class _Job:
    """What every rank needs to know."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    world_size: int
    port: int
    agree_s: float
    grace_s: float
    process_group: bool
    device: str
    environment: Mapping[str, str]


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    process_group: bool = False,
    nodes: Sequence[int] | None = None,
    expect_dead: Collection[int] = (),
    agree_s: float = 30.0,
    grace_s: float = 20.0,
    device: str = "cpu",
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run module-level `fn(topology, *args)` on `world_size` processes and return what each returned, by rank.

    Any exception in a rank fails the test with the rank's traceback; so does the deadline, after every rank has written
    its stacks. What ranks print goes to this process's stderr.

    Args:
        process_group: also make the default process group, with the collectives of the device; on the CPU that is gloo.
        nodes: ranks per simulated host, such as [2, 2].
        expect_dead: ranks that end without a result; their place in the list is a `Dead`. Those that still run (stopped,
            say) when all the others are done are killed.
        agree_s, grace_s: `Topology.timeout_s` and `Topology.grace_s`.
        device: "cpu", "npu" (the stand-in) or "cuda". Each rank works on the one of its local rank before `fn` begins. The test
            is skipped where there are fewer devices than ranks.
        environment: set in each rank before it loads anything for its device.
    """
    if reason := devices.why_too_many(device, world_size):
        pytest.skip(reason)
    devices.prepare(device)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = _Job(fn, args, world_size, server.port, agree_s, grace_s, process_group, device, dict(environment or {}))
    hosts = [f"host-{node}" for node, ranks in enumerate(nodes or [world_size]) for _ in range(ranks)]
    assert len(hosts) == world_size, f"nodes {nodes} do not add up to {world_size} ranks"
    with tempfile.TemporaryDirectory(prefix="ranks-") as outputs, _started(job, hosts, Path(outputs)) as ranks:
        outcomes = _collect(ranks, time.monotonic() + timeout_s, set(expect_dead))
        printed = [(Path(outputs) / str(rank)).read_text(errors="replace") for rank in range(world_size)]
    sys.stderr.write("".join(f"--- rank {rank} printed\n{text}" for rank, text in enumerate(printed) if text))
    problems = [str(outcome) for outcome in outcomes if isinstance(outcome, _Problem)]
    if problems:
        raise AssertionError("\n".join(problems))
    return outcomes


def run_threads(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    agree_s: float = 5.0,
    timeout_s: float = 30.0,
    nodes: Sequence[int] | None = None,
    hosts: Sequence[str] | None = None,
) -> list[Any]:
    """Run `fn(topology, *args)` on ranks that are threads of this process: no deaths and no signals, but at once.

    Args:
        nodes: ranks per simulated host, such as [2, 2], neighbours on one host.
        hosts: or the host of each rank.
    """
    store = dist.HashStore()
    host_of = hosts or [f"host-{node}" for node, ranks in enumerate(nodes or [world_size]) for _ in range(ranks)]

    def run(rank: int) -> Any:
        with Topology.join(store, rank, world_size, host=host_of[rank], timeout_s=agree_s) as topology:
            return fn(topology, *args)

    with ThreadPoolExecutor(world_size) as ranks:
        return [result.result(timeout_s) for result in [ranks.submit(run, rank) for rank in range(world_size)]]


class _Problem(str):
    """A sentence about a rank that did not do what it should."""


@dataclass
class _Rank:
    number: int
    process: Any
    pipe: Connection


@contextmanager
def _started(job: _Job, hosts: list[str], outputs: Path) -> Iterator[list[_Rank]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    ranks = []
    try:
        with _autoload_off():
            for number, host in enumerate(hosts):
                here, there = context.Pipe()
                mates = [rank for rank, its_host in enumerate(hosts) if its_host == host]
                own = replace(job, environment={**job.environment, **devices.shown_to(job.device, mates)})
                process = context.Process(target=_rank_main, args=(own, number, host, there, outputs / str(number)))
                process.start()
                there.close()
                ranks.append(_Rank(number, process, here))
        yield ranks
    finally:
        for rank in ranks:
            if rank.process.is_alive():
                rank.process.kill()
            rank.process.join()
            rank.process.close()
            rank.pipe.close()


@contextmanager
def _autoload_off() -> Iterator[None]:
    """The forkserver takes its environment from us when it starts; it shall not look for device plugins.

    What a plugin starts, such as threads, would not live on in the ranks that are forked: each loads it anew.
    """
    before = {name: os.environ.get(name) for name in ("TORCH_DEVICE_BACKEND_AUTOLOAD", "OMP_NUM_THREADS")}
    os.environ.update(TORCH_DEVICE_BACKEND_AUTOLOAD="0", OMP_NUM_THREADS="1")
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _collect(ranks: list[_Rank], deadline: float, expect_dead: set[int]) -> list[Any]:
    """Wait for every rank's outcome: its result, a `Dead`, or a `_Problem`."""
    outcomes: dict[int, Any] = {}
    while len(outcomes) < len(ranks):
        waiting = [rank for rank in ranks if rank.number not in outcomes]
        if len(expect_dead) < len(ranks) and {rank.number for rank in waiting} <= expect_dead:
            for rank in waiting:
                rank.process.kill()  # stopped or asleep: it was never meant to answer
        ready = wait([rank.pipe for rank in waiting], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            return _give_up(ranks, outcomes)
        for rank in waiting:
            if rank.pipe in ready:
                outcomes[rank.number] = _outcome(rank, rank.number in expect_dead)
    return [outcomes[rank.number] for rank in ranks]


def _outcome(rank: _Rank, expect_dead: bool) -> Any:
    try:
        kind, value = rank.pipe.recv()
    except (EOFError, ConnectionResetError):
        rank.process.join()
        code = rank.process.exitcode
        return Dead(code) if expect_dead else _Problem(f"rank {rank.number} ended with exit code {code} and no result")
    if kind == "error":
        return _Problem(f"rank {rank.number} raised\n{value}")
    return _Problem(f"rank {rank.number} was to die, and returned {value!r}") if expect_dead else value


def _give_up(ranks: list[_Rank], outcomes: dict[int, Any]) -> list[Any]:
    late = [rank for rank in ranks if rank.number not in outcomes]
    for rank in late:
        os.kill(rank.process.pid, signal.SIGUSR1)  # write all stacks
        os.kill(rank.process.pid, signal.SIGCONT)
    time.sleep(1.0)
    for rank in late:
        outcomes[rank.number] = _Problem(
            f"rank {rank.number} did not end before the deadline; its stacks are on stderr"
        )
    return [outcomes[rank.number] for rank in ranks]


def _rank_main(job: _Job, rank: int, host: str, pipe: Connection, output: Path) -> None:
    sys.stdout.reconfigure(line_buffering=True)
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    torch.set_num_threads(1)
    try:
        outcome = ("result", _run(job, rank, host))
    except BaseException:
        outcome = ("error", traceback.format_exc())
    pipe.send(outcome)


def _run(job: _Job, rank: int, host: str) -> Any:
    os.environ.update(job.environment)
    devices.make_importable(job.device)
    store = dist.TCPStore(
        "127.0.0.1", job.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=max(job.agree_s, 30))
    )
    topology = Topology.join(
        dist.PrefixStore("topology", store), rank, job.world_size, host=host, timeout_s=job.agree_s, grace_s=job.grace_s
    )
    with topology:
        device = devices.made(job.device)
        device.use(topology.local_rank)
        with _process_group(job, device, rank, store):
            return job.fn(topology, *job.args)


@contextmanager
def _process_group(job: _Job, device: Device, rank: int, store: dist.Store) -> Iterator[None]:
    if not job.process_group:
        yield
        return
    dist.init_process_group(
        device.backends,
        store=dist.PrefixStore("process group", store),
        rank=rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=60),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()
