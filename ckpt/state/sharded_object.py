"""Objects with their position in a grid of objects. Users import the name from `ckpt.dist_checkpointing.mapping`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Self

from ckpt.errors import ShapeMismatchError, ShardingError
from ckpt.state.sharded_base import ReplicaId, ShardedBase

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


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(".")) if text else ()
