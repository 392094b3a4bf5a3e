"""The memory that blocks travel in: on the host, or, where the device's own collectives carry them, on the device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ckpt.errors import ConfigurationError
from ckpt.loading.two_stage.spread_blocks import PIECE_ALIGNMENT
from ckpt.memory.budget import more_memory
from ckpt.memory.device import SideStream, StreamEvent, device_memory_within, pinned

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
