"""Agreement of all ranks: each hands in a verdict, and all get the same result.

It uses the job's key-value store, because a collective that loses a member can neither name it nor be used again. Each rank's heartbeat
shows where it is and that it moves. The lead gathers the verdicts and settles *one* result key, O(ranks) requests in total. A rank that
finds the lead gone settles it instead; `compare_set` makes the second one read the first one's result. No call waits inside the store,
which would block the thread for minutes if a peer is dead.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

from ckpt.errors import CheckpointError, RankAbsentError, RankLeftError, describe
from ckpt.ranks.heartbeat import Absence, FailureDetector, Heartbeat, PhaseIndex, place
from ckpt.ranks.store_client import StoreClient
from ckpt.ranks.stores import StoreGoneError
from ckpt.ranks.waiting import AwakeClock, nap_s, poll_until


@dataclass(slots=True)
class PhaseOutcome:
    """The verdict of one rank at the end of a phase. Payloads are encoded JSON; empty: none.

    Attributes:
        what: its operation, such as "save of checkpoint-00000020"; None outside of one.
        phase: its phase; None if it failed between two phases, and so joins the phase of the others.
        error: `errors.describe` of its exception, with the component already in the message; None: success.
        payload: for all other ranks.
        to_lead: for the lead.
        merge: `merging.begun`, for the lead, which merges those of all ranks.
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
    *head, a, b, c = json.loads(first)
    assert len(rest) == a + b + c, "an agreement that is whole"
    return head, rest[:a], rest[a : a + b], rest[a + b :]


Conclude = Callable[[Mapping[int, PhaseOutcome]], Answer]
"""Makes the lead's answer, from the verdicts of all ranks, none of which is an error. What it raises, all ranks raise."""


@dataclass
class Agreement:
    """All agreements of one rank, one after another.

    Attributes:
        hinted: returns whether this process got SIGTERM.
    """

    client: StoreClient
    heartbeat: Heartbeat
    rank: int
    world_size: int
    timeout_s: float
    hinted: Callable[[], bool]
    _settled: list[str] = field(default_factory=list)  # on the lead: results that a rank may still have to read
    _unread: list[str] = field(default_factory=list)  # this rank's verdicts that may not have been read
    _watching: tuple[PhaseIndex, FailureDetector] | None = None
    _answer: Conclude = field(default=lambda _: Answer())

    @property
    def _look_s(self) -> float:
        return 0.1 * max(1.0, self.world_size / 64)  # so that thousands of ranks do not keep the store busy by asking

    def reach(self, at: PhaseIndex, verdict: PhaseOutcome, answer: Conclude) -> Result:
        """Hand in this rank's verdict, wait for all others', return the result. Collective, in the same order on all ranks.

        Args:
            answer: called by the lead.

        Raises:
            StoreGoneError: the store does not answer.
        """
        self.hand_in(at, verdict)
        self._answer = answer
        try:
            data = self._wait(at, verdict)
        except StoreGoneError:
            raise
        except BaseException as interrupt:
            if self.rank == 0:  # no other rank would settle it before this process is gone
                self.withdraw(at, verdict, interrupt)
            raise
        self._forget(self._unread)  # the result replaces this rank's verdicts
        if self.rank == 0:
            self._settled.append(_result_key(at))
        return Result.decode(data)

    def hand_in(self, at: PhaseIndex, verdict: PhaseOutcome) -> None:
        self._unread.append(_verdict_key(at, self.rank))
        self.client.put(self._unread[-1], verdict.encode())

    def withdraw(self, at: PhaseIndex, verdict: PhaseOutcome, interrupt: BaseException) -> None:
        """Hand in that this rank leaves, without waiting for the others."""
        stopped = PhaseOutcome(verdict.what, verdict.phase, describe(interrupt), stands=verdict.stands)
        self.hand_in(at, stopped)
        if self.rank == 0:
            error = conclude({0: stopped}, {}, self.world_size)
            self.client.put_first(_result_key(at), Result(verdict.what, error).encode())
            self._settled.append(_result_key(at))

    def settled_without_us(self, at: PhaseIndex) -> Result | None:
        """Return the result of an agreement that the others have ended without this rank, or None."""
        data = self.client.peek(_result_key(at))
        return None if data is None else Result.decode(data)

    def is_given_up(self) -> bool:
        """Whether the others have settled the agreement that this rank has not reached yet. Any thread."""
        try:
            return self.client.has([_result_key(self.heartbeat.at)])
        except StoreGoneError:
            return True

    def has_raised(self, at: PhaseIndex, ranks: Collection[int]) -> int | None:
        """Return the first of these ranks whose verdict is an error; does not wait for verdicts."""
        with suppress(StoreGoneError):
            for rank in sorted(ranks):
                data = self.client.peek(_verdict_key(at, rank))
                if data is not None and PhaseOutcome.decode(data).error is not None:
                    return rank
        return None

    def absent(self, at: PhaseIndex, what: str | None, phase: str | None, ranks: Collection[int]) -> Absence | None:
        """Return the first of these ranks that will not come to this agreement. Patience counts from the first call, also in `reach`.

        Raises:
            StoreGoneError: the store does not answer.
        """
        waited_for = set(ranks) & set(self._missing(at))
        gone = self._detector(at, what, phase).absent(sorted(waited_for), hinted=self.hinted())
        return gone[min(gone)] if gone else None

    def _detector(self, at: PhaseIndex, what: str | None, phase: str | None) -> FailureDetector:
        if self._watching is None or self._watching[0] != at:
            wanted = f"phase {phase} of {what}" if what else f"phase {phase}"
            clock = AwakeClock(max(1.0, 3 * self._look_s))
            self._watching = at, FailureDetector(self.client, at, wanted, self.timeout_s, clock=clock)
        return self._watching[1]

    def _wait(self, at: PhaseIndex, verdict: PhaseOutcome) -> bytes:
        detector = self._detector(at, verdict.what, verdict.phase)
        data = poll_until(
            partial(self._gather, at) if self.rank == 0 else partial(self.client.peek, _result_key(at)),
            look=partial(self._look, at, detector),
            look_s=self._look_s,
            nap=partial(nap_s, world_size=self.world_size),
        )
        if self.rank == 0:
            self.heartbeat.say()  # so that the others do not count these moves for the next phase
        return data

    def _gather(self, at: PhaseIndex) -> bytes | None:
        """Settle, if all verdicts are there. The lead."""
        keys = [_verdict_key(at, rank) for rank in range(self.world_size)]
        if self.client.has(keys):
            return self._settle(at, list(range(self.world_size)), {})
        self.heartbeat.move()  # the others watch the lead, also when its own verdict is in
        return None

    def _look(self, at: PhaseIndex, detector: FailureDetector) -> bytes | None:
        """Look for ranks that will not come; settle without them when all others are there.

        The lead looks for all ranks, the others for the lead. A rank that finds the lead gone settles at once: the phase has
        failed, and ranks that come later read so.
        """
        gone = detector.absent(self._missing(at) if self.rank == 0 else [0], hinted=self.hinted())
        data = self.client.peek(_result_key(at))  # after the look: a rank that has left this phase saw a result
        if data is not None or not gone:
            return data
        missing = self._missing(at)  # again: a verdict handed in at the last moment counts
        if self.rank == 0:
            gone = {rank: gone[rank] for rank in missing if rank in gone}
            if len(gone) < len(missing):
                return None  # some are late, not gone: no rank raises while another one may still be writing
        return self._settle(at, [rank for rank in range(self.world_size) if rank not in missing], gone)

    def _missing(self, at: PhaseIndex) -> list[int]:
        return [rank for rank in range(self.world_size) if not self.client.has([_verdict_key(at, rank)])]

    def _settle(self, at: PhaseIndex, present: list[int], gone: Mapping[int, Absence]) -> bytes | None:
        """Write the result, or read the one that another rank wrote first. None: there is one, for verdicts have been deleted."""
        keys = [_verdict_key(at, rank) for rank in present]
        found = [self.client.peek(key) for key in keys] if gone else self.client.take(keys)
        if found is None or None in found:
            return None
        verdicts = {
            rank: PhaseOutcome.decode(data) for rank, data in zip(present, found, strict=True) if data is not None
        }
        result = concluded(verdicts, gone, self.world_size, self.rank, self._answer)
        data = self.client.put_first(_result_key(at), result.encode())
        if self.rank == 0 and not gone:  # all ranks are here, so all have read every earlier result
            self._forget(self._settled)
        return data

    def _forget(self, keys: list[str]) -> None:
        """Delete keys. If the store hangs now, the next agreement raises; the result stands."""
        with suppress(StoreGoneError):
            for key in keys:
                self.client.delete(key)
        keys.clear()


def _verdict_key(at: PhaseIndex, rank: int) -> str:
    return f"verdict/{at}/{rank}"


def _result_key(at: PhaseIndex) -> str:
    return f"result/{at}"


def concluded(
    verdicts: Mapping[int, PhaseOutcome], gone: Mapping[int, Absence], world_size: int, rank: int, answer: Conclude
) -> Result:
    """Return the result of all verdicts, on the rank that settles it.

    Args:
        answer: of the lead; another rank settles only what has failed, for the lead is gone then.
    """
    own = verdicts[rank]
    error = conclude(verdicts, gone, world_size)
    if error is not None:
        return Result(own.what, error)
    try:
        said = answer(verdicts)
    except Exception as failure:
        failed = PhaseOutcome(own.what, own.phase, describe(failure), stands=own.stands)
        return Result(own.what, conclude(dict.fromkeys(range(world_size), failed), {}, world_size))
    return Result(own.what, None, said, _each_once([verdicts[one].payload for one in range(world_size)]))


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
    parts = [f"{_failed(verdict, before)} on {_ranks(by_message.pop(cause))}: {cause}"]
    parts += [f"on {_ranks(ranks)}: {message}" for message, ranks in by_message.items()]
    parts += [absence.cause for absence in gone.values() if not absence.elsewhere]
    return {**verdict.error, "message": _shortened(parts, "failures"), "rank": first, "phase": phase}


def _shortened(parts: list[str], things: str) -> str:
    more = [f"and {len(parts) - 4} more {things}"] if len(parts) > 4 else []
    return "; ".join(parts[:4] + more)


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
