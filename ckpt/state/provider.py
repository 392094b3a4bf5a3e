"""Trainers that describe themselves: what they save, and the process groups that this refers to.

Three forms, tried in this order:

- `get_state_components()` returns the components, and `get_process_groups()`, where there is one, the groups they name.
- `get_statefuls_for_save()`, the older form, returns {key: object} and says nothing of ranks. `get_statefuls_for_load()`, where
  there is one, must return the same objects.
- A mapping {key: object} stands for the older form.

In the older form the sharing pattern of an object is its own attribute `sharing_pattern` if it has one, `per_rank` for random
generators, and what the caller says for all others. In every form a bare optimizer takes the names of its parameters from
the module, among the other components, that holds them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, Protocol

import torch

from ckpt.errors import ConfigurationError
from ckpt.state.abilities import Declared
from ckpt.state.sharing import StateComponent, Stateful
from ckpt.state.statefuls import ModelState, OptimizerState, RNGState


class StateProvider(Protocol):
    """A trainer of the newer form. `get_process_groups` may be left out where no component is per_group."""

    def get_state_components(self) -> Sequence[StateComponent]: ...

    def get_process_groups(self) -> Mapping[str, Any]: ...


class StatefulProvider(Protocol):
    """A trainer of the older form."""

    def get_statefuls_for_save(self) -> Mapping[str, Stateful]: ...

    def get_statefuls_for_load(self) -> Mapping[str, Stateful]: ...


Provider = StateProvider | StatefulProvider | Mapping[str, Any]


def components_of(provider: Provider, *, legacy_pattern: str = "replicated") -> list[StateComponent]:
    """Return what a trainer saves, as components.

    Args:
        legacy_pattern: sharing pattern of objects of the older form that say nothing of it.

    Raises:
        ConfigurationError: the provider has none of the three forms, or gives other objects to load than to save.
    """
    new = getattr(provider, "get_state_components", None)
    if new is not None:
        return _with_names(list(new()))
    return _with_names(
        [
            StateComponent(key, stateful, _pattern_of(key, stateful, legacy_pattern))
            for key, stateful in _statefuls_of(provider).items()
        ]
    )


def groups_of(provider: Provider) -> dict[str, Any]:
    """Return the process groups a trainer names; {} if it names none."""
    groups = getattr(provider, "get_process_groups", None)
    return dict(groups()) if groups is not None else {}


def _statefuls_of(provider: Provider) -> Mapping[str, Any]:
    if isinstance(provider, Mapping):
        return provider
    to_save = getattr(provider, "get_statefuls_for_save", None)
    if to_save is None:
        raise ConfigurationError(
            f"{type(provider).__name__} does not say what it saves: it has neither get_state_components nor "
            "get_statefuls_for_save; give it one of them, or give a dictionary of key and object"
        )
    saved: Mapping[str, Any] = to_save()
    to_load = getattr(provider, "get_statefuls_for_load", None)
    loaded: Mapping[str, Any] = to_load() if to_load is not None else saved
    differing = sorted(key for key in {*saved, *loaded} if saved.get(key) is not loaded.get(key))
    if differing:
        raise ConfigurationError(
            f"{type(provider).__name__} gives other objects to load than to save under {', '.join(differing)}; a component is one "
            "object, so give the same, or offer get_state_components with required=False for what may be missing"
        )
    return saved


def _pattern_of(key: str, stateful: Any, legacy_pattern: str) -> str:
    own = stateful.sharing_pattern if isinstance(stateful, Declared) else None
    if own is not None:
        return str(own.value if isinstance(own, Enum) else own)
    return "per_rank" if key == "rng" or isinstance(stateful, RNGState) else legacy_pattern


def _with_names(components: Sequence[StateComponent]) -> list[StateComponent]:
    """Let each bare optimizer name its parameters by the module that holds all of them."""
    modules = [_module_of(component.stateful) for component in components]
    return [
        dataclasses.replace(component, stateful=OptimizerState(component.stateful, owner))
        if isinstance(component.stateful, torch.optim.Optimizer)
        and (owner := _owner(component.stateful, [module for module in modules if module is not None])) is not None
        else component
        for component in components
    ]


def _module_of(stateful: Any) -> torch.nn.Module | None:
    if isinstance(stateful, ModelState):
        return stateful.module
    return stateful if isinstance(stateful, torch.nn.Module) else None


def _owner(optimizer: torch.optim.Optimizer, modules: Sequence[torch.nn.Module]) -> torch.nn.Module | None:
    wanted = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    return next((module for module in modules if wanted <= set(module.parameters())), None)
