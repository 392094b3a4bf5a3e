"""The blocks of files whose digests some rank of this host has checked during a load: the other ranks only copy these.

    rank 0   reads and hashes block 7, finds its digest, marks it
    rank 1   reads block 7 from the page cache, finds the mark, hashes nothing

A mark stands for a place in a file, in the state that the file was in both before and after the block was read, and for the digest that
was found there. It is used by a reader before and after whose read the file was in that state, too, and for whom the page cache has the
bytes: a file system without one may give each reader other bytes. A file in memory of a rank (pool.py) is longer as soon as the next save
begins to overwrite it.

The table of marks is shared memory of one load. It takes any number of blocks: a mark may replace another one, whose block is then hashed
once more.
"""

from __future__ import annotations

import os
import secrets
import struct
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from mmap import mmap

from ckpt.format.digests import block_digest_of
from ckpt.format.records import ChunkExtent
from ckpt.storage.held import MemoryFile
from ckpt.storage.host_memory import can_be_shared, mapped, mapped_at, shared

_NUM_MARKS = 1 << 17
_MARK_BYTES = 8
_FACTS = struct.Struct("<7Q")
_NO_SIGN = (1 << 64) - 1
"""Files may be older than 1970."""


class CheckedBlocks:
    """One rank's view of the table. Used by one thread; other ranks mark at the same time.

    Attributes:
        place: for the other ranks of the host, to `join`.
    """

    def __init__(self, memory: mmap, place: MemoryFile) -> None:
        self.place = place
        self._marks = memoryview(memory).cast("Q")

    @classmethod
    def make(cls) -> CheckedBlocks | None:
        """Make a table; None: this system shares no memory, or has none left."""
        name = f"ckpt-checked-{secrets.token_hex(8)}"
        with suppress(OSError):
            if can_be_shared():
                fd = shared(name, _NUM_MARKS * _MARK_BYTES)
                try:
                    inode = os.fstat(fd).st_ino
                    place = MemoryFile(os.getpid(), fd, inode, _NUM_MARKS * _MARK_BYTES, name)
                    made = cls(mapped(fd, place.size), place)
                except BaseException:
                    os.close(fd)
                    raise
                weakref.finalize(made, os.close, fd).atexit = False  # others join by it as long as this object is there
                return made
        return None

    @classmethod
    def join(cls, place: MemoryFile) -> CheckedBlocks | None:
        """Map the table that another rank has made; None: it is not on this host, or belongs to another user."""
        memory = mapped_at(place)
        return None if memory is None or len(memory) != _NUM_MARKS * _MARK_BYTES else cls(memory, place)

    def of(self, fd: int, chunk: ChunkExtent, numbers: range) -> Sequence[int]:
        """Return the marks of blocks of a chunk, by number, in the file that is open, as it is now."""
        return list(_marks_of(os.fstat(fd), chunk, numbers))

    def has(self, marks: Sequence[int]) -> bool:
        """Whether all of these blocks are marked."""
        return all(self._marks[mark % _NUM_MARKS] == mark for mark in marks)

    def add(self, marks: Sequence[int]) -> None:
        """Mark blocks, whose digests were found to be right."""
        for mark in marks:
            self._marks[mark % _NUM_MARKS] = mark


def _marks_of(file: os.stat_result, chunk: ChunkExtent, numbers: range) -> Iterator[int]:
    for number in numbers:
        at = chunk.offset + number * chunk.block_bytes
        times = file.st_mtime_ns & _NO_SIGN, file.st_ctime_ns & _NO_SIGN  # programs can set the first back, not the second
        facts = file.st_dev, file.st_ino, *times, file.st_size, at, chunk.digests[number]
        yield block_digest_of(_FACTS.pack(*facts)) or 1  # an empty place holds 0
