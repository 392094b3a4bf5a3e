"""What one rank says of one tensor: which global array it is a piece of, and where. Names follow Megatron-Core."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ckpt.box import Box, whole
from ckpt.errors import ShardingError


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
