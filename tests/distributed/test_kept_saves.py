"""The newest save stays in the host memory of the ranks that wrote it: loads and rollouts take it from there, and no file is read."""

from __future__ import annotations

import itertools
import logging
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import CheckpointCoordinator, StateComponent
from ckpt.backends.kimi_engine import KimiEngineBackend
from ckpt.dist_checkpointing import ShardedTensor
from ckpt.errors import CheckpointError, ConfigurationError, CorruptCheckpointError
from ckpt.format.manifest import MANIFEST_NAME
from ckpt.loading.direct import DirectLoad
from ckpt.loading.strategy import LoadingStrategy
from ckpt.loading.two_stage.two_stage import TwoStageLoad
from ckpt.ranks.topology import Topology
from ckpt.saving.save_settings import SaveSettings
from ckpt.storage.pool import PoolFile
from tests.support.covering import and_in_full, sampled
from tests.support.ranks import run_ranks
from tests.support.states import Held, coordinator, random_bits, same_bits, staging

STRATEGIES: dict[str, Callable[[], LoadingStrategy]] = {"direct": DirectLoad, "two-stage": TwoStageLoad}
MODES = {
    "sync": SaveSettings(),
    "async": SaveSettings(mode="async"),
    "overlap": SaveSettings(mode="async", overlap=True),
    "queue": SaveSettings(mode="async", when_busy="queue"),
}
CUTS = (0, 7, 20, 33)
"""Rows of the sharded tensor at which a rank's begin: they are no whole chunks, and parts of some are sent."""
WIDTH = 15_000


@cache
def _any_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return random_bits(shape, dtype, seed=1)


def bits_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Bits of which no element is that of another seed, below 30,000."""
    own = _any_bits(shape, dtype).clone()
    as_integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[dtype.itemsize]
    own.view(as_integers).add_(seed % 251 if dtype.itemsize == 1 else seed)
    return own


class State:
    """Components of many kinds with any bits in them, which depend on a seed."""

    def __init__(self, topology: Topology, seed: int) -> None:
        rank, last = topology.rank, topology.world_size == topology.rank + 1
        start, stop = CUTS[rank], CUTS[-1] if last else CUTS[rank + 1]
        model = {f"w{n}": bits_of((150, 1000 + n), torch.float32, seed + n) for n in range(4)}
        model |= {f"b{n}": bits_of((7,), torch.bfloat16, seed + n) for n in range(5)} | {"none": torch.empty(0, 3)}
        moment = bits_of((CUTS[-1], WIDTH), torch.float16, seed + 50)[start:stop]
        self.held = {
            "model": Held({**model, "note": f"seed {seed}"}),
            "optimizer": Held({"m": ShardedTensor.at("m", moment, (CUTS[-1], WIDTH), (start, 0))}),
            "rng": Held({"state": bits_of((5000 + rank,), torch.uint8, seed + 60 + rank), "drawn": seed}),
        }
        patterns = {"model": "replicated", "optimizer": "sharded", "rng": "per_rank"}
        self.components = [StateComponent(key, held, patterns[key]) for key, held in self.held.items()]

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            f"{key}/{name}": value.data if isinstance(value, ShardedTensor) else value
            for key, held in self.held.items()
            for name, value in held.state.items()
            if isinstance(value, torch.Tensor | ShardedTensor)
        }

    def become(self, other: State) -> None:
        """Take over the bits of another, in the memory there is."""
        for name, tensor in self.tensors().items():
            tensor.copy_(other.tensors()[name])
        for key, held in self.held.items():
            held.state.update({k: v for k, v in other.held[key].state.items() if isinstance(v, str | int)})

    def require_is(self, other: State) -> None:
        for name, tensor in self.tensors().items():
            assert same_bits(tensor, other.tensors()[name]), name
        for key in ("model", "rng"):
            plain = {k: v for k, v in other.held[key].state.items() if isinstance(v, str | int)}
            loaded = self.held[key].loaded or {}
            assert {k: loaded[k] for k in plain} == plain


def made(
    topology: Topology, root: Path, state: State, *, mode: str = "sync", strategy: str = "direct", **options: Any
) -> CheckpointCoordinator:
    options = {"saves": MODES[mode], "pattern_check": "off"} | options
    backend = options.pop("backend", None) or KimiEngineBackend()
    return coordinator(topology, root, state.components, backend=backend, strategy=STRATEGIES[strategy](), **options)


def saved(topology: Topology, checkpoints: CheckpointCoordinator, step: int) -> Path:
    path = checkpoints.save_checkpoint(checkpoint_id=f"{step:08d}")
    checkpoints.wait()
    assert path is not None
    return Path(path)


def leave_nothing_but_the_manifest(topology: Topology, path: Path) -> None:
    with topology.phase("all are here"):
        pass
    with topology.phase("remove files"):
        if topology.is_lead:
            for file in path.rglob("*"):
                if file.is_file() and file.name != MANIFEST_NAME:
                    file.unlink()


def require_all_is_read_from_memory(topology: Topology, root: Path, mode: str, strategy: str) -> None:
    state = State(topology, 0)
    with made(topology, root, state, mode=mode, strategy=strategy, config_text="a: 1") as checkpoints:
        for step in (1, 2, 3):
            state.become(State(topology, 1000 * step))
            path = saved(topology, checkpoints, step)
        leave_nothing_but_the_manifest(topology, path)
        state.become(State(topology, 7))
        checkpoints.load_checkpoint(path)
        state.require_is(State(topology, 3000))
        assert checkpoints.last_load is not None and checkpoints.last_load.bytes_read == 0
        assert checkpoints.last_load.config_text == "a: 1"
        with pytest.raises(CorruptCheckpointError, match="missing"), made(topology, root, state) as others:
            others.load_checkpoint(path)  # who has not written it knows of no memory
    with pytest.raises(CorruptCheckpointError, match="missing"):
        checkpoints.load_checkpoint(path)  # a coordinator that is closed holds nothing


@and_in_full(
    ("mode", "strategy"),
    [("sync", "two-stage"), ("async", "direct")],
    itertools.product(["sync", "async", "overlap", "queue"], STRATEGIES),
)
def test_a_load_of_the_newest_save_reads_no_file_but_the_manifest(tmp_path: Path, mode: str, strategy: str) -> None:
    run_ranks(3, require_all_is_read_from_memory, tmp_path, mode, strategy)


def count_copies(topology: Topology, root: Path, mode: str) -> tuple[int, int, int, int]:
    """Bytes that are copied to memory that is kept while they are written, and that are there already; those of the files; the memory."""
    state, counts, is_there = State(topology, 0), [0], PoolFile._lies_here

    def counting(file: PoolFile, source: Any) -> bool:  # asked of what is not in its place
        counts[0] += len(source)
        return is_there(file, source)

    with (
        pytest.MonkeyPatch.context() as patch,
        made(topology, root, state, mode=mode) as checkpoints,
    ):
        patch.setattr(PoolFile, "_lies_here", counting)
        for step in (1, 2):
            counts[0] = 0
            path = saved(topology, checkpoints, step)
        host_cache = checkpoints._host_cache
        assert host_cache is not None and host_cache.held is not None
        sizes = sum((path / name).stat().st_size for name in host_cache.held.save.files)
        return counts[0], sizes - counts[0], sizes, host_cache.pool.num_bytes


@sampled("mode", ["sync", "async"])
def test_each_byte_is_copied_once_and_the_memory_is_as_large_as_the_files(tmp_path: Path, mode: str) -> None:
    counts = run_ranks(3, count_copies, tmp_path, mode)
    for copied, _, size, memory in counts:
        assert copied <= size <= memory < size + 100_000
    copied, found = (sum(rank[which] for rank in counts) for which in (0, 1))
    if mode == "sync":
        assert found == 0
    else:  # but what is put together of parts of several ranks, headers, indexes and plain values
        assert copied < CUTS[-1] * WIDTH * 2 + 100_000 < 4 * 150 * 1000 * 4 <= found


def require_links_stay_in_memory(topology: Topology, root: Path, mode: str) -> None:
    state, saves = State(topology, 0), replace(MODES[mode], incremental=True)
    with made(topology, root, state, saves=saves) as checkpoints:
        for step in (1, 2, 3, 4):
            other = State(topology, 1000 * step)
            if step > 2:  # of these, the optimizer stays as it was
                other.held["optimizer"] = State(topology, 2000).held["optimizer"]
            state.become(other)
            path = saved(topology, checkpoints, step)
            report = checkpoints.last_save
            assert report is not None and (report.written_bytes < report.bytes) == (step > 2)
        leave_nothing_but_the_manifest(topology, path)
        state.become(State(topology, 7))
        checkpoints.load_checkpoint(path)
        state.require_is(other)
        assert checkpoints.last_load is not None and checkpoints.last_load.bytes_read == 0


@sampled("mode", ["sync", "async"])
def test_what_an_incremental_save_links_is_in_memory_still(tmp_path: Path, mode: str) -> None:
    run_ranks(3, require_links_stay_in_memory, tmp_path, mode)


def load_from_two_hosts(topology: Topology, root: Path, strategy: str) -> int:
    state = State(topology, 1)
    with made(topology, root, state, strategy=strategy) as checkpoints:
        path = saved(topology, checkpoints, 1)
        state.become(State(topology, 7))
        checkpoints.load_checkpoint(path)
        state.require_is(State(topology, 1))
        assert checkpoints.last_load is not None
        return checkpoints.last_load.bytes_read


@sampled("strategy", STRATEGIES)
def test_what_ranks_of_other_hosts_hold_comes_from_the_disk_and_the_report_says_so(
    tmp_path: Path, strategy: str
) -> None:
    for nodes in ([3], [2, 1]):
        counts = run_ranks(
            3, load_from_two_hosts, tmp_path / str(len(nodes)), strategy, nodes=nodes, process_group=True
        )
        assert len(set(counts)) == 1
        assert counts[0] == 0 if nodes == [3] else counts[0] > 500_000


def fail_in_the_middle(topology: Topology, root: Path, mode: str) -> None:
    """A save that fails for one rank's disk, after others have written over the memory of the one before."""
    state, backend = State(topology, 1), KimiEngineBackend()
    with made(topology, root, state, mode=mode, backend=backend) as checkpoints:
        path = saved(topology, checkpoints, 1)
        state.become(State(topology, 2))
        if topology.rank == 1:
            limit_files_to(1 << 19)
        with pytest.raises(CheckpointError, match="rank 1.*File too large"):
            saved(topology, checkpoints, 2)
        limit_files_to(None)
        checkpoints.load_checkpoint(path)
        state.require_is(State(topology, 1))
        assert checkpoints.last_load is not None and checkpoints.last_load.bytes_read > 500_000
        state.become(State(topology, 3))
        path = saved(topology, checkpoints, 3)
        leave_nothing_but_the_manifest(topology, path)
        state.become(State(topology, 7))
        checkpoints.load_checkpoint(path)
        state.require_is(State(topology, 3))


def limit_files_to(num_bytes: int | None) -> None:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if num_bytes is None else num_bytes, hard))


@sampled("mode", ["sync", "async"])
def test_a_save_that_fails_leaves_nothing_held_and_the_next_is_held_again(tmp_path: Path, mode: str) -> None:
    run_ranks(3, fail_in_the_middle, tmp_path, mode)


def load_with_damaged_memory(topology: Topology, root: Path, strategy: str) -> tuple[int, list[str]]:
    state, told = State(topology, 1), []
    with made(topology, root, state, strategy=strategy) as checkpoints:
        path = saved(topology, checkpoints, 1)
        if topology.rank == 1:
            for file in checkpoints._host_cache.held.save.files.values():  # type: ignore[union-attr]
                flip_last_bit(file._fd, file.size)
        state.become(State(topology, 7))
        with topology.phase("damaged"):
            pass
        with told_to(told):
            checkpoints.load_checkpoint(path)
        state.require_is(State(topology, 1))
        assert checkpoints.last_load is not None
        return checkpoints.last_load.bytes_read, told


def flip_last_bit(fd: int, size: int) -> None:
    last = os.pread(fd, 1, size - 1)[0]
    os.pwrite(fd, bytes([last ^ 1]), size - 1)


class Collector(logging.Handler):
    """Keeps what is logged."""

    def __init__(self, told: list[str]) -> None:
        super().__init__()
        self._told = told

    def emit(self, record: logging.LogRecord) -> None:
        self._told.append(record.getMessage())


@contextmanager
def told_to(told: list[str]) -> Iterator[None]:
    """Collect what is logged in the block."""
    handler = Collector(told)
    logging.getLogger("ckpt").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("ckpt").removeHandler(handler)


@sampled("strategy", STRATEGIES)
def test_damaged_memory_is_found_and_the_file_read_in_its_place(tmp_path: Path, strategy: str) -> None:
    results = run_ranks(3, load_with_damaged_memory, tmp_path, strategy)
    assert results[0][0] > 0
    sentences = [sentence for _, told in results for sentence in told if "changed in memory" in sentence]
    files = {sentence.partition(" ")[0] for sentence in sentences}
    assert "model/rank-00001-float32.safetensors" in files and "index-00001.json" in files


def keep_too_much(topology: Topology, root: Path, mode: str) -> None:
    options = {"saves": SaveSettings(mode=mode), "memory_budget_mib": staging(1)}
    with (
        pytest.raises(
            ConfigurationError,
            match=r"KimiEngineBackend\(pool=True\) keeps what rank \d .* more than the 1 MiB that the memory budget leaves",
        ),
        made(topology, root, State(topology, 1), **options) as checkpoints,
    ):
        saved(topology, checkpoints, 1)
    with made(topology, root, State(topology, 1), **options, backend=KimiEngineBackend(pool=False)) as checkpoints:
        saved(topology, checkpoints, 1)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_budget_that_is_too_small_is_refused_in_a_sentence(tmp_path: Path, mode: str) -> None:
    run_ranks(2, keep_too_much, tmp_path, mode)
