"""What one rank contributes to a save: leaves, addresses, plain values; and how the ranks compare notes about them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt.errors import ReplicationError, ShardingError, describe, rebuild, sentence
from ckpt.flatten import Leaves, TensorLeaf, flatten, path_to_json, to_json
from ckpt.manifest import digest_of
from ckpt.replication import require_equal, tensor_digests
from ckpt.sharing import (
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
from ckpt.tables import Table, TablePart, piece_from_json, table_of_pieces, table_to_json
from ckpt.topology import Topology


@dataclass(slots=True)
class Contribution:
    """One rank's state, before anybody else's is known.

    Attributes:
        components: key -> component, those that are part of this save.
        tensors: array name -> the tensor; what `table` has addresses for.
        table: addresses and aliases.
        plain: component -> {joined key: [path, value]} as JSON, where this rank speaks for the component; tensors of an
            object that takes whatever was saved stand there too, as {joined key: [path]}.
        copies: component -> {key: digest}, of the components whose copies are to be compared.
        failed: optional component -> why it could not be collected.
    """

    components: dict[str, StateComponent] = field(default_factory=dict)
    tensors: dict[str, TensorLeaf] = field(default_factory=dict)
    table: Table = field(default_factory=lambda: Table(()))
    plain: dict[str, dict[str, Any]] = field(default_factory=dict)
    copies: dict[str, dict[str, str]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """What the other ranks need to know to see whether all agree: digests, not the things."""
        return {
            "table": _digest_of_json(table_to_json(self.table)),
            "plain": {key: _digest_of_json(rows) for key, rows in self.plain.items()},
            "copies": {key: _digest_of_json(digests) for key, digests in self.copies.items()},
            "failed": self.failed,
        }


def collect(
    components: Sequence[StateComponent],
    topology: Topology,
    *,
    without: Collection[str] = (),
    compare_all: bool = False,
) -> Contribution:
    """Ask every component for its state and give every tensor its address. No communication.

    Args:
        without: components left out because some rank could not give them.
        compare_all: digest every component that promises equal copies, not only those that ask for it.

    Raises:
        CheckpointError: a required component failed; `.component` names it.
    """
    mine = Contribution()
    parts: list[TablePart] = []
    aliases: list[tuple[str, str]] = []
    for component in components:
        if component.key in without:
            continue
        try:
            leaves = flatten(component.stateful.state_dict(), component.key)
            tied = find_aliases(leaves.tensors, _declared_ties(component, leaves))
            leaves.tensors = {key: leaf for key, leaf in leaves.tensors.items() if key not in tied}
            found = addresses(component, leaves, topology)
        except Exception as error:
            if component.required:
                raise rebuild(describe(error) | {"component": component.key}) from error
            mine.failed[component.key] = sentence(error)
            continue
        mine.components[component.key] = component
        mine.tensors |= {address.name: leaves.tensors[key] for key, address in found.items()}
        parts.append(TablePart.of(found.values()))
        start = f"{component.key}/{prefix_of(component, topology)}"
        if gives(component, topology):
            aliases += [(start + alias, start + first) for alias, first in tied.items()]
            mine.plain[component.key] = _plain_rows(component, leaves)
        if _to_compare(component, compare_all):
            mine.copies[component.key] = tensor_digests({key: leaves.tensors[key] for key in found})
        topology.progress()
    mine.table = Table(tuple(parts), tuple(aliases))
    return mine


def settle_plain(
    mine: Contribution, summaries: Sequence[Mapping[str, Any]], topology: Topology
) -> dict[str, dict[str, Any]]:
    """Return the plain values of each component that this rank's copy of the checkpoint should hold.

    Usually the digests agree and nothing is exchanged. Where the ranks of a SHARDED component hold different keys, they are
    merged; where one key has different values, or copies that should be equal differ, every rank refuses.

    Raises:
        ReplicationError: naming component, entries and ranks.
    """
    differing = [key for key, component in mine.components.items() if _differs(component, summaries, "plain", topology)]
    copies = [key for key, component in mine.components.items() if _differs(component, summaries, "copies", topology)]
    if not differing and not copies:
        return mine.plain
    with topology.phase("compare") as phase:
        phase.payload = {
            "plain": {key: mine.plain.get(key) for key in differing},
            "copies": {key: mine.copies.get(key) for key in copies},
        }
    merged = dict(mine.plain)
    with topology.phase("agree on plain values"):
        for key in copies:
            require_equal(
                key, [p["copies"].get(key) for p in phase.payloads], holders_of(mine.components[key], topology)
            )
        for key in differing:
            values = [p["plain"].get(key) for p in phase.payloads]
            if mine.components[key].pattern is SharingPattern.SHARDED:
                merged[key] = _merge(key, values)
            else:
                require_equal(key, values, holders_of(mine.components[key], topology))
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


def _declared_ties(component: StateComponent, leaves: Leaves) -> dict[str, str]:
    """{alias: first name} as the object declares it; in a state of a rank's own only where it holds the first name, too."""
    declared: dict[str, str] = getattr(component.stateful, "tied_names", {})
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


def _merge(component: str, values: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """The union of the ranks' plain values; a key that two ranks hold must have one value."""
    merged: dict[str, Any] = {}
    holder: dict[str, int] = {}
    for rank, rows in enumerate(values):
        for key, row in (rows or {}).items():
            if key in merged and merged[key] != row:
                raise ReplicationError(
                    f"component {component}: {key} is {row[1]!r} on rank {rank} and "
                    f"{merged[key][1]!r} on rank {holder[key]}; a plain value of "
                    "a sharded component must be equal wherever it is held"
                )
            merged.setdefault(key, row)
            holder.setdefault(key, rank)
    _require_one_nesting(component, merged, holder)
    return dict(sorted(merged.items()))


def _require_one_nesting(component: str, rows: Mapping[str, Any], holder: Mapping[str, int]) -> None:
    """Refuse a value in whose place another rank has a dictionary or list of more: no load could give both back."""
    values = {json.dumps(row[0]): key for key, row in rows.items() if len(row) == 2 and row[1] != {}}
    for key, row in rows.items():
        for depth in range(len(row[0])):
            above = values.get(json.dumps(row[0][:depth]))
            if above is not None:
                raise ShardingError(
                    f"component {component}: {above} is {rows[above][1]!r} on rank {holder[above]}, and rank {holder[key]} has "
                    f"{key} below it; the ranks of a sharded component must nest what they hold alike"
                )


def _differs(component: StateComponent, summaries: Sequence[Mapping[str, Any]], what: str, topology: Topology) -> bool:
    return any(
        len({summaries[rank][what].get(component.key) for rank in ranks}) > 1
        for ranks in holders_of(component, topology)
    )


def _to_compare(component: StateComponent, compare_all: bool) -> bool:
    if component.pattern not in EQUAL_COPIES:
        return False
    asked = component.validate_replication and component.validation_level != "none"
    return asked or compare_all


def _digest_of_json(tree: Any) -> str:
    return digest_of(json.dumps(tree, separators=(",", ":")).encode())
