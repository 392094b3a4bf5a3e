"""Weights from trainers to rollouts, on real ranks: bit-equal on every one of them, update after update, or refused by all."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from ckpt.engine import LiveModel, WeightVersion, WholeWeights
from ckpt.engine.base import NamedTensor
from ckpt.engine.broadcast import BroadcastTransport
from ckpt.engine.versioned import VersionedEngine
from ckpt.engine.wire import pool, transfer
from ckpt.engine.wire.layout import WeightLayout
from ckpt.errors import (
    CheckpointError,
    ConfigurationError,
    CorruptCheckpointError,
    MissingStateError,
    ReplicationError,
    ShapeMismatchError,
    ShardingError,
)
from ckpt.ranks.topology import Topology
from ckpt.state.statefuls import ModelState
from tests.device import devices
from tests.device.devices import NPU
from tests.support.covering import sampled
from tests.support.engines import (
    DISAGGREGATED,
    KINDS,
    NEVER,
    TIED,
    MixedModel,
    Published,
    collected,
    join,
    joined,
    live_model,
    num_ranks,
    publish,
    put,
    receive,
    require_holds,
    require_same,
    update,
)
from tests.support.ranks import run_ranks
from tests.support.states import Held, random_bits

STEPS = (1, 2, 3)
SIZES = ((1, 1), (2, 2), (3, 1), (1, 3))
FULL = pytest.mark.full


def run(
    num_trainers: int, num_rollouts: int, name: str, fn: Any, *args: Any, colocated: bool = False, **options: Any
) -> list[Any]:
    """Run `fn(topology, num_trainers, num_rollouts, name, *args)` on the ranks that an engine needs."""
    world_size = num_ranks(name, num_trainers, num_rollouts, colocated=colocated)
    return run_ranks(world_size, fn, num_trainers, num_rollouts, name, *args, **options)


# Three updates in a row


def _matrix() -> Iterator[Any]:
    """All engines, sizes and devices; those that are not marked stand for the others in the default run."""
    default = {
        ("broadcast", 2, 2, "npu"),
        ("kimi_ckpt_engine", 2, 2, "cpu"),
    }
    for name, (num_trainers, num_rollouts), device in itertools.product(DISAGGREGATED, SIZES, ("cpu", "npu")):
        marks = [pytest.mark.npu] if device == "npu" else []
        marks += [] if (name, num_trainers, num_rollouts, device) in default else [FULL]
        case = f"{name}-{num_trainers}x{num_rollouts}-{device}"
        yield pytest.param(name, num_trainers, num_rollouts, device, marks=marks, id=case)


@pytest.mark.parametrize(("name", "num_trainers", "num_rollouts", "device"), [*_matrix()])
def test_three_updates_in_a_row_are_bit_equal_on_every_rollout_and_of_one_version_everywhere(
    name: str, num_trainers: int, num_rollouts: int, device: str
) -> None:
    told = run(num_trainers, num_rollouts, name, _three_updates, device, device=device)
    _require_one_version_per_step(told)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        pytest.param("naive", "cpu"),
        pytest.param("naive", "npu", marks=[pytest.mark.npu, FULL]),
        pytest.param("broadcast", "cpu", marks=FULL),
        pytest.param("broadcast", "npu", marks=[pytest.mark.npu, FULL]),
        pytest.param("kimi_ckpt_engine", "cpu", marks=FULL),
        pytest.param("kimi_ckpt_engine", "npu", marks=pytest.mark.npu),
    ],
)
def test_three_updates_in_a_row_where_the_trainers_are_the_rollouts(name: str, device: str) -> None:
    told = run(2, 2, name, _three_updates, device, {"colocated": True}, colocated=True, device=device)
    _require_one_version_per_step(told)


@pytest.mark.full
@pytest.mark.parametrize("name", ["naive", "broadcast", "kimi_ckpt_engine"])
def test_three_updates_of_one_rank_that_is_trainer_and_rollout(name: str) -> None:
    _require_one_version_per_step(run(1, 1, name, _three_updates, "cpu", {"colocated": True}, colocated=True))


@pytest.mark.full
@pytest.mark.npu
@pytest.mark.parametrize("name", DISAGGREGATED)
def test_one_half_of_device_memory_does_as_well(name: str) -> None:
    _require_one_version_per_step(run(2, 1, name, _three_updates, "npu", {"staging": False}, device="npu"))


def _three_updates(
    topology: Topology,
    num_trainers: int,
    num_rollouts: int,
    name: str,
    device: str,
    settings: dict[str, Any] | None = None,
) -> list[tuple[WeightVersion, dict[str, Any]]]:
    told = []
    with joined(topology, num_trainers, num_rollouts, name, device, **(settings or {})) as engine:
        live = live_model(device) if engine.rank in engine.rollouts else None
        for step in STEPS:
            report = update(engine, step, live)
            if live is not None:
                require_holds(live, engine, step)
            assert engine.version is not None and engine.report is not None
            assert report == engine.report.as_dict()
            engine.finalize()
            told.append((engine.version, report))
    return told


def _require_one_version_per_step(told: list[list[tuple[WeightVersion, dict[str, Any]]]]) -> None:
    assert all(of_rank == told[0] for of_rank in told), "ranks have other versions or figures"
    versions, reports = zip(*told[0], strict=True)
    assert [version.step for version in versions] == [*STEPS]
    assert len({version.digest for version in versions}) == len(STEPS)
    state = MixedModel(1).state_dict()
    num_bytes = sum(tensor.nbytes for name, tensor in state.items() if name not in TIED)
    for step, report in zip(STEPS, reports, strict=True):
        assert (report["step"], report["num_tensors"], report["num_bytes"]) == (step, len(KINDS), num_bytes)
        assert report["num_buckets"] == 6 and report["bandwidth_gb_s"] > 0
        assert min(report["offload_s"], report["gather_s"], report["transfer_s"], report["reload_s"]) > 0


# What consumers of other kinds get


@sampled("device", ["cpu", NPU])
def test_broadcast_yields_weights_whose_memory_is_used_again(device: str) -> None:
    run(2, 1, "broadcast", _receive_weights, device, device=device)


def _receive_weights(topology: Topology, num_trainers: int, num_rollouts: int, name: str, device: str) -> None:
    with joined(topology, num_trainers, num_rollouts, name, device) as engine:
        if engine.rank in engine.trainers:
            for step in STEPS:
                publish(engine, step, MixedModel(step, device))
            return
        expected = {step: MixedModel(step).state_dict() for step in STEPS}
        got = asyncio.run(collected(engine.receive_weights(1)))
        require_same(got, expected[1])
        assert engine.version is not None and engine.version.step == 1

        async def kept() -> dict[str, torch.Tensor]:
            return {name: tensor async for name, tensor in engine.receive_weights()}

        late = asyncio.run(kept())
        assert all(tensor.device.type == device for tensor in late.values())
        if device == "cpu":
            # Here everything has memory of its own, until the next update.
            require_same(late, expected[2])
        else:
            with pytest.raises(AssertionError, match="other bits"):
                require_same(late, expected[2])
        require_same(asyncio.run(collected(engine.receive_weights(3))), expected[3])
        with pytest.raises(AssertionError, match="other bits"):
            require_same(late, expected[2])


@pytest.mark.parametrize("name", ["broadcast", pytest.param("kimi_ckpt_engine", marks=FULL)])
def test_the_weights_that_came_last_can_be_had_while_the_next_are_under_way(name: str, tmp_path: Path) -> None:
    run(1, 2, name, _get_weights_meanwhile, tmp_path)


def _get_weights_meanwhile(topology: Topology, num_trainers: int, num_rollouts: int, name: str, folder: Path) -> None:
    with joined(topology, num_trainers, num_rollouts, name, cached=True) as engine:
        if engine.rank in engine.trainers:
            publish(engine, 1, MixedModel(1))
            asyncio.run(engine.send_weights(_until_read(MixedModel(2), folder, num_rollouts), 2))
            publish(engine, 3, MixedModel(3))
            return
        live = live_model()
        receive(engine, live, 1)
        asyncio.run(_read_in_the_middle(engine, live, folder / str(topology.rank)))
        require_holds(live, engine, 2)
        receive(engine, live, 3)
        require_same(asyncio.run(collected(engine.get_weights())), MixedModel(3).state_dict())


async def _until_read(model: torch.nn.Module, folder: Path, num_readers: int) -> AsyncIterator[NamedTensor]:
    """Half of the weights, and the other half when all rollouts have read the cached ones."""
    state = model.state_dict()
    for number, (name, tensor) in enumerate(state.items()):
        while number == len(state) // 2 and len([*folder.iterdir()]) < num_readers:
            await asyncio.sleep(0.01)
        yield name, tensor


async def _read_in_the_middle(engine: VersionedEngine, live: LiveModel, done: Path) -> None:
    coming = asyncio.create_task(engine.receive_into(live, 2))
    await asyncio.sleep(0.05)
    require_same(await collected(engine.get_weights()), MixedModel(1).state_dict())
    assert not coming.done() and live.version is not None and live.version.step == 1
    done.touch()
    await coming
    require_same(await collected(engine.get_weights()), MixedModel(2).state_dict())


@pytest.mark.parametrize("device", ["cpu", pytest.param("npu", marks=[pytest.mark.npu, FULL])])
def test_broadcast_leaves_a_slow_reader_of_cached_weights_the_version_it_began_with(device: str) -> None:
    run(1, 1, "broadcast", _read_slowly, device, device=device)


def _read_slowly(topology: Topology, num_trainers: int, num_rollouts: int, name: str, device: str) -> None:
    with joined(topology, num_trainers, num_rollouts, name, device, cached=True) as engine:
        if engine.rank in engine.trainers:
            for step in (*STEPS, 4):
                publish(engine, step, MixedModel(step, device))
            return

        async def read() -> None:
            live = live_model(device)
            await engine.receive_into(live, 1)
            slow = engine.get_weights()
            got = {}
            for step in (*STEPS[1:], 4):
                for _ in range(4):
                    name, tensor = await anext(slow)
                    got[name] = tensor.cpu().clone()
                await engine.receive_into(live, step)
                require_holds(live, engine, step)
            got |= await collected(slow)
            require_same(got, MixedModel(1).state_dict())
            require_same(await collected(engine.get_weights()), MixedModel(4).state_dict())

        asyncio.run(read())


# Weights and models that are spread over ranks


_PLAIN = {
    "rows": ((8, 6), torch.float32),
    "uneven": ((4, 5), torch.bfloat16),
    "few": ((1, 3), torch.int64),
    "long": ((40_000,), torch.float32),
}


def _plain(step: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Four tensors, whose bits depend on the step, for layouts to be made of."""
    where = devices.made(device).torch_device
    return {
        key: random_bits(shape, dtype, seed=100 * step + number).to(where)
        for number, (key, (shape, dtype)) in enumerate(_PLAIN.items())
    }


_PLACEMENTS = {"rows": Shard(0), "uneven": Shard(1), "few": Shard(0), "long": Shard(0)}


@pytest.mark.parametrize("device", ["cpu", pytest.param("npu", marks=[pytest.mark.npu, FULL])])
@pytest.mark.parametrize("name", ["broadcast", pytest.param("kimi_ckpt_engine", marks=FULL)])
def test_dtensors_are_sent_whole_and_received_in_parts(name: str, device: str) -> None:
    run(2, 3, name, _from_and_to_dtensors, device, process_group=True, device=device)


def _from_and_to_dtensors(topology: Topology, num_trainers: int, num_rollouts: int, name: str, device: str) -> None:
    world = num_trainers + num_rollouts
    ours = DeviceMesh(device, [*range(num_trainers)]), DeviceMesh(device, [*range(num_trainers, world)])
    with joined(topology, num_trainers, num_rollouts, name, device) as engine:
        trains = engine.rank in engine.trainers
        live = (
            None if trains else LiveModel(Held(_spread(NEVER, ours[1], device) | {"uneven": _copied(ours[1], device)}))
        )
        for step in STEPS:
            update(engine, step, live, _spread(step, ours[0], device).items() if trains else None)
            if live is not None:
                assert live.version == engine.version
                for key, value in _plain(step).items():
                    held = live.state_dict()[key]
                    own = distribute_tensor(value, DeviceMesh("cpu", ours[1].mesh), held.placements, src_data_rank=None)
                    require_same({key: held.to_local()}, {key: own.to_local()})


def _spread(step: int, mesh: DeviceMesh, device: str) -> dict[str, DTensor]:
    if mesh.get_coordinate() is None:
        return {}
    return {
        key: distribute_tensor(value, mesh, [_PLACEMENTS[key]], src_data_rank=None)
        for key, value in _plain(step, device).items()
    }


def _copied(mesh: DeviceMesh, device: str) -> DTensor | None:
    """One that all rollouts hold whole."""
    if mesh.get_coordinate() is None:
        return None
    return distribute_tensor(_plain(NEVER, device)["uneven"], mesh, [Replicate()], src_data_rank=None)


def _net(step: int, device: str = "cpu") -> torch.nn.Module:
    """A net that DDP and FSDP2 can wrap, whose numbers depend on the step."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(step)
        net = torch.nn.Sequential(
            torch.nn.Linear(7, 9), torch.nn.ReLU(), torch.nn.Linear(9, 5, bias=False), torch.nn.BatchNorm1d(5)
        )
    return net.to(devices.made(device).torch_device)


def _wrapped(layout: str, step: int, topology: Topology, device: str) -> torch.nn.Module:
    net = _net(step, device)
    if layout == "ddp":
        return DistributedDataParallel(net).module
    if layout == "fsdp":
        mesh = DeviceMesh(device, [*range(topology.world_size)])
        for child in (net[0], net[2]):
            fully_shard(child, mesh=mesh)
        return fully_shard(net, mesh=mesh)
    assert layout == "pipeline"
    for index in range(4):
        if index % topology.world_size != topology.rank:
            net[index] = torch.nn.Identity()  # another rank's
    return net


@sampled("layout", ["ddp", "fsdp", "pipeline"], 2)
@pytest.mark.parametrize(
    ("name", "device"), [("broadcast", "cpu"), pytest.param("kimi_ckpt_engine", "npu", marks=[pytest.mark.npu, FULL])]
)
def test_trainers_publish_whole_weights_whatever_their_layout(layout: str, name: str, device: str) -> None:
    run(2, 2, name, _publish_layout, layout, device, colocated=True, process_group=True, device=device)


def _publish_layout(
    topology: Topology, num_trainers: int, num_rollouts: int, name: str, layout: str, device: str
) -> None:
    with joined(topology, num_trainers, num_rollouts, name, device, colocated=True) as engine:
        live = live_model(module=_net(NEVER, device))
        for step in STEPS:
            weights = WholeWeights(ModelState(_wrapped(layout, step, topology, device)), topology)
            update(engine, step, live, weights)
            require_same(live.state_dict(), _net(step).state_dict())


def test_whole_weights_name_what_is_tied_across_stages_and_refuse_what_they_cannot_gather() -> None:
    assert run_ranks(2, _whole_weights, process_group=True) == [None, None]


def _whole_weights(topology: Topology) -> None:
    stage = torch.nn.Module()
    stage.tied_names = {"head": "embed"}
    values = random_bits((3, 5), torch.bfloat16, seed=1)
    put(stage, "embed" if topology.rank == 0 else "head", values.clone())
    put(stage, f"only {topology.rank}", random_bits((2,), torch.float32, seed=topology.rank))
    put(stage, "nothing", torch.empty(0, 2))
    weights = WholeWeights(ModelState(stage), topology)
    assert weights.tied_names == {"head": "embed"}
    want = {"embed": values, "nothing": torch.empty(0, 2)}
    want |= {f"only {rank}": random_bits((2,), torch.float32, seed=rank) for rank in range(2)}
    for _ in range(2):
        require_same(dict(weights), want)

    if topology.rank == 0:
        stage.register_parameter("embed", torch.nn.Parameter(torch.zeros(4, 5)))
    changed = r"on rank 0: embed was bfloat16 \[3, 5\] when .* is float32 \[4, 5\]: make a new WholeWeights"
    with pytest.raises(MissingStateError, match=changed):
        dict(weights)
    mesh = DeviceMesh("cpu", [0])
    own = {"w": distribute_tensor(torch.zeros(4), mesh, [Shard(0)])} if topology.rank == 0 else {}
    with pytest.raises(ShardingError, match=r"w: only ranks \[0\] of 2 hold parts of it, as DTensors"):
        WholeWeights(Held(own), topology)


# Figures and memory of unusual updates


@sampled("name", ["broadcast", "kimi_ckpt_engine"])
def test_trainers_that_own_nothing_take_part_all_the_same(name: str) -> None:
    owned = run(3, 1, name, _few_buckets)
    assert owned[:3] == [1, 0, 0]


def _few_buckets(topology: Topology, num_trainers: int, num_rollouts: int, name: str) -> int:
    with joined(topology, num_trainers, num_rollouts, name, bucket_size=1 << 20) as engine:
        live = live_model()
        for step in STEPS:
            assert update(engine, step, live)["num_buckets"] == 1
            if engine.rank in engine.rollouts:
                require_holds(live, engine, step)
        return 0 if engine.pool is None or engine.layout is None else len(engine.pool.buckets(engine.layout))


@sampled("name", [*DISAGGREGATED, "naive"])
def test_no_weights_at_all_and_weights_without_elements_are_updates_too(name: str) -> None:
    run(1, 1, name, _next_to_nothing)


def _next_to_nothing(topology: Topology, num_trainers: int, num_rollouts: int, name: str) -> None:
    with joined(topology, num_trainers, num_rollouts, name) as engine:
        for step, state in enumerate(({}, {"empty": torch.empty(0, 3)}, {"one": torch.tensor(5)}, {}), start=1):
            live = LiveModel(Held({key: torch.zeros_like(value) for key, value in state.items()}))
            report = update(engine, step, live, state.items())
            assert (report["num_tensors"], report["num_buckets"]) == (len(state), int("one" in state))
            if engine.rank in engine.rollouts:
                require_same(live.state_dict(), state)
                assert live.version == engine.version


# Rollouts of one host


@sampled(
    ("name", "nodes", "receivers"),
    [
        ("broadcast", [1, 3], [1]),
        ("kimi_ckpt_engine", [2, 2], [1, 2]),
        pytest.param("broadcast", [1, 1, 2], [1, 2], marks=FULL),
    ],
)
def test_rollouts_of_one_host_share_one_copy_of_the_weights(name: str, nodes: list[int], receivers: list[int]) -> None:
    ranks = run(1, 3, name, _shared, nodes=nodes)
    hosts = [host for host, count in enumerate(nodes) for _ in range(count)]
    for rank, of_rank in enumerate(ranks):
        receiver = next((one for one in receivers if hosts[one] == hosts[rank]), None)
        alone = rank and hosts[1:].count(hosts[rank]) == 1
        assert of_rank["digested"] == (rank in receivers), "only a rollout that receives checks the digests"
        assert of_rank["place"] == (None if rank == 0 or alone or receiver is None else ranks[receiver]["place"])


def _shared(topology: Topology, num_trainers: int, num_rollouts: int, name: str) -> dict[str, Any]:
    digest, calls = transfer.digest_of_bucket, []

    def counted(*args: Any) -> str:
        calls.append(args)
        return digest(*args)

    with pytest.MonkeyPatch.context() as patch, joined(topology, num_trainers, num_rollouts, name) as engine:
        patch.setattr(transfer, "digest_of_bucket", counted)
        live = live_model() if engine.rank in engine.rollouts else None
        for step in STEPS:
            update(engine, step, live)
            if live is not None:
                require_holds(live, engine, step)
        return {"digested": bool(calls), "place": engine.receive_buffers[0].place}


def test_a_rollout_that_cannot_map_the_memory_of_another_receives_for_itself() -> None:
    assert run(1, 3, "broadcast", _not_mapped) == [None, True, False, True]


def _not_mapped(topology: Topology, num_trainers: int, num_rollouts: int, name: str) -> bool | None:
    with joined(topology, num_trainers, num_rollouts, name) as engine, pytest.MonkeyPatch.context() as patch:
        if engine.rank == 2:
            patch.setattr(pool, "memory_at", lambda _place: None)
        live = live_model() if engine.rank in engine.rollouts else None
        groups = None
        for step in STEPS:
            update(engine, step, live)
            if live is not None:
                require_holds(live, engine, step)
            assert groups in (None, transport_groups(engine)), "later updates use the same groups"
            groups = transport_groups(engine)
        return None if live is None else engine.receive_buffers[0].place is not None


def transport_groups(engine: VersionedEngine) -> list[str]:
    """The names of the groups that buckets travel in."""
    assert isinstance(engine.transport, BroadcastTransport)
    return sorted(engine.transport.groups._made or {})


def test_groups_are_used_again_when_rollouts_share_as_they_did_before() -> None:
    run(1, 2, "broadcast", _in_turns)


def _in_turns(topology: Topology, num_trainers: int, num_rollouts: int, name: str) -> None:
    """Every other update the rollouts hand out host tensors, and so receive each for itself."""
    with joined(topology, num_trainers, num_rollouts, name) as engine:
        live = live_model() if engine.rank in engine.rollouts else None
        groups = {}
        for step in range(1, 7):
            if live is not None and step % 2:
                require_same(asyncio.run(collected(engine.receive_weights())), MixedModel(step).state_dict())
            else:
                update(engine, step, live)
            groups[step] = transport_groups(engine)
        assert groups[2] == groups[6], "no group is made that was there before"
        with topology.phase("all have it"):
            pass


@pytest.mark.parametrize("settings", [{}, {"delta": True}])
def test_rollouts_that_hand_out_host_tensors_have_memory_of_their_own(settings: dict[str, Any]) -> None:
    """A consumer of `receive_weights` writes to what it is given, as some do; the other rollouts do not see that."""
    run(1, 2, "broadcast", _handed_out, settings)


def _handed_out(topology: Topology, num_trainers: int, num_rollouts: int, name: str, settings: dict[str, Any]) -> None:
    async def scribbled(engine: VersionedEngine) -> dict[str, torch.Tensor]:
        found = {}
        async for name, tensor in engine.receive_weights():
            found[name] = tensor.clone()
            if tensor.numel() and not settings and name not in TIED.values():
                tensor.zero_()
        return found

    with joined(topology, num_trainers, num_rollouts, name, **settings) as engine:
        live = live_model() if engine.rank in engine.rollouts else None
        for step in range(1, 7):
            streams = step in (3, 4)
            if live is None or not streams:
                update(engine, step, live)
            else:
                require_same(asyncio.run(scribbled(engine)), MixedModel(step).state_dict())
            if live is not None:
                assert (engine.receive_buffers[0].place is None) == streams
                if not streams:
                    require_holds(live, engine, step)
            with topology.phase("all have it"):
                pass


@sampled("name", ["broadcast", "naive", pytest.param("kimi_ckpt_engine", marks=FULL)])
def test_weights_may_change_between_updates_and_memory_is_used_again(name: str) -> None:
    run(2, 1 if name != "naive" else 2, name, _changing_weights)


def _changing_weights(topology: Topology, num_trainers: int, num_rollouts: int, name: str) -> None:
    added = {**KINDS, "adapter": KINDS["layers.0.weight"], "zero": KINDS["layers.0.scale"]}
    fewer = {key: kind for key, kind in KINDS.items() if not key.startswith("layers.1")}
    memories = []
    with joined(topology, num_trainers, num_rollouts, name) as engine:
        for step, kinds in enumerate((KINDS, KINDS, added, KINDS, fewer, KINDS, KINDS), start=1):
            live = live_model(module=MixedModel(NEVER, kinds=kinds))
            update(engine, step, live, MixedModel(step, kinds=kinds))
            if engine.rank in engine.rollouts:
                require_same(live.state_dict(), MixedModel(step, kinds=kinds).state_dict())
            memories.append(_memory_of(engine))
        assert memories[0] == memories[1], "an update of the same layout makes no memory"
        assert memories[5] == memories[6]
        assert memories[2] == memories[3] or engine.rank in engine.trainers, "the receive buffer fits a smaller stream, too"


def _memory_of(engine: VersionedEngine) -> list[int]:
    """Where buckets lie that are sent, and those that are received."""
    assert engine.layout is not None
    sent = [] if engine.pool is None else [*engine.pool.buckets(engine.layout).values()]
    received = [receive_buffer.bucket(0) for receive_buffer in engine.receive_buffers if engine.rank in engine.rollouts]
    return [host.data_ptr() for host in sent + received]


def test_broadcast_casts_floats_but_neither_float8_nor_integers_nor_what_is_kept() -> None:
    run(2, 1, "broadcast", _cast)


_CAST = ("layers.0.bias", "norm", "layers.1.odd", "layers.1.half")
_KEPT = ("layers.0.router.weight", "layers.0.scale")


def _floats(step: int) -> dict[str, torch.Tensor]:
    """Random numbers, for any bits at all would do as a NaN, of which casts keep little."""
    generator = torch.Generator().manual_seed(step)
    shapes = {"layers.0.bias": (70, 300), "norm": (33,), "layers.1.odd": (5, 3), "layers.1.half": (7,)}
    state = {key: torch.randn(shape, generator=generator) for key, shape in shapes.items()}
    state |= {key: torch.randn(8, 3, generator=generator).t() for key in _KEPT}
    state["layers.1.odd"] = state["layers.1.odd"].double()
    state["layers.1.half"] = state["layers.1.half"].half()
    state["experts"] = random_bits((40, 30), torch.float8_e4m3fn, seed=step)
    state["experts too"] = random_bits((40, 30), torch.float8_e5m2, seed=step)
    state["table"] = random_bits((9,), torch.int64, seed=step)
    state["rotation"] = random_bits((9,), torch.complex64, seed=step)
    return state


def _cast(topology: Topology, num_trainers: int, num_rollouts: int, name: str) -> None:
    settings = {"rollout_dtype": "bfloat16", "keep_dtype": ["*.router.weight", "*.scale"]}
    with joined(topology, num_trainers, num_rollouts, name, bucket_size=1 << 12, **settings) as engine:
        for step in STEPS:
            want = {key: one.to(torch.bfloat16) if key in _CAST else one for key, one in _floats(step).items()}
            live = LiveModel(Held({key: torch.zeros_like(one) for key, one in want.items()}))
            report = update(engine, step, live, _floats(step).items())
            assert report["num_bytes"] == sum(one.nbytes for one in want.values())
            if engine.rank in engine.rollouts:
                require_same(live.state_dict(), want)


# Refusals, on all ranks, after which the next update works


def _other(what: str) -> MixedModel:
    """A rollout's model that is not quite the trainers'."""
    kinds = dict(KINDS)
    if what == "name":
        kinds["normal"] = kinds.pop("norm")
    elif what == "shape":
        kinds["norm"] = kinds["norm"]._replace(num_elements=300)
    else:
        kinds["norm"] = kinds["norm"]._replace(dtype=torch.bfloat16)
    return MixedModel(NEVER, kinds=kinds)


_REFUSED = {
    "name": (MissingStateError, r"1 \(normal\) not sent, 1 \(norm\) not in the model"),
    "shape": (ShapeMismatchError, r"norm: the trainers send float32 \[301\], the rollout's model has float32 \[300\]"),
    "dtype": (
        ShapeMismatchError,
        r"norm: .* has bfloat16 \[301\]; cast what is sent with rollout_dtype=bfloat16",
    ),
}


@sampled("name", ["broadcast", "naive", pytest.param("kimi_ckpt_engine", marks=FULL)])
def test_a_rollout_with_another_model_is_refused_on_all_ranks_before_anything_moves(name: str) -> None:
    run(1 if name != "naive" else 2, 2, name, _refuse_rollouts)


def _refuse_rollouts(topology: Topology, num_trainers: int, num_rollouts: int, name: str) -> None:
    phase = "check" if name == "naive" else "prepare"
    with joined(topology, num_trainers, num_rollouts, name) as engine:
        live = live_model()
        update(engine, 1, live)
        version = engine.version
        for step, (what, (kind, sentence)) in enumerate(_REFUSED.items(), start=2):
            others = live_model(module=_other(what))
            chosen = others if topology.rank == topology.world_size - 1 else live
            with pytest.raises(
                kind, match=f"step {step} failed in phase {phase} on rank {topology.world_size - 1}: .*{sentence}"
            ):
                update(engine, step, chosen)
            assert engine.version == version and others.version is None
            if engine.rank in engine.rollouts:
                require_holds(live, engine, 1)
        update(engine, 5, live)
        if engine.rank in engine.rollouts:
            require_holds(live, engine, 5)


@pytest.mark.parametrize("name", ["broadcast", *(pytest.param(name, marks=FULL) for name in ("kimi_ckpt_engine", "naive"))])
def test_steps_that_do_not_rise_or_differ_and_weights_that_differ_are_refused_on_all_ranks(name: str) -> None:
    run(2, 1 if name != "naive" else 2, name, _refuse_trainers)


def _refuse_trainers(topology: Topology, num_trainers: int, num_rollouts: int, name: str) -> None:
    with joined(topology, num_trainers, num_rollouts, name) as engine:
        live = live_model()
        second = topology.rank == 1

        def refused(kind: type[CheckpointError], sentence: str, step: int | None, weights: Any = None) -> None:
            with pytest.raises(kind, match=sentence):
                if engine.rank in engine.trainers:
                    publish(engine, step, weights or MixedModel(9))
                else:
                    receive(engine, live)
            assert engine.version is not None and engine.version.step == 4
            if engine.rank in engine.rollouts:
                require_holds(live, engine, 4)

        update(engine, 4, live)
        for step in (4, 3, -1):
            refused(
                ConfigurationError,
                f"step {step}: expected a step higher than 4, whose weights have been published",
                step,
            )
        refused(ConfigurationError, "rank 0 is at step 5 and rank 1 at step 6", 6 if second else 5)
        added = {**KINDS, "more": KINDS["norm"]}
        differ = "trainers yield different weights: 16 tensors of .* on rank 0, 17 of"
        refused(ConfigurationError, differ, 5, MixedModel(5, kinds=added) if second else MixedModel(5))
        backwards = dict(reversed(KINDS.items()))
        differ = "trainers yield different weights: 16 tensors .* in another order"
        refused(ConfigurationError, differ, 5, MixedModel(5, kinds=backwards) if second else MixedModel(5))
        twice = [("a", torch.zeros(2)), ("a", torch.zeros(2))]
        refused(ConfigurationError, "the weight update.*: a is yielded twice", 5, twice)
        unsendable = [("a", torch.zeros(2, dtype=torch.uint8).view(torch.bits8))]
        refused(
            ConfigurationError,
            "in phase offload on rank 1: .*bits8",
            5,
            unsendable if second else [("a", torch.zeros(2))],
        )
        published = Published(MixedModel(5))
        published.tied_names = {"head.weight": "body.weight"}
        refused(ConfigurationError, "head.weight is body.weight, which is not yielded", 5, published)
        update(engine, 5, live)
        if engine.rank in engine.rollouts:
            require_holds(live, engine, 5)


def test_naive_compares_what_its_trainers_yield_bit_by_bit() -> None:
    run(2, 2, "naive", _other_bits)


def _other_bits(topology: Topology, num_trainers: int, num_rollouts: int, name: str) -> None:
    with joined(topology, num_trainers, num_rollouts, name) as engine:
        live = live_model()
        update(engine, 1, live)
        model = MixedModel(2)
        if topology.rank == 1:
            model.norm.view(torch.uint8)[-1] ^= 1
        with pytest.raises(
            ReplicationError,
            match="trainers 0 and 1 yield other bits of the same weights, in bucket 0 of .*, with norm, ",
        ):
            update(engine, 2, live, model)
        require_holds(live, engine, 1)
        update(engine, 3, live)
        require_holds(live, engine, 3)


def test_naive_notices_bytes_that_change_between_pool_and_receive_buffer() -> None:
    run(2, 2, "naive", _changed_bytes)


def _changed_bytes(topology: Topology, num_trainers: int, num_rollouts: int, name: str) -> None:
    with joined(topology, num_trainers, num_rollouts, name) as engine:
        live = live_model()
        update(engine, 1, live)
        if topology.rank == 1:
            asked: Counter[int] = Counter()
            assert engine.pool is not None
            bucket_of = engine.pool.bucket

            def changed(layout: WeightLayout, bucket: int) -> torch.Tensor:
                host = bucket_of(layout, bucket).clone()
                asked[bucket] += 1
                if bucket == 3 and asked[bucket] == 2:  # the first time it is digested
                    host[-1] ^= 1
                return host

            engine.pool.bucket = changed
        where = "failed in phase transfer on rank 1: bucket 3 of 6, with .*, has changed in the host memory of rank 1"
        with pytest.raises(CorruptCheckpointError, match=where):
            update(engine, 2, live)
        require_holds(live, engine, 1)
        update(engine, 3, live)
        require_holds(live, engine, 3)


def test_broadcast_without_a_number_counts_its_updates() -> None:
    run(1, 1, "broadcast", _count)


def _count(topology: Topology, num_trainers: int, num_rollouts: int, name: str) -> None:
    with joined(topology, num_trainers, num_rollouts, name) as engine:
        live = live_model()
        for step in (1, 2):
            if engine.rank in engine.trainers:
                publish(engine, None, MixedModel(step))
            else:
                receive(engine, live)
                require_holds(live, engine, step)


# Joining


@pytest.mark.parametrize("name", ["kimi_ckpt_engine", pytest.param("broadcast", marks=FULL)])
def test_an_engine_joins_the_same_ranks_once_and_anew_where_it_rebuilds_its_groups(name: str) -> None:
    run(1, 2, name, _join_again)


def _join_again(topology: Topology, num_trainers: int, num_rollouts: int, name: str) -> None:
    live = live_model()
    with joined(topology, num_trainers, num_rollouts, name) as engine:
        kept = engine.topology
        join(topology, engine, num_trainers, num_rollouts)
        assert engine.topology is kept, "the same ranks are joined already"
        update(engine, 1, live)
        engine.finalize()
        assert engine.topology is kept
        with pytest.raises(ConfigurationError, match="has joined 1 trainers and 2 rollouts: call leave"):
            engine.init_process_group(rank=0, actor_wg_world_size=2, rollout_world_size=1)
    with joined(topology, num_trainers, num_rollouts, name, rebuild_group=True) as engine:
        for step in STEPS:
            if step > 1:
                join(topology, engine, num_trainers, num_rollouts)
            update(engine, step, live)
            if engine.rank in engine.rollouts:
                require_holds(live, engine, step)
            engine.finalize()
            assert engine.topology is None
