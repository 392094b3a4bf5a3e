"""Schedules: the size of a job, and up to three faults at once, all chosen by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from ckpt.ranks.agreement import LEAD, Agreement, PhaseIndex
from tests.simulation.world import GAVE_UP_S, TIMEOUT_S, BrokenPromiseError, Process, World

SIZES = (*(2, 3, 4) * 16, *(5, 6, 8) * 4, 12, 16, 24, 64)
"""Small jobs find almost all mistakes, at a fraction of the cost."""
FAULTS = (
    *("crash", "pause", "long pause", "host", "cut", "long cut", "hang") * 2,
    *("hang in answer", "store", "sigterm", "stray", "interrupt", "lost word", "old word"),
)
LAST_FAULT_S = 6.0


class Schedule(World):
    """A job with faults. `faults` says which, for the message of a failure."""

    def __init__(self, seed: int, *, machine: Callable[..., Agreement] = Agreement, tell: Callable[[str], None] | None = None) -> None:
        chosen = random.Random(seed)
        num_ranks = chosen.choice(SIZES)
        super().__init__(num_ranks, min(chosen.choice((1, 2, 4, 8)), num_ranks), seed, machine=machine, tell=tell)
        self._has_slow = chosen.random() < 0.3
        self._raising = chosen.random() < 0.3
        comes_late = chosen.random() < 0.2
        for one in self.ranks:
            self.start(one, chosen.uniform(0.0, 0.5 * TIMEOUT_S) if comes_late and chosen.random() < 0.3 else chosen.random() * 0.01)
        self.ends_s = LAST_FAULT_S
        kinds = [chosen.choice(FAULTS) for _ in range(chosen.choice((0, 1, 1, 1, 2, 2, 3)))]
        for kind in kinds:  # after SIGTERM three seconds of silence count
            self._befall(chosen, kind, longest_s=1.5 if "sigterm" in kinds else 0.5 * TIMEOUT_S)

    def run(self) -> None:
        """Play the schedule to its end.

        Raises:
            BrokenPromiseError: with the seed's faults.
        """
        try:
            self.play(self.ends_s + GAVE_UP_S)
        except BrokenPromiseError as error:
            raise BrokenPromiseError(f"{len(self.ranks)} ranks, {'; '.join(self.faults) or 'no fault'}: {error}") from error

    def _befall(self, chosen: random.Random, kind: str, longest_s: float) -> None:
        at_s = chosen.uniform(0.0, LAST_FAULT_S)
        victim = chosen.choice(self.ranks) if chosen.random() < 0.7 else self.ranks[LEAD]
        self.faults.append(f"{kind} of rank {victim.rank} at {at_s:.2f} s")
        on_host = [one for one in self.ranks if one.host == victim.host]
        short_s, long_s = chosen.uniform(0.1, longest_s), chosen.uniform(2 * TIMEOUT_S, 3 * TIMEOUT_S)
        fault: dict[str, Callable[[], Any]] = {
            "crash": lambda: self.crash(victim),
            "pause": lambda: self.pause(victim, short_s),
            "long pause": lambda: (self.at_fault.add(victim.rank), self.pause(victim, long_s)),
            "host": lambda: [self.crash(one, seen=False) for one in on_host],
            "cut": lambda: self.cut.append((victim.host, at_s, at_s + short_s)),
            "long cut": lambda: (self.at_fault.update(one.rank for one in on_host), self.cut.append((victim.host, at_s, at_s + long_s))),
            "hang": lambda: self.hang(victim),
            "hang in answer": lambda: self.hang(self.ranks[LEAD]),
            "store": lambda: self.lose_store(),
            "sigterm": lambda: setattr(victim, "hinted", True),
            "stray": lambda: (self.at_fault.add(victim.rank), setattr(victim, "strays", True)),
            "interrupt": lambda: setattr(victim, "leaves", True),
            "lost word": lambda: setattr(victim, "loses", True),
            "old word": lambda: victim.last and self._arrive(victim, victim.last),
        }
        self.after(at_s, lambda: (self._say(f"{kind} of rank {victim.rank}"), fault[kind]()))
        self.ends_s = max(self.ends_s, at_s + long_s)

    def crash(self, one: Process, *, seen: bool = True) -> None:
        """End a process; without a word that other processes of its host see, if the host goes with it."""
        self.at_fault.add(one.rank)
        one.is_dead, one.inside = True, None
        self._num_out += 1
        if seen:
            self.tell_of(one)

    def pause(self, one: Process, seconds: float) -> None:
        one.paused_until = max(one.paused_until, self.now_s + seconds)

    def hang(self, one: Process) -> None:
        """The program of a rank hangs in its next phase, or the lead in its answer; the process lives, and its heartbeat goes on."""
        if not one.is_done:
            self.at_fault.add(one.rank)
            one.hangs = True
            one.moves_until = 0.0
            self._num_out += 1

    def lose_store(self) -> None:
        self.store_lost_s = self.now_s
        self.at_fault.update(one.rank for one in self.ranks)

    def work(self, one: Process, at: PhaseIndex) -> tuple[float, bool]:
        if self._has_slow and self.random.random() < 0.1:
            return self.random.uniform(5.0, 40.0), True
        return super().work(one, at)

    def raises(self, one: Process, at: PhaseIndex) -> bool:
        return self._raising and self.random.random() < 0.3 / len(self.ranks)
