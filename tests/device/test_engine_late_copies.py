"""Weights from one device to another, everything late: no wait of an update may be missing.

See test_late_copies.py for what late means. Collectives are late, too, and their `wait` keeps only the stream that calls it, as on a
real device. A wait that is left out shows as a bucket that is not what was sent, or as a live model with other bits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ckpt.engine import LiveModel
from ckpt.engine.wire.group import OwnGroup
from ckpt.errors import CheckpointError
from ckpt.ranks.topology import Topology
from tests.device.devices import ADVERSARY, CUDA, NPU
from tests.device.memory import Kind, Memory, require_same, values_of
from tests.device.saves import torch_device
from tests.support.covering import sampled
from tests.support.engines import BUCKET_BYTES, KINDS, joined, num_ranks, publish, receive, update
from tests.support.ranks import run_ranks
from tests.support.states import Held

MIXED = {name: Kind(kind.dtype, kind.num_elements, kind.lay) for name, kind in KINDS.items()}
"""Of most data types, tiny and larger than a bucket, dense and strided."""
LEARNED = {f"learned {n}": Kind(torch.float32, BUCKET_BYTES // 16, lambda flat: flat) for n in range(9)}
FROZEN = {f"frozen {n}": Kind(torch.float32, 5 * BUCKET_BYTES // 32, lambda flat: flat.view(32, -1)) for n in range(9)}
"""A quarter, and five eighths, of a bucket: in turn, there is something of both in every bucket."""
EQUAL = {f"w{n}": Kind(torch.float32, 5 * BUCKET_BYTES // 16, lambda flat: flat.view(16, -1)) for n in range(7)}
"""Each larger than a bucket: a rollout's memory on the device holds one at a time."""

on_devices = pytest.mark.parametrize("device", [NPU, CUDA])


# Whole updates

CASES = [
    ("broadcast", 2, 2, True),
    ("broadcast", 1, 1, False),
    ("kimi_ckpt_engine", 1, 2, True),
    ("naive", 1, 1, True),
]
"""Engine, trainers, rollouts, staging."""
MATRIX = [
    (name, trainers, rollouts, staging)
    for name in ("broadcast", "kimi_ckpt_engine", "naive")
    for trainers, rollouts in ((1, 1), (2, 2), (3, 1), (1, 3))
    for staging in (True, False)
    if (name != "naive" or (trainers == rollouts and staging)) and (name, trainers, rollouts, staging) not in CASES
]


@on_devices
@pytest.mark.parametrize(
    ("name", "trainers", "rollouts", "staging"),
    CASES + [pytest.param(*case, marks=pytest.mark.full) for case in MATRIX],
)
def test_three_updates_hold_what_was_on_its_way_when_each_began_and_nothing_else(
    device: str, name: str, trainers: int, rollouts: int, staging: bool
) -> None:
    run_ranks(
        num_ranks(name, trainers, rollouts), _three_updates, trainers, rollouts, name, device, {"staging": staging},
        device=device, environment=ADVERSARY,
    )  # fmt: skip


def _three_updates(
    topology: Topology, trainers: int, rollouts: int, name: str, device: str, settings: dict[str, Any]
) -> None:
    """Trainers change their weights late, and right after an update again; rollouts look at theirs at once."""
    where = torch_device(device, topology)
    source, target = Memory(MIXED, 50, where), Memory(MIXED, 60, where)
    live = LiveModel(Held(target.tensors()))
    with joined(topology, trainers, rollouts, name, device, **settings) as engine:
        for step in (1, 2, 3):
            if engine.rank in engine.trainers:
                source.change(step)
                publish(engine, step, source.tensors().items())
                source.change(50 + step)
            if engine.rank in engine.rollouts:
                target.change(60 + step, on_new_streams=step == 2)
                receive(engine, live, step)
                target.require_filled(values_of(MIXED, step), around=60 + step)
                assert live.version is not None and live.version.step == step


@on_devices
@pytest.mark.parametrize(
    ("name", "staging", "cached", "colocated"),
    [
        ("broadcast", True, False, False),
        pytest.param("kimi_ckpt_engine", False, True, False, marks=pytest.mark.full),
        pytest.param("broadcast", True, False, True, marks=pytest.mark.full),
    ],
)
def test_updates_of_which_parts_of_buckets_travel_hold_what_was_on_its_way_and_what_was_there(
    device: str, name: str, staging: bool, cached: bool, colocated: bool
) -> None:
    settings = {"staging": staging, "cached": cached, "colocated": colocated}
    run_ranks(2, _parts, name, device, settings, device=device, environment=ADVERSARY)


def _parts(topology: Topology, name: str, device: str, settings: dict[str, Any]) -> None:
    num = 2 if settings["colocated"] else 1
    where = torch_device(device, topology)
    source, frozen = Memory(LEARNED, 50, where), Memory(FROZEN, 40, where)
    target, beside = Memory(LEARNED, 60, where), Memory(FROZEN, 70, where)
    weights = _in_turn(source.tensors(), frozen.tensors())
    live = LiveModel(Held(_in_turn(target.tensors(), beside.tensors())))
    with joined(topology, num, num, name, device, delta=True, delta_block_kib=4, **settings) as engine:
        for step in (1, 2, 3, 4):
            if engine.rank in engine.trainers:
                source.change(step)
            if engine.rank in engine.rollouts:
                target.change(60 + step, on_new_streams=step == 2)
                beside.change(70 + step, on_new_streams=step == 3)
            report = update(engine, step, live, weights.items())
            assert (report["sent_bytes"] < report["num_bytes"] / 2) == (step > 1), report
            if engine.rank in engine.rollouts:
                target.require_filled(values_of(LEARNED, step), around=60 + step)
                beside.require_filled(values_of(FROZEN, 40), around=70 + step)


def _in_turn(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: one for pair in zip(some.items(), others.items(), strict=True) for name, one in pair}


# Tensors of a generator, which are its own again as soon as the next one is asked for


@on_devices
@pytest.mark.parametrize("name", ["broadcast", pytest.param("kimi_ckpt_engine", marks=pytest.mark.full)])
@sampled("rollout_dtype", [None, "bfloat16"])
def test_weights_are_those_of_the_moment_at_which_they_were_yielded(
    device: str, name: str, rollout_dtype: str | None
) -> None:
    run_ranks(2, _overwrite_what_was_yielded, name, device, rollout_dtype, device=device, environment=ADVERSARY)


def _overwrite_what_was_yielded(topology: Topology, name: str, device: str, rollout_dtype: str | None) -> None:
    """All tensors of the generator lie in one memory, each after the other; its copies into it are late, on the stream in use."""
    sent_as = torch.float32 if rollout_dtype is None else torch.bfloat16
    kinds = {key: kind._replace(dtype=sent_as) for key, kind in EQUAL.items()}
    target = Memory(kinds, 60, torch_device(device, topology))
    live = LiveModel(Held(target.tensors()))
    with joined(topology, 1, 1, name, device, rollout_dtype=rollout_dtype) as engine:
        for step in (1, 2):
            values = _floats(step)
            update(engine, step, live, _through_one_memory(values, torch_device(device, topology)))
            if engine.rank in engine.rollouts:
                target.require_filled({key: one.to(sent_as) for key, one in values.items()}, around=60)


def _floats(step: int) -> dict[str, torch.Tensor]:
    """Numbers, so that a cast keeps some bits of all of them."""
    generator = torch.Generator().manual_seed(step)
    return {key: torch.randn(16, kind.num_elements // 16, generator=generator) for key, kind in EQUAL.items()}


def _through_one_memory(values: dict[str, torch.Tensor], device: torch.device) -> Any:
    shared = torch.empty_like(next(iter(values.values())), device=device)
    for key, value in values.items():
        shared.copy_(value.pin_memory(), non_blocking=True)
        yield key, shared
    shared.fill_(0.25)


@on_devices
def test_copies_that_an_update_has_left_when_it_failed_do_not_come_over_those_of_the_next(device: str) -> None:
    run_ranks(2, _fail_and_go_on, device, device=device, environment=ADVERSARY)


def _fail_and_go_on(topology: Topology, device: str) -> None:
    """The generator that raises yields on a stream of its own, whose copies nobody waits for."""
    where = torch_device(device, topology)
    module = torch.get_device_module(where)
    source, target = Memory(EQUAL, 1, where), Memory(EQUAL, 60, where)
    live = LiveModel(Held(target.tensors()))

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(source.tensors().items())[:-1]
        raise KeyError("the last one")

    with joined(topology, 1, 1, "broadcast", device) as engine:
        with pytest.raises(CheckpointError, match="the last one"), module.stream(module.Stream(device=where)):
            update(engine, 1, live, broken())
        new = {
            name: torch.randn(one.shape, generator=torch.Generator().manual_seed(2))
            for name, one in source.tensors().items()
        }
        update(engine, 1, live, [(name, one.to(where)) for name, one in new.items()])
        if engine.rank in engine.rollouts:
            target.require_filled(new, around=60)


# Rollouts that take what comes themselves


@on_devices
@pytest.mark.parametrize("kinds", ["mixed", "equal"])
def test_what_is_yielded_to_a_rollout_may_be_copied_on_any_stream(device: str, kinds: str) -> None:
    run_ranks(2, _take_on_another_stream, device, kinds, device=device, environment=ADVERSARY)


def _take_on_another_stream(topology: Topology, device: str, kinds: str) -> None:
    """Each tensor is looked at as soon as it comes; then its copy is queued, and late, when the next one is asked for."""
    of = {"mixed": MIXED, "equal": EQUAL}[kinds]
    where = torch_device(device, topology)
    module = torch.get_device_module(where)
    source, target = Memory(of, 50, where), Memory(of, 60, where)
    with joined(topology, 1, 1, "broadcast", device, cached=True) as engine:
        aside, other = module.Stream(device=where), module.Stream(device=where)

        async def take(weights: Any) -> dict[str, torch.Tensor]:
            tensors, seen = target.tensors(), {}
            async for name, tensor in weights:
                with module.stream(other):
                    seen[name] = tensor.to("cpu", copy=True)
                with module.stream(aside):
                    tensors[name].copy_(tensor, non_blocking=True)
            return seen

        for step in (1, 2):
            if engine.rank in engine.trainers:
                source.change(step)
                publish(engine, step, source.tensors().items())
                continue
            for weights in (engine.receive_weights(step), engine.get_weights()):
                require_same(asyncio.run(take(weights)), values_of(of, step))
                module.synchronize(where)
                target.require_filled(values_of(of, step), around=60)
                target.change(60, late=False)


@on_devices
def test_what_a_rollout_has_queued_while_it_read_one_version_reads_that_one(device: str) -> None:
    """Work on a stream of its own goes on when the host has left the block; the update comes after it."""
    run_ranks(2, _read_late, device, device=device, environment=ADVERSARY)


def _read_late(topology: Topology, device: str) -> None:
    where = torch_device(device, topology)
    module = torch.get_device_module(where)
    source, target = Memory(EQUAL, 50, where), Memory(EQUAL, 60, where)
    live = LiveModel(Held(target.tensors()))
    with joined(topology, 1, 1, "broadcast", device) as engine:
        for step in (1, 2):
            if engine.rank in engine.trainers:
                source.change(step)
                publish(engine, step, source.tensors().items())
                continue
            seen = {name: torch.empty_like(one, device=where) for name, one in target.tensors().items()}
            with live.reading(), module.stream(module.Stream(device=where)):
                for name, tensor in target.tensors().items():
                    seen[name].copy_(tensor, non_blocking=True)
            receive(engine, live, step)
            module.synchronize(where)
            held = values_of(EQUAL, step - 1 if step > 1 else 60)
            require_same({name: one.cpu() for name, one in seen.items()}, held)
            target.require_filled(values_of(EQUAL, step), around=60)


# Buckets on their way


@pytest.mark.parametrize("late", ["trainer", "rollout"])
def test_parts_of_buckets_on_the_host_are_taken_when_they_came_and_replaced_when_they_left(late: str) -> None:
    """What comes late is not put in place before; and a trainer is several messages ahead of a rollout, if it does not wait."""
    run_ranks(2, _slow_parts, late)


def _slow_parts(topology: Topology, late: str) -> None:
    host = torch.device("cpu")
    source, frozen = Memory(LEARNED, 50, host), Memory(FROZEN, 40, host)
    target, beside = Memory(LEARNED, 60, host), Memory(FROZEN, 70, host)
    weights = _in_turn(source.tensors(), frozen.tensors())
    live = LiveModel(Held(_in_turn(target.tensors(), beside.tensors())))
    with joined(topology, 1, 1, "broadcast", delta=True, delta_block_kib=4) as engine:
        for step in (1, 2):
            source.change(step)
            if step == 2 and (topology.rank == 0) == (late == "trainer"):
                _begin_late(0.05)
            update(engine, step, live, weights.items())
            if engine.rank in engine.rollouts:
                target.require_filled(values_of(LEARNED, step), around=60)
                beside.require_filled(values_of(FROZEN, 40), around=70)


@on_devices
@sampled("staging", [True, False])
def test_memory_on_the_device_is_used_again_only_when_the_others_have_what_was_in_it(
    device: str, staging: bool
) -> None:
    """The rollout is slow to take part, so that a trainer which does not wait is several buckets ahead."""
    run_ranks(2, _slow_rollout, device, staging, device=device, environment=ADVERSARY)


def _slow_rollout(topology: Topology, device: str, staging: bool) -> None:
    where = torch_device(device, topology)
    source, target = Memory(EQUAL, 1, where), Memory(EQUAL, 60, where)
    live = LiveModel(Held(target.tensors()))
    with joined(topology, 1, 1, "broadcast", device, staging=staging, bucket_size=4 * BUCKET_BYTES) as engine:
        if engine.rank in engine.rollouts:
            _begin_late(0.1)
        update(engine, 1, live, source.tensors().items())
        if engine.rank in engine.rollouts:
            target.require_filled(values_of(EQUAL, 1), around=60)


def _begin_late(seconds: float) -> None:
    """Let this process take part in every broadcast a while after the others."""
    broadcast = OwnGroup.broadcast

    def late(group: OwnGroup, *args: Any) -> Any:
        time.sleep(seconds)
        return broadcast(group, *args)

    OwnGroup.broadcast = late  # type: ignore[method-assign]


def test_broadcast_on_the_host_looks_at_a_bucket_when_it_has_come_and_not_before() -> None:
    run_ranks(2, _slow_trainer)


def _slow_trainer(topology: Topology) -> None:
    source, target = Memory(EQUAL, 1, torch.device("cpu")), Memory(EQUAL, 60, torch.device("cpu"))
    live = LiveModel(Held(target.tensors()))
    with joined(topology, 1, 1, "broadcast", bucket_size=8 * BUCKET_BYTES) as engine:
        if engine.rank in engine.trainers:
            _begin_late(0.2)
        update(engine, 1, live, source.tensors().items())
        if engine.rank in engine.rollouts:
            target.require_filled(values_of(EQUAL, 1), around=60)
