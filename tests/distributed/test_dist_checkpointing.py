"""`ckpt.save` and `ckpt.load` by several ranks: every element of every cut, who writes what, at once and in the background."""

from __future__ import annotations

import argparse
import gc
import io
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt import dist_checkpointing
from ckpt.catalog.verify import verify_checkpoint
from ckpt.dist_checkpointing import LocalNonpersistentObject, ShardedObject, ShardedTensor, StrictHandling
from ckpt.dist_checkpointing.dict_utils import dict_list_map_outplace
from ckpt.dist_checkpointing.folder import claim
from ckpt.dist_checkpointing.mapping import ReplicaId, ShardedTensorFactory
from ckpt.dist_checkpointing.strategies.base import SaveShardedStrategy
from ckpt.dist_checkpointing.strategies.common import JsonLoadCommonStrategy, JsonSaveCommonStrategy
from ckpt.dist_checkpointing.strategies.tensorstore import TensorStoreSaveShardedStrategy
from ckpt.dist_checkpointing.strategies.zarr import ZarrLoadShardedStrategy, ZarrSaveShardedStrategy
from ckpt.errors import (
    CheckpointError,
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigurationError,
    FolderInUseError,
    MissingStateError,
)
from ckpt.saving.background.async_utils import AsyncCallsQueue, AsyncRequest
from ckpt.storage.stored import read_manifest
from tests.support.cuts import CUTS
from tests.support.ranks import Topology, run_ranks
from tests.support.sharded_saves import (
    LOADS,
    SAVES,
    blank,
    both_formats,
    chunks_by_rank,
    error_of,
    require_loads_as,
    require_training_state,
    save_training_state,
    the_one,
    threads,
    train,
    training_state,
)
from tests.support.states import Held, global_index, random_bits, same_bits
from tests.support.values import same_values

# Every cut into every other


EXACT = [name for name in CUTS if "padded" not in name and name != "fitted"]
TENSORS = {
    "matrix": random_bits((12, 8), torch.bfloat16, 1),
    "odd": random_bits((7, 5), torch.float32, 2),
    "deep": random_bits((4, 6, 3), torch.float64, 3),
    "row": random_bits((13,), torch.int16, 4),
    "bits": random_bits((8, 2), torch.bool, 5),
    "step": torch.tensor(3.5, dtype=torch.float16),
}
SAVED_AS = [(name, cut) for name in TENSORS for cut in EXACT if TENSORS[name].dim() >= CUTS[cut][0]]


def cut_as(saved: str, name: str, cut: str, rank: int, ranks: int) -> list[ShardedTensor]:
    return CUTS[cut][1](f"{name}, saved {saved}", TENSORS[name], rank, ranks)


def _save_all_cuts(topology: Topology, folder: Path) -> None:
    """As a user would, whose ranks have torch's default process group and nothing else."""
    rank, ranks = topology.rank, topology.world_size
    state = {f"{name} {cut}": cut_as(cut, name, cut, rank, ranks) for name, cut in SAVED_AS}
    for number, save in enumerate((None, ("tensorstore", 1))):
        if rank == 0:
            (folder / str(number)).mkdir()
        dist_checkpointing.save({"all": state, "ranks": ranks}, folder / str(number), save)
        assert verify_checkpoint(folder / str(number)) == [], "when it returns on any rank, all have written"


def _load_in_cuts(topology: Topology, folder: Path, rounds: Sequence[int]) -> int:
    """Load everything once for each round, each tensor in another cut than in the round before; return the number of pieces."""
    rank, ranks, count = topology.rank, topology.world_size, 0
    for number, at in product(range(2), rounds):
        want = {}
        for place, (name, saved) in enumerate(SAVED_AS):
            fitting = [cut for cut, (dims, _) in CUTS.items() if TENSORS[name].dim() >= dims]
            cut = fitting[(place + at) % len(fitting)]
            want[f"{name}, saved {saved}, loaded {cut}"] = cut_as(saved, name, cut, rank, ranks)
        wanted = {key: [blank(piece) for piece in pieces] for key, pieces in want.items()}
        got = dist_checkpointing.load({"all": wanted}, folder / str(number), LOADS[(number + at) % 2])
        assert isinstance(got, dict) and got["ranks"] == 4
        for key, pieces in want.items():
            for piece, tensor in zip(pieces, got["all"].get(key, []) if pieces else [], strict=True):
                assert same_bits(tensor, piece.data), f"{key} on rank {rank} of {ranks}: {piece}"
                count += 1
    return count


def _require_loads_in_cuts(
    folder: Path, rounds: Callable[[int], Sequence[int]], counts_of_ranks: Sequence[int] = (1, 2, 3)
) -> None:
    run_ranks(4, _save_all_cuts, folder, process_group=True, timeout_s=120)
    for ranks in counts_of_ranks:
        counts = run_ranks(ranks, _load_in_cuts, folder, rounds(ranks), process_group=True, timeout_s=120)
        assert min(counts) >= len(SAVED_AS) * len(rounds(ranks))


def test_what_four_ranks_saved_in_any_cut_one_two_or_three_load_in_another(tmp_path: Path) -> None:
    """S1.23, S1.24, S1.29, S1.30, S1.31, S1.68: in both formats, by both libraries, over torch's own process group."""
    _require_loads_in_cuts(tmp_path, lambda ranks: [ranks], (1, 3))


@pytest.mark.full
def test_what_four_ranks_saved_in_any_cut_one_two_or_three_load_in_every_other(tmp_path: Path) -> None:
    """S1.23, S1.24, S1.29, S1.30, S1.31, S1.68: all pairs of cuts, by both libraries."""
    _require_loads_in_cuts(tmp_path, lambda _: range(2 * len(CUTS)))


@dataclass(frozen=True)
class Piece:
    """A chunk of a grid, or a run of its elements, on one rank."""

    offsets: tuple[tuple[int, int, int], ...]
    run: slice | None
    replica_id: int


@dataclass(frozen=True)
class Layout:
    """How a tensor lies on ranks."""

    prepended: int
    by_rank: tuple[tuple[Piece, ...], ...]

    def of(self, rank: int, key: str, tensor: torch.Tensor, *, true: bool = False) -> list[ShardedTensor]:
        """The pieces of one rank. Those that are replicas hold other values, for nobody asks for them, unless they are `true`."""
        return [self._made(piece, key, tensor, true or piece.replica_id == 0) for piece in self.by_rank[rank]]

    def _made(self, piece: Piece, key: str, tensor: torch.Tensor, true: bool) -> ShardedTensor:
        chunk = tensor
        for axis, number, count in piece.offsets:
            chunk = chunk.chunk(count, axis)[number]
        chunk = chunk.reshape(chunk.shape[self.prepended :]).clone(memory_format=torch.contiguous_format)
        if not true:
            chunk = random_bits(tuple(chunk.shape), chunk.dtype, seed=77)
        options: dict[str, Any] = {"replica_id": piece.replica_id, "prepend_axis_num": self.prepended}
        if piece.run is None:
            return ShardedTensor.from_rank_offsets(key, chunk, *piece.offsets, **options)
        data, shape = chunk.reshape(-1)[piece.run], tuple(chunk.shape)
        return ShardedTensor.from_rank_offsets_flat(
            key, data, shape, *piece.offsets, flattened_range=piece.run, **options
        )


@st.composite
def layouts(draw: st.DrawFn, shape: tuple[int, ...], ranks: int) -> Layout:
    """Any even grid, its chunks dealt to any ranks, whole or in runs that end anywhere; and replicas."""
    prepended = draw(st.integers(0, len(shape)))
    counts = [
        side if axis < prepended else draw(st.sampled_from([n for n in range(1, side + 1) if side % n == 0]))
        for axis, side in enumerate(shape)
    ]
    is_flat = draw(st.booleans())
    elements = math.prod(side // count for side, count in zip(shape, counts, strict=True))
    by_rank: list[list[Piece]] = [[] for _ in range(ranks)]
    for number in product(*map(range, counts)):
        offsets = tuple((axis, at, count) for axis, (at, count) in enumerate(zip(number, counts, strict=True)))
        ends = sorted(draw(st.lists(st.integers(0, elements), max_size=3))) if is_flat else []
        runs = [slice(a, b) for a, b in pairwise([0, *ends, elements])] if is_flat else [None]
        for run in runs:
            for replica_id, rank in enumerate(draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=2))):
                by_rank[rank].append(Piece(offsets, run, replica_id))
    return Layout(prepended, tuple(map(tuple, by_rank)))


@dataclass(frozen=True)
class Journey:
    """Tensors, how some ranks hold them when they save, and others when they load."""

    tensors: dict[str, torch.Tensor]
    saved: dict[str, Layout]
    loaded: dict[str, Layout]
    savers: int
    loaders: int


@st.composite
def journeys(draw: st.DrawFn) -> Journey:
    savers, loaders = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    dtypes = st.sampled_from([torch.bool, torch.int64, torch.bfloat16, torch.float8_e5m2, torch.complex64])
    shapes = st.lists(st.integers(1, 6), max_size=3).map(tuple)
    drawn = draw(st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=4))
    tensors = {f"t/{i}": random_bits(shape, dtype, seed=i) for i, (shape, dtype) in enumerate(drawn)}
    saved = {key: draw(layouts(tuple(tensor.shape), savers)) for key, tensor in tensors.items()}
    loaded = {key: draw(layouts(tuple(tensor.shape), loaders)) for key, tensor in tensors.items()}
    return Journey(tensors, saved, loaded, savers, loaders)


def _begin(topology: Topology, folder: Path, journey: Journey, save: Any) -> None:
    held = {key: journey.saved[key].of(topology.rank, key, one) for key, one in journey.tensors.items()}
    # An empty list is a value like any other, and would be common state, in which the ranks differ.
    dist_checkpointing.save({key: pieces for key, pieces in held.items() if pieces}, folder, save)


def _arrive(topology: Topology, folder: Path, journey: Journey) -> None:
    for load in LOADS:
        want = {key: journey.loaded[key].of(topology.rank, key, one, true=True) for key, one in journey.tensors.items()}
        wanted = {key: [blank(piece) for piece in pieces] for key, pieces in want.items() if pieces}
        got = dist_checkpointing.load(wanted, folder, load)
        assert isinstance(got, dict)
        for key, pieces in want.items():
            for piece, tensor in zip(pieces, got.get(key, []), strict=True):
                assert same_bits(tensor, piece.data), f"{key}: {piece}"


def _require_arrival(folder: Path, journey: Journey, save: Any) -> None:
    threads(journey.savers, _begin, folder, journey, save)
    assert verify_checkpoint(folder) == []
    listed = list(chain.from_iterable(chunks_by_rank(folder).values()))
    assert len(set(listed)) == len(listed), "one writer per chunk"
    threads(journey.loaders, _arrive, folder, journey)
    shutil.rmtree(folder)


@given(journey=journeys(), save=st.sampled_from(list(SAVES.values())))
@settings(max_examples=6)
def test_any_tiling_and_any_flattened_split_loads_into_any_other(
    tmp_path_factory: pytest.TempPathFactory, journey: Journey, save: Any
) -> None:
    """S1.24, S1.26, S1.29, S1.30: whatever grid, prepended axes, runs and replicas the savers and the loaders have."""
    _require_arrival(tmp_path_factory.mktemp("journey"), journey, save)


@pytest.mark.full
@given(journey=journeys(), save=st.sampled_from(list(SAVES.values())))
@settings(max_examples=400)
def test_many_tilings_and_flattened_splits_load_into_many_others(
    tmp_path_factory: pytest.TempPathFactory, journey: Journey, save: Any
) -> None:
    """S1.24, S1.26, S1.29, S1.30: more of them."""
    _require_arrival(tmp_path_factory.mktemp("journey"), journey, save)


def gated(key: str, rank: int, ranks: int, data: torch.Tensor) -> ShardedTensorFactory:
    """A rank holds rows of a gate above rows of a value; the checkpoint has all of the gate above all of the value."""

    def build(key: str, part: torch.Tensor, replica_id: ReplicaId, run: slice | None) -> list[ShardedTensor]:
        return [
            ShardedTensor.from_rank_offsets(key, half, (0, rank + ranks * which, 2 * ranks), replica_id=replica_id)
            for which, half in enumerate(part.chunk(2))
        ]

    return ShardedTensorFactory(key, data, build, torch.cat)


def _gated_state(topology: Topology, whole: torch.Tensor) -> dict[str, Any]:
    ranks, rank = topology.world_size, topology.rank
    gate, value = whole.chunk(2)
    mine = torch.cat([gate.chunk(ranks)[rank], value.chunk(ranks)[rank]])
    return {"mlp": {"w": gated("mlp.w", rank, ranks, mine)}, "exp_avg": [gated("exp_avg.mlp.w", rank, ranks, mine * 2)]}


def _save_gated(topology: Topology, folder: Path, whole: torch.Tensor) -> None:
    dist_checkpointing.save(_gated_state(topology, whole), folder)


def _load_gated(topology: Topology, folder: Path, whole: torch.Tensor) -> None:
    wanted = _gated_state(topology, torch.zeros_like(whole))
    got = dist_checkpointing.load(wanted, folder)
    assert isinstance(got, dict)
    want = _gated_state(topology, whole)
    assert same_bits(got["mlp"]["w"], want["mlp"]["w"].data)
    assert same_bits(got["exp_avg"][0], want["exp_avg"][0].data)
    assert isinstance(wanted["mlp"]["w"], ShardedTensorFactory), "what was asked for is left as it was"


def test_several_pieces_of_one_key_on_one_rank_are_one_tensor(tmp_path: Path) -> None:
    """S1.26, S1.64, S1.68: factories are applied before a save and a load, and merged last; on other ranks than the savers'."""
    whole = global_index((12, 3))
    threads(3, _save_gated, tmp_path, whole)
    assert same_bits(dist_checkpointing.load_plain_tensors(tmp_path)["mlp.w"], whole)
    assert np.array_equal(zarr.open_array(tmp_path / "sharded" / "mlp.w", mode="r")[:], whole.numpy())
    for ranks in (1, 2):
        threads(ranks, _load_gated, tmp_path, whole)


# Who writes what


def _save_replicas(topology: Topology, folder: Path, save: Any) -> None:
    """Rows over two ranks, and each row on two; in another array a copy per rank, of which the main one is rank 2's."""
    values, part = global_index((8, 6)), topology.rank % 2
    rows = values.chunk(2)[part].clone()
    copies = torch.arange(5.0)
    if topology.rank >= 2 and not save._spread_replicas:
        rows.fill_(torch.nan)  # what a replica holds is not asked for
    if topology.rank != 2 and not save._spread_replicas:
        copies = torch.full((5,), torch.nan)
    main = {2: (0, 0)}.get(topology.rank, (0, topology.rank + 1))
    state = {
        "w": ShardedTensor.from_rank_offsets("w", rows, (0, part, 2), replica_id=topology.rank // 2),
        "b": ShardedTensor.from_rank_offsets("b", copies, replica_id=main),
    }
    if topology.rank == 3 and not save._spread_replicas:
        state = {key: one.without_data() for key, one in state.items()}
    dist_checkpointing.save(state, folder, save)
    # On every rank: when the call returns, what the others wrote is there.
    stored = zarr.open_group(folder / "sharded", mode="r")
    assert np.array_equal(stored["w"][:], values.numpy()) and stored["b"][:].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", [ZarrSaveShardedStrategy, TensorStoreSaveShardedStrategy])
def test_only_main_replicas_are_written_and_the_others_take_part_all_the_same(tmp_path: Path, kind: Any) -> None:
    """S1.23, S1.25: they write nothing, not even an index, need no data, and come back when all have written."""
    save = kind() if kind is ZarrSaveShardedStrategy else kind(kvstore="file")
    threads(4, _save_replicas, tmp_path, save)
    assert verify_checkpoint(tmp_path) == []
    assert chunks_by_rank(tmp_path) == {
        0: [("sharded/w", 0)],
        1: [("sharded/w", 1)],
        2: [("sharded/b", 0)],
    }
    manifest = read_manifest(tmp_path)
    assert manifest.components["sharded"].ranks == [0, 1, 2]
    assert manifest.arrays["sharded/w"].writers == ((0, 0, 1), (1, 1, 1))


@pytest.mark.parametrize("kind", [ZarrSaveShardedStrategy, TensorStoreSaveShardedStrategy])
def test_replicas_share_the_work_where_that_is_asked_for(tmp_path: Path, kind: Any) -> None:
    """S1.25: each shard is still written once, by one of the ranks that hold it."""
    options = {} if kind is ZarrSaveShardedStrategy else {"kvstore": "file"}
    threads(4, _save_replicas, tmp_path, kind(spread_replicas=True, **options))
    assert verify_checkpoint(tmp_path) == []
    by_rank = chunks_by_rank(tmp_path)
    assert sorted(chain.from_iterable(by_rank.values())) == [("sharded/b", 0), ("sharded/w", 0), ("sharded/w", 1)]
    assert len(by_rank) == 3, "three chunks, and no rank that could leave one to another has two"


UNEVEN = (0, 3, 1_000_001, 1_000_002, 1_500_000)


def _save_uneven(topology: Topology, folder: Path, save: Any) -> None:
    values = global_index((1500, 1000))
    run = slice(*UNEVEN[topology.rank : topology.rank + 2])
    flat = ShardedTensor.from_rank_offsets_flat("p", values.flatten()[run], (1500, 1000), flattened_range=run)
    dist_checkpointing.save({"p": flat}, folder, save)


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES.keys())
def test_no_rank_s_run_is_lost_and_no_chunk_is_written_twice(tmp_path: Path, save: Any) -> None:
    """S1.29: 6 MB in runs that end within rows; in the source the creating rank has no lock, and its run may be lost."""
    threads(4, _save_uneven, tmp_path, save)
    assert verify_checkpoint(tmp_path) == []
    assert same_bits(dist_checkpointing.load_plain_tensors(tmp_path)["p"], global_index((1500, 1000)))
    by_rank = chunks_by_rank(tmp_path)
    listed = sorted(chain.from_iterable(by_rank.values()))
    assert listed == [("sharded/p", number) for number in range(len(listed))] and len(listed) > 1
    runs = read_manifest(tmp_path).arrays["sharded/p"].writers
    assert sum(count for _, _, count in runs) == len(listed)
    assert {rank: sum(count for r, _, count in runs if r == rank) for rank, _, _ in runs} == {
        rank: len(chunks) for rank, chunks in by_rank.items() if chunks
    }
    assert [path for path in tmp_path.rglob("*") if "sync" in path.name or "lock" in path.name] == []


# Asynchronously


def _save_while_training(topology: Topology, folder: Path, save: Any) -> None:
    state, queue = training_state(topology), AsyncCallsQueue()
    request = dist_checkpointing.save(state | {"iteration": 3}, folder, save, async_sharded_save=True)
    train(state)
    assert isinstance(request, AsyncRequest)
    assert error_of(lambda: dist_checkpointing.load(training_state(topology), folder))[0] is CheckpointNotFoundError
    queue.schedule_async_request(request)
    with pytest.raises(ConfigurationError, match="frozen"):
        request.add_finalize_fn(lambda: None)
    train(state)
    assert not dist_checkpointing.check_is_distributed_checkpoint(folder), (
        "the other ranks finalize with this one, not before"
    )
    assert queue.maybe_finalize_async_calls(blocking=True) == [0]
    assert dist_checkpointing.check_is_distributed_checkpoint(folder)
    require_loads_as(topology, folder, training_state(topology))
    assert torch.equal(state["step"].data, torch.tensor(2007.0))


@pytest.mark.parametrize("save", [None, *SAVES.values()], ids=["default", *SAVES])
def test_what_is_saved_in_the_background_are_the_values_at_the_time_of_the_call(tmp_path: Path, save: Any) -> None:
    """S1.18, S1.66: training goes on at once; metadata.json is written when all ranks have finalized."""
    threads(3, _save_while_training, tmp_path, save)
    assert verify_checkpoint(tmp_path) == []


def _save_by_strategy(topology: Topology, folder: Path, save: Any) -> None:
    tensors = {key: one for key, one in training_state(topology).items() if isinstance(one, ShardedTensor)}
    for name in ("at once", "as a request"):
        if topology.is_lead:
            (folder / name).mkdir()
        with topology.phase("made"):
            pass
        if name == "at once":
            save.save(dict(tensors), folder / name)
            continue
        request = save.async_save(dict(tensors), folder / name)
        assert all(path.name.startswith(".saving") for path in (folder / name).iterdir()), "only prepared"
        with topology.phase("seen"):
            train(tensors)
        request.execute_sync()


@both_formats
def test_a_strategy_that_saves_in_the_background_saves_the_same_at_once(tmp_path: Path, save: Any) -> None:
    """S1.17, S1.18, S1.19: the caller schedules the request, or has it executed."""
    threads(2, _save_by_strategy, tmp_path, save)
    for name in ("at once", "as a request"):
        assert verify_checkpoint(tmp_path / name) == []
    first, second = (read_manifest(tmp_path / name) for name in ("at once", "as a request"))
    assert (first.arrays, first.components) == (second.arrays, second.components)
    loads = [load.load(load.load_tensors_metadata(tmp_path / "at once"), tmp_path / "at once") for load in LOADS]
    others = [
        load.load(load.load_tensors_metadata(tmp_path / "as a request"), tmp_path / "as a request") for load in LOADS
    ]
    for one, other in zip(loads, others, strict=True):
        assert same_values(one, other) and torch.equal(one["p"], global_index((6, 5)))


def _save_without_space(topology: Topology, folder: Path, save: Any) -> tuple[Any, ...]:
    """In the background a folder stands where rank 1 is to write a file."""
    state, queue = training_state(topology), AsyncCallsQueue()
    request = dist_checkpointing.save(state, folder, save, async_sharded_save=True)
    assert request is not None
    if topology.rank == 1:
        (staged,) = folder.glob(".saving-all-*")
        in_the_way = staged / ("sharded/w/c/1/0" if save.backend == "zarr" else "arrays.ocdbt/rank-00001")
        in_the_way.parent.mkdir(parents=True, exist_ok=True)
        in_the_way.mkdir() if save.backend == "zarr" else in_the_way.write_text("no folder")
    queue.schedule_async_request(request)
    failed = error_of(lambda: queue.maybe_finalize_async_calls(blocking=True))
    with topology.phase("look"):
        assert not dist_checkpointing.check_is_distributed_checkpoint(folder)
    dist_checkpointing.save(training_state(topology), folder, save)
    require_training_state(topology, folder)
    return failed


@both_formats
def test_what_fails_in_the_background_fails_on_all_ranks_and_the_folder_stays_usable(tmp_path: Path, save: Any) -> None:
    """S1.18, S1.66, S1.67: no metadata.json, and the next save removes what is left."""
    kind, message = the_one(threads(2, _save_without_space, tmp_path, save))
    assert issubclass(kind, CheckpointError)
    assert message.startswith(f"save into {tmp_path} (async call 0) failed in phase run on rank 1: "), message
    assert ("sharded/w/c/1/0" if save.backend == "zarr" else "rank-00001") in message
    assert verify_checkpoint(tmp_path) == []


class SavesAtOnce(SaveShardedStrategy):
    """A strategy that cannot save in the background."""

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        SAVES["zarr"].save(sharded_state_dict, checkpoint_dir)


def _save_async_at_once(topology: Topology, folder: Path) -> tuple[Any, ...]:
    failed = error_of(lambda: dist_checkpointing.save({}, folder, SavesAtOnce("zarr", 1), async_sharded_save=True))
    with topology.phase("look"):
        assert list(folder.iterdir()) == []
    dist_checkpointing.save(training_state(topology), folder, SavesAtOnce("zarr", 1))
    require_loads_as(topology, folder, training_state(topology))
    return failed


def test_an_async_save_needs_a_strategy_that_can(tmp_path: Path) -> None:
    """S1.67: an error on all ranks, before anything is written; and a strategy of one's own needs no more than `save`."""
    kind, message = the_one(threads(2, _save_async_at_once, tmp_path))
    assert kind is ConfigurationError
    assert message == (
        f"save into {tmp_path}: SavesAtOnce(zarr, 1) saves before it returns: give async_sharded_save=False, or another strategy"
    )


# In order


class Watched(JsonSaveCommonStrategy):
    """A common strategy that notes when it is called, and whether the checkpoint was complete by then."""

    def __init__(self, notes: list[tuple[str, bool]]) -> None:
        super().__init__()
        self.notes = notes

    def note(self, what: str, folder: Path) -> None:
        self.notes.append((what, (folder / "metadata.json").exists()))

    def save_common(self, common_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        assert common_state_dict == {"iteration": 3, "nested": {"lr": 0.5}}
        self.note("common", checkpoint_dir)
        super().save_common(common_state_dict, checkpoint_dir)

    def save_sharded_objects(self, sharded_objects_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        assert set(sharded_objects_state_dict) == {"rng"}
        self.note("objects", checkpoint_dir)
        super().save_sharded_objects(sharded_objects_state_dict, checkpoint_dir)


class WatchedTensors(ZarrSaveShardedStrategy):
    def __init__(self, common: Watched) -> None:
        super().__init__()
        self.common = common

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> None:
        assert set(sharded_state_dict) == {"w", "p", "step", "gated"}
        assert isinstance(sharded_state_dict["gated"], list), "factories have been applied"
        (staged,) = checkpoint_dir.glob(".saving-all-*")
        assert (staged / "common" / "checkpoint_manifest.json").exists()
        assert (staged / "objects" / "checkpoint_manifest.json").exists()
        self.common.note("tensors", checkpoint_dir)
        super().save(sharded_state_dict, checkpoint_dir)
        self.common.note("end", checkpoint_dir)


def _save_watched(topology: Topology, folder: Path) -> list[tuple[str, bool]]:
    common = Watched([])
    state = training_state(topology)
    mine = torch.arange(4.0).view(2, 2) + topology.rank
    state |= {"iteration": 3, "nested": {"lr": 0.5, "local": LocalNonpersistentObject(object())}}
    state["gated"] = gated("gated", topology.rank, topology.world_size, mine)
    before = {key: id(one) for key, one in state.items()}
    dist_checkpointing.save(state, folder, WatchedTensors(common), common)
    assert {key: id(one) for key, one in state.items()} == before, "the caller's dictionary is not changed"
    return common.notes


def test_a_save_goes_from_the_common_state_over_objects_and_tensors_to_metadata_json(tmp_path: Path) -> None:
    """S1.66: factories, non-persistent objects dropped, common file, objects, tensors, and metadata.json last."""
    lead, other = threads(2, _save_watched, tmp_path)
    assert lead == [("common", False), ("objects", False), ("tensors", False), ("end", False)]
    assert other[:3] == lead[:3], "by the end of its part the lead may have written metadata.json"
    newest = max(tmp_path.rglob("*"), key=lambda path: path.stat().st_mtime_ns if path.is_file() else 0)
    assert newest.name == "metadata.json" and verify_checkpoint(tmp_path) == []


# Strategies


def _save_with_tuples(topology: Topology, folder: Path) -> list[Any]:
    state = training_state(topology) | {"iteration": 3}
    dist_checkpointing.save(state, folder, common_strategy=("json", 1))
    failed = [
        error_of(lambda: dist_checkpointing.save(state, folder, common_strategy=("torch", 1))),
        error_of(lambda: dist_checkpointing.save(state, folder, ("torch_dist", 1))),
        error_of(lambda: dist_checkpointing.save(state, folder)),
        error_of(lambda: dist_checkpointing.load(training_state(topology), folder, common_strategy=("torch", 1))),
        error_of(lambda: dist_checkpointing.load(training_state(topology), folder, ("zarr", 2))),
        error_of(lambda: dist_checkpointing.load(training_state(topology), folder, JsonLoadCommonStrategy())),  # type: ignore[arg-type]
    ]
    for strategies in ({"common_strategy": ("json", 1)}, {"sharded_strategy": ("tensorstore", 1)}):
        got = dist_checkpointing.load(training_state(topology), folder, **strategies)  # type: ignore[arg-type]
        assert isinstance(got, dict) and got["iteration"] == 3 and same_bits(got["step"], torch.tensor(7.0))
    return failed


def test_a_backend_and_version_for_the_common_strategy_is_used_for_that_one(tmp_path: Path) -> None:
    """S1.74, S1.76: in the source it takes the place of the sharded one."""
    failed = the_one(threads(2, _save_with_tuples, tmp_path))
    assert {kind for kind, _ in failed} == {CheckpointExistsError, ConfigurationError}
    said = json.loads((tmp_path / "metadata.json").read_text())
    assert [said[f"{what}_backend{version}"] for what in ("sharded", "common") for version in ("", "_version")] == [
        "zarr", 1, "json", 1,
    ]  # fmt: skip
    load_torch, load_version, load_kind = (message for _, message in failed[3:])
    assert (
        "TorchCommonLoadStrategy: the checkpoint has backend 'json', this strategy reads backend 'torch'" in load_torch
    )
    assert "no default strategy for (load_sharded, zarr, 2)" in load_version
    assert "sharded_strategy: a JsonLoadCommonStrategy is no LoadShardedStrategy" in load_kind


def _save_pickled(topology: Topology, folder: Path) -> list[Any]:
    return [
        error_of(lambda: dist_checkpointing.save(training_state(topology), folder, common_strategy=("torch", 1))),
        error_of(lambda: dist_checkpointing.save(training_state(topology), folder, ("torch_dist", 1))),
        error_of(lambda: dist_checkpointing.save(training_state(topology), folder, ZarrLoadShardedStrategy())),  # type: ignore[arg-type]
    ]


def test_a_format_that_nobody_saves_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """S1.4, S1.76: no pickle is ever written."""
    messages = [message for _, message in the_one(threads(2, _save_pickled, tmp_path))]
    assert "would write a pickle" in messages[0] and "save with ('json', 1)" in messages[0]
    assert 'save with ("zarr", 1)' in messages[1]
    assert "a ZarrLoadShardedStrategy is no SaveShardedStrategy; give an object" in messages[2]
    assert list(tmp_path.iterdir()) == []


class WatchedLoads:
    """Notes in which order the strategies of a load are called."""

    def __init__(self) -> None:
        notes: list[str] = []
        self.notes = notes

        class Common(JsonLoadCommonStrategy):
            def load_common(self, checkpoint_dir: Path) -> dict[str, Any]:
                notes.append("common")
                return super().load_common(checkpoint_dir)

            def load_sharded_objects(self, sharded_objects_state_dict: dict[str, Any], checkpoint_dir: Path) -> Any:
                notes.append("objects")
                return super().load_sharded_objects(sharded_objects_state_dict, checkpoint_dir)

        class Sharded(ZarrLoadShardedStrategy):
            def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path) -> Any:
                assert isinstance(sharded_state_dict["gated"], list), "factories have been applied"
                assert "local" not in sharded_state_dict and "rng" not in sharded_state_dict
                notes.append("tensors")
                return super().load(sharded_state_dict, checkpoint_dir)

        self.common, self.sharded = Common(), Sharded()


def _load_watched(topology: Topology, folder: Path) -> list[str]:
    rank, ranks = topology.rank, topology.world_size
    watched, mine = WatchedLoads(), torch.arange(4.0).view(2, 2) + rank

    def merge(parts: list[torch.Tensor]) -> torch.Tensor:
        watched.notes.append("merge")
        return torch.cat(parts)

    factory = gated("gated", rank, ranks, torch.zeros_like(mine))
    factory.merge_fn = merge
    local = object()
    wanted = training_state(topology) | {"gated": factory, "nested": {"local": LocalNonpersistentObject(local)}}
    got = dist_checkpointing.load(wanted, folder, watched.sharded, watched.common)
    assert isinstance(got, dict)
    assert got["nested"] == {"lr": 0.5, "local": local} and got["iteration"] == 3
    assert torch.equal(got["gated"], mine) and wanted["gated"] is factory
    assert got["rng"] == {"seed": torch.tensor(rank)}
    return watched.notes


def test_a_load_goes_from_the_common_state_over_objects_and_tensors_to_the_merges(tmp_path: Path) -> None:
    """S1.65, S1.68: common, factories, non-persistent objects, objects, tensors, merges."""
    threads(2, _save_watched, tmp_path)
    assert the_one(threads(2, _load_watched, tmp_path)) == ["common", "objects", "tensors", "merge"]


def test_keys_that_do_not_fit_are_told_apart_as_strict_says(tmp_path: Path) -> None:
    """S1.68, S1.70: with a real checkpoint: what was saved and is not asked for, and the reverse."""
    save_training_state(Topology.alone(), tmp_path)
    wanted = {key: one for key, one in training_state(Topology.alone()).items() if key in ("w", "rng")}
    wanted["x"] = ShardedTensor.from_rank_offsets("extra", torch.zeros(2))
    state, missing, unexpected = dist_checkpointing.load(wanted, tmp_path, strict=StrictHandling.RETURN_ALL)
    assert (sorted(state), missing, unexpected) == (["rng", "w"], {"p", "step"}, {"extra"})
    with pytest.raises(MissingStateError, match="extra"):
        dist_checkpointing.load(wanted, tmp_path, strict="raise_unexpected")


# Looking into a checkpoint, by one process alone


def _look_alone(topology: Topology, folder: Path) -> list[str]:
    """Rank 1 looks, and the others are somewhere else: nobody would answer it."""
    if topology.rank != 1:
        return []
    tensors = dist_checkpointing.load_tensors_metadata(folder)
    assert {key: (one.global_shape, one.dtype, one.data) for key, one in tensors.items()} == {
        "w": ((4, 4), torch.float32, None),
        "p": ((6, 5), torch.float32, None),
        "step": ((), torch.float32, None),
    }
    everything = dist_checkpointing.load_sharded_metadata(folder)
    assert {key: type(one) for key, one in everything.items() if key not in tensors} == {
        "rng/shard_0_2": ShardedObject,
        "rng/shard_1_2": ShardedObject,
    }
    assert (everything["rng/shard_1_2"].global_shape, everything["rng/shard_1_2"].global_offset) == ((2,), (1,))
    plain = dist_checkpointing.load_plain_tensors(folder)
    assert same_values(
        plain, {"w": global_index((4, 4)), "p": global_index((6, 5)), "step": torch.tensor(7.0)}
    ) and list(plain) == list(tensors)
    common = dist_checkpointing.load_common_state_dict(folder)
    assert dist_checkpointing.check_is_distributed_checkpoint(folder)
    return sorted(common)


@both_formats
def test_any_process_looks_into_a_checkpoint_alone(tmp_path: Path, save: Any) -> None:
    """S1.75: common state, tensors' metadata, all metadata, plain tensors whole; no other rank is waited for."""
    threads(2, save_training_state, tmp_path, save, {"iteration": 3, "args": argparse.Namespace(lr=0.5)})
    assert threads(3, _look_alone, tmp_path)[1] == ["args", "iteration"]
    for load in (*LOADS, ("tensorstore", 1)):
        assert set(dist_checkpointing.load_tensors_metadata(tmp_path, load)) == {"w", "p", "step"}
        assert len(dist_checkpointing.load_sharded_metadata(tmp_path, load, ("json", 1))) == 5
    dist_checkpointing.remove_sharded_tensors(tmp_path, "p")
    assert set(dist_checkpointing.load_plain_tensors(tmp_path)) == {"w", "step"}


def test_looking_at_what_is_no_checkpoint_says_so(tmp_path: Path) -> None:
    """S1.75: by every entry point alike."""
    calls: list[Callable[[], object]] = [
        lambda: dist_checkpointing.load_common_state_dict(tmp_path),
        lambda: dist_checkpointing.load_tensors_metadata(tmp_path),
        lambda: dist_checkpointing.load_sharded_metadata(tmp_path),
        lambda: dist_checkpointing.load_plain_tensors(tmp_path),
        lambda: dist_checkpointing.remove_sharded_tensors(tmp_path, ""),
        lambda: dist_checkpointing.load({}, tmp_path),
    ]
    for call in calls:
        kind, message = error_of(call)
        assert kind is CheckpointNotFoundError
        assert f"{tmp_path} is not a distributed checkpoint: it has no metadata.json" in message


# The common state and the objects


def common_state(rank: int) -> dict[str, Any]:
    return {
        "iteration": 3,
        "whose": rank,
        "args": argparse.Namespace(lr=0.1 + 0.2, dtype=torch.bfloat16, betas=(0.9, 0.95)),
        "scheduler": {"steps": [1, 2.5, None, {"warm": True}], 7: "a number is a key"},
        "tensor": random_bits((3, 2), torch.bfloat16, 9),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "numpy": np.arange(6, dtype=np.int16).reshape(2, 3),
        "text": io.BytesIO(b"\x00\xff"),
        "odd": [float("inf"), -0.0, 1e400, {"~tilde": ()}, "é☃\ud800", b"bytes", 1 << 70, {1, 2}, complex(1, -2)],
        "empty": {"list": [], "dict": {}, "tuple": ()},
    }


def object_of(rank: int) -> dict[str, Any]:
    return {
        "state": random_bits((5,), torch.uint8, rank),
        "rank": rank,
        "deep": [{"t": torch.tensor(rank)}],
        "none": None,
    }


def _save_common(topology: Topology, folder: Path, save: Any) -> None:
    rank = topology.rank
    state = common_state(rank) | {
        "rng": [ShardedObject("rng.state", object_of(rank), (3,), (rank,))],
        "one": ShardedObject("one/for all", object_of(7) if rank == 1 else None, (), (), replica_id=(rank + 2) % 3),
    }
    dist_checkpointing.save(state, folder, save, validate_access_integrity=False)


def _load_common(topology: Topology, folder: Path) -> None:
    """Two ranks where there were three: both ask for objects that others saved."""
    mine = [ShardedObject("rng.state", None, (3,), (at,)) for at in (topology.rank, 2)]
    wanted = {"rng": mine, "one": ShardedObject("one/for all", None, (), (), replica_id=topology.rank)}
    got = dist_checkpointing.load(wanted, folder, validate_access_integrity=False)
    assert isinstance(got, dict)
    assert same_values(got.pop("rng"), [object_of(topology.rank), object_of(2)])
    assert same_values(got.pop("one"), object_of(7))
    assert same_values(got, common_state(0)), "what is not sharded is rank 0's"
    assert mine[0].data is None


@both_formats
def test_the_common_state_is_rank_0_s_and_objects_are_those_of_their_ranks(tmp_path: Path, save: Any) -> None:
    """S1.16, S1.63, S1.76: as JSON and arrays, equal in value and type to the bit, and without a pickle."""
    threads(3, _save_common, tmp_path, save)
    assert verify_checkpoint(tmp_path) == []
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} <= {".json", "", ".ocdbt"}
    threads(2, _load_common, tmp_path)
    assert same_values(dist_checkpointing.load_common_state_dict(tmp_path), common_state(0))


def _save_what_is_not_plain(topology: Topology, folder: Path, where: str) -> tuple[Any, ...]:
    odd = Held({})
    state: dict[str, Any] = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(1), replica_id=topology.rank)}
    if where == "common":
        state["model"] = {"hook": odd}
    else:
        state["rng"] = ShardedObject("rng", {"hook": odd if topology.rank == 1 else 0}, (2,), (topology.rank,))
    return error_of(lambda: dist_checkpointing.save(state, folder))


@pytest.mark.parametrize(
    ("where", "named"), [("common", "common: model.hook"), ("objects", "objects: rng/shard_1_2.hook")]
)
def test_a_value_that_is_neither_a_tensor_nor_plain_is_refused_by_name_on_every_rank(
    tmp_path: Path, where: str, named: str
) -> None:
    """S1.76: nothing is pickled."""
    kind, message = the_one(threads(2, _save_what_is_not_plain, tmp_path, where))
    assert kind is ConfigurationError
    assert f"{named} is a tests.support.states.Held, which is neither a tensor nor plain" in message
    assert not dist_checkpointing.check_is_distributed_checkpoint(tmp_path)


# Ranks that save differently, and saves that meet in one folder


def _save_unlike(topology: Topology, folder: Path) -> list[Any]:
    ways: list[dict[str, Any]] = [
        {"sharded_strategy": [ZarrSaveShardedStrategy(), TensorStoreSaveShardedStrategy()][topology.rank % 2]},
        {"sharded_strategy": ZarrSaveShardedStrategy(spread_replicas=topology.rank == 1)},
        {"async_sharded_save": topology.rank == 1},
        {"validate_access_integrity": topology.rank == 1},
    ]
    return [error_of(lambda way=way: dist_checkpointing.save(training_state(topology), folder, **way)) for way in ways]  # type: ignore[misc]


def test_ranks_that_save_differently_are_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    """S1.23: files of two formats in one folder would be read as zeros by whoever knows only one of them."""
    failed = the_one(threads(2, _save_unlike, tmp_path))
    assert [kind for kind, _ in failed] == [ConfigurationError] * 4
    for (_, said), name in zip(
        failed, ["sharded_strategy", "spread_replicas", "async_sharded_save", "validate_access_integrity"], strict=True
    ):
        assert name in said and "on rank 1" in said and "all ranks must save alike" in said
    assert list(tmp_path.iterdir()) == []


def _two_saves_into_one_folder(topology: Topology, folder: Path) -> list[Any]:
    first = dist_checkpointing.save(training_state(topology), folder, async_sharded_save=True)
    assert first is not None and first.async_fn is not None
    refused = [error_of(lambda: dist_checkpointing.save(training_state(topology), folder / ".." / folder.name))]
    first.async_fn()
    refused.append(
        error_of(lambda: dist_checkpointing.save(training_state(topology), folder))
    )  # written, and not finalized
    with topology.phase("another process has taken it over"):
        if topology.is_lead:
            (folder / ".saving.owner.json").unlink()
            claim._UNDER_WAY.clear()
    dist_checkpointing.save(training_state(topology) | {"iteration": 2}, folder)
    return [*refused, error_of(first.finalize_fns[0])]


def test_two_saves_into_one_folder_never_make_one_checkpoint(tmp_path: Path) -> None:
    """S1.66, S1.67: the second is refused for as long as the first is not finalized, and the first cannot end over the second."""
    *refused, too_late = the_one(threads(2, _two_saves_into_one_folder, tmp_path))
    for kind, said in refused:
        assert kind is CheckpointExistsError and "another save into" in said and "is under way" in said
    assert too_late[0] is CheckpointExistsError and "may have begun" in too_late[1]
    assert dist_checkpointing.load_common_state_dict(tmp_path)["iteration"] == 2
    assert verify_checkpoint(tmp_path) == []


def test_a_save_of_another_process_that_lives_is_not_disturbed_and_one_that_died_is(tmp_path: Path) -> None:
    """S1.67: a job that was queued again, while the old one still writes."""
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(3))}
    code = (
        "import sys, time, pathlib; from ckpt.dist_checkpointing.folder.claim import FolderClaim; "
        "claim = FolderClaim(pathlib.Path(sys.argv[1]), lambda: None); claim.staged.mkdir(); print('locked', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"locked\n"
        before = sorted(tmp_path.iterdir())
        kind, said = error_of(lambda: dist_checkpointing.save(state, tmp_path))
        assert kind is FolderInUseError and f"(pid {process.pid} on " in said
        assert sorted(tmp_path.iterdir()) == before
        process.kill()
    dist_checkpointing.save(state, tmp_path)
    assert verify_checkpoint(tmp_path) == []


@pytest.mark.parametrize(
    ("mixed", "said"),
    [
        ({"layers": [{"w": "T"}, {"lr": 3}]}, "layers is a list whose elements 0 and 1"),
        ({"a": {"b": [5, 6, "T"]}}, "a.b is a list whose elements 0 and 2"),
        ({"a": [[{"w": "T", "n": 1}], [{"w": "T"}]]}, "a is a list whose elements 0 and 1"),
        ({"a": ["T", "O"]}, "sharded objects"),
        ({"a": ["T", "L"]}, "local objects"),
        ({"a": ["T", {}]}, "common values"),
    ],
)
def test_a_list_that_would_not_come_back_as_it_was_is_refused(tmp_path: Path, mixed: Any, said: str) -> None:
    """S1.66, S1.77: parted by kind of value, its elements would lose their places."""
    kinds = {
        "T": ShardedTensor.from_rank_offsets("w", torch.arange(3)),
        "O": dist_checkpointing.ShardedObject("o", 1, (1,), (0,)),
        "L": dist_checkpointing.LocalNonpersistentObject(1),
    }
    state = dict_list_map_outplace(lambda leaf: kinds.get(leaf, leaf), mixed)
    kind, sentence = error_of(lambda: dist_checkpointing.save(state, tmp_path))
    assert kind is ConfigurationError and said in sentence
    assert list(tmp_path.iterdir()) == []


def test_lists_of_one_kind_and_of_one_mixture_come_back_as_they_were(tmp_path: Path) -> None:
    """S1.68, S1.77"""

    def piece(key: str) -> ShardedTensor:
        return ShardedTensor.from_rank_offsets(key, torch.arange(3))

    state = {
        "groups": [{"w": piece("a"), "lr": 1}, {"w": piece("b"), "lr": 2}],
        "two": [piece("c"), piece("d")],
        "n": [1, {}, [2]],
    }
    dist_checkpointing.save(state, tmp_path)
    got = dist_checkpointing.load(state, tmp_path)
    t = torch.arange(3)
    assert same_values(got, {"groups": [{"w": t, "lr": 1}, {"w": t, "lr": 2}], "two": [t, t], "n": [1, {}, [2]]})


def test_a_process_forked_meanwhile_does_not_keep_the_folder_from_others(tmp_path: Path) -> None:
    """S1.67: such as a data loader's worker, which has copies of all descriptors."""
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.arange(3))}
    request = dist_checkpointing.save(state, tmp_path, async_sharded_save=True)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(read, 1)
        os._exit(0)
    try:
        del request  # dropped without having been scheduled
        gc.collect()
        dist_checkpointing.save(state, tmp_path)
        assert verify_checkpoint(tmp_path) == []
    finally:
        os.write(write, b"x")
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)
