"""Hydra: `register` stores the library's choices as structured configs, which an application of yours composes by name.

    ckpt            zarr, tensorstore, kimi-engine: the backend
    strategy        direct, two-stage: the loading strategy
    device          its type, as `Device.of_type` knows it
    save            sync, async: `SaveSettings`
    checkpointer    default: makes a `Checkpointer` of these four, when it is called with the folder and the objects
    coordinator     default: makes a `CheckpointCoordinator` of these four, when it is called with components, groups and topology

The keys are the parameters of the classes, with their types, which Hydra checks, and their defaults.
"""

from __future__ import annotations

import inspect
from dataclasses import field, make_dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ckpt.api.checkpointer import Checkpointer
from ckpt.backends.registry import BACKENDS
from ckpt.coordinator import CheckpointCoordinator
from ckpt.memory.device import KNOWN, Device
from ckpt.run.arguments import STRATEGIES
from ckpt.saving.save_settings import MODES, SaveSettings


def register() -> None:
    """Store all `choices` in Hydra's ConfigStore; call it before `hydra.main`."""
    for group, nodes in choices().items():
        for name, node in nodes.items():
            ConfigStore.instance().store(name=name, node=node, group=group, provider="ckpt")


def choices() -> dict[str, dict[str, type]]:
    """Return group -> name -> the dataclass of the choice, which `instantiate` takes, as do the functions of hydra-zen."""
    return {
        "ckpt": {name: config_of(type(make())) for name, make in BACKENDS.items()},
        "strategy": {name: config_of(kind) for name, kind in STRATEGIES.items()},
        "device": {
            type: config_of(Device, type=type, collectives=moves, plugin=plugin)
            for type, (moves, plugin) in KNOWN.items()
        },
        "save": {mode: config_of(SaveSettings, mode=mode) for mode in MODES},
        "checkpointer": {
            "default": config_of(
                Checkpointer, True, format="${ckpt}", load="${strategy}", device="${device}", mode="${save}"
            )
        },
        "coordinator": {
            "default": config_of(
                CheckpointCoordinator,
                True,
                output_dir=MISSING,
                backend="${ckpt}",
                strategy="${strategy}",
                device="${device}",
                saves="${save}",
            )
        },
    }


def config_of(target: type, is_partial: bool = False, **values: Any) -> type:
    """Return a dataclass of a class: `_target_`, and its parameters with their types and defaults.

    Parameters without a default are given when it is called, as are functions, which no config holds.

    Args:
        is_partial: `instantiate` returns a `functools.partial`, for arguments that exist only at run time.
        values: in place of defaults; of parameters that have none, too.
    """
    own = {"_target_": f"{target.__module__}.{target.__qualname__}", "_convert_": "all", "_partial_": is_partial}
    fields: list[tuple[str, Any, Any]] = [(name, type(value), field(default=value)) for name, value in own.items()]
    for name, parameter in inspect.signature(target, eval_str=True).parameters.items():
        value = values.get(name, parameter.default)
        if value is not parameter.empty and not callable(value) and parameter.kind is not parameter.POSITIONAL_ONLY:
            fields.append((name, _known(parameter.annotation, value), field(default=value)))
    return make_dataclass(f"{target.__name__}Config", fields)


def _known(hint: Any, value: Any) -> Any:
    """A type, if OmegaConf has nodes of it; else Any."""
    try:
        OmegaConf.structured(make_dataclass("Field", [("value", hint, field(default=value))]))
    except (OmegaConfBaseException, TypeError):
        return Any
    return hint
