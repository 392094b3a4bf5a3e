"""Position of a leaf in its global array: from a ShardedTensor's fields, from a DTensor's placements, or the whole array."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from ckpt.errors import ShardingError
from ckpt.format.box import Box, whole
from ckpt.format.dtypes import is_dtensor, zarr_name
from ckpt.planning.tables import Address
from ckpt.state.sharded_tensor import ShardedTensor


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
        local: torch.Tensor = leaf.to_local()
        return local
    with torch.no_grad():  # otherwise to_local() goes through autograd, and takes ten times as long
        return _local_part(leaf)


def address_of(leaf: torch.Tensor | ShardedTensor, name: str, known: DTensorBoxes | None = None) -> Address:
    """Return the address of a leaf in its global array.

    Args:
        known: cache of boxes, for many leaves of one state dict.

    Raises:
        ShardingError: a DTensor holds a pending sum (Partial), which cannot be saved; a ShardedTensor has no data, or is flattened
            and therefore more than one box.
    """
    return Address(name, *place_of(leaf, name, known))


def place_of(
    leaf: torch.Tensor | ShardedTensor, name: str, known: DTensorBoxes | None = None
) -> tuple[str, tuple[int, ...], Box]:
    """Return (data type, global shape, box) of a leaf. The name is for messages. Arguments and errors as `address_of`."""
    if isinstance(leaf, ShardedTensor):
        return zarr_name(leaf.dtype), leaf.global_shape, _only_piece(leaf, name)[0]
    if is_dtensor(leaf):
        box = (DTensorBoxes() if known is None else known).box_of(leaf, name)
        return zarr_name(leaf.dtype), tuple(leaf.shape), box
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


class DTensorBoxes:
    """Cache of DTensor boxes. Torch takes 0.3 ms to compute one, and the layers of a model share layouts.

    For one state dict only: meshes are identified by id().
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, tuple[Any, ...], tuple[int, ...]], Box] = {}

    def box_of(self, tensor: torch.Tensor, name: str) -> Box:
        """Return this rank's box of the global tensor. Raises as `address_of`."""
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        assert isinstance(tensor, DTensor)
        layout = (id(tensor.device_mesh), tensor.placements, tuple(tensor.shape))
        if layout not in self._known:
            if any(placement.is_partial() for placement in tensor.placements):
                raise ShardingError(
                    f"{name}: placements {tensor.placements} hold a pending sum; redistribute it before saving"
                )
            shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            self._known[layout] = Box(tuple(offset), tuple(shape))
        box, local = self._known[layout], tuple(local_tensor(tensor).shape)
        if local != box.shape:
            raise ShardingError(f"{name}: the local tensor has shape {local}, its placements say {box.shape}")
        return box
