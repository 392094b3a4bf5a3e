"""A rank that raises, hangs, stops or dies in the middle of a save or load: the others say so, and nothing is lost."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import StateComponent
from ckpt.backends.base import Previous, Writer
from ckpt.errors import CheckpointError, CorruptCheckpointError, RankAbsentError, StorageError
from ckpt.format.records import ArraySpec
from ckpt.ranks.topology import Topology
from tests.support.covering import covering, sampled
from tests.support.ranks import Dead, run_ranks
from tests.support.states import Held, backend_named, coordinator, global_index, same_bits

SHAPE = (64, 1000)


class Faulty:
    """Writes as another one does until the second chunk, where the fault happens."""

    def __init__(self, fault: Callable[[], None], backend: str = "zarr") -> None:
        self.fault = fault
        self._inner = backend_named(backend)

    def writer(
        self, root: Path, rank: int, progress: Callable[[int], None], previous: Previous | None = None
    ) -> Writer:
        return _FaultyWriter(self._inner.writer(root, rank, progress, previous), self.fault)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _FaultyWriter:
    def __init__(self, inner: Writer, fault: Callable[[], None]) -> None:
        self._inner = inner
        self._fault = fault
        self._written = 0

    def write(self, array: ArraySpec, chunk: int, host: torch.Tensor, digests: tuple[int, ...] | None = None) -> None:
        self._written += 1
        if self._written == 2:
            self._fault()
        self._inner.write(array, chunk, host, digests)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def full_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "model/w/c/0/0")


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hung() -> None:
    time.sleep(3600)


FAULTS: dict[str, Callable[[], None]] = {"raises": full_disk, "killed": killed, "stopped": stopped, "hung": hung}


def components(value: float) -> tuple[Held, list[StateComponent]]:
    held = Held({f"w{i}": global_index(SHAPE) + value for i in range(8)})
    return held, [StateComponent("model", held, "replicated")]


def _save_with_one_faulty_rank(topology: Topology, root: Path, fault: str, rank: int, backend: str) -> tuple[str, str]:
    _, parts = components(0)
    coordinator(topology, root, parts, backend=backend).save_checkpoint(checkpoint_id="1")
    faulty = Faulty(FAULTS[fault], backend) if topology.rank == rank else backend
    made = coordinator(topology, root, parts, backend=faulty)
    with pytest.raises(CheckpointError) as caught:
        made.save_checkpoint(checkpoint_id="2")
    assert caught.value.rank == rank
    assert caught.value.phase == "write"
    return type(caught.value).__name__, str(caught.value)


def _load_and_compare(topology: Topology, root: Path) -> None:
    held, parts = components(-1e6)
    made = coordinator(topology, root, parts)
    made.load_checkpoint()
    assert made.last_load is not None
    assert made.last_load.checkpoint_id == "1"
    for i in range(8):
        assert same_bits(held.state[f"w{i}"], global_index(SHAPE))
    made.save_checkpoint(checkpoint_id="2")


@covering({"fault": FAULTS, "rank": (0, 2), "backend": ("zarr", "safetensors")})
def test_one_faulty_rank_fails_the_save_on_all_others_and_nothing_is_committed(
    tmp_path: Path, fault: str, rank: int, backend: str
) -> None:
    dead = () if fault == "raises" else {rank}
    outcomes = run_ranks(3, _save_with_one_faulty_rank, tmp_path, fault, rank, backend, expect_dead=dead, agree_s=2.0)
    said = [outcome for outcome in outcomes if not isinstance(outcome, Dead)]
    assert len(said) == 3 - len(dead)
    assert len(set(said)) == 1, "every rank raises the same error"
    kind, sentence = said[0]
    assert "save of checkpoint-2" in sentence
    assert f"rank {rank}" in sentence
    assert kind == (StorageError if fault == "raises" else RankAbsentError).__name__
    if fault == "raises":
        assert f"in phase write on rank {rank}" in sentence
        assert "No space left on device" in sentence
    assert [p.name for p in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    run_ranks(3, _load_and_compare, tmp_path)
    assert sorted(p.name for p in tmp_path.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-2"]


def _slow_save(topology: Topology, root: Path) -> None:
    _, parts = components(0)
    backend = Faulty(lambda: _move_slowly(topology)) if topology.rank == 1 else "zarr"
    coordinator(topology, root, parts, backend=backend).save_checkpoint(checkpoint_id="1")


def _move_slowly(topology: Topology) -> None:
    for _ in range(16):  # 4 seconds, twice the time after which a rank that stands still is absent
        time.sleep(0.25)
        topology.progress()


def test_a_save_that_is_merely_slow_is_not_taken_for_a_hang(tmp_path: Path) -> None:
    run_ranks(2, _slow_save, tmp_path, agree_s=2.0)  # in which the store must answer, too, on a busy machine
    assert (tmp_path / "checkpoint-1" / "checkpoint_manifest.json").exists()


def _fails_then_works(topology: Topology, root: Path, name: str) -> None:
    _, parts = components(0)
    backend = Faulty(full_disk, name) if topology.rank == 1 else backend_named(name)
    made = coordinator(topology, root, parts, backend=backend)
    for _ in range(3):
        with pytest.raises(StorageError, match="No space left"):
            made.save_checkpoint(checkpoint_id="1")
        if isinstance(backend, Faulty):
            backend.fault = full_disk
    if isinstance(backend, Faulty):
        backend.fault = lambda: None
    made.save_checkpoint(checkpoint_id="1")
    made.load_checkpoint()


@sampled("backend", ["zarr", "safetensors"])
def test_after_a_failed_save_the_same_coordinator_saves_again(tmp_path: Path, backend: str) -> None:
    run_ranks(2, _fails_then_works, tmp_path, backend)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-1"]


def _different_ids(topology: Topology, root: Path) -> None:
    _, parts = components(0)
    with pytest.raises(CheckpointError, match="checkpoint-0.*checkpoint-1"):
        coordinator(topology, root, parts).save_checkpoint(checkpoint_id=str(topology.rank))
    assert not list(root.glob("checkpoint-*"))


def test_ranks_that_save_different_ids_all_refuse(tmp_path: Path) -> None:
    run_ranks(2, _different_ids, tmp_path)


def _roots_that_are_not_shared(topology: Topology, root: Path) -> None:
    _, parts = components(0)
    mine = root / str(topology.rank)
    mine.mkdir()
    with pytest.raises(StorageError, match="not shared by the ranks"):
        coordinator(topology, mine, parts).save_checkpoint(checkpoint_id="1")
    assert not list(mine.glob("checkpoint-*"))


def test_a_root_that_is_not_shared_is_found_before_the_first_byte(tmp_path: Path) -> None:
    run_ranks(2, _roots_that_are_not_shared, tmp_path, agree_s=1.5)


def _load_damaged(topology: Topology, root: Path) -> tuple[str, list[Any]]:
    _, parts = components(-1e6)
    made = coordinator(topology, root, parts)
    with pytest.raises(CorruptCheckpointError) as caught:
        made.load_checkpoint(root / "checkpoint-2")
    made.load_checkpoint()
    assert made.last_load is not None
    return str(caught.value), list(made.last_load.fell_back_from)


@sampled("backend", ["zarr", "ocdbt", "safetensors"])
def test_damage_that_only_one_rank_meets_is_refused_by_all_and_passed_over_by_all(tmp_path: Path, backend: str) -> None:
    run_ranks(2, _save_twice, tmp_path, backend)
    largest = max((tmp_path / "checkpoint-2").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
    data = bytearray(largest.read_bytes())
    data[100_000] ^= 0x40
    largest.write_bytes(data)
    outcomes = run_ranks(2, _load_damaged, tmp_path)
    assert outcomes[0] == outcomes[1]
    sentence, fell_back_from = outcomes[0]
    assert "model: w" in sentence
    assert largest.name in sentence
    assert fell_back_from == [str(tmp_path / "checkpoint-2")]


def _save_twice(topology: Topology, root: Path, backend: str) -> None:
    _, parts = components(0)
    for checkpoint_id in ("1", "2"):
        coordinator(topology, root, parts, backend=backend_named(backend)).save_checkpoint(checkpoint_id=checkpoint_id)
