"""The command `doctor`: make a run, train a few steps, and show the verdict on each component. It writes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from ckpt.errors import ConfigurationError
from ckpt.ranks.topology import Topology
from ckpt.state.doctor import PatternVerdict
from recipes.support.sentences import in_config_words
from recipes.support.tables import Listing, counted, print_json
from recipes.support.tables import show as show_parts
from recipes.training.training import set_up


@dataclass
class DoctorKeys:
    """The doctor's keys beside those of a training run."""

    steps: int = 2
    json: bool = False


def keys_of(cfg: DictConfig) -> DoctorKeys:
    """Pop the doctor's own keys from the config and return them, their types checked.

    Raises:
        ConfigurationError: there is no such key, or doctor.steps is negative.
    """
    with open_dict(cfg):
        own = cfg.pop("doctor")
        as_json = cfg.pop("json")
    try:
        keys = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(DoctorKeys), own, {"json": as_json}))
    except OmegaConfBaseException as error:
        raise ConfigurationError(f"{str(error).splitlines()[0]}; the doctor has doctor.steps and json") from error
    assert isinstance(keys, DoctorKeys)
    if keys.steps < 0:
        raise ConfigurationError(f"doctor.steps={keys.steps}: expected at least 0")
    return keys


def examine(cfg: dict[str, Any], topology: Topology) -> dict[str, Any]:
    """Make the run, load what `resume` names, train some steps and diagnose. Every rank calls it."""
    training, coordinator = set_up(cfg, topology)
    if cfg["resume"] is not None:
        path = None if cfg["resume"] == "latest" else cfg["resume"]
        coordinator.load_checkpoint(path, strict=cfg["load"]["strict"])
    for _ in range(cfg["doctor"]["steps"]):
        training.step()
    return {
        "parallel": training.layout.name,
        "world_size": topology.world_size,
        "steps": cfg["doctor"]["steps"],
        "components": [one.to_json() | {"sentence": in_config_words(one.sentence)} for one in coordinator.diagnose()],
    }


def show(result: Mapping[str, Any], *, as_json: bool) -> int:
    """Print the verdicts, and return the exit code: 1 if a save would lose state."""
    lost = [one["component"] for one in result["components"] if one["verdict"] == PatternVerdict.LOSES_STATE.value]
    if as_json:
        print_json({"ok": not lost, **result})
        return 1 if lost else 0
    num_lost = f"{counted(len(lost), 'component')} would lose state" if lost else "a save would lose no state"
    head = f"{result['parallel']} on {counted(result['world_size'], 'rank')}, after {result['steps']} steps: {num_lost}"
    table = Listing("component", "declared", "found", "verdict", text=(3,))
    for one in result["components"]:
        found = one["found"][0] if one["found"] else "nothing that fits"
        table.add(one["component"], one["declared"], found, one["verdict"])
    show_parts(head, "", table, *(one["sentence"] for one in result["components"] if one["sentence"]))
    return 1 if lost else 0
