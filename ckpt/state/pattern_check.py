"""Sharing patterns compared with the state of all ranks: a declared one is checked, one that is declared "auto" is found.

Ranks send fingerprints (replication.py), the lead rank diagnoses (`diagnose`), all receive the result.

One look proves differences, never equality: an optimizer before its first step, generators with one seed or data at position 0
are equal on all ranks under any pattern. So a declaration is refused only if ranks differ where it says that they agree, because
the save would keep one of two values. A pattern with fewer copies is only suggested, and only for tensors.

The pattern of a component that is declared "auto" (`AutoSharing`):

| object | state of the ranks | pattern |
|---|---|---|
| declares `sharing_pattern` (`ckpt.state.abilities.Declared`) | | that one |
| module, optimizer, state dict | equal | replicated |
| | DTensors, ShardedTensors, or different keys | sharded |
| | different bits under one key, equal within a process group | per_group of it |
| | different bits under one key, otherwise | unknown: an error |
| any other | equal | replicated |
| | DTensors or ShardedTensors | sharded; an error where plain tensors or values beside them differ |
| | different | per_rank |

Equality by chance, as of generators with one seed, loses nothing: the pattern is that of one checkpoint, and is found again for the
next. For modules and optimizers, whose tensors are large, it is found once they hold any, and then kept; later saves compare a sample of
each tensor of their copies (validation level "quick"), and refuse copies that have diverged.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import msgspec
import torch

from ckpt.errors import Argument, ConfigurationError, ReplicationError
from ckpt.format import strict_json
from ckpt.format.digests import digest_of
from ckpt.format.gc_pause import gc_paused
from ckpt.ranks.merging import Alike, alike, alike_by_name, first
from ckpt.ranks.topology import Topology
from ckpt.state.abilities import Declared, offers
from ckpt.state.collect import DistinctRanks, digest_of_json, look_at
from ckpt.state.replication import Difference, Fingerprint, differences
from ckpt.state.sharing import EQUAL_COPIES, Ranks, Sets, Sharing, SharingPattern, StateComponent
from ckpt.state.statefuls import Given, ModelState, OptimizerState

Seen = Mapping[str, Fingerprint]
"""Contents of a component on one rank: joined key -> fingerprint."""

_MAX_SETS = 4


class PatternVerdict(Enum):
    """Effect of a declaration on the state of the ranks.

    Attributes:
        OK: everything is saved once.
        WASTEFUL: everything is saved, but more often or by fewer ranks than necessary.
        SUSPICIOUS: some values are not saved, perhaps on purpose.
        LOSES_STATE: only one of several differing values is saved.
    """

    OK = "ok"
    WASTEFUL = "wasteful"
    SUSPICIOUS = "suspicious"
    LOSES_STATE = "loses state"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Result for one component.

    Attributes:
        found: the patterns under which no value would be lost, the one with the fewest copies first.
        sentence: explanation; "" if the verdict is OK.
        leaf: the first entry that contradicts the declaration.
        ranks: two ranks that differ in it.
    """

    component: str
    declared: Sharing
    found: tuple[Sharing, ...]
    verdict: PatternVerdict
    sentence: str = ""
    leaf: str | None = None
    ranks: tuple[int, ...] = ()

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """Those that the sentence may name."""
        return tuple(pattern.declaration(self.component) for pattern in self.found[:1])

    def to_json(self) -> dict[str, Any]:
        found = [str(pattern) for pattern in self.found]
        row: dict[str, Any] = msgspec.to_builtins(self)
        return row | {"declared": str(self.declared), "found": found, "ranks": list(self.ranks)}


@gc_paused()
def diagnose(component: str, declared: Sharing, seen: Sequence[Seen], ranks: Ranks) -> Diagnosis:
    """Infer the patterns that fit a component, and judge its declared one.

    Args:
        seen: by rank, without `rank_private` entries.
    """
    found = candidates(seen, ranks)
    conflicts = _conflicts(declared, seen, ranks)
    if not conflicts:
        remark = _remark(component, declared, found, seen, ranks)
        return Diagnosis(component, declared, found, PatternVerdict.WASTEFUL if remark else PatternVerdict.OK, remark)
    first = conflicts[0]
    both = (first.reference, first.rank)
    verdict = PatternVerdict.LOSES_STATE
    if declared.pattern is SharingPattern.GLOBAL and not any(
        leaves[conflict.key].dtype for conflict in conflicts for leaves in seen if conflict.key in leaves
    ):
        verdict = PatternVerdict.SUSPICIOUS
    sentence = f"{_contradiction(component, declared, conflicts, seen)}; {_remedy(component, found, conflicts, seen)}"
    return Diagnosis(component, declared, found, verdict, sentence, first.key, both)


def candidates(seen: Sequence[Seen], ranks: Ranks) -> tuple[Sharing, ...]:
    """Return the patterns under which no value would be lost, the one with the fewest copies first."""
    if len(ranks.world) == 1 or not any(seen[1:]):
        return (Sharing(SharingPattern.GLOBAL),)
    in_pieces = any(leaf.place is not None for leaves in seen for leaf in leaves.values())
    found = []
    replicated, sharded = Sharing(SharingPattern.REPLICATED), Sharing(SharingPattern.SHARDED)
    if not in_pieces and not _conflicts(replicated, seen, ranks):
        found.append(replicated)
    elif (in_pieces or len({frozenset(leaves) for leaves in seen}) > 1) and not _conflicts(sharded, seen, ranks):
        found.append(sharded)
    per_set = [Sharing(SharingPattern.PER_GROUP, name) for name in sorted(ranks.groups)]
    per_set.append(Sharing(SharingPattern.PER_NODE))
    per_set = [pattern for pattern in per_set if 1 < len(pattern.sets(ranks)) < len(ranks.world)]
    per_set = [pattern for pattern in per_set if not _conflicts(pattern, seen, ranks)]
    found += sorted(per_set, key=lambda one: len(one.sets(ranks)))
    if not in_pieces:
        found.append(Sharing(SharingPattern.PER_RANK))
    return tuple(found)


def _conflicts(sharing: Sharing, seen: Sequence[Seen], ranks: Ranks) -> list[Difference]:
    """Return the differences between ranks of which a save under this pattern would keep one value."""
    match sharing.pattern:
        case SharingPattern.PER_RANK:
            return []
        case SharingPattern.SHARDED:
            return differences(seen, [_distinct(ranks.world, seen)], must_have_all=False)
        case SharingPattern.GLOBAL:
            holders = [rank for rank in ranks.world if rank == ranks.world[0] or seen[rank]]
            return differences(seen, [_distinct(holders, seen)])
        case _:
            return differences(seen, [_distinct(holders, seen) for holders in sharing.sets(ranks)])


def _distinct(ranks: Sequence[int], seen: Sequence[Seen]) -> list[int]:
    """Drop ranks that share one mapping with an earlier rank, and so are known to be equal."""
    return sorted({id(seen[rank]): rank for rank in reversed(ranks)}.values())


def _contradiction(component: str, declared: Sharing, conflicts: Sequence[Difference], seen: Sequence[Seen]) -> str:
    """Return the contradiction: `optimizer is declared PER_GROUP tp_group, but its members differ in ...`."""
    first = conflicts[0]
    entry = f"`{first.key}`" + (f" {first.place}" if first.place else "")
    pair = f"ranks {first.reference} and {first.rank}"
    how = f" ({first.how})" if first.how else ""
    others = len({conflict.key for conflict in conflicts}) - 1
    total = len({key for leaves in seen for key in leaves})
    more = f" and {others} more of {total} entries" if others else ""
    where = f"{entry}{more}: {pair}{how}"
    but = {
        SharingPattern.PER_GROUP: f"but its members differ in {where}",
        SharingPattern.PER_NODE: f"but the ranks of one host differ in {where}",
        SharingPattern.GLOBAL: f"which keeps what rank 0 holds, but others differ from it in {where}",
        SharingPattern.SHARDED: f"but {pair} both hold {entry}, and not the same{more}{how}",
    }.get(declared.pattern, f"but {pair} differ in {entry}{more}{how}")
    return f"{component} is declared {declared}, {but}"


def _remedy(component: str, found: Sequence[Sharing], conflicts: Sequence[Difference], seen: Sequence[Seen]) -> str:
    """Return the pattern that fits, and how to declare it."""
    if not found:
        return "no pattern fits pieces of one tensor that are not equal on the ranks that hold them: make them equal before the save"
    best = found[0]
    to_declare = best.declaration(component)
    if best.pattern is SharingPattern.PER_RANK:
        return _remedy_per_rank(to_declare, conflicts, seen)
    fact = {
        SharingPattern.PER_GROUP: f"the group whose members agree is {best.group}",
        SharingPattern.PER_NODE: "the ranks of each host agree",
        SharingPattern.SHARDED: "together the ranks hold one state",
        SharingPattern.GLOBAL: "rank 0 alone holds anything of it",
    }.get(best.pattern, "all ranks agree")
    return f"{fact}: {to_declare}"


def _remedy_per_rank(to_declare: str, conflicts: Sequence[Difference], seen: Sequence[Seen]) -> str:
    alike = [ranks for ranks in _equal_ranks(seen) if len(ranks) > 1]
    if alike:
        shown = " and ".join(str(list(ranks)) for ranks in alike[:_MAX_SETS])
        return (
            f"the ranks that agree are {shown}, which is no process group of this run: give them one in process_groups and "
            f"declare it per_group, or {to_declare}"
        )
    size = {key: leaf.num_bytes for leaves in seen for key, leaf in leaves.items()}
    differing = {conflict.key for conflict in conflicts}
    if 2 * sum(size[key] for key in differing) < sum(size.values()):
        return (
            f"the other {len(size) - len(differing)} entries agree, and are the larger part: list what differs in the object's "
            f"attribute rank_private, or make it a component of its own, per_rank; or {to_declare}"
        )
    return f"every rank has its own: {to_declare}"


def _remark(component: str, declared: Sharing, found: Sequence[Sharing], seen: Sequence[Seen], ranks: Ranks) -> str:
    """Return the suggestion of a pattern with fewer copies, or "". Plain values alone give none: they are often equal by chance."""
    if len(ranks.world) == 1 or not any(leaf.dtype for leaves in seen for leaf in leaves.values()):
        return ""
    best = found[0]
    if declared.pattern is SharingPattern.GLOBAL:
        if best.pattern is not SharingPattern.REPLICATED:
            return ""
        return (
            f"{component} is declared GLOBAL, so rank 0 writes it alone, but all {len(ranks.world)} ranks hold equal bits of it: "
            f"as REPLICATED they share the writing, and can be compared: {best.declaration(component)}"
        )
    copies = declared.sets(ranks)
    needed = 1 if best.pattern is SharingPattern.SHARDED else len(best.sets(ranks))
    again, num_bytes = _saved_twice(copies, seen)
    if not again or needed >= len(copies):
        return ""
    return (
        f"{component} is declared {declared}, but ranks {again[0]} and {again[1]} hold equal bits, which are saved once for each "
        f"of {len(copies)} copies, {num_bytes / 1e6:.6g} MB more than need be; as {best} nothing is saved twice: "
        f"{best.declaration(component)}"
    )


def _saved_twice(copies: Sets, seen: Sequence[Seen]) -> tuple[tuple[int, int] | None, int]:
    """Return (two ranks whose equal tensors are saved separately, or None; number of bytes saved more than once)."""
    first_with: dict[frozenset[tuple[str, Fingerprint]], int] = {}
    again = None
    num_bytes = 0
    for ranks in copies:
        tensors = {key: leaf for key, leaf in seen[ranks[0]].items() if leaf.dtype}
        content = frozenset(tensors.items())
        if not content:
            continue
        first = first_with.setdefault(content, ranks[0])
        if first != ranks[0]:
            again = again or (first, ranks[0])
            num_bytes += sum(tensor.num_bytes for tensor in tensors.values())
    return again, num_bytes


def _equal_ranks(seen: Sequence[Seen]) -> Iterable[list[int]]:
    """Return lists of ranks that hold the same."""
    classes: dict[frozenset[tuple[str, Fingerprint]], list[int]] = {}
    for rank, leaves in enumerate(seen):
        classes.setdefault(frozenset(leaves.items()), []).append(rank)
    return classes.values()


_log = logging.getLogger("ckpt")

PATTERN_CHECKS = ("warn", "error", "off")
"""Treatment of the verdicts in the first save. All but "off" refuse a declaration that would lose state; for wasteful and suspicious
ones "warn" logs a warning and "error" refuses."""


def examine(
    components: Mapping[str, StateComponent], seen: Mapping[str, Mapping[str, Fingerprint]], topology: Topology
) -> list[Diagnosis]:
    """Diagnose every component. Collective; one result on all ranks.

    Every rank sends one digest per component. Where these differ, one rank for each distinct digest sends its entries to the lead
    rank: no traffic grows with the square of the ranks.

    Args:
        seen: component -> key -> fingerprint, of this rank.

    Raises:
        ConfigurationError: the ranks' declarations differ; on every rank.
    """
    declared = {key: component.sharing for key, component in components.items()}
    first_with: dict[str, list[int]] = {}  # on the lead: component -> by rank, the lowest rank with equal entries

    def senders() -> dict[str, list[int]]:
        _require_one_declaration(phase.merged["declared"])
        distinct = {key: DistinctRanks.of([report[at] for report in phase.gathered]) for at, key in enumerate(components)}
        first_with.update({key: tables.first_with_each() for key, tables in distinct.items()})
        return {key: tables.senders for key, tables in distinct.items() if len(tables.senders) > 1}

    with topology.phase("fingerprints") as phase:
        digests = {key: digest_of(json.dumps(leaves, sort_keys=True).encode()) for key, leaves in seen.items()}
        phase.to_lead = [digests.get(key) for key in components]
        phase.merge = {"declared": alike({key: str(sharing) for key, sharing in declared.items()})}
        phase.answer = senders
    held = _gather(seen, phase.from_lead, topology)
    with topology.phase("diagnose") as phase:
        if topology.is_lead:
            ranks = Ranks.of(topology)
            phase.from_lead = msgspec.to_builtins(
                [diagnose(key, declared[key], [held[rank][key] for rank in first_with[key]], ranks) for key in components]
            )
    return strict_json.convert(phase.from_lead, list[Diagnosis])


def act_on(
    diagnoses: Sequence[Diagnosis], components: Mapping[str, StateComponent], pattern_check: str, *, tell: bool
) -> None:
    """Warn about the diagnoses of a save, or refuse it. The outcome is equal on all ranks.

    A component with validation_level "none" is not compared on purpose: its loss of state is a warning, not an error.

    Args:
        tell: whether this rank logs the warnings.

    Raises:
        ReplicationError: a declaration would lose state.
        ConfigurationError: one is wasteful or suspicious, and `pattern_check` is "error".
    """
    remarks = []
    for diagnosis in diagnoses:
        if diagnosis.verdict is PatternVerdict.OK:
            continue
        excused = components[diagnosis.component].validation_level == "none"
        if diagnosis.verdict is PatternVerdict.LOSES_STATE and not excused:
            message = f"{diagnosis.sentence}. To save in spite of it, set pattern_check=off."
            raise ReplicationError(message, arguments=diagnosis.arguments)
        remarks.append(diagnosis)
    if remarks and pattern_check == "error":
        message = f"{remarks[0].sentence}. To save in spite of it, set pattern_check=warn."
        raise ConfigurationError(message, arguments=remarks[0].arguments)
    for remark in remarks if tell else ():
        _log.warning("%s (%s)", remark.sentence, remark.verdict.value)


def _gather(
    mine: Mapping[str, Seen], senders: Mapping[str, Sequence[int]], topology: Topology
) -> dict[int, Mapping[str, Seen]]:
    """Send the distinct states to the lead. Returns rank -> component -> key -> fingerprint there, {} elsewhere.

    Args:
        senders: component that differs -> the lowest rank with each of its states.
    """
    sending = {rank for ranks in senders.values() for rank in ranks}
    to_send = {key: mine[key] for key, ranks in senders.items() if topology.rank in ranks}
    outgoing = (
        {0: zlib.compress(json.dumps(to_send, separators=(",", ":")).encode(), 1)} if topology.rank in sending else {}
    )
    arrived = topology.exchange("digests", outgoing, sending if topology.is_lead else ())
    if not topology.is_lead:
        return {}
    fingerprints_of = dict[str, dict[str, Fingerprint]]
    held = {
        rank: strict_json.convert(json.loads(zlib.decompress(data)), fingerprints_of) for rank, data in arrived.items()
    }
    return held | {0: mine}


def _require_one_declaration(declared: Alike) -> None:
    if declared.is_alike:
        return
    on_lead, there = declared.value, declared.odd_value
    key = next(key for key in sorted({*on_lead, *there}) if on_lead.get(key) != there.get(key))
    raise ConfigurationError(
        f"component {key} is declared {on_lead.get(key, 'not at all')} on rank 0 and {there.get(key, 'not at all')} on rank "
        f"{declared.odd_rank}; all ranks must declare the same"
    )


_REPLICATED, _SHARDED = Sharing(SharingPattern.REPLICATED), Sharing(SharingPattern.SHARDED)


class AutoSharing:
    """The patterns that were found for the components of one run. Every rank has one, and all find the same.

    Attributes:
        settled: the components as the last `settle` returned them; before the first one, "auto" counts as replicated.
        examined: those whose state it compared on all ranks, bit by bit.
    """

    def __init__(self, components: Iterable[StateComponent], topology: Topology) -> None:
        self._components = list(components)
        self._topology = topology
        self._kept: dict[str, Sharing] = {}
        self.settled = [component.with_sharing(_REPLICATED) if component.is_auto else component for component in self._components]
        self.examined: set[str] = set()

    def settle(self) -> list[StateComponent]:
        """Return the components, each with the pattern to save it under. Collective if any is "auto".

        Raises:
            ReplicationError: a module's or optimizer's pattern cannot be known; on every rank.
        """
        unknown = [component for component in self._components if component.is_auto and component.key not in self._kept]
        self.examined = set()
        found = self._kept | {component.key: _declared(component) or _REPLICATED for component in unknown}
        unknown = [component for component in unknown if _declared(component) is None]
        if unknown and self._topology.world_size > 1:
            found |= self._find(unknown)
        self.settled = [
            self._settled(component, found[component.key]) if component.is_auto else component for component in self._components
        ]
        return self.settled

    def _settled(self, component: StateComponent, sharing: Sharing) -> StateComponent:
        """The component under a pattern that was found; copies of a module that may have diverged since are compared by samples."""
        found = component.with_sharing(sharing)
        if self._topology.world_size == 1 or not _is_large(component) or sharing.pattern not in EQUAL_COPIES:
            return found
        return replace(found, validate_replication=True, validation_level=component.validation_level or "quick")

    def _find(self, components: Sequence[StateComponent]) -> dict[str, Sharing]:
        seen: dict[str, Mapping[str, Fingerprint]] = {}
        with self._topology.phase("sharing") as phase:
            for component in components:
                phase.component = component.key
                seen[component.key] = _seen(component, self._topology.world_size)
            phase.component = None
            phase.merge = {
                "digests": alike_by_name({key: digest_of_json(leaves) for key, leaves in seen.items()}),
                "kinds": first({f"{_kind_of(leaves)} {key}": None for key, leaves in seen.items()}),
            }
        found: dict[str, Sharing] = {}
        unlike: list[StateComponent] = []
        to_keep: set[str] = set()
        for component in components:
            key = component.key
            kinds = {kind for kind in ("plain", "whole", "piece") if f"{kind} {key}" in phase.merged["kinds"]}
            if "piece" not in kinds and phase.merged["digests"][key].is_alike:
                found[key] = _REPLICATED
            elif "piece" not in kinds and not _is_large(component):
                found[key] = Sharing(SharingPattern.PER_RANK)
            else:
                unlike.append(component.with_sharing(_REPLICATED))
            self.examined.add(key)
            if _is_large(component) and kinds != {"plain"}:
                to_keep.add(key)
        if unlike:
            diagnoses = examine(
                {component.key: component for component in unlike},
                {component.key: seen[component.key] for component in unlike},
                self._topology,
            )
            found |= {diagnosis.component: _pattern_of(diagnosis) for diagnosis in diagnoses}
        self._kept |= {key: found[key] for key in to_keep}
        return found


def _is_large(component: StateComponent) -> bool:
    """Whether it is a module, an optimizer or a state dict, whose copies can only differ if they are parts."""
    return isinstance(component.stateful, ModelState | OptimizerState | Given)


def _declared(component: StateComponent) -> Sharing | None:
    """The pattern that the object declares itself."""
    stateful = component.stateful
    pattern = stateful.sharing_pattern if offers(stateful, Declared) else None
    return None if pattern is None else Sharing(SharingPattern(pattern))


@torch.no_grad()
def _seen(component: StateComponent, world_size: int) -> Mapping[str, Fingerprint]:
    """The state of this rank; nothing of an optional component that fails, which is not saved."""
    try:
        return look_at(component, world_size)
    except Exception:
        if component.required:
            raise
        return {}


def _kind_of(leaves: Mapping[str, Fingerprint]) -> str:
    """The kind of tensors: "piece" of larger ones, "whole", or "plain" for none."""
    if not any(leaf.dtype for leaf in leaves.values()):
        return "plain"
    return "piece" if any(leaf.place is not None for leaf in leaves.values()) else "whole"


def _pattern_of(diagnosis: Diagnosis) -> Sharing:
    """The pattern of a module or an optimizer that differs between ranks.

    Raises:
        ReplicationError: it may be parts of larger tensors, or copies that have diverged.
    """
    for wanted in (SharingPattern.REPLICATED, SharingPattern.SHARDED, SharingPattern.PER_GROUP):
        fitting = [pattern for pattern in diagnosis.found if pattern.pattern is wanted]
        if fitting:
            return fitting[0]
    if diagnosis.found == (Sharing(SharingPattern.GLOBAL),):  # on rank 0 alone
        return _SHARDED
    key, (first, other) = diagnosis.component, diagnosis.ranks
    raise ReplicationError(
        f"component {key}: ranks {first} and {other} hold different values of {diagnosis.leaf}, which does not say what part of a larger "
        "tensor each of them is. So its sharing pattern cannot be inferred: they may be parts, or copies that should be equal and are not. "
        f"Use DTensors, or name in process_groups a group whose members are equal. With sharing_pattern=per_rank for {key} the "
        "checkpoint would hold what each rank has"
    )
