"""A weight sync on devices: how much of their memory it takes, what it does where there is little, and on which device it works."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from ckpt.engine import LiveModel
from ckpt.engine.wire.group import OwnGroup
from ckpt.errors import CheckpointError, DeviceMemoryError
from ckpt.ranks.topology import Topology
from tests.device.devices import CUDA, NPU
from tests.device.memory import Filled, Kind, Memory, values_of
from tests.device.saves import torch_device
from tests.support.covering import sampled
from tests.support.engines import joined, publish, update
from tests.support.ranks import run_ranks
from tests.support.states import Held

on_devices = pytest.mark.parametrize("device", [NPU, CUDA])
on_stand_in = pytest.mark.parametrize("device", [NPU])
"""Whose memory is counted to the block, and whose hosts are simulated."""
engines = pytest.mark.parametrize("name", ["broadcast", pytest.param("kimi_ckpt_engine", marks=pytest.mark.full)])

BUCKET = 1 << 18
DENSE = {f"w{n}": Kind(torch.float32, (3 << 16) // 4 + 64 * n, lambda flat: flat.view(64, -1)) for n in range(9)}
"""1.7 MiB, so that every half of the memory is used several times."""
GAPS = {
    "one": Kind(torch.float32, 1 << 18, lambda flat: flat.view(512, 512).t()),
    "two": Kind(torch.bfloat16, 3 << 18, lambda flat: flat.view(512, 1536)[:, ::3]),
}
"""1 MiB and 0.5 MiB: larger than a bucket, and nowhere in one piece."""
KINDS = {"dense": DENSE, "gaps": GAPS}


# Memory


class Peak:
    """The most that was allocated on this rank's device within the block, beyond what was there before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)

    def __enter__(self) -> Peak:
        self._before = self._module.memory_allocated(self._device)
        self._module.reset_peak_memory_stats(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        self.num_bytes = self._module.max_memory_allocated(self._device) - self._before
        self.left = self._module.memory_allocated(self._device) - self._before


@on_devices
@engines
@sampled(("staging", "buckets"), [(True, 2), (False, 1)])
def test_an_update_takes_no_more_device_memory_than_its_buckets(
    device: str, name: str, staging: bool, buckets: int
) -> None:
    (trainer, second), (rollout,) = _split(
        run_ranks(3, _peaks, name, device, staging, "dense", device=device), trainers=2
    )
    assert trainer == second == rollout == [buckets * BUCKET] * 2, (trainer, second, rollout)


@on_devices
@engines
def test_tensors_with_gaps_take_another_bucket_on_trainers(device: str, name: str) -> None:
    trainers, (rollout,) = _split(run_ranks(3, _peaks, name, device, True, "gaps", device=device), trainers=2)
    assert all(peak <= 3 * BUCKET for peaks in trainers for peak in peaks), trainers
    assert rollout == [2 * BUCKET] * 2


def _split(found: list[Any], trainers: int) -> tuple[list[Any], list[Any]]:
    return found[:trainers], found[trainers:]


def _peaks(topology: Topology, name: str, device: str, staging: bool, which: str) -> list[int]:
    """Of two updates; all of it is given back after each."""
    kinds = KINDS[which]
    where = torch_device(device, topology)
    source, target = Memory(kinds, 50, where), Memory(kinds, 60, where)
    live = LiveModel(Held(target.tensors()))
    found = []
    with joined(topology, 2, 1, name, device, staging=staging, bucket_size=BUCKET) as engine:
        for step in (1, 2):
            source.change(step, late=False)
            with Peak(where) as peak:
                update(engine, step, live, source.tensors().items())
            found.append(peak.num_bytes)
            assert peak.left == 0
            if engine.rank in engine.rollouts:
                target.require_filled(values_of(kinds, step), around=60)
    return found


@on_devices
def test_a_consumer_on_the_device_takes_a_bucket_or_the_largest_tensor(device: str) -> None:
    peaks = run_ranks(2, _peaks_of_consumer, device, device=device)[1]
    assert peaks == {"dense": 2 * BUCKET, "gaps": 4 * BUCKET}, peaks


def _peaks_of_consumer(topology: Topology, device: str) -> dict[str, int]:
    """Buckets are let go of before what the consumer gets is made."""
    where = torch_device(device, topology)
    found = {}
    with joined(topology, 1, 1, "broadcast", device, bucket_size=BUCKET) as engine:
        for step, (which, kinds) in enumerate(KINDS.items(), 1):
            weights = Memory(kinds, step if engine.rank in engine.trainers else 60, where)
            if engine.rank in engine.trainers:
                publish(engine, step, weights.tensors().items())
                continue
            with Peak(where) as peak:
                asyncio.run(_take(engine.receive_weights(step), weights.tensors()))
            found[which] = peak.num_bytes
            weights.require_filled(values_of(kinds, step), around=60)
    return found


async def _take(weights: Any, tensors: dict[str, torch.Tensor]) -> None:
    async for name, tensor in weights:
        tensors[name].copy_(tensor)


@on_stand_in
def test_buckets_are_smaller_where_a_device_has_little_memory_left(device: str) -> None:
    """One rank of three may take two buckets of a quarter of the size; what is larger than a bucket travels all the same."""
    run_ranks(3, _little_room, device, device=device)


def _little_room(topology: Topology, device: str) -> None:
    where = torch_device(device, topology)
    source, target = Memory(GAPS, 50, where), Memory(GAPS, 60, where)
    live = LiveModel(Held(target.tensors()))
    filled = Filled(where, 4 << 20) if topology.rank == 2 else None
    share = 0.5 if filled is None else BUCKET // 4 * 2 / filled.free()
    with joined(topology, 1, 2, "broadcast", device, bucket_size=BUCKET, memory_fraction=share) as engine:
        for step in (1, 2):
            source.change(step, late=False)
            report = update(engine, step, live, source.tensors().items())
            assert report["num_buckets"] in (24, 25), report  # of 64 KiB, or 256 bytes less, not of 256 KiB
            if engine.rank in engine.rollouts and filled is None:
                target.require_filled(values_of(GAPS, step), around=60)
    if filled is not None:
        filled.let_go()
        target.require_filled(values_of(GAPS, 2), around=60)


@on_stand_in
@pytest.mark.parametrize(
    "full",
    [pytest.param(0, id="the trainer's device", marks=pytest.mark.full), pytest.param(1, id="a rollout's device")],
)
def test_a_device_without_room_is_one_sentence_on_every_rank_and_the_next_update_works(device: str, full: int) -> None:
    said = run_ranks(3, _no_room, device, full, device=device)
    assert len(set(said)) == 1, said
    assert f"device={device}: {device}:{full} has no room for 1.0 MiB more" in said[0], said[0]


def _no_room(topology: Topology, device: str, full: int) -> str:
    """It is full when the update begins; there was room when the ranks agreed on their buckets."""
    where = torch_device(device, topology)
    source, target = Memory(DENSE, 50, where), Memory(DENSE, 60, where)
    live = LiveModel(Held(target.tensors()))
    with joined(topology, 1, 2, "broadcast", device, bucket_size=4 * BUCKET) as engine:
        filled = Filled(where, 0) if topology.rank == full else None
        with pytest.raises(CheckpointError) as raised:
            update(engine, 1, live, source.tensors().items())
        assert isinstance(raised.value, DeviceMemoryError), raised.value
        assert (engine.version, live.version) == (None, None)
        if filled is not None:
            filled.let_go()
        if engine.rank in engine.rollouts:
            target.require_filled(values_of(DENSE, 60), around=60)
        source.change(2, late=False)
        update(engine, 2, live, source.tensors().items())
        if engine.rank in engine.rollouts:
            target.require_filled(values_of(DENSE, 2), around=60)
    return str(raised.value)


@on_devices
@engines
def test_pinned_memory_is_made_once_and_used_again_by_all_later_updates(device: str, name: str) -> None:
    for made in run_ranks(2, _pinned, name, device, device=device):
        first, *later = made
        assert first >= 9 * (3 << 16) and later == [0, 0], made


def _pinned(topology: Topology, name: str, device: str) -> list[int]:
    """Bytes that each of three updates makes; they are at least those of the weights."""
    where = torch_device(device, topology)
    source, target = Memory(DENSE, 50, where), Memory(DENSE, 60, where)
    live = LiveModel(Held(target.tensors()))
    made = [0]
    empty = torch.empty

    def counted(*args: Any, pin_memory: bool = False, **settings: Any) -> torch.Tensor:
        memory: torch.Tensor = empty(*args, pin_memory=pin_memory, **settings)
        made[-1] += memory.nbytes if memory.is_pinned() else 0
        return memory

    torch.empty = counted  # type: ignore[assignment]
    with joined(topology, 1, 1, name, device, bucket_size=BUCKET) as engine:
        for step in (1, 2, 3):
            made.append(0)
            source.change(step)
            update(engine, step, live, source.tensors().items())
            if engine.rank in engine.rollouts:
                target.require_filled(values_of(DENSE, step), around=60)
    return made[1:]


# Types


@on_devices
@pytest.mark.parametrize("name", ["broadcast", pytest.param("kimi_ckpt_engine", marks=pytest.mark.full)])
def test_types_that_the_collectives_refuse_travel_bit_for_bit(device: str, name: str) -> None:
    run_ranks(2, _refused, name, device, device=device)


REFUSED = {
    "fp8": Kind(torch.float8_e4m3fn, 3 << 18, lambda flat: flat.view(768, 1024)),
    "fp8 transposed": Kind(torch.float8_e5m2, 700 * 301, lambda flat: flat.view(700, 301).t()),
    "complex": Kind(torch.complex64, 65 * 33, lambda flat: flat.view(65, 33)),
    "unsigned": Kind(torch.uint16, 999, lambda flat: flat),
}


def _refused(topology: Topology, name: str, device: str) -> None:
    where = torch_device(device, topology)
    source, target = Memory(REFUSED, 50, where), Memory(REFUSED, 60, where)
    live = LiveModel(Held(target.tensors()))
    with joined(topology, 1, 1, name, device, rollout_dtype="bfloat16") as engine:
        if device == "npu":
            group = OwnGroup.broadcast
            seen = []
            OwnGroup.broadcast = lambda self, buffer, source: seen.append(buffer.dtype) or group(self, buffer, source)  # type: ignore[method-assign, func-returns-value]
        for step in (1, 2):
            source.change(step)
            update(engine, step, live, source.tensors().items())
            if engine.rank in engine.rollouts:
                target.require_filled(values_of(REFUSED, step), around=60)
        assert device != "npu" or set(seen) == {torch.uint8}


# checkpoint-engine


@on_stand_in
def test_kimi_works_on_the_ranks_own_device_wherever_its_rank_is(device: str) -> None:
    """The second rank lives on a host of its own, on the first device there."""
    run_ranks(2, _on_the_own_device, device, nodes=[1, 1], device=device)


def _on_the_own_device(topology: Topology, device: str) -> None:
    assert topology.local_rank == 0
    where = torch_device(device, topology)
    module = torch.get_device_module(where)
    source, target = Memory(DENSE, 50, where), Memory(DENSE, 60, where)
    live = LiveModel(Held(target.tensors()))
    with joined(topology, 1, 1, "kimi_ckpt_engine", device) as engine:
        update(engine, 1, live, source.tensors().items())
        assert engine.members.submit(module.current_device).result() == 0
        assert [module.max_memory_reserved(other) for other in range(1, module.device_count())] == [0] * 7
        if engine.rank in engine.rollouts:
            target.require_filled(values_of(DENSE, 50), around=60)


@on_devices
def test_kimi_leaves_the_package_as_it_is_while_it_joins_and_updates(device: str) -> None:
    assert run_ranks(2, _rebound_names, device, device=device)[0] == set()


def _rebound_names(topology: Topology, device: str) -> set[str]:
    """Names of the package that are something else than right after its import: in its methods, in a broadcast, and in the end."""
    import checkpoint_engine.ps
    import checkpoint_engine.worker

    from ckpt.engine.parameter_server import _Collectives

    found: set[str] = set()
    looks: list[str] = []

    def looking(of: Any, name: str) -> None:
        real = getattr(of, name)

        def look(*args: Any) -> Any:
            looks.append(name)
            found.update(changed.names())
            return real(*args)

        setattr(of, name, look)

    looking(checkpoint_engine.ps, "_get_physical_gpu_id")
    looking(_Collectives, "all_gather_object")
    looking(OwnGroup, "broadcast")
    changed = _Changed()
    where = torch_device(device, topology)
    source, target = Memory(DENSE, 50, where), Memory(DENSE, 60, where)
    live = LiveModel(Held(target.tensors()))
    with joined(topology, 1, 1, "kimi_ckpt_engine", device) as engine:
        update(engine, 1, live, source.tensors().items())
        if engine.rank in engine.rollouts:
            target.require_filled(values_of(DENSE, 50), around=60)
    assert looks[:3] == ["_get_physical_gpu_id", "all_gather_object", "broadcast"]
    return found | set(changed.names())


class _Changed:
    """What is re-bound in the modules of checkpoint-engine from now on."""

    def __init__(self) -> None:
        self._values = {name: dict(vars(module)) for name, module in self._modules()}

    def names(self) -> list[str]:
        return sorted(
            f"{name}.{key}"
            for name, module in self._modules()
            for key, value in vars(module).items()
            if value is not self._values.get(name, {}).get(key)
        )

    def _modules(self) -> Iterator[tuple[str, ModuleType]]:
        yield from (
            (name, module) for name, module in list(sys.modules.items()) if name.startswith("checkpoint_engine")
        )


@on_devices
@sampled("name", ["broadcast", "kimi_ckpt_engine"])
def test_an_update_prints_nothing(device: str, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(2, _update_once, name, device, device=device)
    assert capfd.readouterr().err == ""


def _update_once(topology: Topology, name: str, device: str) -> None:
    where = torch_device(device, topology)
    source, target = Memory(DENSE, 50, where), Memory(DENSE, 60, where)
    with joined(topology, 1, 1, name, device) as engine:
        update(engine, 1, LiveModel(Held(target.tensors())), source.tensors().items())
