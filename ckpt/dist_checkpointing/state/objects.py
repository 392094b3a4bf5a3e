"""Values of a sharded state dict that are no tensors. Users import these names from `ckpt.dist_checkpointing.mapping`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Self

from ckpt.errors import ShapeMismatchError, ShardingError
from ckpt.state.sharded_base import ReplicaId, ShardedBase

_UNKNOWN = -1
"""The last side of a global shape that an older unique key does not give."""
_UNIQUE_KEY = re.compile(r"(?P<key>.*)/shard_(?P<offset>\d+(?:\.\d+)*|)_(?P<shape>-?\d+(?:\.-?\d+)*|)", re.DOTALL)


@dataclass
class ShardedObject(ShardedBase):
    """One object of a grid of objects that the ranks hold together. Unlike a tensor it cannot be cut anew.

    Attributes:
        key: name of the whole grid.
        data: this rank's object; None where only its place is meant.
        global_shape: of the grid, in objects. A side of -1 is not known.
        global_offset: where in the grid the object stands.
        replica_id: which of several equal copies this is.
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
        """The name of this one object: `<key>/shard_<global_offset>_<global_shape>`.

        Example:
            >>> ShardedObject("rng", None, (2, 4), (1, 3)).unique_key
            'rng/shard_1.3_2.4'
        """
        offset, shape = (".".join(map(str, numbers)) for numbers in (self.global_offset, self.global_shape))
        return f"{self.key}/shard_{offset}_{shape}"

    @classmethod
    def empty_from_unique_key(cls, unique_key: str, replica_id: ReplicaId = 0) -> Self:
        """Return the object that has this unique key, without data.

        Older checkpoints left out the shape's last number: it is then -1.

        Raises:
            ShardingError: this is no unique key of an object.
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
    """A value that no checkpoint holds: a save leaves it out, a load gives back the one of this process."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        """The value itself."""
        return self.obj


LocalNonpersitentObject = LocalNonpersistentObject
"""The first reference's misspelling, which code out there still imports."""


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(".")) if text else ()
