"""The agreements of one rank over the job's store: carries messages between the `Agreement` machines, and looks at heartbeats for them.

A rank that waits looks from time to time whether those that it waits for will come. It reads all messages that are there before it looks:
a process that was stopped judges nobody by what it has not read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from ckpt.errors import describe
from ckpt.ranks.agreement import (
    LEAD,
    Absence,
    Agreement,
    Answer,
    Conclude,
    Decided,
    Do,
    Forget,
    PhaseIndex,
    PhaseOutcome,
    Result,
    Send,
    Settle,
    Sight,
    Told,
    Vote,
    concluded,
)
from ckpt.ranks.heartbeat import Heartbeat, sights
from ckpt.ranks.mail import LOOK, Mail
from ckpt.ranks.store_client import StoreClient
from ckpt.ranks.stores import StoreGoneError
from ckpt.ranks.waiting import AwakeClock

_SENT_ALONG_BYTES = 4096
"""Longer results are read once by each host, so that the store need not hold a copy for each."""
_READ_S = 0.05
"""In which the thread that reads the messages brings one that is there."""


def _look_s(world_size: int) -> float:
    """Seconds between two looks of a rank that waits: thousands of ranks do not keep the store busy by looking."""
    return 0.1 * max(1.0, world_size / 64)


class Agreeing:
    """All agreements of one rank, one after another.

    Args:
        client: of the part of the store in which these ranks agree.
        mail: of this rank.
        channel: of the mail.
        members: the ranks of the job, by their number in this topology.
        hinted: returns whether this process got SIGTERM.

    Attributes:
        timeout_s: from the next agreement on.
    """

    def __init__(
        self,
        client: StoreClient,
        heartbeat: Heartbeat,
        rank: int,
        timeout_s: float,
        *,
        mail: Mail,
        channel: str,
        members: Sequence[int],
        hinted: Callable[[], bool],
    ) -> None:
        self.client = client
        self.mail = mail
        self.channel = channel
        self.members = members
        self.heartbeat = heartbeat
        self._rank = rank
        self._hinted = hinted
        self._machine = Agreement(rank, len(members), timeout_s)
        self._clock_of: tuple[PhaseIndex, AwakeClock] | None = None
        self._look_s = _look_s(len(members))
        self._look_at_s = self._voted_s = 0.0
        self._is_hub_silent = False

    def close(self) -> None:
        """Leave the job: other ranks find that this one has left. The last channel to be closed is that of all ranks."""
        self.heartbeat.stop()
        if self.channel:
            self.mail.forget(self.channel)
        else:
            self.mail.close()

    @property
    def timeout_s(self) -> float:
        return self._machine.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._machine.timeout_s = seconds

    def reach(self, at: PhaseIndex, verdict: PhaseOutcome, answer: Callable[[Mapping[int, PhaseOutcome]], Answer]) -> Result:
        """Hand in this rank's verdict, wait for all others', return the result. Collective, in the same order on all ranks.

        Args:
            answer: makes the lead's answer, from the verdicts of all ranks, none of which is an error. What it raises, all ranks raise.

        Raises:
            StoreGoneError: the store does not answer.
        """
        if verdict.error is not None:
            self.client.put(_raised(at, self._rank), b"!")
        self.heartbeat.wait(waits=True)
        self._voted_s, self._is_hub_silent = time.monotonic(), False
        self._look_at_s = self._voted_s + self._look_s
        try:
            dos = self._machine.vote(at, verdict)
            while (result := self._done(dos, answer)) is None:
                dos = self._heard(at)
        except StoreGoneError:
            raise
        except BaseException as interrupt:
            if self._rank == LEAD:  # no other rank would settle it before this process is gone
                self.withdraw(at, verdict, interrupt)
            raise
        finally:
            self.heartbeat.wait(waits=False)
        with suppress(StoreGoneError):  # the result stands; if the store hangs now, the next agreement raises
            if verdict.error is not None:
                self.client.delete(_raised(at, self._rank))
            if self._rank == LEAD:
                self.heartbeat.say()  # so that the others do not count these moves for the next phase
        return Result.decode(result)

    def withdraw(self, at: PhaseIndex, verdict: PhaseOutcome, interrupt: BaseException) -> None:
        """Hand in that this rank leaves, without waiting for the others."""
        stopped = PhaseOutcome(verdict.what, verdict.phase, describe(interrupt), stands=verdict.stands)
        self._done(self._machine.withdraw(at, stopped), lambda _: Answer())

    def settled_without_us(self, at: PhaseIndex) -> Result | None:
        """Return the result of an agreement that the others have ended without this rank, or None. Any thread."""
        data = self.client.peek(_truth(at))
        return None if data is None else Result.decode(data)

    def is_given_up(self) -> bool:
        """Whether the others have settled the agreement that this rank has not reached yet. Any thread."""
        try:
            return self.client.has([_truth(self.heartbeat.at)])
        except StoreGoneError:
            return True

    def has_raised(self, at: PhaseIndex, ranks: Collection[int]) -> int | None:
        """Return the first of these ranks whose verdict is an error; does not wait for verdicts."""
        with suppress(StoreGoneError):
            return next((rank for rank in sorted(ranks) if self.client.has([_raised(at, rank)])), None)
        return None

    def absent(self, at: PhaseIndex, what: str | None, phase: str | None, ranks: Collection[int]) -> Absence | None:
        """Return the first of these ranks that will not come to this agreement. Patience counts from the first call, also in `reach`.

        Raises:
            StoreGoneError: the store does not answer.
        """
        waited_for = sorted(set(ranks) - set(self._machine.has_voted(at)))
        detector, now_s = self._machine.detector(at, what, phase), self._now(at)
        detector.look(self._sights(waited_for), now_s)
        gone = detector.absent(waited_for, now_s, hinted=self._hinted())
        return gone[min(gone)] if gone else None

    def _now(self, at: PhaseIndex) -> float:
        if self._clock_of is None or self._clock_of[0] != at:
            self._clock_of = at, AwakeClock(max(1.0, 3 * self._look_s))
        return self._clock_of[1]()

    def _heard(self, at: PhaseIndex) -> list[Do]:
        """Wait for a message; when it is time, and all are read that are there, look."""
        wait_s = self._look_at_s - time.monotonic()
        data = self.mail.receive(self.channel, wait_s if wait_s > 0 else _READ_S)
        if data == LOOK:  # a rank has ended: what it was to carry may be lost
            self._look_at_s = 0.0
            return self._machine.again()
        if data is not None:
            return self._machine.hear(_decoded(data))
        seen = self._sights(self._machine.waits_for())
        if self.mail.has_more(self.channel):  # what a rank has said before it went where it is seen
            return []
        now_s = time.monotonic()
        self._look_at_s = now_s + self._look_s
        if not self._is_hub_silent and now_s - self._voted_s > self.timeout_s / 2:
            self._is_hub_silent = True  # or it is not; a verdict may come twice
            return self._machine.again()
        if self._rank == LEAD:
            self.heartbeat.move()  # the others watch the lead, also when its own verdict is in
        return self._machine.look(seen, self._now(at), hinted=self._hinted())

    def _sights(self, ranks: Collection[int]) -> dict[int, Sight]:
        """Look at ranks: at their heartbeats, and whether their processes are there, as far as any host has seen."""
        seen = sights(self.client, ranks)
        gone = self.mail.gone
        return {rank: Sight(sight.beat, sight.has_ended or self.members[rank] in gone) for rank, sight in seen.items()}

    def _done(self, dos: list[Do], answer: Callable[[Mapping[int, PhaseOutcome]], Answer]) -> bytes | None:
        """Do what the machine asks for, and what follows from it; return the result, once it is there."""
        result = None
        while dos:
            match do := dos.pop(0):
                case Send():
                    self._send([self.members[rank] for rank in do.to], do.message)
                case Settle():
                    there = self.client.put_first(_truth(do.at), do.result)
                    dos += self._machine.truth(do.at, there)
                case Conclude():
                    dos += self._machine.concluded(do.at, concluded(do.verdicts, answer))
                case Forget():
                    with suppress(StoreGoneError):
                        self.client.delete(_truth(do.at))
                case Decided():
                    result = do.result
        return result

    def _send(self, to: Sequence[int], message: Vote | Told) -> None:
        if isinstance(message, Told) and len(message.result) > _SENT_ALONG_BYTES:
            key = f"{self.channel}/{_truth(message.at)}".removeprefix("/")
            self.mail.send_value(to, self.channel, _encoded(Told(message.at, b"")), key)
        else:
            self.mail.send(to, self.channel, _encoded(message), directly=self._is_hub_silent)


def _truth(at: PhaseIndex) -> str:
    return f"result/{at}"


def _raised(at: PhaseIndex, rank: int) -> str:
    return f"raised/{at}/{rank}"


def _encoded(message: Vote | Told) -> bytes:
    operation, phase = message.at
    if isinstance(message, Vote):
        return b"vote %d %d %d\n%b" % (operation, phase, message.rank, message.verdict)
    return b"told %d %d\n%b" % (operation, phase, message.result)


def _decoded(data: bytes) -> Vote | Told:
    head, _, rest = data.partition(b"\n")
    word, operation, phase, *rank = head.split()
    at = PhaseIndex(int(operation), int(phase))
    return Vote(at, int(rank[0]), rest) if word == b"vote" else Told(at, rest)
