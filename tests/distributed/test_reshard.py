"""State saved by some ranks and loaded by others: no element is lost, moved or read twice into one place."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import ckpt
from ckpt import StateComponent
from ckpt.dist_checkpointing import ShardedTensor
from ckpt.errors import ShardingError
from ckpt.ranks.topology import Topology
from ckpt.state.address import address_of
from tests.support.covering import sampled
from tests.support.ranks import run_ranks
from tests.support.states import BACKENDS, Held, coordinator, global_index, same_bits

SHAPES = ((257, 300), (37,), (1000, 7, 11), (2, 3), (50, 50))


def grid_cut(
    shape: tuple[int, ...], world_size: int, dice: random.Random
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a shape into world_size boxes (offsets, shape), unevenly, some of them empty."""
    boxes = [((0,) * len(shape), shape)]
    while len(boxes) < world_size:
        offsets, sides = boxes.pop(dice.randrange(len(boxes)))
        dim = dice.randrange(len(shape))
        at = dice.randint(0, sides[dim])
        first = (offsets, (*sides[:dim], at, *sides[dim + 1 :]))
        second = (
            (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :]),
            (*sides[:dim], sides[dim] - at, *sides[dim + 1 :]),
        )
        boxes += [first, second]
    dice.shuffle(boxes)
    return boxes


def pieces(topology: Topology, seed: int, dtype: torch.dtype, *, filled: bool) -> dict[str, ShardedTensor]:
    """This rank's piece of every shape, holding global indices, or -1 everywhere."""
    dice = random.Random(seed)
    state = {}
    for shape in SHAPES:
        offsets, sides = grid_cut(shape, topology.world_size, dice)[topology.rank]
        whole = global_index(shape, dtype) if filled else torch.full(shape, -1).to(dtype)
        mine = whole[tuple(slice(o, o + n) for o, n in zip(offsets, sides, strict=True))]
        state[str(shape)] = ShardedTensor.at(str(shape), mine.clone(), shape, offsets)
    return state


def _save_cuts(topology: Topology, root: Path, backend: str, seeds: range) -> None:
    for seed in seeds:
        held = Held(pieces(topology, seed, torch.float64, filled=True))
        made = coordinator(topology, root, [StateComponent("model", held, "sharded")], backend=backend)
        made.save_checkpoint(checkpoint_id=str(seed))


def _load_cuts(topology: Topology, root: Path, seeds: range) -> None:
    for seed in seeds:
        held = Held(pieces(topology, seed + 1000 + topology.world_size, torch.float64, filled=False))
        wanted = pieces(topology, seed + 1000 + topology.world_size, torch.float64, filled=True)
        made = coordinator(topology, root, [StateComponent("model", held, "sharded")])
        made.load_checkpoint(root / f"checkpoint-{seed}")
        for key, piece in held.state.items():
            assert same_bits(piece.data, wanted[key].data), (seed, key)
        assert made.last_load is not None
        assert made.last_load.bytes_needed == 8 * sum(torch.Size(shape).numel() for shape in SHAPES)


@sampled(
    ("backend", "saved_by", "loaded_by"), [("zarr", 3, 2), ("ocdbt", 2, 4), ("file", 4, 1), ("safetensors", 3, 4)], 2
)
def test_every_element_survives_any_uneven_change_of_shards(
    tmp_path: Path, backend: str, saved_by: int, loaded_by: int
) -> None:
    seeds = range(5)
    run_ranks(saved_by, _save_cuts, tmp_path, backend, seeds)
    run_ranks(loaded_by, _load_cuts, tmp_path, seeds)


@pytest.mark.full
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("saved_by", "loaded_by"), [(a, b) for a in (1, 2, 3, 4, 7) for b in (1, 2, 3, 5, 6)])
def test_every_element_survives_every_change_of_world_size(
    tmp_path: Path, backend: str, saved_by: int, loaded_by: int
) -> None:
    seeds = range(8)
    run_ranks(saved_by, _save_cuts, tmp_path, backend, seeds)
    run_ranks(loaded_by, _load_cuts, tmp_path, seeds)


def dtensors(world_size: int, layout: str, *, filled: bool) -> dict[str, Any]:
    """Uneven DTensors, each holding global indices or -1."""
    mesh = (
        init_device_mesh("cpu", (2, world_size // 2))
        if layout.startswith("2d")
        else init_device_mesh("cpu", (world_size,))
    )
    placements = {
        "rows": [Shard(0)],
        "columns": [Shard(1)],
        "copies": [Replicate()],
        "2d": [Shard(0), Shard(1)],
        "2d-hsdp": [Replicate(), Shard(0)],
        "2d-rows": [Shard(0), Shard(0)],
    }[layout]
    state = {}
    for shape in ((50, 300), (129, 400), (3, 2)):
        whole = global_index(shape) if filled else torch.full(shape, -1.0)
        state[str(shape)] = distribute_tensor(whole, mesh, placements)
    return state


def _save_dtensors(topology: Topology, root: Path, layout: str) -> None:
    held = Held(dtensors(topology.world_size, layout, filled=True))
    coordinator(topology, root, [StateComponent("model", held, "sharded")]).save_checkpoint(checkpoint_id="1")


def _load_dtensors(topology: Topology, root: Path, layout: str, pattern: str) -> None:
    held = Held(dtensors(topology.world_size, layout, filled=False))
    wanted = dtensors(topology.world_size, layout, filled=True)
    coordinator(topology, root, [StateComponent("model", held, pattern)]).load_checkpoint()
    for key, tensor in held.loaded.items():
        assert isinstance(tensor, DTensor)
        assert same_bits(tensor.to_local(), wanted[key].to_local()), key


@sampled(
    ("saved_as", "by", "loaded_as", "on"),
    [
        ("rows", 3, "2d", 4),
        ("2d", 4, "columns", 2),
        ("2d-hsdp", 4, "rows", 3),
        ("copies", 2, "2d-hsdp", 4),
        ("columns", 3, "copies", 2),
    ],
    3,
)
def test_dtensors_move_between_placements_bit_for_bit(
    tmp_path: Path, saved_as: str, by: int, loaded_as: str, on: int
) -> None:
    run_ranks(by, _save_dtensors, tmp_path, saved_as, process_group=True)
    run_ranks(on, _load_dtensors, tmp_path, loaded_as, "sharded", process_group=True)


ROWS = (7, 27, 50, 1)


def _sharded_after_tensor_parallel(topology: Topology, tp: int, *, filled: bool) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Weights whose rows FSDP cuts after tensor parallelism, so that some ranks have fewer or none; and what this rank must hold."""
    mesh = init_device_mesh("cpu", (topology.world_size // tp, tp), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Sequential(*(torch.nn.Linear(3, rows, bias=False) for rows in ROWS))
    wanted = {}
    for number, linear in enumerate(model):
        whole = global_index((ROWS[number], 3))
        with torch.no_grad():
            linear.weight.copy_(whole if filled else torch.full_like(whole, -1))
        dp_rank, tp_rank = divmod(topology.rank, tp)
        wanted[f"{number}.weight"] = _cut(_cut(whole, tp)[tp_rank], topology.world_size // tp)[dp_rank]
    parallelize_module(model, mesh["tp"], {str(number): ColwiseParallel() for number in range(len(ROWS))})
    fully_shard(model, mesh=mesh["dp"])
    return model.state_dict(), wanted


def _cut(whole: torch.Tensor, count: int) -> list[torch.Tensor]:
    chunks = list(whole.chunk(count))
    return chunks + [whole[:0]] * (count - len(chunks))


def _save_uneven(topology: Topology, root: Path, tp: int) -> None:
    held = Held(_sharded_after_tensor_parallel(topology, tp, filled=True)[0])
    coordinator(topology, root, [StateComponent("model", held, "sharded")]).save_checkpoint(checkpoint_id="1")


def _load_uneven(topology: Topology, root: Path, tp: int) -> None:
    state, wanted = _sharded_after_tensor_parallel(topology, tp, filled=False)
    held = Held(state)
    coordinator(topology, root, [StateComponent("model", held, "sharded")]).load_checkpoint()
    for key, tensor in held.loaded.items():
        assert same_bits(tensor.to_local(), wanted[key]), key


@pytest.mark.parametrize(("by", "tp", "on", "over"), [(6, 2, 8, 2), (9, 3, 4, 4)])
def test_uneven_rows_that_fsdp_cuts_after_tensor_parallelism_keep_their_places(
    tmp_path: Path, by: int, tp: int, on: int, over: int
) -> None:
    run_ranks(by, _save_uneven, tmp_path, tp, process_group=True)
    saved = ckpt.load(tmp_path / "checkpoint-1")["model"]
    assert all(same_bits(saved[f"{number}.weight"], global_index((rows, 3))) for number, rows in enumerate(ROWS))
    run_ranks(on, _load_uneven, tmp_path, over, process_group=True)


def _rows_that_lie_apart(topology: Topology) -> None:
    weight: Any = _sharded_after_tensor_parallel(topology, 2, filled=True)[0]["0.weight"]
    strided, rows = weight.placements
    apart = DTensor.from_local(torch.arange(2.0), weight.device_mesh, [rows, strided])
    with pytest.raises(ShardingError, match="^model/w: by its placements .* a rank holds rows that lie apart; redistribute it before"):
        address_of(apart, "model/w")


def test_a_dtensor_whose_rows_lie_apart_is_refused(tmp_path: Path) -> None:
    run_ranks(4, _rows_that_lie_apart, process_group=True)


@pytest.mark.full
def test_a_dtensor_in_a_replicated_component_is_sharded_all_the_same(tmp_path: Path) -> None:
    run_ranks(3, _save_dtensors, tmp_path, "rows", process_group=True)
    run_ranks(2, _load_dtensors, tmp_path, "rows", "replicated", process_group=True)


def _dtensor_of_its_own(topology: Topology, root: Path) -> None:
    held = Held(dtensors(topology.world_size, "rows", filled=True))
    with pytest.raises(
        ShardingError, match=r"component model is per_rank, but \(50, 300\) is a DTensor over the ranks \[0, 1\]"
    ):
        coordinator(topology, root, [StateComponent("model", held, "per_rank")]).save_checkpoint(checkpoint_id="1")
    partial = DTensor.from_local(torch.arange(3.0), init_device_mesh("cpu", (2,)), [torch.distributed.tensor.Partial()])
    with pytest.raises(ShardingError, match="pending sum"):
        address_of(partial, "model/w")


def test_a_dtensor_that_reaches_across_ranks_cannot_be_per_rank(tmp_path: Path) -> None:
    run_ranks(2, _dtensor_of_its_own, tmp_path, process_group=True)


def _vocabulary(topology: Topology, root: Path) -> None:
    """GPT-2's embedding as tensor parallel 2 x FSDP 2 cuts it, in columns of 64 to keep it small."""
    edges = [0, 12565, 25129, 37694, 50257]
    start, stop = edges[topology.rank], edges[topology.rank + 1]
    whole = global_index((50257, 64))
    held = Held({"wte": ShardedTensor.at("wte", whole[start:stop].clone(), (50257, 64), (start, 0))})
    coordinator(topology, root, [StateComponent("model", held, "sharded")]).save_checkpoint(checkpoint_id="1")
    got = Held({"wte": torch.full((50257, 64), -1.0)})
    coordinator(topology, root, [StateComponent("model", got, "replicated")]).load_checkpoint()
    assert same_bits(got.state["wte"], whole)


def test_borders_without_a_divisor_yield_few_chunks_and_their_parts_arrive(tmp_path: Path) -> None:
    run_ranks(4, _vocabulary, tmp_path)
    chunks = [p for p in (tmp_path / "checkpoint-1" / "model" / "wte" / "c").rglob("*") if p.is_file()]
    assert len(chunks) <= 8
