"""State components and process groups of a trainer that declares them.

Three forms, tried in this order:

- `get_state_components()` returns the components, and the optional `get_process_groups()` the groups that they name.
- `get_statefuls_for_save()`, the older form, returns {key: object} without sharing patterns. The optional
  `get_statefuls_for_load()` must return the same objects.
- A mapping {key: object} stands for the older form.

In the older form the sharing pattern of an object is its attribute `sharing_pattern` if it has one, `per_rank` for random
generators, and the caller's default for all others. In every form a bare optimizer takes the names of its parameters from the
component's module that holds them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Protocol

import torch

from ckpt.errors import ConfigurationError
from ckpt.state.abilities import Declared, offers
from ckpt.state.sharing import StateComponent, Stateful
from ckpt.state.statefuls import ModelState, OptimizerState, RNGState


class StateProvider(Protocol):
    """A trainer of the newer form."""

    def get_state_components(self) -> Sequence[StateComponent]: ...


class GroupProvider(Protocol):
    """A trainer with process groups, for components with sharing_pattern=per_group."""

    def get_process_groups(self) -> Mapping[str, Any]: ...


class StatefulProvider(Protocol):
    """A trainer of the older form."""

    def get_statefuls_for_save(self) -> Mapping[str, Stateful]: ...


class LoadStatefulProvider(Protocol):
    """A trainer of the older form with a method of its own for loads."""

    def get_statefuls_for_load(self) -> Mapping[str, Stateful]: ...


Provider = StateProvider | StatefulProvider | Mapping[str, Any]


def components_of(provider: Provider, *, legacy_pattern: str = "replicated") -> list[StateComponent]:
    """Return the state components of a trainer.

    Args:
        legacy_pattern: sharing pattern of objects of the older form that declare none.

    Raises:
        ConfigurationError: the provider has none of the three forms, or returns other objects to load than to save.
    """
    if offers(provider, StateProvider):
        return _with_names(list(provider.get_state_components()))
    return _with_names(
        [
            StateComponent(key, stateful, _pattern_of(key, stateful, legacy_pattern))
            for key, stateful in _statefuls_of(provider).items()
        ]
    )


def groups_of(provider: Provider) -> dict[str, Any]:
    """Return the process groups of a trainer; {} if it has none."""
    return dict(provider.get_process_groups()) if offers(provider, GroupProvider) else {}


def _statefuls_of(provider: object) -> Mapping[str, Any]:
    if isinstance(provider, Mapping):
        return provider
    if offers(provider, StatefulProvider):
        saved = provider.get_statefuls_for_save()
        loaded = provider.get_statefuls_for_load() if offers(provider, LoadStatefulProvider) else saved
        differing = sorted(key for key in {*saved, *loaded} if saved.get(key) is not loaded.get(key))
        if differing:
            raise ConfigurationError(
                f"{type(provider).__name__} gives other objects to load than to save under {', '.join(differing)}; a component is one "
                "object, so give the same, or offer get_state_components with required=False for what may be missing"
            )
        return saved
    raise ConfigurationError(
        f"{type(provider).__name__} does not say what it saves: it has neither get_state_components nor "
        "get_statefuls_for_save; give it one of them, or give a dictionary of key and object"
    )


def _pattern_of(key: str, stateful: Any, legacy_pattern: str) -> str:
    own = stateful.sharing_pattern if offers(stateful, Declared) else None
    if own is not None:
        return str(own.value if isinstance(own, Enum) else own)
    return "per_rank" if key == "rng" or isinstance(stateful, RNGState) else legacy_pattern


def _with_names(components: Sequence[StateComponent]) -> list[StateComponent]:
    """Wrap each bare optimizer with the modules that hold its parameters."""
    modules = {part.key: module for part in components if (module := module_of(part.stateful)) is not None}
    return [
        dataclasses.replace(component, stateful=OptimizerState(component.stateful, modules))
        if isinstance(component.stateful, torch.optim.Optimizer)
        else component
        for component in components
    ]


def module_of(stateful: Any) -> torch.nn.Module | None:
    """Return the module that an object is, or saves; None: neither."""
    if isinstance(stateful, ModelState):
        return stateful.module
    return stateful if isinstance(stateful, torch.nn.Module) else None
