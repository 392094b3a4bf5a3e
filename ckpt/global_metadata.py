"""What all ranks hold of a sharded state dict, without the data, known on every rank."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Sequence
from functools import cache
from typing import Any

import torch

from ckpt.dict_utils import nested_values
from ckpt.errors import ConfigurationError
from ckpt.integrity import Sharded
from ckpt.job import current_topology
from ckpt.manifest import digest_of
from ckpt.mapping import ReplicaId, ShardedObject, ShardedStateDict, ShardedTensor
from ckpt.topology import Topology

_Column = list[Any]
"""One aspect of all that a rank holds: the distinct values, then the number of each row's."""


def determine_global_metadata(sharded_state_dict: ShardedStateDict) -> tuple[list[Sharded], list[list[Sharded]]]:
    """Tell the ranks what each of them holds. Collective.

    Ranks repeat each other, in parts: copies of a model differ in their replica ids alone, parts of a tensor in their offsets. So keys,
    shapes, places and replica ids travel apart, and of each whatever several ranks say alike is sent by the first of them. What is
    equal is also the same object in the result, which is not to be changed.

    Args:
        sharded_state_dict: nested, of ShardedTensors and ShardedObjects alone.

    Returns:
        (what this rank holds, what every rank holds by rank), without data.

    Raises:
        ConfigurationError: a rank gives something else; on every rank.
    """
    topology = current_topology()
    with topology.phase("metadata") as phase:
        local = [_without_data(one) for one in nested_values(sharded_state_dict)]
        columns = _columns(local)
        digests = [digest_of(json.dumps(column, separators=(",", ":")).encode()) for column in columns]
        phase.payload = digests
    listed = [tuple(digests) for digests in phase.payloads]
    return local, _assembled(listed, _exchanged(listed, columns, topology))


def _exchanged(listed: Sequence[Sequence[str]], columns: Sequence[_Column], topology: Topology) -> dict[str, list[Any]]:
    """Every rank's columns by digest, as rows; the lowest rank that has a column sends it."""
    first_with: dict[str, int] = {}
    for rank, digests in enumerate(listed):
        for digest in digests:
            first_with.setdefault(digest, rank)
    mine = zip(listed[topology.rank], columns, strict=True)
    with topology.phase("columns of metadata") as phase:
        phase.payload = {digest: column for digest, column in mine if first_with[digest] == topology.rank}
    return {digest: _rows(column) for sent in phase.payloads for digest, column in sent.items()}


def _assembled(listed: Sequence[tuple[str, ...]], found: dict[str, list[Any]]) -> list[list[Sharded]]:
    made = cache(_made)

    @cache
    def held_alike(digests: tuple[str, ...]) -> list[Sharded]:
        return [made(*row) for row in zip(*(found[digest] for digest in digests), strict=True)]

    return [held_alike(digests) for digests in listed]


def _without_data(one: object) -> Sharded:
    if not isinstance(one, ShardedTensor | ShardedObject):
        raise ConfigurationError(
            f"the sharded part of a state dict holds a {type(one).__name__}, and may hold ShardedTensor and ShardedObject only; build "
            "factories with apply_factories, and take everything else out with extract_sharded_base"
        )
    return one.without_data()


def _columns(local: Sequence[Sharded]) -> list[_Column]:
    """Keys, forms, places and replica ids of what a rank holds, as JSON."""
    return [
        _column(one.key for one in local),
        _column(_form(one) for one in local),
        _column(_place(one) for one in local),
        _column(one.replica_id if isinstance(one.replica_id, int) else _ints(one.replica_id) for one in local),
    ]


def _column(rows: Iterable[Hashable]) -> _Column:
    numbers: dict[Hashable, int] = {}
    at = [numbers.setdefault(row, len(numbers)) for row in rows]
    return [list(numbers), at]


def _rows(column: _Column) -> list[Any]:
    values, at = [_hashable(value) for value in column[0]], column[1]
    return [values[number] for number in at]


def _form(one: Sharded) -> tuple[Any, ...]:
    """What pieces have in common that are cut alike."""
    if isinstance(one, ShardedObject):
        return (_ints(one.global_shape),)
    counts = None if one.axis_fragmentations is None else _ints(one.axis_fragmentations)
    dtype = str(one.dtype).removeprefix("torch.")
    sizes = (_ints(one.global_shape), _ints(one.local_shape), counts)
    return (*sizes, dtype, int(one.prepend_axis_num), bool(one.allow_shape_mismatch))


def _place(one: Sharded) -> tuple[Any, ...]:
    run = one.flattened_range if isinstance(one, ShardedTensor) else None
    return (_ints(one.global_offset),) if run is None else (_ints(one.global_offset), int(run.start), int(run.stop))


def _made(key: str, form: tuple[Any, ...], place: tuple[Any, ...], replica_id: ReplicaId) -> Sharded:
    """The piece that `_columns` was given."""
    if len(form) == 1:
        return ShardedObject(key, None, form[0], place[0], replica_id)
    global_shape, local_shape, counts, dtype, prepended, may_mismatch = form
    run = slice(*place[1:]) if len(place) > 1 else None
    return ShardedTensor(
        key, None, _dtype(dtype), local_shape, global_shape, place[0], counts, replica_id, prepended, may_mismatch, run
    )


@cache
def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), f"{name} was the name of one"
    return dtype


def _ints(numbers: Iterable[int]) -> tuple[int, ...]:
    """As plain numbers, which JSON can hold: NumPy's own come in shapes, too."""
    return tuple(map(int, numbers))


def _hashable(tree: Any) -> Any:
    return tuple(map(_hashable, tree)) if isinstance(tree, list) else tree
