"""Sharded state dicts split by kind of value, or with other keys. Names follow Megatron-Core."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckpt.dist_checkpointing.dict_utils import dict_list_map_outplace, extract_matching_values, nested_values
from ckpt.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensorFactory,
    StateDict,
    apply_factories,
)
from ckpt.errors import ConfigurationError, ShardingError
from ckpt.state.sharded_tensor import ShardedTensor

_ShardId = tuple[str, tuple[int, ...], tuple[int, int] | None]
_ObjectId = tuple[str, tuple[int, ...], tuple[int, ...]]


def extract_sharded_tensors(sharded_state_dict: ShardedStateDict) -> tuple[ShardedStateDict, StateDict]:
    """Split into (ShardedTensors, others), both nested as the state dict."""
    return _split(sharded_state_dict, ShardedTensor)


def extract_sharded_tensors_and_factories(sharded_state_dict: ShardedStateDict) -> tuple[ShardedStateDict, StateDict]:
    """Split into (ShardedTensors and factories, others), both nested as the state dict."""
    return _split(sharded_state_dict, ShardedTensor, ShardedTensorFactory)


def extract_sharded_tensors_or_nonpersistent(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict]:
    """Split into (ShardedTensors, factories and local objects; others), both nested as the state dict."""
    return _split(sharded_state_dict, ShardedTensor, ShardedTensorFactory, LocalNonpersistentObject)


def extract_sharded_base(sharded_state_dict: ShardedStateDict) -> tuple[ShardedStateDict, StateDict]:
    """Split into (sharded tensors, objects and factories; others), both nested as the state dict."""
    return _split(sharded_state_dict, ShardedBase)


def extract_nonpersistent(sharded_state_dict: ShardedStateDict) -> tuple[ShardedStateDict, StateDict]:
    """Split into (local objects, others), both nested as the state dict."""
    return _split(sharded_state_dict, LocalNonpersistentObject)


def add_prefix_for_sharding(sharded_state_dict: ShardedStateDict, prefix: str) -> None:
    """Prefix the `key` of every sharded value. The dict's own keys stay."""
    for leaf in _sharded(sharded_state_dict):
        leaf.key = f"{prefix}{leaf.key}"


def replace_prefix_for_sharding(sharded_state_dict: ShardedStateDict, old_prefix: str, new_prefix: str) -> None:
    """Replace the prefix in the `key` of every sharded value. The dict's own keys stay.

    Raises:
        ShardingError: a key does not start with `old_prefix`; no key is changed then.
    """
    found = _sharded(sharded_state_dict)
    for leaf in found:
        if not leaf.key.startswith(old_prefix):
            raise ShardingError(
                f"{leaf.key} does not begin with the prefix {old_prefix!r} that is to be replaced in all keys; apply_prefix_mapping "
                "replaces it where it is"
            )
    for leaf in found:
        leaf.key = f"{new_prefix}{leaf.key.removeprefix(old_prefix)}"


def apply_prefix_mapping(sharded_state_dict: ShardedStateDict, prefix_map: Mapping[str, str]) -> None:
    """Replace prefixes in the `key` of sharded values; keys without any of them stay.

    Args:
        prefix_map: old prefix -> new one. The first match counts.
    """
    for leaf in _sharded(sharded_state_dict):
        fitting = next((old for old in prefix_map if leaf.key.startswith(old)), None)
        if fitting is not None:
            leaf.key = f"{prefix_map[fitting]}{leaf.key.removeprefix(fitting)}"


def _sharded_tensor_shard_id(sharded_tensor: ShardedTensor) -> _ShardId:
    """Identity of a shard, equal for its copies on several ranks."""
    run = sharded_tensor.flattened_range
    return sharded_tensor.key, sharded_tensor.global_offset, None if run is None else (run.start, run.stop)


def _sharded_object_id(sharded_object: ShardedObject) -> _ObjectId:
    """Identity of an object, equal for its copies on several ranks."""
    return sharded_object.key, sharded_object.global_offset, sharded_object.global_shape


def _split(state_dict: ShardedStateDict, *kinds: type) -> tuple[ShardedStateDict, StateDict]:
    return extract_matching_values(state_dict, lambda value: isinstance(value, kinds))


def _sharded(state_dict: ShardedStateDict) -> list[ShardedBase]:
    """Distinct sharded values of a state dict."""
    found = {id(value): value for value in nested_values([state_dict]) if isinstance(value, ShardedBase)}
    return list(found.values())


_COMMON = "common values"
_KINDS = (
    (ShardedTensor, "sharded tensors"),
    (ShardedObject, "sharded objects"),
    (LocalNonpersistentObject, "local objects"),
)


def split_for_save(sharded_state_dict: ShardedStateDict) -> tuple[ShardedStateDict, StateDict]:
    """Split a state dict for a save into (sharded values, factories applied; common values). Drops local objects.

    Raises:
        ConfigurationError: a list mixes kinds of values, or `sharded_state_dict` is not a dictionary.
    """
    if not isinstance(sharded_state_dict, dict):
        raise ConfigurationError(f"sharded_state_dict is a {type(sharded_state_dict).__name__}; give a dictionary")
    copy = dict_list_map_outplace(lambda value: value, sharded_state_dict)
    apply_factories(copy)
    _require_whole_lists(copy, "")
    _, copy = extract_nonpersistent(copy)
    return extract_sharded_base(copy)


def _require_whole_lists(value: Any, path: str) -> set[str]:
    """Refuse lists of mixed kinds: split by kind, their elements would lose their positions. Returns the kinds of the leaves."""
    if isinstance(value, dict):
        kinds = [_require_whole_lists(inner, f"{path}.{key}" if path else str(key)) for key, inner in value.items()]
        return set().union(*kinds)
    if not isinstance(value, list):
        return {next((name for kind, name in _KINDS if isinstance(value, kind)), _COMMON)}
    # An empty container in a list counts as a common value.
    kinds = [_require_whole_lists(inner, f"{path}[{number}]") or {_COMMON} for number, inner in enumerate(value)]
    for number, kind in enumerate(kinds):
        if kind != kinds[0]:
            both = "; ".join(" and ".join(sorted(names_of)) for names_of in (kinds[0], kind))
            raise ConfigurationError(
                f"{path} is a list whose elements 0 and {number} hold different kinds of values ({both}): split by kind they would "
                "lose their positions; give a dictionary instead"
            )
    return kinds[0] if kinds else set()


def split_for_load(sharded_state_dict: ShardedStateDict) -> tuple[ShardedStateDict, StateDict, dict[Any, Any]]:
    """Split a state dict for a load into (sharded values, factories applied; local objects, unwrapped; factories without data)."""
    copy = dict_list_map_outplace(lambda value: value, sharded_state_dict)
    factories, _ = extract_matching_values(
        copy, lambda value: isinstance(value, ShardedTensorFactory), return_lists_as_dicts=True
    )
    factories = dict_list_map_outplace(lambda factory: factory.without_data(), factories)
    apply_factories(copy)
    local, copy = extract_nonpersistent(copy)
    local = dict_list_map_outplace(lambda one: one.unwrap(), local)
    wanted, _ = extract_sharded_base(copy)
    return wanted, local, factories
