"""What one rank contributes to a save: leaves, addresses, plain values; and how the ranks compare notes about them."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from ckpt.errors import ConfigurationError, ReplicationError, ShardingError, describe, rebuild, sentence
from ckpt.format.box import Box
from ckpt.format.gc_pause import gc_paused
from ckpt.format.manifest import digest_of
from ckpt.memory.device import wait_for_all
from ckpt.planning.tables import Table, TablePart, piece_from_json, table_of_pieces, table_to_json
from ckpt.ranks.topology import Topology
from ckpt.state.abilities import tied_names
from ckpt.state.address import local_tensor
from ckpt.state.flatten import Leaves, TensorLeaf, flatten, path_to_json, to_json
from ckpt.state.replication import (
    Fingerprint,
    ValidationLevel,
    differences,
    fingerprints,
    is_piece,
    level_of,
    measure,
    plain_differences,
    private_keys,
    require_unchanged,
    unequal,
)
from ckpt.state.sharded_tensor import ShardedTensor
from ckpt.state.sharing import (
    EQUAL_COPIES,
    OWN_COPIES,
    SharingPattern,
    StateComponent,
    addresses,
    find_aliases,
    gives,
    holders_of,
    prefix_of,
)

Held = tuple[tuple[Box, torch.Tensor], ...]
"""Boxes of one array, in global coordinates, and their values. A state dict's leaf is one box; a flattened range is a few."""


@dataclass(frozen=True, slots=True)
class Copies:
    """What one rank holds of a component whose copies are to be compared.

    Attributes:
        tensors: key -> the tensor; without the entries that are the rank's own.
    """

    level: ValidationLevel
    tensors: Mapping[str, TensorLeaf]
    fingerprints: Mapping[str, Fingerprint]


@dataclass(slots=True)
class RankState:
    """One rank's state, before anybody else's is known.

    Attributes:
        components: key -> component, those that are part of this save.
        held: array name -> the boxes of it that this rank holds, and its memory behind each; what `table` has addresses for.
        table: addresses and aliases.
        plain: component -> {joined key: [path, value]} as JSON, where this rank speaks for the component; tensors of an
            object that takes whatever was saved stand there too, as {joined key: [path]}.
        private: component -> keys of `plain` that are the rank's own and not compared.
        copies: component -> what is compared, of the components whose copies are to be.
        seen: component -> {key: fingerprint}, for the doctor, if it is to look.
        failed: optional component -> why it could not be collected.
    """

    components: dict[str, StateComponent] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    table: Table = field(default_factory=lambda: Table(()))
    plain: dict[str, dict[str, Any]] = field(default_factory=dict)
    private: dict[str, set[str]] = field(default_factory=dict)
    copies: dict[str, Copies] = field(default_factory=dict)
    seen: dict[str, dict[str, Fingerprint]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """What the other ranks need to know to see whether all agree: digests, not the things."""
        return {
            "table": _digest_of_json(table_to_json(self.table)),
            "plain": {key: _digest_of_json(_values(self.shared_plain(key))) for key in self.plain},
            "ways": {key: _digest_of_json(_ways(self.shared_plain(key))) for key in self.plain},
            "copies": {key: _digest_of_json(copies.fingerprints) for key, copies in self.copies.items()},
            "failed": self.failed,
        }

    def shared_plain(self, component: str) -> dict[str, Any]:
        """The plain values that other ranks may be expected to have, too."""
        own = self.private.get(component, set())
        return {key: row for key, row in self.plain[component].items() if key not in own}

    def require_unchanged(self) -> None:
        """At the level "full": make sure that what was compared is what was written. Called after the write.

        Raises:
            ReplicationError: a tensor was changed in between.
        """
        for key, copies in self.copies.items():
            if copies.level is ValidationLevel.FULL:
                require_unchanged(key, copies.fingerprints, copies.tensors)


@torch.no_grad()
@gc_paused()
def collect(
    components: Sequence[StateComponent],
    topology: Topology,
    *,
    without: Collection[str] = (),
    compare_all: bool = False,
    look: bool = False,
) -> RankState:
    """Ask every component for its state and give every tensor its address. No communication.

    Args:
        without: components left out because some rank could not give them.
        compare_all: compare every component that promises equal copies, not only those that ask for it.
        look: take the fingerprints of everything, for the doctor.

    Raises:
        CheckpointError: a required component failed; `.component` names it.
    """
    mine = RankState()
    parts: list[TablePart] = []
    aliases: list[tuple[str, str]] = []
    for component in components:
        if component.key in without:
            continue
        try:
            leaves = flatten(component.stateful.state_dict(), component.key)
            wait_for_all(_memory_of(leaves))
            tied = find_aliases(leaves.tensors, _declared_ties(component, leaves))
            leaves.tensors = {key: leaf for key, leaf in leaves.tensors.items() if key not in tied}
            private = _private(component, leaves)
            found = addresses(component, leaves, topology)
        except Exception as error:
            if component.required:
                raise rebuild(describe(error) | {"component": component.key}) from error
            mine.failed[component.key] = sentence(error)
            continue
        mine.components[component.key] = component
        mine.private[component.key] = private
        if not _speaks(component, topology):
            found = {key: address for key, address in found.items() if key not in private}
        mine.held |= {
            address.name: ((address.box, local_tensor(leaves.tensors[key])),) for key, address in found.items()
        }
        parts.append(TablePart.of(found.values()))
        start = f"{component.key}/{prefix_of(component, topology)}"
        if gives(component, topology):
            aliases += [(start + alias, start + first) for alias, first in tied.items()]
            mine.plain[component.key] = _plain_rows(component, leaves)
        _add_fingerprints(mine, component, leaves, compare_all, look, topology.progress)
        topology.progress()
    mine.table = Table(tuple(parts), tuple(aliases))
    return mine


def _memory_of(leaves: Leaves) -> Iterator[torch.Tensor]:
    for leaf in leaves.tensors.values():
        tensor = leaf.data if isinstance(leaf, ShardedTensor) else leaf
        if tensor is not None:
            yield tensor


def settle_plain(
    mine: RankState,
    summaries: Sequence[Mapping[str, Any]],
    topology: Topology,
    known: MergedRows | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the plain values of each component that this rank's copy of the checkpoint should hold.

    Usually the digests agree and nothing is exchanged. Where the ranks of a SHARDED component hold different keys, they are
    merged; where one key has different values, or copies that should be equal differ, every rank refuses.

    Args:
        known: what earlier saves of the same ranks have merged, and this one adds to: it is not exchanged again.

    Raises:
        ReplicationError: naming component, entries and ranks.
    """
    known = {} if known is None else known
    differing = [
        key
        for key, component in mine.components.items()
        if not _is_excused(component) and any(_differs(component, summaries, half, topology) for half in _HALVES)
    ]
    copies = [key for key, component in mine.components.items() if _differs(component, summaries, "copies", topology)]
    merges = {
        key: _Merge(mine, key, summaries, known)
        for key in differing
        if mine.components[key].pattern is SharingPattern.SHARDED
    }
    equal = [key for key in differing if key not in merges]
    if not equal and not copies and not any(merge.wanted for merge in merges.values()):
        return mine.plain | {key: merge.rows() for key, merge in merges.items()}
    with topology.phase("compare") as phase:
        phase.payload = {
            "plain": {key: mine.shared_plain(key) for key in equal if key in mine.plain}
            | {key: merge.to_send() for key, merge in merges.items() if merge.wanted},
            "copies": {
                key: [mine.copies[key].level.value, mine.copies[key].fingerprints]
                for key in copies
                if key in mine.copies
            },
        }
    said = phase.payloads
    unlike = {key: _unequal_tensors(key, mine, [one["copies"].get(key) for one in said], topology) for key in copies}
    merged = dict(mine.plain)
    with topology.phase("agree on copies"):
        for error in unlike.values():
            if error is not None:
                raise error
        for key in equal:
            _require_equal_plain(mine.components[key], [one["plain"].get(key) for one in said], topology)
        for key, merge in merges.items():
            merge.take([one["plain"].get(key) or {} for one in said])
            merged[key] = merge.rows()
    for merge in merges.values():
        merge.remember(known)
    return merged


def exchange_tables(mine: Table, digests: Sequence[str], topology: Topology) -> tuple[list[Table], list[int]]:
    """Return the distinct tables of all ranks, and for every rank which of them is its own; equal on every rank.

    What ranks have in common crosses the store once: first everybody learns of what pieces each table is made, then the
    lowest rank that has a piece sends it.

    Args:
        digests: of every rank's table, from its summary.
    """
    number_of = {digest: number for number, digest in enumerate(dict.fromkeys(digests))}
    pieces = table_to_json(mine)
    listed = [_digest_of_json(piece) for piece in pieces]
    with topology.phase("tables") as phase:
        phase.payload = listed if digests.index(digests[topology.rank]) == topology.rank else None
    made_of = {digest: lists for digest, lists in zip(digests, phase.payloads, strict=True) if lists is not None}
    first_with: dict[str, int] = {}
    for rank, lists in enumerate(phase.payloads):
        for digest in lists or ():
            first_with.setdefault(digest, rank)
    with topology.phase("pieces of tables") as phase:
        phase.payload = {d: piece for d, piece in zip(listed, pieces, strict=True) if first_with[d] == topology.rank}
    found = {digest: piece_from_json(tree) for sent in phase.payloads for digest, tree in sent.items()}
    tables = [table_of_pieces([found[digest] for digest in made_of[table]]) for table in number_of]
    return tables, [number_of[digest] for digest in digests]


def _declared_ties(component: StateComponent, leaves: Leaves) -> Mapping[str, str]:
    """{alias: first name} as the object declares it; in a state of a rank's own only where it holds the first name, too."""
    declared = tied_names(component.stateful)
    if component.pattern not in OWN_COPIES:
        return declared
    return {alias: first for alias, first in declared.items() if first in leaves.tensors}


def _plain_rows(component: StateComponent, leaves: Leaves) -> dict[str, Any]:
    """{joined key: [path, value]}, and for tensors of an object that takes whatever was saved, {joined key: [path]}."""
    rows: dict[str, Any] = {
        key: [path_to_json(leaves.paths[key]), to_json(value, f"{component.key}: {key}")]
        for key, value in leaves.plain.items()
    }
    if not hasattr(component.stateful, "prepare_to_load"):
        rows |= {key: [path_to_json(leaves.paths[key])] for key in leaves.tensors}
    return dict(sorted(rows.items()))


def _values(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Of rows of a plain.json, those of plain values."""
    return {key: row for key, row in rows.items() if len(row) == 2}


def _ways(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Those of tensors: the ways to them, which rarely change from one save to the next, and of which there may be very many."""
    return {key: row for key, row in rows.items() if len(row) == 1}


_HALVES: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {"plain": _values, "ways": _ways}
"""What a summary calls the halves of a component's rows, and what gives them."""


@dataclass(frozen=True, slots=True)
class _Merged:
    """One half of a SHARDED component's rows, as all ranks together have it.

    Attributes:
        digests: of each rank's rows.
        holder: key -> the first rank that has it.
    """

    digests: tuple[str | None, ...]
    rows: dict[str, Any]
    holder: dict[str, int]


MergedRows = dict[tuple[str, str], _Merged]
"""(Component, which half) -> what was merged."""


class _Merge:
    """The union of the ranks' rows of one SHARDED component; a key that two ranks hold must have one value.

    Attributes:
        wanted: the halves that have to be exchanged for it: those in which the ranks differ, and not as in an earlier save.
    """

    def __init__(
        self, mine: RankState, component: str, summaries: Sequence[Mapping[str, Any]], known: MergedRows
    ) -> None:
        self._component = component
        self._own = mine.plain.get(component, {})
        self._digests = {half: tuple(one[half].get(component) for one in summaries) for half in _HALVES}
        self._merged = {
            half: known[component, half]
            for half, digests in self._digests.items()
            if (component, half) in known and known[component, half].digests == digests
        }
        self.wanted = [
            half for half, digests in self._digests.items() if len(set(digests)) > 1 and half not in self._merged
        ]

    def to_send(self) -> dict[str, Any]:
        """Those of this rank's rows that the others want."""
        return {key: row for half in self.wanted for key, row in _HALVES[half](self._own).items()}

    def take(self, said: Sequence[Mapping[str, Any]]) -> None:
        """Merge what all ranks have sent."""
        for half in self.wanted:
            self._merged[half] = self._union(half, [_HALVES[half](rows) for rows in said])

    def rows(self) -> dict[str, Any]:
        """All rows, in the order of a plain.json. What is wrong with them, all ranks find alike."""
        rows = dict(sorted(self._joined().items()))
        _require_one_nesting(self._component, rows, self._holder_of)
        return rows

    def remember(self, known: MergedRows) -> None:
        """Spare a later save the exchange."""
        known.update({(self._component, half): merged for half, merged in self._merged.items()})

    def _union(self, half: str, by_rank: Sequence[Mapping[str, Any]]) -> _Merged:
        rows: dict[str, Any] = {}
        holder: dict[str, int] = {}
        for rank, own in enumerate(by_rank):
            for key, row in own.items():
                if rows.setdefault(key, row) != row:
                    raise self._unequal(key, row, rank, rows[key], holder[key])
                holder.setdefault(key, rank)
        return _Merged(self._digests[half], rows, holder)

    def _joined(self) -> dict[str, Any]:
        """The rows of both halves; of one in which the ranks agree, this rank's."""
        joined: dict[str, Any] = {}
        for half, part in _HALVES.items():
            rows = self._merged[half].rows if half in self._merged else part(self._own)
            for key in sorted(joined.keys() & rows.keys()):
                raise self._unequal(key, rows[key], self._holder_of(key, half), joined[key], self._holder_of(key))
            joined |= rows
        return joined

    def _holder_of(self, key: str, only: str | None = None) -> int:
        """The first rank that has a key; of what the ranks have in common that is the lowest."""
        halves = [only] if only else list(_HALVES)
        found = [
            self._merged[half].holder[key]
            for half in halves
            if half in self._merged and key in self._merged[half].holder
        ]
        return found[0] if found else 0

    def _unequal(self, key: str, row: Any, rank: int, other: Any, other_rank: int) -> ReplicationError:
        what, there = (repr(one[1]) if len(one) == 2 else "a tensor" for one in (row, other))
        return ReplicationError(
            f"component {self._component}: {key} is {what} on rank {rank} and {there} on rank {other_rank}; a plain value of "
            "a sharded component must be equal wherever it is held"
        )


def _require_one_nesting(component: str, rows: Mapping[str, Any], holder_of: Callable[[str], int]) -> None:
    """Refuse a value in whose place another rank has a dictionary or list of more: no load could give both back.

    Args:
        rows: sorted by key.
    """
    keys = list(rows)
    for above, (way, *value) in rows.items():
        if not value or value == [{}]:
            continue
        start = f"{above}." if way else ""
        for key in islice(keys, bisect_left(keys, start), None):
            if not key.startswith(start):
                break
            if key != above and rows[key][0][: len(way)] == way:
                raise ShardingError(
                    f"component {component}: {above} is {value[0]!r} on rank {holder_of(above)}, and rank {holder_of(key)} has "
                    f"{key} below it; the ranks of a sharded component must nest what they hold alike"
                )


def _differs(component: StateComponent, summaries: Sequence[Mapping[str, Any]], what: str, topology: Topology) -> bool:
    return any(
        len({summaries[rank][what].get(component.key) for rank in ranks}) > 1
        for ranks in holders_of(component, topology)
    )


def _is_excused(component: StateComponent) -> bool:
    """Whether its owner wants its copies not to be compared at all, plain values included."""
    return component.pattern in EQUAL_COPIES and component.validation_level == ValidationLevel.NONE.value


def _private(component: StateComponent, leaves: Leaves) -> set[str]:
    """The keys that are each rank's own; pieces of larger tensors say themselves whose they are."""
    if component.pattern not in EQUAL_COPIES:
        return set()
    named = private_keys(component.stateful, leaves.paths)
    return {key for key in named if key not in leaves.tensors or not is_piece(leaves.tensors[key])}


def _speaks(component: StateComponent, topology: Topology) -> bool:
    """Whether this rank is the one whose own entries are saved: the first of those that hold one state."""
    return all(topology.rank not in ranks or topology.rank == ranks[0] for ranks in holders_of(component, topology))


def _add_fingerprints(
    mine: RankState,
    component: StateComponent,
    leaves: Leaves,
    compare_all: bool,
    look: bool,
    progress: Callable[[], None],
) -> None:
    """Hash what the ranks compare of a component, and what the doctor looks at; no tensor twice by every bit."""
    key, private = component.key, mine.private[component.key]
    tensors = {name: leaf for name, leaf in leaves.tensors.items() if name not in private}
    level = ValidationLevel.NONE
    if component.pattern in EQUAL_COPIES:
        level = level_of(
            validate_replication=component.validate_replication,
            validation_level=component.validation_level,
            validate_all=compare_all,
        )
    prints: dict[str, Fingerprint] = {}
    if level is not ValidationLevel.NONE:
        prints = fingerprints(tensors, level, progress)
        mine.copies[key] = Copies(level, tensors, prints)
    if look:
        if not level.covers(ValidationLevel.TENSOR):
            prints = fingerprints(tensors, ValidationLevel.TENSOR, progress)
        plain = _plain_rows(component, leaves)
        mine.seen[key] = prints | {name: _fingerprint_of(plain[name]) for name in leaves.plain if name not in private}


def _fingerprint_of(row: Any) -> Fingerprint:
    data = json.dumps(row).encode()
    return Fingerprint("", (len(data),), digest_of(data))


def _unequal_tensors(key: str, mine: RankState, said: Sequence[Any], topology: Topology) -> ReplicationError | None:
    """What there is to say of tensors that differ; at the level "full" with how far they are apart. Collective.

    Args:
        said: by rank, the level and the fingerprints; None from one that compares nothing.

    Raises:
        ConfigurationError: the ranks compare at different levels; on every rank.
    """
    levels = ["none" if one is None else one[0] for one in said]
    for rank, level in enumerate(levels):
        if level != levels[0]:
            raise ConfigurationError(
                f"component {key} is compared at the level {levels[0]} on rank 0 and {level} on rank {rank}; all ranks must "
                "declare the same"
            )
    copies = [{name: Fingerprint.of_json(row) for name, row in rows.items()} for _, rows in said]
    holders = holders_of(mine.components[key], topology)
    found = differences(copies, holders)
    if not found:
        return None
    is_full = mine.copies[key].level is ValidationLevel.FULL
    return unequal(key, holders, found, measure(found, copies, mine.copies[key].tensors, topology) if is_full else {})


def _require_equal_plain(
    component: StateComponent, values: Sequence[Mapping[str, Any] | None], topology: Topology
) -> None:
    holders = holders_of(component, topology)
    found = plain_differences([rows or {} for rows in values], holders)
    if found:
        raise unequal(component.key, holders, found)


def _digest_of_json(tree: Any) -> str:
    return digest_of(json.dumps(tree, separators=(",", ":")).encode())
