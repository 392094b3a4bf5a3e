"""Tensors that a checkpoint holds in another form than the program."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from ckpt.dist_checkpointing.dict_utils import extract_matching_values
from ckpt.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ReplicaId,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
)
from ckpt.errors import ShardingError
from ckpt.format.box import Box
from ckpt.state.sharded_tensor import ShardedTensor

COUNT = 2


def gated(number: int, data: torch.Tensor, replica_id: ReplicaId = 0) -> ShardedTensorFactory:
    """Rank `number` of two holds rows of a gate above rows of a value, which are saved as halves of one tensor."""

    def build(key: str, part: torch.Tensor, replica: ReplicaId, run: slice | None) -> list[ShardedTensor]:
        place = ShardedTensor.from_rank_offsets(key, data.detach(), (0, number, COUNT)).without_data()
        chunk = replace(place, data=part, dtype=part.dtype, replica_id=replica, flattened_range=run)
        half, found = data.shape[0] // 2, []
        for which in range(2):
            for one in chunk.narrow(0, which * half, half):
                rows, axes = one.global_shape[0], one.global_shape[1:]
                one.global_shape = (2 * rows, *axes)
                one.global_offset = (one.global_offset[0] + which * rows, *one.global_offset[1:])
                one.axis_fragmentations = (2 * COUNT, 1)
                one.validate_metadata_integrity()
                found.append(one)
        return found

    return ShardedTensorFactory("mlp.w", data, build, torch.cat, replica_id)


def rows(number: int) -> torch.Tensor:
    """4 x 3, of which the first two rows are the gate's."""
    return torch.arange(12.0).view(4, 3) + 100 * number


def saved(built: list[list[ShardedTensor]]) -> torch.Tensor:
    made = torch.full((8, 3), -1.0)
    for tensor in (one for rank in built for one in rank):
        for box, values in tensor.pieces():
            made[box.slices] = values
    return made


WHOLE = torch.cat([rows(0)[:2], rows(1)[:2], rows(0)[2:], rows(1)[2:]])


def test_a_factory_builds_what_is_saved_and_merges_what_was_loaded() -> None:
    """S1.64: gate and value lie apart in the checkpoint and together in the program."""
    states: list[dict[str, Any]] = [{"layers": [{"w": gated(n, rows(n))}], "step": 3} for n in range(COUNT)]
    factories = [extract_matching_values(state, _is_factory, return_lists_as_dicts=True)[0] for state in states]
    for state in states:
        apply_factories(state)
        assert state["step"] == 3
    assert torch.equal(saved([state["layers"][0]["w"] for state in states]), WHOLE)
    for number, (state, merges) in enumerate(zip(states, factories, strict=True)):
        loaded = {"layers": [{"w": [WHOLE[one.box.slices] for one in state["layers"][0]["w"]]}], "step": 3}
        assert apply_factory_merges(loaded, merges) is loaded
        assert torch.equal(loaded["layers"][0]["w"], rows(number))
        assert loaded["step"] == 3


def test_the_factory_of_a_parameter_serves_its_optimizer_state_of_another_type() -> None:
    """S1.64: key, data and replica id are the state's own; the place is the parameter's."""
    state = replace(gated(1, rows(1), replica_id=7), key="exp_avg.mlp.w", data=rows(1).double())
    gate, value = state.build()
    assert (gate.key, gate.dtype, gate.replica_id) == ("exp_avg.mlp.w", torch.float64, 7)
    assert (gate.box, value.box) == (Box((2, 0), (2, 3)), Box((6, 0), (2, 3)))
    assert torch.equal(value.data, rows(1)[2:].double())


@pytest.mark.parametrize("borders", [(5,), (0, 12), (2, 6, 7), (6, 6)])
def test_the_factory_of_a_parameter_serves_runs_of_its_optimizer_state(borders: tuple[int, ...]) -> None:
    """S1.64: where an optimizer is spread over replicas, each holds a run of the flattened state (`flattened_range`)."""
    edges, built, merged = [0, *borders, 12], [], []
    for number in range(COUNT):
        for start, stop in pairwise(edges):
            run = replace(
                gated(number, rows(number)), data=rows(number).flatten()[start:stop], flattened_range=slice(start, stop)
            )
            built.append(run.build())
            if start < stop:  # an empty run builds nothing, and there is nothing to merge
                merged.append(run.merge_fn([one.data for one in built[-1]]))
    assert torch.equal(saved(built), WHOLE)
    assert torch.equal(torch.cat(merged), torch.cat([rows(0).flatten(), rows(1).flatten()]))


def test_a_factory_without_data_keeps_its_functions_and_builds_nothing() -> None:
    """S1.64: ranks tell each other of factories too."""
    empty = gated(0, rows(0)).without_data()
    assert (empty.data, empty.key) == (None, "mlp.w")
    empty.validate_metadata_integrity()
    with pytest.raises(ShardingError, match="^mlp.w: a factory without data builds nothing"):
        empty.build()
    assert "data=" not in repr(gated(0, rows(0)))


def test_a_state_dict_that_is_a_factory_is_merged_to_its_tensor() -> None:
    """S1.64: the function is its own recursion in the first reference, and is called with less than a dict."""
    parts: Any = [rows(0)[:2], rows(0)[2:]]
    assert torch.equal(apply_factory_merges(parts, gated(0, rows(0))), rows(0))  # type: ignore[arg-type]


def factory() -> ShardedTensorFactory:
    return gated(0, rows(0))


def _is_factory(value: object) -> bool:
    return isinstance(value, ShardedTensorFactory)


@pytest.mark.parametrize(
    ("loaded", "wanted", "says"),
    [
        (
            {"a": {"b": [1]}},
            {"a": {"w": factory()}},
            r"^at a a factory merges what was loaded under 'w', but only \['b'\] were",
        ),
        (
            {"a": [1, 2]},
            {"a": [factory()]},
            "^at a a list of 2 elements was loaded, and the factories are in a list of 1",
        ),
        (
            {"a": [1, 2]},
            {"a": {2: factory()}},
            r"^at a a factory merges what was loaded under 2, but only \[0, 1\] were",
        ),
        ({"a": [1, 2]}, {"a": {"w": factory()}}, r"loaded under 'w', but only \[0, 1\] were"),
        ({"a": [[1, 2], 3]}, {"a": {0: {-1: factory()}}}, r"^at a.0 a factory merges what was loaded under -1"),
        ({"a": 5}, {"a": {"w": factory()}}, "^at a a int was loaded, where the factories have a dict"),
        ({"a": {}}, {"a": LocalNonpersistentObject(1)}, "^at a a dict was loaded, where the factories have a Local"),
        ({}, [factory()], "^at the top level a dict was loaded, where the factories have a list"),
    ],
)
def test_what_was_loaded_must_have_a_place_for_every_factory(loaded: Any, wanted: Any, says: str) -> None:
    """S1.64: the place is named; ours is a ValueError, as the first reference's is."""
    with pytest.raises(ShardingError, match=says):
        apply_factory_merges(loaded, wanted)


def test_an_element_of_a_list_is_merged_by_its_position() -> None:
    """S1.64: a state dict is parted with its lists as dicts, because a list closes ranks."""
    loaded: Any = {"layers": [{"w": 1}, {"w": [rows(0)[:2], rows(0)[2:]]}]}
    apply_factory_merges(loaded, {"layers": {1: {"w": factory()}}})
    assert loaded["layers"][0] == {"w": 1}
    assert torch.equal(loaded["layers"][1]["w"], rows(0))
