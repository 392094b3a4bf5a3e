"""Wrapped values of a sharded state dict: tensors, objects, factories and local objects. Names follow Megatron-Core."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from ckpt.dist_checkpointing.dict_utils import dict_list_map_inplace, path_name
from ckpt.errors import CheckpointError, ShapeMismatchError, ShardingError, logger_of, sentence
from ckpt.state.sharded_base import CommonStateDict as CommonStateDict
from ckpt.state.sharded_base import ReplicaId as ReplicaId
from ckpt.state.sharded_base import ShardedBase as ShardedBase
from ckpt.state.sharded_base import ShardedStateDict as ShardedStateDict
from ckpt.state.sharded_base import StateDict as StateDict
from ckpt.state.sharded_base import is_main_replica as is_main_replica
from ckpt.state.sharded_tensor import ShardedTensor as ShardedTensor

logger = logger_of(__name__)

_UNKNOWN = -1
"""Last side of a global shape that an older unique key omits."""
_UNIQUE_KEY = re.compile(
    r"(?P<key>.*)/shard_(?P<offset>[0-9]+(?:\.[0-9]+)*|)_(?P<shape>-?[0-9]+(?:\.-?[0-9]+)*|)", re.DOTALL
)


@dataclass
class ShardedObject(ShardedBase):
    """One object of a grid of objects. The ranks hold the grid together; unlike a tensor it cannot be resharded.

    Attributes:
        key: name of the whole grid.
        data: this rank's object; None for metadata alone.
        global_shape: of the grid, in objects. A side of -1 is unknown.
        global_offset: position of the object in the grid.
        replica_id: see `is_main_replica`.
    """

    key: str
    data: object
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: ReplicaId = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.global_shape, self.global_offset = tuple(self.global_shape), tuple(self.global_offset)
        self.validate_metadata_integrity()

    def validate_metadata_integrity(self) -> None:
        if len(self.global_shape) != len(self.global_offset):
            raise ShapeMismatchError(
                f"{self.key}: global_shape {self.global_shape} has {len(self.global_shape)} dimensions, global_offset "
                f"{self.global_offset} has {len(self.global_offset)}; give one number per dimension to both"
            )
        for side, number in zip(self.global_shape, self.global_offset, strict=True):
            if number < 0 or (side != _UNKNOWN and number >= side):
                raise ShardingError(
                    f"{self.key}: global_offset {self.global_offset} is outside of global_shape {self.global_shape}; both count "
                    "objects, from 0"
                )

    def without_data(self) -> Self:
        return replace(self, data=None)

    def __str__(self) -> str:
        return f"{type(self).__name__}(key={self.key!r})"

    @property
    def unique_key(self) -> str:
        """Unique name of this object: `<key>/shard_<global_offset>_<global_shape>`.

        Example:
            >>> ShardedObject("rng", None, (2, 4), (1, 3)).unique_key
            'rng/shard_1.3_2.4'
        """
        offset, shape = (".".join(map(str, numbers)) for numbers in (self.global_offset, self.global_shape))
        return f"{self.key}/shard_{offset}_{shape}"

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> Self:
        """Parse a unique key; return its object without data.

        Older checkpoints omit the shape's last number: it is then -1.

        Raises:
            ShardingError: the text is not a unique key.
        """
        found = _UNIQUE_KEY.fullmatch(unique_key)
        if found is None:
            raise ShardingError(
                f"{unique_key!r} is no unique key of an object: <key>/shard_<global_offset>_<global_shape>"
            )
        offset, shape = _numbers(found["offset"]), _numbers(found["shape"])
        if len(offset) == len(shape) + 1:
            shape = (*shape, _UNKNOWN)
        return cls(found["key"], None, shape, offset, replica_id)


class LocalNonpersistentObject:
    """A value of this process alone: a save skips it, a load returns it unchanged."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        """Return the value."""
        return self.obj


LocalNonpersitentObject = LocalNonpersistentObject
"""Upstream's misspelling, which existing programs import."""


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(".")) if text else ()


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
