"""The doctor's round over the ranks: each gives its fingerprints, the lead diagnoses, and all hear the same."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from ckpt.errors import ConfigurationError, ReplicationError
from ckpt.format.manifest import digest_of
from ckpt.ranks.topology import Topology
from ckpt.state.doctor import Diagnosis, PatternVerdict, Ranks, Sharing, diagnose
from ckpt.state.replication import Fingerprint
from ckpt.state.sharing import SharingPattern, StateComponent

_log = logging.getLogger("ckpt")

PATTERN_CHECKS = ("warn", "error", "off")
"""What the first save does with the doctor's verdicts. A declaration that would lose state is refused by all but "off"; what is
wasteful or suspicious is told by "warn" and refused by "error"."""


def check_choice(pattern_check: str) -> str:
    """Refuse a value of `pattern_check` that there is not.

    Raises:
        ConfigurationError: naming the three.
    """
    if pattern_check not in PATTERN_CHECKS:
        raise ConfigurationError(f"pattern_check {pattern_check!r} is none of {', '.join(PATTERN_CHECKS)}")
    return pattern_check


def examine(
    components: Mapping[str, StateComponent], seen: Mapping[str, Mapping[str, Fingerprint]], topology: Topology
) -> list[Diagnosis]:
    """Diagnose every component. Collective; the same on every rank.

    First one digest for each component and rank is exchanged. Only where these differ does one rank of each kind send its
    entries, and only to the lead: nothing grows with the ranks squared.

    Args:
        seen: component -> key -> fingerprint, of this rank.

    Raises:
        ConfigurationError: the ranks declare different things; on every rank.
    """
    mine = {key: {name: list(one) for name, one in leaves.items()} for key, leaves in seen.items()}
    declared = {key: Sharing(one.pattern, one.process_group_name) for key, one in components.items()}
    with topology.phase("fingerprints") as phase:
        digests = {key: digest_of(json.dumps(rows, sort_keys=True).encode()) for key, rows in mine.items()}
        phase.payload = [{key: str(one) for key, one in declared.items()}, digests]
    _require_one_declaration([said for said, _ in phase.payloads])
    speakers = {key: _first_with_each([digests.get(key) for _, digests in phase.payloads]) for key in components}
    held = _gather(mine, speakers, topology)
    with topology.phase("diagnose") as phase:
        if topology.is_lead:
            ranks = Ranks(topology.nodes, {name: group.instances for name, group in topology.groups.items()})
            phase.payload = [
                _to_json(diagnose(key, declared[key], [held[rank][key] for rank in speakers[key]], ranks))
                for key in components
            ]
    return [_from_json(row, declared) for row in phase.payloads[0]]


def act_on(
    diagnoses: Sequence[Diagnosis], components: Mapping[str, StateComponent], pattern_check: str, *, tell: bool
) -> None:
    """Let the save go on, or refuse it; every rank comes to the same end.

    A component whose validation_level is "none" has been excused from comparisons by its owner: what it loses is told, not
    refused.

    Args:
        tell: whether this rank logs the warnings.

    Raises:
        ReplicationError: a declaration would lose state.
        ConfigurationError: one is wasteful or suspicious, and `pattern_check` is "error".
    """
    remarks = []
    for one in diagnoses:
        if one.verdict is PatternVerdict.OK:
            continue
        excused = components[one.component].validation_level == "none"
        if one.verdict is PatternVerdict.LOSES_STATE and not excused:
            raise ReplicationError(f"{one.sentence}. To save in spite of it, set pattern_check=off.")
        remarks.append(one)
    if not remarks:
        return
    if pattern_check == "error":
        raise ConfigurationError(f"{remarks[0].sentence}. To save in spite of it, set pattern_check=warn.")
    for one in remarks:
        if tell:
            _log.warning("%s (%s)", one.sentence, one.verdict.value)


def _first_with_each(digests: Sequence[str | None]) -> list[int]:
    """By rank, the lowest rank that holds the same."""
    first: dict[str | None, int] = {}
    return [first.setdefault(digest, rank) for rank, digest in enumerate(digests)]


def _gather(
    mine: Mapping[str, Any], speakers: Mapping[str, Sequence[int]], topology: Topology
) -> dict[int, dict[str, dict[str, Fingerprint]]]:
    """Bring what each kind of rank holds to the lead: rank -> component -> key -> fingerprint. Elsewhere nothing."""
    to_send = {
        key: rows for key, rows in mine.items() if topology.rank in speakers[key] and len(set(speakers[key])) > 1
    }
    senders = {rank for ranks in speakers.values() if len(set(ranks)) > 1 for rank in ranks}
    data = zlib.compress(json.dumps(to_send, separators=(",", ":")).encode(), 1)
    outgoing = {0: data} if topology.rank in senders else {}
    arrived = topology.exchange("digests", outgoing, senders if topology.is_lead else ())
    if not topology.is_lead:
        return {}
    trees = {rank: json.loads(zlib.decompress(data)) for rank, data in arrived.items()}
    trees[0] = dict(mine)
    return {
        rank: {key: {name: Fingerprint.of_json(row) for name, row in rows.items()} for key, rows in tree.items()}
        for rank, tree in trees.items()
    }


def _require_one_declaration(said: Sequence[Mapping[str, str]]) -> None:
    for rank, one in enumerate(said):
        for key in sorted({*said[0], *one}):
            if said[0].get(key) != one.get(key):
                raise ConfigurationError(
                    f"component {key} is declared {said[0].get(key, 'not at all')} on rank 0 and {one.get(key, 'not at all')} on rank "
                    f"{rank}; all ranks must declare the same"
                )


def _to_json(one: Diagnosis) -> list[Any]:
    found = [[sharing.pattern.value, sharing.group] for sharing in one.found]
    return [one.component, found, one.verdict.value, one.sentence, one.leaf, list(one.ranks)]


def _from_json(row: Sequence[Any], declared: Mapping[str, Sharing]) -> Diagnosis:
    component, found, verdict, sentence, leaf, ranks = row
    sharings = tuple(Sharing(SharingPattern(pattern), group) for pattern, group in found)
    return Diagnosis(component, declared[component], sharings, PatternVerdict(verdict), sentence, leaf, tuple(ranks))
