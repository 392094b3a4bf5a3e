"""Two-stage loading through the coordinator: the bits of direct loading, each byte read once, in bounded memory, or one error."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ckpt import CheckpointCoordinator, StateComponent
from ckpt.backends.base import Backend
from ckpt.backends.zarr import ZarrBackend
from ckpt.errors import CheckpointError, ConfigurationError, CorruptCheckpointError, RankAbsentError
from ckpt.format.manifest import CheckpointManifest, Index
from ckpt.loading.direct import ChunkReader
from ckpt.loading.report import Status
from ckpt.loading.two_stage import two_stage
from ckpt.loading.two_stage.network import KeptTransports, TorchTransport
from ckpt.loading.two_stage.slots import MAX_SLOTS, HostLink, make_slots
from ckpt.loading.two_stage.spread_worker import summarize
from ckpt.loading.two_stage.two_stage import TwoStageLoad
from ckpt.memory.copies import Filling
from ckpt.memory.device import Device
from ckpt.planning.plan import CHUNK_MAX_BYTES, plan_save
from ckpt.ranks.topology import Topology
from ckpt.saving import saver
from ckpt.storage.stored import read_index, read_manifest
from ckpt.storage.wanted_bytes import WantedBytes
from recipes.benchmark.measuring import PeakMemory
from tests.support.covering import and_in_full, sampled
from tests.support.ranks import Dead, run_ranks
from tests.support.states import (
    ALL_DTYPES,
    BACKENDS,
    Fitted,
    Held,
    coordinator,
    global_index,
    random_bits,
    same_bits,
    sized,
    spreading,
)

HOSTS = {"one host": [4], "two and two": [2, 2], "one and three": [1, 3], "each its own": [1, 1, 1, 1]}
_PATTERNS = ("replicated", "per_rank", "global", "per_group")


def state(seed: int) -> dict[str, Any]:
    """Every data type, shapes that no cut divides, none and one element, and an array of three blocks."""
    tensors = {f"{dtype}": random_bits((37, 1001), dtype, seed + n) for n, dtype in enumerate(ALL_DTYPES)}
    small = {f"small {n}": random_bits((n,), torch.float32, seed + n) for n in range(12)}
    return {
        **tensors,
        **small,
        "0-dim": torch.tensor(seed + 0.5),
        "empty": torch.empty(0, 7),
        "large": random_bits((9, 1 << 18), torch.float32, seed),
    }


class Counting:
    """Reads as ever, and counts what it got."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def read_at(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        got = os.preadv(fd, buffers, offset)  # type: ignore[arg-type]  # it takes any buffers
        self.num_bytes += got
        return got


def components(pattern: str, topology: Topology) -> tuple[Held, list[StateComponent]]:
    seed = {"per_rank": topology.rank, "per_group": topology.rank // 2}.get(pattern, 0)
    held = Held(state(1000 * seed))
    group = "pairs" if pattern == "per_group" else None
    return held, [StateComponent("model", held, pattern, process_group_name=group)]


def pairs(topology: Topology) -> dict[str, list[int]]:
    first = topology.rank // 2 * 2
    return {"pairs": [rank for rank in (first, first + 1) if rank < topology.world_size]}


def emptied(held: Held) -> dict[str, torch.Tensor]:
    """Take the values away, and return them."""
    saved = {key: tensor.clone() for key, tensor in held.state.items()}
    for tensor in held.state.values():
        tensor.view(-1).view(torch.uint8).fill_(0xEE) if tensor.numel() else None
    return saved


def require_loaded(held: Held, saved: dict[str, torch.Tensor]) -> None:
    assert held.loaded is not None
    assert held.loaded.keys() == saved.keys()
    for key, tensor in saved.items():
        assert same_bits(held.loaded[key], tensor), key


def stored_bytes(path: Path) -> int:
    """Of all chunks, as they lie in the files."""
    manifest: CheckpointManifest = read_manifest(path)
    indexes: list[Index] = [read_index(path, manifest, rank) for rank in manifest.index_ranks()]
    return sum(chunk.length for index in indexes for by_number in index.chunks.values() for chunk in by_number.values())


def saved_and_loaded(
    topology: Topology,
    root: Path,
    pattern: str,
    backend: str | Backend,
    options: dict[str, Any],
    in_chunks: bool = False,
) -> tuple[int, int, int]:
    """Save, load by two stages, compare every bit; return the bytes read, needed, and read by this rank.

    `in_chunks`: arrays are cut as those of gigabytes are.
    """
    held, parts = components(pattern, topology)
    counting = Counting()
    size = {"in_flight_bytes": options.get("in_flight_bytes", TwoStageLoad.in_flight_bytes)}
    strategy = sized(TwoStageLoad(read_at=counting.read_at, **{k: v for k, v in options.items() if k not in size}), **size)
    made = coordinator(
        topology, root, parts, backend=backend, strategy=strategy, process_groups=pairs(topology), pattern_check="off"
    )
    max_bytes = CHUNK_MAX_BYTES >> 4 if in_chunks else CHUNK_MAX_BYTES
    with patch.object(saver, "plan_save", partial(plan_save, chunk_max_bytes=max_bytes)):
        path = made.save_checkpoint(checkpoint_id="1")
    saved = emptied(held)
    made.load_checkpoint(path)
    require_loaded(held, saved)
    report = made.last_load
    assert report is not None
    return report.bytes_read, report.bytes_needed, counting.num_bytes


SPREAD = [
    ("one and three", "replicated", True),  # an array of several chunks, within a host and between hosts
    ("two and two", "per_group", False),
]


@and_in_full(
    ("hosts", "pattern", "in_chunks"), SPREAD, itertools.product(HOSTS, ("replicated", "per_group"), (False, True))
)
def test_all_ranks_get_every_bit_and_each_byte_is_read_once(
    tmp_path: Path, hosts: str, pattern: str, in_chunks: bool
) -> None:
    """S1.57: storage gives each byte once, whoever wants it; S1.49: groups between hosts are made by all ranks in one order."""
    outcomes = run_ranks(
        4, saved_and_loaded, tmp_path, pattern, "zarr", {}, in_chunks, nodes=HOSTS[hosts], process_group=True, agree_s=30
    )
    unique = stored_bytes(tmp_path / "checkpoint-1")
    assert {read for read, _, _ in outcomes} == {unique}
    assert sum(mine for _, _, mine in outcomes) == unique
    assert max(mine for _, _, mine in outcomes) < unique / 2  # nobody reads it all
    assert bool([*tmp_path.glob("checkpoint-1/model/**/large/c/1")]) == in_chunks


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pattern", _PATTERNS)
@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("cpu_transfer", [True, False])
def test_every_pattern_backend_and_way_to_spread(
    tmp_path: Path, backend: str, pattern: str, hosts: str, cpu_transfer: bool
) -> None:
    run_ranks(
        4,
        saved_and_loaded,
        tmp_path,
        pattern,
        backend,
        {"cpu_transfer": cpu_transfer},
        nodes=HOSTS[hosts],
        process_group=True,
    )


@sampled("backend", ["ocdbt", "file", "safetensors"])
def test_other_backends_and_collectives_of_the_device(tmp_path: Path, backend: str) -> None:
    options = {"cpu_transfer": backend == "file", "in_flight_bytes": 8 << 20}
    outcomes = run_ranks(3, saved_and_loaded, tmp_path, "replicated", backend, options, process_group=True)
    assert sum(mine for _, _, mine in outcomes) == stored_bytes(tmp_path / "checkpoint-1")


def _saved_encoded_and_loaded(topology: Topology, root: Path) -> tuple[int, int, int]:
    zstd = [{"name": "zstd", "configuration": {"level": 1, "checksum": False}}]
    return saved_and_loaded(topology, root, "replicated", ZarrBackend(compressors=zstd), {})


def test_chunks_that_are_encoded_are_read_and_decoded_once(tmp_path: Path) -> None:
    outcomes = run_ranks(3, _saved_encoded_and_loaded, tmp_path)
    assert sum(mine for _, _, mine in outcomes) == stored_bytes(tmp_path / "checkpoint-1")


def test_one_rank_alone_loads_as_directly_as_ever(tmp_path: Path) -> None:
    ((read, _, _),) = run_ranks(1, saved_and_loaded, tmp_path, "replicated", "zarr", {})
    assert read == stored_bytes(tmp_path / "checkpoint-1")


def test_each_instance_of_a_group_reads_for_itself(tmp_path: Path) -> None:
    outcomes = run_ranks(4, saved_and_loaded, tmp_path, "replicated", "zarr", {"group": "pairs"})
    unique = stored_bytes(tmp_path / "checkpoint-1")
    by_rank = [mine for _, _, mine in outcomes]
    assert by_rank[0] + by_rank[1] == by_rank[2] + by_rank[3] == unique


def _grown(topology: Topology, root: Path, mib: int) -> tuple[float, int]:
    """Load, and return how much this rank's memory grew at most, in MiB, and the size of what it loaded."""
    held = Fitted({f"w{n}": random_bits((64, 1 << 16), torch.float32, n) for n in range(7)})
    strategy = spreading(in_flight_bytes=mib << 20)
    made = coordinator(topology, root, [StateComponent("model", held, "replicated")], strategy=strategy)
    path = made.save_checkpoint(checkpoint_id="1")
    made.load_checkpoint(path)  # what is imported and made once is there now
    memory = PeakMemory()
    made.load_checkpoint(path)
    return memory.mib(), sum(tensor.nbytes for tensor in held.state.values()) >> 20


@pytest.mark.parametrize("nodes", [pytest.param([3], marks=pytest.mark.full), [2, 1]])
def test_memory_in_flight_stays_within_its_setting(tmp_path: Path, nodes: list[int]) -> None:
    """S1.48: what is on its way is bounded, however large the state; a rank also sees what its neighbours give."""
    for grown, loaded in run_ranks(3, _grown, tmp_path, 16, nodes=nodes, process_group=True):
        assert loaded == 112
        assert grown <= max(nodes) * 16 + 8 < loaded


def _cached(
    topology: Topology, root: Path, backend: str, not_here: Sequence[int], damaged: bool
) -> tuple[int, int, str]:
    """Load what the page cache has, but on some ranks, who are told that it has not; return the bytes read, blocks read by this rank
    to be spread, and the error."""
    held, parts = components("replicated", topology)
    made = coordinator(topology, root, parts, backend=backend, strategy=TwoStageLoad())
    path = Path(made.save_checkpoint(checkpoint_id="1"))
    with topology.phase("damage, and read all"):
        if topology.is_lead:
            *_, file = sorted(path.rglob("*"), key=lambda one: one.stat().st_size if one.is_file() else 0)
            data = bytearray(file.read_bytes())
            data[5_000_000] ^= damaged
            file.write_bytes(data)
            assert all(one.read_bytes() is not None for one in path.rglob("*") if one.is_file())
    saved = emptied(held)
    spread = []
    fetch = ChunkReader.fetch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChunkReader, "fetch", lambda *given: spread.append(1) or fetch(*given))
        if topology.rank in not_here:
            patch.setattr(ChunkReader, "is_cached", lambda *_: False)
        if damaged:
            with pytest.raises(CorruptCheckpointError) as caught:
                made.load_checkpoint(path)
            return 0, len(spread), str(caught.value)
        made.load_checkpoint(path)
    require_loaded(held, saved)
    assert made.last_load is not None
    return made.last_load.bytes_read, len(spread), ""


@sampled("backend", BACKENDS)
def test_what_the_page_cache_has_goes_through_no_slot(tmp_path: Path, backend: str) -> None:
    outcomes = run_ranks(3, _cached, tmp_path, backend, (), False)
    assert outcomes == [(stored_bytes(tmp_path / "checkpoint-1"), 0, "")] * 3


@sampled(
    ("nodes", "not_here", "spreading", "copies"),
    [([2, 2], [3], [2, 3], 2), ([3], [2], [0, 1, 2], 1), ([1, 3], [3], [1, 2, 3], 2)],
)
def test_ranks_of_a_host_that_do_not_all_find_it_in_the_page_cache_spread_it(
    tmp_path: Path, nodes: list[int], not_here: list[int], spreading: list[int], copies: int
) -> None:
    """Each host with a page cache counts what it has once, and so do the others together."""
    outcomes = run_ranks(sum(nodes), _cached, tmp_path, "zarr", not_here, False, nodes=nodes, process_group=True)
    assert {read for read, _, _ in outcomes} == {copies * stored_bytes(tmp_path / "checkpoint-1")}
    assert [rank for rank, (_, spread, _) in enumerate(outcomes) if spread] == spreading


def test_damage_that_is_in_the_page_cache_is_found_on_every_rank(tmp_path: Path) -> None:
    first, *others = run_ranks(3, _cached, tmp_path, "zarr", (), True)
    assert first[1] == 0 and "large: bytes 4194304 to 8388608 of" in first[2]
    assert others == [first, first]


def _refused(topology: Topology, root: Path, options: dict[str, Any]) -> str:
    held, parts = components("replicated", topology)
    plain = coordinator(topology, root, parts)
    path = plain.save_checkpoint(checkpoint_id="1")
    saved = emptied(held)
    made = coordinator(topology, root, parts, strategy=spreading(**options))
    with pytest.raises(ConfigurationError) as caught:
        made.load_checkpoint(path)
    assert held.loaded is None
    plain.load_checkpoint(path)
    require_loaded(held, saved)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"in_flight_bytes": 3 << 20}, "3 MiB may be in flight, and this load needs 4, for 1 block of 4 MiB"),
        ({"group": "data"}, "group=data of TwoStageLoad: the run has no process group of that name, it has none"),
        ({"cpu_transfer": False}, "torch.distributed, which is not initialized"),
    ],
)
def test_what_cannot_be_is_one_sentence_on_every_rank_before_bytes_move(
    tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    first, *others = run_ranks(2, _refused, tmp_path, options)
    assert says in first
    assert others == [first]


def _given_different_memory(topology: Topology, root: Path) -> str:
    return _refused(topology, root, {"in_flight_bytes": 16 + topology.rank // 2 << 20})


def test_ranks_that_are_given_different_settings_are_told_so(tmp_path: Path) -> None:
    """They would cut the same bytes into different blocks."""
    for says in run_ranks(3, _given_different_memory, tmp_path):
        assert "rank 2 may have 17 MiB in flight, and rank 0 16: two-stage" in says


def _by_name_only(topology: Topology, root: Path) -> int:
    """Rank 1 is told that it shares a host with rank 0, and reaches nobody there."""
    if topology.rank == 1:
        HostLink.reach = lambda self, addresses: False  # type: ignore[method-assign]
    return saved_and_loaded(topology, root, "replicated", "zarr", {})[2]


def test_ranks_that_share_but_the_name_of_a_host_spread_over_the_network(tmp_path: Path) -> None:
    by_rank = run_ranks(2, _by_name_only, tmp_path, process_group=True)
    assert sum(by_rank) == stored_bytes(tmp_path / "checkpoint-1")


def _without_shared_memory(topology: Topology, root: Path) -> int:
    two_stage.can_be_shared = lambda: False
    return saved_and_loaded(topology, root, "replicated", "zarr", {})[2]


def test_systems_without_such_memory_spread_over_the_network(tmp_path: Path) -> None:
    by_rank = run_ranks(2, _without_shared_memory, tmp_path, process_group=True)
    assert sum(by_rank) == stored_bytes(tmp_path / "checkpoint-1")


def test_a_strategy_outlives_the_process_groups_it_has_made() -> None:
    """The next ones often lie in memory where those lay."""
    kept = KeptTransports(None, cpu_transfer=True)
    device = Device(type="cpu", collectives="gloo")
    for _ in range(30):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            first, second = (kept.connect(Topology.alone(), device, [(0,)], [kept.offer()]) for _ in range(2))
            assert isinstance(first, TorchTransport) and isinstance(second, TorchTransport)
            assert first._group is second._group
            assert dist.get_process_group_ranks(first._group) == [0]
        finally:
            dist.destroy_process_group()


def test_memory_that_no_slot_needs_is_not_taken() -> None:
    slots = make_slots(4096 << 20, 16, between_hosts=True)
    assert slots.reading + slots.receiving == MAX_SLOTS
    assert len(slots.host) == MAX_SLOTS * slots.slot_bytes


def _damaged(topology: Topology, root: Path, required: bool) -> tuple[str, str] | tuple[str, str, bool]:
    model = Held({f"w{n}": random_bits((64, 500), torch.float32, n) for n in range(4)})
    ema = Held({f"e{n}": random_bits((64, 30_000 if n == 2 else 500), torch.float32, n + 9) for n in range(4)})
    parts = [
        StateComponent("model", model, "replicated"),
        StateComponent("ema", ema, "replicated", required=required),
    ]
    made = coordinator(topology, root, parts, strategy=spreading(), pattern_check="off")
    path = Path(made.save_checkpoint(checkpoint_id="1"))
    with topology.phase("damage"):
        if topology.is_lead:
            (file,) = (path / "ema" / "e2" / "c" / "0").iterdir()
            data = bytearray(file.read_bytes())
            data[5_000_000] ^= 1
            file.write_bytes(data)
    saved = emptied(model)
    if required:
        with pytest.raises(CorruptCheckpointError) as caught:
            made.load_checkpoint(path)
        return type(caught.value).__name__, str(caught.value)
    made.load_checkpoint(path)
    require_loaded(model, saved)
    assert ema.loaded is None and made.last_load is not None
    (report,) = (one for one in made.last_load.components if one.key == "ema")
    return report.status.name, str(report.reason), made.last_load.bytes_read > 0


def test_damage_that_one_rank_reads_is_raised_by_all(tmp_path: Path) -> None:
    first, *others = run_ranks(3, _damaged, tmp_path, True)
    assert "ema: e2: bytes 4194304 to 7680000 of" in first[1]
    assert others == [first, first]


def test_damage_in_an_optional_component_leaves_out_just_that(tmp_path: Path) -> None:
    first, *others = run_ranks(3, _damaged, tmp_path, False)
    assert first[0] == Status.FAILED.name
    assert "e2: bytes 4194304 to 7680000 of" in first[1]
    assert others == [first, first]


def _one_cannot_place(topology: Topology, root: Path, options: dict[str, Any]) -> tuple[str, float]:
    """Rank 1 fails in the required component, with what no disk can raise; another component follows."""
    model = Held({f"w{n}": random_bits((64, 18_000), torch.float32, n) for n in range(4)})
    ema = Held({"e": random_bits((64, 18_000), torch.float32, 9)})
    parts = [StateComponent("model", model, "replicated"), StateComponent("ema", ema, "replicated", required=False)]
    made = coordinator(
        topology, root, parts, strategy=spreading(**options), process_groups=pairs(topology), pattern_check="off"
    )
    path = made.save_checkpoint(checkpoint_id="1")
    if topology.rank == 1:

        def place(self: Filling, wanted: WantedBytes, start: int, stop: int, memory: torch.Tensor) -> None:
            raise RuntimeError("the device is full")

        Filling.place = place  # type: ignore[method-assign]
    started = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        made.load_checkpoint(path)
    return str(caught.value), time.monotonic() - started


def test_a_rank_that_fails_in_one_component_keeps_nobody_waiting_in_the_next(tmp_path: Path) -> None:
    agree_s = 10.0
    for says, seconds in run_ranks(3, _one_cannot_place, tmp_path, {}, agree_s=agree_s):
        assert says.endswith("failed in phase read on rank 1: RuntimeError: the device is full")
        assert seconds < agree_s / 2


def test_a_rank_that_fails_in_one_instance_of_several_says_why(tmp_path: Path) -> None:
    """It ends what its own process group has under way, and has no hold of the groups that the others made."""
    options = {"group": "pairs", "cpu_transfer": False}
    nodes = HOSTS["each its own"]
    for says, _ in run_ranks(4, _one_cannot_place, tmp_path, options, nodes=nodes, process_group=True):
        assert says.endswith("failed in phase read on rank 1: RuntimeError: the device is full")


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


_GOES: dict[str, Callable[[], None]] = {"killed": _killed, "stopped": _stopped}


def _one_goes(topology: Topology, root: Path, how: str) -> tuple[str, float]:
    """Rank 1 goes when it is about to read its second block."""
    held = Held({f"w{n}": random_bits((16, 1 << 16), torch.float32, n) for n in range(8)})
    reads = 0

    def read_at(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal reads
        reads += 1
        if topology.rank == 1 and reads == 2:
            _GOES[how]()
        return os.preadv(fd, buffers, offset)  # type: ignore[arg-type]  # it takes any buffers

    strategy = TwoStageLoad(read_at=read_at)
    made = coordinator(topology, root, [StateComponent("model", held, "replicated")], strategy=strategy)
    path = made.save_checkpoint(checkpoint_id="1")
    emptied(held)
    started = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        made.load_checkpoint(path)
    assert isinstance(caught.value, RankAbsentError)
    assert held.loaded is None
    return str(caught.value), time.monotonic() - started


@pytest.mark.parametrize(
    ("how", "nodes"),
    [("killed", [1, 1, 1]), *(pytest.param(how, [3], marks=pytest.mark.full) for how in ("killed", "stopped"))],
)
def test_a_rank_that_goes_in_the_middle_is_named_by_the_others(tmp_path: Path, how: str, nodes: list[int]) -> None:
    agree_s = 4.0
    outcomes = run_ranks(3, _one_goes, tmp_path, how, nodes=nodes, process_group=True, expect_dead=[1], agree_s=agree_s)
    assert isinstance(outcomes[1], Dead)
    (said, seconds), (said_2, _) = outcomes[0], outcomes[2]
    assert said == said_2
    assert "rank 1" in said and "phase read" in said
    assert seconds < 4 * agree_s


def _some_want_nothing(topology: Topology, root: Path) -> None:
    """Rank 2 wants nothing, rank 0 and 1 overlap, in a checkpoint of more ranks' making than is loaded here."""
    held = Held({"all": global_index((64, 40_000)), f"of rank {topology.rank}": global_index((10, 9000))})
    part = StateComponent("model", held, "per_rank")
    made = coordinator(topology, root, [part], strategy=spreading(), pattern_check="off")
    if topology.rank == 2:
        held.state.clear()
    path = made.save_checkpoint(checkpoint_id="1")
    saved = emptied(held)
    made.load_checkpoint(path)
    require_loaded(held, saved)


def test_ranks_that_need_nothing_take_part(tmp_path: Path) -> None:
    run_ranks(3, _some_want_nothing, tmp_path)


def _summarized(topology: Topology, root: Path) -> dict[str, tuple[float, float]]:
    _, parts = components("replicated", topology)
    strategy = spreading()
    made: CheckpointCoordinator = coordinator(topology, root, parts, strategy=strategy)
    made.load_checkpoint(made.save_checkpoint(checkpoint_id="1"))
    if topology.rank == 1:
        strategy.timers["known to one rank alone"] = [2.0, 1.0]
    return summarize(strategy.timers, topology)


def test_times_are_summed_up_over_ranks_that_know_different_names(tmp_path: Path) -> None:
    """S1.54: maximum and mean of every step; a name that one rank alone knows makes nobody wait."""
    first, second = run_ranks(2, _summarized, tmp_path)
    assert first == second
    assert first["known to one rank alone"] == (3.0, 1.5)
    assert {"prepare", "storage", "network", "place", "wait"} < first.keys()
    for most, mean in first.values():
        assert most >= mean >= 0
