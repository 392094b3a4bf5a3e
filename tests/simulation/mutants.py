"""Mistakes that a machine could make: each is a machine with one of them, which the simulation must find."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckpt.ranks.agreement import (
    LEAD,
    Absence,
    Agreement,
    Conclude,
    Do,
    FailureDetector,
    Forget,
    PhaseIndex,
    PhaseOutcome,
    Result,
    Sight,
    Told,
    Vote,
    conclude,
)


class TellsWithoutTruth(Agreement):
    """The lead tells its result without writing it first."""

    def concluded(self, at: PhaseIndex, result: Result) -> list[Do]:
        waiting = self._waiting
        return [] if waiting is None else [*self._tell(waiting, result.encode()), *self._decide(at, result.encode())]


class ObeysItself(Agreement):
    """A rank that has lost the lead holds its own result, whatever has been written before."""

    def truth(self, at: PhaseIndex, data: bytes) -> list[Do]:
        own = self._waiting.result if self._waiting is not None and self._waiting.at == at else None
        return super().truth(at, own or data)


class DoesWithoutOne(Agreement):
    """The lead settles when one vote is missing."""

    def _gathered(self) -> list[Do]:
        waiting = self._waiting
        if waiting is not None and not waiting.is_settling and len(self._votes[waiting.at]) == self.world_size - 1 > 1:
            waiting.is_settling = True
            return [Conclude(waiting.at, self._verdicts(waiting))]
        return super()._gathered()


class Hasty(Agreement):
    """The lead fails a phase as soon as one rank is gone, while others are inside."""

    def look(self, sights: Mapping[int, Sight], now_s: float, *, hinted: bool) -> list[Do]:
        dos, waiting = super().look(sights, now_s, hinted=hinted), self._waiting
        if waiting is None or waiting.is_settling:
            return dos
        gone = self.detector(waiting.at, None, None).absent(self.waits_for(), now_s, hinted=hinted)
        return self._fail(waiting, gone) if gone else dos


class NeverDoubtsTheLead(Agreement):
    """Members wait for the lead for ever."""

    def waits_for(self) -> list[int]:
        return super().waits_for() if self.rank == LEAD else []


class TrustsSilence(Agreement):
    """The lead waits for whoever was killed, too."""

    def waits_for(self) -> list[int]:
        return [] if self.rank == LEAD else super().waits_for()


class CountsOldVotes(Agreement):
    """A vote counts in whatever agreement is under way."""

    def hear(self, message: Vote | Told) -> list[Do]:
        if isinstance(message, Vote) and self._waiting is not None:
            message = message._replace(at=self._waiting.at)
        return super().hear(message)


class TakesAnyWord(Agreement):
    """A result counts in whatever agreement is under way."""

    def hear(self, message: Vote | Told) -> list[Do]:
        if isinstance(message, Told) and self._waiting is not None:
            return self._decide(self._waiting.at, message.result)
        return super().hear(message)


class ForgetsEarly(Agreement):
    """The lead deletes the truth when it has told it."""

    def truth(self, at: PhaseIndex, data: bytes) -> list[Do]:
        dos = super().truth(at, data)
        return [*dos, Forget(at)] if self.rank == LEAD and dos else dos


class LosesErrors(Agreement):
    """The lead does not see that a verdict is an error."""

    def _verdicts(self, waiting: Any) -> dict[int, PhaseOutcome]:
        return {rank: replace(one, error=None) for rank, one in super()._verdicts(waiting).items()}


class BlamesTheFirst(Agreement):
    """The sentence names another rank than that which is gone."""

    def _fail(self, waiting: Any, gone: Mapping[int, Absence]) -> list[Do]:
        gone = {rank: Absence(one.cause.replace(f"rank {rank} ", f"rank {(rank + 1) % self.world_size} ")) for rank, one in gone.items()}
        return super()._fail(waiting, gone)


class Impatient(Agreement):
    """A third of the timeout is enough."""

    def detector(self, at: PhaseIndex, what: str | None, phase: str | None) -> FailureDetector:
        detector = super().detector(at, what, phase)
        detector._patience_s = self.timeout_s / 3
        return detector


class SaysItOnce(Agreement):
    """A verdict that was lost on its way is not sent again."""

    said = PhaseIndex(-1, -1)

    def again(self) -> list[Do]:
        at = self._waiting.at if self._waiting is not None else self.said
        before, self.said = self.said, at
        return super().again() if at != before else []


class SettlesForItself(Agreement):
    """A rank that has lost the lead decides at once, without the truth."""

    def _fail(self, waiting: Any, gone: Mapping[int, Absence]) -> list[Do]:
        if self.rank == LEAD:
            return super()._fail(waiting, gone)
        error = conclude(self._verdicts(waiting), gone, self.world_size)
        return self._decide(waiting.at, Result(waiting.verdict.what, error).encode())


MUTANTS = (
    TellsWithoutTruth,
    ObeysItself,
    DoesWithoutOne,
    Hasty,
    NeverDoubtsTheLead,
    TrustsSilence,
    CountsOldVotes,
    TakesAnyWord,
    ForgetsEarly,
    LosesErrors,
    BlamesTheFirst,
    Impatient,
    SaysItOnce,
    SettlesForItself,
)
