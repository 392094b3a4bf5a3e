"""Rollouts that come, leave, die and hang while steps go on: nobody ever sees parts of two versions, versions only rise, and the others
go on.

Every rollout has a thread that reads its live model all the time. Patience for ranks that stand still is longer than a test may take: what
waits for it fails.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from ckpt.engine import CheckpointEngineRegistry
from ckpt.engine.base import NamedTensor, WeightVersion
from ckpt.engine.elastic import elastic
from ckpt.engine.elastic.catch_up import load_from_peers
from ckpt.engine.elastic.elastic import ElasticEngine, meeting, reached_store
from ckpt.engine.elastic.membership import Rendezvous
from ckpt.engine.versioned import VersionedEngine
from ckpt.errors import ConfigurationError, CorruptCheckpointError, MissingStateError, RankAbsentError
from ckpt.ranks.topology import Topology
from tests.distributed.test_engine_faults import Watched, weights_of
from tests.support.async_runs import until
from tests.support.ranks import Dead, run_ranks

PATIENCE_S = 300.0
"""Of the engines: longer than `LONGEST_S`, so that nobody is found to be gone by waiting for it."""
LONGEST_S = 20.0
"""That one update may take, new connections and a slow name server included."""
BUCKET_BYTES = 1 << 16


class Weights:
    """Those of a step, as often as they are asked for."""

    def __init__(self, step: int) -> None:
        self.step = step

    def __iter__(self) -> Iterator[NamedTensor]:
        return iter(weights_of(self.step).items())


class Rising(Watched):
    """A live model that also notes every version it has had, in the order in which they came."""

    def __init__(self) -> None:
        self.versions: list[int] = []
        super().__init__()
        self.watch()

    def load(self, weights: Iterable[NamedTensor], version: WeightVersion) -> None:
        self.live.load(weights, version)
        self.versions.append(version.step)

    def check(self, layout: Any) -> None:
        self.live.check(layout)

    def require_rising(self) -> None:
        """Fail unless what was seen was always one version, and never one behind another."""
        assert not self.problems, self.problems
        assert self.looks, "it has been read"
        assert self.versions == sorted(self.versions), self.versions


def engine_of(name: str) -> VersionedEngine:
    made = CheckpointEngineRegistry.new(name, BUCKET_BYTES, timeout_s=PATIENCE_S)
    assert isinstance(made, VersionedEngine)
    return made


def meet(
    topology: Topology, num_trainers: int, num_rollouts: int, name: str
) -> tuple[ElasticEngine | None, Rendezvous]:
    """Found a job on the first ranks; the others learn where it is. All ranks call it."""
    store = None
    with topology.phase("meet") as phase:
        if topology.rank == 0:
            store, rendezvous = meeting(PATIENCE_S, {}, num_trainers + num_rollouts)
            phase.payload = asdict(rendezvous)
    rendezvous = Rendezvous(**phase.payloads[0])
    if topology.rank >= num_trainers + num_rollouts:
        return None, rendezvous
    store = store or reached_store(rendezvous)
    numbers = {"rank": topology.rank, "num_trainers": num_trainers, "num_rollouts": num_rollouts}
    return ElasticEngine.found(engine_of(name), store, **numbers), rendezvous


def train(member: ElasticEngine, over: Callable[[int], bool], pause_s: float = 0.01) -> list[dict[str, Any]]:
    """Publish step after step until it is over; return what each update said, and its seconds."""
    told, step = [], 0
    while not over(step):
        step += 1
        began = time.monotonic()
        told.append(asyncio.run(member.send_weights(Weights(step), step)) | {"seconds": 0.0, "step": step})
        told[-1]["seconds"] = time.monotonic() - began
        time.sleep(pause_s)
    return told


def roll_out(member: ElasticEngine, rising: Rising, wanted: int | None = None) -> int:
    """Receive until there is no more, or leave after so many updates; return how many there were."""
    count = 0
    while asyncio.run(member.receive_into(rising)) is not None:
        count += 1
        if count == wanted:
            member.ask_to_leave()
    return count


def rolled_out(member: ElasticEngine) -> list[int]:
    """What a founding rollout does in most tests: receive until the end, and have the last version; returns all it had."""
    with watched_rising() as rising:
        roll_out(member, rising)
        rising.require_rising()
        rising.require(member.last_words)
        asyncio.run(member.reply(rising.versions))
        return rising.versions


class watched_rising:
    def __enter__(self) -> Rising:
        self.rising = Rising()
        return self.rising

    def __exit__(self, *_: object) -> None:
        self.rising.end()


def end(member: ElasticEngine, step: int) -> dict[int, Any]:
    """The end of a job, by the lead."""
    return asyncio.run(member.end(step))


def require_quick(told: list[dict[str, Any]]) -> None:
    longest = max(told, key=lambda one: one["seconds"])
    assert longest["seconds"] < LONGEST_S, longest


# Coming and leaving


def _comes_and_goes(topology: Topology, name: str, num_trainers: int, num_joins: int) -> Any:
    """Rank T is a rollout all the time; those behind it come at random moments, stay for some updates and leave, one after the other."""
    num_comers = topology.world_size - num_trainers - 1
    member, rendezvous = meet(topology, num_trainers, 1, name)
    if member is not None and topology.rank < num_trainers:
        with member:
            if not member.is_lead:
                with pytest.raises(ConfigurationError, match="has ended the updates"):
                    train(member, lambda step: False)
                return None
            store = reached_store(rendezvous)
            told = train(member, lambda step: bool(store.check([f"done/{n}" for n in range(num_comers)])))
            require_quick(told)
            replies = end(member, len(told))
            assert replies == {num_trainers: [one["step"] for one in told]}, "it has had every version, once"
            return [one["num_rollouts"] for one in told], sum(a["epoch"] != b["epoch"] for a, b in pairwise(told))
    if member is not None:
        with member:
            return len(rolled_out(member))
    number = topology.rank - num_trainers - 1
    chance = random.Random(f"{name} {topology.rank}")
    stays = []
    for _ in range(number, num_joins, num_comers):
        time.sleep(chance.random() * 0.3)
        with ElasticEngine.come(engine_of(name), rendezvous) as comer, watched_rising() as rising:
            wanted = chance.randint(1, 6)
            count = roll_out(comer, rising, wanted)
            rising.require_rising()
            assert count >= wanted, "it left because it asked to"
            assert rising.versions == [*range(rising.versions[0], rising.versions[0] + count)], "it missed none"
            rising.require(rising.versions[-1])
            stays.append(count)
    reached_store(rendezvous).set(f"done/{number}", "")
    return stays


@pytest.mark.parametrize(
    ("name", "num_trainers", "num_comers", "num_joins"),
    [
        pytest.param("broadcast", 1, 2, 4, id="broadcast"),
        pytest.param("broadcast", 1, 3, 20, id="broadcast-20", marks=pytest.mark.full),
        pytest.param("kimi_ckpt_engine", 1, 3, 20, id="kimi-20", marks=pytest.mark.full),
        pytest.param("broadcast", 2, 2, 6, id="broadcast-2-trainers", marks=pytest.mark.full),
    ],
)
def test_rollouts_come_and_leave_at_random_moments_while_steps_go_on(
    name: str, num_trainers: int, num_comers: int, num_joins: int
) -> None:
    found = run_ranks(
        num_trainers + 1 + num_comers, _comes_and_goes, name, num_trainers, num_joins, timeout_s=120.0, agree_s=100.0
    )
    num_rollouts, num_changes = found[0]
    assert min(num_rollouts) == 1 < max(num_rollouts)
    assert sum(len(stays) for stays in found[num_trainers + 1 :]) == num_joins
    assert num_changes > num_joins // 2, "members changed again and again"


def test_a_rollout_that_comes_before_the_founders_have_joined_gets_no_number_of_theirs() -> None:
    store, rendezvous = meeting(PATIENCE_S, {}, num_founders=2)
    with ElasticEngine.come(engine_of("broadcast"), rendezvous) as comer:
        assert comer.number == 2
    del store


# Catching up


def _reads_the_trainers_memory(topology: Topology) -> Any:
    """A comer reads version after version out of the pools of two trainers, which go on; it is no member, and in nobody's way."""
    from ckpt.engine.parameter_server import read_from_peers

    member, rendezvous = meet(topology, 2, 1, "kimi_ckpt_engine")
    store = reached_store(rendezvous)
    if member is not None and topology.rank < 2:
        with member:
            pause_s = 0.4  # or the comer would find each version overwritten
            if not member.is_lead:
                with pytest.raises(ConfigurationError, match="has ended the updates"):
                    train(member, lambda step: False, pause_s)
                return None
            told = train(member, lambda step: bool(store.check(["over"])), pause_s)
            return set(end(member, len(told)))
    if member is not None:
        with member:
            return len(rolled_out(member))
    comer = ElasticEngine.come(engine_of("kimi_ckpt_engine"), rendezvous)
    with comer, watched_rising() as rising:
        until(lambda: comer.news() is not None, seconds=60.0)
        outdated = 0
        while len(rising.versions) < 5:
            found = comer.news()
            assert found is not None
            news, layout = found
            if rising.versions and news.step == rising.versions[-1]:
                continue
            try:
                load_from_peers(
                    rising,
                    news,
                    layout,
                    comer.engine.digest_of,
                    lambda buckets: read_from_peers(news.peers, buckets, device_type="cpu"),  # noqa: B023
                )
            except (CorruptCheckpointError, RankAbsentError):  # published over, or the transfer engine was busy
                outdated += 1
        rising.require_rising()
        rising.require(rising.versions[-1])
    store.set("over", "")
    return len(set(rising.versions)), outdated


def test_a_rollout_catches_up_out_of_the_trainers_memory_while_they_go_on() -> None:
    pytest.importorskip("mooncake.engine", reason="checkpoint-engine's P2P store needs mooncake", exc_type=ImportError)
    found = run_ranks(4, _reads_the_trainers_memory, timeout_s=100.0, agree_s=90.0)
    assert found[0] == {2}
    assert found[3][0] == 5


# Members that die


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _kill_at(update: int, member: ElasticEngine, rising: Rising, where: str) -> None:
    """Let this process kill itself in the n-th update that it is in."""
    engine, seen = member.engine, [0]

    def dies(call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            seen[0] += 1
            if seen[0] == update:
                _kill()
            return call(*args)

        return counted

    if where == "the agreement":
        phase, agree = Topology.phase, dies(lambda: None)

        def phase_or_death(topology: Topology, name: str) -> Any:
            if name == "offload":
                agree()
            return phase(topology, name)

        Topology.phase = phase_or_death  # type: ignore[method-assign, assignment]
    elif where == "the transfer":
        engine.transport.carry = dies(engine.transport.carry)  # type: ignore[method-assign]
    elif where == "the load":
        rising.load = dies(rising.load)  # type: ignore[method-assign]


DEATHS = {2: (2, "the agreement"), 3: (3, "the transfer"), 4: (4, "the load"), 5: (6, "between two updates")}
"""Rank: the update, and where in it."""


def _others_go_on(topology: Topology, name: str) -> Any:
    member, _ = meet(topology, 1, 5, name)
    assert member is not None
    with member:
        if member.is_lead:
            told = train(member, lambda step: step == 7, pause_s=0.05)
            require_quick(told)
            return [one["num_rollouts"] for one in told], end(member, 7)
        if topology.rank == 1:
            return rolled_out(member)
        with watched_rising() as rising:
            update, where = DEATHS[topology.rank]
            _kill_at(update, member, rising, where)
            for _ in range(update - 1):
                assert asyncio.run(member.receive_into(rising)) is not None
            if where == "between two updates":
                _kill()
            asyncio.run(member.receive_into(rising))
    raise AssertionError("it should have died")


@pytest.mark.parametrize(
    "name",
    [
        "broadcast",
        pytest.param("kimi_ckpt_engine", marks=pytest.mark.full),
    ],
)
def test_a_rollout_that_is_killed_is_left_out_and_the_update_is_made_again(name: str) -> None:
    found = run_ranks(6, _others_go_on, name, expect_dead=DEATHS, timeout_s=100.0, agree_s=90.0)
    versions = [1, 2, 3, 4, 4, 5, 6, 7]  # that of the update that failed in the load came twice
    assert found[0] == ([5, 4, 3, 2, 2, 1, 1], {1: versions})
    assert found[1] == versions
    assert all(found[rank] == Dead(-signal.SIGKILL) for rank in DEATHS)


COMERS = ["is ready", "has answered", "is joining", "is in its first update", "hangs"]


def _comer_dies(topology: Topology, name: str) -> Any:
    """One comer after the other dies, or hangs, somewhere on its way to be a member; the last one has another model."""
    member, rendezvous = meet(topology, 1, 1, name)
    store = reached_store(rendezvous)
    if member is not None:
        with member:
            if topology.rank == 1:
                return rolled_out(member)
            told = train(member, lambda step: bool(store.check(["over"])), pause_s=0.05)
            more = train_on(member, told, 3)
            require_quick(told + more)
            return {one["num_rollouts"] for one in more}, set(end(member, len(told) + 3))
    where = topology.rank - 2
    until(lambda: bool(store.check([f"turn/{where}"])) or where == 0, seconds=90.0)
    comer = ElasticEngine.come(engine_of(name), rendezvous)

    def dies(*_: Any) -> Any:
        store.set(f"turn/{where + 1}", "")
        os.kill(os.getpid(), signal.SIGSTOP if COMERS[where] == "hangs" else signal.SIGKILL)

    if where == len(COMERS):
        with comer, watched_rising() as rising:
            rising.held.state["more"] = torch.zeros(3)
            with pytest.raises(MissingStateError, match="other weights than the rollout's model has"):
                asyncio.run(comer.receive_into(rising))
            assert rising.versions == []
        store.set("over", "")
        return "refused"
    if COMERS[where] in ("is ready", "hangs"):
        comer._membership.await_invitation = dies  # type: ignore[method-assign]
    elif COMERS[where] == "has answered":
        comer._enter = dies  # type: ignore[method-assign]
    elif COMERS[where] == "is joining":
        comer.engine.transport.join = dies  # type: ignore[method-assign]
    else:
        comer.engine.transport.carry = dies  # type: ignore[method-assign]
    with watched_rising() as rising:
        asyncio.run(comer.receive_into(rising))
    raise AssertionError("it should have died")


def train_on(member: ElasticEngine, told: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """So many further steps."""
    step = told[-1]["step"]
    return [
        asyncio.run(member.send_weights(Weights(step + n), step + n)) | {"seconds": 0.0, "step": step + n}
        for n in range(1, count + 1)
    ]


@pytest.mark.parametrize("name", ["broadcast", pytest.param("kimi_ckpt_engine", marks=pytest.mark.full)])
def test_a_rollout_that_dies_hangs_or_has_another_model_does_not_keep_the_others(name: str) -> None:
    dead = range(2, 2 + len(COMERS))
    found = run_ranks(3 + len(COMERS), _comer_dies, name, expect_dead=dead, timeout_s=120.0, agree_s=100.0)
    assert found[0] == ({1}, {1})
    assert found[1] == [*range(1, len(found[1]) + 1)], "every version, once"
    assert found[-1] == "refused"


# Trainers that die, or end


def _trainer_dies(topology: Topology, victim: int) -> Any:
    member, _ = meet(topology, 2, 2, "broadcast")
    assert member is not None
    with member, watched_rising() as rising:
        if topology.rank == victim:
            _kill_at(3, member, rising, "the transfer")
        with pytest.raises(RankAbsentError) as caught:
            train(member, lambda step: False) if topology.rank < 2 else roll_out(member, rising)
        assert topology.rank < 2 or rising.versions == [1, 2]
        if topology.rank > 1:
            rising.require(2)
        return str(caught.value)


def test_a_trainer_that_is_killed_ends_the_job_of_all_by_its_name() -> None:
    found = run_ranks(4, _trainer_dies, 1, expect_dead=[1], timeout_s=60.0)
    assert len({found[0], found[2], found[3]}) == 1, found
    assert found[0].startswith("rank 1 (pid ")
    assert found[0].endswith("was killed or ended in phase transfer of the weight update to step 3")


def test_a_lead_that_is_killed_ends_the_job_of_all() -> None:
    found = run_ranks(4, _trainer_dies, 0, expect_dead=[0], timeout_s=60.0)
    assert all("gone" in found[rank] for rank in (1, 2, 3)), found


def _used_up(topology: Topology) -> str:
    member, _ = meet(topology, 1, 2, "broadcast")
    assert member is not None
    with member, watched_rising() as rising, pytest.raises(ConfigurationError, match="which is used up") as caught:
        if topology.rank == 2:
            _kill_at(1, member, rising, "the transfer")
        if member.is_lead:
            with member:  # it ends the job with what it fails of
                asyncio.run(member.send_weights(iter(Weights(1)), 1))
        roll_out(member, rising)
    return str(caught.value)


@pytest.mark.full
def test_weights_that_can_be_had_once_only_cannot_be_sent_again() -> None:
    found = run_ranks(3, _used_up, expect_dead=[2], timeout_s=60.0)
    assert found[0] == found[1]


def _alone_for_a_while(topology: Topology) -> Any:
    """The only rollout leaves; the trainer trains on; another one comes."""
    member, rendezvous = meet(topology, 1, 1, "broadcast")
    store = reached_store(rendezvous)
    if member is None:
        until(lambda: bool(store.check(["alone"])), seconds=60.0)
        with ElasticEngine.come(engine_of("broadcast"), rendezvous) as comer:
            return rolled_out(comer)
    with member:
        if topology.rank == 1:
            with watched_rising() as rising:
                with pytest.raises(TimeoutError):
                    asyncio.run(asyncio.wait_for(member.receive_into(rising), 0.05))
                store.set("waited", "")
                count = roll_out(member, rising, wanted=2)
                rising.require_rising()
                assert rising.versions == [*range(1, count + 1)]
                with pytest.raises(ConfigurationError, match="rollout 1 is out of the job"):
                    asyncio.run(member.receive_into(rising))
                return rising.versions
        until(lambda: bool(store.check(["waited"])), seconds=60.0)
        told = train(member, lambda step: member.epoch is not None and not member.epoch.rollouts)
        told += train_on(member, told, 2)
        store.set("alone", "")
        until(lambda: member._membership.num_requests() > 1, seconds=60.0)
        told += train_on(member, told, 3)
        return [one["num_rollouts"] for one in told], end(member, told[-1]["step"])


def test_trainers_go_on_without_any_rollout_until_one_comes() -> None:
    (num_rollouts, replies), before, after = run_ranks(3, _alone_for_a_while, timeout_s=100.0, agree_s=90.0)
    last = len(num_rollouts)
    assert num_rollouts == [1] * len(before) + [0] * 3 + [1] * 3
    assert after == [last - 2, last - 1, last]
    assert replies == {2: after}


def _cancelled_as_it_is_called(topology: Topology) -> Any:
    """The trainer's call reaches a rollout whose caller is cancelled before it learns of it, and calls again."""
    member, rendezvous = meet(topology, 1, 1, "broadcast")
    store = reached_store(rendezvous)
    assert member is not None

    async def cancelled(rising: Rising) -> None:
        receiving = asyncio.create_task(member.receive_into(rising))
        await asyncio.sleep(0.05)
        store.set("waited", "")
        until(lambda: bool(store.check(["calls"])))  # and the event loop waits, too
        time.sleep(0.3)
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving

    with member:
        if topology.rank == 1:
            with watched_rising() as rising:
                asyncio.run(cancelled(rising))
                roll_out(member, rising)
                return rising.versions
        until(lambda: bool(store.check(["waited"])))
        store.set("calls", "")
        return end(member, train(member, lambda step: step == 2)[-1]["step"])


def test_a_call_that_comes_as_its_caller_is_cancelled_is_heard_by_the_next() -> None:
    assert run_ranks(2, _cancelled_as_it_is_called, timeout_s=30.0)[1] == [1, 2]


def test_a_rollout_that_finds_no_job_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    store, rendezvous = meeting(20.0, {}, num_founders=2)
    assert rendezvous.port == store.port
    with pytest.raises(RankAbsentError, match=f"another job answers at {rendezvous.address}"):
        ElasticEngine.come(engine_of("broadcast"), replace(rendezvous, job="another"))
    monkeypatch.setattr(elastic, "_REACH_S", 0.5)
    with pytest.raises(RankAbsentError, match="no job answers at"):
        ElasticEngine.come(engine_of("broadcast"), Rendezvous("127.0.0.1", 1, "x", {}))


def test_trainers_that_are_rollouts_cannot_be_elastic() -> None:
    store, _ = meeting(20.0, {}, num_founders=2)
    engine = CheckpointEngineRegistry.new("naive", timeout_s=20.0)
    with pytest.raises(ConfigurationError, match="cannot come and go"):
        ElasticEngine.found(engine, store, rank=0, num_trainers=1, num_rollouts=1)
