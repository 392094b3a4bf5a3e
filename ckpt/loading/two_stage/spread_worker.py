"""Carries blocks: this rank reads some and takes those it wants, each as soon as it is there; all bounded by the slots.

    reader thread:   storage -> slot of ours          (waits for a free slot)
    network thread:  slot <-> another host            (in the one order that all ranks know)
    calling thread:  slot, ours or a neighbour's -> tensors; says so to whose slot it is; frees slots that all have taken

The calling thread never waits for a slot or for the network, so every slot is freed in the end. A rank whose reading fails
goes on, with bytes that nobody will use: the error is raised when all have what they wait for, and nobody is left waiting.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from ckpt.errors import RankLeftError, sentence
from ckpt.loading.two_stage.host import DONE, READY, HostLink
from ckpt.loading.two_stage.network import Transport
from ckpt.loading.two_stage.slots import Slots
from ckpt.loading.two_stage.spread_blocks import ChunkRange, Spread, SpreadBlock
from ckpt.memory.device import same_device
from ckpt.ranks.topology import Topology

IN_FLIGHT = 2
"""Blocks that are on the network at a time."""


class Endpoints(Protocol):
    """Where a rank's bytes come from, and where they go."""

    def fetch(self, piece: ChunkRange, memory: torch.Tensor) -> None:
        """Read a piece from storage, checked, into host memory. The reader thread calls it."""

    def place(self, piece: ChunkRange, memory: torch.Tensor) -> None:
        """Put a piece where this rank wants it."""

    def read_own(self, pieces: Sequence[ChunkRange]) -> None:
        """Read what this rank alone wants of one chunk straight to where it belongs. The reader thread calls it."""


class Hosts:
    """Which rank stands for whom on which host.

    Args:
        hosts: the ranks of the group by host; each a host of its own where none share memory.
    """

    def __init__(self, hosts: Sequence[Sequence[int]]) -> None:
        self._hosts = hosts
        self._at = {rank: (host, index) for host, ranks in enumerate(hosts) for index, rank in enumerate(ranks)}

    def neighbours(self, rank: int) -> Sequence[int]:
        """The ranks on its host, itself included."""
        return self._hosts[self._at[rank][0]]

    def source(self, block: SpreadBlock, rank: int) -> int:
        """The rank on this rank's host that the others there take the block from."""
        host, index = self._at[block.reader]
        here = self._at[rank][0]
        return block.reader if here == host else self._hosts[here][index % len(self._hosts[here])]

    def landing(self, block: SpreadBlock) -> list[int]:
        """The ranks on other hosts that take the block from the network."""
        return sorted({self.source(block, rank) for rank in block.destinations} - {block.reader})


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
class _Open:
    """A slot of ours whose block is not yet taken by all."""

    slot: int
    missing: set[int]
    on_network: bool


@dataclass
class SpreadWorker:
    """Everything of one rank for one load.

    Args:
        link: to the neighbours; None: there are none.
        transport: to other hosts; None: there are none.
        topology: told whenever something has moved; its `timeout_s` is how long to wait for others without a word from any.
    """

    rank: int
    spread: Spread
    hosts: Hosts
    slots: Slots
    endpoints: Endpoints
    link: HostLink | None
    transport: Transport | None
    topology: Topology
    times: Times = field(default_factory=Times)
    _failure: BaseException | None = None

    def run(self) -> None:
        """Carry everything. All ranks of the group call it.

        Raises:
            RankLeftError: another rank has gone, or does nothing.
            Exception: the first that this rank's reading or placing met; it is raised even if another rank has gone since.
        """
        self._prepare()
        begin = same_device()
        threads = [threading.Thread(target=self._read, args=(begin,), name="ckpt-read", daemon=True)]
        if self._on_network:
            threads.append(threading.Thread(target=self._carry, args=(begin,), name="ckpt-network", daemon=True))
        try:
            for thread in threads:
                thread.start()
            while self._to_take or self._to_free or not self._own_is_read:
                self._step()
        except BaseException as error:
            ours = self._failure
            self._give_up(error)
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

    def _give_up(self, error: BaseException) -> None:
        """Make the other threads end: nothing more is read, and no slot is waited for."""
        self._failure = self._failure or RankLeftError(str(error))
        for queue in (self._free_reading, self._free_landing, self._to_send):
            queue.put(None)

    def _prepare(self) -> None:
        """Work out this rank's part of what all know."""
        here = [block for block in self.spread.blocks if self._is_here(block)]
        self._mine = [block for block in here if block.reader == self.rank]
        landing = {block.number: self.hosts.landing(block) for block in self.spread.blocks}
        self._on_network = {  # number of a block that goes between hosts through this rank -> the ranks that it goes to
            block.number: landing[block.number]
            for block in self.spread.blocks
            if landing[block.number] and self.rank in (block.reader, *landing[block.number])
        }
        self._to_take = sum(self.rank in block.destinations for block in here)
        self._to_free = sum(self.hosts.source(block, self.rank) == self.rank for block in here)
        self._from: Counter[int] = Counter()  # how many blocks we still want of a neighbour
        self._owing: Counter[int] = Counter()  # how many of ours it has yet to take
        for block in here:
            source = self.hosts.source(block, self.rank)
            if source == self.rank:
                self._owing.update(self._takers(block))
            elif self.rank in block.destinations:
                self._from[source] += 1
        self._to_carry = len(self._on_network)
        self._partners = {
            rank for number, to in self._on_network.items() for rank in (self.spread.blocks[number].reader, *to)
        } - {self.rank}
        self._own_is_read = False
        self._open: dict[int, _Open] = {}
        self._news: SimpleQueue[tuple[Any, ...]] = SimpleQueue()
        self._free_reading: SimpleQueue[int | None] = SimpleQueue()
        self._free_landing: SimpleQueue[int | None] = SimpleQueue()
        self._to_send: SimpleQueue[int | None] = SimpleQueue()
        for slot in range(self.slots.reading):
            self._free_reading.put(slot)
        for slot in range(self.slots.reading, self.slots.reading + self.slots.landing):
            self._free_landing.put(slot)
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        # Where it is full the calling thread will wake anyway, and nobody waits for one that has ended.
        self._wake.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        for neighbour, made in self.link.sockets.items() if self.link else ():
            made.settimeout(self.topology.timeout_s)
            self._selector.register(made, selectors.EVENT_READ, neighbour)
        self._heard = time.monotonic()

    def _is_here(self, block: SpreadBlock) -> bool:
        """Is it read on this host, or wanted here?"""
        neighbours = self.hosts.neighbours(self.rank)
        return block.reader in neighbours or any(rank in neighbours for rank in block.destinations)

    def _takers(self, block: SpreadBlock) -> set[int]:
        """The neighbours that take a block of ours."""
        return set(block.destinations) & set(self.hosts.neighbours(self.rank)) - {self.rank}

    # The calling thread

    def _step(self) -> None:
        started = time.perf_counter()
        events = self._selector.select(0.2)
        self.times.wait += time.perf_counter() - started
        if not events:
            self._have_patience()
        for key, _ in events:
            self._heard = time.monotonic()
            if key.data is None:
                self._woken.recv(4096)
            else:
                self._listen_to(key.data)
        while not self._news.empty():
            what, *about = self._news.get()
            what(*about)
        if events:
            self.topology.progress()

    def _have_patience(self) -> None:
        """While others have bytes of ours, or we want theirs, silence is theirs; else it is our own storage that is slow."""
        neighbours = sorted(+self._from | +self._owing)
        if not (neighbours or self._to_carry):
            self._heard = time.monotonic()
            return
        self.topology.progress()
        # Neighbours that go close their sockets; of the others the agreement knows.
        gone = self.topology.has_raised(self._partners) if self._to_carry else None
        if gone is not None:
            raise _left(gone)
        if time.monotonic() - self._heard > self.topology.timeout_s:
            whom = (
                f"rank{'s' * (len(neighbours) > 1)} {', '.join(map(str, neighbours))}" if neighbours else "other hosts"
            )
            raise RankLeftError(f"nothing came from {whom} for {self.topology.timeout_s:.0f} s")

    def _listen_to(self, neighbour: int) -> None:
        assert self.link is not None
        said = self.link.receive(neighbour)
        if said is None:
            if self._from[neighbour] or self._owing[neighbour]:
                raise _left(neighbour)
            self._selector.unregister(self.link.sockets[neighbour])
            return
        kind, number, slot = said
        if kind == READY:
            self._from[neighbour] -= 1
            self._take(self.spread.blocks[number], self.slots.cut(self.link.memory[neighbour], slot))
            self._say(neighbour, DONE, number, slot)
        else:
            self._owing[neighbour] -= 1
            self._open[number].missing.discard(neighbour)
            self._free_if_taken(number)

    def _say(self, neighbour: int, kind: int, number: int, slot: int) -> None:
        assert self.link is not None
        try:
            self.link.send(neighbour, kind, number, slot)
        except OSError as error:
            raise _left(neighbour) from error

    def _is_there(self, block: SpreadBlock, slot: int) -> None:
        """A block is in a slot of ours: tell the neighbours that want it, and take what we want of it."""
        takers = self._takers(block)
        to_send = block.reader == self.rank and block.number in self._on_network
        if block.reader != self.rank:
            self._to_carry -= 1  # it has landed
        self._open[block.number] = _Open(slot, set(takers), to_send)
        for neighbour in takers:
            self._say(neighbour, READY, block.number, slot)
        if self.rank in block.destinations:
            self._take(block, self.slots.memory(slot))
        self._free_if_taken(block.number)

    def _take(self, block: SpreadBlock, memory: torch.Tensor) -> None:
        started = time.perf_counter()
        if self._failure is None:
            try:
                for at, piece in block.places():
                    self.endpoints.place(piece, memory[at : at + piece.num_bytes])
            except Exception as error:
                self._failure = error
        self._to_take -= 1
        self.times.place += time.perf_counter() - started

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
        (self._free_reading if opened.slot < self.slots.reading else self._free_landing).put(opened.slot)

    def _finish_own(self) -> None:
        self._own_is_read = True

    def _raise(self, error: BaseException) -> None:
        raise RankLeftError(f"the network between the hosts failed: {sentence(error)}") from error

    # The other two threads, which only ever tell the calling one

    def _tell(self, *news: Any) -> None:
        self._news.put(news)
        with suppress(OSError):  # it is full, or the calling thread has given up and closed its end
            self._wake.send(b".")

    def _read(self, begin: Callable[[], None]) -> None:
        """The reader thread: what others want too comes first."""
        begin()
        for block in self._mine:
            slot = self._free_reading.get()
            if slot is None:
                return
            self._attempt(partial(self._fetch, block, slot))
            self._tell(self._is_there, block, slot)
            if block.number in self._on_network:
                self._to_send.put(slot)
        for _, pieces in groupby(self.spread.own.get(self.rank, ()), key=lambda piece: piece.key):
            self._attempt(partial(self.endpoints.read_own, list(pieces)))
        self._tell(self._finish_own)

    def _fetch(self, block: SpreadBlock, slot: int) -> None:
        memory = self.slots.read_into(slot)
        for at, piece in block.places():
            self.endpoints.fetch(piece, memory[at : at + piece.num_bytes])
        self.slots.is_read(slot, block.room)

    def _attempt(self, work: Callable[[], None]) -> None:
        started = time.perf_counter()
        if self._failure is None:
            try:
                work()
            except BaseException as error:  # whatever it is: the calling thread raises it, which waits for this one
                self._failure = error
        self.times.storage += time.perf_counter() - started

    def _carry(self, begin: Callable[[], None]) -> None:
        """The network thread. Two blocks are on their way at a time: one is sent while the next is being met."""
        coming: deque[tuple[SpreadBlock, int, Callable[[], None]]] = deque()
        try:
            begin()
            for number, to in self._on_network.items():
                if len(coming) == IN_FLIGHT:
                    self._finish(*coming.popleft())
                block = self.spread.blocks[number]
                slots = self._to_send if block.reader == self.rank else self._free_landing
                while coming and slots.empty():  # which what is on its way may keep, or hold up
                    self._finish(*coming.popleft())
                slot = slots.get()
                if slot is None:
                    return
                coming.append((block, slot, self._begin(block, slot, to)))
            while coming:
                self._finish(*coming.popleft())
        except BaseException as error:  # as above
            self._tell(self._raise, error)

    def _begin(self, block: SpreadBlock, slot: int, to: Sequence[int]) -> Callable[[], None]:
        """Put a block on its way; return what waits for the end of that."""
        assert self.transport is not None
        started = time.perf_counter()
        memory = self.slots.memory(slot)[: block.room]
        wait = self.slots.carry(partial(self.transport.begin, memory, block.reader, to))
        self.times.network += time.perf_counter() - started
        return wait

    def _finish(self, block: SpreadBlock, slot: int, wait: Callable[[], None]) -> None:
        """Wait until a block has gone, or has come."""
        started = time.perf_counter()
        wait()
        self.times.network += time.perf_counter() - started
        if block.reader == self.rank:
            self._tell(self._is_sent, block.number)
        else:
            self._tell(self._is_there, block, slot)


def _left(rank: int) -> RankLeftError:
    return RankLeftError(f"rank {rank} left before it had given and taken all", rank=rank)
