"""Heartbeats, by which each rank publishes its phase and its progress, and looks at those of others."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

import psutil

from ckpt.ranks.addresses import machine
from ckpt.ranks.agreement import HINTED_SILENCE_S, Absence, Beat, FailureDetector, PhaseIndex, Sight
from ckpt.ranks.mail import Mail
from ckpt.ranks.store_client import StoreClient
from ckpt.ranks.stores import StoreGoneError
from ckpt.ranks.waiting import AwakeClock, start

_MOST_AT_ONCE, _PLACES_PER_S = 1000, 20_000
"""More ranks do not all say at once where they are: the store takes some 50 us for each."""
_AFTER_AGREEMENT_S = 2.0  # a watch leaves it to an agreement that is under way to find the rank absent


STORE_IS_GONE = "the store through which the ranks agree is gone, with rank 0 or with the launcher that held it"

WAITING = "wait for all"
"""Phase of a thread that waits for others of its rank, such as background saves, whose own heartbeats say where the rank is."""


def beat_key(rank: int) -> str:
    return f"beat/{rank}"


def place_every_s(num_ranks: int) -> float:
    """Return the seconds between two places that a rank publishes at once."""
    return num_ranks / _PLACES_PER_S if num_ranks > _MOST_AT_ONCE else 0.0


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
        self._clock = AwakeClock(HINTED_SILENCE_S)
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

    Args:
        mail: that is kept alive; None: none.
        num_ranks: that publish theirs in this store.

    Attributes:
        watch: of another rank's heartbeat; None: none.
    """

    def __init__(
        self, client: StoreClient, rank: int, *, host: str, interval_s: float, mail: Mail | None = None, num_ranks: int = 1
    ) -> None:
        pid = os.getpid()
        self._beat = Beat(rank, pid, _born(pid) or "", host, machine("pid"))
        self._client = client
        self._interval_s = interval_s
        self._mail = mail
        self._place_every_s = place_every_s(num_ranks)
        self._placed_s = 0.0
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

    def wait(self, *, waits: bool) -> None:
        """Say with the next beat whether this rank has handed in its verdict, and waits for the result."""
        self._beat.waits = waits

    def say(self, **changes: Any) -> None:
        """Publish at once the progress of this rank, and changes of its `Beat`."""
        with self._lock:
            self._change(changes)
            self._beat.number += 1
            self._client.put(beat_key(self._beat.rank), self._beat.encode())

    def enter(self, at: PhaseIndex, what: str | None, phase: str | None) -> None:
        """Publish where this rank is now: if it is killed there, the others report it.

        At once; one of thousands that has just done so, with its next beat.
        """
        place, now_s = {"at": at, "what": what, "phase": phase, "waits": False}, time.monotonic()
        if now_s - self._placed_s >= self._place_every_s:
            self._placed_s = now_s
            self.say(**place)
        else:
            with self._lock:
                self._change(place)

    def stop(self) -> None:
        """Publish that this rank has left the job, and stop."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        with suppress(StoreGoneError):  # no rank reads it any more
            self.say(left=True)

    def _change(self, changes: Mapping[str, Any]) -> None:
        for name, value in changes.items():
            setattr(self._beat, name, value)
        self._beat.moves += bool(changes)

    def _run(self) -> None:
        try:
            while not self._stopped.wait(self._interval_s):
                self.say()
                if self._mail is not None:
                    self._mail.keep_alive()
                if (watch := self.watch) is not None and not watch.look(self._beat_of(watch.rank)):
                    self.watch = None
        except StoreGoneError as error:
            if self._mail is not None:
                self._mail.fail(error)
            # The rank itself learns of it, with a sentence, at its next agreement, if it comes to one.
            if self.watch is not None and not self._stopped.wait(_AFTER_AGREEMENT_S):
                self.watch.tell(str(error) if error.is_silent else STORE_IS_GONE)

    def _beat_of(self, rank: int) -> Beat | None:
        data = self._client.peek(beat_key(rank))
        return None if data is None else Beat.decode(data)


def sights(client: StoreClient, ranks: Iterable[int]) -> dict[int, Sight]:
    """Look at ranks: read their heartbeats, and of those of this machine whether their processes are there."""
    ranks = list(ranks)
    keys = [beat_key(rank) for rank in ranks]
    found = client.take(keys) if client.has(keys) else [client.peek(key) for key in keys]
    assert found is not None, "heartbeats are never deleted"
    here = machine("pid")
    beats = [None if data is None else Beat.decode(data) for data in found]
    return {rank: Sight(beat, _has_ended(beat, here)) for rank, beat in zip(ranks, beats, strict=True)}


def ended(client: StoreClient, ranks: Collection[int]) -> dict[int, Absence]:
    """Return those of the ranks that are seen to have ended, or have left. One look: a process of another machine may have died unseen."""
    detector = FailureDetector(PhaseIndex(0, -1), "", float("inf"))
    detector.look(sights(client, ranks) if ranks else {}, 0.0)
    return detector.absent(ranks, 0.0, hinted=False)


def _has_ended(beat: Beat | None, here: str) -> bool:
    return beat is not None and beat.machine == here and _born(beat.pid) != beat.born


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
