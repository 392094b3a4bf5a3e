"""What all ranks hold of a sharded state dict, without the data. Pure: no files, no collectives.

Ranks repeat each other in parts: copies of a model differ in their replica ids alone, pieces of a tensor in their offsets. So keys,
forms, places and replica ids are kept apart, and of each whatever several ranks say alike is said, sent and looked at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, overload

import torch

from ckpt.dist_checkpointing.mapping import ReplicaId, ShardedObject
from ckpt.errors import ConfigurationError
from ckpt.state.sharded_tensor import ShardedTensor

Sharded = ShardedTensor | ShardedObject
LocalMetadata = Sequence[Sharded]
"""What one rank holds, or asks for, without data."""
Column = tuple[tuple[Any, ...], tuple[int, ...]]
"""One aspect of all that a rank holds: the distinct values, and by row which of them it is."""


class Form(NamedTuple):
    """What pieces have in common that are cut alike. An object is a piece of one element, along prepended axes alone."""

    global_shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None
    dtype: str
    """torch's name; "" of an object."""
    prepend_axis_num: int
    allow_shape_mismatch: bool
    is_flat: bool

    @classmethod
    def of(cls, one: Sharded) -> Form:
        shape = _ints(one.global_shape)
        if isinstance(one, ShardedObject):
            return cls(shape, (), shape, "", len(shape), False, False)
        counts = None if one.axis_fragmentations is None else _ints(one.axis_fragmentations)
        dtype, is_flat = str(one.dtype).removeprefix("torch."), one.flattened_range is not None
        prepended, may_mismatch = int(one.prepend_axis_num), bool(one.allow_shape_mismatch)
        return cls(shape, _ints(one.local_shape), counts, dtype, prepended, may_mismatch, is_flat)

    @property
    def sides(self) -> tuple[int, ...]:
        """Of the local chunk, in the global tensor."""
        return (1,) * self.prepend_axis_num + self.local_shape


class PiecePlace(NamedTuple):
    """Where a piece is: the offset of its chunk, and which run of the chunk's elements it is."""

    offset: tuple[int, ...]
    start: int
    stop: int

    @classmethod
    def of(cls, one: Sharded) -> PiecePlace:
        if isinstance(one, ShardedObject):
            return cls(_ints(one.global_offset), 0, 1)
        if one.flattened_range is None:
            return cls(_ints(one.global_offset), 0, math.prod(_ints(one.local_shape)))
        return cls(_ints(one.global_offset), int(one.flattened_range.start), int(one.flattened_range.stop))


class Columns(NamedTuple):
    """All that one rank holds: row by row, the four together say what a piece is."""

    keys: Column
    forms: Column
    places: Column
    replica_ids: Column

    @classmethod
    def of(cls, local: Iterable[object]) -> Columns:
        """
        Raises:
            ConfigurationError: something is neither a ShardedTensor nor a ShardedObject.
        """
        pieces = [_require_sharded(one) for one in local]
        return cls(
            _column(one.key for one in pieces),
            _column(map(Form.of, pieces)),
            _column(map(PiecePlace.of, pieces)),
            _column(
                _ints(one.replica_id) if isinstance(one.replica_id, tuple) else int(one.replica_id) for one in pieces
            ),
        )


def column_of_json(tree: Any, number: int) -> Column:
    """Column `number` of `Columns`, from what JSON has made of it."""
    make: Callable[..., Any] = (str, Form._make, PiecePlace._make, lambda value: value)[number]
    values, rows = tree
    return tuple(make(_hashable(value)) for value in values), tuple(rows)


class GlobalMetadata(Sequence[Sequence[Sharded]]):
    """What every rank holds, by rank; the pieces themselves are made when they are looked at.

    Attributes:
        columns: by rank. Equal columns should be one object: they are told apart by identity.
    """

    def __init__(self, columns: Sequence[Columns]) -> None:
        self.columns = columns
        self._rows: dict[int, list[Any]] = {}

    @classmethod
    def of(cls, ranks: GlobalMetadata | Iterable[LocalMetadata]) -> GlobalMetadata:
        """The same, from the pieces of every rank."""
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
        """The values of one of the columns, row by row."""
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
            return [self[one] for one in range(*rank.indices(len(self)))]
        return [_made(*row) for row in zip(*map(self.rows, self.columns[rank]), strict=True)]


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


def _made(key: str, form: Form, place: PiecePlace, replica_id: ReplicaId) -> Sharded:
    """The piece that a row says."""
    if not form.dtype:
        return ShardedObject(key, None, form.global_shape, place.offset, replica_id)
    return ShardedTensor(
        key,
        None,
        _dtype(form.dtype),
        form.local_shape,
        form.global_shape,
        place.offset,
        form.axis_fragmentations,
        replica_id,
        form.prepend_axis_num,
        form.allow_shape_mismatch,
        slice(place.start, place.stop) if form.is_flat else None,
    )


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), f"{name} was the name of one"
    return dtype


def _ints(numbers: Iterable[int]) -> tuple[int, ...]:
    """As plain numbers, which JSON can hold: shapes come with NumPy's own in them, too."""
    return tuple(map(int, numbers))


def _hashable(tree: Any) -> Any:
    return tuple(map(_hashable, tree)) if isinstance(tree, list) else tree
