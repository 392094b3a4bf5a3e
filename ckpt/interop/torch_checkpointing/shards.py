"""The box of a tensor that the local tensor of a rank holds: of the sharding in `metadata.pkl`, and of a DTensor's pickled spec. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from ckpt.errors import ConfigurationError
from ckpt.format.box import Box, cut_box
from ckpt.format.unknown import UnknownObject, shown
from ckpt.interop.torch_save.archives import sizes_in

_OF_TORCH = "torch.distributed.tensor.placement_types."


class Shards(NamedTuple):
    """What a local tensor holds.

    Attributes:
        dtype, shape: of the whole tensor.
        box: in it.
    """

    dtype: str
    shape: tuple[int, ...]
    box: Box


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


def _placement(kind: str, fields: dict[str, Any]) -> tuple[int, int] | None:
    """Dimension and split factor of a placement that shards; None: it replicates."""
    if kind not in ("Replicate", "Shard", "StridedShard"):
        raise ConfigurationError(f"has the placement {shown(kind)}, which is not read here")
    if kind == "Replicate":
        return None
    dim, factor = _sizes([fields["dim"], fields.get("split_factor", 1)])
    return dim, factor


def _placed(
    dtype: str, shape: tuple[int, ...], sides: Sequence[int], coordinate: Sequence[int], placements: Sequence[tuple[int, int] | None]
) -> Shards:
    for side, at, placement in zip(sides, coordinate, placements, strict=True):
        dim, factor = placement or (-1, 1)
        if not (at < side and dim < len(shape) and 0 < factor <= math.prod(sides)):
            raise ValueError(f"coordinate {at} of {side} ranks, dimension {dim} of {list(shape)} in {factor} parts")
    if (box := cut_box(shape, sides, coordinate, placements)) is None:
        raise ConfigurationError("is in parts that lie apart, which are not read here")
    return Shards(dtype.removeprefix("torch."), shape, box)


def _sizes(given: Any) -> tuple[int, ...]:
    return sizes_in(tuple(given) if isinstance(given, list) else (given,) if isinstance(given, int) else given)
