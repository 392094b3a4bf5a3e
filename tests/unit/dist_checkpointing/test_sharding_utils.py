"""Parting sharded state dicts, and renaming what they hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from ckpt.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensorFactory
from ckpt.dist_checkpointing.utils import (
    _sharded_object_id,
    _sharded_tensor_shard_id,
    add_prefix_for_sharding,
    apply_prefix_mapping,
    extract_nonpersistent,
    extract_sharded_base,
    extract_sharded_tensors,
    extract_sharded_tensors_and_factories,
    extract_sharded_tensors_or_nonpersistent,
    replace_prefix_for_sharding,
)
from ckpt.errors import ShardingError
from ckpt.state.sharded_tensor import ShardedTensor

TENSOR = ShardedTensor.from_rank_offsets("model.w", torch.arange(4.0), (0, 1, 2))
OBJECT = ShardedObject("model.rng", [1], (2,), (1,))
FACTORY = ShardedTensorFactory("model.mlp", torch.arange(2.0), lambda *_: {}, torch.cat)
LOCAL = LocalNonpersistentObject("here")
PLAIN = torch.arange(3)


def state() -> dict[str, Any]:
    return {"a": TENSOR, "b": [OBJECT, {"c": FACTORY, "lr": 0.1}, LOCAL], "d": PLAIN, "e": {}}


@pytest.mark.parametrize(
    ("extract", "matching", "others"),
    [
        (extract_sharded_tensors, {"a": TENSOR},
         {"b": [OBJECT, {"c": FACTORY, "lr": 0.1}, LOCAL], "d": PLAIN, "e": {}}),
        (extract_sharded_tensors_and_factories, {"a": TENSOR, "b": [{"c": FACTORY}]},
         {"b": [OBJECT, {"lr": 0.1}, LOCAL], "d": PLAIN, "e": {}}),
        (extract_sharded_tensors_or_nonpersistent, {"a": TENSOR, "b": [{"c": FACTORY}, LOCAL]},
         {"b": [OBJECT, {"lr": 0.1}], "d": PLAIN, "e": {}}),
        (extract_sharded_base, {"a": TENSOR, "b": [OBJECT, {"c": FACTORY}]},
         {"b": [{"lr": 0.1}, LOCAL], "d": PLAIN, "e": {}}),
        (extract_nonpersistent, {"b": [LOCAL]},
         {"a": TENSOR, "b": [OBJECT, {"c": FACTORY, "lr": 0.1}], "d": PLAIN, "e": {}}),
    ],
)  # fmt: skip
def test_a_state_dict_is_parted_by_the_kind_of_its_values(
    extract: Callable[[dict[str, Any]], tuple[Any, Any]], matching: dict[str, Any], others: dict[str, Any]
) -> None:
    """S1.77: what matches and what does not keep their nesting, and the state dict is left as it is."""
    given = state()
    assert extract(given) == (matching, others)
    assert given == state()


def named(*keys: str) -> dict[str, Any]:
    tensor, thing, factory = keys
    return {
        "model.a": ShardedTensor.from_rank_offsets(tensor, torch.arange(4.0)),
        "list": [
            ShardedObject(thing, 1, (1,), (0,)),
            {"f": ShardedTensorFactory(factory, PLAIN, lambda *_: {}, torch.cat)},
        ],
        "lr": 0.1,
    }


def keys_of(state_dict: dict[str, Any]) -> list[str]:
    return [state_dict["model.a"].key, state_dict["list"][0].key, state_dict["list"][1]["f"].key]


def test_a_prefix_is_put_before_the_keys_of_all_that_is_sharded() -> None:
    """S1.64: a factory takes it too, and gives it to what it builds; the dict's own keys stay."""
    given = named("w", "rng", "mlp")
    add_prefix_for_sharding(given, "model.")
    assert keys_of(given) == ["model.w", "model.rng", "model.mlp"]
    assert list(given) == ["model.a", "list", "lr"]


def test_what_stands_at_two_places_gets_a_prefix_once() -> None:
    """S1.59: a tied weight is one tensor, whatever the number of its names in the state dict."""
    tied = ShardedTensor.from_rank_offsets("w", torch.arange(4.0))
    add_prefix_for_sharding({"first": tied, "again": [tied]}, "model.")
    assert tied.key == "model.w"


def test_a_prefix_is_replaced_in_all_keys_or_in_none() -> None:
    """S1.64: a key that begins otherwise is named."""
    given = named("model.w", "model.rng", "model.model.mlp")
    replace_prefix_for_sharding(given, "model.", "ema/")
    assert keys_of(given) == ["ema/w", "ema/rng", "ema/model.mlp"]
    given = named("model.w", "other.rng", "model.mlp")
    with pytest.raises(
        ShardingError, match=r"^other.rng does not begin with the prefix 'model\.' that is to be replaced"
    ):
        replace_prefix_for_sharding(given, "model.", "ema/")
    assert keys_of(given) == ["model.w", "other.rng", "model.mlp"]


def test_prefixes_are_mapped_where_they_are_and_the_first_that_fits_counts() -> None:
    """S1.64: what has none of them stays."""
    given = named("model.w", "rng", "model.mlp.b")
    apply_prefix_mapping(given, {"model.mlp.": "mlp/", "model.": "m/", "": "x/"})
    assert keys_of(given) == ["m/w", "x/rng", "mlp/b"]
    given = named("model.w", "rng", "model.mlp.b")
    apply_prefix_mapping(given, {"model.": "m/", "model.mlp.": "mlp/"})
    assert keys_of(given) == ["m/w", "rng", "m/mlp.b"]


def test_equal_copies_have_one_id_and_other_shards_another() -> None:
    """S1.72: what a shard is told apart by: key, offset and range; an object by its grid too."""
    run = ShardedTensor.from_rank_offsets_flat("w", torch.arange(3.0), (4,), (0, 1, 2), flattened_range=slice(1, 4))
    copy = ShardedTensor.from_rank_offsets_flat(
        "w", torch.arange(3.0), (4,), (0, 1, 2), flattened_range=slice(1, 4), replica_id=2
    )
    assert _sharded_tensor_shard_id(run) == _sharded_tensor_shard_id(copy) == ("w", (4,), (1, 4))
    assert _sharded_tensor_shard_id(TENSOR) == ("model.w", (4,), None)
    assert _sharded_object_id(OBJECT) == ("model.rng", (1,), (2,))
