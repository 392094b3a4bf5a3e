"""The command `doctor`: make a run, train a few steps, and show the verdict on each component. It writes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt.catalog.catalog import catalog_at
from ckpt.cli.tables import Listing, counted, print_json
from ckpt.cli.tables import show as show_parts
from ckpt.errors import CheckpointNotFoundError, ConfigurationError, worded
from ckpt.format.places import place_of
from ckpt.ranks.topology import Topology
from ckpt.state.pattern_check import PatternVerdict
from recipes.support.sentences import in_config_words
from recipes.training.training import require_named_checkpoint, set_up


@dataclass
class StepsKeys:
    steps: int = 2


@dataclass
class DoctorKeys:
    """The doctor's keys beside those of a training run."""

    doctor: StepsKeys = field(default_factory=StepsKeys)
    json: bool = False

    def validate(self) -> None:
        """Raise ConfigurationError for a negative number of steps."""
        if self.doctor.steps < 0:
            raise ConfigurationError(f"doctor.steps={self.doctor.steps}: expected at least 0")


def require_resume(cfg: dict[str, Any]) -> dict[str, Any]:
    """Return the config, before any rank starts, if there is what `resume` names.

    Raises:
        CheckpointNotFoundError: there is not.
    """
    require_named_checkpoint(cfg)
    root = cfg["checkpoint_root"]
    if cfg["resume"] == "latest" and catalog_at(place_of(root)).newest() is None:
        raise CheckpointNotFoundError(
            f"resume=latest: there is no checkpoint in {root}. The doctor writes no run folder: give that of the run to examine as "
            "run_dir=outputs/<run_name>, or a checkpoint as resume=<path>"
        )
    return cfg


def examine(cfg: dict[str, Any], topology: Topology) -> dict[str, Any]:
    """Make the run, load what `resume` names, train some steps and diagnose. Every rank calls it."""
    training, coordinator = set_up(cfg, topology)
    if cfg["resume"] is not None:
        path = None if cfg["resume"] == "latest" else cfg["resume"]
        coordinator.load_checkpoint(path, strict=cfg["load"]["strict"], leave_out=training.left_out, cast=cfg["load"]["cast"])
    for _ in range(cfg["doctor"]["steps"]):
        training.step()
    return {
        "parallel": training.layout.name,
        "world_size": topology.world_size,
        "steps": cfg["doctor"]["steps"],
        "components": [
            diagnosis.to_json() | {"sentence": worded(diagnosis.sentence, diagnosis.arguments, in_config_words)}
            for diagnosis in coordinator.diagnose()
        ],
    }


def show(result: Mapping[str, Any], *, as_json: bool) -> int:
    """Print the verdicts, and return the exit code: 1 if a save would lose state."""
    lost = [row["component"] for row in result["components"] if row["verdict"] == PatternVerdict.LOSES_STATE.value]
    if as_json:
        print_json({"ok": not lost, **result})
        return 1 if lost else 0
    num_lost = f"{counted(len(lost), 'component')} would lose state" if lost else "a save would lose no state"
    head = f"{result['parallel']} on {counted(result['world_size'], 'rank')}, after {result['steps']} steps: {num_lost}"
    table = Listing("component", "declared", "found", "verdict", text=(3,))
    for row in result["components"]:
        found = row["found"][0] if row["found"] else "nothing that fits"
        table.add(row["component"], row["declared"], found, row["verdict"])
    show_parts(head, "", table, *(row["sentence"] for row in result["components"] if row["sentence"]))
    return 1 if lost else 0
