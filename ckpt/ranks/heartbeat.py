"""Heartbeats, by which each rank publishes its phase and its progress, and the detection of absent ranks from them."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import psutil

from ckpt.ranks.addresses import machine
from ckpt.ranks.store_client import StoreClient
from ckpt.ranks.stores import StoreGoneError
from ckpt.ranks.waiting import AwakeClock, start

_HINTED_SILENCE_S = 3.0  # after SIGTERM, which a launcher sends because a rank is gone: three missed beats
_AFTER_AGREEMENT_S = 2.0  # a watch leaves it to an agreement that is under way to find the rank absent


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
    """Content of one heartbeat."""

    rank: int
    pid: int
    born: str  # start time of the process: pids are reused
    host: str
    machine: str  # equal on two ranks that see each other's pids
    number: int = 0
    at: PhaseIndex = field(default_factory=lambda: PhaseIndex(0, -1))
    what: str | None = None
    phase: str | None = None
    moves: int = 0
    left: bool = False

    @property
    def who(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"

    @property
    def place(self) -> str:
        return place(self.what, self.phase)

    def encode(self) -> bytes:
        return json.dumps({name: getattr(self, name) for name in self.__slots__}).encode()

    @classmethod
    def decode(cls, data: bytes) -> Beat:
        beat = cls(**json.loads(data))
        beat.at = PhaseIndex(*beat.at)
        return beat


STORE_IS_GONE = "the store through which the ranks agree is gone, with rank 0 or with the launcher that held it"

WAITING = "wait for all"
"""Phase of a thread that waits for others of its rank, such as background saves, whose own heartbeats say where the rank is."""


def beat_key(rank: int) -> str:
    return f"beat/{rank}"


class Watch:
    """Watches the heartbeat of the next rank, so that somebody misses each rank also where no agreement waits for it.

    Args:
        rank: that is watched.
        timeout_s: its longest silence.
        tell: called once, in the heartbeat's thread, with what is wrong: the rank is silent, or the store.
    """

    def __init__(self, rank: int, timeout_s: float, tell: Callable[[str], None]) -> None:
        self.rank = rank
        self.tell = tell
        self._timeout_s = timeout_s
        self._number = -1
        self._clock = AwakeClock(_HINTED_SILENCE_S)
        self._heard_s = self._clock()
        self._machine = machine("pid")
        self._work: list[bytes] | None = None

    def look(self, beat: Beat | None) -> bool:
        """Return whether the rank is fine, and tell if not. Called with each of this rank's own heartbeats."""
        now = self._clock()
        if beat is None or beat.left or beat.number != self._number or self._works(beat):
            self._heard_s = now
        if beat is None or now - self._heard_s < self._timeout_s + _AFTER_AGREEMENT_S:
            self._number = -1 if beat is None else beat.number
            return True
        self.tell(f"{beat.who} has been silent for {self._timeout_s:g} s, last seen {beat.place}")
        return False

    def _works(self, beat: Beat) -> bool:
        """Whether a rank on this machine uses a processor: a native call may keep Python's lock, and so its heartbeat, for long."""
        before, self._work = self._work, None
        if beat.machine == self._machine:
            with suppress(OSError):  # it has ended
                self._work = _stat(beat.pid, 11, 13)
        return None not in (before, self._work) and self._work != before


class Heartbeat:
    """This rank's heartbeat: a daemon thread that publishes phase and progress every `interval_s`.

    Attributes:
        watch: of another rank's heartbeat; None: none.
    """

    def __init__(self, client: StoreClient, rank: int, *, host: str, interval_s: float) -> None:
        pid = os.getpid()
        self._beat = Beat(rank, pid, _born(pid) or "", host, machine("pid"))
        self._client = client
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self.watch: Watch | None = None
        self._thread = threading.Thread(target=self._run, name=f"heartbeat of rank {rank}", daemon=True)

    def start(self) -> None:
        start(self._thread)  # first: a rank that cannot go on has said nothing
        self.say()

    @property
    def at(self) -> PhaseIndex:
        return self._beat.at

    def move(self, num: int = 1) -> None:
        self._beat.moves += num

    def say(self, **changes: Any) -> None:
        """Publish at once the progress of this rank, and changes of its `Beat`."""
        with self._lock:
            for name, value in changes.items():
                setattr(self._beat, name, value)
            self._beat.number += 1
            self._beat.moves += bool(changes)
            self._client.put(beat_key(self._beat.rank), self._beat.encode())

    def enter(self, at: PhaseIndex, what: str | None, phase: str | None) -> None:
        """Publish at once where this rank is now: if it is killed there, the others report it."""
        self.say(at=at, what=what, phase=phase)

    def stop(self) -> None:
        """Publish that this rank has left the job, and stop."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        with suppress(StoreGoneError):  # no rank reads it any more
            self.say(left=True)

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self._interval_s):
                self.say()
                if (watch := self.watch) is not None and not watch.look(self._beat_of(watch.rank)):
                    self.watch = None
        except StoreGoneError as error:
            # The rank itself learns of it, with a sentence, at its next agreement, if it comes to one.
            if self.watch is not None and not self._stopped.wait(_AFTER_AGREEMENT_S):
                self.watch.tell(str(error) if error.is_silent else STORE_IS_GONE)

    def _beat_of(self, rank: int) -> Beat | None:
        with self._lock:
            data = self._client.peek(beat_key(rank))
        return None if data is None else Beat.decode(data)


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
    beat: Beat | None
    heard_s: float
    moved_s: float


class FailureDetector:
    """Detects which of the ranks that an agreement waits for will not come.

    A rank is absent if its process is gone, its heartbeat is silent for `timeout_s`, or it has not moved for `timeout_s`, both since
    this detector first looked at it; never because it takes long while it moves. A heartbeat is up to a second old, and the verdict
    takes time to spread: the detector's patience is a little shorter, so that all ranks know within `timeout_s`, if that is 15 s or more.

    Args:
        client: client of the store with the heartbeats.
        at: the agreement that waits.
        wanted: its name in messages.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        client: StoreClient,
        at: PhaseIndex,
        wanted: str,
        timeout_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._at = at
        self._wanted = wanted
        self._timeout_s = timeout_s
        self._patience_s = timeout_s - min(1.5, timeout_s / 10)
        self._machine = machine("pid")
        self._clock = clock
        self._seen: dict[int, _Seen] = {}

    def absent(self, ranks: Iterable[int], *, hinted: bool) -> dict[int, Absence]:
        """Return those of `ranks` that will not come.

        Args:
            hinted: this process got SIGTERM, so one of them may be gone: a shorter silence counts.
        """
        ranks = list(ranks)
        for rank, beat in zip(ranks, self._beats(ranks), strict=True):
            self._note(rank, beat)
        found = {rank: self._absence(rank, self._seen[rank], hinted) for rank in ranks}
        return {rank: absence for rank, absence in found.items() if absence is not None}

    def _beats(self, ranks: list[int]) -> list[Beat | None]:
        keys = [beat_key(rank) for rank in ranks]
        found = self._client.take(keys) if self._client.has(keys) else [self._client.peek(key) for key in keys]
        assert found is not None, "heartbeats are never deleted"
        return [None if data is None else Beat.decode(data) for data in found]

    def _note(self, rank: int, beat: Beat | None) -> None:
        now = self._clock()
        seen = self._seen.setdefault(rank, _Seen(beat, now, now))
        if beat is not None:
            if seen.beat is None or beat.number != seen.beat.number:
                seen.heard_s = now
            if seen.beat is None or beat.moves != seen.beat.moves:
                seen.moved_s = now
        seen.beat = beat

    def _absence(self, rank: int, seen: _Seen, hinted: bool) -> Absence | None:
        now = self._clock()
        beat = seen.beat
        if beat is None:
            never = f"rank {rank} did not join the job within {self._timeout_s:g} s"
            return Absence(never) if now - seen.heard_s > self._timeout_s else None
        here = beat.at == self._at
        if beat.left:
            return Absence(f"{beat.who} has left the job")
        if beat.machine == self._machine and _born(beat.pid) != beat.born:
            return Absence(f"{beat.who} was killed or ended {beat.place}", here)
        if beat.at > self._at:
            return Absence(f"{beat.who} is {beat.place}", elsewhere=True)
        silence_s = min(self._timeout_s, _HINTED_SILENCE_S) if hinted else self._timeout_s
        if now - seen.heard_s > min(silence_s, self._patience_s):
            return Absence(f"{beat.who} has been silent for {silence_s:g} s, last seen {beat.place}", here)
        return Absence(self._standstill(beat), True) if now - seen.moved_s > self._patience_s else None

    def _standstill(self, beat: Beat) -> str:
        if beat.at == self._at:
            return f"{beat.who} made no progress for {self._timeout_s:g} s {beat.place}"
        seen = "is" if beat.phase is None else "was last seen"  # it may have left that phase since
        return (
            f"{beat.who} did not come to {self._wanted} within {self._timeout_s:g} s and {seen} {beat.place}: every rank "
            "must make the same calls"
        )


def _born(pid: int) -> str | None:
    """Return the start time of a process as an opaque text, or None if it has ended, or is a zombie."""
    try:
        fields = _stat(pid, 0, 20)
    except FileNotFoundError:
        has_proc = os.path.exists("/proc/self/stat")
        return None if has_proc or not psutil.pid_exists(pid) else ""
    except ProcessLookupError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19].decode()


def _stat(pid: int, first: int, end: int) -> list[bytes]:
    """Return fields of /proc/<pid>/stat, counted from the state of the process on: 11 and 12 are its processor time, 19 its start."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[first:end]  # after the command's name, which is arbitrary
