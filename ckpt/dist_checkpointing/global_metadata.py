"""Metadata of the sharded values of all ranks, without data: gathered from the ranks, and kept in columns.

Ranks repeat each other in parts: copies of a model differ in their replica ids alone, pieces of a tensor in their offsets. So keys,
layouts, positions and replica ids are separate columns, and a column that several ranks share is sent, stored and checked once.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple, overload

import torch

from ckpt.dist_checkpointing.dict_utils import nested_values
from ckpt.dist_checkpointing.mapping import ReplicaId, ShardedObject, ShardedStateDict
from ckpt.errors import ConfigurationError
from ckpt.format import strict_json
from ckpt.ranks.default_topology import current_topology
from ckpt.state.collect import digest_of_json, exchange_distinct
from ckpt.state.sharded_tensor import ShardedTensor

Sharded = ShardedTensor | ShardedObject
LocalMetadata = Sequence[Sharded]
"""Shards that one rank holds or requests, without data."""
Column = tuple[tuple[Any, ...], tuple[int, ...]]
"""One attribute of all shards of a rank: (distinct values, index of the value by row)."""


class ShardLayout(NamedTuple):
    """Attributes that the shards of one grid share. An object counts as one element, along prepended axes alone."""

    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    dtype: str
    """torch's name; "" of an object."""
    prepend_axis_num: int
    allow_shape_mismatch: bool
    is_flat: bool

    @classmethod
    def of(cls, one: Sharded) -> ShardLayout:
        shape = _ints(one.global_shape)
        if isinstance(one, ShardedObject):
            return cls(shape, (), shape, "", len(shape), False, False)
        counts = None if one.axis_fragmentations is None else _ints(one.axis_fragmentations)
        dtype, is_flat = str(one.dtype).removeprefix("torch."), one.flattened_range is not None
        prepended, may_mismatch = int(one.prepend_axis_num), bool(one.allow_shape_mismatch)
        return cls(shape, _ints(one.local_shape), counts, dtype, prepended, may_mismatch, is_flat)

    @property
    def sides(self) -> tuple[int, ...]:
        """Shape of the local chunk in the global tensor."""
        return (1,) * self.prepend_axis_num + self.local_shape


class ShardPosition(NamedTuple):
    """Offset of the chunk, and the range of the chunk's elements."""

    offset: tuple[int, ...]
    start: int
    stop: int

    @classmethod
    def of(cls, one: Sharded) -> ShardPosition:
        if isinstance(one, ShardedObject):
            return cls(_ints(one.global_offset), 0, 1)
        if one.flattened_range is None:
            return cls(_ints(one.global_offset), 0, math.prod(_ints(one.local_shape)))
        return cls(_ints(one.global_offset), int(one.flattened_range.start), int(one.flattened_range.stop))


class Columns(NamedTuple):
    """Shards of one rank, one per row."""

    keys: Column
    layouts: Column
    positions: Column
    replica_ids: Column

    @classmethod
    def of(cls, local: Iterable[object]) -> Columns:
        """
        Raises:
            ConfigurationError: a value is neither a ShardedTensor nor a ShardedObject.
        """
        shards = [_require_sharded(leaf) for leaf in local]
        ids = (shard.replica_id for shard in shards)
        return cls(
            _column(shard.key for shard in shards),
            _column(map(ShardLayout.of, shards)),
            _column(map(ShardPosition.of, shards)),
            _column(_ints(replica_id) if isinstance(replica_id, tuple) else int(replica_id) for replica_id in ids),
        )


def _column_of_json(tree: Any, number: int) -> Column:
    """Parse column `number` of `Columns`."""
    kind: Any = (str, ShardLayout, ShardPosition, ReplicaId)[number]
    column: Column = strict_json.convert(tree, tuple[tuple[kind, ...], tuple[int, ...]])
    return column


class GlobalMetadata(Sequence[Sequence[Sharded]]):
    """Shards of every rank, by rank. The objects are made on access.

    Attributes:
        columns: by rank. Equal columns should be one object: they are compared by identity.
    """

    def __init__(self, columns: Sequence[Columns]) -> None:
        self.columns = columns
        self._rows: dict[int, list[Any]] = {}

    @classmethod
    def of(cls, ranks: GlobalMetadata | Iterable[LocalMetadata]) -> GlobalMetadata:
        """Make the metadata from the shards of every rank."""
        if isinstance(ranks, GlobalMetadata):
            return ranks
        known: dict[Column, Column] = {}
        return cls([Columns(*(known.setdefault(column, column) for column in Columns.of(local))) for local in ranks])

    @property
    def keys(self) -> set[str]:
        """The keys of all ranks together."""
        distinct = {id(of_rank.keys): of_rank.keys for of_rank in self.columns}
        return {key for values, _ in distinct.values() for key in values}

    def rows(self, column: Column) -> list[Any]:
        """Values of a column, row by row."""
        found = self._rows.get(id(column))
        if found is None:
            found = self._rows[id(column)] = [column[0][number] for number in column[1]]
        return found

    def __len__(self) -> int:
        return len(self.columns)

    @overload
    def __getitem__(self, rank: int) -> list[Sharded]: ...
    @overload
    def __getitem__(self, rank: slice) -> list[list[Sharded]]: ...
    def __getitem__(self, rank: int | slice) -> list[Sharded] | list[list[Sharded]]:
        if isinstance(rank, slice):
            return [self[number] for number in range(*rank.indices(len(self)))]
        return [_made(*row) for row in zip(*map(self.rows, self.columns[rank]), strict=True)]


def determine_global_metadata(sharded_state_dict: ShardedStateDict) -> tuple[list[Sharded], GlobalMetadata]:
    """Exchange the metadata of all ranks' shards. Collective.

    First come digests, then each distinct column from the lowest rank that has it.

    Args:
        sharded_state_dict: nested, of ShardedTensors and ShardedObjects alone.

    Returns:
        (shards of this rank, shards of every rank), without data.

    Raises:
        ConfigurationError: a rank gives something else; on every rank.
    """
    topology = current_topology()
    with topology.phase("metadata") as phase:
        mine = Columns.of(nested_values(sharded_state_dict))
        local = [leaf.without_data() for leaf in nested_values(sharded_state_dict)]
        listed = [digest_of_json(column) for column in mine]
        phase.payload = listed
    digests: list[list[str]] = phase.payloads
    trees = exchange_distinct(dict(zip(listed, mine, strict=True)), digests, topology, "columns of metadata")
    known = {
        (number, digest): _column_of_json(trees[digest], number)
        for number, digest in dict.fromkeys(at for of_rank in digests for at in enumerate(of_rank))
    }
    return local, GlobalMetadata([Columns(*(known[at] for at in enumerate(of_rank))) for of_rank in digests])


def _require_sharded(one: object) -> Sharded:
    if not isinstance(one, ShardedTensor | ShardedObject):
        raise ConfigurationError(
            f"the sharded part of a state dict holds a {type(one).__name__}, and may hold ShardedTensor and ShardedObject only; build "
            "factories with apply_factories, and take everything else out with extract_sharded_base"
        )
    return one


def _column(rows: Iterable[Hashable]) -> Column:
    numbers: dict[Hashable, int] = {}
    at = tuple(numbers.setdefault(row, len(numbers)) for row in rows)
    return tuple(numbers), at


def _made(key: str, layout: ShardLayout, position: ShardPosition, replica_id: ReplicaId) -> Sharded:
    """Make the object that a row describes."""
    if not layout.dtype:
        return ShardedObject(key, None, layout.global_shape, position.offset, replica_id)
    return ShardedTensor(
        key,
        None,
        getattr(torch, layout.dtype),
        layout.local_shape,
        layout.global_shape,
        position.offset,
        layout.axis_fragmentations,
        replica_id,
        layout.prepend_axis_num,
        layout.allow_shape_mismatch,
        slice(position.start, position.stop) if layout.is_flat else None,
    )


def _ints(numbers: Iterable[int]) -> tuple[int, ...]:
    """Convert to Python numbers: shapes may hold NumPy's, which JSON refuses."""
    return tuple(map(int, numbers))
