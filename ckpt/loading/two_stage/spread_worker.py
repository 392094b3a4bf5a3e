"""Run one rank's part in a two-stage load: read blocks, exchange them, and place each as soon as it is here. Slots bound the memory.

    reader thread:   storage -> slot of this rank         (waits for a free slot)
    network thread:  slot <-> another host                (in the order of block numbers, which all ranks know)
    calling thread:  slot of this rank or a neighbour -> tensors; tells the slot's rank; frees slots that all neighbours have taken

The calling thread never waits for a slot or for the network, so every slot is freed in the end. A rank whose reading fails goes on
with bytes that are never used, so that no rank waits for it: it raises the error once all blocks have been exchanged.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, groupby
from queue import SimpleQueue
from typing import Any

import torch

from ckpt.errors import RankLeftError, sentence
from ckpt.loading.strategy import ReadStats
from ckpt.loading.two_stage.endpoints import Endpoints, RankEndpoints
from ckpt.loading.two_stage.host import DONE, READY, HostLink
from ckpt.loading.two_stage.network import Transport
from ckpt.loading.two_stage.slots import Slots
from ckpt.loading.two_stage.spread_blocks import RankPart, SpreadBlock
from ckpt.loading.two_stage.timing import Timers
from ckpt.memory.device import same_device
from ckpt.ranks.topology import Topology

IN_FLIGHT = 2
"""Blocks that are on the network at a time."""


@dataclass(slots=True)
class Times:
    """Seconds that one rank spent; storage and network run beside the rest.

    Attributes:
        storage, network, place: reading, sending or receiving, copying to where the bytes belong.
        wait: nothing to do in the calling thread.
    """

    storage: float = 0.0
    network: float = 0.0
    place: float = 0.0
    wait: float = 0.0


@dataclass(slots=True)
class TwoStageReading:
    """The prepared load of one rank. See `Reading`.

    Attributes:
        slots: None: it has run, once.
        link: to the neighbours; None: there are none, or they share no memory.
        transport: to other hosts; None: there are none.
        timers: `run` adds its `Times` to them.
        give_up: called when `run` has failed, and transfers may still be under way.
    """

    part: RankPart
    slots: Slots | None
    endpoints: RankEndpoints
    link: HostLink | None
    transport: Transport | None
    topology: Topology
    timers: Timers
    give_up: Callable[[], None]

    def run(self) -> ReadStats:
        """See `Reading.run`. Lets go of all memory at its end: other readings may follow, and neighbours that wait for a rank that
        failed learn of it from its closed sockets, long before all ranks agree on the error."""
        slots, self.slots = self.slots, None
        assert slots is not None, "a reading runs once"
        times = Times()
        try:
            self.endpoints.begin()
            if self.link is not None:
                self.link.join(self.part.neighbours, self.topology)
            SpreadWorker(self.part, slots, self.endpoints, self.link, self.transport, self.topology, times).run()
        except BaseException:
            self.give_up()
            raise
        finally:
            for name, seconds in asdict(times).items():
                self.timers[name].append(seconds)
            slots.close()
            self.close()
        return ReadStats(self.endpoints.bytes_read, self.endpoints.bytes_needed)

    def close(self) -> None:
        """See `Reading.close`."""
        self.slots = None
        self.endpoints.close()
        if self.link is not None:
            self.link.close()


@dataclass(slots=True)
class _Open:
    """A block in a slot of this rank.

    Attributes:
        missing: neighbours that have yet to take it.
        on_network: it has yet to be sent.
    """

    slot: int
    missing: set[int]
    on_network: bool


class SpreadWorker:
    """The three threads of one rank for one load.

    Args:
        link: joined with all neighbours.
        topology: told whenever something has moved; `timeout_s` is how long other ranks may be silent.
        times: filled while it runs.
    """

    def __init__(
        self,
        part: RankPart,
        slots: Slots,
        endpoints: Endpoints,
        link: HostLink | None,
        transport: Transport | None,
        topology: Topology,
        times: Times,
    ) -> None:
        self._part = part
        self._slots = slots
        self._endpoints = endpoints
        self._link = link
        self._transport = transport
        self._topology = topology
        self._times = times
        self._failure: BaseException | None = None
        self._partners = {rank for number, to in part.network.items() for rank in (part.blocks[number].reader, *to)} - {
            part.rank
        }
        # Of the calling thread: blocks that are yet to be placed, freed, sent or received, taken from and by each neighbour.
        self._to_take = part.num_wanted
        self._to_free = len(part.takers)
        self._to_carry = len(part.network)
        self._from = Counter(part.sources)
        self._owing = Counter(chain.from_iterable(part.takers.values()))
        self._own_is_read = False
        self._open: dict[int, _Open] = {}
        self._last_heard = time.monotonic()
        # Between the threads: slots, None for the end; and calls that the calling thread makes for the others.
        self._free_reading = _queue_of(range(slots.reading))
        self._free_receiving = _queue_of(range(slots.reading, slots.reading + slots.receiving))
        self._to_send = _queue_of(())
        self._calls: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        # Where it is full the calling thread will wake anyway, and nobody waits for one that has ended.
        self._wake.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        for neighbour, made in link.sockets.items() if link else ():
            made.settimeout(topology.timeout_s)
            self._selector.register(made, selectors.EVENT_READ, neighbour)

    def run(self) -> None:
        """Exchange all blocks, once. All ranks of the group call it.

        Raises:
            RankLeftError: another rank has gone, or is silent.
            Exception: the first that this rank's reading or placing met; it is raised even if another rank has gone since.
        """
        begin = same_device()
        threads = [threading.Thread(target=self._read, args=(begin,), name="ckpt-read", daemon=True)]
        if self._part.network:
            threads.append(threading.Thread(target=self._carry, args=(begin,), name="ckpt-network", daemon=True))
        try:
            for thread in threads:
                thread.start()
            while self._to_take or self._to_free or not self._own_is_read:
                self._step()
        except BaseException as error:
            ours = self._failure
            self._stop_threads(error)
            if threads[0].ident is not None:
                threads[0].join()  # the other may be waiting for a host that is gone, and wants none of our memory then
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

    # The calling thread

    def _step(self) -> None:
        """Wait for messages of neighbours and calls of the other threads, and handle those that are there."""
        started = time.perf_counter()
        events = self._selector.select(0.2)
        self._times.wait += time.perf_counter() - started
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
            self._topology.progress()

    def _check_silence(self) -> None:
        """Raise if other ranks owe this one something and have failed, or are silent for too long. Own storage may take its time."""
        neighbours = sorted(+self._from | +self._owing)
        if not (neighbours or self._to_carry):
            self._last_heard = time.monotonic()
            return
        self._topology.progress()
        # Neighbours that go close their sockets; of the others the agreement knows.
        gone = self._topology.has_raised(self._partners) if self._to_carry else None
        if gone is not None:
            raise _left(gone)
        timeout_s = self._topology.timeout_s
        if time.monotonic() - self._last_heard > timeout_s:
            named = f"rank{'s' * (len(neighbours) > 1)} {', '.join(map(str, neighbours))}"
            raise RankLeftError(f"nothing came from {named if neighbours else 'other hosts'} for {timeout_s:.0f} s")

    def _receive(self, neighbour: int) -> None:
        """Handle one message: a block is ready in a neighbour's slot, or a neighbour has taken one of ours."""
        assert self._link is not None
        message = self._link.receive(neighbour)
        if message is None:
            if self._from[neighbour] or self._owing[neighbour]:
                raise _left(neighbour)
            self._selector.unregister(self._link.sockets[neighbour])
            return
        kind, number, slot = message
        if kind == READY:
            self._from[neighbour] -= 1
            self._take(self._part.blocks[number], self._slots.cut(self._link.memory[neighbour], slot))
            self._send(neighbour, DONE, number, slot)
        else:
            self._owing[neighbour] -= 1
            self._open[number].missing.discard(neighbour)
            self._free_if_taken(number)

    def _send(self, neighbour: int, kind: int, number: int, slot: int) -> None:
        assert self._link is not None
        try:
            self._link.send(neighbour, kind, number, slot)
        except OSError as error:
            raise _left(neighbour) from error

    def _has_come(self, block: SpreadBlock, slot: int) -> None:
        """A block is in a slot of this rank: tell the neighbours that want it, and take it if this rank does."""
        takers = self._part.takers[block.number]
        is_own = block.reader == self._part.rank
        if not is_own:
            self._to_carry -= 1
        self._open[block.number] = _Open(slot, set(takers), is_own and block.number in self._part.network)
        for neighbour in takers:
            self._send(neighbour, READY, block.number, slot)
        if self._part.rank in block.destinations:
            self._take(block, self._slots.memory(slot))
        self._free_if_taken(block.number)

    def _take(self, block: SpreadBlock, memory: torch.Tensor) -> None:
        started = time.perf_counter()
        if self._failure is None:
            try:
                for at, piece in block.places():
                    self._endpoints.place(piece, memory[at : at + piece.num_bytes])
            except Exception as error:
                self._failure = error
        self._to_take -= 1
        self._times.place += time.perf_counter() - started

    def _is_sent(self, number: int) -> None:
        self._to_carry -= 1
        self._open[number].on_network = False
        self._free_if_taken(number)

    def _free_if_taken(self, number: int) -> None:
        opened = self._open[number]
        if opened.missing or opened.on_network:
            return
        del self._open[number]
        self._to_free -= 1
        (self._free_reading if opened.slot < self._slots.reading else self._free_receiving).put(opened.slot)

    def _finish_own(self) -> None:
        self._own_is_read = True

    def _raise(self, error: BaseException) -> None:
        raise RankLeftError(f"the network between the hosts failed: {sentence(error)}") from error

    # The other two threads, which change nothing of the calling one's

    def _call(self, *call: Any) -> None:
        """Let the calling thread call a method."""
        self._calls.put(call)
        with suppress(OSError):  # it is full, or the calling thread has given up and closed its end
            self._wake.send(b".")

    def _read(self, begin: Callable[[], None]) -> None:
        """The reader thread: first the blocks, which other ranks wait for, then what this rank alone wants, by chunk."""
        begin()
        for block in self._part.reads:
            slot = self._free_reading.get()
            if slot is None:
                return
            self._attempt(partial(self._fetch, block, slot))
            self._call(self._has_come, block, slot)
            if block.number in self._part.network:
                self._to_send.put(slot)
        for _, pieces in groupby(self._part.own, key=lambda piece: piece.key):
            self._attempt(partial(self._endpoints.read_own, list(pieces)))
        self._call(self._finish_own)

    def _fetch(self, block: SpreadBlock, slot: int) -> None:
        memory = self._slots.read_into(slot)
        for at, piece in block.places():
            self._endpoints.fetch(piece, memory[at : at + piece.num_bytes])
        self._slots.is_read(slot, block.num_bytes)

    def _attempt(self, work: Callable[[], None]) -> None:
        """Read, unless something has failed; the calling thread raises the error, at the end."""
        started = time.perf_counter()
        if self._failure is None:
            try:
                work()
            except BaseException as error:  # also SystemExit: the calling thread waits for this one
                self._failure = error
        self._times.storage += time.perf_counter() - started

    def _carry(self, begin: Callable[[], None]) -> None:
        """The network thread. `IN_FLIGHT` blocks are on their way at a time: the next transfer begins before one has ended."""
        coming: deque[tuple[SpreadBlock, int, Callable[[], None]]] = deque()
        try:
            begin()
            for number, to in self._part.network.items():
                if len(coming) == IN_FLIGHT:
                    self._finish(*coming.popleft())
                block = self._part.blocks[number]
                slots = self._to_send if block.reader == self._part.rank else self._free_receiving
                while coming and slots.empty():  # blocks under way may keep the slots, or hold up what frees them
                    self._finish(*coming.popleft())
                slot = slots.get()
                if slot is None:
                    return
                coming.append((block, slot, self._begin(block, slot, to)))
            while coming:
                self._finish(*coming.popleft())
        except BaseException as error:  # as above
            self._call(self._raise, error)

    def _begin(self, block: SpreadBlock, slot: int, to: Sequence[int]) -> Callable[[], None]:
        """Begin to send or receive a block; return a function that waits for the end."""
        assert self._transport is not None
        started = time.perf_counter()
        memory = self._slots.memory(slot)[: block.num_bytes]
        wait = self._slots.carry(partial(self._transport.begin, memory, block.reader, to))
        self._times.network += time.perf_counter() - started
        return wait

    def _finish(self, block: SpreadBlock, slot: int, wait: Callable[[], None]) -> None:
        """Wait until a block has been sent, or received."""
        started = time.perf_counter()
        wait()
        self._times.network += time.perf_counter() - started
        if block.reader == self._part.rank:
            self._call(self._is_sent, block.number)
        else:
            self._call(self._has_come, block, slot)


def _queue_of(slots: Iterable[int]) -> SimpleQueue[int | None]:
    queue: SimpleQueue[int | None] = SimpleQueue()
    for slot in slots:
        queue.put(slot)
    return queue


def _left(rank: int) -> RankLeftError:
    return RankLeftError(f"rank {rank} left before it had given and taken all", rank=rank)
