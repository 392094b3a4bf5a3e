"""Host memory for snapshots, kept from save to save: memory touched for the first time is slow."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from ckpt.storage.host_memory import populate

_ALIGNED = 4096
_AT_ONCE_BYTES = 32 << 20


class Arena:
    """An allocator over one block of memory. One thread grows it and takes ranges, another gives them back in any order.

    Args:
        make: allocates a number of bytes, flat uint8.
    """

    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        self._make = make
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._free: list[tuple[int, int]] = []
        self._changed = threading.Condition()

    @property
    def num_bytes(self) -> int:
        return len(self._memory)

    def grow(self, num_bytes: int, look: Callable[[], None]) -> None:
        """Make the block at least this large. Waits until no range is taken if it must be reallocated.

        Args:
            look: called every 0.2 s while waiting; may raise.
        """
        with self._changed:
            if num_bytes <= len(self._memory):
                return
            while self._free != ([(0, len(self._memory))] if len(self._memory) else []):
                self._wait(look)
            self._free, self._memory = [], torch.empty(0, dtype=torch.uint8, device="cpu")  # before the new memory is there
            self._allocate(num_bytes)

    def prepare(self, num_bytes: int, is_over: Callable[[], bool]) -> None:
        """Allocate the block, if there is none yet, and give it its pages, so that the first copies into it are as fast as later ones.

        Any thread, beside all others.

        Args:
            is_over: whether nobody wants it any more. Looked at before each few pages.
        """
        with self._changed:
            if not len(self._memory) and not is_over():
                self._allocate(num_bytes)
            memory = self._memory
        for start in range(0, len(memory), _AT_ONCE_BYTES):
            if memory is not self._memory or is_over():
                return  # another block has taken its place
            populate(memory.data_ptr() + start, min(_AT_ONCE_BYTES, len(memory) - start))

    def let_go(self) -> None:
        """Free the block, of which no range is taken. The next `grow` allocates a new one."""
        with self._changed:
            self._free, self._memory = [], torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, num_bytes: int, look: Callable[[], None]) -> torch.Tensor:
        """Return a range of this many bytes, flat uint8, waiting for one. More than the block's size is never available.

        Args:
            look: called every 0.2 s while waiting; may raise.
        """
        wanted = room_for(num_bytes)
        if wanted == 0:
            return self._memory[:0]
        with self._changed:
            while True:
                for at, (start, size) in enumerate(self._free):
                    if size >= wanted:
                        self._free[at : at + 1] = [(start + wanted, size - wanted)] if size > wanted else []
                        return self._memory[start : start + num_bytes]
                assert wanted <= len(self._memory), f"{wanted} bytes are more than the {len(self._memory)} there are"
                self._wait(look)

    def give_back(self, room: torch.Tensor) -> None:
        """Give a range back. Any thread."""
        if not len(room):
            return
        start = room.data_ptr() - self._memory.data_ptr()
        size = room_for(len(room))
        with self._changed:
            joined: list[tuple[int, int]] = []
            for begin, length in sorted([*self._free, (start, size)]):
                if joined and sum(joined[-1]) == begin:
                    joined[-1] = joined[-1][0], joined[-1][1] + length
                else:
                    joined.append((begin, length))
            self._free = joined
            self._changed.notify_all()

    def _allocate(self, num_bytes: int) -> None:
        self._memory = self._make(room_for(num_bytes))
        self._free = [(0, len(self._memory))]

    def _wait(self, look: Callable[[], None]) -> None:
        look()
        self._changed.wait(0.2)


def room_for(num_bytes: int) -> int:
    """Return the bytes that a range takes in an arena, rounded up to a page."""
    return -(-num_bytes // _ALIGNED) * _ALIGNED
