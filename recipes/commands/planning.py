"""What `plan` finds and shows: the run that would load a checkpoint, made rank by rank without starting one."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from rich.filesize import decimal
from rich.text import Text

from ckpt.errors import CheckpointNotFoundError, ConfigurationError
from ckpt.format.manifest import CheckpointManifest
from ckpt.format.names import local_path
from ckpt.format.stored import read_manifest
from ckpt.loading.forecast import Forecast, LoadPreview, Rank, forecast
from ckpt.loading.report import Misfits, Status
from ckpt.ranks.topology import Topology
from ckpt.state.sharing import OWN_COPIES, SharingPattern, default_elastic
from ckpt.state.statefuls import RNGState, as_stateful
from recipes.commands.reading import is_checkpoint
from recipes.support.config import OWN_COMPONENTS, checked, made
from recipes.support.tables import add_row, console, printable, table_of
from recipes.training.parallel.base import Arranged, Layout
from recipes.training.training import Training

MAX_LINES = 20
"""How many keys of a component the table names."""


@dataclass
class PlanKeys:
    """The keys of the command beside those of the run."""

    checkpoint: str = MISSING
    nodes: int = 1
    json: bool = False


@dataclass(frozen=True)
class Plan:
    """What a load would do, and with what.

    Attributes:
        manifest: None for an old checkpoint.
        topology: of rank 0 of the run that would load.
        layout: as `parallel=` names it, with the ranks along its axes.
        bytes_are_exact: the components of which each rank's bytes are known; of the others, those of one whole copy.
    """

    path: Path
    manifest: CheckpointManifest | None
    topology: Topology
    layout: str
    forecast: Forecast
    bytes_are_exact: frozenset[str]


def keys_of(cfg: DictConfig) -> PlanKeys:
    """Take the command's own keys out of the config, their types checked; what stays is the config of a run.

    Raises:
        ConfigurationError: no checkpoint is given, or no node.
    """
    if OmegaConf.is_missing(cfg, "checkpoint"):
        raise ConfigurationError("no checkpoint is given; add checkpoint=<a checkpoint>")
    with open_dict(cfg):
        own = {name: cfg.pop(name) for name in ("checkpoint", "nodes", "json")}
    keys = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(PlanKeys), own))
    assert isinstance(keys, PlanKeys)
    if keys.nodes < 1:
        raise ConfigurationError(f"nodes={keys.nodes}: expected at least 1")
    return keys


def plan(keys: PlanKeys, cfg: DictConfig) -> Plan:
    """Make the parts of every rank of the run, and ask what a load of the checkpoint would do with them.

    Raises:
        CheckpointNotFoundError: there is none at the path.
        ConfigurationError: the run could not start in this layout, whatever it loads.
    """
    path = local_path(keys.checkpoint, "checkpoint")
    given = cfg.launch.nproc_per_node
    num_ranks = keys.nodes * given if isinstance(given, int) else 0
    run = checked(cfg, num_ranks=num_ranks)
    manifest = read_manifest(path) if is_checkpoint(path) else None
    if manifest is None and not run["load"]["allow_pickle"] and not list(path.glob("*_state*.pt")):
        what = "does not exist" if not path.exists() else "is not a checkpoint"
        raise CheckpointNotFoundError(f"{path} {what}; give the folder of a committed checkpoint as checkpoint=")
    layout: Layout = made(run["parallel"])
    ranks = [Rank(parts.topology, parts.components()) for parts in _parts_of_ranks(run, layout, num_ranks, keys.nodes)]
    device = made(run["device"])
    load = run["load"]
    found = forecast(path, ranks, device, strict=load["strict"], allow_pickle=load["allow_pickle"])
    axes = " x ".join(f"{axis} {size}" for axis, size in layout.sizes(num_ranks).items())
    named = f"parallel={layout.name}" + (f" ({axes})" if axes else "")
    return Plan(path, manifest, ranks[0].topology, named, found, _exact(found, layout, num_ranks))


class Unstarted(Training):
    """The parts of one rank of a run that is not started: of the model, the layers that this rank would hold, uncut."""

    def join(self) -> None:
        sizes = self.layout.sizes(self.topology.world_size)
        if sizes.get("pp", 1) > 1:
            stage = self.layout.position(self.topology.rank, self.topology.world_size)["pp"]
            self.model.keep_stage(stage, sizes["pp"])  # type: ignore[operator]
        self._complete(Arranged(self.model, _no_backward))

    def components(self) -> list[Any]:
        found = super().components()
        for one in found:
            one.stateful = as_stateful(one.stateful)
        return found

    def on(self, topology: Topology) -> Unstarted:
        """The same parts on another rank that holds the same layers; its place among the ranks is its own."""
        other = copy.copy(self)
        other.topology = topology
        stream = self.layout.stream(topology.rank, topology.world_size)
        other.rng = RNGState(self.device, seed=self.cfg["train"]["seed"], stream=stream, step=lambda: 0)
        other.loader = copy.copy(self.loader)
        return other


def _parts_of_ranks(run: Mapping[str, Any], layout: Layout, num_ranks: int, nodes: int) -> list[Unstarted]:
    """The parts of every rank. A model is made once for all ranks that hold the same layers."""
    hosts = [f"host-{rank * nodes // num_ranks}" for rank in range(num_ranks)]
    groups = {axis: layout.instances(axis, num_ranks) for axis in layout.axes}
    by_stage: dict[int, Unstarted] = {}
    parts = []
    for rank in range(num_ranks):
        topology = Topology.supposed(rank, hosts, groups)
        stage = layout.position(rank, num_ranks).get("pp", 0)
        if stage not in by_stage:
            by_stage[stage] = Unstarted(run, topology, made(run["device"]))
            by_stage[stage].join()
        parts.append(by_stage[stage].on(topology))
    return parts


def _no_backward(rows: torch.Tensor) -> torch.Tensor:
    raise AssertionError("nothing is trained here")


def _exact(found: Forecast, layout: Layout, num_ranks: int) -> frozenset[str]:
    """The components whose bytes are known for each rank. Of tensors that a layout would cut, only their sum is."""
    whole = num_ranks == 1 or "pp" in layout.axes
    return frozenset(
        one.key
        for one in found.components
        if one.component.pattern is not SharingPattern.SHARDED or (whole and one.key in OWN_COMPONENTS)
    )


# What is shown


def show(found: Plan, keys: PlanKeys) -> None:
    """Print the plan as tables, or as JSON."""
    if keys.json:
        print(json.dumps(as_json(found), indent=2))
        return
    head = f"{found.path}: {_saved_by(found)}; wanted by {_count(found.topology.world_size)}, {found.layout}"
    table = table_of("component", "saved as", "wanted as", "what will happen", "to read", right=(4,))
    for one in found.forecast.components:
        add_row(table, one.key, _saved_as(one, found), _wanted_as(one), what(one, found)[1], _to_read(one, found))
    parts: list[Any] = [Text(printable(head)), table]
    misfits = [one for one in found.forecast.components if one.misfits]
    if misfits:
        keys_table = table_of("component", "what does not fit")
        for one in misfits:
            lines = list(_lines(one.misfits))
            for line in lines[:MAX_LINES]:
                add_row(keys_table, one.key, line)
            if len(lines) > MAX_LINES:
                add_row(keys_table, one.key, f"and {len(lines) - MAX_LINES} more, which json=true lists")
        parts.append(keys_table)
    verdict = "It would load." if found.forecast.loads else "It would not load."
    parts.append(Text(printable(f"{verdict} {found.forecast.refusal}".strip())))
    console().print(*parts, sep="\n")


def as_json(found: Plan) -> dict[str, Any]:
    """The plan, every number and every key exactly."""
    saved = None
    if found.manifest is not None:
        saved = {"world_size": found.manifest.world_size, "topology": found.manifest.topology}
    topology = found.topology
    return {
        "checkpoint": str(found.path),
        "loads": found.forecast.loads,
        "refusal": found.forecast.refusal,
        "saved": saved,
        "wanted": {
            "layout": found.layout,
            "world_size": topology.world_size,
            "topology": {
                "nodes": topology.nodes,
                "groups": {name: group.instances for name, group in topology.groups.items()},
            },
        },
        "components": {one.key: _component_as_json(one, found) for one in found.forecast.components},
    }


def what(one: LoadPreview, found: Plan) -> tuple[str, str]:
    """What will happen to a component, as one word for programs and a few for people."""
    report = one.report
    if report is None:
        return "refused", f"refused: {one.refusal}"
    if report.status in (Status.SKIPPED, Status.FAILED):
        if report.reason.startswith("rebuilt: "):
            return "rebuilt", f"rebuilt by its object: {report.reason.removeprefix('rebuilt: ')}"
        return "left out", f"left out: {report.reason}"
    verb, text = _how(one, found)
    if report.status is Status.PARTLY:
        return "partly loaded", f"partly {text}"
    return verb, text


def _how(one: LoadPreview, found: Plan) -> tuple[str, str]:
    report, component = one.report, one.component
    assert report is not None
    if report.changed or (one.moved and component.elastic == "repartition"):
        return _by_object(one)
    saved = found.manifest.components[one.key] if found.manifest is not None else None
    if saved is None:
        return "loaded", "loaded from an old file"
    if SharingPattern.SHARDED in (component.pattern, SharingPattern(saved.sharing_pattern)) and _laid_out_otherwise(
        found
    ):
        return "resharded", f"resharded {_from_to(found)}"
    if one.moved and component.pattern in OWN_COPIES:
        return "replica taken", f"one copy taken, for all are equal: {one.moved}"
    if one.moved:
        return "replica taken", f"replica taken: {one.moved}"
    return "loaded", "loaded as it is"


def _by_object(one: LoadPreview) -> tuple[str, str]:
    first = one.plain[0] if one.plain else {}
    if one.component.elastic == "derive":
        known = "seed" in first and "step" in first
        return (
            "derived",
            f"derived from seed {first['seed']}, step {first['step']}" if known else "derived from the first copy",
        )
    if "position" in first:
        return "repartitioned", f"repartitioned at sample {first['position']}"
    copies = f"{len(one.plain)} copies" if len(one.plain) != 1 else "the one copy"
    return "repartitioned", f"repartitioned from {copies}"


def _laid_out_otherwise(found: Plan) -> bool:
    assert found.manifest is not None
    groups = {name: [list(ranks) for ranks in group.instances] for name, group in found.topology.groups.items()}
    return (found.manifest.world_size, found.manifest.topology["groups"]) != (found.topology.world_size, groups)


def _from_to(found: Plan) -> str:
    assert found.manifest is not None
    before, after = found.manifest.world_size, found.topology.world_size
    return f"from {before} to {_count(after)}" if before != after else f"among the same {_count(after)}"


def _saved_by(found: Plan) -> str:
    return "an old checkpoint" if found.manifest is None else f"saved by {_count(found.manifest.world_size)}"


def _saved_as(one: LoadPreview, found: Plan) -> str:
    if found.manifest is None:
        return "pickled files"
    saved = found.manifest.components.get(one.key)
    if saved is None:
        return "nothing"
    return saved.sharing_pattern + (f" of {saved.group_name}" if saved.group_name else "")


def _wanted_as(one: LoadPreview) -> str:
    component = one.component
    group = f" of {component.process_group_name}" if component.process_group_name else ""
    optional = "" if component.required else ", optional"
    return f"{component.pattern.value}{group}, {component.elastic or default_elastic(component.pattern)}{optional}"


def _to_read(one: LoadPreview, found: Plan) -> str:
    if not any(one.bytes_by_rank):
        return ""
    if one.key not in found.bytes_are_exact:
        return f"a part of {decimal(max(one.bytes_by_rank))}"
    return f"{decimal(max(one.bytes_by_rank))} a rank"


def _component_as_json(one: LoadPreview, found: Plan) -> dict[str, Any]:
    verdict, text = what(one, found)
    exact = one.key in found.bytes_are_exact
    return {
        "saved_as": _saved_as(one, found),
        "wanted_as": one.component.pattern.value,
        "process_group_name": one.component.process_group_name,
        "elastic": one.component.elastic or default_elastic(one.component.pattern),
        "required": one.component.required,
        "verdict": verdict,
        "text": text,
        "only_in_checkpoint": list(one.misfits.only_saved),
        "only_wanted": list(one.misfits.only_wanted),
        "does_not_fit": dict(one.misfits.unfit),
        "bytes_by_rank": list(one.bytes_by_rank) if exact else None,
        "bytes_of_all_ranks": sum(one.bytes_by_rank) if exact else None,
        "bytes_of_one_copy": max(one.bytes_by_rank, default=0),
    }


def _lines(misfits: Misfits) -> list[str]:
    return [
        *(f"{key}: {unfit}" for key, unfit in misfits.unfit.items()),
        *(f"{key}: only in the checkpoint" for key in misfits.only_saved),
        *(f"{key}: only wanted" for key in misfits.only_wanted),
    ]


def _count(ranks: int) -> str:
    return f"{ranks} rank{'' if ranks == 1 else 's'}"
