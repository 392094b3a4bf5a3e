"""Base class of the wrapped values in a sharded state dict. Users import these names from `ckpt.dist_checkpointing.mapping`."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from typing import Any, Self

import numpy as np
import torch

from ckpt.errors import ShardingError

StateDict = dict[str, Any]
"""A nested state dict of plain tensors and values."""
ShardedStateDict = dict[str, Any]
"""A nested state dict whose sharded values are wrapped in a `ShardedBase`."""
CommonStateDict = dict[str, Any]
"""The values of a sharded state dict that are not wrapped: equal on all ranks."""
ReplicaId = int | tuple[int, ...]
"""Number of a copy among equal copies: one number, or one per axis of the ranks' grid."""


class ShardedBase(ABC):
    """One rank's part of a global value.

    Attributes:
        key: name of the global value, equal on every rank that holds a part of it.
        data: this rank's part; None for metadata alone.
        replica_id: see `is_main_replica`.
    """

    key: str
    data: object
    replica_id: ReplicaId

    def __post_init__(self) -> None:
        self.replica_id = _plain_replica_id(self.key, self.replica_id)

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Check that the attributes fit each other. Called on construction; call it again after changing one.

        Raises:
            ShapeMismatchError: sizes, numbers of dimensions or data types differ that should be equal.
            ShardingError: the position is outside of the global value.
        """

    @abstractmethod
    def without_data(self) -> Self:
        """Return a copy with `data` None."""


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Whether a copy is the one to save: its id is 0, or 0 along every axis.

    Callers give exactly one of several equal parts such an id; `ckpt.dist_checkpointing.integrity` checks that.
    """
    if isinstance(replica_id, int):
        return replica_id == 0
    return all(number == 0 for number in replica_id)


def _plain_replica_id(key: str, given: object) -> ReplicaId:
    """Convert a replica id from NumPy's or torch's numbers to Python's.

    Raises:
        ShardingError: neither a whole number nor a sequence of them.
    """
    if type(given) is int:
        return given
    try:
        if isinstance(given, list | tuple) or (isinstance(given, np.ndarray | torch.Tensor) and given.ndim == 1):
            return tuple(int(operator.index(number)) for number in given)
        return int(operator.index(given))  # type: ignore[arg-type]
    except TypeError:
        raise ShardingError(
            f"{key}: replica_id {given!r} is neither a whole number nor a tuple of them; give 0 (or all zeros) for the main copy, "
            "and another number for each of the others"
        ) from None
