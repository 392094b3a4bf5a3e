"""Megatron-Core's interfaces of strategies that save and load the common and the sharded part of a state, and their registry.

A format is a backend and its version; a strategy is an algorithm that writes or reads one. The registry has the default strategy of
each format; a backend registers its strategies, by a named call, when its format is first requested.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from enum import Enum
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, overload

from ckpt.errors import ConfigurationError, importing
from ckpt.format.places import Place
from ckpt.saving.background.async_utils import AsyncCallsQueue, AsyncRequest

if TYPE_CHECKING:
    from ckpt.dist_checkpointing.mapping import ShardedStateDict, StateDict


class StrategyAction(Enum):
    """An action of a strategy on one part of a state."""

    LOAD_COMMON = "load_common"
    LOAD_SHARDED = "load_sharded"
    SAVE_COMMON = "save_common"
    SAVE_SHARDED = "save_sharded"


# Loading


class LoadStrategyBase(ABC):
    """Reads checkpoints of some formats, and refuses the others."""

    @abstractmethod
    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Require that this strategy reads checkpoints of `loaded_backend`.

        Raises:
            ConfigurationError: it does not; the same on all ranks, which read one `metadata.json`.
        """

    @abstractmethod
    def check_version_compatibility(self, loaded_version: int) -> None:
        """Require that this strategy reads this version of its backend's format.

        Raises:
            ConfigurationError: it does not.
        """

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether it loads `ShardedObject`s too."""
        return False


class DeclaredFormats(LoadStrategyBase):
    """The checks of a load strategy whose class lists the formats that it reads. Name it first among the bases.

    Attributes:
        backends: names of backends whose checkpoints it reads.
        versions: of their formats.

    Example:
        >>> class Load(DeclaredFormats, LoadShardedStrategy):
        ...     backends, versions = ("zarr", "tensorstore"), (1,)
    """

    backends: ClassVar[tuple[str, ...]]
    versions: ClassVar[tuple[int, ...]]

    def check_backend_compatibility(
        self, loaded_backend: str | None = None, *, loaded_version: str | None = None
    ) -> None:
        """Require that this strategy reads checkpoints of the backend.

        Args:
            loaded_backend: name of the backend.
            loaded_version: the same; Megatron-Core's load strategies name this parameter so. Give one of the two.

        Raises:
            ConfigurationError: it does not; or not exactly one name is given.
        """
        given = [name for name in (loaded_backend, loaded_version) if name is not None]
        if len(given) != 1:
            raise ConfigurationError(
                f"check_backend_compatibility takes the name of one backend, as loaded_backend or as loaded_version; {len(given)} are given"
            )
        self._check("backend", given[0], self.backends)

    def check_version_compatibility(self, loaded_version: int) -> None:
        self._check("version", loaded_version, self.versions)

    def _check(self, what: str, found: str | int, readable: Sequence[str | int]) -> None:
        if found not in readable:
            raise ConfigurationError(
                f"{type(self).__name__}: the checkpoint has {what} {found!r}, this strategy reads {what} "
                f"{' or '.join(map(repr, readable))}; load it with a strategy that reads {what} {found!r}"
            )


class LoadCommonStrategy(LoadStrategyBase):
    """Loads the common part, equal on all ranks: plain values, and tensors that are not sharded."""

    @abstractmethod
    def load_common(self, checkpoint_dir: Place) -> StateDict:
        """Return the common part."""

    @abstractmethod
    def load_sharded_objects(self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: Place) -> StateDict:
        """Replace each `ShardedObject` by the saved object, and return the state dict."""

    def load_sharded_metadata(self, checkpoint_dir: Place) -> ShardedStateDict:
        """Return unique key -> `ShardedObject` without data, of the checkpoint; empty if it does not handle them."""
        if self.can_handle_sharded_objects:
            raise NotImplementedError(f"{type(self).__name__} loads sharded objects, and does not list them")
        return {}


class LoadShardedStrategy(LoadStrategyBase):
    """Loads the sharded part: the shards that each rank requests, independent of the saving ranks."""

    @abstractmethod
    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Place) -> StateDict:
        """Replace each `ShardedTensor` by the loaded tensor, and return the state dict. Collective."""

    @abstractmethod
    def load_tensors_metadata(self, checkpoint_dir: Place) -> ShardedStateDict:
        """Return key -> `ShardedTensor` of the tensors in the checkpoint.

        Only its global shape and data type are meaningful: it has no data and is not cut.
        """

    def load_sharded_metadata(self, checkpoint_dir: Place) -> ShardedStateDict:
        """Return the tensors and, if it handles them, the objects of the checkpoint, by key and without data."""
        if self.can_handle_sharded_objects:
            raise NotImplementedError(f"{type(self).__name__} loads sharded objects, and does not list them")
        return self.load_tensors_metadata(checkpoint_dir)

    def remove_sharded_tensors(self, checkpoint_dir: str | Place, key_prefix: str) -> None:
        """Remove from the checkpoint every tensor whose key begins with `key_prefix`. Collective."""
        raise NotImplementedError(f"{type(self).__name__} cannot remove tensors from {checkpoint_dir}")


# Saving


class SaveStrategyBase:
    """Writes checkpoints of one format.

    Attributes:
        backend, version: of the format, recorded in the checkpoint.
    """

    def __init__(self, backend: str, version: int) -> None:
        self.backend = backend
        self.version = version

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether it saves `ShardedObject`s too."""
        return False

    @property
    def described(self) -> str:
        """A description that must be equal on all ranks of a save. A class with settings includes them."""
        return str(self)

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.backend}, {self.version})"


class SaveCommonStrategy(SaveStrategyBase, ABC):
    """Saves the common part, equal on all ranks."""

    @abstractmethod
    def save_common(self, common_state_dict: StateDict, checkpoint_dir: Place) -> None:
        """Write the common part once. Collective."""

    def save_sharded_objects(self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: Place) -> None:
        """Write each `ShardedObject` whose main replica this rank holds."""
        raise NotImplementedError(f"{self} does not save sharded objects")


class SaveShardedStrategy(SaveStrategyBase, ABC):
    """Saves the sharded part."""

    @abstractmethod
    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Place) -> None:
        """Write the shards; when it returns, those of all ranks are written. Collective."""


class AsyncSaveShardedStrategy(SaveShardedStrategy):
    """Saves the sharded part in the background, or at once."""

    @abstractmethod
    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Place) -> AsyncRequest:
        """Copy the tensors, so that training may change them, and return the rest as a request for the caller to schedule. Collective."""

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Place) -> None:
        self.async_save(sharded_state_dict, checkpoint_dir).execute_sync()


# The registry

Strategy: TypeAlias = LoadStrategyBase | SaveStrategyBase

_KINDS: Mapping[StrategyAction, type[Strategy]] = {
    StrategyAction.LOAD_COMMON: LoadCommonStrategy,
    StrategyAction.LOAD_SHARDED: LoadShardedStrategy,
    StrategyAction.SAVE_COMMON: SaveCommonStrategy,
    StrategyAction.SAVE_SHARDED: SaveShardedStrategy,
}

_COMMON = "ckpt.dist_checkpointing.strategies.common:register_default_common_strategies"
_TENSORSTORE = "ckpt.dist_checkpointing.strategies.tensorstore:register_default_tensorstore_strategies"
_TORCH = "ckpt.dist_checkpointing.strategies.torch:register_default_torch_strategies"
_ZARR = "ckpt.dist_checkpointing.strategies.zarr:register_default_zarr_strategies"

_FILLED_BY: dict[str, tuple[str, ...]] = {
    "json": (_COMMON,),
    "tensorstore": (_TENSORSTORE,),
    "torch": (_COMMON,),
    "torch_dist": (_TORCH,),
    "zarr": (_ZARR, _TENSORSTORE),
}
"""Backend -> the functions that register its strategies, each imported when the backend is first requested."""

default_strategies: dict[str, dict[tuple[str, int], Strategy]] = {action.value: {} for action in StrategyAction}

async_calls = AsyncCallsQueue()
"""A queue for programs that import upstream's. This library schedules nothing in it."""


def register_default_strategy(action: StrategyAction, backend: str, version: int, strategy: Strategy) -> None:
    """Register the default strategy for `action` on this format. A later registration replaces an earlier one.

    Raises:
        ConfigurationError: it is not a strategy for this action.
    """
    if not isinstance(strategy, _KINDS[action]):
        raise ConfigurationError(
            f"{_named(strategy)} cannot be the default strategy for {_triple(action, backend, version)}; give an instance of a "
            f"{_KINDS[action].__name__}"
        )
    default_strategies[action.value][backend, version] = strategy


@overload
def get_default_strategy(
    action: Literal[StrategyAction.LOAD_COMMON], backend: str, version: int
) -> LoadCommonStrategy: ...
@overload
def get_default_strategy(
    action: Literal[StrategyAction.LOAD_SHARDED], backend: str, version: int
) -> LoadShardedStrategy: ...
@overload
def get_default_strategy(
    action: Literal[StrategyAction.SAVE_COMMON], backend: str, version: int
) -> SaveCommonStrategy: ...
@overload
def get_default_strategy(
    action: Literal[StrategyAction.SAVE_SHARDED], backend: str, version: int
) -> SaveShardedStrategy: ...
@overload
def get_default_strategy(action: StrategyAction, backend: str, version: int) -> Strategy: ...
def get_default_strategy(action: StrategyAction, backend: str, version: int) -> Strategy:
    """Return the default strategy for `action` on this format; import those of the backend if none is registered.

    Raises:
        ConfigurationError: none is registered, or a library that it needs cannot be imported.
    """
    registered = default_strategies[action.value]
    if (backend, version) not in registered:
        with importing(f"the default strategy for {_triple(action, backend, version)}"):
            _register_defaults_of(backend)
    if (backend, version) not in registered:
        known = ", ".join(_triple(action, *triple) for triple in sorted(registered)) or "none"
        raise ConfigurationError(
            f"there is no default strategy for {_triple(action, backend, version)}; registered are {known}; the "
            f"backends {', '.join(_FILLED_BY)} register theirs when asked for: give a strategy, or call register_default_strategy first"
        )
    return registered[backend, version]


def chosen_strategy(given: object, action: StrategyAction) -> Any:
    """Return the caller's strategy, or the registered one for a format.

    Args:
        given: an object of the action's class, or (backend, version).

    Raises:
        ConfigurationError: neither of the two, or no strategy is registered for the format.
    """
    if isinstance(given, tuple):
        return get_default_strategy(action, *given)
    if not isinstance(given, _KINDS[action]):
        _, _, part = action.value.partition("_")
        raise ConfigurationError(
            f"{part}_strategy: {_named(given)} is no {_KINDS[action].__name__}; give an object of that class, or (backend, version) of a "
            "registered one"
        )
    return given


def _named(given: object) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"


def _register_defaults_of(backend: str) -> None:
    """Have the backend register its strategies; those registered before stay."""
    chosen = {action: dict(registered) for action, registered in default_strategies.items()}
    try:
        for place in _FILLED_BY.get(backend, ()):
            resolve_name(place)()
    finally:
        for action, registered in chosen.items():
            default_strategies[action].update(registered)


def _triple(action: StrategyAction, backend: str, version: int) -> str:
    return f"({action.value}, {backend}, {version})"
