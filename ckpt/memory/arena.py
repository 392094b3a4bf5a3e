"""Host memory that snapshots are taken in, kept from save to save: memory that is touched for the first time is slow."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

_ALIGNED = 4096


class Arena:
    """Memory in which room is taken by one thread and given back by another, in any order.

    Args:
        make: makes so many bytes of memory, flat uint8.
    """

    def __init__(self, make: Callable[[int], torch.Tensor]) -> None:
        self._make = make
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._free: list[tuple[int, int]] = []
        self._changed = threading.Condition()

    @property
    def num_bytes(self) -> int:
        return len(self._memory)

    @property
    def memory(self) -> torch.Tensor:
        """All of it. It stays the same for as long as any room is taken."""
        return self._memory

    def grow(self, num_bytes: int, look: Callable[[], None]) -> None:
        """Make it at least so large, waiting until nothing is taken if it has to be made anew.

        Args:
            look: called now and then while waiting; may raise.
        """
        with self._changed:
            if num_bytes <= len(self._memory):
                return
            while self._free != ([(0, len(self._memory))] if len(self._memory) else []):
                self._wait(look)
            self._free, self._memory = [], torch.empty(0, dtype=torch.uint8)  # before the new memory is there
            self._memory = self._make(room_for(num_bytes))
            self._free = [(0, len(self._memory))]

    def let_go(self) -> None:
        """Drop all memory; nothing of it is taken any more. The next `grow` makes new."""
        with self._changed:
            self._free, self._memory = [], torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int, look: Callable[[], None]) -> torch.Tensor:
        """Return room for so many bytes, flat uint8, as soon as there is some. At most `num_bytes` of the arena can ever be had.

        Args:
            look: called now and then while waiting; may raise.
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
        """Let go of room; any thread."""
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

    def _wait(self, look: Callable[[], None]) -> None:
        look()
        self._changed.wait(0.2)


def room_for(num_bytes: int) -> int:
    """What so many bytes take in an arena."""
    return -(-num_bytes // _ALIGNED) * _ALIGNED
