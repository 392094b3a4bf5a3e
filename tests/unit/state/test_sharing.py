"""Declarations of components, and the addresses that follow from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt import SharingPattern, StateComponent
from ckpt.dist_checkpointing import ShardedTensor
from ckpt.errors import ConfigurationError, ShardingError
from ckpt.format.box import Box, whole
from ckpt.planning.plan import Address
from ckpt.ranks.topology import Topology
from ckpt.state.address import address_of, local_tensor
from ckpt.state.flatten import flatten
from ckpt.state.sharing import addresses, find_aliases
from tests.support.states import Held, coordinator

ALONE = Topology.alone()


def test_the_patterns_have_the_strings_of_the_manifest() -> None:
    assert [p.value for p in SharingPattern] == ["global", "per_rank", "replicated", "per_group", "per_node", "sharded"]


@pytest.mark.parametrize(
    ("declared", "says"),
    [
        ({"sharing_pattern": "per_group"}, r"needs process_group_name, .*; give it, or choose another pattern"),
        (
            {"sharing_pattern": "replicated", "process_group_name": "dp"},
            "goes with sharing_pattern=per_group, not with replicated",
        ),
        ({"sharing_pattern": "per_rank", "validate_replication": True}, "it goes with replicated, per_group, per_node"),
        ({"sharing_pattern": "everywhere"}, "=everywhere: expected one of global, per_rank"),
        ({"sharing_pattern": "global", "validation_level": "deep"}, "=deep: expected one of none, quick, tensor, full"),
        ({"sharing_pattern": "per_rank", "elastic": "reshard"}, "leave it null or set it to refuse"),
        ({"sharing_pattern": "global", "key": "a/b"}, "it names a folder"),
    ],
)
def test_a_declaration_that_contradicts_itself_is_refused_with_the_way_out(declared: dict, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        StateComponent(**{"key": "x", "stateful": Held({}), **declared})


def test_an_object_without_the_stateful_protocol_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="component x: list has no state_dict/load_state_dict pair"):
        StateComponent("x", [], "global")


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("global", "x/w"),
        ("replicated", "x/w"),
        ("sharded", "x/w"),
        ("per_rank", "x/rank-00000/w"),
        ("per_node", "x/node-0000/w"),
    ],
)
def test_a_pattern_decides_the_name_and_a_plain_tensor_is_whole(pattern: str, name: str) -> None:
    component = StateComponent("x", Held({"w": torch.arange(6).view(2, 3)}), pattern)
    found = addresses(component, flatten(component.stateful.state_dict(), "x"), ALONE)
    assert found == {"w": Address(name, "int64", (2, 3), whole((2, 3)))}


def test_a_sharded_tensor_speaks_for_itself() -> None:
    piece = ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (1, 2, 4), replica_id=5)
    assert address_of(piece, "m/w") == Address("m/w", "float32", (2, 12), Box((0, 6), (2, 3)))


def test_the_memory_behind_a_sharded_tensor_has_the_shape_of_its_box() -> None:
    data = torch.arange(6.0).view(2, 3)
    stacked = ShardedTensor.from_rank_offsets("w", data, (0, 3, 4), (2, 0, 2), prepend_axis_num=1)
    assert address_of(stacked, "m/w") == Address("m/w", "float32", (4, 2, 6), Box((3, 0, 0), (1, 2, 3)))
    assert local_tensor(stacked).shape == (1, 2, 3)
    local_tensor(stacked).zero_()
    assert not data.any(), "a view of the very memory"


def test_a_sharded_tensor_that_is_not_one_box_with_values_is_no_leaf_of_a_component() -> None:
    flat = ShardedTensor.from_rank_offsets_flat("w", torch.arange(5.0), (2, 3), flattened_range=slice(1, 6))
    with pytest.raises(ShardingError, match="m/w: a ShardedTensor with a flattened_range is several boxes"):
        address_of(flat, "m/w")
    with pytest.raises(ShardingError, match="w: a ShardedTensor with a flattened_range is several boxes"):
        local_tensor(flat)
    with pytest.raises(ShardingError, match="w has no data;"):
        address_of(ShardedTensor.at("w", torch.zeros(2), (4,), (2,)).without_data(), "m/w")


def test_tied_tensors_are_found_by_memory_and_the_first_name_wins() -> None:
    w = torch.arange(12.0).view(3, 4)
    tensors = {
        "first": w,
        "again": w.view(3, 4),
        "transposed": w.t(),
        "part": w[:2],
        "copy": w.clone(),
        "none": w[:0],
        "none2": w[:0],
    }
    assert find_aliases(tensors, {}) == {"again": "first"}


def test_a_stage_that_holds_only_the_second_name_of_a_tied_weight_does_not_save_it_again() -> None:
    assert find_aliases({"head.weight": torch.arange(3)}, {"head.weight": "wte.weight", "other": "x"}) == {
        "head.weight": "wte.weight"
    }


def test_a_bare_list_of_components_is_enough_to_save_without_groups(tmp_path: Path) -> None:
    made = coordinator(ALONE, tmp_path, [])
    path = made.save_checkpoint(checkpoint_id="empty")
    made.load_checkpoint(path)
    assert made.last_load is not None
    assert made.last_load.bytes_read == 0


def test_of_several_tensors_that_begin_at_one_address_those_that_are_one_are_tied() -> None:
    w = torch.arange(12.0).view(3, 4)
    tensors = {"part": w[:2], "whole": w, "same part": w[:2], "flat": w.view(-1), "same": w.detach(), "none": w[:0]}
    assert find_aliases(tensors, {}) == {"same part": "part", "same": "whole"}
