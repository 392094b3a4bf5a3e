"""Parts of a bucket, side by side in one message: picked out where they are sent, and put in place where they are received."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ckpt.engine.wire.delta import Runs, bytes_of
from ckpt.engine.wire.group import OwnGroup
from ckpt.memory.memory import HostMemory


class Messages:
    """Host memory that parts of buckets travel in, for so many on their way at a time, each used when what was in it is out. One thread.

    Kept from update to update: memory that is touched for the first time takes longer than what travels in it. Not beyond one that
    failed, for something may still write to it.
    """

    def __init__(self, in_flight: int) -> None:
        self._memory = [torch.empty(0, dtype=torch.uint8)] * in_flight
        self._count = 0

    def broadcast(
        self, group: OwnGroup, owner: int, ours: torch.Tensor | None, there: torch.Tensor | None, runs: Runs
    ) -> Callable[[], None]:
        """Begin to move parts of a bucket; see `DeviceBuffers.broadcast`."""
        number, num_bytes = self._count % len(self._memory), bytes_of(runs)
        self._count += 1
        if len(self._memory[number]) < num_bytes:
            self._memory[number] = HostMemory().empty((num_bytes,), torch.uint8)
        message = self._memory[number][:num_bytes]
        if ours is not None:
            gather(message, ours, runs)
        wait = group.broadcast(message, owner)

        def finish() -> None:
            wait()
            if ours is None and there is not None:
                scatter(there, message, runs)

        return finish


def copy_parts(there: torch.Tensor, here: torch.Tensor, runs: Runs) -> None:
    """Copy parts of a bucket to where they are in another one."""
    for start, stop in runs:
        there[start:stop].copy_(here[start:stop])


def gather(message: torch.Tensor, bucket: torch.Tensor, runs: Runs) -> None:
    """Put parts of a bucket side by side; on a device, behind what is queued on the current stream."""
    at = 0
    for start, stop in runs:
        message[at : at + stop - start].copy_(bucket[start:stop], non_blocking=True)
        at += stop - start


def scatter(bucket: torch.Tensor, message: torch.Tensor, runs: Runs) -> None:
    """Put what was side by side where it belongs; likewise."""
    at = 0
    for start, stop in runs:
        bucket[start:stop].copy_(message[at : at + stop - start], non_blocking=True)
        at += stop - start
