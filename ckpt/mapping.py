"""What one rank says of one tensor: which global array it is a piece of, and where. Names follow Megatron-Core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ckpt.box import Box, whole
from ckpt.dtypes import zarr_name
from ckpt.errors import ShardingError


@dataclass(frozen=True, slots=True)
class Address:
    """One leaf of one rank in the one global picture. What a sharing pattern computes, and all that a plan sees.

    The fourth part of an address, the replica id, is not stored: it is the position of a rank among those that hold an
    equal (name, box), and plan.py counts it there.

    Attributes:
        name: `<component>/<prefix><key>`, unique in a checkpoint.
        dtype: Zarr v3 data type name.
        global_shape: of the whole array, in elements.
        box: the part this rank holds, in global coordinates.
    """

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box


@dataclass(eq=False, slots=True)
class ShardedTensor:
    """A piece of a global tensor, as plain data: what a DTensor says, for code that has none.

    Attributes:
        key: name of the global tensor.
        data: the local piece.
        local_shape: of the piece.
        global_shape: of the whole tensor.
        global_offset: where the piece begins, in elements.
        replica_id: 0 (or all zeros) for the main copy; others hold equal bits.

    Source: the fields of the same name in megatron.core.dist_checkpointing.mapping.ShardedTensor.
    """

    key: str
    data: torch.Tensor
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: int | tuple[int, ...] = 0

    def __post_init__(self) -> None:
        if tuple(self.data.shape) != tuple(self.local_shape):
            raise ShardingError(
                f"{self.key}: data has shape {tuple(self.data.shape)}, local_shape says {self.local_shape}"
            )
        if not len(self.local_shape) == len(self.global_shape) == len(self.global_offset):
            raise ShardingError(
                f"{self.key}: local shape {self.local_shape}, global shape {self.global_shape} and global offset "
                f"{self.global_offset} differ in number of dimensions"
            )
        if not whole(tuple(self.global_shape)).contains(self.box):
            raise ShardingError(
                f"{self.key}: the piece of shape {self.local_shape} at {self.global_offset} leaves the global shape {self.global_shape}"
            )

    @property
    def box(self) -> Box:
        return Box(tuple(self.global_offset), tuple(self.local_shape))

    @classmethod
    def from_rank_offsets(
        cls, key: str, data: torch.Tensor, *rank_offsets: tuple[int, int, int], replica_id: int | tuple[int, ...] = 0
    ) -> ShardedTensor:
        """Describe a tensor cut evenly along some dimensions.

        Args:
            rank_offsets: (dim, this rank's number along it, number of ranks along it), each dim at most once.

        Raises:
            ShardingError: a dim is named twice, or a rank number is outside its count.

        Example:
            >>> ShardedTensor.from_rank_offsets("w", torch.zeros(2, 3), (0, 1, 4)).global_offset
            (2, 0)
        """
        global_shape = list(data.shape)
        offset = [0] * data.dim()
        seen: set[int] = set()
        for dim, number, count in rank_offsets:
            if dim in seen:
                raise ShardingError(f"{key}: dimension {dim} is given twice in rank_offsets")
            if not 0 <= number < count:
                raise ShardingError(f"{key}: rank offset {number} of dimension {dim} is outside of 0..{count - 1}")
            seen.add(dim)
            global_shape[dim] = data.shape[dim] * count
            offset[dim] = data.shape[dim] * number
        return cls(key, data, tuple(data.shape), tuple(global_shape), tuple(offset), replica_id)


def is_dtensor(tensor: object) -> bool:
    """Whether a tensor carries placements. Does not import torch.distributed.tensor where nobody has."""
    return isinstance(tensor, torch.Tensor) and hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def local_tensor(leaf: torch.Tensor | ShardedTensor) -> torch.Tensor:
    """The memory of this rank behind a leaf."""
    if isinstance(leaf, ShardedTensor):
        return leaf.data.detach()
    if is_dtensor(leaf):
        with torch.no_grad():  # without which to_local() goes through autograd, at ten times the price
            local: torch.Tensor = leaf.to_local()  # type: ignore[attr-defined]
        return local.detach()
    return leaf.detach()


def address_of(leaf: torch.Tensor | ShardedTensor, name: str, known: DTensorBoxes | None = None) -> Address:
    """Where a leaf lies in its global array: by its own account, by its placements, or whole.

    Args:
        known: boxes of other leaves of the same state dict, where many are to be placed.

    Raises:
        ShardingError: a DTensor is a pending sum (Partial), which has no place in a checkpoint.
    """
    if isinstance(leaf, ShardedTensor):
        return Address(name, zarr_name(leaf.data.dtype), tuple(leaf.global_shape), leaf.box)
    shape = tuple(leaf.shape)
    if is_dtensor(leaf):
        box = (DTensorBoxes() if known is None else known).box_of(leaf, name)
        return Address(name, zarr_name(leaf.dtype), shape, box)
    return Address(name, zarr_name(leaf.dtype), shape, whole(shape))


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
