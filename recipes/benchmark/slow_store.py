"""A slow store that all ranks share: a stand-in for a network file system, whose bandwidth limits a load."""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_NEXT_FREE = struct.Struct("d")


class TokenBucket:
    """A limit of bytes per second, for all threads and processes that share a file.

    A taker waits until the bytes of all before it, and its own, have passed at the given rate. Idle time is not saved up. The file holds
    the moment from which the store is free, by the clock that all processes of one host share; so it serves one host.

    Args:
        path: a file of zeros, or none yet.
    """

    def __init__(self, path: Path, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._threads = threading.Lock()  # a lock on a file holds between processes, not between threads
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        os.ftruncate(self._file, _NEXT_FREE.size)

    def take(self, num_bytes: int) -> None:
        """Return when these bytes have passed."""
        with self._threads:
            fcntl.lockf(self._file, fcntl.LOCK_EX)
            try:
                now = time.monotonic()
                (free,) = _NEXT_FREE.unpack(os.pread(self._file, _NEXT_FREE.size, 0))
                free = max(now, free) + num_bytes / self._bytes_per_s
                os.pwrite(self._file, _NEXT_FREE.pack(free), 0)
            finally:
                fcntl.lockf(self._file, fcntl.LOCK_UN)
        if free > now:
            time.sleep(free - now)

    def close(self) -> None:
        os.close(self._file)


def slow_reads(bucket: TokenBucket) -> Callable[[int, Sequence[memoryview], int], int]:
    """Return a `read_at` for a loading strategy whose bytes pass through the bucket."""

    def read_at(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        num_bytes = os.preadv(descriptor, buffers, offset)
        bucket.take(num_bytes)
        return num_bytes

    return read_at
