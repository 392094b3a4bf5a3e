"""Forecast a load: for ranks that need not exist, and without reading a tensor.

The decisions are those of a load (compatibility.py, state_matching.py), made once for each rank. Damage in the bytes of tensors is
not foreseen: only reading finds it. Damage in other files is found as by a load that verifies.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt.errors import CheckpointError, describe, rebuild, sentence
from ckpt.format.manifest import STATE
from ckpt.format.places import Place
from ckpt.loading.compatibility import asked_for, copies_for_object, fit, goes_on, passed_over, require_something
from ckpt.loading.direct import DirectLoad
from ckpt.loading.loader import Loader
from ckpt.loading.parts_of_state import by_component_of
from ckpt.loading.report import ComponentReport, Misfits, Status
from ckpt.loading.sources import CheckpointSource
from ckpt.loading.state_matching import Match, match_changed, report_of_trouble, settle
from ckpt.loading.strategy import Components
from ckpt.memory.device import Device
from ckpt.ranks.topology import Topology
from ckpt.state.abilities import takes_a_part
from ckpt.state.sharing import DECIDED_BY_OBJECT, StateComponent
from ckpt.storage.stored import noticing_removal


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of the load.

    Attributes:
        topology: its place, such as `Topology.supposed`.
        components: as its coordinator would be given them. Their objects are used up: plain values may be loaded into them.
    """

    topology: Topology
    components: Sequence[StateComponent]


@dataclass(frozen=True, slots=True)
class LoadPreview:
    """Forecast for one component.

    Attributes:
        component: as rank 0 declares it.
        report: as the load would give it; None: it would fail.
        refusal: the error that it would fail with, on all ranks; "": it would not.
        misfits: keys that match nothing on the other side, also where the load refuses or leaves out all of the component.
        moved: how ranks, nodes or groups have changed since the save; None: not at all, or it was not saved.
        plain: plain values of the copies that an object with `elastic=derive|repartition` would be made from.
        bytes_by_rank: the bytes that each rank would read of it.
    """

    component: StateComponent
    report: ComponentReport | None = None
    refusal: str = ""
    misfits: Misfits = field(default_factory=Misfits)
    moved: str | None = None
    plain: Sequence[Mapping[Any, Any]] = ()
    bytes_by_rank: Sequence[int] = ()

    @property
    def key(self) -> str:
        return self.component.key


@dataclass(frozen=True, slots=True)
class Forecast:
    """Forecast for a load.

    Attributes:
        refusal: the error that it would fail with though no component refuses; "": it would not.
        passed_over: reports of components that only the checkpoint has, and that the load leaves out because it is not strict.
        checkpoint_id, config_text: as of `LoadReport`.
    """

    components: Sequence[LoadPreview]
    refusal: str
    passed_over: Mapping[str, ComponentReport]
    checkpoint_id: str
    config_text: str

    @property
    def restored(self) -> set[str]:
        """The components that would be restored, or a part of them."""
        return {component.key for component in self.components if component.report is not None and goes_on(component.report)}

    @property
    def loads(self) -> bool:
        """Whether the load would succeed."""
        return not self.refusal and not any(component.refusal for component in self.components)


def forecast(
    path: Place,
    ranks: Sequence[Rank],
    device: Device,
    *,
    strict: bool,
    allow_pickle: bool,
    leave_out: Collection[str] = (),
    cast: Components = False,
    verify: bool = True,
) -> Forecast:
    """Forecast `load_checkpoint(path, strict=strict, leave_out=leave_out, cast=cast)` on these ranks.

    Objects that need no tensor, or hold their own, are given the plain values that they would get, so that an error that they raise
    is foreseen too.

    Raises:
        CheckpointNotFoundError: there is no checkpoint at the path.
        CheckpointGoneError: it was removed or replaced while it was read.
        CorruptCheckpointError: a file is damaged that the load checks before it reads tensors.
    """
    with noticing_removal(path) as require_there:
        declared = ranks[0].components
        loader = Loader((), Topology.alone(), DirectLoad(), device, verify=verify, allow_pickle=allow_pickle)
        opened = loader.open(path)  # one for all, so that each index is read once
        opened = opened if STATE in [component.key for component in declared] else by_component_of(opened)
        sources = [opened.for_rank(rank.topology) for rank in ranks]
        optional = {component.key for component in declared if not component.required}
        damaged = [source.check(optional) for source in sources]
        of_ranks = [asked_for(rank.components, source, leave_out) for rank, source in zip(ranks, sources, strict=True)]
        previews = [_preview(sources, ones, damaged, strict, cast) for ones in zip(*of_ranks, strict=True)]
        refusal, others = "", dict[str, ComponentReport]()
        try:
            if not any(preview.refusal for preview in previews):
                require_something({preview.key: preview.report for preview in previews if preview.report is not None})
                others = passed_over(opened, declared, leave_out, strict=strict)
        except CheckpointError as error:
            refusal = str(error)
        found = Forecast(previews, refusal, others, opened.checkpoint_id, opened.config_text)
        if not found.loads:
            require_there()
        return found


def _preview(
    sources: Sequence[CheckpointSource],
    ones: Sequence[StateComponent],
    damaged: Sequence[Mapping[str, dict[str, Any]]],
    strict: bool,
    cast: Components,
) -> LoadPreview:
    """The forecast for one component.

    Args:
        ones: the component of each rank.
        damaged: what the check of each rank has found.
    """
    first = ones[0]
    preview = LoadPreview(first)
    try:
        if sources[0].holds(first.key):
            preview = LoadPreview(first, misfits=_misfits(sources, ones, cast), moved=sources[0].moved(first))
        matches = [
            _matched(source, component, strict, cast, found.get(component.key))
            for source, component, found in zip(sources, ones, damaged, strict=True)
        ]
        report = settle(first, [match.to_json() for match in matches], matches[0].saved_keys, strict=strict)
        if report.changed:
            copies = [copies_for_object(source, component) for source, component in zip(sources, ones, strict=True)]
            matches = [match_changed(component, of_rank) for component, of_rank in zip(ones, copies, strict=True)]
            count = sum(match.restored for match in matches)
            report = replace(report, restored=count, wanted=count)
        if goes_on(report):
            report = _applied(matches, report)
    except Exception as error:  # whatever an object raises when it is asked, it would raise in the load
        return replace(preview, refusal=_named(first.key, sentence(error)))
    return replace(
        preview,
        report=report,
        plain=_plain(sources[0], first) if goes_on(report) else (),
        bytes_by_rank=[match.num_bytes if goes_on(report) else 0 for match in matches],
    )


def _matched(
    source: CheckpointSource,
    component: StateComponent,
    strict: bool,
    cast: Components,
    damage: dict[str, Any] | None = None,
) -> Match:
    """The match of one rank. Ranks may share objects here, so an object forgets what it prepared for one before the next."""
    found = Match(component)
    try:
        found = fit(source, component, strict=strict, cast=cast, damage=damage)
    finally:
        found.forget_prepared()
    return found


def _misfits(sources: Sequence[CheckpointSource], ones: Sequence[StateComponent], cast: Components) -> Misfits:
    """The misfits of a load that would leave out whatever does not fit."""
    optional = [replace(component, required=False) for component in ones]
    matches = [_matched(source, component, strict=False, cast=cast) for source, component in zip(sources, optional, strict=True)]
    return settle(optional[0], [match.to_json() for match in matches], matches[0].saved_keys, strict=False).misfits


def _applied(matches: Sequence[Match], report: ComponentReport) -> ComponentReport:
    """Apply the matches to objects that need no tensor, or hold their tensors themselves."""
    for rank, match in enumerate(matches):
        if match.requests and (match.copies is not None or not takes_a_part(match.component.stateful)):
            continue
        try:
            match.apply()
        except Exception as error:
            if match.component.required:
                raise
            failed = report_of_trouble(match.key, rank, rebuild(describe(error)), len(matches))
            return replace(failed, status=Status.FAILED)
    return report


def _plain(source: CheckpointSource, component: StateComponent) -> list[dict[Any, Any]]:
    if component.elastic not in DECIDED_BY_OBJECT:
        return []
    return [copy.nested_plain for copy in copies_for_object(source, component)]


def _named(key: str, text: str) -> str:
    """The sentence, with the component in front unless it names it."""
    return text if text.startswith((f"{key}:", f"component {key} ", f"component {key}:")) else f"{key}: {text}"
