"""Updates of which only what has changed travels: bit-equal all the same, and everything where anybody might hold something else."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from ckpt.engine import CheckpointEngineRegistry, KimiCheckpointEngine, LiveModel
from ckpt.engine.versioned import VersionedEngine
from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.ranks.topology import Topology
from tests.distributed.test_engine_faults import _killed_at, _rejoin, be_patient
from tests.support.covering import sampled
from tests.support.engines import (
    BUCKET_BYTES,
    collected,
    join,
    joined,
    num_ranks,
    publish,
    receive,
    require_same,
    update,
)
from tests.support.ranks import run_ranks
from tests.support.states import Held, random_bits

BLOCK = 4 << 10
FULL = pytest.mark.full
SHAPES = {"embed": (640, 128), "small": (33,), "body": (96, 301), "head": (128, 128), "count": ()}
"""float32, but for the last: 320 KiB, 256 bytes, 113 KiB, 64 KiB; in buckets of 64 KiB, each of 16 blocks."""


class Weights:
    """What a trainer holds, which changes in part, alike on all trainers; and what rollouts shall hold."""

    def __init__(self) -> None:
        self.state = {
            name: random_bits(shape, torch.float32 if shape else torch.int64, seed=number)
            for number, (name, shape) in enumerate(SHAPES.items())
        }

    def change(self, name: str, first: int = 0, last: int | None = None) -> None:
        """Give elements [first, last) of a tensor other bits."""
        flat = self.state[name].view(-1).view(torch.uint8)
        size = self.state[name].element_size()
        flat[first * size : None if last is None else last * size] ^= 0x55

    @property
    def num_bytes(self) -> int:
        return sum(-(-tensor.nbytes // 256) * 256 for tensor in self.state.values())


def live_of(weights: Weights) -> LiveModel:
    return LiveModel(Held({name: torch.zeros_like(one) for name, one in weights.state.items()}))


class Run:
    """One rank of an engine that sends changes, and the weights that every rank can reckon."""

    def __init__(self, engine: VersionedEngine) -> None:
        self.engine, self.weights, self.step = engine, Weights(), 0
        self.live = live_of(self.weights)
        self.readers: list[Iterator[Any]] = []

    def update(self) -> int:
        """An update; every rollout holds every bit. Returns what was sent."""
        self.step += 1
        report = update(self.engine, self.step, self.live, self.weights.state.items())
        if self.engine.rank in self.engine.rollouts:
            require_same(self.live.state_dict(), self.weights.state)
            assert self.live.version == self.engine.version
        return int(report["sent_bytes"])

    def fail(self, weights: Any = None, sink: Any = None) -> str:
        """An update that fails, on all ranks."""
        engine = self.engine
        with pytest.raises(CheckpointError) as caught:
            if engine.rank in engine.trainers:
                publish(engine, self.step + 1, weights or self.weights.state.items())
            if engine.rank in engine.rollouts:
                receive(engine, sink or self.live, self.step + 1)
        return str(caught.value)


def run(name: str, trainers: int, rollouts: int, fn: Any, *args: Any, **settings: Any) -> list[Any]:
    world_size = num_ranks(name, trainers, rollouts, colocated=settings.get("colocated", False))
    return run_ranks(world_size, _run, name, trainers, rollouts, settings, fn, *args)


def _run(
    topology: Topology, name: str, trainers: int, rollouts: int, settings: dict[str, Any], fn: Any, *args: Any
) -> Any:
    given = {"delta": True, "delta_block_kib": BLOCK >> 10} | settings
    with joined(topology, trainers, rollouts, name, **given) as engine:
        return fn(Run(engine), *args)


# What travels


@sampled(
    ("name", "trainers", "rollouts", "settings"),
    [
        ("broadcast", 2, 2, {}),
        ("kimi_ckpt_engine", 1, 1, {"cached": True}),
        pytest.param("broadcast", 2, 2, {"colocated": True}, id="colocated"),
        pytest.param("kimi_ckpt_engine", 3, 1, {}, marks=FULL),
        pytest.param("broadcast", 1, 2, {"cached": True}, marks=FULL),
        pytest.param("kimi_ckpt_engine", 2, 2, {"colocated": True, "cached": True}, marks=FULL),
        pytest.param("broadcast", 1, 1, {"colocated": True}, marks=FULL),
    ],
)
def test_what_has_changed_travels_and_nothing_else_and_every_bit_is_there(
    name: str, trainers: int, rollouts: int, settings: dict[str, Any]
) -> None:
    whole = Weights().num_bytes
    last = whole % BLOCK  # a block that is not whole
    for sent in run(name, trainers, rollouts, _in_turn, **settings):
        assert sent == [whole, 0, BLOCK, 2 * BLOCK, 0, BUCKET_BYTES + last, whole, 3 * BLOCK]


def _in_turn(one: Run) -> list[int]:
    sent = [one.update(), one.update()]
    one.weights.change("embed", 5, 6)
    sent.append(one.update())
    one.weights.change("embed", 1023, 1025)  # over the border of two blocks
    sent.append(one.update())
    sent.append(one.update())
    one.weights.change("embed", 0, 3 * BUCKET_BYTES // 16)  # three quarters of a bucket, which is sent as it is
    one.weights.change("count")
    sent.append(one.update())
    for name in one.weights.state:
        one.weights.change(name)
    sent.append(one.update())
    for first in (0, 3 * BLOCK // 4, 5 * BUCKET_BYTES // 8):
        one.weights.change("embed", first, first + 1)
    sent.append(one.update())
    return sent


@pytest.mark.parametrize("name", ["kimi_ckpt_engine", pytest.param("broadcast", marks=FULL)])
def test_a_consumer_gets_all_weights_of_an_update_of_which_little_has_travelled(name: str) -> None:
    trainer, rollout = run(name, 1, 1, _consume, cached=True)
    assert trainer == rollout == [Weights().num_bytes, BLOCK, BLOCK]


def _consume(one: Run) -> list[int]:
    engine, sent = one.engine, []
    for step in (1, 2, 3):
        if step > 1:
            one.weights.change("body", step, step + 1)
        if engine.rank in engine.trainers:
            publish(engine, step, one.weights.state.items())
        else:
            require_same(asyncio.run(collected(engine.receive_weights(step))), one.weights.state)
            require_same(asyncio.run(collected(engine.get_weights())), one.weights.state)
        assert engine.report is not None
        sent.append(engine.report.sent_bytes)
    return sent


def test_blocks_are_digested_and_compared_only_where_that_was_asked_for() -> None:
    whole = Weights().num_bytes
    for sent in run("broadcast", 1, 1, _twice, delta=False):
        assert sent == [whole, whole]


def _twice(one: Run) -> list[int]:
    sent = [one.update(), one.update()]
    assert one.engine.pool is None or one.engine.pool.history is None
    return sent


def test_engines_that_cannot_leave_anything_out_say_so() -> None:
    with pytest.raises(ConfigurationError, match="delta=true: with the naive engine nothing travels"):
        CheckpointEngineRegistry.new("naive", 512, delta=True)
    with pytest.raises(ConfigurationError, match="delta_block_kib=0: expected at least 1"):
        KimiCheckpointEngine(512, delta=True, delta_block_kib=0)


def test_ranks_with_other_settings_are_told_so() -> None:
    sentence = "rank 0 has delta=true with delta_block_kib=4, and rank 1 has delta=false: give all ranks the same"
    assert run_ranks(2, _other_settings, sentence) == [1, 1]


def _other_settings(topology: Topology, sentence: str) -> int:
    with joined(topology, 1, 1, "broadcast", delta=topology.rank == 0, delta_block_kib=BLOCK >> 10) as engine:
        one = Run(engine)
        said = one.fail()
        assert sentence in said, said
        return topology.world_size - 1


# Everything travels where anybody might hold something else


class _Refusing:
    """A sink that refuses, or fails half-way."""

    def __init__(self, live: LiveModel, where: str) -> None:
        self._live, self._where = live, where

    def check(self, layout: Any) -> None:
        if self._where == "check":
            raise ZeroDivisionError("a bug in the check")
        self._live.check(layout)

    def load(self, weights: Any, version: Any) -> None:
        raise ZeroDivisionError("a bug in the load")


def _refused(one: Run, where: str) -> str:
    is_last = one.engine.rank == one.engine.rollouts[-1]
    return one.fail(sink=_Refusing(one.live, where) if is_last else None)


def _half_way(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    yield from [*weights.state.items()][:2]
    raise ZeroDivisionError("a bug in the export")


def _flip_in_the_receive_buffer(one: Run) -> str:
    """A bit falls over in host memory of a rollout, in a block that does not travel."""
    if one.engine.rank == one.engine.rollouts[-1]:
        one.engine.receive_buffers[-1].bucket(3)[100] ^= 1
    return one.fail()


def _flip_in_a_message(one: Run) -> str:
    """A bit of what travels falls over when its digest has been taken."""
    pool = one.engine.pool
    if one.engine.rank == 0:
        assert pool is not None
        seal = pool.seal

        def flip(layout: Any) -> dict[int, str]:
            digests = seal(layout)
            pool.bucket(layout, 0)[5 * 4] ^= 1
            return digests

        pool.seal = flip  # type: ignore[method-assign]
    said = one.fail()
    if one.engine.rank == 0:
        del pool.seal
    return said


def _let_go(one: Run) -> str:
    """The memory of a rollout is gone, as that of one which has come anew."""
    if one.engine.rank == one.engine.rollouts[-1]:
        one.engine.receive_buffers[-1].let_go()
    return ""


def _still_read(one: Run) -> str:
    """Somebody reads yet what came last, which is left to the reader."""
    if one.engine.rank in one.engine.rollouts:
        reader = one.engine.receive_buffers[-1].weights()
        next(reader)
        one.readers.append(reader)
    return ""


def _other_layout(one: Run) -> str:
    one.weights.state["adapter"] = random_bits((5,), torch.bfloat16, seed=7)
    one.live = live_of(one.weights)
    return ""


READ = "somebody reads what came last"
TROUBLES: dict[str, tuple[Callable[[Run], str], str]] = {
    "a check fails": (lambda one: _refused(one, "check"), "a bug in the check"),
    "a load fails": (lambda one: _refused(one, "load"), "a bug in the load"),
    "an export fails": (lambda one: one.fail(_half_way(one.weights)), "a bug in the export"),
    "a bit falls over at a rollout": (
        _flip_in_the_receive_buffer,
        "bucket 3 of 8, with embed, arrived on rank RECEIVER with other bytes",
    ),
    "a bit falls over on its way": (
        _flip_in_a_message,
        "bucket 0 of 8, with embed, arrived on rank . with other bytes",
    ),
    "a rollout has let go of its memory": (_let_go, ""),
    READ: (_still_read, ""),
    "there is another layout": (_other_layout, ""),
}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("broadcast", {}),
        pytest.param("kimi_ckpt_engine", {}, marks=FULL),
        pytest.param("kimi_ckpt_engine", {"cached": True}, marks=FULL),
    ],
)
def test_everything_travels_behind_a_failure_and_where_a_rollout_may_hold_something_else(
    name: str, settings: dict[str, Any]
) -> None:
    receiver = "3" if settings.get("cached") else "2"  # for the last rollout: itself, or the first of the host
    for of_rank in run(name, 2, 2, _troubles, **settings):
        for trouble, (sentence, before, after, whole) in of_rank.items():
            assert (before, after[0]) == (BLOCK, whole), (trouble, before, after)
            assert after[1] == BLOCK, f"and then what has changed: {trouble}"
            expected = TROUBLES[trouble][1].replace("RECEIVER", receiver)
            assert re.search(expected, sentence), f"{trouble}: {sentence}"


def _troubles(one: Run) -> dict[str, tuple[str, int, list[int], int]]:
    found = {}
    one.update()
    for number, (trouble, (make, _)) in enumerate(TROUBLES.items()):
        if trouble == READ and len(one.engine.receive_buffers) > 1:
            continue  # what is kept may be read while the next update takes from it
        one.weights.change("embed", number, number + 1)
        before = one.update()
        one.weights.change("embed", number, number + 1)
        sentence = make(one)
        after = [one.update()]
        one.weights.change("embed", number, number + 1)
        after.append(one.update())
        found[trouble] = sentence, before, after, one.weights.num_bytes
    return found


@pytest.mark.parametrize("name", ["kimi_ckpt_engine", pytest.param("broadcast", marks=FULL)])
def test_ranks_that_part_and_meet_again_go_on_from_what_they_hold(name: str) -> None:
    assert run_ranks(2, _part_and_meet, name) == [[Weights().num_bytes, BLOCK, BLOCK, Weights().num_bytes]] * 2


def _part_and_meet(topology: Topology, name: str) -> list[int]:
    """The second time the rollout is one that has nothing."""
    with joined(topology, 1, 1, name, delta=True, delta_block_kib=BLOCK >> 10) as engine:
        one = Run(engine)
        sent = [one.update()]
        for is_new in (False, True):
            one.weights.change("body", 0, 1)
            sent.append(one.update())
            engine.leave()
            if is_new and topology.rank == 1:
                engine.close()
            join(topology, engine, 1, 1)
        one.weights.change("body", 0, 1)
        sent.append(one.update())
    return sent


def test_rollouts_of_one_host_that_part_and_meet_again_go_on_from_the_memory_that_they_share() -> None:
    assert run_ranks(3, _part_and_share_again) == [[Weights().num_bytes, BLOCK]] * 3


def _part_and_share_again(topology: Topology) -> list[int]:
    with joined(topology, 1, 2, "broadcast", delta=True, delta_block_kib=BLOCK >> 10) as engine:
        one = Run(engine)
        sent = [one.update()]
        engine.leave()
        join(topology, engine, 1, 2)
        one.weights.change("body", 0, 1)
        return [*sent, one.update()]


def test_a_rollout_that_had_the_memory_of_another_goes_on_alone_in_memory_of_its_own() -> None:
    whole = Weights().num_bytes
    assert run_ranks(3, _go_on_alone) == [[whole, whole, BLOCK], None, [whole, whole, BLOCK]]


def _go_on_alone(topology: Topology) -> list[int] | None:
    with joined(topology, 1, 2, "broadcast", delta=True, delta_block_kib=BLOCK >> 10) as engine:
        one = Run(engine)
        sent = [one.update()]
        if topology.rank == 1:
            return None
        _rejoin(engine, topology.store_for("again"), [0, 2], topology.rank, 1)
        for _ in range(2):
            one.weights.change("body", 0, 1)
            sent.append(one.update())
        return sent


@pytest.mark.full
@pytest.mark.parametrize("where", ["between buckets", "load"])
@pytest.mark.parametrize("name", ["broadcast", "kimi_ckpt_engine"])
def test_ranks_that_are_left_when_one_is_killed_send_everything_and_then_what_has_changed(
    name: str, where: str
) -> None:
    ranks = run_ranks(4, _one_is_killed, name, where, expect_dead=[2])
    assert ranks[:2] + ranks[3:] == [[Weights().num_bytes, BLOCK]] * 3, ranks


def _one_is_killed(topology: Topology, name: str, where: str) -> list[int]:
    """The rollout that receives for its host, in an update of which three messages travel."""
    with joined(topology, 2, 2, name, delta=True, delta_block_kib=BLOCK >> 10, timeout_s=20.0) as engine:
        one = Run(engine)
        one.update()
        be_patient(engine, 3.0)
        if topology.rank == 2:
            _killed_at(engine, where)
        for number in range(4):
            one.weights.change("embed", number * BUCKET_BYTES // 4, number * BUCKET_BYTES // 4 + 1)
        one.fail()
        be_patient(engine, 20.0)
        _rejoin(engine, topology.store_for("again"), [0, 1, 3], topology.rank, 2)
        sent = [one.update()]
        one.weights.change("head", 0, 1)
        return [*sent, one.update()]
