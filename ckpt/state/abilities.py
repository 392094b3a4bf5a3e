"""Optional methods and attributes of a component's object, beside `state_dict` and `load_state_dict`, as typed protocols.

`refusing_state` words what the objects of this package cannot load.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeGuard, TypeVar

from ckpt.errors import CheckpointError, CorruptCheckpointError, sentence
from ckpt.format.manifest import ArrayEntry

_Ability = TypeVar("_Ability")


def offers(stateful: object, ability: Callable[..., _Ability]) -> TypeGuard[_Ability]:
    """Whether an object has all methods and attributes of a protocol, and none of them is None.

    Unlike `isinstance` from Python 3.12 on, it sees those that an object hands on to another by `__getattr__`.
    """
    names = {*vars(ability), *inspect.get_annotations(ability)}
    return all(getattr(stateful, name, None) is not None for name in names if not name.startswith("_"))


class Prepared(Protocol):
    """Loads exactly the keys of its own `state_dict()`. An object without it receives all saved keys."""

    def prepare_to_load(self, saved: Mapping[str, ArrayEntry]) -> None:
        """Make the tensors for a load to fill. Called on every rank before `state_dict()`, with the saved keys."""


class PreparedFrom(Protocol):
    """Decides from all that was saved what a load fills, and how its tensors are named."""

    def prepare_from(
        self,
        saved: Mapping[str, ArrayEntry],
        plain: Mapping[str, Any],
        paths: Mapping[str, tuple[Any, ...]],
        *,
        cast: bool = False,
    ) -> None:
        """Make the tensors for a load to fill. Called on every rank before `state_dict()`.

        Args:
            saved: joined key -> saved tensor.
            plain: joined key -> plain value.
            paths: joined key -> path in the nested state dict; of tensors only those in `paths_to_save`.
            cast: the load converts state of this object that would otherwise keep the data type it was saved in.
        """

    def paths_to_save(self, tensors: Collection[str], paths: Mapping[str, tuple[Any, ...]]) -> Collection[str]:
        """Return the joined keys of the tensors whose paths, or whose order among others, the object does not find by itself.

        Args:
            tensors: joined keys of all tensors.
            paths: joined key -> path in the nested state dict, of all leaves, in its order.
        """


class Forgetful(Protocol):
    """Discards what it prepared for a load that failed."""

    def forget_prepared(self) -> None:
        """Undo `Prepared.prepare_to_load`. Idempotent."""


class Elastic(Protocol):
    """Adapts its state to a change of ranks: `elastic` is "derive" or "repartition".

    A load first calls `fits` on every rank. If all return True, and the saved copies belong to the same ranks, nodes or groups
    under the same pattern, `load_state_dict` receives this rank's copy. Otherwise every rank calls `load_changed` instead.
    Both receive nested dictionaries, as `state_dict` returned them; tensors of a `Prepared` object stand under their joined keys.
    """

    def fits(self, saved: Mapping[str, Any]) -> bool:
        """Whether this rank can load its own saved copy unchanged. Changes nothing; other ranks may answer differently.

        Args:
            saved: plain values of the copy, without tensors; of the only copy if all ranks share one.
        """

    def load_changed(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Make this rank's state from the saved copies of other ranks. An exception refuses the load on every rank.

        Args:
            saved: copies with tensors (new ones, on the host) and plain values, in the order of the ranks, nodes or group
                instances that saved them: all of them for "repartition", the first one alone for "derive".
        """


class NamedFromPositions(Protocol):
    """Converts old states, which are keyed by the positions of parameters."""

    def named_from_positions(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a pickled file keyed by parameter names."""


class RestoredLast(Protocol):
    """Declares when a load restores it.

    Attributes:
        restored_last: True: after all others, such as random generators.
    """

    restored_last: bool


class HasOptimizer(Protocol):
    """Contains an optimizer whose steps a save must hold back.

    Attributes:
        optimizer: of torch, or an object that contains one itself.
    """

    optimizer: Any


class RankPrivate(Protocol):
    """Declares entries that differ between ranks in a state that is otherwise equal.

    Attributes:
        rank_private: patterns of joined keys. See `ckpt.state.replication.private_keys`.
    """

    rank_private: Sequence[str]


class Declared(Protocol):
    """Declares its own sharing pattern.

    Attributes:
        sharing_pattern: one of `SharingPattern`, or its value; None: not declared.
    """

    sharing_pattern: Any


def takes_a_part(stateful: object) -> bool:
    """Whether an object says what a load gives it. Others get whatever was saved."""
    return offers(stateful, PreparedFrom) or offers(stateful, Prepared)


def tied_names(stateful: object) -> Mapping[str, str]:
    """Return the object's `tied_names`, alias -> name under which the tensor is saved; {} if it is None or there is none."""
    return getattr(stateful, "tied_names", None) or {}


@contextmanager
def refusing_state(what: str) -> Iterator[None]:
    """Turn errors of applying a saved state into a `CorruptCheckpointError`: this package wrote it, so it must be damaged."""
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RuntimeError) as error:
        raise CorruptCheckpointError(f"{what} cannot load the saved state: {sentence(error)}") from error
