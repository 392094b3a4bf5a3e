"""Where a leaf lies: which global array it is a piece of, and where in it; by its own account, by its placements, or whole."""

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
    """The memory of this rank behind a leaf, in the shape of its box. See `address_of` for what it refuses.

    Whoever asks for many does so where gradients are off: to turn them off for each takes longer than the rest.
    """
    if isinstance(leaf, ShardedTensor):
        return _only_piece(leaf, leaf.key)[1]
    local = _local_part(leaf) if is_dtensor(leaf) else leaf
    return local.detach() if local.requires_grad else local


def _local_part(leaf: Any) -> torch.Tensor:
    if not torch.is_grad_enabled():
        local: torch.Tensor = leaf.to_local()
        return local
    with torch.no_grad():  # without which to_local() goes through autograd, at ten times the price
        return _local_part(leaf)


def address_of(leaf: torch.Tensor | ShardedTensor, name: str, known: DTensorBoxes | None = None) -> Address:
    """Where a leaf lies in its global array: by its own account, by its placements, or whole.

    Args:
        known: boxes of other leaves of the same state dict, where many are to be placed.

    Raises:
        ShardingError: a DTensor is a pending sum (Partial), which has no place in a checkpoint; a ShardedTensor has no data, or
            is flattened, and so more than one box.
    """
    return Address(name, *place_of(leaf, name, known))


def place_of(
    leaf: torch.Tensor | ShardedTensor, name: str, known: DTensorBoxes | None = None
) -> tuple[str, tuple[int, ...], Box]:
    """The same without the name, which is for messages here: data type, global shape and box."""
    if isinstance(leaf, ShardedTensor):
        return zarr_name(leaf.dtype), leaf.global_shape, _only_piece(leaf, name)[0]
    if is_dtensor(leaf):
        box = (DTensorBoxes() if known is None else known).box_of(leaf, name)
        return zarr_name(leaf.dtype), tuple(leaf.shape), box
    return _all_of(leaf.dtype, leaf.shape)


@lru_cache(maxsize=4096)
def _all_of(dtype: torch.dtype, shape: torch.Size) -> tuple[str, tuple[int, ...], Box]:
    """Where a tensor that is held whole lies, worked out once for all that are alike."""
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
    """The boxes of DTensors. Torch takes 0.3 ms to work one out, and a model's layers and their moments are laid out alike.

    Not to be kept: meshes are told apart by their identity.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, tuple[Any, ...], tuple[int, ...]], Box] = {}

    def box_of(self, tensor: torch.Tensor, name: str) -> Box:
        """The part of the global tensor that this rank holds. See `address_of` for what it refuses."""
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
