"""Who will not come: signs of life of each rank, and the detection of absent ranks from them. Without threads, clocks or connections."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

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
