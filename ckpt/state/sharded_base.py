"""What the wrapped values of a sharded state dict have in common. Users import these names from `ckpt.dist_checkpointing.mapping`."""

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
"""A nested state dict in which what is sharded is wrapped in a `ShardedBase`."""
CommonStateDict = dict[str, Any]
"""What is left of a sharded state dict without its wrapped values: equal on all ranks."""
ReplicaId = int | tuple[int, ...]
"""Which of several equal copies a value is: a number, or one per axis of the ranks' grid."""


class ShardedBase(ABC):
    """One rank's part of something that the ranks hold together.

    Attributes:
        key: name of the whole, the same on every rank that holds a part of it.
        data: this rank's part; None where only its place is meant.
        replica_id: see `is_main_replica`.
    """

    key: str
    data: object
    replica_id: ReplicaId

    def __post_init__(self) -> None:
        self.replica_id = _plain_replica_id(self.key, self.replica_id)

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Refuse attributes that contradict each other. Called on construction; call it again after changing one.

        Raises:
            ShapeMismatchError: sizes, numbers of dimensions or data types differ that should be equal.
            ShardingError: the place is not one that a part of the whole can have.
        """

    @abstractmethod
    def without_data(self) -> Self:
        """The same place, with `data` None."""


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Whether this is the copy that speaks for all equal ones: 0, or 0 along every axis.

    It is the caller's to see to it that of several equal parts exactly one is main; `ckpt.dist_checkpointing.validation` checks that.
    """
    if isinstance(replica_id, int):
        return replica_id == 0
    return all(number == 0 for number in replica_id)


def _plain_replica_id(key: str, given: object) -> ReplicaId:
    """A replica id as a Python number or a tuple of them, whichever library's numbers it is given in.

    Raises:
        ShardingError: it is neither a whole number nor a sequence of them.
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
