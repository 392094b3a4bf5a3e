"""The memory that blocks travel in: slots of a rank, and the link by which the ranks of a host see each other's.

Slots are on the host, or, where the device's own collectives carry blocks, on the device. A `HostLink` is a socket between any two ranks
of a host, and of each a segment of memory that all the others see. Bytes that one of them puts into its segment need no other way to the
rest; the sockets carry but a few words about them. The kernel holds the segment while a process has it mapped (memfd), so nothing is left
behind, however a rank ends.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from ckpt.errors import ConfigurationError, RankLeftError
from ckpt.loading.two_stage.spread_blocks import PIECE_ALIGNMENT
from ckpt.memory.budget import more_memory
from ckpt.memory.device import SideStream, StreamEvent, device_memory_within, pinned
from ckpt.memory.host import mapped
from ckpt.ranks.addresses import peer_of
from ckpt.ranks.topology import Topology
from ckpt.ranks.waiting import poll_until, unless_timeout
from ckpt.storage.host_memory import shared

SLOT_BYTES = 4 << 20
"""Usual size of a slot: large enough to cost few messages, small enough to stay in the processor's cache."""

MAX_SLOTS = 64
"""More slots do not make a load faster. All messages about them that two ranks may not have read yet (277) fit a socket's buffer."""

_log = logging.getLogger("ckpt")


@dataclass(frozen=True, slots=True)
class Slots:
    """Memory of this rank for blocks: the first `reading` slots take blocks it reads, the others blocks received from other hosts.

    Attributes:
        host: flat bytes of all slots, in memory that the neighbours see, if they share memory; where blocks travel in device
            memory, of the reading slots alone, page-locked.
        on_device: where blocks travel; None: in `host`.
    """

    host: torch.Tensor
    slot_bytes: int
    reading: int
    receiving: int
    on_device: DeviceSlots | None = None

    def memory(self, slot: int) -> torch.Tensor:
        """The memory that a block travels in, as soon as the bytes that were read are there."""
        if self.on_device is None:
            return self.cut(self.host, slot)
        self.on_device.wait(slot)
        return self.cut(self.on_device.memory, slot)

    def read_into(self, slot: int) -> torch.Tensor:
        """The host memory that a block is read into."""
        return self.cut(self.host, slot)

    def is_read(self, slot: int, num_bytes: int) -> None:
        """Start the copy of what has been read to the memory that it travels in."""
        if self.on_device is not None:
            there = self.cut(self.on_device.memory, slot)[:num_bytes]
            self.on_device.bring(slot, self.read_into(slot)[:num_bytes], there)

    def carry(self, begin: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        """Begin to send or receive; return a function that waits for the end.

        Args:
            begin: starts the transfer, and returns such a function.
        """
        return begin() if self.on_device is None else self.on_device.carry(begin)

    def close(self) -> None:
        """Wait for copies to the slots: then their memory may be let go of."""
        if self.on_device is not None:
            self.on_device.close()

    def cut(self, memory: torch.Tensor, slot: int) -> torch.Tensor:
        """The bytes of one slot of the memory of all slots, of this rank or a neighbour."""
        return memory[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]


class DeviceSlots:
    """The slots in device memory, with a stream for the reader thread and one for the network thread.

    Args:
        memory: of all slots, flat bytes.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self._reading, self._network = SideStream(memory.device, "reading"), SideStream(memory.device, "network")
        self._there: dict[int, StreamEvent] = {}

    def bring(self, slot: int, host: torch.Tensor, there: torch.Tensor) -> None:
        """Queue the copy of a slot to the device."""
        with self._reading:
            there.copy_(host, non_blocking=True)
            self._there[slot] = self._reading.mark()

    def wait(self, slot: int) -> None:
        """Wait for the copy of a slot to the device, if there is one. Any thread."""
        if slot in self._there:
            self._there[slot].wait()

    def carry(self, begin: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        """See `Slots.carry`."""
        with self._network:
            wait = begin()

        def finish() -> None:
            with self._network:
                wait()  # makes the stream wait, and not us
                done = self._network.mark()
            done.wait()

        return finish

    def close(self) -> None:
        """Wait for copies to the slots."""
        self._reading.wait()


def make_slots(
    in_flight_bytes: int,
    unit: int,
    *,
    between_hosts: bool,
    shared: torch.Tensor | None = None,
    device: torch.device | None = None,
) -> Slots:
    """Cut the memory allowed into slots, half of them for blocks received from other hosts, if there are any.

    Args:
        unit: the most bytes that are read, and checked, as one.
        shared: host memory of `in_flight_bytes` that the neighbours see; None: new memory.
        device: blocks travel in its memory, in fewer slots if it has no room for all; None: in host memory.

    Raises:
        ConfigurationError: the memory allowed takes no unit of each kind.
        DeviceMemoryError: the device has no room for one slot of each kind.
    """
    kinds = 2 if between_hosts else 1
    slot_bytes = max(unit, min(SLOT_BYTES, in_flight_bytes // (2 * kinds)))
    slot_bytes = -(-slot_bytes // PIECE_ALIGNMENT) * PIECE_ALIGNMENT
    count = min(in_flight_bytes // slot_bytes, MAX_SLOTS)
    if count < kinds:
        blocks = f"{kinds} block{'s' * (kinds - 1)} of {slot_bytes / 2**20:.0f} MiB, each of which is checked as one"
        least = -(-slot_bytes * kinds >> 20)
        raise ConfigurationError(
            f"{in_flight_bytes / 2**20:.0f} MiB may be in flight, and this load needs {least}, for {blocks}; give a larger ",
            more_memory(),
        )
    on_device = None if device is None else DeviceSlots(_device_memory(slot_bytes, count, kinds, device))
    if on_device is not None:
        count = len(on_device.memory) // slot_bytes
    receiving = count // 2 if between_hosts else 0
    if on_device is not None:
        host = pinned((count - receiving) * slot_bytes)
    else:
        host = torch.empty(count * slot_bytes, dtype=torch.uint8, device="cpu") if shared is None else shared
    return Slots(host, slot_bytes, count - receiving, receiving, on_device)


def _device_memory(slot_bytes: int, count: int, least: int, device: torch.device) -> torch.Tensor:
    """Memory of a device for `count` slots, or for as many as it has room for, at least `least`."""
    wanted = count * slot_bytes
    memory = device_memory_within(least * slot_bytes, wanted, device, unit=slot_bytes)
    if len(memory) < wanted:
        _log.warning(
            "%s has no room for %.0f MiB in flight: loading with %.0f MiB, which takes longer",
            device,
            wanted / 2**20,
            len(memory) / 2**20,
        )
    return memory


READY, DONE = 1, 2
_WORDS = struct.Struct("<BII")
_LOOK_S = 0.2
_T = TypeVar("_T")
_HELLO = struct.Struct("<I")


class HostLink:
    """One rank's end. First `listen`, then, when all ranks have the addresses of all, `reach`, and when all could, `join`.

    Attributes:
        memory: rank -> its segment, flat bytes; this rank's own from the beginning.
        sockets: rank -> the socket between it and this one.
    """

    def __init__(self, rank: int, num_bytes: int) -> None:
        self.rank = rank
        self.memory: dict[int, torch.Tensor] = {}
        self.sockets: dict[int, socket.socket] = {}
        self.address = f"ckpt-{secrets.token_hex(16)}"
        self._fd = -1
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._fd = shared("ckpt-in-flight", num_bytes)
            self.memory[rank] = mapped(self._fd)
            # A name of the kernel's, not of a file system; it goes with the socket.
            self._listener.bind("\0" + self.address)
            self._listener.listen(4096)
        except BaseException:
            self.close()
            raise

    def reach(self, addresses: Sequence[tuple[int, str]]) -> bool:
        """Call the ranks below this one; return whether all of them are there.

        They are not where two hosts or containers go by one name.
        """
        try:
            for rank, address in addresses:
                if rank < self.rank:
                    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                    self.sockets[rank] = made
                    made.setblocking(False)  # nobody answers yet: where no more calls are kept, it would wait for ever
                    made.connect("\0" + address)
                    made.send(_HELLO.pack(self.rank))
        except OSError:
            return False
        return True

    def join(self, ranks: Sequence[int], topology: Topology) -> None:
        """Answer the ranks above this one, and map everybody's segment. All have called already.

        A user may have only so many descriptors on their way between processes, on all sockets together. So a rank has one: any
        two swap theirs before they turn to others, and all do so in one order of pairs, in which nobody waits in a circle.

        Raises:
            RankLeftError: one of them has gone, or does not answer.
        """
        others = [rank for rank in sorted(ranks) if rank != self.rank]
        try:
            for _ in range(sum(rank > self.rank for rank in others)):
                made = self._answered(others, topology)
                hello = _patiently(made, partial(made.recv, _HELLO.size), others, topology)
                self.sockets[_sender_in(hello)] = made
            for rank in others:
                self._swap_memory(rank, topology)
        except OSError as error:
            if isinstance(error, RankLeftError):  # which is a TimeoutError, and so an OSError
                raise
            raise RankLeftError(f"a rank of this host left before it had shared its memory: {error}") from error

    def _answered(self, others: Sequence[int], topology: Topology) -> socket.socket:
        """Answer the next call of this user. Other users can see the address, and call, too; they are turned away."""
        while True:
            made, _ = _patiently(self._listener, self._listener.accept, others, topology)
            if _is_of_this_user(made):
                return made
            made.close()

    def send(self, rank: int, kind: int, parcel: int, slot: int) -> None:
        """Say a few words. There is room for all that can be under way at a time.

        Raises:
            ConnectionError: the other rank has left.
        """
        self.sockets[rank].send(_WORDS.pack(kind, parcel, slot))

    def receive(self, rank: int) -> tuple[int, int, int] | None:
        """What another rank said; None: it has left."""
        try:
            data = self.sockets[rank].recv(_WORDS.size)
        except ConnectionError:
            return None
        return _WORDS.unpack(data) if data else None

    def _swap_memory(self, rank: int, topology: Topology) -> None:
        """Hand a neighbour this rank's segment, and map its; the rank above the other one begins."""
        made = self.sockets[rank]
        if rank < self.rank:
            socket.send_fds(made, [_HELLO.pack(self.rank)], [self._fd])
        hello, fds, _, _ = _patiently(made, partial(socket.recv_fds, made, _HELLO.size, 1), [rank], topology)
        try:
            if _sender_in(hello) != rank or len(fds) != 1:
                raise ConnectionError(f"rank {rank} hands over something else")
            self.memory[rank] = mapped(fds[0])
        finally:
            for fd in fds:
                os.close(fd)
        if rank > self.rank:
            socket.send_fds(made, [_HELLO.pack(self.rank)], [self._fd])

    def close(self) -> None:
        """Let go of everything."""
        for made in (*self.sockets.values(), self._listener):
            made.close()
        self.sockets.clear()
        self.memory.clear()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _patiently(waits: socket.socket, call: Callable[[], _T], ranks: Sequence[int], topology: Topology) -> _T:
    """Wait in a call on a socket for one of these ranks, as long as none of them has failed, at most `topology.timeout_s`.

    Raises:
        RankLeftError: one has failed, or nothing came.
    """
    waits.settimeout(_LOOK_S)

    def ask() -> _T | None:
        topology.progress()
        return unless_timeout(call)

    def look() -> None:
        if (gone := topology.has_raised(ranks)) is not None:
            raise RankLeftError(f"rank {gone} left before it had shared its memory", rank=gone)

    failure = partial(TimeoutError, "timed out")
    return poll_until(ask, look=look, nap=None, timeout_s=topology.timeout_s, failure=failure)


def _sender_in(hello: bytes) -> int:
    if len(hello) != _HELLO.size:
        raise ConnectionError("it closed the connection")
    (sender,) = _HELLO.unpack(hello)
    return int(sender)


def _is_of_this_user(made: socket.socket) -> bool:
    return peer_of(made)[1] == os.geteuid()
