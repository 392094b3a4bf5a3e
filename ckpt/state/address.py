"""Position of a leaf in its global array: from a ShardedTensor's fields, from a DTensor's placements, or the whole array."""

from __future__ import annotations

from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ckpt.errors import ShardingError
from ckpt.format.box import Box, cut_box, whole
from ckpt.format.dtypes import is_dtensor, zarr_name
from ckpt.planning.plan import Address
from ckpt.state.sharded_tensor import ShardedTensor
from ckpt.state.tensor_classes import require_dense


def local_tensor(leaf: torch.Tensor | ShardedTensor) -> torch.Tensor:
    """Return this rank's tensor of a leaf, in the shape of its box. Raises as `address_of`.

    Call it under `torch.no_grad()` for many leaves: switching gradients off for each takes longer than the rest.
    """
    if isinstance(leaf, ShardedTensor):
        return _only_piece(leaf, leaf.key)[1]
    local = leaf if type(leaf) is torch.Tensor or not is_dtensor(leaf) else _local_part(leaf)
    return local.detach() if local.requires_grad else local


def _local_part(leaf: Any) -> torch.Tensor:
    if not torch.is_grad_enabled():
        local = leaf.to_local()
        found: torch.Tensor = local.wait() if hasattr(local, "trigger_wait") else local  # of a collective that is under way
        return found
    with torch.no_grad():  # otherwise to_local() goes through autograd, and takes ten times as long
        return _local_part(leaf)


def address_of(leaf: torch.Tensor | ShardedTensor, name: str) -> Address:
    """Return the address of a leaf in its global array.

    Raises:
        ShardingError: a DTensor holds a pending sum (Partial), which cannot be saved, or rows that lie apart; a ShardedTensor has no data,
            or is flattened and therefore more than one box.
    """
    return Address(name, *place_of(leaf, name))


def place_of(leaf: torch.Tensor | ShardedTensor, name: str) -> tuple[str, tuple[int, ...], Box]:
    """Return (data type, global shape, box) of a leaf. The name is for messages. Arguments and errors as `address_of`."""
    if isinstance(leaf, ShardedTensor):
        return zarr_name(leaf.dtype), leaf.global_shape, _only_piece(leaf, name)[0]
    if is_dtensor(leaf):
        return zarr_name(leaf.dtype), tuple(leaf.shape), _box_of(leaf, name)
    if leaf.is_meta:
        require_dense(leaf, name)
    return _all_of(leaf.dtype, leaf.shape)


@lru_cache(maxsize=4096)
def _all_of(dtype: torch.dtype, shape: torch.Size) -> tuple[str, tuple[int, ...], Box]:
    """Return the position of a tensor that is held whole."""
    box = whole(tuple(shape))
    return zarr_name(dtype), box.shape, box


def _only_piece(leaf: ShardedTensor, name: str) -> tuple[Box, torch.Tensor]:
    if leaf.flattened_range is not None:
        raise ShardingError(
            f"{name}: a ShardedTensor with a flattened_range is several boxes, and a component's tensor is one; save it with "
            "dist_checkpointing.save"
        )
    return leaf.pieces()[0]


def _box_of(tensor: Any, name: str) -> Box:
    """Return this rank's box of a DTensor. Kept for each layout: torch takes 0.3 ms to compute one, and the layers of a model share them.

    Raises as `address_of`.
    """
    mesh = tensor.device_mesh
    known = _boxes.get(mesh)
    if known is None:
        known = _boxes[mesh] = {}
    # Meshes of equal ranks are one key, and a process that has initialized torch.distributed anew may have another rank.
    layout = tensor.placements, tensor.shape, tuple(mesh.get_coordinate() or ())
    box = known.get(layout)
    if box is None:
        box = known[layout] = _computed_box(tensor, name)
    local = local_tensor(tensor)
    require_dense(local, name)
    if local.shape != box.shape:
        raise ShardingError(f"{name}: the local tensor has shape {tuple(local.shape)}, its placements say {box.shape}")
    return box


def _computed_box(tensor: Any, name: str) -> Box:
    if any(placement.is_partial() for placement in tensor.placements):
        raise ShardingError(f"{name}: placements {tensor.placements} hold a pending sum; redistribute it before saving")
    mesh, placements = tensor.device_mesh, tensor.placements
    if (coordinate := mesh.get_coordinate()) is None:
        return Box((), (0,))  # this rank is outside of the mesh
    # torch tells no place in public, and its private function is wrong where FSDP cuts the uneven rows that tensor parallelism has left.
    cuts = [None if (dim := getattr(each, "dim", None)) is None else (dim, getattr(each, "split_factor", 1)) for each in placements]
    if (box := cut_box(tuple(tensor.shape), mesh.shape, coordinate, cuts)) is None:
        raise ShardingError(f"{name}: by its placements {placements} a rank holds rows that lie apart; redistribute it before saving")
    return box


_boxes: WeakKeyDictionary[Any, dict[tuple[Any, ...], Box]] = WeakKeyDictionary()
"""Mesh -> box by layout: placements, global shape, and this process's coordinate in the mesh."""
