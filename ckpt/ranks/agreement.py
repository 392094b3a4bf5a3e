"""Agreement of all ranks as a state machine, without threads, clocks or connections: each hands in a verdict, and all get one result.

The lead gathers the verdicts, and settles by the truth, one key of the job's store that the first to write it decides. Only then does it
tell the others. A rank that finds the lead gone writes the failure there instead, and obeys what it reads. So two ranks never hold
different results, whatever else is lost:

    idle --vote--> waiting --told, or truth read--> idle
                      |
                      +--all votes, or nobody else will come--> settling --truth--> idle

Inputs are the methods of `Agreement`; each returns what its driver (agreeing.py) is to do. From time to time a rank that waits looks at the
heartbeats of those it waits for. A rank that has missed the result finds the lead elsewhere, tries to settle, and so reads the truth.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ckpt.ranks.absence import LEAD, Absence, FailureDetector, PhaseIndex, Sight
from ckpt.ranks.outcomes import PhaseOutcome, Result, conclude


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
        self._told: PhaseIndex = PhaseIndex(-1, -1)  # the last agreement that has ended here
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
            self._waiting, self._told = None, at
            return [Send([LEAD], Vote(at, self.rank, verdict.encode()))]
        error = conclude({LEAD: verdict}, {}, self.world_size)
        self._waiting = _Waiting(at, verdict)
        return self._settle(self._waiting, Result(verdict.what, error))

    def hear(self, message: Vote | Told) -> list[Do]:
        """Take a message of another rank. Those of agreements that have ended here are late, and of no use."""
        if message.at <= self._told:
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
        self._told = at
        self._votes = {later: votes for later, votes in self._votes.items() if later > at}
        return [Decided(at, data)]
