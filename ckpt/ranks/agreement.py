"""Agreement of all ranks, without threads, clocks or connections: verdicts in, who will not come among them, and one result for all.

The lead gathers the verdicts, and settles by the truth, one key of the job's store that the first to write it decides. Only then does it
tell the others. A rank that finds the lead gone writes the failure there instead, and obeys what it reads. So two ranks never hold
different results, whatever else is lost:

    idle --vote--> waiting --told, or truth read--> idle
                      |
                      +--all votes, or nobody else will come--> settling --truth--> idle

Inputs are the methods of `Agreement`; each returns what its driver (agreeing.py) is to do. From time to time a rank that waits looks at the
signs of life of those it waits for, which show who is absent (`FailureDetector`). A rank that has missed the result finds the lead
elsewhere, tries to settle, and so reads the truth. The result is a pure function of the verdicts (`conclude`): the one error that all
raise, or what the lead tells them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

from ckpt.errors import CheckpointError, RankAbsentError, RankLeftError, describe

LEAD = 0
HINTED_SILENCE_S = 3.0  # after SIGTERM, which a launcher sends because a rank is gone: three missed beats


class PhaseIndex(NamedTuple):
    """Position in the sequence of agreements, which is equal on all ranks: operation, then phase (-1: before the first)."""

    operation: int
    phase: int

    def __str__(self) -> str:
        return f"{self.operation}.{self.phase}"


def place(what: str | None, phase: str | None) -> str:
    """Return "in phase write of save of checkpoint-00000020", or as much as is known."""
    if what is None:
        return f"in phase {phase}" if phase else "outside of any save or load"
    return f"in phase {phase} of {what}" if phase else f"in {what}, between two phases"


@dataclass(slots=True)
class Beat:
    """Content of one heartbeat.

    Attributes:
        born: start time of the process: pids are reused.
        machine: equal on two ranks that see each other's pids.
        moves: grows with the progress of the rank.
        waits: it has handed in its verdict at the end of the phase.
    """

    rank: int
    pid: int
    born: str
    host: str
    machine: str
    number: int = 0
    at: PhaseIndex = field(default_factory=lambda: PhaseIndex(0, -1))
    what: str | None = None
    phase: str | None = None
    moves: int = 0
    waits: bool = False
    left: bool = False

    @property
    def who(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"

    @property
    def place(self) -> str:
        return place(self.what, self.phase)

    def encode(self) -> bytes:
        return json.dumps([getattr(self, name) for name in self.__slots__], separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> Beat:
        beat = cls(*json.loads(data))
        beat.at = PhaseIndex(*beat.at)
        return beat


class Sight(NamedTuple):
    """What one look at a rank shows.

    Attributes:
        beat: its last one; None: it has never beaten.
        has_ended: its process is seen to be gone, which only a look from its own machine shows.
    """

    beat: Beat | None
    has_ended: bool = False


@dataclass(slots=True)
class Absence:
    """A rank that will not hand in its verdict.

    Attributes:
        cause: a sentence about it, without full stop.
        names_phase: the sentence says which phase was waited for.
        elsewhere: it lives, and is past the phase of the ranks that wait for it.
    """

    cause: str
    names_phase: bool = False
    elsewhere: bool = False


@dataclass(slots=True)
class _Seen:
    sight: Sight
    heard_s: float
    moved_s: float


class FailureDetector:
    """Detects which of the ranks that an agreement waits for will not come.

    A rank is absent if its process is gone, its heartbeat is silent for `timeout_s`, or it has not moved for `timeout_s`, both since
    this detector first looked at it; never because it takes long while it moves. A heartbeat is up to a second old, and the verdict
    takes time to spread: the detector's patience is a little shorter, so that all ranks know within `timeout_s`, if that is 15 s or more.

    Args:
        at: the agreement that waits.
        wanted: its name in messages.
    """

    def __init__(self, at: PhaseIndex, wanted: str, timeout_s: float) -> None:
        self.at = at
        self._wanted = wanted
        self._timeout_s = timeout_s
        self._patience_s = timeout_s - min(1.5, timeout_s / 10)
        self._seen: dict[int, _Seen] = {}

    def look(self, sights: Mapping[int, Sight], now_s: float) -> None:
        """Take note of what a look has shown.

        Args:
            now_s: by a clock that does not count the time in which this process itself was stopped.
        """
        for rank, sight in sights.items():
            seen = self._seen.setdefault(rank, _Seen(sight, now_s, now_s))
            before, beat = seen.sight.beat, sight.beat
            if beat is not None:
                if before is None or beat.number != before.number:
                    seen.heard_s = now_s
                if before is None or beat.moves != before.moves:
                    seen.moved_s = now_s
            seen.sight = sight

    def absent(self, ranks: Iterable[int], now_s: float, *, hinted: bool) -> dict[int, Absence]:
        """Return those of `ranks` that will not come, as far as looks have shown.

        Args:
            hinted: this process got SIGTERM, so one of them may be gone: a shorter silence counts.
        """
        found = {rank: self._absence(rank, self._seen[rank], now_s, hinted) for rank in ranks if rank in self._seen}
        return {rank: absence for rank, absence in found.items() if absence is not None}

    def _absence(self, rank: int, seen: _Seen, now_s: float, hinted: bool) -> Absence | None:
        beat, has_ended = seen.sight
        if beat is None:
            never = f"rank {rank} did not join the job within {self._timeout_s:g} s"
            return Absence(never) if now_s - seen.heard_s > self._timeout_s else None
        here = beat.at == self.at
        if beat.left:
            return Absence(f"{beat.who} has left the job")
        if has_ended:
            return Absence(f"{beat.who} was killed or ended {beat.place}", here)
        if beat.at > self.at:
            return Absence(f"{beat.who} is {beat.place}", elsewhere=True)
        silence_s = min(self._timeout_s, HINTED_SILENCE_S) if hinted else self._timeout_s
        if now_s - seen.heard_s > min(silence_s, self._patience_s):
            return Absence(f"{beat.who} has been silent for {silence_s:g} s, last seen {beat.place}", here)
        if beat.waits and here and rank != LEAD:  # the lead gathers, and moves
            return None
        return Absence(self._standstill(beat), True) if now_s - seen.moved_s > self._patience_s else None

    def _standstill(self, beat: Beat) -> str:
        if beat.at == self.at:
            return f"{beat.who} made no progress for {self._timeout_s:g} s {beat.place}"
        seen = "is" if beat.phase is None else "was last seen"  # it may have left that phase since
        return (
            f"{beat.who} did not come to {self._wanted} within {self._timeout_s:g} s and {seen} {beat.place}: every rank "
            "must make the same calls"
        )


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
        answered = answer(verdicts)
    except Exception as failure:
        failed = PhaseOutcome(own.what, own.phase, describe(failure), stands=own.stands)
        return Result(own.what, conclude(dict.fromkeys(range(world_size), failed), {}, world_size))
    return Result(own.what, None, answered, _each_once([verdicts[rank].payload for rank in range(world_size)]))


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
    named = [argument for ranks in [*by_message.values()][:_MOST_NAMED] for argument in (raised[ranks[0]].error or {})["arguments"]]
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


class Vote(NamedTuple):
    """To the lead: a rank's verdict, encoded."""

    at: PhaseIndex
    rank: int
    verdict: bytes


class Told(NamedTuple):
    """To a rank: the result, encoded."""

    at: PhaseIndex
    result: bytes


class Send(NamedTuple):
    """Send a message. Order between two ranks is kept."""

    to: Sequence[int]
    message: Vote | Told


class Settle(NamedTuple):
    """Write the truth, unless it is written; then call `Agreement.truth` with what is there."""

    at: PhaseIndex
    result: bytes


class Forget(NamedTuple):
    """Delete a truth that all ranks have read."""

    at: PhaseIndex


class Conclude(NamedTuple):
    """On the lead: all have voted, and none has failed. Make the result, and call `Agreement.concluded`."""

    at: PhaseIndex
    verdicts: Mapping[int, PhaseOutcome]


class Decided(NamedTuple):
    """The result of this rank's agreement."""

    at: PhaseIndex
    result: bytes


Do = Send | Settle | Forget | Conclude | Decided


@dataclass(slots=True)
class _Waiting:
    """The agreement that this rank has voted in.

    Attributes:
        is_settling: a result is being made, or on its way to the truth.
        result: that which this rank has made; None: it has made none.
    """

    at: PhaseIndex
    verdict: PhaseOutcome
    is_settling: bool = False
    result: bytes | None = None


class Agreement:
    """One rank's part in all agreements of a job, one after another."""

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._waiting: _Waiting | None = None
        self._votes: dict[PhaseIndex, dict[int, bytes]] = {}  # on the lead
        self._ended_at: PhaseIndex = PhaseIndex(-1, -1)  # the last agreement that has ended here
        self._kept: list[PhaseIndex] = []  # on the lead: truths that a rank may still have to read
        self._detector: FailureDetector | None = None

    def vote(self, at: PhaseIndex, verdict: PhaseOutcome) -> list[Do]:
        """Hand in this rank's verdict, and wait for the others'."""
        self._waiting = _Waiting(at, verdict)
        self.detector(at, verdict.what, verdict.phase)
        if self.rank != LEAD:
            return self.again()
        self._votes.setdefault(at, {})[LEAD] = verdict.encode()
        return self._gathered()

    def again(self) -> list[Do]:
        """Send the verdict of this rank, which waits, once more: what carried it may be gone."""
        waiting = self._waiting
        if waiting is None or self.rank == LEAD:
            return []
        return [Send([LEAD], Vote(waiting.at, self.rank, waiting.verdict.encode()))]

    def withdraw(self, at: PhaseIndex, verdict: PhaseOutcome) -> list[Do]:
        """Hand in the error of a rank that leaves, without waiting for the others. Of the lead it is the result."""
        if self.rank != LEAD:
            self._waiting, self._ended_at = None, at
            return [Send([LEAD], Vote(at, self.rank, verdict.encode()))]
        error = conclude({LEAD: verdict}, {}, self.world_size)
        self._waiting = _Waiting(at, verdict)
        return self._settle(self._waiting, Result(verdict.what, error))

    def hear(self, message: Vote | Told) -> list[Do]:
        """Take a message of another rank. Those of agreements that have ended here are late, and of no use."""
        if message.at <= self._ended_at:
            return []
        if isinstance(message, Vote):
            self._votes.setdefault(message.at, {})[message.rank] = message.verdict
            return self._gathered()
        if self._waiting is None or message.at != self._waiting.at:
            return []
        return self._decide(message.at, message.result)

    def waits_for(self) -> list[int]:
        """Return the ranks to look at: the lead looks at all that have not voted, the others at the lead."""
        if self._waiting is None or self._waiting.is_settling:
            return []
        if self.rank != LEAD:
            return [LEAD]
        voted = self._votes[self._waiting.at]
        return [rank for rank in range(self.world_size) if rank not in voted]

    def look(self, sights: Mapping[int, Sight], now_s: float, *, hinted: bool) -> list[Do]:
        """Take what a look at `waits_for` has shown; settle without those who will not come, if all others have voted.

        A rank that finds the lead gone settles at once: the phase has failed, and ranks that come later read so.

        Args:
            hinted: this process got SIGTERM, so another rank may be gone: a shorter silence counts.
        """
        waiting, missing = self._waiting, self.waits_for()
        if waiting is None or not missing:
            return []
        detector = self.detector(waiting.at, None, None)
        detector.look(sights, now_s)
        gone = detector.absent(missing, now_s, hinted=hinted)
        if len(gone) < len(missing):
            return []  # some are late, not gone: no rank raises while another one may still be writing
        return self._fail(waiting, gone)

    def truth(self, at: PhaseIndex, data: bytes) -> list[Do]:
        """Take what is written."""
        waiting = self._waiting
        if waiting is None or at != waiting.at:
            return []
        return [*self._tell(waiting, data), *self._decide(at, data)]

    def concluded(self, at: PhaseIndex, result: Result) -> list[Do]:
        """Take the result that the lead has made; of no use if another rank has settled meanwhile, because the lead seemed to be gone."""
        waiting = self._waiting
        return self._settle(waiting, result) if waiting is not None and waiting.at == at else []

    def detector(self, at: PhaseIndex, what: str | None, phase: str | None) -> FailureDetector:
        """Return the detector of an agreement; its patience counts from the first look, also where a wait inside the phase has made it."""
        if self._detector is None or self._detector.at != at:
            wanted = f"phase {phase} of {what}" if what else f"phase {phase}"
            self._detector = FailureDetector(at, wanted, self.timeout_s)
        return self._detector

    def has_voted(self, at: PhaseIndex) -> Collection[int]:
        """Return the ranks whose verdict this one knows: on the lead those of all that have come, elsewhere none."""
        return self._votes.get(at, {})

    def _gathered(self) -> list[Do]:
        """Settle, if all votes are there. The lead."""
        waiting = self._waiting
        if waiting is None or waiting.is_settling or len(self._votes[waiting.at]) < self.world_size:
            return []
        verdicts = self._verdicts(waiting)
        error = conclude(verdicts, {}, self.world_size)
        waiting.is_settling = True
        read = [Forget(at) for at in self._kept]  # all ranks are here, so all have read every earlier result
        self._kept = []
        if error is None:
            return [*read, Conclude(waiting.at, verdicts)]
        return [*read, *self._settle(waiting, Result(waiting.verdict.what, error))]

    def _fail(self, waiting: _Waiting, gone: Mapping[int, Absence]) -> list[Do]:
        error = conclude(self._verdicts(waiting), gone, self.world_size)
        return self._settle(waiting, Result(waiting.verdict.what, error))

    def _settle(self, waiting: _Waiting, result: Result) -> list[Do]:
        waiting.is_settling, waiting.result = True, result.encode()
        return [Settle(waiting.at, waiting.result)]

    def _verdicts(self, waiting: _Waiting) -> dict[int, PhaseOutcome]:
        if self.rank != LEAD:
            return {self.rank: waiting.verdict}
        return {rank: PhaseOutcome.decode(data) for rank, data in sorted(self._votes[waiting.at].items())}

    def _tell(self, waiting: _Waiting, data: bytes) -> list[Do]:
        """Pass the truth on, if it is this rank's to do so: the lead, or one that has settled in its place."""
        if self.rank == LEAD:
            self._kept.append(waiting.at)
        elif data != waiting.result:
            return []
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        return [Send(others, Told(waiting.at, data))] if others else []

    def _decide(self, at: PhaseIndex, data: bytes) -> list[Do]:
        self._waiting = None
        self._ended_at = at
        self._votes = {later: votes for later, votes in self._votes.items() if later > at}
        return [Decided(at, data)]
