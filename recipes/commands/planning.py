"""The command `plan`: preview a load, on the parts of every rank of a run, without starting ranks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig
from rich.filesize import decimal

from ckpt.cli.arguments import argued
from ckpt.cli.reading import is_checkpoint
from ckpt.cli.tables import Listing, counted, first_rows, more, most_rows, print_json
from ckpt.cli.tables import show as show_parts
from ckpt.errors import ConfigurationError
from ckpt.format.manifest import CheckpointManifest
from ckpt.format.places import Place, as_place
from ckpt.interop.registry import require_checkpoint
from ckpt.loading.forecast import Forecast, LoadPreview, Rank, forecast
from ckpt.loading.report import Misfits, Status
from ckpt.ranks.topology import Topology
from ckpt.state.sharing import OWN_COPIES, SharingPattern, default_elastic
from ckpt.state.statefuls import RNGState, as_stateful
from ckpt.storage.stored import read_manifest
from recipes.support.config import OWN_COMPONENTS, checked, made
from recipes.training.parallel.base import Arranged, Layout, backward_of
from recipes.training.training import Training


@dataclass
class PlanKeys:
    """The keys of the command beside those of the run."""

    checkpoint: str = argued("a checkpoint")
    nodes: int = 1
    all: bool = False
    json: bool = False

    def validate(self) -> None:
        """Raise ConfigurationError for less than one node."""
        if self.nodes < 1:
            raise ConfigurationError(f"nodes={self.nodes}: expected at least 1")


@dataclass(frozen=True)
class Plan:
    """The preview of a load.

    Attributes:
        manifest: of the checkpoint; None: it is an old one, made of .pt files.
        topology: of rank 0 of the run that would load.
        layout: the value of `parallel=`, with the ranks along its axes.
        bytes_are_exact: the components whose bytes are known for each rank; of the others, only those of a whole copy are.
    """

    path: Place
    manifest: CheckpointManifest | None
    topology: Topology
    layout: str
    forecast: Forecast
    bytes_are_exact: frozenset[str]


def plan(keys: PlanKeys, cfg: DictConfig) -> Plan:
    """Make the parts of every rank of the run, and preview a load of the checkpoint into them.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at the path.
        ConfigurationError: the run could not start in this layout, with any checkpoint.
    """
    path = as_place(keys.checkpoint, "checkpoint")
    given = cfg.launch.nproc_per_node
    num_ranks = keys.nodes * given if isinstance(given, int) else 0
    run = checked(cfg, num_ranks=num_ranks)
    load = run["load"]
    require_checkpoint(path, allow_pickle=load["allow_pickle"])
    manifest = read_manifest(path) if is_checkpoint(path) else None
    layout: Layout = made(run["parallel"])
    parts = _parts_of_ranks(run, layout, num_ranks, keys.nodes)
    ranks = [Rank(part.topology, part.components()) for part in parts]
    found = forecast(
        path,
        ranks,
        made(run["device"]),
        strict=load["strict"],
        allow_pickle=load["allow_pickle"],
        leave_out=parts[0].left_out,
        cast=load["cast"],
        verify=load["verify"],
    )
    if found.loads:
        try:
            parts[0].go_on_from(str(path), found.checkpoint_id, found.restored, found.config_text)
        except ConfigurationError as error:
            found = replace(found, refusal=str(error))
    axes = " x ".join(f"{axis} {size}" for axis, size in layout.sizes(num_ranks).items())
    named = f"parallel={layout.name}" + (f" ({axes})" if axes else "")
    return Plan(path, manifest, ranks[0].topology, named, found, _exact(found, layout, num_ranks))


class Unstarted(Training):
    """The parts of one rank of a run that is not started. Its model has the layers of this rank's stage, not cut further."""

    def join(self) -> None:
        sizes = self.layout.sizes(self.topology.world_size)
        if sizes.get("pp", 1) > 1:
            stage = self.layout.position(self.topology.rank, self.topology.world_size)["pp"]
            self.layout.keep_stage(self.model, stage, sizes["pp"])  # type: ignore[attr-defined]
        self._complete(Arranged(self.model, backward_of(self.model)))

    def components(self) -> list[Any]:
        found = super().components()
        for component in found:
            component.stateful = as_stateful(component.stateful)
        return found

    def on(self, topology: Topology) -> Unstarted:
        """Return the same parts for another rank with the same layers, with that rank's topology, generators and loader."""
        other = copy.copy(self)
        other.topology = topology
        stream = self.layout.stream(topology.rank, topology.world_size)
        other.rng = RNGState(self.device, seed=self.cfg["train"]["seed"], stream=stream, step=lambda: 0)
        other.loader = copy.copy(self.loader)
        return other


def _parts_of_ranks(run: Mapping[str, Any], layout: Layout, num_ranks: int, nodes: int) -> list[Unstarted]:
    """The parts of every rank. Ranks of one stage share a model."""
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


def _exact(found: Forecast, layout: Layout, num_ranks: int) -> frozenset[str]:
    """The components whose bytes are known for each rank. Of tensors that a layout would cut, only the sum is known."""
    whole = num_ranks == 1 or "pp" in layout.axes
    return frozenset(
        component.key
        for component in found.components
        if component.component.pattern is not SharingPattern.SHARDED or (whole and component.key in OWN_COMPONENTS)
    )


# What is shown


def show(found: Plan, keys: PlanKeys) -> None:
    """Print the plan as tables, or as JSON."""
    if keys.json:
        print_json(as_json(found))
        return
    saved = "an old checkpoint" if found.manifest is None else f"saved by {counted(found.manifest.world_size, 'rank')}"
    head = f"{found.path}: {saved}; wanted by {counted(found.topology.world_size, 'rank')}, {found.layout}"
    verdict = "It would load." if found.forecast.loads else "It would not load."
    table = Listing("component", "saved as", "wanted as", "what will happen", "to read", right=(4,), text=(3,))
    refused = []
    for component in found.forecast.components:
        verb, happens = what(component, found)
        if component.report is None:
            refused.append(happens)
        table.add(
            component.key,
            _saved_as(component.key, found),
            _wanted_as(component),
            verb if component.report is None else happens,
            _to_read(component, found),
        )
    for key, report in found.forecast.passed_over.items():
        table.add(key, _saved_as(key, found), "nothing", f"left out: {report.reason}", "")
    misfits = [(component.key, *line) for component in found.forecast.components for line in _lines(component.misfits)]
    keys_table = Listing("component", "key", "what does not fit", names=2, bare=(2,))
    for row in first_rows(misfits, lambda row: row[0], most=most_rows(all=keys.all)):
        keys_table.add(*row)
    listed = ["", keys_table, *more(len(misfits) - len(keys_table), "key")] if misfits else []
    show_parts(head, f"{verdict} {found.forecast.refusal}".strip(), *refused, "", table, *listed)


def as_json(found: Plan) -> dict[str, Any]:
    """Return the plan, with every number and every key in full."""
    manifest, topology = found.manifest, found.topology
    groups = {name: group.instances for name, group in topology.groups.items()}
    wanted = {"world_size": topology.world_size, "topology": {"nodes": topology.nodes, "groups": groups}}
    return {
        "checkpoint": str(found.path),
        "loads": found.forecast.loads,
        "refusal": found.forecast.refusal,
        "saved": None if manifest is None else {name: getattr(manifest, name) for name in ("world_size", "topology")},
        "wanted": {"layout": found.layout} | wanted,
        "components": {component.key: _component_as_json(component, found) for component in found.forecast.components},
        "passed_over": {key: report.reason for key, report in found.forecast.passed_over.items()},
    }


def what(one: LoadPreview, found: Plan) -> tuple[str, str]:
    """Return what a load does to a component: a verdict for programs, and a text for people."""
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
    is_sharded = SharingPattern.SHARDED in (component.pattern, SharingPattern(saved.sharing_pattern))
    if is_sharded and (layouts := _change_of_layout(found)):
        return "resharded", f"resharded {layouts}"
    if one.moved:
        replica = "one copy taken, for all are equal" if component.pattern in OWN_COPIES else "replica taken"
        return "replica taken", f"{replica}: {one.moved}"
    return "loaded", "loaded as it is"


def _by_object(one: LoadPreview) -> tuple[str, str]:
    first = one.plain[0] if one.plain else {}
    if one.component.elastic == "derive":
        known = "seed" in first and "step" in first
        source = f"seed {first['seed']}, step {first['step']}" if known else "the first copy"
        return "derived", f"derived from {source}"
    if "position" in first:
        return "repartitioned", f"repartitioned at sample {first['position']}"
    copies = f"{len(one.plain)} copies" if len(one.plain) != 1 else "the one copy"
    return "repartitioned", f"repartitioned from {copies}"


def _change_of_layout(found: Plan) -> str:
    """How the ranks differ from those of the save; "" if they and their groups are the same."""
    assert found.manifest is not None
    before, after = found.manifest.world_size, found.topology.world_size
    if before != after:
        return f"from {before} to {counted(after, 'rank')}"
    groups = {name: [list(ranks) for ranks in group.instances] for name, group in found.topology.groups.items()}
    return f"among the same {counted(after, 'rank')}" if found.manifest.topology["groups"] != groups else ""


def _saved_as(key: str, found: Plan) -> str:
    if found.manifest is None:
        return "pickled files"
    saved = found.manifest.components.get(key)
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
    most = decimal(max(one.bytes_by_rank))
    return f"{most} a rank" if one.key in found.bytes_are_exact else f"a part of {most}"


def _component_as_json(one: LoadPreview, found: Plan) -> dict[str, Any]:
    verdict, text = what(one, found)
    exact = one.key in found.bytes_are_exact
    return {
        "saved_as": _saved_as(one.key, found),
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


def _lines(misfits: Misfits) -> list[tuple[str, str]]:
    return [
        *misfits.unfit.items(),
        *((key, "only in the checkpoint") for key in misfits.only_saved),
        *((key, "only wanted") for key in misfits.only_wanted),
    ]
