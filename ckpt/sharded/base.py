"""What the wrapped values of a sharded state dict have in common. Users import these names from `ckpt.mapping`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

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

    It is the caller's to see to it that of several equal parts exactly one is main; `ckpt.validation` checks that.
    """
    if isinstance(replica_id, int):
        return replica_id == 0
    return all(number == 0 for number in replica_id)
