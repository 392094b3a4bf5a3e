"""Real ranks for tests: processes that live for the whole test run, and give each case a store of its own and a new topology.

They come from a forkserver that has torch loaded already. A process in which a case has left something (`leaks`), in which it failed,
or from which its end was expected, runs no other.
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import zarr
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckpt.memory.device import Device
from ckpt.ranks.addresses import LOOPBACK
from ckpt.ranks.stores import serve
from ckpt.ranks.topology import Topology
from recipes.support.local_ranks import start_forkserver
from tests.device import devices
from tests.support import leaks
from tests.support.pace import patience

_PRELOAD = [
    "torch",
    "torch.distributed.pipelining",
    "torch.distributed.tensor",
    "torch.nn.parallel",
    "torch._dynamo",
    "pytest",
    "ckpt.backends.kimi_engine",
    "ckpt.backends.tensorstore",
    "ckpt.backends.zarr",
    "recipes.support.local_ranks",
    "recipes.training.syncing",
    "recipes.training.training",
    "tests.e2e.runs",
    "tests.support.engines",
    "tests.support.leaks",
    "tests.support.pace",
    "tests.support.ranks",
    "tests.support.states",
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
    number: int
    agree_s: float
    grace_s: float
    process_group: bool
    device: str
    environment: Mapping[str, str]
    folder: str
    is_only: bool


@dataclass(frozen=True)
class _Case:
    """A job, as one rank gets it."""

    job: _Job
    rank: int
    host: str
    place: int
    output: Path


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60.0,
    process_group: bool = False,
    nodes: Sequence[int] | None = None,
    expect_dead: Collection[int] = (),
    agree_s: float | None = None,
    grace_s: float | None = None,
    device: str = "cpu",
    environment: Mapping[str, str] | None = None,
    is_only: bool = False,
) -> list[Any]:
    """Run module-level `fn(topology, *args)` on `world_size` processes and return what each returned, by rank.

    Any exception in a rank fails the test with the rank's traceback; so does the deadline, after every rank has written
    its stacks. What ranks print goes to this process's stderr.

    Args:
        process_group: also make the default process group, with the collectives of the device; on the CPU that is gloo.
        nodes: ranks per simulated host, such as [2, 2].
        expect_dead: ranks that end without a result; their place in the list is a `Dead`. Those that still run (stopped,
            say) when all the others are done are killed.
        timeout_s: on a quiet machine, as all deadlines that shall not run out (`tests.support.pace`).
        agree_s, grace_s: `Topology.timeout_s` and `Topology.grace_s`; None: 30 and 20 s on a quiet machine.
        device: "cpu", "npu" (the stand-in) or "cuda". Each rank works on the one of its local rank before `fn` begins. The test
            is skipped where there are fewer devices than ranks.
        environment: set in each rank before it loads anything for its device.
        is_only: the processes are new, and run nothing else: for cases that measure memory, and for those on CUDA.
    """
    if reason := devices.why_too_many(device, world_size):
        pytest.skip(reason)
    devices.prepare(device)
    job = _Job(
        fn=fn,
        args=args,
        world_size=world_size,
        port=_pool.store.port,
        number=_pool.next_number(),
        agree_s=patience(30.0) if agree_s is None else agree_s,
        grace_s=patience(20.0) if grace_s is None else grace_s,
        process_group=process_group,
        device=device,
        environment=dict(environment or {}),
        folder=os.getcwd(),
        is_only=bool(expect_dead or is_only or device == "cuda"),
    )
    hosts = [f"host-{node}" for node, ranks in enumerate(nodes or [world_size]) for _ in range(ranks)]
    assert len(hosts) == world_size, f"nodes {nodes} do not add up to {world_size} ranks"
    with tempfile.TemporaryDirectory(prefix="ranks-") as outputs, _started(job, hosts, Path(outputs)) as ranks:
        outcomes = _collect(ranks, time.monotonic() + patience(timeout_s), set(expect_dead))
        printed = [(Path(outputs) / str(rank)).read_text(errors="replace") for rank in range(world_size)]
        sys.stderr.write("".join(f"--- rank {rank} printed\n{text}" for rank, text in enumerate(printed) if text))
        if problems := [str(outcome) for outcome in outcomes if isinstance(outcome, _Problem)]:
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
        return [
            result.result(patience(timeout_s)) for result in [ranks.submit(run, rank) for rank in range(world_size)]
        ]


class _Problem(str):
    """A sentence about a rank that did not do what it should."""


_Kind = tuple[str, int, tuple[tuple[str, str], ...]]
"""A device, the number of the one that a process has opened, and the environment in which it has loaded what it needs for it."""


@dataclass(eq=False)
class _Rank:
    """A process that runs cases, seen from outside; `number` is its rank in the case at hand."""

    process: Any
    pipe: Connection
    kind: _Kind
    number: int = -1

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()


@dataclass
class _Pool:
    """Processes that wait for a case, and the store's server for all cases."""

    idle: dict[_Kind, list[_Rank]] = field(default_factory=lambda: defaultdict(list))
    num_cases: int = 0

    @functools.cached_property
    def store(self) -> dist.TCPStore:
        return serve(LOOPBACK, timeout_s=patience(300.0))

    def next_number(self) -> int:
        self.num_cases += 1
        return self.num_cases

    def take(self, kind: _Kind) -> _Rank:
        return self.idle[kind].pop() if self.idle[kind] else _new_rank(kind)

    def give(self, rank: _Rank) -> None:
        """Take a process back whose case has ended well, once it has looked what the case has left."""
        try:
            left = rank.pipe.recv() if rank.pipe.poll(patience(_LOOKING_S)) else ["no answer"]
        except (EOFError, ConnectionResetError):
            left = ["it has ended"]
        if left:
            rank.end()
        else:
            self.idle[rank.kind].append(rank)

    def close(self) -> None:
        for idle in self.idle.values():
            while idle:
                idle.pop().end()


_LOOKING_S = 20.0
"""That a process may take to look what its case has left."""

_pool = _Pool()
atexit.register(_pool.close)


def forkserver() -> ForkServerContext:
    """What all ranks of this process are forked from, those of recipes, too: it has loaded all that they would.

    It does not look for device plugins: what one starts, such as threads, would not live on in ranks. Each loads it anew.
    """
    start_forkserver(_PRELOAD)
    return multiprocessing.get_context("forkserver")


def _new_rank(kind: _Kind) -> _Rank:
    context = forkserver()
    here, there = context.Pipe()
    process = context.Process(target=_rank_main, args=(there,))
    process.start()
    there.close()
    return _Rank(process, here, kind)


@contextmanager
def _started(job: _Job, hosts: list[str], outputs: Path) -> Iterator[list[_Rank]]:
    ranks: list[_Rank] = []
    is_well = False
    try:
        for number, host in enumerate(hosts):
            mates = [rank for rank, its_host in enumerate(hosts) if its_host == host]
            place = mates.index(number) if job.device != "cpu" else 0
            own = replace(job, environment={**job.environment, **devices.shown_to(job.device, mates)})
            kind = job.device, place, tuple(sorted(own.environment.items()))
            rank = _new_rank(kind) if job.is_only else _pool.take(kind)
            ranks.append(rank)
            rank.number = number
            rank.pipe.send(_Case(own, number, host, place, outputs / str(number)))
        yield ranks
        is_well = not job.is_only
    finally:
        for rank in ranks:
            _pool.give(rank) if is_well else rank.end()


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


def _rank_main(pipe: Connection) -> None:
    sys.stdout.reconfigure(line_buffering=True)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    torch.set_num_threads(1)
    leaks.watch_audit_hooks()
    gc.freeze()  # what is there now is not looked at again after each case
    before = None
    while (case := _next_case(pipe)) is not None:
        descriptor = os.open(case.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        _prepare(case.job, case.place)
        if before is None and not case.job.is_only:
            before = leaks.traces()
        try:
            outcome = ("result", _run(case.job, case.rank, case.host))
        except BaseException:
            outcome = ("error", traceback.format_exc())
        pipe.send(outcome)
        if before is None or outcome[0] == "error":
            return
        del outcome
        left, before = leaks.left_since(before)
        pipe.send(left)


def _next_case(pipe: Connection) -> _Case | None:
    try:
        return pipe.recv()
    except EOFError:  # the test run is over
        return None


def _prepare(job: _Job, place: int) -> None:
    """Make ready for a case whatever a later one would find there, too."""
    os.chdir(job.folder)  # that of an earlier case may be gone
    os.environ.update(job.environment)
    devices.make_importable(job.device)
    _store_at(job.port)
    if not job.is_only:
        _open_what_stays(job.device, place)


@functools.cache
def _open_what_stays(device: str, place: int) -> None:
    """Have libraries open what they keep: the device, libuv's pipe, zarr's event loop, and the last group that a DTensor has used."""
    hook = sys.excepthook
    devices.made(device).use(place)
    serve(LOOPBACK, timeout_s=patience(30.0))
    zarr.create_array(store={}, shape=(1,), dtype="i4")[:] = 1
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    distribute_tensor(torch.ones(1), init_device_mesh("cpu", (1,)), [Shard(0)]).full_tensor()
    dist.destroy_process_group()
    sys.excepthook = hook


@functools.cache
def _store_at(port: int) -> dist.TCPStore:
    return dist.TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False)


@contextmanager
def _as_if_new() -> Iterator[None]:
    """Random numbers, and which warnings have been seen, as in a process that has just begun. Torch's groups leave a hook, too."""
    hook, states = sys.excepthook, (torch.random.get_rng_state(), random.getstate(), np.random.get_state())
    try:
        with warnings.catch_warnings():
            yield
    finally:
        torch.random.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])
        sys.excepthook = hook


def _run(job: _Job, rank: int, host: str) -> Any:
    server = _store_at(job.port)
    server.set_timeout(timedelta(seconds=max(job.agree_s, patience(30.0))))
    store = dist.PrefixStore(f"case {job.number}", server)
    topology = Topology.join(
        dist.PrefixStore("topology", store), rank, job.world_size, host=host, timeout_s=job.agree_s, grace_s=job.grace_s
    )
    with topology:
        device = devices.made(job.device)
        device.use(topology.local_rank)
        with _as_if_new(), _process_group(job, device, rank, store):
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
        timeout=timedelta(seconds=patience(60.0)),
    )
    store.set(f"has joined {rank}", "")
    # Who left before all have joined would break their group.
    store.wait([f"has joined {one}" for one in range(job.world_size)])
    try:
        yield
    finally:
        dist.destroy_process_group()
