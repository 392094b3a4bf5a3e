"""The digest of a state: the same on any layout, another after any change."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckpt.dist_checkpointing import ShardedTensor
from ckpt.errors import ShardingError
from ckpt.format.box import Box
from ckpt.planning.plan import Address
from ckpt.ranks.topology import Topology
from ckpt.state.state_digest import digest_of_boxes, state_digest
from tests.support.ranks import run_ranks, run_threads
from tests.support.states import ALL_DTYPES, Held, random_bits

SHAPE = (37, 60)


def state() -> dict[str, torch.Tensor]:
    return {str(d): random_bits(SHAPE, d, i) for i, d in enumerate(ALL_DTYPES)} | {
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
    }


def _replicated(topology: Topology) -> str:
    return state_digest({"model": Held(state())}, topology)


def _cut(topology: Topology, dim: int) -> str:
    """Every tensor cut unevenly along its rows or columns; the last rank holds none of them."""
    edges = [0, 17, SHAPE[dim], SHAPE[dim]]
    start, stop = edges[topology.rank], edges[topology.rank + 1]
    cut = {}
    for key, tensor in state().items():
        if tuple(tensor.shape) != SHAPE:
            cut[key] = tensor
            continue
        piece = tensor.narrow(dim, start, stop - start).clone()
        cut[key] = ShardedTensor.at(key, piece, SHAPE, (0, start) if dim else (start, 0))
    return state_digest({"model": Held(cut)}, topology)


def test_the_digest_is_equal_on_every_layout() -> None:
    alone = state_digest({"model": Held(state())}, Topology.alone())
    assert set(run_ranks(2, _replicated)) == {alone}
    for dim in (0, 1):
        assert set(run_ranks(3, _cut, dim)) == {alone}


def test_the_digest_that_checkpoints_hold_of_a_frozen_base_stays() -> None:
    held = Held({"weight": torch.arange(60.0).view(6, 10), "half": torch.arange(7).bfloat16()})
    assert state_digest({"base": held}, Topology.alone()) == "fab0b61f049044941faf6f80c96adb49"


def test_any_changed_bit_moved_element_or_renamed_tensor_changes_the_digest() -> None:
    def digest(changed: dict[str, torch.Tensor]) -> str:
        return state_digest({"model": Held(changed)}, Topology.alone())

    reference = digest(state())
    seen = {reference}
    for key, tensor in state().items():
        if tensor.numel() == 0:
            continue
        changed = tensor.clone().contiguous()
        flat = changed.view(-1)
        flat.view(torch.uint8)[flat.element_size() - 1] ^= 1
        seen.add(digest({**state(), key: changed}))
    key = str(torch.float32)
    swapped = state()[key].clone()
    swapped[[0, 1]] = swapped[[1, 0]]
    seen.add(digest({**state(), key: swapped}))
    seen.add(digest({**state(), key: state()[key].view(60, 37)}))
    renamed = state()
    renamed["other"] = renamed.pop(key)
    seen.add(digest(renamed))
    assert len(seen) == 1 + len(ALL_DTYPES) + 1 + 3
    assert digest(dict(reversed(state().items()))) == reference, "the order of the names does not count"


def test_tied_tensors_count_once_and_plain_values_do_not() -> None:
    w = torch.arange(6.0)
    one = state_digest({"model": Held({"a": w})}, Topology.alone())
    assert state_digest({"model": Held({"a": w, "b": w, "n": 5})}, Topology.alone()) == one
    assert state_digest({"model": Held({"a": w, "b": w.clone()})}, Topology.alone()) != one


TIED = torch.arange(10.0).view(2, 5)  # two rows: the third rank holds none


def _tied_rows(topology: Topology) -> str:
    """One DTensor under two names. An empty piece has no memory by which a rank could see that."""
    rows = distribute_tensor(TIED, init_device_mesh("cpu", (topology.world_size,)), [Shard(0)])
    assert rows.to_local().numel() == (5 if topology.rank < 2 else 0)
    return state_digest({"model": Held({"a": rows, "b": rows})}, topology)


def test_a_tie_counts_once_also_where_a_rank_holds_nothing_of_it() -> None:
    alone = state_digest({"model": Held({"a": TIED, "b": TIED})}, Topology.alone())
    assert set(run_ranks(3, _tied_rows, process_group=True)) == {alone}


def _tied_on_rank_0(topology: Topology) -> str:
    w = torch.arange(6.0)
    with pytest.raises(ShardingError, match=r"model\.b is tied to model\.a on rank 0, not on rank 1") as raised:
        state_digest({"model": Held({"a": w, "b": w if topology.rank == 0 else w.clone()})}, topology)
    return str(raised.value)


def test_a_tie_that_only_some_ranks_know_is_refused_on_all() -> None:
    assert len(set(run_threads(2, _tied_on_rank_0))) == 1


def test_boxes_of_a_tensor_have_the_digest_of_the_whole() -> None:
    tensors = {"a": torch.arange(12.0).view(4, 3), "b": torch.tensor(2, dtype=torch.int64), "c": torch.ones(0, 3).bfloat16()}
    boxes = [("a", Box((0, 0), (3, 3))), ("a", Box((3, 0), (1, 1))), ("a", Box((3, 1), (1, 2)))]
    boxes += [("b", Box((), ())), ("c", Box((0, 0), (0, 3)))]
    given = (
        (Address(f"model.{name}", str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), box), tensor[box.slices])
        for name, box in boxes
        for tensor in [tensors[name]]
    )
    assert digest_of_boxes(given, Topology.alone()) == state_digest({"model": Held(tensors)}, Topology.alone())
