"""The memory that blocks travel in: on the host, or, where the device's own collectives carry them, on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ckpt.memory.device import SideStream, StreamEvent


@dataclass(frozen=True, slots=True)
class Slots:
    """The memory of this rank that blocks travel in: the first `reading` slots for what it reads, the others for what lands.

    Attributes:
        host: of all slots, flat bytes, seen by the neighbours, if they share memory; of the reading ones alone, page-locked, where
            blocks travel in device memory.
        on_device: in which blocks travel; None: in `host`.
    """

    host: torch.Tensor
    slot_bytes: int
    reading: int
    landing: int
    on_device: DeviceSlots | None = None

    def memory(self, slot: int) -> torch.Tensor:
        """What a block travels in, as soon as what was read is there."""
        if self.on_device is None:
            return self.cut(self.host, slot)
        self.on_device.wait(slot)
        return self.cut(self.on_device.memory, slot)

    def read_into(self, slot: int) -> torch.Tensor:
        """What a block is read into, on the host."""
        return self.cut(self.host, slot)

    def is_read(self, slot: int, num_bytes: int) -> None:
        """Put what has been read on its way to where it travels."""
        if self.on_device is not None:
            there = self.cut(self.on_device.memory, slot)[:num_bytes]
            self.on_device.bring(slot, self.read_into(slot)[:num_bytes], there)

    def carry(self, begin: Callable[[], Callable[[], None]]) -> Callable[[], None]:
        """Begin to send or receive; return what waits until the bytes have gone, or have come.

        Args:
            begin: does so, and returns what waits for it.
        """
        return begin() if self.on_device is None else self.on_device.carry(begin)

    def close(self) -> None:
        """The memory may be let go of when this returns."""
        if self.on_device is not None:
            self.on_device.close()

    def cut(self, memory: torch.Tensor, slot: int) -> torch.Tensor:
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
        """Wait until what was read into a slot, if anything was, is on the device. Any thread."""
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
        """Wait until nothing is copied to the memory any more, which may then be let go of."""
        self._reading.wait()
