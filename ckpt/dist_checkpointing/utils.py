"""Tools for sharded state dicts: parting them by kind of value, and renaming what they hold. Names follow Megatron-Core."""

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
    """Part a state dict in the ShardedTensors and the rest, both nested as it is."""
    return _part(sharded_state_dict, ShardedTensor)


def extract_sharded_tensors_and_factories(sharded_state_dict: ShardedStateDict) -> tuple[ShardedStateDict, StateDict]:
    """Part a state dict in the ShardedTensors with their factories, and the rest, both nested as it is."""
    return _part(sharded_state_dict, ShardedTensor, ShardedTensorFactory)


def extract_sharded_tensors_or_nonpersistent(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict]:
    """Part a state dict in the ShardedTensors, factories and values that no checkpoint holds, and the rest."""
    return _part(sharded_state_dict, ShardedTensor, ShardedTensorFactory, LocalNonpersistentObject)


def extract_sharded_base(sharded_state_dict: ShardedStateDict) -> tuple[ShardedStateDict, StateDict]:
    """Part a state dict in all that is sharded (tensors, objects, factories) and the rest, both nested as it is."""
    return _part(sharded_state_dict, ShardedBase)


def extract_nonpersistent(sharded_state_dict: ShardedStateDict) -> tuple[ShardedStateDict, StateDict]:
    """Part a state dict in the values that no checkpoint holds and the rest, both nested as it is."""
    return _part(sharded_state_dict, LocalNonpersistentObject)


def add_prefix_for_sharding(sharded_state_dict: ShardedStateDict, prefix: str) -> None:
    """Put a prefix before the key of all that is sharded in a state dict; the dict's own keys stay."""
    for one in _sharded(sharded_state_dict):
        one.key = f"{prefix}{one.key}"


def replace_prefix_for_sharding(sharded_state_dict: ShardedStateDict, old_prefix: str, new_prefix: str) -> None:
    """Replace the prefix with which the key of all that is sharded in a state dict begins; the dict's own keys stay.

    Raises:
        ShardingError: a key begins otherwise; no key is changed then.
    """
    found = _sharded(sharded_state_dict)
    for one in found:
        if not one.key.startswith(old_prefix):
            raise ShardingError(
                f"{one.key} does not begin with the prefix {old_prefix!r} that is to be replaced in all keys; apply_prefix_mapping "
                "replaces it where it is"
            )
    for one in found:
        one.key = f"{new_prefix}{one.key.removeprefix(old_prefix)}"


def apply_prefix_mapping(sharded_state_dict: ShardedStateDict, prefix_map: Mapping[str, str]) -> None:
    """Replace the prefix of every key of a state dict's sharded values that begins with one of these; leave the others.

    Args:
        prefix_map: old prefix -> new one. Of several that fit, the first one counts.
    """
    for one in _sharded(sharded_state_dict):
        fitting = next((old for old in prefix_map if one.key.startswith(old)), None)
        if fitting is not None:
            one.key = f"{prefix_map[fitting]}{one.key.removeprefix(fitting)}"


def _sharded_tensor_shard_id(sharded_tensor: ShardedTensor) -> _ShardId:
    """What copies of one shard on several ranks have in common, and no other shard."""
    run = sharded_tensor.flattened_range
    return sharded_tensor.key, sharded_tensor.global_offset, None if run is None else (run.start, run.stop)


def _sharded_object_id(sharded_object: ShardedObject) -> _ObjectId:
    """What copies of one object on several ranks have in common, and no other object."""
    return sharded_object.key, sharded_object.global_offset, sharded_object.global_shape


def _part(state_dict: ShardedStateDict, *kinds: type) -> tuple[ShardedStateDict, StateDict]:
    return extract_matching_values(state_dict, lambda value: isinstance(value, kinds))


def _sharded(state_dict: ShardedStateDict) -> list[ShardedBase]:
    """All that is sharded in a state dict; what stands at several places in it, once."""
    found = {id(value): value for value in nested_values([state_dict]) if isinstance(value, ShardedBase)}
    return list(found.values())


_COMMON = "common values"


def prepared_to_save(sharded_state_dict: ShardedStateDict) -> tuple[ShardedStateDict, StateDict]:
    """The sharded part, factories applied, and the common part; objects that are only local left out."""
    if not isinstance(sharded_state_dict, dict):
        raise ConfigurationError(f"sharded_state_dict is a {type(sharded_state_dict).__name__}; give a dictionary")
    copy = dict_list_map_outplace(lambda value: value, sharded_state_dict)
    apply_factories(copy)
    _require_whole_lists(copy, "")
    _, copy = extract_nonpersistent(copy)
    return extract_sharded_base(copy)


def _require_whole_lists(value: Any, path: str) -> set[str]:
    """Refuse a list whose elements are of different kinds: parted by kind, nobody would know where in the list each was.

    Returns:
        the kinds of the leaves below.

    Raises:
        ConfigurationError: it names the list.
    """
    if isinstance(value, dict):
        kinds = [_require_whole_lists(inner, f"{path}.{key}" if path else str(key)) for key, inner in value.items()]
        return set().union(*kinds)
    if not isinstance(value, list):
        return {_kind_of(value)}
    # An empty container in a list is common, like a value.
    kinds = [_require_whole_lists(inner, f"{path}[{number}]") or {_COMMON} for number, inner in enumerate(value)]
    for number, kind in enumerate(kinds):
        if kind != kinds[0]:
            raise ConfigurationError(
                f"{path} is a list whose elements 0 and {number} hold different kinds of values ({_listed(kinds[0])}; {_listed(kind)}): "
                "parted by kind they would lose their places; give a dictionary instead"
            )
    return kinds[0] if kinds else set()


def _kind_of(leaf: Any) -> str:
    if isinstance(leaf, ShardedTensor):
        return "sharded tensors"
    if isinstance(leaf, ShardedObject):
        return "sharded objects"
    return "local objects" if isinstance(leaf, LocalNonpersistentObject) else _COMMON


def _listed(kinds: set[str]) -> str:
    return " and ".join(sorted(kinds))


def prepared_to_load(sharded_state_dict: ShardedStateDict) -> tuple[ShardedStateDict, StateDict, dict[Any, Any]]:
    """What is asked for, factories applied; the local objects as they are; and the factories, where they were."""
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
