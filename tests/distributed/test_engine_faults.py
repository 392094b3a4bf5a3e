"""What goes wrong while weights are on their way: every rank learns it in time, no rollout is ever seen between two versions, and the next
update works.

Every rollout has a thread that reads its live model all the time, and holds each look against the version that the model says it is.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d

from ckpt.engine import CheckpointEngineRegistry, LiveModel, MasterMetadata, members, naive
from ckpt.engine.base import NamedTensor, WeightVersion
from ckpt.engine.versioned import VersionedEngine
from ckpt.engine.wire import transfer
from ckpt.engine.wire.group import OwnGroup
from ckpt.errors import CheckpointError, ConfigurationError, CorruptCheckpointError, RankAbsentError
from ckpt.ranks.addresses import LOOPBACK
from ckpt.ranks.stores import serve
from ckpt.ranks.topology import Topology
from tests.support.async_runs import until
from tests.support.covering import and_in_full, rows
from tests.support.engines import joined
from tests.support.ranks import Dead, run_ranks
from tests.support.states import Held, global_index

NUM_TENSORS, SHAPE = 6, (96, 301)  # 113 KiB each, in buckets of 64 KiB
TIMEOUT_S = 3.0
JOIN_S = 20.0
"""Patience of ranks that make their first connections while other tests run beside them."""
GRACE_S = 4.0
"""That word may take to get around on a busy machine, on top of `timeout_s`."""
BY_TRANSPORT = ["broadcast", "kimi_ckpt_engine"]


def weights_of(step: int) -> dict[str, torch.Tensor]:
    return {f"w{n}": global_index(SHAPE) + 100_000 * step + n for n in range(NUM_TENSORS)}


@cache
def _wanted(step: int) -> dict[str, torch.Tensor]:
    """For comparing: nothing writes to them."""
    return weights_of(step)


def _seen(weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What one look compares: of each weight an element out of every 61, from its beginning to its end."""
    return {name: weight.view(-1)[::61] for name, weight in weights.items()}


_seen_at = cache(lambda step: _seen(_wanted(step)))


class Watched:
    """A live model that a thread reads all the time, from `watch` to `end`."""

    def __init__(self) -> None:
        self.held = Held(weights_of(0))
        self.live = LiveModel(self.held)
        self.problems: list[str] = []
        self.caught: BaseException | None = None
        self.looks = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def watch(self) -> None:
        self._thread.start()

    def _look(self) -> None:
        seen = _seen(self.held.state)
        while not self._over.is_set():
            with (
                suppress(CheckpointError),
                self.live.reading() as version,
            ):  # it refuses to be read after a load that failed
                wanted = _seen_at(0 if version is None else version.step)
                wrong = [name for name, one in seen.items() if not torch.equal(one, wanted[name])]
                if wrong:
                    self.problems.append(f"{wrong} are not those of {version}")
            self.looks += 1
            time.sleep(0.003)

    def require(self, step: int) -> None:
        """Fail unless this step's weights are there, and never were there parts of two."""
        until(lambda looks=self.looks: self.looks > looks + 1 or not self._thread.is_alive())  # type: ignore[misc]
        assert self._thread.is_alive() and not self.problems, self.problems
        assert (self.live.version.step if self.live.version else 0) == step
        assert all(torch.equal(one, _wanted(step)[name]) for name, one in self.held.state.items())

    def require_unreadable(self) -> None:
        """Fail if anybody may see weights of which some are new and some are old."""
        assert not self.problems, self.problems
        with pytest.raises(CheckpointError, match="parts of two versions"), self.live.reading():
            pass

    def end(self) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()


@contextmanager
def watched(engine: VersionedEngine) -> Iterator[Watched]:
    """A model, which is read all the time on rollouts."""
    one = Watched()
    if engine.rank in engine.rollouts:
        one.watch()
    try:
        yield one
    finally:
        one.end()


def be_patient(engine: VersionedEngine, seconds: float) -> None:
    """From the next agreement on."""
    engine.members.timeout_s = seconds
    if engine.topology is not None and engine.topology._agreement is not None:
        engine.topology.timeout_s = engine.topology._agreement.timeout_s = seconds


def update(engine: VersionedEngine, step: int, watched: Watched, weights: Iterable[NamedTensor] | None = None) -> None:
    if engine.rank in engine.trainers:
        asyncio.run(engine.send_weights(weights_of(step).items() if weights is None else weights, step))
    if engine.rank in engine.rollouts:
        asyncio.run(engine.receive_into(watched.live, step))


def error_in(call: Callable[[], Any]) -> tuple[str, str, int | None, float]:
    """Class, sentence and rank of what a call raises, and how long that took."""
    began = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        call()
    return type(caught.value).__name__, str(caught.value), caught.value.rank, time.monotonic() - began


# Somebody raises


class Refusing:
    """A sink that raises a bug of the user's, at the check or in the middle of the load."""

    def __init__(self, live: LiveModel, where: str) -> None:
        self._live, self._where = live, where

    def check(self, layout: Any) -> None:
        if self._where == "check":
            raise ZeroDivisionError("a bug in the check")
        self._live.check(layout)

    def load(self, weights: Iterable[NamedTensor], version: WeightVersion) -> None:
        def broken() -> Iterator[NamedTensor]:
            for number, named in enumerate(weights):
                if number == 3:
                    raise ZeroDivisionError("a bug in the load")
                yield named

        self._live.load(broken() if self._where == "load" else weights, version)


def _half_way(step: int) -> Iterator[NamedTensor]:
    for number, named in enumerate(weights_of(step).items()):
        if number == NUM_TENSORS // 2:
            raise ZeroDivisionError("a bug in the export")
        yield named


@contextmanager
def flipped_after_the_digest(engine: VersionedEngine) -> Iterator[None]:
    """A bit of the pool falls over when its digest has been taken."""
    pool = engine.pool
    assert pool is not None
    seal = pool.seal

    def flip(layout: Any) -> dict[int, str]:
        digests = seal(layout)
        pool.bucket(layout, min(digests))[77] ^= 4
        return digests

    pool.seal = flip  # type: ignore[method-assign]
    try:
        yield
    finally:
        del pool.seal


@contextmanager
def flipped_in_the_receive_buffer() -> Iterator[None]:
    """A bit falls over between the network and the check."""
    modules = (transfer, naive)
    digest = transfer.digest_of_bucket

    def flip(host: torch.Tensor, *args: Any) -> str:
        host[33] ^= 1
        return digest(host, *args)

    for module in modules:
        module.digest_of_bucket = flip  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in modules:
            module.digest_of_bucket = digest  # type: ignore[assignment]


@contextmanager
def without_memory(engine: VersionedEngine) -> Iterator[None]:
    def refuse(_layout: Any) -> None:
        raise MemoryError("no room for the weights")

    receive_buffer = engine.receive_buffers[0]
    receive_buffer.let_go()
    receive_buffer.make_room = receive_buffer.make_shared_room = refuse  # type: ignore[method-assign]
    try:
        yield
    finally:
        del receive_buffer.make_room, receive_buffer.make_shared_room


async def _consume(engine: VersionedEngine, step: int, how: str) -> None:
    weights = engine.receive_weights(step)
    async for name, _ in weights:
        if name == "w3":
            if how == "raises":
                raise ZeroDivisionError("a bug of the consumer")
            return


def _stop_early(engine: VersionedEngine, step: int, how: str) -> BaseException | None:
    """Consume in an event loop that never runs again; the traceback of what is returned refers to the iterator."""
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(_consume(engine, step, how))
    except ZeroDivisionError as error:
        return error
    finally:
        loop.close()
    return None


TROUBLES = {
    "a check raises": "a bug in the check",
    "there is no memory": "no room for the weights",
    "a bucket changes in the receive buffer": "with other bytes than rank|has changed in the host memory",
    "a bucket changes in the pool": "with other bytes than rank|has changed in the host memory",
    "a generator raises": "a bug in the export",
    "all generators raise": "a bug in the export",
    "a load raises": "a bug in the load",
    "a consumer raises": "the consumer of the weights stopped after 3 of them",
    "a consumer stops": "the consumer of the weights stopped after 3 of them",
}


def victim_of(trouble: str, trainers: Sequence[int], rollouts: Sequence[int]) -> int:
    """The rank that it happens to: of the rollouts of one host, only the first one receives."""
    if trouble in ("a generator raises", "a bucket changes in the pool"):
        return trainers[-1]
    return rollouts[0] if trouble in ("a bucket changes in the receive buffer", "there is no memory") else rollouts[-1]


def _trouble(engine: VersionedEngine, watched: Watched, step: int, trouble: str, is_victim: bool) -> None:
    """An update in which something happens to one rank, or all."""
    with ExitStack() as stack:
        if trouble == "a bucket changes in the receive buffer" and is_victim:
            stack.enter_context(flipped_in_the_receive_buffer())
        if trouble == "a bucket changes in the pool" and is_victim:
            stack.enter_context(flipped_after_the_digest(engine))
        if trouble == "there is no memory" and is_victim:
            stack.enter_context(without_memory(engine))
        broken = trouble == "all generators raise" or (trouble == "a generator raises" and is_victim)
        if engine.rank in engine.trainers:
            asyncio.run(engine.send_weights(_half_way(step) if broken else weights_of(step).items(), step))
        if engine.rank in engine.rollouts:
            if trouble.startswith("a consumer ") and is_victim:
                watched.caught = _stop_early(engine, step, trouble.split()[-1])
                raise CheckpointError("the consumer knows", rank=engine.rank)
            where = trouble.split()[1] if is_victim else ""
            asyncio.run(engine.receive_into(Refusing(watched.live, where), step))


def _raise(topology: Topology, num_trainers: int, num_rollouts: int, name: str, troubles: list[str]) -> dict[str, Any]:
    said = {}
    with joined(topology, num_trainers, num_rollouts, name, timeout_s=10.0) as engine, watched(engine) as live:
        for step, trouble in zip(range(0, 1000, 10), troubles, strict=False):
            update(engine, step + 1, live)
            is_victim = engine.rank == victim_of(trouble, engine.trainers, engine.rollouts)
            is_victim = is_victim or trouble == "all generators raise"
            said[trouble] = error_in(partial(_trouble, engine, live, step + 2, trouble, is_victim))
            with topology.phase("all have raised"):
                pass
            if engine.rank in engine.rollouts:
                # Behind the commit a rollout has the new weights, if it has loaded them; which is said.
                if trouble == "a load raises" and is_victim:
                    live.require_unreadable()
                else:
                    live.require(step + (2 if trouble.startswith(("a load", "a consumer")) and not is_victim else 1))
            assert engine.version is not None and engine.version.step == step + 1
            update(engine, step + 2, live)
            if engine.rank in engine.rollouts:
                live.require(step + 2)
            assert engine.version.step == step + 2
    return said


@pytest.mark.parametrize(
    ("name", "num_trainers", "num_rollouts"),
    [
        ("broadcast", 2, 2),
        ("naive", 2, 2),
        pytest.param("kimi_ckpt_engine", 2, 1, marks=pytest.mark.full),
        pytest.param("kimi_ckpt_engine", 2, 2, marks=pytest.mark.full),
        pytest.param("broadcast", 1, 3, marks=pytest.mark.full),
    ],
)
def test_what_one_rank_raises_all_ranks_raise_and_nothing_has_changed(
    name: str, num_trainers: int, num_rollouts: int
) -> None:
    troubles = list(TROUBLES)
    if name == "naive":
        troubles = [one for one in troubles if "consumer" not in one]
    world_size = num_trainers if name == "naive" else num_trainers + num_rollouts
    ranks = run_ranks(world_size, _raise, num_trainers, num_rollouts, name, troubles)
    for trouble in troubles:
        rollouts = range(0 if name == "naive" else num_trainers, world_size)
        victim = victim_of(trouble, range(num_trainers), rollouts)
        cause = TROUBLES[trouble]
        for rank, one in enumerate(ranks):
            kind, sentence, at, took_s = one[trouble]
            assert took_s < 8.0, (trouble, one[trouble])
            if trouble.startswith("a consumer") and rank == victim:
                continue
            assert any(part in sentence for part in cause.split("|")), (trouble, sentence)
            assert (kind, sentence, at) == ranks[0][trouble][:3], "alike on all ranks"
            if trouble not in ("all generators raise", "a bucket changes in the pool"):
                assert at == victim and f"rank {victim}" in sentence, (trouble, sentence)
            if "bucket" in trouble:
                assert kind == CorruptCheckpointError.__name__
            if trouble.startswith(("a load", "a consumer")):
                assert "2 all the same" in sentence or world_size < 3


# Somebody is killed


def _killed_at(engine: VersionedEngine, where: str) -> None:
    """Let this process be killed at a phase, or in the middle of the transfer."""
    topology = engine.topology
    assert topology is not None

    def die(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if where == "between buckets":
        calls = []

        def broadcast_until(group: OwnGroup, *args: Any) -> Any:
            calls.append(args)
            return die() if len(calls) == 3 else original(group, *args)

        original = OwnGroup.broadcast
        OwnGroup.broadcast = broadcast_until  # type: ignore[method-assign]
        return
    phase = topology.phase

    def until_here(name: str) -> Any:
        return die() if name == where else phase(name)

    topology.phase = until_here  # type: ignore[method-assign, assignment]


def _rejoin(engine: VersionedEngine, store: Any, survivors: list[int], rank: int, num_trainers: int) -> None:
    """Those that are left form an engine anew; what has to be told goes through a store of somebody else."""
    engine.leave()
    new_rank = survivors.index(rank)
    engine.members.is_master = new_rank == 0
    if engine.members.is_master:
        master = engine.prepare()
        store.set("meet again", json.dumps(list(master or ())))
    master = MasterMetadata(*json.loads(store.get("meet again")))
    engine.init_process_group(new_rank, num_trainers, len(survivors) - num_trainers, master)


@contextmanager
def _engine(
    topology: Topology, num_trainers: int, num_rollouts: int, name: str, held: bool
) -> Iterator[VersionedEngine]:
    """One that meets in the first trainer's store, or in one that another process holds, as launchers do."""
    if not held:
        with joined(topology, num_trainers, num_rollouts, name, timeout_s=JOIN_S) as engine:
            yield engine
        return
    engine = CheckpointEngineRegistry.new(name, 1 << 16, timeout_s=JOIN_S)
    assert isinstance(engine, VersionedEngine)
    with engine:
        store = topology.store_for("engine")
        host = f"host-{topology.node_rank}"
        engine.init_process_group(topology.rank, num_trainers, num_rollouts, store=store, host=host)
        yield engine


def _kill(
    topology: Topology, num_trainers: int, num_rollouts: int, name: str, victim: int, where: str, held: bool
) -> tuple[str, str, int | None, float]:
    with _engine(topology, num_trainers, num_rollouts, name, held) as engine, watched(engine) as live:
        update(engine, 1, live)
        be_patient(engine, TIMEOUT_S)
        if engine.rank == victim:
            _killed_at(engine, where)
        said = error_in(lambda: update(engine, 2, live))
        is_rollout = engine.rank in engine.rollouts
        if is_rollout:
            if victim == 0 and not held and where == "load":
                # The store has gone with it: a rollout may have read that the weights have come to all, or not.
                live.require(live.live.version.step if live.live.version else 0)
            else:
                live.require(2 if where == "load" else 1)
        assert engine.version is not None and engine.version.step == 1
        began = time.monotonic()
        be_patient(engine, JOIN_S)
        survivors = [rank for rank in range(topology.world_size) if rank != victim]
        store = topology.store_for("again")
        _rejoin(engine, store, survivors, topology.rank, num_trainers - (victim < num_trainers))
        assert time.monotonic() - began < JOIN_S
        for step in (3, 4):
            update(engine, step, live)
            if is_rollout:
                live.require(step)
    return said


KILLS = [
    ("broadcast", 2, "between buckets", False),
    ("broadcast", 3, "load", True),
    ("kimi_ckpt_engine", 0, "between buckets", False),
]
WHERE = ["offload", "transfer", "between buckets", "load"]


@and_in_full(
    ("name", "victim", "where", "held"),
    KILLS,
    [
        ("kimi_ckpt_engine", 2, "between buckets", True),
        ("broadcast", 1, "offload", True),
        *rows({"name": BY_TRANSPORT, "victim": [0, 1, 2], "where": WHERE, "held": [False, True]}, 2),
    ],
)
def test_a_rank_that_is_killed_is_named_and_those_that_are_left_go_on(
    name: str, victim: int, where: str, held: bool
) -> None:
    ranks = run_ranks(4, _kill, 2, 2, name, victim, where, held, expect_dead=[victim])
    assert ranks[victim] == Dead(-signal.SIGKILL)
    for said in ranks[:victim] + ranks[victim + 1 :]:
        kind, sentence, at, took_s = said
        assert took_s < TIMEOUT_S + GRACE_S, said
        assert kind == RankAbsentError.__name__, said
        if victim == 0 and not held:
            assert "the store through which the ranks agree is gone, with rank 0" in sentence
        else:
            assert at == victim and f"rank {victim} (pid " in sentence and "was killed or ended" in sentence, said


# Somebody stands still


class Sleeping(Refusing):
    """A sink that takes long."""

    def __init__(self, live: LiveModel, seconds: float) -> None:
        super().__init__(live, "")
        self._seconds = seconds

    def check(self, layout: Any) -> None:
        time.sleep(self._seconds)
        super().check(layout)


def _stand_still(topology: Topology, name: str, where: str, notes: Path) -> tuple[str, str, int | None, float]:
    """Rank 2 is stopped, or sleeps, and comes back when the others have raised."""
    with _engine(topology, 1, 2, name, True) as engine, watched(engine) as live:
        update(engine, 1, live)
        be_patient(engine, TIMEOUT_S)
        is_victim = topology.rank == 2
        landed = engine.receive_buffers[0].bucket(0) if topology.rank else torch.empty(0)
        if is_victim and where == "between buckets":
            calls = []
            original = OwnGroup.broadcast

            def stop(group: OwnGroup, *args: Any) -> Any:
                calls.append(args)
                if len(calls) == 3:
                    (notes / "stopped").write_text(f"{os.getpid()}")
                    os.kill(os.getpid(), signal.SIGSTOP)
                return original(group, *args)

            OwnGroup.broadcast = stop  # type: ignore[method-assign]
        sleeping = is_victim and where == "check"
        sink: Any = Sleeping(live.live, 2 * TIMEOUT_S) if sleeping else live.live

        def second() -> None:
            if engine.rank in engine.trainers:
                asyncio.run(engine.send_weights(weights_of(2).items(), 2))
            else:
                asyncio.run(engine.receive_into(sink, 2))

        said = error_in(second)
        if topology.rank == 0 and where == "between buckets":
            os.kill(int((notes / "stopped").read_text()), signal.SIGCONT)
        if topology.rank != 0:
            live.require(1)
        with topology.phase("all have raised"):
            pass
        be_patient(engine, JOIN_S)
        for step in (2, 3):
            update(engine, step, live)
            if topology.rank != 0:
                live.require(step)
                if where == "between buckets":
                    now = engine.receive_buffers[0].bucket(0)
                    assert now.data_ptr() != landed.data_ptr(), "what comes late shall not come there"
    return said


@pytest.mark.parametrize(
    ("name", "where"),
    [("broadcast", "between buckets")]
    + [
        pytest.param(name, where, marks=pytest.mark.full)
        for name in BY_TRANSPORT
        for where in ("between buckets", "check")
        if (name, where) != ("broadcast", "between buckets")
    ],
)
def test_a_rollout_that_stands_still_is_named_and_learns_it_when_it_goes_on(
    tmp_path: Path, name: str, where: str
) -> None:
    ranks = run_ranks(3, _stand_still, name, where, tmp_path, nodes=[1, 1, 1], agree_s=60.0)
    for rank, (kind, sentence, at, took_s) in enumerate(ranks):
        assert kind == RankAbsentError.__name__, sentence
        assert (at, "rank 2 (pid " in sentence) == (2, True), sentence
        assert rank == 2 or took_s < TIMEOUT_S + GRACE_S, (rank, took_s)


class Waiting(Refusing):
    """A sink that waits in the middle of the load of step 2."""

    def __init__(self, live: LiveModel, wait: Callable[[], object]) -> None:
        super().__init__(live, "")
        self._wait = wait

    def load(self, weights: Iterable[NamedTensor], version: WeightVersion) -> None:
        def slowly() -> Iterator[NamedTensor]:
            for number, named in enumerate(weights):
                if number == 2 and version.step == 2:
                    self._wait()
                yield named

        super().load(slowly(), version)


def _leave_it_behind(topology: Topology) -> list[str] | None:
    """The others leave the last rollout in the middle of its load, and go on; returns the weights that it got and are not of step 2."""
    is_last, store = topology.rank == topology.world_size - 1, topology.store_for("notes")
    assert store is not None
    held = Held(weights_of(0))

    def wait() -> None:
        store.set("loads", "")
        store.get("go on")

    sink: Any = Waiting(LiveModel(held), wait) if is_last else LiveModel(held)
    with joined(topology, 1, 3, "broadcast") as engine:

        def update(step: int) -> None:
            if topology.rank == 0:
                asyncio.run(engine.send_weights(weights_of(step).items(), step))
            else:
                asyncio.run(engine.receive_into(sink, step))

        def second() -> None:
            with suppress(CheckpointError):
                update(2)

        update(1)
        assert topology.rank == 0 or engine.receive_buffers[0].place is not None, "they share memory"
        task = threading.Thread(target=second)
        task.start()
        if not is_last:
            store.get("loads")
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(members, "_LEAVE_S", 0.2)
                _rejoin(engine, store, [0, 1, 2], topology.rank, 1)
            update(3)
            with topology.part("of those that go on", [0, 1, 2]) as others, others.phase("step 3 is there"):
                pass
            store.set("go on", "")
        task.join()
        with topology.phase("all are done"):
            pass
        return [name for name, one in held.state.items() if not one.equal(_wanted(2)[name])] if is_last else None


def test_a_rollout_that_is_left_in_the_middle_of_its_load_loads_one_version() -> None:
    assert run_ranks(4, _leave_it_behind)[-1] == []


def _fail_while_sharing(topology: Topology) -> bool:
    with joined(topology, 2, 2, "naive", "npu") as engine:
        sink = Refusing(LiveModel(Held(weights_of(0))), "load" if topology.rank else "")

        def update() -> None:
            weights = {name: one.to(engine.device.torch_device) for name, one in weights_of(1).items()}
            asyncio.run(engine.send_weights(weights.items(), 1))
            assert engine.receive_buffers[0].place is not None
            asyncio.run(engine.receive_into(sink, 1))

        error_in(update)
        return engine.receive_buffers[0].place is None


@pytest.mark.full
@pytest.mark.npu
def test_rollouts_share_other_memory_after_a_failure_for_one_of_them_may_still_load_from_it() -> None:
    assert run_ranks(2, _fail_while_sharing, device="npu") == [True, True]


def _be_late(topology: Topology, name: str) -> float:
    """Rank 2 comes late by less than the others' patience, in the middle of the transfer, too."""
    with _engine(topology, 1, 2, name, True) as engine, watched(engine) as live:
        update(engine, 1, live)
        be_patient(engine, TIMEOUT_S)
        if topology.rank == 2:
            original = OwnGroup.broadcast
            calls = []

            def late(group: OwnGroup, *args: Any) -> Any:
                calls.append(args)
                if len(calls) == 3:
                    time.sleep(0.5 * TIMEOUT_S)
                return original(group, *args)

            OwnGroup.broadcast = late  # type: ignore[method-assign]
            time.sleep(0.3 * TIMEOUT_S)
        began = time.monotonic()
        update(engine, 2, live)
        took_s = time.monotonic() - began
        if topology.rank != 0:
            live.require(2)
    return took_s


@pytest.mark.full
@pytest.mark.parametrize("name", BY_TRANSPORT)
def test_a_rank_that_is_late_by_less_than_the_timeout_is_waited_for(name: str) -> None:
    assert max(run_ranks(3, _be_late, name, nodes=[1, 1, 1], agree_s=60.0)) > 0.5 * TIMEOUT_S


# Tasks


async def _cancelled(call: Any, seconds: float) -> None:
    task = asyncio.ensure_future(call)
    await asyncio.sleep(seconds)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _slowly(step: int, seconds: float) -> AsyncIterator[NamedTensor]:
    for named in weights_of(step).items():
        await asyncio.sleep(seconds / NUM_TENSORS)
        yield named


async def _beside(call: Any) -> int:
    """How often another task of the loop gets its turn."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.01)

    counting = asyncio.ensure_future(count())
    try:
        await call
    finally:
        counting.cancel()
    return turns


def _cancel(topology: Topology, name: str) -> dict[str, Any]:
    said: dict[str, Any] = {}
    with _engine(topology, 1, 1, name, True) as engine, watched(engine) as live:
        update(engine, 1, live)
        sends = topology.rank == 0

        def send(step: int, seconds: float = 0.0) -> Any:
            return engine.send_weights(_slowly(step, seconds), step)

        def receive(step: int) -> Any:
            return engine.receive_into(live.live, step)

        # A trainer is cancelled in the middle of its generator.
        if sends:
            asyncio.run(_cancelled(send(2, 1.0), 0.3))
        else:
            said["sender"] = error_in(lambda: asyncio.run(receive(2)))
            live.require(1)
        # A rollout is cancelled while it waits for the trainer; the loop is free meanwhile.
        if sends:
            said["receiver"] = error_in(lambda: asyncio.run(send(2, 0.8)))
        else:
            began = time.monotonic()
            asyncio.run(_cancelled(receive(2), 0.2))
            said["took"] = time.monotonic() - began
            live.require(1)
        # The next one works, and other tasks have their turns while it waits.
        if sends:
            said["turns"] = asyncio.run(_beside(send(2, 0.5)))
        else:
            said["turns"] = asyncio.run(_beside(receive(2)))
            live.require(2)
    return said


@pytest.mark.parametrize(
    "name", ["broadcast", *(pytest.param(one, marks=pytest.mark.full) for one in BY_TRANSPORT[1:])]
)
def test_a_call_that_is_cancelled_fails_the_update_everywhere_and_the_loop_is_free_meanwhile(name: str) -> None:
    sender, receiver = run_ranks(2, _cancel, name)
    kind, sentence, rank, took_s = receiver["sender"]
    assert (kind, rank) == ("CheckpointError", 0) and "the call was cancelled" in sentence, sentence
    assert took_s < JOIN_S / 2, "it is told, not found out"
    kind, sentence, rank, took_s = sender["receiver"]
    assert (kind, rank) == ("CheckpointError", 1) and "the call was cancelled" in sentence, sentence
    assert receiver["took"] < JOIN_S / 2, "a call that is cancelled ends at once"
    assert min(sender["turns"], receiver["turns"]) > 5


# Two engines, and groups


def _two_engines(topology: Topology, name: str) -> int:
    """Two engines of one process, whose updates run side by side in two tasks."""
    before = len(distributed_c10d._world.pg_map)
    with ExitStack() as stack:
        engines, models = [], []
        for number in range(2):
            engine = stack.enter_context(CheckpointEngineRegistry.new(name, (1 + number) << 16, timeout_s=10.0))  # type: ignore[arg-type, type-var]
            assert isinstance(engine, VersionedEngine)
            store = topology.store_for(f"engine {number}")
            engine.init_process_group(topology.rank, 1, 1, store=store)
            engine.init_process_group(topology.rank, 1, 1, store=store)  # which does nothing
            with pytest.raises(ConfigurationError, match="call leave"):
                engine.init_process_group(topology.rank, 1, 1, store=topology.store_for("other"))
            engines.append(engine)
            models.append(stack.enter_context(watched(engine)))

        async def both(step: int) -> None:
            if topology.rank == 0:
                await asyncio.gather(
                    *(engine.send_weights(weights_of(step + n).items(), step + n) for n, engine in enumerate(engines))
                )
            else:
                await asyncio.gather(
                    *(engine.receive_into(models[n].live, step + n) for n, engine in enumerate(engines))
                )

        for step in (1, 11, 21):
            asyncio.run(both(step))
            for number, one in enumerate(models) if topology.rank else ():
                one.require(step + number)
    return len(distributed_c10d._world.pg_map) - before


@pytest.mark.parametrize("name", ["kimi_ckpt_engine", pytest.param("broadcast", marks=pytest.mark.full)])
def test_two_engines_of_one_process_do_not_meet(name: str) -> None:
    assert run_ranks(2, _two_engines, name) == [0, 0]


def test_broadcast_stands_on_these_private_names_of_torch() -> None:
    assert callable(distributed_c10d._new_process_group_helper)
    assert callable(distributed_c10d.GroupName)
    assert isinstance(distributed_c10d._world.pg_group_ranks, dict)
    assert isinstance(distributed_c10d._world.pg_map, dict)


# The end of the process


PROGRAM = """
import asyncio, os, signal, sys, time
import torch
import torch.distributed as dist
from ckpt.engine import CheckpointEngineRegistry, LiveModel
from ckpt.engine.wire.group import OwnGroup
from ckpt.errors import CheckpointError
from tests.distributed.test_engine_faults import weights_of

rank, port, name, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
engine = CheckpointEngineRegistry.new(name, 1 << 16, timeout_s=20.0)
store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
engine.init_process_group(rank, 1, 1, store=store)
engine.members.timeout_s = engine.topology.timeout_s = engine.topology._agreement.timeout_s = 3.0
live = LiveModel(type("Holder", (), {"state_dict": lambda self, held=weights_of(0): held})())
original, calls = OwnGroup.broadcast, []
def stop(group, *args):
    calls.append(args)
    if rank == 1 and len(calls) == 3:
        os.kill(os.getpid(), signal.SIGSTOP)
    return original(group, *args)
OwnGroup.broadcast = stop
try:
    if rank == 0:
        asyncio.run(engine.send_weights(weights_of(1).items(), 1))
    else:
        asyncio.run(engine.receive_into(live, 1))
except CheckpointError as error:
    print(error.rank, flush=True)
if how == "closed":
    engine.close()
print("the end", flush=True)
"""


@pytest.mark.parametrize(
    ("name", "how"),
    [(name, how) for name in BY_TRANSPORT for how in ("open", "closed")],
)
@pytest.mark.full
def test_a_process_ends_in_order_though_a_collective_of_its_engine_never_does(
    tmp_path: Path, name: str, how: str
) -> None:
    server = serve(LOOPBACK, timeout_s=30.0)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    root = Path(__file__).parents[2]
    began = time.monotonic()
    ranks = [
        subprocess.Popen(
            [sys.executable, program, f"{rank}", f"{server.port}", name, how],
            cwd=root,
            env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = ranks[0].communicate(timeout=60)
        assert time.monotonic() - began < 45
        assert (ranks[0].returncode, *said) == (0, "1\nthe end\n", "")
    finally:
        for one in ranks:
            one.kill()
            one.communicate()
