"""What a run tells rollouts of itself: data in `rendezvous.json`, of which each makes a config by its own conf/."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from ckpt.errors import ConfigurationError
from recipes.support.cli import CONF
from recipes.support.config import AT_RUN_TIME, bind

ENGINE_AT_RUN_TIME = ("device", "colocated", "is_master")
"""The arguments that an engine is given only once the ranks run."""
_GIVEN = {"engine": ENGINE_AT_RUN_TIME, "model": AT_RUN_TIME["model"]}


@dataclass(frozen=True)
class RunOfRollouts:
    """What a rollout makes of a run.

    Attributes:
        engine, model: nodes with a `_target_`, which is that of this installation's conf/, or of the command line.
        seed: of the trainers.
        checkpoint_root: where the run's checkpoints are.
    """

    engine: dict[str, Any]
    model: dict[str, Any]
    seed: int
    checkpoint_root: str


def facts_of(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """What a run tells of itself: plain values, and for engine and model the name of the file in conf/ that has the rest."""
    return {
        "engine": _told("engine", cfg["engine"]),
        "model": _told("model", cfg["model"]),
        "seed": cfg["train"]["seed"],
        "checkpoint_root": cfg["checkpoint_root"],
    }


def run_of(facts: Mapping[str, Any], own: Mapping[str, Any], where: str) -> RunOfRollouts:
    """What a rollout makes of these facts.

    Args:
        own: `engine` and `model`, where the rollout's command line says what to use in place of the run's.
        where: the file with the facts.

    Raises:
        ConfigurationError: a fact is missing, or is none; or conf/ has no such choice, or no such key, here.
    """
    seed, root = facts.get("seed"), facts.get("checkpoint_root")
    if type(seed) is not int or not isinstance(root, str):
        raise ConfigurationError(
            f"{where}: expected a number as seed and a path as checkpoint_root, found {seed!r} and {root!r}"
        )
    engine, model = (own[group] or _made_of(facts.get(group), group, where) for group in ("engine", "model"))
    return RunOfRollouts(engine, model, seed, root)


def _told(group: str, node: Mapping[str, Any]) -> dict[str, Any]:
    choice = next((name for name, known in _choices(group).items() if known["_target_"] == node["_target_"]), None)
    return {"choice": choice, "values": {key: value for key, value in node.items() if not key.startswith("_")}}


def _made_of(told: Any, group: str, where: str) -> dict[str, Any]:
    """The node that is meant: of conf/, but for the values, which are held against its keys, and the types that its target takes."""
    choices = _choices(group)
    choice, values = (told.get("choice"), told.get("values")) if isinstance(told, dict) else (None, None)
    if choice not in choices or not isinstance(values, dict):
        raise ConfigurationError(
            f"{where}: the run's {group} is none of this installation's, {', '.join(choices)}: give {group}=<choice> here, too, with "
            "all keys that the run was given"
        )
    for key, value in values.items():
        if key not in choices[choice] or not _is_plain(value):
            raise ConfigurationError(f"{where}: {group}.{key} is no plain value of a key of {group}={choice}")
    node: dict[str, Any] = choices[choice] | values
    bind(node, group, _GIVEN[group])
    return node


def _is_plain(value: Any) -> bool:
    """Whether it is a value, or a list of values, that OmegaConf takes as it is."""
    if isinstance(value, list):
        return all(_is_plain(one) and not isinstance(one, list) for one in value)
    return value is None or isinstance(value, (bool, int, float)) or (isinstance(value, str) and "${" not in value)


def _choices(group: str) -> dict[str, dict[str, Any]]:
    files = sorted((CONF / group).glob("*.yaml"))
    return {file.stem: OmegaConf.to_container(OmegaConf.load(file), resolve=False) for file in files}  # type: ignore[misc]
