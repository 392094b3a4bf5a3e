"""A sharded state dict, taken apart by kinds of value before a save and before a load. Pure; the one that is given stays as it is."""

from __future__ import annotations

from typing import Any

from ckpt.dist_checkpointing.dict_utils import dict_list_map_outplace, extract_matching_values
from ckpt.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedStateDict,
    ShardedTensorFactory,
    StateDict,
    apply_factories,
)
from ckpt.dist_checkpointing.utils import extract_nonpersistent, extract_sharded_base
from ckpt.errors import ConfigurationError
from ckpt.state.sharded_tensor import ShardedTensor

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


def prepared_to_load(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict, dict[Any, Any]]:
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
