"""The agreements of one rank over the job's store: carries messages between the `Agreement` machines, and looks at heartbeats for them.

Each rank has a queue in the store; the server wakes the rank that waits for a message. While a rank waits, its heartbeat's thread
puts a message into its queue from time to time, so that it looks whether those that it waits for will come. It reads all messages that are
there before it looks: a process that was stopped judges nobody by what it has not read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress

from ckpt.errors import describe
from ckpt.ranks.absence import LEAD, Absence, PhaseIndex
from ckpt.ranks.agreement import Agreement, Conclude, Decided, Do, Forget, ReadTruth, Send, Settle, Told, Vote
from ckpt.ranks.heartbeat import Heartbeat, sights
from ckpt.ranks.outcomes import Answer, PhaseOutcome, Result, concluded
from ckpt.ranks.store_client import StoreClient
from ckpt.ranks.stores import StoreGoneError
from ckpt.ranks.waiting import AwakeClock

_LOOK = b"look"


def look_s(world_size: int) -> float:
    """Seconds between two looks of a rank that waits: thousands of ranks do not keep the store busy by looking."""
    return 0.1 * max(1.0, world_size / 64)


class Agreeing:
    """All agreements of one rank, one after another.

    Args:
        hinted: returns whether this process got SIGTERM.

    Attributes:
        timeout_s: from the next agreement on.
    """

    def __init__(
        self, client: StoreClient, heartbeat: Heartbeat, rank: int, world_size: int, timeout_s: float, hinted: Callable[[], bool]
    ) -> None:
        self.client = client
        self.heartbeat = heartbeat
        self._rank = rank
        self._hinted = hinted
        self._machine = Agreement(rank, world_size, timeout_s)
        self._clock_of: tuple[PhaseIndex, AwakeClock] | None = None
        self._look_s = look_s(world_size)

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
        self.heartbeat.wait(self._wake)
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
            self.heartbeat.wait(None)
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
        data = self.heartbeat.ask(lambda client: client.peek(_truth(at)))
        return None if data is None else Result.decode(data)

    def is_given_up(self) -> bool:
        """Whether the others have settled the agreement that this rank has not reached yet. Any thread."""
        try:
            return self.heartbeat.ask(lambda client: client.has([_truth(self.heartbeat.at)]))
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
        detector.look(sights(self.client, waited_for), now_s)
        gone = detector.absent(waited_for, now_s, hinted=self._hinted())
        return gone[min(gone)] if gone else None

    def _now(self, at: PhaseIndex) -> float:
        if self._clock_of is None or self._clock_of[0] != at:
            self._clock_of = at, AwakeClock(max(1.0, 3 * self._look_s))
        return self._clock_of[1]()

    def _wake(self, client: StoreClient) -> None:
        client.push(_inbox(self._rank), _LOOK)

    def _heard(self, at: PhaseIndex) -> list[Do]:
        """Wait for a message; when it is time, read all that are there, and look."""
        data = self.client.pop(_inbox(self._rank))
        if data is not None and data != _LOOK:
            return self._machine.hear(_decoded(data))
        dos: list[Do] = []
        for one in self.client.pop_all(_inbox(self._rank)):
            if one != _LOOK:
                dos += self._machine.hear(_decoded(one))
        if self._rank == LEAD:
            self.heartbeat.move()  # the others watch the lead, also when its own verdict is in
        if not dos:
            seen = sights(self.client, self._machine.waits_for())
            dos = self._machine.look(seen, self._now(at), hinted=self._hinted())
        return dos

    def _done(self, dos: list[Do], answer: Callable[[Mapping[int, PhaseOutcome]], Answer]) -> bytes | None:
        """Do what the machine asks for, and what follows from it; return the result, once it is there."""
        result = None
        while dos:
            match do := dos.pop(0):
                case Send():
                    self.client.push(_inbox(do.to), _encoded(do.message))
                case Settle():
                    there = self.client.put_first(_truth(do.at), do.result)
                    dos += self._machine.truth(do.at, there)
                case ReadTruth():
                    found = self.client.peek(_truth(do.at))
                    assert found is not None, "the lead keeps it until all ranks have voted again"
                    dos += self._machine.truth(do.at, found)
                case Conclude():
                    dos += self._machine.concluded(do.at, concluded(do.verdicts, answer))
                case Forget():
                    with suppress(StoreGoneError):
                        self.client.delete(_truth(do.at))
                case Decided():
                    result = do.result
        return result


def _truth(at: PhaseIndex) -> str:
    return f"result/{at}"


def _raised(at: PhaseIndex, rank: int) -> str:
    return f"raised/{at}/{rank}"


def _inbox(rank: int) -> str:
    return f"inbox/{rank}"


def _encoded(message: Vote | Told) -> bytes:
    operation, phase = message.at
    if isinstance(message, Vote):
        return b"vote %d %d %d\n%b" % (operation, phase, message.rank, message.verdict)
    word = b"read" if message.result is None else b"told"
    return b"%b %d %d\n%b" % (word, operation, phase, message.result or b"")


def _decoded(data: bytes) -> Vote | Told:
    head, _, rest = data.partition(b"\n")
    word, operation, phase, *rank = head.split()
    at = PhaseIndex(int(operation), int(phase))
    return Vote(at, int(rank[0]), rest) if word == b"vote" else Told(at, rest if word == b"told" else None)
