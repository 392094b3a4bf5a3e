"""The facts of a run in `rendezvous.json`, as data. A rollout that joins makes its config from them and from its own conf/."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from ckpt.errors import ConfigurationError
from recipes.support import CONF
from recipes.support.config import OFFERED, bind

ENGINE_AT_RUN_TIME = ("device", "colocated", "is_master")
"""The arguments that an engine gets when the ranks run."""
_GIVEN = {"engine": ENGINE_AT_RUN_TIME}


@dataclass(frozen=True)
class RunOfRollouts:
    """The config of a rollout that joins a run.

    Attributes:
        engine, model: nodes whose `_target_` is from this installation's conf/, or from the command line.
        seed: of the trainers.
        checkpoint_root: of the run.
    """

    engine: dict[str, Any]
    model: dict[str, Any]
    seed: int
    checkpoint_root: str


def facts_of(cfg: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a run: plain values; of engine and model the file in conf/ that names the class."""
    return {
        "engine": _described("engine", cfg["engine"]),
        "model": _described("model", cfg["model"]),
        "seed": cfg["train"]["seed"],
        "checkpoint_root": cfg["checkpoint_root"],
    }


def run_of(facts: Mapping[str, Any], own: Mapping[str, Any], where: str) -> RunOfRollouts:
    """Return the config of a rollout from a run's facts.

    Args:
        own: `engine` and `model` of the rollout's command line, which replace the run's; None: the run's.
        where: the file with the facts, for messages.

    Raises:
        ConfigurationError: a fact is missing or has a wrong type, or this conf/ lacks the choice or a key.
    """
    seed, root = facts.get("seed"), facts.get("checkpoint_root")
    if type(seed) is not int or not isinstance(root, str):
        raise ConfigurationError(f"{where}: seed={seed!r} is no number, or checkpoint_root={root!r} no path")
    engine, model = (own[group] or _node_of(facts.get(group), group, where) for group in ("engine", "model"))
    return RunOfRollouts(engine, model, seed, root)


def _described(group: str, node: Mapping[str, Any]) -> dict[str, Any]:
    choice = next((name for name, known in _choices(group).items() if known["_target_"] == node["_target_"]), None)
    return {"choice": choice, "values": {key: value for key, value in node.items() if not key.startswith("_")}}


def _node_of(described: Any, group: str, where: str) -> dict[str, Any]:
    """Return the node of conf/ with the run's values, whose keys and types are checked."""
    choices = _choices(group)
    choice, values = (described.get("choice"), described.get("values")) if isinstance(described, dict) else (None, None)
    if choice not in choices or not isinstance(values, dict):
        raise ConfigurationError(
            f"{where}: the run's {group} is none of this installation's, {', '.join(choices)}: give {group}=<choice> with all its keys"
        )
    for key, value in values.items():
        if key not in choices[choice] or not _is_plain(value):
            raise ConfigurationError(f"{where}: {group}.{key} is no plain value of a key of {group}={choice}")
    node: dict[str, Any] = choices[choice] | values
    bind(node, group, _GIVEN.get(group, ()), OFFERED.get(group, ()))
    return node


def _is_plain(value: Any) -> bool:
    """Whether it is a plain value, or a list of plain values, without interpolation."""
    if isinstance(value, list):
        return all(_is_plain(item) and not isinstance(item, list) for item in value)
    return value is None or isinstance(value, (bool, int, float)) or (isinstance(value, str) and "${" not in value)


def _choices(group: str) -> dict[str, dict[str, Any]]:
    files = sorted((CONF / group).glob("*.yaml"))
    return {file.stem: OmegaConf.to_container(OmegaConf.load(file), resolve=False) for file in files}  # type: ignore[misc]
