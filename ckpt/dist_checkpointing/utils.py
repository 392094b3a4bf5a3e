"""Tools for sharded state dicts: parting them by kind of value, and renaming what they hold. Names follow Megatron-Core."""

from __future__ import annotations

from collections.abc import Mapping

from ckpt.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from ckpt.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensorFactory,
    StateDict,
)
from ckpt.errors import ShardingError
from ckpt.state.sharded_tensor import ShardedTensor

_ShardId = tuple[str, tuple[int, ...], tuple[int, int] | None]
_ObjectId = tuple[str, tuple[int, ...], tuple[int, ...]]


def extract_sharded_tensors(sharded_state_dict: ShardedStateDict) -> tuple[ShardedStateDict, StateDict]:
    """Part a state dict in the ShardedTensors and the rest, both nested as it is."""
    return _part(sharded_state_dict, ShardedTensor)


def extract_sharded_tensors_and_factories(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict]:
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
