"""Wrapped values of a sharded state dict: tensors, objects, factories and local objects. Names follow Megatron-Core."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from ckpt.dist_checkpointing.dict_utils import dict_list_map_inplace, path_name
from ckpt.errors import CheckpointError, ShardingError, logger_of, sentence
from ckpt.state.sharded_base import CommonStateDict as CommonStateDict
from ckpt.state.sharded_base import ReplicaId as ReplicaId
from ckpt.state.sharded_base import ShardedBase as ShardedBase
from ckpt.state.sharded_base import ShardedStateDict as ShardedStateDict
from ckpt.state.sharded_base import StateDict as StateDict
from ckpt.state.sharded_base import is_main_replica as is_main_replica
from ckpt.state.sharded_object import ShardedObject as ShardedObject
from ckpt.state.sharded_tensor import ShardedTensor as ShardedTensor

logger = logger_of(__name__)


class LocalNonpersistentObject:
    """A value of this process alone: a save skips it, a load returns it unchanged."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        """Return the value."""
        return self.obj


LocalNonpersitentObject = LocalNonpersistentObject
"""Upstream's misspelling, which existing programs import."""


FactoryBuildFn = Callable[[str, torch.Tensor, ReplicaId, slice | None], Any]
"""(key, data, replica_id, flattened_range) -> sharded tensors, nested in dicts and lists."""
FactoryMergeFn = Callable[[Any], torch.Tensor]
"""Loaded values, nested as `FactoryBuildFn` returned them -> one tensor."""


@dataclass(eq=False)
class ShardedTensorFactory(ShardedBase):
    """A tensor whose stored form differs from the program's: `build_fn` converts before a save or load, `merge_fn` back after a load.

    `build_fn` must depend on its arguments only: optimizer states, which have the parameter's shape, are saved by the
    parameter's factory with their own key and data.

    Attributes:
        key: passed to `build_fn`.
        data: the program's tensor.
        replica_id: see `is_main_replica`.
        flattened_range: range of the flattened tensor that `data` holds; None for all of it.
    """

    key: str
    data: torch.Tensor | None = field(repr=False)
    build_fn: FactoryBuildFn
    merge_fn: FactoryMergeFn
    replica_id: ReplicaId = 0
    flattened_range: slice | None = None

    def build(self) -> Any:
        """Return the sharded tensors to save or load in place of this tensor.

        Raises:
            ShardingError: the factory has no data.
        """
        if self.data is None:
            raise ShardingError(
                f"{self.key}: a factory without data builds nothing; give it the tensor that it stands for"
            )
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)

    def validate_metadata_integrity(self) -> None:
        """Do nothing: the built sharded tensors check themselves."""

    def without_data(self) -> Self:
        return replace(self, data=None)


def apply_factories(sharded_state_dict: ShardedStateDict) -> None:
    """Replace every factory of a state dict by the sharded tensors that it builds, in place."""
    dict_list_map_inplace(_built, sharded_state_dict)


def _built(value: Any) -> Any:
    if not isinstance(value, ShardedTensorFactory):
        return value
    try:
        return value.build()
    except CheckpointError:
        raise
    except Exception as error:
        raise ShardingError(f"{value.key}: build_fn of its factory raised {sentence(error)}") from error


def apply_factory_merges(x1: StateDict, x2: ShardedStateDict, key: tuple[str | int, ...] = ()) -> StateDict:
    """Replace the values loaded for each factory by its merged tensor.

    Args:
        x1: loaded values; changed in place.
        x2: factories, at the paths in `x1` of the values that they built. A list may be given as {position: factory}.
        key: path of `x1`, for messages.

    Returns:
        `x1`; or the merged tensor if `x2` itself is a factory.

    Raises:
        ShardingError: `x1` has no value at the path of a factory.
    """
    merged: StateDict = _merged(x1, x2, key)
    return merged


def _merged(loaded: Any, wanted: Any, key: tuple[str | int, ...]) -> Any:
    if isinstance(wanted, ShardedTensorFactory):
        try:
            return wanted.merge_fn(loaded)
        except Exception as error:
            raise ShardingError(f"{wanted.key}: merge_fn of its factory raised {sentence(error)}") from error
    for step, below in _steps(loaded, wanted, key):
        loaded[step] = _merged(loaded[step], below, (*key, step))
    return loaded


def _steps(loaded: Any, wanted: Any, key: tuple[str | int, ...]) -> Iterable[tuple[Any, Any]]:
    """Keys and positions in `wanted` and the values there. All of them must exist in `loaded`."""
    if isinstance(wanted, dict) and isinstance(loaded, dict | list):
        places = loaded if isinstance(loaded, dict) else range(len(loaded))
        missing = [step for step in wanted if step not in places]
        if not missing:
            return wanted.items()
        what = f"a factory merges what was loaded under {missing[0]!r}, but only {list(places)} were"
    elif isinstance(wanted, list) and isinstance(loaded, list):
        if len(loaded) == len(wanted):
            return enumerate(wanted)
        what = f"a list of {len(loaded)} elements was loaded, and the factories are in a list of {len(wanted)}"
    else:
        what = f"a {type(loaded).__name__} was loaded, where the factories have a {type(wanted).__name__}"
    raise ShardingError(f"at {path_name(key)} {what}; load with the state dict that the factories were built from")
