"""How large buckets are, and the memory that buckets, or parts of them, pass through between two hosts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial

import torch

from ckpt.engine.wire.delta import Runs, bytes_of
from ckpt.engine.wire.group import OwnGroup
from ckpt.engine.wire.layout import ALIGNED
from ckpt.errors import ConfigurationError
from ckpt.memory.device import Device, SideStream, device_memory
from ckpt.memory.host import HostMemory


class Buckets:
    """The size of buckets on one rank.

    Args:
        num_bytes: of a bucket, at most.
        device: whose memory the collectives move; None: the host's, by gloo.
        staging: copy the next bucket to or from the device while one is under way: two buckets of device memory, else one.
        memory_fraction: of the device's free memory that buckets may take; they become smaller where that is not enough.

    Raises:
        ConfigurationError: a value is out of range.
    """

    def __init__(self, num_bytes: int, *, device: Device | None, staging: bool, memory_fraction: float) -> None:
        if num_bytes < ALIGNED:
            raise ConfigurationError(f"a bucket of {num_bytes} bytes is too small: give at least {ALIGNED}")
        if not 0 < memory_fraction <= 1:
            raise ConfigurationError(f"memory_fraction={memory_fraction}: expected more than 0 and at most 1")
        self.device = device or Device(type="cpu", collectives="gloo")
        self.memory_fraction = memory_fraction
        self._num_bytes = num_bytes // ALIGNED * ALIGNED
        self._count = 2 if staging else 1

    def room(self) -> int:
        """Return the bytes that a bucket may have on this rank's device now, if all buffers fit."""
        if self.device.type == "cpu":
            return self._num_bytes
        room = int(self.device.memory().free * self.memory_fraction) // self._count // ALIGNED * ALIGNED
        return min(self._num_bytes, max(room, ALIGNED))

    def on_device(self, num_bytes: int) -> Buffers | None:
        """Return device memory for the buckets of one update; None: the collectives take host memory.

        Raises:
            DeviceMemoryError: the device has no room.
        """
        if self.device.collectives == "gloo":
            return None
        return Buffers(self.device.torch_device, num_bytes, self._count)


class Buffers:
    """Memory of the collectives that buckets, or parts of them, pass through. A buffer is used again when its bytes have left. One thread.

    Host buffers grow, and are kept from update to update: memory that is touched for the first time takes longer than its transfer. They
    are not kept after an update that failed, for something may still write to them.

    Args:
        num_bytes: of the largest bucket; on the host, to begin with.
        count: how many buckets may be under way.

    Raises:
        DeviceMemoryError: the device has no room.

    Attributes:
        are_on_host: the collectives take host memory, so whole buckets need no buffer.
    """

    def __init__(self, device: torch.device, num_bytes: int, count: int) -> None:
        self.are_on_host = device.type == "cpu"
        self._memory = [device_memory(num_bytes, device) for _ in range(count)]
        self._out, self._in = (
            _NoStream() if self.are_on_host else SideStream(device, role) for role in ("weights out", "weights in")
        )
        self._left: list[Callable[[], None]] = [_nothing] * count
        self._count = 0

    def broadcast(
        self, group: OwnGroup, owner: int, ours: torch.Tensor | None, there: torch.Tensor | None, runs: Runs
    ) -> Callable[[], None]:
        """Begin to move a bucket; return a function that waits until it has left, or is in host memory.

        Args:
            ours: the bucket to send, on the host; None: it is received.
            there: the place of the bucket on the host of a receiver.
            runs: the parts that travel.
        """
        number = self._count % len(self._memory)
        self._count += 1
        left = self._left[number]
        left()  # nothing is sent or copied from this buffer any more
        if len(self._memory[number]) < bytes_of(runs):
            self._memory[number] = HostMemory().empty((bytes_of(runs),), torch.uint8)
        buffer = self._memory[number][: bytes_of(runs)]
        side = self._out if ours is not None else self._in
        with side:
            if ours is not None:
                gather(buffer, ours, runs)
            wait = group.broadcast(buffer, owner)  # comes after what is queued on the side stream
        self._left[number] = cache(partial(_finish, side, wait, buffer, there if ours is None else None, runs))
        return self._left[number]

    def let_go(self) -> None:
        """Wait until all have left, and keep no reference to their places. Called at the end of an update."""
        for number, left in enumerate(self._left):
            left()
            self._left[number] = _nothing


def _nothing() -> None: ...


class _NoStream(nullcontext[None]):
    """In place of a side stream, for host memory: a copy is done when it returns."""

    def wait(self) -> None: ...


def _finish(
    side: SideStream | _NoStream, wait: Callable[[], None], buffer: torch.Tensor, there: torch.Tensor | None, runs: Runs
) -> None:
    with side:
        wait()  # some collectives make the stream wait, and not this thread
        if there is not None:
            scatter(there, buffer, runs)
    side.wait()


def gather(buffer: torch.Tensor, bucket: torch.Tensor, runs: Runs) -> None:
    """Copy parts of a bucket side by side; on a device, behind what is queued on the current stream."""
    at = 0
    for start, stop in runs:
        buffer[at : at + stop - start].copy_(bucket[start:stop], non_blocking=True)
        at += stop - start


def scatter(bucket: torch.Tensor, buffer: torch.Tensor, runs: Runs) -> None:
    """Copy parts that lie side by side to their places in a bucket; likewise."""
    at = 0
    for start, stop in runs:
        bucket[start:stop].copy_(buffer[at : at + stop - start], non_blocking=True)
        at += stop - start
