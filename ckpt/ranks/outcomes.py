"""What each rank says at the end of a phase, and the result for all: the one error that all raise, or what the lead tells them.

Pure functions of the verdicts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import Any

from ckpt.errors import CheckpointError, RankAbsentError, RankLeftError, describe
from ckpt.ranks.absence import Absence, place

_MOST_NAMED = 4
"""Failures of a phase that its error tells."""


@dataclass(slots=True)
class PhaseOutcome:
    """The verdict of one rank at the end of a phase. Payloads are encoded JSON; empty: none.

    Attributes:
        what: its operation, such as "save of checkpoint-00000020"; None outside of one.
        phase: its phase; None if it failed between two phases, and so joins the phase of the others.
        error: `errors.describe` of its exception, with the component already in the message; None: success.
        payload: for all other ranks.
        to_lead: for the lead.
        merge: {name: `merging.Merged`}, for the lead, which merges those of all ranks.
        stands: a fact that holds even if the phase fails, for the end of the error; None: none.
    """

    what: str | None
    phase: str | None
    error: dict[str, Any] | None = None
    payload: bytes = b""
    to_lead: bytes = b""
    merge: bytes = b""
    stands: str | None = None

    def encode(self) -> bytes:
        return _joined([self.what, self.phase, self.error, self.stands], self.payload, self.to_lead, self.merge)

    @classmethod
    def decode(cls, data: bytes) -> PhaseOutcome:
        (what, phase, error, stands), payload, to_lead, merge = _parted(data)
        return cls(what, phase, error, payload, to_lead, merge, stands)


@dataclass(slots=True)
class Answer:
    """What the lead tells all ranks at the end of a phase in which none failed: its own word, and merged values. Encoded; empty: none."""

    from_lead: bytes = b""
    merged: bytes = b""


@dataclass(slots=True)
class Result:
    """The result of a phase on all ranks: the error that all raise, or the lead's answer, and all payloads (`payloads_by_rank`)."""

    what: str | None
    error: dict[str, Any] | None
    answer: Answer = field(default_factory=Answer)
    payloads: bytes = b""

    def encode(self) -> bytes:
        return _joined([self.what, self.error], self.answer.from_lead, self.answer.merged, self.payloads)

    @classmethod
    def decode(cls, data: bytes) -> Result:
        (what, error), from_lead, merged, payloads = _parted(data)
        return cls(what, error, Answer(from_lead, merged), payloads)


def _joined(head: list[Any], *parts: bytes) -> bytes:
    return b"".join((json.dumps([*head, *map(len, parts)]).encode(), b"\n", *parts))


def _parted(data: bytes) -> tuple[list[Any], bytes, bytes, bytes]:
    first, _, rest = data.partition(b"\n")
    head, a, b, c = _head(first)
    assert len(rest) == a + b + c, "an agreement that is whole"
    return head, rest[:a], rest[a : a + b], rest[a + b :]


@lru_cache(maxsize=64)
def _head(data: bytes) -> tuple[list[Any], int, int, int]:
    """Parse a head. Those of thousands of ranks are alike."""
    *head, a, b, c = json.loads(data)
    return head, a, b, c


def concluded(verdicts: Mapping[int, PhaseOutcome], answer: Callable[[Mapping[int, PhaseOutcome]], Answer]) -> Result:
    """Return the result of the verdicts of all ranks, none of which is an error. The lead.

    Args:
        answer: makes the lead's answer; what it raises, all ranks raise.
    """
    own, world_size = verdicts[0], len(verdicts)
    try:
        said = answer(verdicts)
    except Exception as failure:
        failed = PhaseOutcome(own.what, own.phase, describe(failure), stands=own.stands)
        return Result(own.what, conclude(dict.fromkeys(range(world_size), failed), {}, world_size))
    return Result(own.what, None, said, _each_once([verdicts[rank].payload for rank in range(world_size)]))


def _each_once(payloads: Sequence[bytes]) -> bytes:
    """Return the distinct payloads, and runs of ranks with equal ones, as JSON: [[payload, ...], [[its number, how many ranks], ...]]."""
    numbers = {payload: number for number, payload in enumerate(dict.fromkeys(payloads))}
    if numbers.keys() == {b""}:
        return b""
    runs = [[number, len([*run])] for number, run in groupby(numbers[payload] for payload in payloads)]
    return b"[[%b],%b]" % (b",".join(payload or b"null" for payload in numbers), json.dumps(runs).encode())


def payloads_by_rank(data: bytes, world_size: int) -> list[Any]:
    """Return the payload of each rank. Ranks with equal ones share it."""
    if not data:
        return [None] * world_size
    payloads, runs = json.loads(data)
    return [payloads[number] for number, count in runs for _ in range(count)]


def conclude(
    verdicts: Mapping[int, PhaseOutcome], gone: Mapping[int, Absence], world_size: int
) -> dict[str, Any] | None:
    """Return the error that all ranks raise, described, or None for success.

    An exception of a rank has precedence over missing ranks, which may be gone because of it.
    """
    error = _cause(verdicts, gone, world_size)
    stands = next((verdict.stands for verdict in verdicts.values() if verdict.stands), None)
    if error is None or stands is None:
        return error
    return {**error, "message": f"{error['message']}; {stands} all the same"}


def _cause(verdicts: Mapping[int, PhaseOutcome], gone: Mapping[int, Absence], world_size: int) -> dict[str, Any] | None:
    raised = _causes(verdicts, gone)
    places = {rank: place(verdict.what, verdict.phase) for rank, verdict in verdicts.items()}
    here = _where_most_are(verdicts, places)
    if raised:
        return _raised(raised, gone, world_size, here)
    if len(set(places.values())) > 1 or any(absence.elsewhere for absence in gone.values()):
        where = [f"{_ranks(ranks)} {at}" for at, ranks in _grouped(places).items()]
        where += [absence.cause for absence in gone.values()]
        where[-1] += ": all ranks must make the same calls in the same order"
        away = [rank for rank, at in places.items() if at != place(here.what, here.phase)] + list(gone)
        # Of two ranks, either could be the one that strayed.
        odd = away[0] if len(away) == 1 and world_size > 2 else None
        return _error(CheckpointError, "; ".join(where), here, odd)
    if gone:
        first = min(gone)
        start = "" if any(absence.names_phase for absence in gone.values()) else f"{_failed(here)}: "
        causes = _shortened([gone[rank].cause for rank in sorted(gone)], "ranks")
        return _error(RankAbsentError, start + causes, here, first)
    return None


def _causes(verdicts: Mapping[int, PhaseOutcome], gone: Mapping[int, Absence]) -> dict[int, PhaseOutcome]:
    """Return the verdicts with errors, without those of ranks that only missed another rank, if its reason is known."""
    errors = {rank: verdict.error for rank, verdict in verdicts.items() if verdict.error}
    causes = [rank for rank, error in errors.items() if error["kind"] != RankLeftError.__name__]
    if not causes and not gone:
        causes = [rank for rank, error in errors.items() if error["rank"] not in errors] or list(errors)
    return {rank: verdicts[rank] for rank in causes}


def _where_most_are(verdicts: Mapping[int, PhaseOutcome], places: Mapping[int, str]) -> PhaseOutcome:
    """Return a verdict from the phase that most ranks are in, except those between phases; the lowest rank's."""
    counts = Counter(places.values())
    return max(verdicts.items(), key=lambda one: (one[1].phase is not None, counts[places[one[0]]], -one[0]))[1]


def _raised(
    raised: Mapping[int, PhaseOutcome], gone: Mapping[int, Absence], world_size: int, here: PhaseOutcome
) -> dict[str, Any]:
    by_message = _grouped({rank: (verdict.error or {})["message"] for rank, verdict in raised.items()})
    first = min(raised)
    verdict = raised[first]
    assert verdict.error is not None
    before = here.phase if here.what == verdict.what else None
    phase = verdict.phase or before
    cause = verdict.error["message"]
    if len(by_message[cause]) == world_size:
        if verdict.error["phase"] is not None:
            return verdict.error  # agreed on once already, by ranks that were doing something in the background
        message = f"{verdict.what}: {cause}" if verdict.what else cause
        return {**verdict.error, "message": message, "rank": None, "phase": phase}
    named = [said for ranks in [*by_message.values()][:_MOST_NAMED] for said in (raised[ranks[0]].error or {})["arguments"]]
    parts = [f"{_failed(verdict, before)} on {_ranks(by_message.pop(cause))}: {cause}"]
    parts += [f"on {_ranks(ranks)}: {message}" for message, ranks in by_message.items()]
    parts += [absence.cause for absence in gone.values() if not absence.elsewhere]
    return {**verdict.error, "message": _shortened(parts, "failures"), "arguments": named, "rank": first, "phase": phase}


def _shortened(parts: list[str], things: str) -> str:
    more = [f"and {len(parts) - _MOST_NAMED} more {things}"] if len(parts) > _MOST_NAMED else []
    return "; ".join(parts[:_MOST_NAMED] + more)


def _failed(verdict: PhaseOutcome, before: str | None = None) -> str:
    """Return where a rank failed; between two phases it did not come to the one that others are in, `before`."""
    between = f"before phase {before}" if before else "between two phases"
    phase = f"in phase {verdict.phase}" if verdict.phase else between
    return f"{verdict.what} failed {phase}" if verdict.what else f"phase {verdict.phase} failed"


def _error(kind: type[CheckpointError], message: str, verdict: PhaseOutcome, rank: int | None = None) -> dict[str, Any]:
    return describe(kind(message, rank=rank, phase=verdict.phase))


def _grouped(values: Mapping[int, str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for rank in sorted(values):
        groups.setdefault(values[rank], []).append(rank)
    return groups


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"ranks {shown}"
