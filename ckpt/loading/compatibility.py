"""Decide whether one rank may load a component, and which of its saved copies, before anything is read into it.

Used by a load, and by forecast.py for ranks that do not exist yet.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from ckpt.errors import Argument, MissingStateError, WorldSizeError, declare, describe, rebuild
from ckpt.format.box import Box
from ckpt.format.dtypes import item_bytes, raw_bytes, torch_dtype
from ckpt.format.gc_pause import gc_paused
from ckpt.loading.report import ComponentReport, Status, refusal, some_of
from ckpt.loading.sources import CheckpointSource, Rows
from ckpt.loading.state_matching import MISMATCHES, Match, SavedCopy, Twins, match
from ckpt.loading.strategy import Components, ReadRequest
from ckpt.state.abilities import Elastic, takes_a_part
from ckpt.state.sharing import DECIDED_BY_OBJECT, OWN_COPIES, Sharing, SharingPattern, StateComponent

_SLAB_BYTES = 8 << 20
"""Bytes of a tensor that are compared at once."""


def fit(
    source: CheckpointSource,
    component: StateComponent,
    *,
    strict: bool,
    cast: Components = False,
    damage: dict[str, Any] | None = None,
) -> Match:
    """Compare a component with its saved state, for this rank. Trouble of a component that the load can do without is noted in the match.

    Args:
        cast: see `CheckpointCoordinator.load_checkpoint`.
        damage: `describe` of the damage of its files, if there is any.

    Raises:
        CheckpointError: it cannot be loaded, and this load cannot do without it.
    """
    try:
        if damage is not None:
            raise rebuild(damage)
        return _fit(source, component, strict, cast)
    except Exception as error:
        if component.required and (strict or not isinstance(error, MISMATCHES)):
            raise
        return Match(component, rebuild(describe(error)))


def as_saved(component: StateComponent, source: CheckpointSource) -> StateComponent:
    """Return a component declared "auto" under the pattern it was saved with; any other unchanged.

    What all ranks share loads as "sharded" into an object that says what it wants, which may be a part: a pipeline stage.
    """
    if not component.is_auto:
        return component
    saved = source.saved_sharing(component) if source.holds(component.key) else None
    if saved is not None and saved.pattern in OWN_COPIES:
        return component.with_sharing(saved)
    return component.with_sharing(
        Sharing(SharingPattern.SHARDED if takes_a_part(component.stateful) else SharingPattern.REPLICATED)
    )


def asked_for(
    components: Sequence[StateComponent], source: CheckpointSource, leave_out: Collection[str]
) -> list[StateComponent]:
    """The components that a load restores, each under the pattern that it is loaded with."""
    return [as_saved(component, source) for component in components if component.key not in leave_out]


def passed_over(
    source: CheckpointSource, components: Sequence[StateComponent], leave_out: Collection[str], *, strict: bool
) -> dict[str, ComponentReport]:
    """Return the reports of components that only the checkpoint has, but for those that are left out on purpose.

    Args:
        components: all that this run declares.

    Raises:
        MissingStateError: there are some, and the load is strict.
    """
    declared = [component.key for component in components]
    others = [key for key in source.only_saved(declared) if key not in leave_out]
    if others and strict:
        raise MissingStateError(
            f"components only in the checkpoint: {some_of(others)}; this run has {some_of(declared)}. Give each its object, "
            "or leave it out on purpose with ",
            Argument("load.strict", False, "None for it in a Checkpointer, leave_out of load_checkpoint, strict=False for all of them"),
        )
    return {key: ComponentReport(key, Status.SKIPPED, "only in the checkpoint") for key in others}


def rows_for_object(source: CheckpointSource, component: StateComponent) -> list[Rows]:
    """The plain values of each copy that an object is given when the ranks have changed."""
    return [source.rows(component, prefix) for prefix in _prefixes_for_object(source, component)]


def copies_for_object(
    source: CheckpointSource, component: StateComponent, rows: Sequence[Rows] | None = None
) -> list[SavedCopy]:
    """The copies that an object is given when the ranks have changed.

    Args:
        rows: `rows_for_object`, as another rank has read them; None: they are read here.
    """
    rows = rows_for_object(source, component) if rows is None else rows
    return [
        SavedCopy.of(
            f"{component.key}/{prefix}", source.entries(component, prefix), of_copy, source.unread(component, prefix)
        )
        for prefix, of_copy in zip(_prefixes_for_object(source, component), rows, strict=True)
    ]


def _prefixes_for_object(source: CheckpointSource, component: StateComponent) -> list[str]:
    prefixes = source.prefixes(component)
    return prefixes[:1] if component.elastic == "derive" else prefixes


def goes_on(report: ComponentReport) -> bool:
    """Whether the component is loaded, as far as is known."""
    return report.status in (Status.RESTORED, Status.PARTLY)


def require_something(reports: Mapping[str, ComponentReport]) -> None:
    """Raise if a load restores no component at all, also where every one is optional."""
    if reports and not any(goes_on(report) for report in reports.values()):
        raise MissingStateError(
            f"nothing could be restored: {'; '.join(map(str, reports.values()))}. Name a checkpoint that this run can go on from.",
            arguments=[Argument(*argument) for report in reports.values() for argument in report.arguments],
        )


@gc_paused()
def _fit(source: CheckpointSource, component: StateComponent, strict: bool, casting: Components) -> Match:
    _require_present(source, component, strict)
    decided_by_object = component.elastic in DECIDED_BY_OBJECT
    if decided_by_object and not _belongs(source, component):
        return Match(component, fits=False)
    prefix = _prefix_of_copy(source, component)
    if prefix is None:
        return Match(component, WorldSizeError(f"rebuilt: {source.moved(component)}", component=component.key))
    start = f"{component.key}/{prefix}"
    saved = SavedCopy.of(
        start,
        source.entries(component, prefix),
        source.rows(component, prefix),
        source.unread(component, prefix),
    )
    if decided_by_object and not cast(Elastic, component.stateful).fits(saved.nested_plain):
        return Match(component, fits=False)
    sharing = source.saved_sharing(component)
    may_hold_pieces = sharing is None or sharing.pattern is SharingPattern.SHARDED
    found = match(component, saved, strict=strict, cast=casting, asks=may_hold_pieces or not strict)
    _compare_twins(source.by_this_rank(), found, strict)
    return found


def _compare_twins(source: CheckpointSource, one: Match, strict: bool) -> None:
    """Read tensors that were saved apart and that the object has as one, piece by piece. Of unequal ones, the second is left out.

    Raises:
        MissingStateError: two differ, and the load is strict.
    """
    differ = {
        twins.key: f"differs from {twins.first}, and they are one tensor in this run"
        for twins in one.twins
        if not all(_are_equal(source, twins, box) for box in _slabs(twins))
    }
    if differ and strict:
        differences = "; ".join(f"{key} {what}" for key, what in differ.items())
        raise refusal(MissingStateError, one.key, f": {differences}. Load into a model that does not tie them, correct the checkpoint")
    one.misfits = replace(one.misfits, unfit={**one.misfits.unfit, **differ})


def _are_equal(source: CheckpointSource, twins: Twins, box: Box) -> bool:
    both = [torch.empty(box.shape, dtype=torch_dtype(twins.dtype), device="cpu") for _ in twins.names]
    label = f"{twins.key} and {twins.first}"
    source.prepare([ReadRequest(name, label, box, out) for name, out in zip(twins.names, both, strict=True)]).run()
    return torch.equal(*map(raw_bytes, both))


def _slabs(twins: Twins) -> Iterator[Box]:
    """Cut the box into rows of a few MiB."""
    offsets, shape = twins.box.offsets, twins.box.shape
    if 0 in shape:
        return
    if not shape:
        yield twins.box
        return
    rows = max(1, _SLAB_BYTES // (math.prod(shape[1:]) * item_bytes(twins.dtype)))
    for at in range(0, shape[0], rows):
        yield Box((offsets[0] + at, *offsets[1:]), (min(rows, shape[0] - at), *shape[1:]))


def _prefix_of_copy(source: CheckpointSource, component: StateComponent) -> str | None:
    """The prefix of the copy that this rank loads; None: the ranks have changed, and the object keeps the state it has built."""
    try:
        prefix = source.own_prefix(component)
    except WorldSizeError as error:
        if component.elastic == "rebuild":
            return None
        if component.elastic == "replica":
            return _any_copy(source, component, error)
        raise
    if component.elastic not in ("rebuild", "refuse") or (moved := source.moved(component)) is None:
        return prefix
    if component.elastic == "rebuild":
        return None
    advice = "Run on the ranks that saved it, ", declare(component.key, elastic=None)
    raise refusal(WorldSizeError, component.key, f" has elastic=refuse: {moved}. ", *advice)


def _any_copy(source: CheckpointSource, component: StateComponent, changed: WorldSizeError) -> str:
    """The prefix of the first of several copies that are all equal."""
    differing = _first_difference(source, component)
    if differing is not None:
        raise refusal(
            WorldSizeError,
            component.key,
            f" has elastic=replica, which takes any copy where all are equal, but the saved ones differ in {differing}, and it was "
            f"{source.moved(component)}. Run on the same ones, ",
            declare(component.key, elastic="repartition, derive or rebuild"),
        ) from changed
    return source.prefixes(component)[0]


def _first_difference(source: CheckpointSource, component: StateComponent) -> str | None:
    """The first key in which the copies of a component differ; None: they are equal."""
    first, *others = source.prefixes(component)
    reference = source.contents(component, first)
    for prefix in others:
        contents = source.contents(component, prefix)
        for key in sorted({*reference, *contents}):
            if reference.get(key) != contents.get(key):
                return key
    return None


def _require_present(source: CheckpointSource, component: StateComponent, strict: bool) -> None:
    if source.holds(component.key):
        return
    removed = source.why_removed(component.key)
    if not (component.required and strict):
        raise MissingStateError(removed or "not in the checkpoint", component=component.key)
    if removed is not None:
        leave_out = Argument("leave_out", component.key, f"leave component {component.key} out")
        raise MissingStateError(f"{removed}; load another one, or ", leave_out, ".", component=component.key)
    raise MissingStateError(
        f"component {component.key} is not in the checkpoint, which has: {some_of(list(source.component_keys())) or 'none'}. ",
        Argument("leave_out", component.key, f"Leave component {component.key} out"), ", ",
        declare(component.key, required=False), ", or load with ", Argument("load.strict", False), ".",
        component=component.key,
    )


def _belongs(source: CheckpointSource, component: StateComponent) -> bool:
    """Whether the saved copies are those of the same ranks, nodes or groups, under the same pattern."""
    if not source.same_pattern(component):
        return False
    try:
        source.own_prefix(component)
    except MISMATCHES:
        return False
    return True
