"""Run one rank's part in a two-stage load: read blocks, exchange them, and place each as soon as it is here. Slots bound the memory.

    reader thread:   storage -> slot of this rank         (waits for a free slot)
    network thread:  slot <-> another host                (in the order of block numbers, which all ranks know)
    calling thread:  slot of this rank or a neighbour -> tensors; tells the slot's rank; frees slots that all neighbours have taken

The calling thread never waits for a slot or for the network, so every slot is freed in the end. A rank whose reading fails goes on
with bytes that are never used, so that no rank waits for it: it raises the error once all blocks have been exchanged.
"""

from __future__ import annotations

import functools
import logging
import selectors
import socket
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

import torch

from ckpt.errors import RankLeftError, sentence
from ckpt.loading.direct import ChunkReader
from ckpt.loading.strategy import ReadStats, StoredPart
from ckpt.loading.two_stage.network import Transport
from ckpt.loading.two_stage.slots import DONE, READY, HostLink, Slots
from ckpt.loading.two_stage.spread_blocks import ChunkRange, RankPart, RankWants, SpreadBlock
from ckpt.memory.copies import Filling
from ckpt.memory.device import same_device
from ckpt.ranks.merging import most, total
from ckpt.ranks.topology import Topology
from ckpt.ranks.waiting import start

_log = logging.getLogger("ckpt")
_P = ParamSpec("_P")
_T = TypeVar("_T")

Timers = defaultdict[str, list[float]]
"""Name -> seconds of every call."""

timers: Timers = defaultdict(list)
"""Of timed functions whose first argument has no timers of its own; Megatron-Core has one such dictionary under this name."""


def timed(verbose: bool = True) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Return a decorator that notes the seconds of each call under the function's name.

    The seconds go to `timers` of the object whose method it is, if that has any, else to `ckpt.loading.two_stage.spread_worker.timers`.

    Args:
        verbose: also log, at level debug, the beginning of a call and its seconds.
    """

    def decorate(fn: Callable[_P, _T]) -> Callable[_P, _T]:
        name = fn.__name__

        @functools.wraps(fn)
        def wrapped(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            if verbose:
                _log.debug("%s begins", name)
            started = time.perf_counter()
            try:
                return fn(*args, **kwargs)
            finally:
                took = time.perf_counter() - started
                _timers_of(args)[name].append(took)
                if verbose:
                    _log.debug("%s took %.4f s", name, took)

        return wrapped

    return decorate


def _timers_of(args: Sequence[Any]) -> Timers:
    own = getattr(args[0], "timers", None) if args else None
    return own if isinstance(own, defaultdict) else timers


def summarize(taken: Mapping[str, Sequence[float]], topology: Topology) -> dict[str, tuple[float, float]]:
    """Return for every name that any rank has the seconds of the slowest rank, and the mean over all ranks. Collective.

    A rank without a name spent no time on it. The lead logs a line for each.
    """
    with topology.phase("summarize the times") as phase:
        seconds = {name: sum(each) for name, each in taken.items()}
        phase.merge = {f"most {name}": most(took) for name, took in seconds.items()} | {"sums": total(seconds)}
    summary = {}
    for name, added in phase.merged["sums"].items():
        summary[name] = phase.merged[f"most {name}"], added / topology.world_size
        if topology.is_lead:
            _log.info("%s: %.4f s on the slowest rank, %.4f s on average", name, *summary[name])
    return summary


IN_FLIGHT = 2
"""Blocks that are on the network at a time."""

OTHER_HOSTS = -1
"""Stands for a transfer to other hosts among the ranks that have yet to take a block from its slot."""

STEPS = ("storage", "network", "place", "wait")
"""Names under which seconds are taken: reading; sending or receiving; copying to tensors; nothing to do in the calling thread."""


@dataclass(frozen=True, slots=True)
class TwoStageReading:
    """The prepared load of one rank: everything it needs, before a byte moves. See `Reading`.

    Attributes:
        reader: reads for the reader thread, from storage to slots, and to tensors what this rank alone wants.
        filling: copies from slots to tensors, for the calling thread.
        link: to the neighbours; None: there are none, or they share no memory.
        transport: to other hosts; None: there are none.
        topology: told whenever something has moved; `timeout_s` is how long other ranks may be silent.
        timers: `run` adds the seconds of each of `STEPS`.
        give_up: called when `run` has failed, and transfers may still be under way.
        counted_bytes: what `run` returns as bytes read; None: what this rank has read.
    """

    part: RankPart
    wants: RankWants
    reader: ChunkReader
    filling: Filling
    slots: Slots
    link: HostLink | None
    transport: Transport | None
    topology: Topology
    timers: Timers
    give_up: Callable[[], None]
    counted_bytes: int | None = None

    def run(self) -> ReadStats:
        """See `Reading.run`. Closes sockets at its end, from which neighbours that wait for a rank that failed learn of it, long before
        all ranks agree on the error."""
        seconds = dict.fromkeys(STEPS, 0.0)
        try:
            for filling in (self.reader.filling, self.filling):
                filling.begin(self.wants.devices)  # to wait for devices later could mean waiting for other ranks
            if self.link is not None:
                self.link.join(self.part.neighbours, self.topology)
            self.reader.read_soon(self._coming())
            SpreadWorker(self, seconds).run()
        except BaseException:
            self.give_up()
            raise
        finally:
            for name, taken in seconds.items():
                self.timers[name].append(taken)
            self.close()
        counted = self.reader.bytes_read if self.counted_bytes is None else self.counted_bytes
        return ReadStats(counted, self.wants.num_bytes)

    def _coming(self) -> Iterator[tuple[StoredPart, int, int]]:
        """All that this rank reads, in its order."""
        for piece in chain(chain.from_iterable(block.pieces for block in self.part.reads), self.part.own):
            yield self.wants.parts[piece.key][0], piece.start, piece.stop

    def close(self) -> None:
        """See `Reading.close`."""
        with ExitStack() as closing:  # all, also if one fails; the link first, as neighbours may be waiting
            for close in (self.filling.close, self.reader.close, self.slots.close):
                closing.callback(close)
            if self.link is not None:
                closing.callback(self.link.close)


class SpreadWorker:
    """The three threads of one rank for one load.

        a slot of this rank:  free -> filled, by storage or another host -> taken by all neighbours, sent to other hosts -> free

    Args:
        job: its link has been joined, and it is closed by the caller.
        seconds: by name, of `STEPS`; counted up while it runs.
    """

    def __init__(self, job: TwoStageReading, seconds: dict[str, float]) -> None:
        self._job = job
        self._seconds = seconds
        part, slots = job.part, job.slots
        self._failure: BaseException | None = None
        carried = [(part.blocks[number].reader, *to) for number, to in part.network.items()]
        self._partners = set(chain.from_iterable(carried)) - {part.rank}
        # Of the calling thread. Unfinished: blocks to place, slots to free, and the reads of this rank for itself.
        self._unfinished = part.num_wanted + len(part.takers) + 1
        self._to_carry = len(part.network)
        # Neighbour -> blocks that this rank has yet to take from it; blocks of this rank that it has yet to take.
        self._from = Counter(part.sources)
        self._owing = Counter(chain.from_iterable(part.takers.values()))
        self._open: dict[int, tuple[int, set[int]]] = {}  # block -> its slot, and the ranks that have yet to take it
        self._last_heard = time.monotonic()
        # Between the threads: slots, None for the end; and calls that the calling thread makes for the others.
        self._free_reading = _queue_of(range(slots.reading))
        self._free_receiving = _queue_of(range(slots.reading, slots.reading + slots.receiving))
        self._to_send = _queue_of(())
        self._calls: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        # A full socket wakes the calling thread anyway, and no thread waits for a calling thread that has ended.
        self._wake.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        for neighbour, made in job.link.sockets.items() if job.link else ():
            made.settimeout(job.topology.timeout_s)
            self._selector.register(made, selectors.EVENT_READ, neighbour)

    def run(self) -> None:
        """Exchange all blocks, once. All ranks of the group call it.

        Raises:
            RankLeftError: another rank has gone, or is silent.
            Exception: the first that this rank's reading or placing met; it is raised even if another rank has gone since.
        """
        begin = same_device()
        threads = [threading.Thread(target=self._read, args=(begin,), name="ckpt-read", daemon=True)]
        if self._job.part.network:
            threads.append(threading.Thread(target=self._carry, args=(begin,), name="ckpt-network", daemon=True))
        try:
            for thread in threads:
                start(thread)
            while self._unfinished:
                self._step()
        except BaseException as error:
            ours = self._failure
            self._stop_threads(error)
            if threads[0].ident is not None:
                threads[0].join()  # the network thread may wait for a host that is gone, without using our memory
            if ours is not None and isinstance(error, RankLeftError):
                raise ours from error
            raise
        finally:
            self._selector.close()
            self._woken.close()
            self._wake.close()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure

    def _stop_threads(self, error: BaseException) -> None:
        """Make the other threads end: nothing more is read, and no slot is waited for."""
        self._failure = self._failure or RankLeftError(str(error))
        for queue in (self._free_reading, self._free_receiving, self._to_send):
            queue.put(None)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Count the seconds of a block of code. One thread uses a name."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - started

    # The calling thread

    def _step(self) -> None:
        """Wait for messages of neighbours and calls of the other threads, and handle those that are there."""
        with self._timed("wait"):
            events = self._selector.select(0.2)
        if not events:
            self._check_silence()
        for key, _ in events:
            self._last_heard = time.monotonic()
            if key.data is None:
                self._woken.recv(4096)
            else:
                self._receive(key.data)
        while not self._calls.empty():
            call, *args = self._calls.get()
            call(*args)
        if events:
            self._job.topology.progress()

    def _check_silence(self) -> None:
        """Raise if other ranks owe this one something and have failed, or are silent for too long. Own storage may take its time."""
        neighbours = sorted(+self._from | +self._owing)
        if not (neighbours or self._to_carry):
            self._last_heard = time.monotonic()
            return
        self._job.topology.progress()
        # Neighbours that go close their sockets; of the others the agreement knows.
        gone = self._job.topology.has_raised(self._partners) if self._to_carry else None
        if gone is not None:
            raise _left(gone)
        timeout_s = self._job.topology.timeout_s
        if time.monotonic() - self._last_heard > timeout_s:
            named = f"rank{'s' * (len(neighbours) > 1)} {', '.join(map(str, neighbours))}"
            raise RankLeftError(f"nothing came from {named if neighbours else 'other hosts'} for {timeout_s:.0f} s")

    def _receive(self, neighbour: int) -> None:
        """Handle one message: a block is ready in a neighbour's slot, or a neighbour has taken one of ours."""
        assert self._job.link is not None
        message = self._job.link.receive(neighbour)
        if message is None:
            if self._from[neighbour] or self._owing[neighbour]:
                raise _left(neighbour)
            self._selector.unregister(self._job.link.sockets[neighbour])
            return
        kind, number, slot = message
        if kind == READY:
            self._from[neighbour] -= 1
            self._take(self._job.part.blocks[number], self._job.slots.cut(self._job.link.memory[neighbour], slot))
            self._send(neighbour, DONE, number, slot)
        else:
            self._owing[neighbour] -= 1
            self._is_taken(number, neighbour)

    def _send(self, neighbour: int, kind: int, number: int, slot: int) -> None:
        assert self._job.link is not None
        try:
            self._job.link.send(neighbour, kind, number, slot)
        except OSError as error:
            raise _left(neighbour) from error

    def _has_come(self, block: SpreadBlock, slot: int) -> None:
        """A block is in a slot of this rank: tell the neighbours that want it, and take it if this rank does."""
        part = self._job.part
        missing = {part.rank, *part.takers[block.number]}
        if block.reader != part.rank:
            self._to_carry -= 1
        elif block.number in part.network:
            missing.add(OTHER_HOSTS)
        self._open[block.number] = slot, missing
        for neighbour in part.takers[block.number]:
            self._send(neighbour, READY, block.number, slot)
        if part.rank in block.destinations:
            self._take(block, self._job.slots.memory(slot))
        self._is_taken(block.number, part.rank)

    def _take(self, block: SpreadBlock, memory: torch.Tensor) -> None:
        if self._failure is None:
            try:
                with self._timed("place"):
                    place = self._job.filling.place if memory.device.type == "cpu" else self._job.filling.place_within
                    for at, piece in block.places():
                        wanted = self._job.wants.places[piece.key]
                        place(wanted, piece.start, piece.stop, memory[at : at + piece.num_bytes])
            except Exception as error:
                self._failure = error
        self._unfinished -= 1

    def _is_sent(self, number: int) -> None:
        self._to_carry -= 1
        self._is_taken(number, OTHER_HOSTS)

    def _is_taken(self, number: int, by: int) -> None:
        """Free the slot of a block when the last rank has taken it."""
        slot, missing = self._open[number]
        missing.discard(by)
        if not missing:
            del self._open[number]
            self._unfinished -= 1
            (self._free_reading if slot < self._job.slots.reading else self._free_receiving).put(slot)

    def _finish_own(self) -> None:
        self._unfinished -= 1

    def _raise(self, error: BaseException) -> None:
        raise RankLeftError(f"the network between the hosts failed: {sentence(error)}") from error

    # The other two threads; they leave the fields of the calling thread alone

    def _call(self, *call: Any) -> None:
        """Let the calling thread call a method."""
        self._calls.put(call)
        with suppress(OSError):  # the socket is full, or the calling thread has given up and closed its end
            self._wake.send(b".")

    def _read(self, begin: Callable[[], None]) -> None:
        """The reader thread: first the blocks, which other ranks wait for, then what this rank alone wants, by chunk."""
        self._attempt(begin)
        for block in self._job.part.reads:
            slot = self._free_reading.get()
            if slot is None:
                return
            self._attempt(partial(self._fetch, block, slot))
            self._call(self._has_come, block, slot)
            if block.number in self._job.part.network:
                self._to_send.put(slot)
        for _, pieces in groupby(self._job.part.own, key=lambda piece: piece.key):
            self._attempt(partial(self._read_own, list(pieces)))
        self._call(self._finish_own)

    def _fetch(self, block: SpreadBlock, slot: int) -> None:
        memory = self._job.slots.read_into(slot)
        for at, piece in block.places():
            part = self._job.wants.parts[piece.key][0]
            name_of = self._job.wants.places[piece.key].name_of
            self._job.reader.fetch(part, piece.start, memory[at : at + piece.num_bytes], name_of)
        self._job.slots.is_read(slot, block.num_bytes)

    def _read_own(self, pieces: Sequence[ChunkRange]) -> None:
        """Read pieces of one chunk to the tensors of this rank; a chunk in memory of this host as it is wanted."""
        wants, key = self._job.wants, pieces[0].key
        ranges = [(piece.start, piece.stop) for piece in pieces] if key in wants.places else None
        self._job.reader.read(wants.parts[key], ranges)

    def _attempt(self, work: Callable[[], None]) -> None:
        """Read, unless something has failed; the calling thread raises the error, at the end."""
        if self._failure is None:
            try:
                with self._timed("storage"):
                    work()
            except BaseException as error:  # also SystemExit: the calling thread waits for the reader
                self._failure = error

    def _carry(self, begin: Callable[[], None]) -> None:
        """The network thread. `IN_FLIGHT` blocks are on their way at a time: the next transfer begins before one has ended."""
        coming: deque[tuple[SpreadBlock, int, Callable[[], None]]] = deque()
        try:
            begin()
            for number, to in self._job.part.network.items():
                if len(coming) == IN_FLIGHT:
                    self._finish(*coming.popleft())
                block = self._job.part.blocks[number]
                slots = self._to_send if block.reader == self._job.part.rank else self._free_receiving
                while coming and slots.empty():  # blocks under way may keep the slots, or hold up what frees them
                    self._finish(*coming.popleft())
                slot = slots.get()
                if slot is None:
                    return
                coming.append((block, slot, self._begin(block, slot, to)))
            while coming:
                self._finish(*coming.popleft())
        except BaseException as error:  # also SystemExit
            self._call(self._raise, error)

    def _begin(self, block: SpreadBlock, slot: int, to: Sequence[int]) -> Callable[[], None]:
        """Begin to send or receive a block; return a function that waits for the end."""
        assert self._job.transport is not None
        with self._timed("network"):
            memory = self._job.slots.memory(slot)[: block.num_bytes]
            return self._job.slots.carry(partial(self._job.transport.begin, memory, block.reader, to))

    def _finish(self, block: SpreadBlock, slot: int, wait: Callable[[], None]) -> None:
        """Wait until a block has been sent, or received."""
        with self._timed("network"):
            wait()
        if block.reader == self._job.part.rank:
            self._call(self._is_sent, block.number)
        else:
            self._call(self._has_come, block, slot)


def _queue_of(slots: Iterable[int]) -> SimpleQueue[int | None]:
    queue: SimpleQueue[int | None] = SimpleQueue()
    for slot in slots:
        queue.put(slot)
    return queue


def _left(rank: int) -> RankLeftError:
    return RankLeftError(f"rank {rank} left before all blocks had been exchanged", rank=rank)
