"""Which sharing pattern is true? Inferred from one digest per leaf and rank, and held against the declared one.

Pure: what the ranks hold comes in as fingerprints (replication.py), which pattern_check.py gathers.

What is seen once proves a difference, never an equality: an optimizer before its first step, generators seeded alike or data at
position 0 look the same on all ranks whatever they are. So a declaration is refused only for a difference it leaves no room
for, because the save would keep one of two values; that it could be saved in fewer copies is no more than a remark, and only
where tensors are concerned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ckpt.format.gc_pause import gc_paused
from ckpt.state.replication import Difference, Fingerprint, differences
from ckpt.state.sharing import SharingPattern

Seen = Mapping[str, Fingerprint]
"""What one rank holds of a component: joined key -> fingerprint; plain values have no data type."""
Sets = tuple[tuple[int, ...], ...]
"""Ranks, in sets whose members are to hold the same."""

_MAX_SETS = 4


class PatternVerdict(Enum):
    """What a declaration would do to the state that was seen."""

    OK = "ok"
    WASTEFUL = "wasteful"
    """Everything is saved, but more often, or by fewer ranks, than need be."""
    SUSPICIOUS = "suspicious"
    """Something is not saved, and that may be meant so."""
    LOSES_STATE = "loses state"
    """Of values that differ, one is saved."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The sets of ranks that a pattern can speak of.

    Attributes:
        nodes: ranks by host.
        groups: name of a process group -> its instances.
    """

    nodes: Sets
    groups: Mapping[str, Sets]

    @property
    def world(self) -> tuple[int, ...]:
        return tuple(sorted(rank for ranks in self.nodes for rank in ranks))


@dataclass(frozen=True, slots=True)
class Sharing:
    """A pattern, with its group where it has one."""

    pattern: SharingPattern
    group: str | None = None

    def __str__(self) -> str:
        return self.pattern.name + (f" {self.group}" if self.group else "")

    def declaration(self, component: str) -> str:
        """What to do to declare it."""
        group = f" and process_group_name={self.group}" if self.group else ""
        return f"declare component {component} with sharing_pattern={self.pattern.value}{group}"

    def sets(self, ranks: Ranks) -> Sets:
        """The sets of ranks of which each should hold one state."""
        match self.pattern:
            case SharingPattern.PER_RANK:
                return tuple((rank,) for rank in ranks.world)
            case SharingPattern.PER_NODE:
                return ranks.nodes
            case SharingPattern.PER_GROUP:
                return ranks.groups[self.group or ""]
            case _:
                return (ranks.world,)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found out about one component.

    Attributes:
        found: the patterns under which nothing that was seen would be lost, the one with the fewest copies first.
        sentence: what a person reads; "" if there is nothing to say.
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

    def to_json(self) -> dict[str, Any]:
        return {
            "component": self.component,
            "declared": str(self.declared),
            "found": [str(one) for one in self.found],
            "verdict": self.verdict.value,
            "sentence": self.sentence,
            "leaf": self.leaf,
            "ranks": list(self.ranks),
        }


@gc_paused()
def diagnose(component: str, declared: Sharing, seen: Sequence[Seen], ranks: Ranks) -> Diagnosis:
    """Say what a component truly is, as far as one look can tell, and what its declaration would make of it.

    Args:
        seen: by rank; entries that the object calls `rank_private` are left out.
    """
    found = candidates(seen, ranks)
    conflicts = _conflicts(declared, seen, ranks)
    if not conflicts:
        remark = _remark(component, declared, found, seen, ranks)
        return Diagnosis(component, declared, found, PatternVerdict.WASTEFUL if remark else PatternVerdict.OK, remark)
    first = conflicts[0]
    both = (first.reference, first.rank)
    verdict = PatternVerdict.LOSES_STATE
    if declared.pattern is SharingPattern.GLOBAL and not any(_is_tensor(one.key, seen) for one in conflicts):
        verdict = PatternVerdict.SUSPICIOUS
    sentence = f"{_accusation(component, declared, conflicts, seen)}; {_truth(component, found, conflicts, seen)}"
    return Diagnosis(component, declared, found, verdict, sentence, first.key, both)


def candidates(seen: Sequence[Seen], ranks: Ranks) -> tuple[Sharing, ...]:
    """The patterns that lose nothing of what was seen, the one with the fewest copies first, and of equals the plainest."""
    if len(ranks.world) == 1 or not any(seen[1:]):
        return (Sharing(SharingPattern.GLOBAL),)
    in_pieces = any(one.place is not None for leaves in seen for one in leaves.values())
    found = []
    if _holds(Sharing(SharingPattern.REPLICATED), seen, ranks) and not in_pieces:
        found.append(Sharing(SharingPattern.REPLICATED))
    elif (in_pieces or len({frozenset(leaves) for leaves in seen}) > 1) and _holds(
        Sharing(SharingPattern.SHARDED), seen, ranks
    ):
        found.append(Sharing(SharingPattern.SHARDED))
    per_set = [Sharing(SharingPattern.PER_GROUP, name) for name in sorted(ranks.groups)]
    per_set.append(Sharing(SharingPattern.PER_NODE))
    per_set = [one for one in per_set if 1 < len(one.sets(ranks)) < len(ranks.world) and _holds(one, seen, ranks)]
    found += sorted(per_set, key=lambda one: len(one.sets(ranks)))
    if not in_pieces:
        found.append(Sharing(SharingPattern.PER_RANK))
    return tuple(found)


def _holds(sharing: Sharing, seen: Sequence[Seen], ranks: Ranks) -> bool:
    return not _conflicts(sharing, seen, ranks)


def _conflicts(sharing: Sharing, seen: Sequence[Seen], ranks: Ranks) -> list[Difference]:
    """The values of which a save by this pattern would keep one of two."""
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
    """Of ranks that are known to hold the same, for they share one mapping, only the first."""
    return sorted({id(seen[rank]): rank for rank in reversed(ranks)}.values())


def _accusation(component: str, declared: Sharing, conflicts: Sequence[Difference], seen: Sequence[Seen]) -> str:
    """`optimizer is declared PER_GROUP tp_group, but its members differ in ...`, in the words of each pattern."""
    first = conflicts[0]
    entry = f"`{first.key}`" + (f" {first.place}" if first.place else "")
    pair = f"ranks {first.reference} and {first.rank}"
    how = f" ({first.how})" if first.how else ""
    others = len({one.key for one in conflicts}) - 1
    total = len({key for leaves in seen for key in leaves})
    more = f" and {others} more of {total} entries" if others else ""
    is_declared = f"{component} is declared {declared}"
    match declared.pattern:
        case SharingPattern.PER_GROUP:
            return f"{is_declared}, but its members differ in {entry}{more}: {pair}{how}"
        case SharingPattern.PER_NODE:
            return f"{is_declared}, but the ranks of one host differ in {entry}{more}: {pair}{how}"
        case SharingPattern.GLOBAL:
            return (
                f"{is_declared}, which keeps what rank 0 holds, but others differ from it in {entry}{more}: {pair}{how}"
            )
        case SharingPattern.SHARDED:
            return f"{is_declared}, but {pair} both hold {entry}, and not the same{more}{how}"
        case _:
            return f"{is_declared}, but {pair} differ in {entry}{more}{how}"


def _truth(component: str, found: Sequence[Sharing], conflicts: Sequence[Difference], seen: Sequence[Seen]) -> str:
    """What agrees instead, and how to say so."""
    if not found:
        return "no pattern fits pieces of one tensor that are not equal on the ranks that hold them: make them equal before the save"
    best = found[0]
    to_declare = best.declaration(component)
    match best.pattern:
        case SharingPattern.PER_GROUP:
            return f"the group whose members agree is {best.group}: {to_declare}"
        case SharingPattern.PER_NODE:
            return f"the ranks of each host agree: {to_declare}"
        case SharingPattern.SHARDED:
            return f"together the ranks hold one state: {to_declare}"
        case SharingPattern.GLOBAL:
            return f"rank 0 alone holds anything of it: {to_declare}"
        case SharingPattern.PER_RANK:
            return _truth_of_each_rank(to_declare, conflicts, seen)
        case _:
            return f"all ranks agree: {to_declare}"


def _truth_of_each_rank(to_declare: str, conflicts: Sequence[Difference], seen: Sequence[Seen]) -> str:
    alike = [ranks for ranks in _classes(seen) if len(ranks) > 1]
    if alike:
        shown = " and ".join(str(list(ranks)) for ranks in alike[:_MAX_SETS])
        return (
            f"the ranks that agree are {shown}, which is no process group of this run: give them one in process_groups and "
            f"declare it per_group, or {to_declare}"
        )
    size = {key: one.num_bytes for leaves in seen for key, one in leaves.items()}
    differing = {one.key for one in conflicts}
    if 2 * sum(size[key] for key in differing) < sum(size.values()):
        return (
            f"the other {len(size) - len(differing)} entries agree, and are the larger part: list what differs in the object's "
            f"attribute rank_private, or make it a component of its own, per_rank; or {to_declare}"
        )
    return f"every rank has its own: {to_declare}"


def _remark(component: str, declared: Sharing, found: Sequence[Sharing], seen: Sequence[Seen], ranks: Ranks) -> str:
    """What could be had for less, if anything; plain values are not worth a word, and are equal by chance too often."""
    if len(ranks.world) == 1 or not any(one.dtype for leaves in seen for one in leaves.values()):
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
    again, num_bytes = _saved_again(copies, seen)
    if not again or needed >= len(copies):
        return ""
    return (
        f"{component} is declared {declared}, but ranks {again[0]} and {again[1]} hold equal bits, which are saved once for each "
        f"of {len(copies)} copies, {num_bytes / 1e6:.6g} MB more than need be; as {best} nothing is saved twice: "
        f"{best.declaration(component)}"
    )


def _saved_again(copies: Sets, seen: Sequence[Seen]) -> tuple[tuple[int, int] | None, int]:
    """Two ranks whose equal tensors are saved apart, if there are any, and the bytes of all that are saved again."""
    first_with: dict[frozenset[tuple[str, Fingerprint]], int] = {}
    again = None
    num_bytes = 0
    for ranks in copies:
        tensors = {key: one for key, one in seen[ranks[0]].items() if one.dtype}
        content = frozenset(tensors.items())
        if not content:
            continue
        first = first_with.setdefault(content, ranks[0])
        if first != ranks[0]:
            again = again or (first, ranks[0])
            num_bytes += sum(one.num_bytes for one in tensors.values())
    return again, num_bytes


def _classes(seen: Sequence[Seen]) -> Iterable[list[int]]:
    """The ranks by what they hold: those of one list hold the same."""
    classes: dict[frozenset[tuple[str, Fingerprint]], list[int]] = {}
    for rank, leaves in enumerate(seen):
        classes.setdefault(frozenset(leaves.items()), []).append(rank)
    return classes.values()


def _is_tensor(key: str, seen: Sequence[Seen]) -> bool:
    return any(leaves[key].dtype for leaves in seen if key in leaves)
