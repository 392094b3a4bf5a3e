"""Append to files: through the page cache, or past it (O_DIRECT) from aligned memory by writer threads.

The page cache costs a copy by the kernel, page by page, on cores that training needs, and evicts cached files. With direct I/O each
piece is copied to an aligned buffer, while it is still in the processor's cache from being digested, and a thread writes it while
the next piece is copied. The buffers are few, bound the memory of a save, and serve the next save again. Where the files of a save
are kept in memory (pool.py), that memory takes the place of the buffers.
"""

from __future__ import annotations

import errno
import logging
import os
import queue
import resource
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ckpt.errors import CheckpointError
from ckpt.ranks.waiting import start
from ckpt.storage.checkpoint_files import CheckpointFolder
from ckpt.storage.files import empty, naming, remove, reserve, start_writeback, write_all
from ckpt.storage.host_memory import MemoryUse, private
from ckpt.storage.pool import PoolFile

ALIGNED = 4096
"""Direct I/O needs memory, offsets and lengths in multiples of the disk's block, which is at most this."""

RESERVED_BYTES = 64 << 20
"""Most disk space reserved at a time for a file of unknown size."""

FREE_PER_RESERVED = 256
"""Free disk space, as a multiple of what is reserved ahead of the bytes: other ranks and programs need space meanwhile."""

NUM_BUFFERS = 4
"""Half of the buffers are filled while the others are written."""

NUM_THREADS = 2
"""Threads that write: one leaves the disk idle between two pieces, more than two are not faster (measured)."""

_LEAST_BYTES = 1 << 20
"""Of the buffers of a writer, and of a segment."""

_SEGMENTS = 6
"""Of a writer into an object store: four that are put, one that is filled, and objects too short for a segment, as long together as one."""

O_DIRECT: int = getattr(os, "O_DIRECT", 0)
NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL

_log = logging.getLogger("ckpt")


class Buffers:
    """Aligned buffers for direct writes, kept from save to save: memory touched for the first time is slow.

    Args:
        direct_io: False: no file is written directly.

    Attributes:
        num_bytes: of all buffers of one writer together.
        segment_bytes: in an object store, length of an object that holds several values, and of each buffer for one.
    """

    num_bytes = 32 << 20
    segment_bytes = 64 << 20

    def __init__(self, *, direct_io: bool) -> None:
        self._idle_segments: list[memoryview] = []
        self._idle: list[list[memoryview]] = []
        self._told_of_links = False
        self.direct_io = direct_io and O_DIRECT != 0

    def memory_range(self, use: MemoryUse) -> tuple[int, int]:
        """See `ckpt.memory.budget.Limited`. A value that is longer than a segment is put from memory of its own, one at a time."""
        if use.in_store:
            return _SEGMENTS * _LEAST_BYTES + use.chunk_bytes, _SEGMENTS * self.segment_bytes + use.chunk_bytes
        return _LEAST_BYTES, self.num_bytes

    def limit_memory(self, num_bytes: int, use: MemoryUse) -> None:
        """See `ckpt.memory.budget.Limited`."""
        if use.in_store:
            self.segment_bytes = min(self.segment_bytes, (num_bytes - use.chunk_bytes) // _SEGMENTS)
        else:
            self.num_bytes = min(self.num_bytes, num_bytes)

    def take(self) -> list[memoryview]:
        """Return the buffers of one writer; pass them to `give_back` later. Any thread."""
        each = self.num_bytes // NUM_BUFFERS
        with suppress(IndexError):
            if len((idle := self._idle.pop())[0]) == each:  # else they were made before a limit
                return idle
        view = memoryview(private(each * NUM_BUFFERS))
        return [view[at : at + each] for at in range(0, len(view), each)]

    def give_back(self, buffers: list[memoryview]) -> None:
        self._idle.append(buffers)

    def take_segment(self) -> memoryview:
        """Return memory for an object; pass it to `give_back_segment` later. Any thread."""
        with suppress(IndexError):
            if len(idle := self._idle_segments.pop()) == self.segment_bytes:
                return idle
        return memoryview(private(self.segment_bytes))

    def give_back_segment(self, segment: memoryview) -> None:
        self._idle_segments.append(segment)

    def refuse(self, path: Path, error: OSError, *, tell: bool) -> None:
        """Use the page cache from now on; log a warning once."""
        if self.direct_io:
            self.direct_io = False
            _log.log(
                logging.WARNING if tell else logging.DEBUG,
                "%s: this file system takes no direct writes (%s); saving through the page cache, which takes more of the "
                "processor. A backend with direct_io=False does so from the start.",
                path,
                error.strerror,
            )

    def tell_of_links(self, path: Path, why: str, *, tell: bool) -> None:
        """Log once that unchanged files are written because they cannot be linked."""
        _log.log(
            logging.WARNING if tell and not self._told_of_links else logging.DEBUG,
            "%s cannot be linked to (%s): unchanged data is written again, and takes disk space again",
            path,
            why,
        )
        self._told_of_links = True


class NewFile(NamedTuple):
    """A file to be created below a checkpoint's folder.

    Attributes:
        name: path below the folder.
        path: absolute path.
    """

    folder: CheckpointFolder
    name: str
    path: Path

    def open(self, flags: int) -> int:
        return self.folder.open(self.name, flags)

    def remove(self) -> None:
        """Remove the file that a failed `open` has left."""
        with self.folder.parent(self.name) as (above, last):
            remove(Path(last), empty, dir_fd=above)


class Paged:
    """A file written through the page cache. Writeback of large pieces starts at once.

    Args:
        memory: keeps the bytes as well; None: nothing does.
    """

    def __init__(self, file: NewFile, progress: Callable[[int], None], memory: PoolFile | None) -> None:
        self._path = file.path
        self._progress = progress
        self._memory = memory
        self._size = 0
        self._fd = file.open(NEW)

    def append(self, piece: memoryview) -> None:
        with naming(self._path):
            write_all(self._fd, piece)
            start_writeback(self._fd, self._size, len(piece))
            if self._memory is not None:
                self._memory.append(piece)
        self._size += len(piece)
        self._progress(len(piece))

    def close(self) -> None:
        os.close(self._fd)


class Direct:
    """A file written with O_DIRECT: `append` fills aligned buffers, writer threads write them."""

    def __init__(self, threads: WriterThreads, file: OpenFile) -> None:
        self._threads = threads
        self._file = file
        self._buffer: memoryview | None = None
        self._fill = 0
        self._at = 0
        self._rest = b""

    def append(self, piece: memoryview) -> None:
        while piece:
            if self._buffer is None:
                self._take_buffer()
                assert self._buffer is not None
            count = min(len(piece), len(self._buffer) - self._fill)
            self._buffer[self._fill : self._fill + count] = piece[:count]
            self._fill += count
            piece = piece[count:]
            if self._fill == len(self._buffer):
                self._hand_over()

    def give_way(self) -> None:
        """Give the buffer to another file: queue its whole blocks, and keep the rest for the next buffer."""
        assert self._buffer is not None
        end = self._fill // ALIGNED * ALIGNED
        self._rest = bytes(self._buffer[end : self._fill])
        self._fill = end
        self._hand_over()

    def close(self) -> None:
        if self._rest and self._threads.is_well:  # after a failure no buffer can be had, and the bytes are dropped
            self._take_buffer()
        self._hand_over()
        self._file.end_at(self._at)

    def _take_buffer(self) -> None:
        self._buffer = self._threads.buffer_for(self)
        self._fill = len(self._rest)
        self._buffer[: self._fill] = self._rest
        self._rest = b""

    def _hand_over(self) -> None:
        if self._buffer is not None:
            self._file.reserve(self._at + self._fill)
            self._threads.put(self._file, self._buffer[: self._fill], self._at, free=self._buffer)
            self._threads.filling.pop(self)
            self._at, self._fill, self._buffer = self._at + self._fill, 0, None


class Kept:
    """A file written with O_DIRECT from memory that keeps it: `append` copies there, writer threads write from there."""

    def __init__(self, threads: WriterThreads, file: OpenFile, memory: PoolFile) -> None:
        self._threads = threads
        self._file = file
        self._memory = memory
        self._at = 0

    def append(self, piece: memoryview) -> None:
        self._threads.require_well()
        with naming(self._file.path):
            self._memory.append(piece)
        while self._memory.size - self._at >= self._threads.step:
            self._hand_over(self._at + self._threads.step)

    def close(self) -> None:
        if self._memory.size > self._at:
            self._hand_over(self._memory.size)
        self._file.end_at(self._at)

    def _hand_over(self, end: int) -> None:
        self._file.reserve(end)
        self._threads.put(self._file, self._memory.view(self._at, end), self._at)
        self._at = end


class OpenFile:
    """An open descriptor with a count of its users; the last one to release it closes it.

    Args:
        num_bytes: final size; None: unknown, and large.
    """

    def __init__(self, file: NewFile, fd: int, num_bytes: int | None) -> None:
        self.file = file
        self.path = file.path
        self.fd = fd
        self._num_bytes = num_bytes or 0
        self._is_refused = False
        self._reserved = 0
        self._size: int | None = None
        self._lock = threading.Lock()
        self._holders = 1

    def reserve(self, end: int) -> None:
        """Reserve disk space up to a byte, before it is handed to a thread: the whole of a file of known size, else as much again."""
        if end <= self._reserved or self._is_refused:
            return
        upto = max(end, self._num_bytes)
        if not self._num_bytes:
            room = os.fstatvfs(self.fd)
            upto += min(self._reserved, RESERVED_BYTES, room.f_bavail * room.f_frsize // FREE_PER_RESERVED)
        self._is_refused = not reserve(self.fd, self._reserved, upto - self._reserved)
        self._reserved = upto  # also when refused: the file is cut to its size at the end

    def end_at(self, size: int) -> None:
        """End the file at `size`, drop reserved space behind it, and release the opener's hold."""
        self._size = size if self._reserved > size else None
        self.release()

    def hold(self) -> None:
        with self._lock:
            self._holders += 1

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            is_last = self._holders == 0
        if is_last:
            try:
                if self._size is not None:
                    with naming(self.path):
                        os.ftruncate(self.fd, self._size)
            finally:
                os.close(self.fd)


class WriterThreads:
    """A few threads that write aligned buffers, or aligned memory that is kept, with O_DIRECT.

    States. `_error` is set once, by any thread, and stays:

        well --a write fails, or give_up--> failed
          |                                   |
          +----------stop---------------------+-----> stopped

    `failed`: queued writes are dropped, their buffers become free, `require_well` and `finish` raise. `stopped`: all queued writes are
    done, the threads have ended, and the buffers are given back.

    States of a buffer. At most half of the buffers are being filled, so that one becomes free however many files are open:

        free --buffer_for--> filled by one file, in `filling` --put--> queued, or being written --> free

    Attributes:
        step: bytes per write.
        filling: files that hold a buffer, in the order in which they took it.
    """

    def __init__(self, buffers: Buffers, tells: bool, progress: Callable[[int], None]) -> None:
        self._buffers = buffers
        self._tells = tells
        self._progress = progress
        self._taken = buffers.take()
        self.step = len(self._taken[0]) // ALIGNED * ALIGNED
        self._free: queue.SimpleQueue[memoryview] = queue.SimpleQueue()
        for buffer in self._taken:
            self._free.put(buffer)
        self._jobs: queue.SimpleQueue[tuple[OpenFile, memoryview, int, memoryview | None] | None] = queue.SimpleQueue()
        self.filling: dict[Direct, None] = {}
        self._error: BaseException | None = None
        self._threads = [
            threading.Thread(target=self._run, name=f"writer {number}", daemon=True) for number in range(NUM_THREADS)
        ]
        try:
            for thread in self._threads:
                start(thread)
        except CheckpointError:
            self._threads = [thread for thread in self._threads if thread.ident is not None]
            self.stop()
            raise

    def buffer_for(self, file: Direct) -> memoryview:
        """Return a free buffer, waiting for one. Takes the oldest file's buffer away if half of the buffers are being filled.

        Raises:
            OSError: a write has failed.
        """
        if len(self.filling) >= NUM_BUFFERS // 2:
            next(iter(self.filling)).give_way()
        buffer = self._free.get()
        if self._error is not None:
            self._free.put(buffer)
        self.require_well()
        self.filling[file] = None
        return buffer

    @property
    def is_well(self) -> bool:
        """False after a write has failed, or the save was given up."""
        return self._error is None

    def require_well(self) -> None:
        """Raise the error of the first failed write, if any.

        Raises:
            OSError: of that write.
        """
        if self._error is not None:
            raise self._error

    def put(self, file: OpenFile, data: memoryview, at: int, *, free: memoryview | None = None) -> None:
        """Queue bytes for an aligned offset. `free`: the buffer that they are in, which becomes free after the write."""
        file.hold()
        self._jobs.put((file, data, at, free))

    def finish(self) -> None:
        """Wait for all writes; raise the error of a failed one."""
        self.stop()
        self.require_well()

    def give_up(self) -> None:
        """Drop the writes that have not begun."""
        self._error = self._error or InterruptedError("the save was given up")

    def stop(self) -> None:
        """Wait for all queued writes, and end the threads. No call may follow."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
        if self._taken:
            self._buffers.give_back(self._taken)
            self._taken = []

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            file, data, at, free = job
            try:
                if self._error is None:
                    with naming(file.path):
                        self._write(file, data, at)
                    self._progress(len(data))
            except BaseException as error:  # raised by `finish` in the sink's thread
                self._error = self._error or error
            try:
                file.release()
            except OSError as error:
                self._error = self._error or error
            if free is not None:
                self._free.put(free)

    def _write(self, file: OpenFile, data: memoryview, at: int) -> None:
        """Write at an aligned offset: whole blocks with O_DIRECT; the rest, or all if that is refused, through the page cache."""
        whole = len(data) // ALIGNED * ALIGNED
        done = 0
        while done < whole and done % ALIGNED == 0:
            try:
                done += os.pwrite(file.fd, data[done:whole], at + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                if not _outgrows(at + len(data)):  # else RLIMIT_FSIZE, which the next write reports
                    self._buffers.refuse(file.path, error, tell=self._tells)
                break
        if done < len(data):
            fd = file.file.open(os.O_WRONLY)
            try:
                os.lseek(fd, at + done, os.SEEK_SET)
                write_all(fd, data[done:])
            finally:
                os.close(fd)


def _outgrows(size: int) -> bool:
    """Whether a file of this size is beyond the process's RLIMIT_FSIZE."""
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return most != resource.RLIM_INFINITY and size > most
