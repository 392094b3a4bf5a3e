"""Infer a component's sharing pattern from the ranks' fingerprints, and compare it with the declared one.

Pure: pattern_check.py gathers the fingerprints (replication.py).

One look proves differences, never equality: an optimizer before its first step, generators with one seed or data at position 0
are equal on all ranks under any pattern. So a declaration is refused only if ranks differ where it says that they agree, because
the save would keep one of two values. A pattern with fewer copies is only suggested, and only for tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec

from ckpt.errors import Argument
from ckpt.format.gc_pause import gc_paused
from ckpt.state.replication import Difference, Fingerprint, differences
from ckpt.state.sharing import Ranks, Sets, Sharing, SharingPattern

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
