"""Check of declared sharing patterns over all ranks: ranks send fingerprints, the lead rank diagnoses, all receive the result."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Mapping, Sequence

import msgspec

from ckpt.errors import ConfigurationError, ReplicationError
from ckpt.format import strict_json
from ckpt.format.digests import digest_of
from ckpt.ranks.merging import Alike, alike
from ckpt.ranks.topology import Topology
from ckpt.state.collect import DistinctRanks
from ckpt.state.doctor import Diagnosis, PatternVerdict, Seen, diagnose
from ckpt.state.replication import Fingerprint
from ckpt.state.sharing import Ranks, StateComponent

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
        distinct = {key: DistinctRanks.of([said[at] for said in phase.gathered]) for at, key in enumerate(components)}
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
