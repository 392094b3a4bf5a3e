"""Boxes of a tensor that the local tensor of a rank holds: of the sharding in `metadata.pkl`, and of a DTensor's pickled spec. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, product
from typing import Any, NamedTuple

from ckpt.errors import ConfigurationError
from ckpt.format.box import Box
from ckpt.format.unknown import UnknownObject, shown
from ckpt.interop.torch_save.archives import sizes_in

_OF_TORCH = "torch.distributed.tensor.placement_types."
_MOST_PARTS = 1 << 16
"""Parts of one local tensor that lie apart in the whole one."""
_Run = tuple[int, int]
"""Start and stop along a dimension."""


class Shards(NamedTuple):
    """What a local tensor holds.

    Attributes:
        dtype, shape: of the whole tensor.
        local: shape of the local tensor.
        parts: box in the whole tensor, and where it begins in the local one.
    """

    dtype: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    parts: list[tuple[Box, tuple[int, ...]]]


def shards_of_metadata(packed: dict[str, Any], rank: int) -> Shards:
    """Return what a rank holds of a tensor that `metadata.pkl` describes.

    Raises:
        ConfigurationError: its sharding is of a kind that is not read here.
        ValueError, KeyError, TypeError: it is damaged.
    """
    if packed["type"] != "DTensorShardingMetadata":
        raise ConfigurationError(f"is sharded as {shown(packed['type'])} says, which is not read here")
    data = packed["data"]
    sides, ranks = _sizes(data["mesh_spec"]["mesh_shape"]), data["mesh_spec"]["mesh_data"]
    if len(ranks) != math.prod(sides):
        raise ValueError(f"its mesh {list(sides)} has {len(ranks)} ranks")
    at, coordinate = ranks.index(rank), []
    for side in reversed(sides):
        at, inside = divmod(at, side)
        coordinate.append(inside)
    placements = [_placement(placement["type"], placement) for placement in data["placements"]]
    return _placed(data["dtype"], _sizes(data["global_shape"]), sides, coordinate[::-1], placements)


def shards_of_spec(spec: UnknownObject) -> Shards:
    """Return what the rank that pickled a DTensor holds of it.

    Raises:
        ConfigurationError: the pickle is of a torch that describes meshes in another way.
        ValueError, KeyError, TypeError, AttributeError: it is damaged.
    """
    shape, _, dtype = spec.state["tensor_meta"].args
    mesh = spec.state["mesh"].state
    if not mesh.keys() >= {"_layout", "_coordinate_on_dim"} or "axes" not in mesh["_layout"].state:
        raise ConfigurationError("is a DTensor of a torch whose meshes are not read here, and metadata.pkl does not describe it")
    sides = [math.prod(_sizes(axis.state["shape"])) for axis in mesh["_layout"].state["axes"]]
    placements = [
        _placement(placement.name.removeprefix(_OF_TORCH).removeprefix("_"), placement.state or {})
        for placement in spec.state["placements"]
    ]
    return _placed(str(dtype), _sizes(shape), sides, _sizes(mesh["_coordinate_on_dim"]), placements)


def _placement(kind: str, fields: dict[str, Any]) -> tuple[int, ...] | None:
    """Dimension and split factor of a placement that shards; None: it replicates."""
    if kind not in ("Replicate", "Shard", "StridedShard"):
        raise ConfigurationError(f"has the placement {shown(kind)}, which is not read here")
    return None if kind == "Replicate" else _sizes([fields["dim"], fields.get("split_factor", 1)])


def _placed(
    dtype: str,
    shape: tuple[int, ...],
    sides: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[tuple[int, ...] | None],
) -> Shards:
    """Cut one dimension of the mesh after the other, as DTensor does; after several cuts of a dimension its runs may lie apart."""
    runs: list[list[_Run]] = [[(0, side)] for side in shape]
    for side, at, placement in zip(sides, coordinate, placements, strict=True):
        dim, factor = placement or (-1, 1)
        if not (at < side and dim < len(shape) and 0 < factor <= _MOST_PARTS):
            raise ValueError(f"coordinate {at} of {side} ranks, dimension {dim} of {list(shape)} in {factor} parts")
        if placement is not None:
            parts = [_chunk(_chunk(runs[dim], factor, part), side, at) for part in range(factor)]
            runs[dim] = [run for part in parts for run in part]
            if math.prod(map(len, runs)) > _MOST_PARTS:
                raise ValueError("its parts are too many")
    lengths = [[stop - start for start, stop in of_dim] for of_dim in runs]
    starts = [accumulate(of_dim, initial=0) for of_dim in lengths]
    found = []
    for of_dims in product(*(zip(*each, strict=False) for each in zip(runs, lengths, starts, strict=True))):
        box = Box(tuple(start for (start, _), _, _ in of_dims), tuple(length for _, length, _ in of_dims))
        found.append((box, tuple(inside for _, _, inside in of_dims)))
    return Shards(dtype.removeprefix("torch."), shape, tuple(map(sum, lengths)), found)


def _chunk(runs: list[_Run], count: int, number: int) -> list[_Run]:
    """Return a chunk of what runs hold one after the other, as `torch.chunk` cuts."""
    size = -(-sum(stop - start for start, stop in runs) // count)
    first, found = number * size, []
    for start, stop in runs:
        begin, end = start + max(0, first), min(stop, start + first + size)
        if begin < end:
            found.append((begin, end))
        first -= stop - start
    return found


def _sizes(given: Any) -> tuple[int, ...]:
    return sizes_in(tuple(given) if isinstance(given, list) else (given,) if isinstance(given, int) else given)
