"""Parts of the benchmark of saves and loads: the slow store, layouts of files, system calls, and ratios."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from ckpt.format.box import Box
from ckpt.ranks.topology import Topology
from recipes.benchmark import slow_store
from recipes.benchmark.contenders import PEERS
from recipes.benchmark.limits import Raw, RawDirect, _calls, takes_direct_writes
from recipes.benchmark.places import FileLocation, Holding, first, lay_out, least_loaded, runs_of, sources_of
from recipes.benchmark.saves_and_loads import compared, state_asked_for
from recipes.benchmark.slow_store import TokenBucket, slow_reads
from recipes.benchmark.tables import summarized
from recipes.benchmark.workloads import Contender, Workload
from tests.conf.configs import benchmark_config
from tests.support.ranks import run_ranks


class Clock:
    """Time that passes when a test says so, or somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.passes = True
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds if self.passes else 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(slow_store, "time", clock)
    return clock


def test_bytes_pass_a_bucket_at_its_rate_and_nothing_is_saved_up(tmp_path: Path, clock: Clock) -> None:
    bucket = TokenBucket(tmp_path / "bucket", 1000.0)
    bucket.take(500)
    bucket.take(250)
    clock.now += 60.0
    bucket.take(1000)
    bucket.take(0)
    assert clock.slept == pytest.approx([0.5, 0.25, 1.0])
    bucket.close()


def test_who_shares_the_file_shares_the_bucket(tmp_path: Path, clock: Clock) -> None:
    clock.passes = False
    mine, yours = (TokenBucket(tmp_path / "bucket", 1000.0) for _ in range(2))
    mine.take(1000)
    yours.take(1000)
    assert clock.slept == [1.0, 2.0]
    mine.close()
    yours.close()


def test_threads_and_processes_together_are_no_faster_than_the_bucket(tmp_path: Path) -> None:
    started, ended = zip(*run_ranks(3, _take_in_threads, tmp_path / "bucket"), strict=True)
    assert 0.3 <= max(ended) - min(started) < 3.0


def _take_in_threads(topology: Topology, path: Path) -> tuple[float, float]:
    import time

    bucket = TokenBucket(path, 6 * 25 * 100 / 0.3)
    with topology.phase("start"):
        pass
    started = time.monotonic()
    threads = [threading.Thread(target=lambda: [bucket.take(100) for _ in range(25)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return started, time.monotonic()


def test_a_slow_read_gives_the_file_s_bytes_and_pays_for_those_alone(tmp_path: Path, clock: Clock) -> None:
    bucket = TokenBucket(tmp_path / "bucket", 1000.0)
    (tmp_path / "data").write_bytes(bytes(range(100)))
    descriptor = os.open(tmp_path / "data", os.O_RDONLY)
    first_half, second_half = bytearray(30), bytearray(70)
    got = slow_reads(bucket)(descriptor, [memoryview(first_half), memoryview(second_half)], 40)
    os.close(descriptor)
    bucket.close()
    assert got == 60 and bytes(first_half + second_half[:30]) == bytes(range(40, 100))
    assert clock.slept == pytest.approx([0.06])


@pytest.mark.parametrize(
    ("saved", "wanted", "num_runs"),
    [
        (Box((0, 0), (4, 5)), Box((0, 0), (4, 5)), 1),
        (Box((0, 0), (4, 5)), Box((2, 0), (6, 5)), 1),
        (Box((2, 1), (6, 3)), Box((0, 2), (5, 4)), 3),
        (Box((0, 0, 0), (2, 3, 4)), Box((1, 1, 0), (3, 2, 4)), 1),
        (Box((0, 0, 0), (2, 3, 4)), Box((0, 1, 0), (3, 2, 4)), 2),
        (Box((), ()), Box((), ()), 1),
        (Box((0,), (3,)), Box((3,), (3,)), 0),
    ],
)
def test_runs_carry_what_two_boxes_share_from_where_it_lies_to_where_it_is_wanted(
    saved: Box, wanted: Box, num_runs: int
) -> None:
    whole = np.arange(max(78, 12 ** len(saved.shape)), dtype=np.int64)
    whole = whole[: 12 ** len(saved.shape)].reshape((12,) * len(saved.shape)) if saved.shape else whole[77]
    there = np.ascontiguousarray(whole[saved.slices]).view(np.int64).reshape(-1).view(np.uint8)
    here = np.full(wanted.shape, -1, dtype=np.int64)
    expected = np.full_like(here, -1)
    shared = np.isin(whole[wanted.slices], whole[saved.slices])
    expected[shared] = whole[wanted.slices][shared]
    runs = [*runs_of(saved, wanted, 8)]
    memory = here.reshape(-1).view(np.uint8)
    for run in runs:
        memory[run.wanted_at : run.wanted_at + run.num_bytes] = there[run.saved_at : run.saved_at + run.num_bytes]
    assert len(runs) == num_runs
    assert np.array_equal(here, expected)


def holdings(ranks: Sequence[int], *sizes: int) -> dict[tuple[str, Box], Holding]:
    return {(f"t{n}", Box((0,), (size,))): Holding(size, tuple(ranks)) for n, size in enumerate(sizes)}


def test_copies_are_written_once_evenly_or_all_by_the_first_who_holds_them() -> None:
    held = holdings((0, 1, 2), 10, 10, 10, 4, 4, 4)
    even = lay_out(held, 4, least_loaded)
    assert sorted(location.writer for location in even.values()) == [0, 0, 1, 1, 2, 2]
    for writer in range(3):
        assert sorted(location.offset for location in even.values() if location.writer == writer) == [0, 10]
    alone = lay_out(held, 4, first)
    assert {location.writer for location in alone.values()} == {0}
    assert sorted(location.offset for location in alone.values()) == [0, 10, 20, 30, 34, 38]


def test_sources_are_the_saved_boxes_of_that_name_that_meet() -> None:
    saved = {("w", Box((at,), (4,))): FileLocation(at // 4, 0) for at in (0, 4, 8)}
    saved["v", Box((0,), (12,))] = FileLocation(3, 0)
    wanted = {("w", Box((3,), (5,))): torch.zeros(5), ("u", Box((0,), (1,))): torch.zeros(1)}
    found = [(source.name, source.saved, source.location, source.wanted) for source in sources_of(wanted, saved)]
    box = Box((3,), (5,))
    assert found == [("w", Box((0,), (4,)), FileLocation(0, 0), box), ("w", Box((4,), (4,)), FileLocation(1, 0), box)]


def test_calls_carry_all_bytes_in_order_and_none_is_too_large() -> None:
    views = [np.full(size, number % 251, np.uint8) for number, size in enumerate([3, 9 << 20, *[1] * 3000, 8 << 20])]
    offsets = [0, *np.cumsum([view.nbytes for view in views])]
    calls = [*_calls(zip(offsets, views, strict=False))]
    assert b"".join(part.tobytes() for _, call in calls for part in call) == b"".join(view.tobytes() for view in views)
    assert all(sum(part.nbytes for part in call) <= 8 << 20 and len(call) <= 1024 for _, call in calls)
    ends = [offset + sum(part.nbytes for part in call) for offset, call in calls]
    assert [offset for offset, _ in calls] == [0, *ends[:-1]]


def test_reads_that_lie_behind_each_other_are_joined() -> None:
    three, two = np.zeros(3, np.uint8), np.zeros(2, np.uint8)
    found = [(at, len(views)) for at, views in _calls([(0, three), (3, two), (9, three), (12, two), (20, two)])]
    assert found == [(0, 2), (9, 2), (20, 1)]


def test_a_file_system_is_asked_whether_it_takes_direct_writes(tmp_path: Path) -> None:
    assert takes_direct_writes(tmp_path, 0) in (True, False)
    assert not takes_direct_writes(Path("/proc/self"), 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of PEFT, at each name of transformers that is old
@pytest.mark.parametrize("make", [Raw, RawDirect, *PEERS.values()])
def test_what_others_save_is_synced_file_by_file_and_folder_by_folder_as_ours_is(
    make: Callable[[Workload], Contender], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    if make is RawDirect and not takes_direct_writes(folder, 0):
        pytest.skip("this file system takes no O_DIRECT")
    if make is PEERS["torch-checkpointing"]:
        pytest.importorskip("torch_checkpointing")
    synced: set[int] = set()
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (synced.add(os.fstat(descriptor).st_ino), fsync(descriptor)))
    workload_of = ["workload=small_tensors", "benchmark.small_tensors.count=30"]
    if make is PEERS["pretrained"]:
        pytest.importorskip("peft")
        workload_of = ["workload=lora", "benchmark.adapters.hidden_size=64", "benchmark.adapters.layers=1"]
    cfg = benchmark_config(tmp_path / "run", *workload_of, "launch.nproc_per_node=1")
    with Topology.alone() as topology, state_asked_for(cfg, topology) as workload:
        make(workload).save(folder)
    left = [folder, *folder.rglob("*")]
    assert sum(path.stat().st_size for path in left if path.is_file()) >= 30 * 4096
    assert [path.name for path in left if path.stat().st_ino not in synced] == []


def rows(save: Sequence[float] = (), cold: Sequence[float] = (), warm: Sequence[float] = ()) -> list[dict[str, float]]:
    columns = {"save_s": save, "load_cold_s": cold, "load_warm_s": warm}
    given = {name: values for name, values in columns.items() if values}
    return [dict(zip(given, values, strict=True)) for values in zip(*given.values(), strict=True)]


def test_ratios_are_of_medians_the_peer_s_over_ours_and_ours_over_the_limit_s() -> None:
    rounds = {
        "raw": rows([2, 1, 9], [1, 1, 1], [0.5, 0.5, 0.5]),
        "raw-direct": rows([1, 1, 1]),
        "broadcast": rows(warm=[4, 4, 4]),
        "dcp": rows([6, 4, 5], [8, 8, 8], [6, 6, 6]),
        "zarr": rows([2.5, 2.0, 100], [4, 4, 4], [2, 1, 3]),
        "zarr/two-stage": rows([2, 2, 2], [2, 2, 2], [1, 1, 1]),
    }
    found = summarized(rounds)
    found |= compared(found)
    assert found["medians"]["zarr"] == {"save_s": 2.5, "load_cold_s": 4, "load_warm_s": 2}
    assert found["ranges"]["zarr"]["save_s"] == [2.0, 100]
    ratios = found["ratios"]
    assert ratios["dcp / ours"]["zarr"] == {"save_s": 2.0, "load_cold_s": 2.0, "load_warm_s": 3.0}
    assert ratios["ours / raw"]["zarr"] == {"save_s": 1.25, "load_cold_s": 4.0, "load_warm_s": 4.0}
    assert ratios["ours / broadcast"]["zarr"] == {"load_warm_s": 0.5}
    assert ratios["ours / best raw"]["zarr"] == {"save_s": 2.5, "load_cold_s": 4.0, "load_warm_s": 4.0}
    assert ratios["direct / two-stage"] == {"zarr/two-stage": {"load_cold_s": 2.0, "load_warm_s": 2.0}}
    assert set(ratios["dcp / ours"]) == {"zarr", "zarr/two-stage"}


def test_without_others_and_limits_there_are_no_ratios_to_them() -> None:
    found = compared(summarized({"zarr": rows([1], [1], [1])}))["ratios"]
    assert found == {"direct / two-stage": {}, "ours / best raw": {"zarr": {}}}
