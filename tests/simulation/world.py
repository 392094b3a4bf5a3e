"""A job of simulated ranks in virtual time: the real `Agreement` machines, over a simulated store, under faults that a seed chooses.

One seed is one schedule, and replays to the message. What the driver of the package does with threads and a store of torch
(`ckpt.ranks.agreeing`), a generator does here for each rank. After each step the promises are checked:

- all ranks that hear a result hear the same;
- a phase succeeds only with the votes of all ranks, none of which is an error;
- nobody is named who neither failed nor raised;
- nobody raises while a healthy rank is still inside the phase, but where the lead may be lost;
- in the end no healthy rank waits.
"""

from __future__ import annotations

import heapq
import random
import re
from collections import defaultdict, deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt.errors import CheckpointError, StorageError, describe
from ckpt.ranks.agreement import (
    LEAD,
    Agreement,
    Answer,
    Beat,
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
    concluded,
)

TIMEOUT_S = 15.0
BEAT_S = 1.0
LOOK_S = 1.0
STORE_S = 200e-6
NUM_OPERATIONS, NUM_PHASES = 3, 2
GAVE_UP_S = 400.0
"""After the last fault: whoever still waits then waits for ever."""

SOCKET_S = 50e-6
LOOK, GONE = object(), object()


class BrokenPromiseError(AssertionError):
    """A promise was not kept."""


class StoreLostError(Exception):
    """The store does not answer."""


@dataclass
class Process:
    """One rank's process, and what the simulation knows of it."""

    rank: int
    host: int
    machine: Agreement
    beat: Beat
    is_dead: bool = False
    paused_until: float = 0.0
    hangs: bool = False
    moves_until: float = 0.0
    hinted: bool = False
    strays: bool = False
    leaves: bool = False
    loses: bool = False
    inside: PhaseIndex | None = None
    waits: bool = False
    pops: bool = False
    is_done: bool = False
    clock_s: float = 0.0
    looked_s: float = 0.0
    gone: set[int] = field(default_factory=set)
    is_hub_silent: bool = False
    voted_s: float = 0.0
    inbox: deque[Any] = field(default_factory=deque)
    last: Any = None
    run: Generator[Any, Any, None] | None = None

    def clock(self, now_s: float) -> float:
        """As `waiting.AwakeClock`."""
        self.clock_s += min(now_s - self.looked_s, 3 * LOOK_S)
        self.looked_s = now_s
        return self.clock_s


class World:
    """The ranks, the store, and the time.

    Args:
        per_host: ranks of a host; only these see each other's processes.
        machine: makes a rank's machine; a mutant in the tests of the simulation itself.
        tell: called with each step, to replay a schedule.
    """

    def __init__(
        self,
        num_ranks: int,
        per_host: int,
        seed: int,
        *,
        machine: Callable[[int, int, float], Agreement] = Agreement,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.tell = tell
        self._per_host = per_host
        self.ranks = [
            Process(rank, rank // per_host, machine(rank, num_ranks, TIMEOUT_S), Beat(rank, 100 + rank, "b", f"h{rank // per_host}", ""))
            for rank in range(num_ranks)
        ]
        self.at_fault: set[int] = set()
        self.store_lost_s = float("inf")
        self.faults: list[str] = []
        self.cut: list[tuple[int, float, float]] = []
        self._truth: dict[PhaseIndex, bytes] = {}
        self._beats: dict[int, Beat] = {}
        self._voted: dict[PhaseIndex, dict[int, bool]] = defaultdict(dict)  # -> whether it raised
        self._results: dict[PhaseIndex, dict[int, Result]] = defaultdict(dict)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = self._num_out = 0

    @property
    def has_failed(self) -> bool:
        """Whether a rank has heard that a phase has failed."""
        return any(result.error is not None for of_ranks in self._results.values() for result in of_ranks.values())

    # Time

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (self.now_s + seconds, self._num_events, do))

    def play(self, until_s: float) -> None:
        """Let time pass until all healthy ranks are done."""
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, do = heapq.heappop(self._events)
            before = self._num_out
            do()
            if self._num_out != before and all(one.is_done or one.is_dead or one.hangs for one in self.ranks):
                return
        late = [one.rank for one in self.ranks if not (one.is_done or one.is_dead or one.hangs)]
        raise BrokenPromiseError(f"ranks {late} still wait at {self.now_s:.1f} s")

    def _if_awake(self, one: Process, do: Callable[[], None]) -> None:
        """Do something in a process now, when it goes on, or, if it is dead, never."""
        if one.is_dead:
            return
        if one.paused_until > self.now_s:
            self.after(one.paused_until - self.now_s, lambda: self._if_awake(one, do))
        else:
            do()

    def _say(self, text: str) -> None:
        if self.tell is not None:
            self.tell(f"{self.now_s:10.4f} {text}")

    # Processes

    def start(self, one: Process, join_s: float) -> None:
        one.run = self._program(one)
        self.after(join_s, lambda: self._if_awake(one, lambda: self._go_on(one, None)))
        self.after(join_s, lambda: self._beat_on(one))

    def _go_on(self, one: Process, value: Any) -> None:
        """Let a process run until it waits for something."""
        assert one.run is not None
        try:
            wanted = one.run.send(value)
        except StopIteration:
            one.is_done = True
            self._num_out += 1
            return
        if wanted is LOOK:
            one.pops = True
            self._deliver(one)
        else:
            seconds, value_after = wanted
            self.after(seconds, lambda: self._if_awake(one, lambda: self._go_on(one, value_after() if value_after else None)))

    def _deliver(self, one: Process) -> None:
        if one.pops and one.inbox:
            one.pops = False
            self._if_awake(one, lambda: self._go_on(one, one.inbox.popleft()))

    def _beat_on(self, one: Process) -> None:
        def beat() -> None:
            one.beat.number += 1
            if one.moves_until > self.now_s:
                one.beat.moves += 1
            self._publish(one)
            self.after(BEAT_S, lambda: self._if_awake(one, beat))

        self._if_awake(one, beat)

    def _publish(self, one: Process) -> None:
        beat = replace(one.beat)
        self.after(self._latency(one), lambda: self._beats.__setitem__(one.rank, beat))

    def _look_on(self, one: Process) -> None:
        def look() -> None:
            if one.waits:
                one.inbox.append(LOOK)
                self._deliver(one)
                self.after(LOOK_S, lambda: self._if_awake(one, look))

        self.after(LOOK_S, lambda: self._if_awake(one, look))

    def _latency(self, one: Process) -> float:
        """Of a request to the store; a host that is cut off waits."""
        seconds = STORE_S * (1 + 4 * self.random.random())
        for host, begins_s, ends_s in self.cut:
            if one.host == host and begins_s <= self.now_s < ends_s:
                seconds += ends_s - self.now_s
        return seconds

    def _request(self, one: Process, call: Callable[[], Any]) -> Generator[Any, Any, Any]:
        seconds = self._latency(one)
        if self.now_s + seconds > self.store_lost_s or seconds > TIMEOUT_S:
            yield min(seconds, 1.0 if seconds < TIMEOUT_S else TIMEOUT_S), None
            raise StoreLostError
        return (yield seconds, call)

    # What the driver does (ckpt.ranks.agreeing), and the program above it

    def _program(self, one: Process) -> Generator[Any, Any, None]:
        try:
            for operation in range(NUM_OPERATIONS):
                for phase in range(NUM_PHASES):
                    if one.strays:
                        one.strays = False
                        break  # it does not make the rest of this call
                    result = yield from self._phase(one, PhaseIndex(operation, phase))
                    if result is None:
                        return
                    if result.error is not None:
                        break
            one.beat.at = PhaseIndex(NUM_OPERATIONS, -1)
            yield from self._enter(one, one.beat.at, None)
            one.beat.left = True
            self._publish(one)
        except StoreLostError:
            self._say(f"rank {one.rank} finds the store gone")
            self.at_fault.add(one.rank)
            one.is_dead = True  # its program ends with the error
            self.tell_of(one)
        one.inside = None

    def _enter(self, one: Process, at: PhaseIndex, name: str | None) -> Generator[Any, Any, None]:
        one.beat.at, one.beat.what, one.beat.phase, one.beat.waits = at, f"save {at.operation}", name, False
        one.beat.number += 1
        one.beat.moves += 1
        beat = replace(one.beat)
        yield from self._request(one, lambda: self._beats.__setitem__(one.rank, beat))

    def _phase(self, one: Process, at: PhaseIndex) -> Generator[Any, Any, Result | None]:
        """Return the result; None: the rank has left."""
        name = f"phase-{at.phase}"
        one.inside = at
        yield from self._enter(one, at, name)
        work_s, moves = self.work(one, at)
        one.moves_until = self.now_s + work_s if moves else 0.0
        yield work_s, None
        while one.hangs:
            yield 1e9, None
        error = describe(StorageError(f"disk {one.rank} is full")) if self.raises(one, at) else None
        verdict = PhaseOutcome(f"save {at.operation}", name, error, to_lead=b"%d" % one.rank)
        one.inside, one.waits, one.is_hub_silent, one.voted_s = None, True, False, self.now_s
        one.beat.waits = True
        self._voted[at][one.rank] = error is not None
        if one.leaves:
            self._say(f"rank {one.rank} leaves in {at}")
            self.at_fault.add(one.rank)
            one.waits, self._voted[at][one.rank] = False, True
            left = replace(verdict, error=describe(CheckpointError(f"rank {one.rank} was interrupted")))
            yield from self._done(one, one.machine.withdraw(at, left))
            one.beat.left = True
            self._publish(one)
            return None
        self._say(f"rank {one.rank} votes in {at}{' with an error' if error else ''}")
        self._look_on(one)
        dos = one.machine.vote(at, verdict)
        while True:
            data = yield from self._done(one, dos)
            if data is not None:
                one.waits = False
                result = Result.decode(data)
                self._check(one, at, result)
                return result
            dos = yield from self._heard(one)

    def _heard(self, one: Process) -> Generator[Any, Any, list[Do]]:
        data = yield LOOK
        if data is not LOOK and data is not GONE:
            return one.machine.hear(data)
        dos = one.machine.again() if data is GONE else []
        while one.inbox:
            message = one.inbox.popleft()
            if message is GONE:
                dos += one.machine.again()
            elif message is not LOOK:
                dos += one.machine.hear(message)
        if not one.is_hub_silent and self.now_s - one.voted_s > TIMEOUT_S / 2:
            one.is_hub_silent = True
            return [*dos, *one.machine.again()]
        if one.rank == LEAD:
            one.beat.moves += 1
        if not dos:
            wanted = one.machine.waits_for()
            seen = yield from self._request(one, lambda: {rank: self._sight(one, rank) for rank in wanted})
            dos = one.machine.look(seen, one.clock(self.now_s), hinted=one.hinted)
        return dos

    def _sight(self, one: Process, rank: int) -> Sight:
        other = self.ranks[rank]
        beat = self._beats.get(rank)
        return Sight(beat, beat is not None and (rank in one.gone or (other.is_dead and other.host == one.host)))

    def _done(self, one: Process, dos: list[Do]) -> Generator[Any, Any, bytes | None]:
        result = None
        dos = [*dos]
        while dos:
            do = dos.pop(0)
            if self.tell is not None and not isinstance(do, Conclude):
                self._say(f"rank {one.rank}: {do}")
            match do:
                case Send():
                    yield from self._send(one, do)
                case Settle():
                    there = yield from self._request(one, lambda do=do: self._truth.setdefault(do.at, do.result))
                    dos += one.machine.truth(do.at, there)
                case Conclude():
                    yield self.random.random() * 0.01, None
                    while one.hangs:
                        yield 1e9, None
                    dos += one.machine.concluded(do.at, concluded(do.verdicts, self._answer))
                case Forget():
                    yield from self._request(one, lambda do=do: self._truth.pop(do.at, None))
                case Decided():
                    result = do.result
        return result

    def _answer(self, verdicts: dict[int, PhaseOutcome]) -> Answer:  # type: ignore[override]
        if [one.to_lead for _, one in sorted(verdicts.items())] != [b"%d" % rank for rank in range(len(self.ranks))]:
            raise CheckpointError("the lead has not heard what all have said")
        return Answer(b'"all"')

    # What carries messages (ckpt.ranks.mail): the hubs of both hosts

    def _send(self, one: Process, do: Send) -> Generator[Any, Any, None]:
        hub = self.ranks[one.host * self._per_host]
        if hub is one or one.is_hub_silent or hub.rank in one.gone:
            for rank in do.to:
                yield from self._request(one, lambda rank=rank: self._to_host(self.ranks[rank], do.message, one.gone))
        else:

            def carry() -> None:
                for rank in do.to:
                    self._to_host(self.ranks[rank], do.message, one.gone)

            self.after(SOCKET_S, lambda: self._if_carried(hub, carry))

    def _to_host(self, one: Process, message: Any, gone: set[int]) -> None:
        """To a rank through the hub of its host, or to its own queue, which nobody reads, where the hub is known to be gone."""
        hub = self.ranks[one.host * self._per_host]
        if hub is one:
            self._arrive(one, message)
        elif hub.rank not in gone:
            self.after(SOCKET_S, lambda: self._if_carried(hub, lambda: self._arrive(one, message)))

    def _if_carried(self, hub: Process, do: Callable[[], Any]) -> None:
        """A hub that is dead, or has left, carries nothing; one that is stopped does when it goes on."""
        if not hub.is_done:
            self._if_awake(hub, do)

    def tell_of(self, dead: Process) -> None:
        """The kernel tells the processes of its host that a process has ended, and these all hubs; a hub that is dead tells nobody."""
        sees = [one for one in self.ranks if one.host == dead.host and not one.is_dead]
        if not sees:
            return
        for one in self.ranks:
            hub = self.ranks[one.host * self._per_host]
            hears = one in sees if dead is hub else not hub.is_dead
            if hears and not one.is_dead:
                self.after(2 * SOCKET_S, lambda one=one: self._if_awake(one, lambda: self._hear_of(one, dead.rank)))

    def _hear_of(self, one: Process, rank: int) -> None:
        one.gone.add(rank)
        one.inbox.append(GONE)
        self._deliver(one)

    def _arrive(self, one: Process, message: Any) -> None:
        if one.loses and isinstance(message, Told):
            one.loses = False
            return
        one.last = message
        one.inbox.append(message)
        self._deliver(one)

    # What a schedule decides

    def work(self, one: Process, at: PhaseIndex) -> tuple[float, bool]:
        """Return the seconds that a rank works in a phase, and whether it shows progress."""
        return 0.05 + self.random.expovariate(2.0), False

    def raises(self, one: Process, at: PhaseIndex) -> bool:
        """Whether a rank raises at the end of a phase."""
        return False

    # Promises

    def _check(self, one: Process, at: PhaseIndex, result: Result) -> None:
        heard = self._results[at]
        self._say(f"rank {one.rank} hears of {at}: {result.error['message'] if result.error else 'success'}")
        if one.rank in heard:
            raise BrokenPromiseError(f"rank {one.rank} hears of {at} twice")
        for rank, other in heard.items():
            if other != result:
                raise BrokenPromiseError(f"{at}: rank {one.rank} hears {result}, rank {rank} has heard {other}")
        heard[one.rank] = result
        voted = self._voted[at]
        if result.error is None:
            if len(voted) < len(self.ranks) or any(voted.values()) or result.answer.from_lead != b'"all"':
                raise BrokenPromiseError(f"{at} succeeds with the votes {voted}")
            return
        message = result.error["message"]
        named = {int(rank) for rank in re.findall(r"rank (\d+)", message)}
        raised = {rank for rank, failed in voted.items() if failed}
        if "must make the same calls" in message and any(name.startswith("stray") for name in self.faults):
            return
        if not named <= self.at_fault | raised or not named:
            raise BrokenPromiseError(f"{at} names {sorted(named)}, at fault are {sorted(self.at_fault | raised)}: {message}")
        if LEAD not in self.at_fault:
            inside = [other.rank for other in self.ranks if other.inside == at and other.rank not in self.at_fault]
            if inside:
                raise BrokenPromiseError(f"{at} fails while ranks {inside} are still inside: {message}")
