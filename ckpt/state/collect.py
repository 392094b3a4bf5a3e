"""State of one rank for a save: tensors, addresses, plain values; comparison and exchange of these between ranks."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import msgspec
import torch

from ckpt.errors import ConfigurationError, ReplicationError, ShardingError, describe, rebuild, sentence
from ckpt.format import strict_json
from ckpt.format.box import Box
from ckpt.format.digests import digest_of
from ckpt.format.dtypes import zarr_name
from ckpt.format.gc_pause import gc_paused
from ckpt.memory.device import Device, device_of, wait_for_all
from ckpt.planning.plan import Address, Table, TablePart, piece_from_json, table_of_pieces, table_to_json
from ckpt.ranks.merging import Alike, alike, alike_by_name, first
from ckpt.ranks.topology import Phase, Topology
from ckpt.state.abilities import Prepared, PreparedFrom, offers, tied_names
from ckpt.state.address import local_tensor
from ckpt.state.flatten import Leaves, TensorLeaf, flatten, rows_of
from ckpt.state.replication import (
    Fingerprint,
    ValidationLevel,
    differences,
    fingerprints,
    is_piece,
    measure,
    plain_differences,
    private_keys,
    replication_error,
    require_unchanged,
)
from ckpt.state.sharded_tensor import ShardedTensor
from ckpt.state.sharing import (
    EQUAL_COPIES,
    OWN_COPIES,
    SharingPattern,
    StateComponent,
    addresses,
    contributes,
    find_aliases,
    holders_of,
    level_of,
)
from ckpt.state.tensor_classes import require_dense

Held = tuple[tuple[Box, torch.Tensor], ...]
"""(Box in global coordinates, this rank's memory) of one array. A leaf is one box, a flattened range several."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Tensors of one component, on one rank, for comparison with equal copies.

    Attributes:
        tensors: key -> tensor, without `rank_private` entries.
    """

    level: ValidationLevel
    tensors: Mapping[str, TensorLeaf]
    fingerprints: Mapping[str, Fingerprint]


@dataclass(slots=True)
class RankState:
    """One rank's state before any exchange with other ranks.

    Attributes:
        components: key -> component of this save.
        held: array name -> boxes that this rank holds, one for each address in `table`.
        table: addresses and aliases.
        plain: component -> {joined key: [path, value]} as JSON, if this rank contributes plain values; also {joined key: [path]} for
            tensors of an object that is not `Prepared`.
        private: component -> keys of `plain` that differ between ranks and are not compared.
        copies: component -> tensors to compare.
        seen: component -> {key: fingerprint} for the doctor, if it runs.
        failed: optional component -> error.
    """

    components: dict[str, StateComponent] = field(default_factory=dict)
    held: dict[str, Held] = field(default_factory=dict)
    table: Table = field(default_factory=lambda: Table(()))
    plain: dict[str, dict[str, Any]] = field(default_factory=dict)
    private: dict[str, set[str]] = field(default_factory=dict)
    copies: dict[str, Copies] = field(default_factory=dict)
    seen: dict[str, dict[str, Fingerprint]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    _digests: dict[str, dict[str, str]] = field(default_factory=dict)

    @classmethod
    def of_pieces(
        cls, component: StateComponent, pieces: Iterable[tuple[str, Sequence[int], Box, torch.Tensor]]
    ) -> RankState:
        """Describe tensors that are located already, without plain values.

        Args:
            pieces: (key of the array in the component, its global shape, box of this piece, its values). Several may be of one array.
        """
        held: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        addresses = []
        for key, shape, box, values in pieces:
            name = f"{component.key}/{key}"
            require_dense(values, name)
            addresses.append(Address(name, zarr_name(values.dtype), tuple(shape), box))
            held.setdefault(name, []).append((box, values.detach()))
        return cls(
            components={component.key: component},
            held={name: tuple(boxes) for name, boxes in held.items()},
            table=Table((TablePart.of(addresses),)),
        )

    @property
    def device(self) -> Device:
        """The device of the tensors."""
        return device_of(tensor for boxes in self.held.values() for _, tensor in boxes)

    def digests(self, part: str) -> dict[str, str]:
        """Return component -> digest of what other ranks compare with theirs.

        Args:
            part: "plain" (values), "paths" (of tensors), or "copies" (fingerprints of tensors).
        """
        if part not in self._digests:
            half = _HALVES.get(part)
            if half is None:
                found = {key: digest_of_json(copies.fingerprints) for key, copies in self.copies.items()}
            else:
                found = {key: digest_of_json(_in_order_of_keys(half(self.shared_plain(key)))) for key in self.plain}
            self._digests[part] = found
        return self._digests[part]

    def shared_plain(self, component: str) -> dict[str, Any]:
        """Return the plain values of a component without those of this rank alone."""
        own = self.private.get(component, set())
        return {key: row for key, row in self.plain[component].items() if key not in own}

    def require_unchanged(self) -> None:
        """At the level "full": check that the tensors have not changed since the comparison. Called after the write.

        Raises:
            ReplicationError: a tensor has changed.
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
    known: Collection[str] = (),
) -> RankState:
    """Collect the state of every component and the address of every tensor. Not collective.

    Args:
        without: components to skip because they failed on some rank.
        compare_all: compare every component with equal copies, not only those with `validate_replication`.
        look: take the fingerprints of everything, for the doctor;
        known: but for these components.

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
            private = _private_keys(component, leaves)
            found = addresses(component, leaves, topology)
        except Exception as error:
            if component.required:
                raise rebuild(describe(error) | {"component": component.key}) from error
            mine.failed[component.key] = sentence(error)
            continue
        mine.components[component.key] = component
        mine.private[component.key] = private
        if not _saves_private_entries(component, topology):
            found = {key: address for key, address in found.items() if key not in private}
        mine.held |= {
            address.name: ((address.box, local_tensor(leaves.tensors[key])),) for key, address in found.items()
        }
        parts.append(TablePart.of(found.values()))
        start = f"{component.key}/{component.sharing.prefix(topology)}"
        if contributes(component, topology):
            aliases += [(start + alias, start + first) for alias, first in tied.items()]
            mine.plain[component.key] = _plain_rows(component, leaves, tied)
        is_seen = look and component.key not in known
        _add_fingerprints(mine, component, leaves, compare_all, is_seen, topology)
        topology.progress()
    mine.table = Table(tuple(parts), tuple(aliases))
    return mine


def _memory_of(leaves: Leaves) -> Iterator[torch.Tensor]:
    for leaf in leaves.tensors.values():
        tensor = leaf.data if isinstance(leaf, ShardedTensor) else leaf
        if tensor is not None:
            yield tensor


class DistinctRanks(NamedTuple):
    """Which ranks have equal values, such as tables.

    Attributes:
        senders: the lowest rank with each distinct value.
        number_of_rank: by rank, the number of its value among these.
    """

    senders: list[int]
    number_of_rank: list[int]

    @classmethod
    def of(cls, digests: Sequence[str | None]) -> DistinctRanks:
        """Group ranks by the digests of their values."""
        lowest: dict[str | None, int] = {}
        for rank, digest in enumerate(digests):
            lowest.setdefault(digest, rank)
        number_of = {digest: number for number, digest in enumerate(lowest)}
        return cls([*lowest.values()], [number_of[digest] for digest in digests])

    def first_with_each(self) -> list[int]:
        """Return, by rank, the lowest rank with an equal value."""
        return [self.senders[number] for number in self.number_of_rank]


@dataclass(frozen=True, slots=True)
class Compared:
    """What the ranks know of each other's states; equal on all ranks.

    Attributes:
        number: of the comparison: what is made of it is known by this number.
        failed: optional component -> the error of the lowest rank on which it failed.
        differing: (component, part) of which ranks that should hold the same have different digests.
        merged: (component, half) whose merge of an earlier save still holds, because no rank's rows have changed since.
        tables: None: those of the last plan.
    """

    number: int
    failed: dict[str, str]
    differing: frozenset[tuple[str, str]]
    merged: frozenset[tuple[str, str]]
    tables: DistinctRanks | None


class Comparison:
    """Compares the states of all ranks, save after save: each rank sends digests to the lead, and hears what differs.

    Attributes:
        merges: results of merges, which need no new exchange while no rank's rows change.
    """

    def __init__(self, topology: Topology) -> None:
        self.merges: MergedRows = {}
        self._topology = topology
        self._number = 0  # on the lead
        self._planned: tuple[int, str] | None = None  # the comparison of the last plan, and this rank's digest in it
        self._table = ""

    def say(self, mine: RankState, phase: Phase) -> None:
        """Set what this rank says of its state in a phase."""
        self._table = digest_of_json(table_to_json(mine.table))
        number, table = self._planned or (0, "")
        phase.to_lead = self._table
        phase.answer = lambda: self._answer(phase)
        phase.merge = {
            "failed": first(mine.failed),
            "planned": alike(number if table == self._table else 0),
            "digests": alike_by_name(self._digests(mine)),
            "merged": alike_by_name(self._earlier(mine)),
        }

    def heard(self, phase: Phase) -> Compared:
        """Return what the lead has answered."""
        number, failed, differing, merged, tables = phase.from_lead
        in_pairs = [frozenset((key, part) for key, part in names) for names in (differing, merged)]
        return Compared(number, failed, in_pairs[0], in_pairs[1], None if tables is None else DistinctRanks(*tables))

    def plan_is_made(self, compared: Compared) -> None:
        """Note that all ranks have made a plan of the tables that were compared last."""
        self._planned = compared.number, self._table

    def _digests(self, mine: RankState) -> dict[str, str | None]:
        """Return what ranks that hold one state compare, by component, part and the first of these ranks."""
        found = {}
        for part in _PARTS:
            digests = mine.digests(part)
            for key, component in mine.components.items():
                for ranks in holders_of(component, self._topology):
                    if self._topology.rank in ranks and len(ranks) > 1:
                        found[json.dumps([key, part, ranks[0]])] = digests.get(key)
        return found

    def _earlier(self, mine: RankState) -> dict[str, int]:
        """Return the number of the comparison after which the rows were merged that this rank has still; 0: none."""
        found = {}
        for half in _HALVES:
            digests = mine.digests(half)
            for key, component in mine.components.items():
                if component.pattern is SharingPattern.SHARDED:
                    merge = self.merges.get((key, half))
                    found[json.dumps([key, half])] = merge.number if merge and merge.digest == digests.get(key) else 0
        return found

    def _answer(self, phase: Phase) -> list[Any]:
        """Return what all ranks hear. Lead rank only."""
        reports = phase.merged
        self._number += 1
        differing = {tuple(json.loads(name)[:2]) for name, compared in reports["digests"].items() if not compared.is_alike}
        merged = [json.loads(name) for name, compared in reports["merged"].items() if compared.is_alike and compared.value]
        planned: Alike = reports["planned"]
        tables = None if planned.is_alike and planned.value else DistinctRanks.of(phase.gathered)
        failed = {key: f"{reason} (rank {rank})" for key, (rank, reason) in reports["failed"].items()}
        return [self._number, failed, sorted(differing), merged, tables]


def settle_plain(
    mine: RankState, compared: Compared, topology: Topology, merges: MergedRows | None = None
) -> dict[str, dict[str, Any]]:
    """Return the plain values of each component for the checkpoint, after comparing them with the other ranks'. Collective.

    If all digests agree, which is usual, nothing is exchanged. Different keys of a SHARDED component are merged.

    Args:
        merges: those of the `Comparison`; this call adds its own.

    Raises:
        ReplicationError: one key has different values, or equal copies differ; names component, entries and ranks. On every rank.
    """
    merges = {} if merges is None else merges
    differing = [
        key
        for key, component in mine.components.items()
        if not _is_never_compared(component) and any((key, half) in compared.differing for half in _HALVES)
    ]
    copies = [key for key in mine.components if (key, "copies") in compared.differing]
    merging = {
        key: _Merge(mine, key, compared, merges)
        for key in differing
        if mine.components[key].pattern is SharingPattern.SHARDED
    }
    equal = [key for key in differing if key not in merging]
    if not equal and not copies and not any(merge.wanted for merge in merging.values()):
        return mine.plain | {key: merge.rows() for key, merge in merging.items()}
    with topology.phase("compare") as phase:
        phase.payload = {
            "plain": {key: mine.shared_plain(key) for key in equal if key in mine.plain}
            | {key: merge.to_send() for key, merge in merging.items() if merge.wanted},
            "copies": {
                key: [mine.copies[key].level.value, mine.copies[key].fingerprints]
                for key in copies
                if key in mine.copies
            },
        }
    payloads = phase.payloads
    unlike = {key: _unequal_tensors(key, mine, [offer["copies"].get(key) for offer in payloads], topology) for key in copies}
    merged = dict(mine.plain)
    with topology.phase("agree on copies"):
        for error in unlike.values():
            if error is not None:
                raise error
        for key in equal:
            holders = holders_of(mine.components[key], topology)
            found = plain_differences([offer["plain"].get(key) or {} for offer in payloads], holders)
            if found:
                raise replication_error(key, holders, found)
        for key, merge in merging.items():
            merge.take([offer["plain"].get(key) or {} for offer in payloads])
            merged[key] = merge.rows()
    for merge in merging.values():
        merge.remember(merges)
    return merged


def exchange_tables(mine: Table, distinct: DistinctRanks, topology: Topology) -> tuple[list[Table], list[int]]:
    """Return (distinct tables of all ranks, index of its table by rank), equal on every rank. Collective.

    Pieces that ranks share cross the store once: first the digests of the pieces of each table are exchanged, then the lowest rank
    with a piece sends it.
    """
    pieces = table_to_json(mine)
    listed = [digest_of_json(piece) for piece in pieces]
    with topology.phase("tables") as phase:
        phase.payload = listed if topology.rank in distinct.senders else None
    trees = exchange_distinct(dict(zip(listed, pieces, strict=True)), phase.payloads, topology, "pieces of tables")
    found = {digest: piece_from_json(tree) for digest, tree in trees.items()}
    tables = [table_of_pieces([found[digest] for digest in phase.payloads[rank]]) for rank in distinct.senders]
    return tables, distinct.number_of_rank


def exchange_distinct(
    mine: Mapping[str, Any], listed: Sequence[Sequence[str] | None], topology: Topology, phase_name: str
) -> dict[str, Any]:
    """Return digest -> JSON tree of all ranks; the lowest rank that has a tree sends it. Collective.

    Args:
        mine: digest -> JSON tree of this rank.
        listed: by rank, its digests; None: a lower rank has listed the same.
    """
    first_with: dict[str, int] = {}
    for rank, digests in enumerate(listed):
        for digest in digests or ():
            first_with.setdefault(digest, rank)
    with topology.phase(phase_name) as phase:
        phase.payload = {digest: tree for digest, tree in mine.items() if first_with[digest] == topology.rank} or None
    return {digest: tree for sent in phase.payloads if sent for digest, tree in sent.items()}


def digest_of_json(tree: Any) -> str:
    """Return a digest of JSON values, for comparison between ranks of one run."""
    try:
        data = msgspec.json.encode(tree)
    except UnicodeEncodeError:  # half of a surrogate pair, which `json` escapes
        data = json.dumps(tree).encode()
    return digest_of(data)


def _declared_ties(component: StateComponent, leaves: Leaves) -> Mapping[str, str]:
    """Return {alias: first name} declared by the object. If ranks have states of their own, only pairs held here completely."""
    declared = tied_names(component.stateful)
    if component.pattern not in OWN_COPIES:
        return declared
    return {alias: first for alias, first in declared.items() if first in leaves.tensors}


def _plain_rows(component: StateComponent, leaves: Leaves, tied: Collection[str] = ()) -> dict[str, Any]:
    """Return {joined key: [path, value]}, and {joined key: [path]} for tensors of an object that is not `Prepared`, in its order."""
    stateful = component.stateful
    tensors: Collection[str] = dict.fromkeys((*leaves.tensors, *tied))
    if offers(stateful, PreparedFrom):
        tensors = stateful.paths_to_save(tensors, leaves.paths)
    elif offers(stateful, Prepared):
        tensors = ()
    return rows_of(leaves, component.key, paths_of=tensors)


def _values(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Select the rows of plain values."""
    return {key: row for key, row in rows.items() if len(row) == 2}


def _tensor_paths(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Select the rows of tensors: paths. There may be very many, and they rarely change between saves."""
    return {key: row for key, row in rows.items() if len(row) == 1}


def _in_order_of_keys(rows: dict[str, Any]) -> dict[str, Any]:
    """For digests: ranks may have given equal entries in another order."""
    return dict(sorted(rows.items()))


_HALVES: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {"plain": _values, "paths": _tensor_paths}
"""Halves of a component's rows. Each half is compared and merged separately."""

_PARTS = (*_HALVES, "copies")
"""What is compared of each component: the halves, and the fingerprints of equal copies."""


@dataclass(frozen=True, slots=True)
class _Merged:
    """Union of all ranks' rows of one half of a SHARDED component.

    Attributes:
        number: of the comparison that it follows.
        digest: of this rank's rows.
        holder: key -> the first rank that has it; empty if all ranks have equal rows.
    """

    number: int
    digest: str | None
    rows: dict[str, Any]
    holder: dict[str, int]


MergedRows = dict[tuple[str, str], _Merged]
"""(Component, half) -> union."""


class _Merge:
    """Merge of the ranks' rows of one SHARDED component. A key that several ranks hold must have one value.

    Attributes:
        wanted: halves to exchange: the ranks differ in them, and differently than in an earlier save.
    """

    def __init__(self, mine: RankState, component: str, compared: Compared, merges: MergedRows) -> None:
        self._component = component
        self._own = mine.plain.get(component, {})
        self._number = compared.number
        self._digests = {half: mine.digests(half).get(component) for half in _HALVES}
        self._merged: dict[str, _Merged] = {}
        for half in _HALVES:
            if (component, half) in compared.merged:
                self._merged[half] = merges[component, half]
            elif (component, half) not in compared.differing:
                self._merged[half] = self._made(half, _HALVES[half](self._own))
        self.wanted = [half for half in _HALVES if half not in self._merged]

    def _made(self, half: str, rows: dict[str, Any]) -> _Merged:
        return _Merged(self._number, self._digests[half], rows, {})

    def to_send(self) -> dict[str, Any]:
        """Return this rank's rows of the wanted halves."""
        return {key: row for half in self.wanted for key, row in _HALVES[half](self._own).items()}

    def take(self, reports: Sequence[Mapping[str, Any]]) -> None:
        """Merge the rows of all ranks."""
        for half in self.wanted:
            merged = self._made(half, {})
            for rank, rows in enumerate(reports):
                for key, row in _HALVES[half](rows).items():
                    if merged.rows.setdefault(key, row) != row:
                        raise self._conflict_error(key, row, rank, merged.rows[key], merged.holder[key])
                    merged.holder.setdefault(key, rank)
            self._merged[half] = merged

    def rows(self) -> dict[str, Any]:
        """Return all rows: this rank's in its order, then those of others. Raises the same error on every rank."""
        plain, paths = (self._merged[half] for half in _HALVES)
        for key in sorted(plain.rows.keys() & paths.rows.keys()):
            holders = paths.holder.get(key, 0), plain.holder.get(key, 0)
            raise self._conflict_error(key, paths.rows[key], holders[0], plain.rows[key], holders[1])
        rows = plain.rows | paths.rows
        _require_one_nesting(self._component, _in_order_of_keys(rows), plain.holder | paths.holder)
        return {key: rows[key] for key in dict.fromkeys((*self._own, *rows))}

    def remember(self, merges: MergedRows) -> None:
        """Store the exchanged halves for later saves."""
        merges |= {(self._component, half): self._merged[half] for half in self.wanted}

    def _conflict_error(self, key: str, row: Any, rank: int, other: Any, other_rank: int) -> ReplicationError:
        what, there = (repr(row_of[1]) if len(row_of) == 2 else "a tensor" for row_of in (row, other))
        return ReplicationError(
            f"component {self._component}: {key} is {what} on rank {rank} and {there} on rank {other_rank}; a plain value of "
            "a sharded component must be equal on all ranks that hold it"
        )


def _require_one_nesting(component: str, rows: Mapping[str, Any], holder: Mapping[str, int]) -> None:
    """Refuse a value at a path where another rank has a dictionary or list: no load could restore both.

    Args:
        rows: sorted by key.
        holder: key -> the first rank that has it; 0 for others.
    """
    keys = list(rows)
    for above, (path, *value) in rows.items():
        if not value or value == [{}]:
            continue
        start = f"{above}." if path else ""
        for key in islice(keys, bisect_left(keys, start), None):
            if not key.startswith(start):
                break
            if key != above and rows[key][0][: len(path)] == path:
                raise ShardingError(
                    f"component {component}: {above} is {value[0]!r} on rank {holder.get(above, 0)}, and rank {holder.get(key, 0)} has "
                    f"{key} below it; the ranks of a sharded component must nest their values alike"
                )


def _is_never_compared(component: StateComponent) -> bool:
    """Whether a component's copies are never compared, plain values included."""
    return component.pattern in EQUAL_COPIES and component.validation_level == ValidationLevel.NONE.value


def _private_keys(component: StateComponent, leaves: Leaves) -> set[str]:
    """Return the `rank_private` keys, without pieces of larger tensors, which have addresses of their own."""
    if component.pattern not in EQUAL_COPIES:
        return set()
    named = private_keys(component.stateful, leaves.paths)
    return {key for key in named if key not in leaves.tensors or not is_piece(leaves.tensors[key])}


def _saves_private_entries(component: StateComponent, topology: Topology) -> bool:
    """Whether this rank's `rank_private` entries are saved: it is the first of the ranks that hold one state."""
    return all(topology.rank not in ranks or topology.rank == ranks[0] for ranks in holders_of(component, topology))


def _add_fingerprints(
    mine: RankState,
    component: StateComponent,
    leaves: Leaves,
    compare_all: bool,
    look: bool,
    topology: Topology,
) -> None:
    """Hash the tensors of a component for the comparison and for the doctor. No tensor is hashed twice by every bit."""
    size, progress = topology.world_size, topology.progress
    key, private = component.key, mine.private[component.key]
    tensors = {name: leaf for name, leaf in leaves.tensors.items() if name not in private}
    level = level_of(component, validate_all=compare_all)
    prints: dict[str, Fingerprint] = {}
    if level is not ValidationLevel.NONE:
        # At the level "full" the hashes also show whether a tensor is changed during the write.
        prints = fingerprints(tensors, level, progress, world_size=None if level is ValidationLevel.FULL else size)
        mine.copies[key] = Copies(level, tensors, prints)
    if look:
        if not level.covers(ValidationLevel.TENSOR):
            prints = fingerprints(tensors, ValidationLevel.TENSOR, progress, world_size=size)
        mine.seen[key] = prints | _plain_fingerprints(component, leaves, private)


def look_at(component: StateComponent, world_size: int) -> dict[str, Fingerprint]:
    """Return the fingerprints of all of a component on this rank, as `collect` takes them for the doctor."""
    leaves = flatten(component.stateful.state_dict(), component.key)
    wait_for_all(_memory_of(leaves))
    private = private_keys(component.stateful, leaves.paths)
    tied = find_aliases(leaves.tensors, tied_names(component.stateful))
    tensors = {key: leaf for key, leaf in leaves.tensors.items() if key not in tied and key not in private}
    return fingerprints(tensors, world_size=world_size) | _plain_fingerprints(component, leaves, private)


def _plain_fingerprints(component: StateComponent, leaves: Leaves, private: Collection[str]) -> dict[str, Fingerprint]:
    rows = _plain_rows(component, leaves)
    return {key: _fingerprint_of(rows[key]) for key in leaves.plain if key not in private}


def _fingerprint_of(row: Any) -> Fingerprint:
    data = json.dumps(row).encode()
    return Fingerprint("", (len(data),), digest_of(data))


def _unequal_tensors(key: str, mine: RankState, reports: Sequence[Any], topology: Topology) -> ReplicationError | None:
    """Return the error for differing tensors, or None; at the level "full" with their distances. Collective.

    Args:
        reports: by rank, (level, fingerprints); None from a rank that compares nothing.

    Raises:
        ConfigurationError: the ranks compare at different levels; on every rank.
    """
    levels = ["none" if fingerprints is None else fingerprints[0] for fingerprints in reports]
    for rank, level in enumerate(levels):
        if level != levels[0]:
            raise ConfigurationError(
                f"component {key} is compared at the level {levels[0]} on rank 0 and {level} on rank {rank}; all ranks must "
                "declare the same"
            )
    copies = [strict_json.convert(rows, dict[str, Fingerprint]) for _, rows in reports]
    holders = holders_of(mine.components[key], topology)
    found = differences(copies, holders)
    if not found:
        return None
    is_full = mine.copies[key].level is ValidationLevel.FULL
    return replication_error(
        key, holders, found, measure(found, copies, mine.copies[key].tensors, topology) if is_full else {}
    )
