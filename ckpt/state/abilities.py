"""What an object of a component may offer beside `state_dict` and `load_state_dict`. Whoever asks for an ability asks here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from ckpt.format.manifest import ArrayEntry


@runtime_checkable
class Prepared(Protocol):
    """It knows exactly which keys it wants. Others are given whatever was saved."""

    def prepare_to_load(self, saved: Mapping[str, ArrayEntry]) -> None:
        """Make the tensors that a load will fill. Called on every rank before `state_dict()`, with the saved keys."""


@runtime_checkable
class Forgetful(Protocol):
    """It has made something for a load that does not come."""

    def forget_prepared(self) -> None:
        """Undo `Prepared.prepare_to_load`. May be called without need."""


@runtime_checkable
class Elastic(Protocol):
    """It can go on where it was saved by other ranks than these: `elastic` is "derive" or "repartition".

    A load asks `fits` first, on every rank. If all say yes, and the saved copies belong to the same ranks, nodes or groups
    under the same pattern, `load_state_dict` gets this rank's copy, as ever. If not, every rank gets `load_changed`, and no
    `load_state_dict`. Both see nested dictionaries, as `state_dict` gave them; of a `Prepared` object the tensors stand under
    their joined keys.
    """

    def fits(self, saved: Mapping[str, Any]) -> bool:
        """Whether this rank may go on with its own saved copy as it stands. Changes nothing; other ranks may say no.

        Args:
            saved: the plain values of the copy, without its tensors; of the only copy where all ranks share one.
        """

    def load_changed(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Make this rank's state from what others saved, or raise, which refuses the load on every rank.

        Args:
            saved: the copies, tensors (new ones, on the host) and plain values, in the order of the ranks, nodes or group
                instances that saved them: all of them for "repartition", the first one alone for "derive".
        """


@runtime_checkable
class NamedFromPositions(Protocol):
    """It reads old states, which go by the positions of parameters."""

    def named_from_positions(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a pickled file under the names of parameters."""


@runtime_checkable
class Tied(Protocol):
    """It says which names stand for one tensor.

    Attributes:
        tied_names: alias -> the name under which the tensor is saved; None: there are none.
    """

    tied_names: Mapping[str, str] | None


@runtime_checkable
class RestoredLast(Protocol):
    """It has a say in when it is restored.

    Attributes:
        restored_last: after all others, as random generators are.
    """

    restored_last: bool


@runtime_checkable
class RankPrivate(Protocol):
    """It keeps entries of each rank's own, though as a whole it is the same everywhere.

    Attributes:
        rank_private: patterns of joined keys. See `ckpt.state.replication.private_keys`.
    """

    rank_private: Sequence[str]


@runtime_checkable
class Declared(Protocol):
    """It says itself who holds it.

    Attributes:
        sharing_pattern: one of `SharingPattern`, or its value; None: it does not say.
    """

    sharing_pattern: Any


def tied_names(stateful: object) -> Mapping[str, str]:
    """Return alias -> the name under which a tensor is saved, of an object that says so."""
    return (stateful.tied_names or {}) if isinstance(stateful, Tied) else {}
