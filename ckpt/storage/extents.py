"""Read raw chunks from (file, offset, length) straight into tensors, and check digests while the bytes are in the cache.

One reader serves the raw chunks of every backend. It reads each block of a chunk once, however many parts need it: bytes that are
contiguous in the file and in the tensor are read there by `preadv`, all others through one small scratch buffer.

    parts -> spans (no large gap inside) -> slabs (whole blocks, 8 MiB) -> preadv -> digest -> strided copies

Bytes of a chunk that come another way, such as from another rank, are put in place by `WantedBytes`.

Of the ranks of one host, one checks the digest of a block, and the others only copy it (`CheckedBlocks`):

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
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from mmap import mmap
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from ckpt.errors import LOAD_EARLIER, CorruptCheckpointError
from ckpt.format.digests import BlockDigests, block_digest_of
from ckpt.format.places import Place
from ckpt.format.records import ALIGNMENT, ChunkExtent
from ckpt.storage.checkpoint_files import CheckpointFolder, files_below
from ckpt.storage.files import Closed, after
from ckpt.storage.host_memory import NOTHING_HELD, HeldFiles, MemoryFile, can_be_shared, mapped, mapped_at, shared
from ckpt.storage.objects.files import ObjectFiles
from ckpt.storage.wanted_bytes import (
    Span,
    TensorRun,
    WantedBox,
    WantedBytes,
    first_name,
    is_on_host,
    memory_of,
    scatter,
)

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


SLAB_BYTES = 8 << 20
"""Default bytes per read, and size of the scratch buffer (larger only where one block of a chunk is)."""

HOT_BYTES = 1 << 20
"""Bytes per read of `fetch`, at least a block: still in the processor's cache when they are digested."""

MAX_OPEN_FILES = 64

PROBED_BYTES = 2 << 20
"""The page cache is asked for one byte of so many. The kernel reads ahead, and drops, less at once."""

_CAN_READ_AHEAD = hasattr(os, "posix_fadvise") and hasattr(os, "RWF_NOWAIT")
_OBJECT = -1
"""In place of a descriptor: the file is an object, which is not opened."""

_Array = np.ndarray[Any, Any]


def _nothing(num_bytes: int) -> None:
    """Default `progress`."""


ReadAt = Callable[[int, Sequence[memoryview], int], int]
"""A function like `os.preadv`: fills buffers in turn from an offset of an open file; returns the number of bytes."""


PREADV: ReadAt = os.preadv
"""What reads files, unless a caller gives something else."""


class DeviceFilling(Protocol):
    """Copies bytes that were read to tensors on devices. See `ckpt.memory.copies.Filling`."""

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return host memory to read into."""

    def place(self, wanted: WantedBytes, start: int, stop: int, memory: torch.Tensor) -> None:
        """Copy the bytes [start, stop) of a chunk from `memory` to the parts that want them."""


class ExtentReader(Closed):
    """Reads raw chunks of one checkpoint, for one rank and one load. A context manager: it keeps files open.

    Args:
        root: the place of the checkpoint's files, to which extents are relative.
        verify: read whole blocks and compare their digests; if not, read little more than what is wanted.
        progress: called with a number of bytes as they arrive.
        read_at: reads an open file, as `os.preadv` does.
        slab_bytes: bytes per read; None: `SLAB_BYTES`.
        filling: copies bytes to tensors on devices; None: all tensors are on the host.
        held: files in memory, which are not read from the folder.
        checked: blocks that other ranks of this host have checked in the kernel's page cache or in files in memory, which are not hashed
            again where this one gets them from there; None: all are hashed here.
        in_order: files are read from their beginning to their end, so that the kernel may read further ahead than it does by default.

    Attributes:
        bytes_read: bytes read from the file system so far, without those from memory.
    """

    def __init__(
        self,
        root: Place,
        *,
        verify: bool = True,
        progress: Callable[[int], None] = _nothing,
        read_at: ReadAt = os.preadv,
        slab_bytes: int | None = None,
        filling: DeviceFilling | None = None,
        held: HeldFiles = NOTHING_HELD,
        checked: CheckedBlocks | None = None,
        in_order: bool = False,
    ) -> None:
        self._in_order = in_order
        self._held = held
        self._checked = checked if isinstance(root, Path) else None
        self._slab_bytes = slab_bytes or SLAB_BYTES
        self._filling = filling
        self.bytes_read = 0
        self._root = root
        self._folder = files_below(root)
        self._read_at = read_at
        self._read_object = self._folder.read_at if isinstance(self._folder, ObjectFiles) else None
        self._verify = verify
        self._progress = progress
        self._files: OrderedDict[str, int] = OrderedDict()
        self._scratch = np.empty(0, np.uint8)

    def close(self) -> None:
        """Close the files and free the scratch buffer."""
        while self._files:
            os.close(self._files.popitem()[1])
        self._folder.close()
        self._scratch = np.empty(0, np.uint8)

    def read(
        self, chunk: ChunkExtent, parts: Sequence[WantedBox], stretches: Sequence[tuple[int, int]] | None = None
    ) -> None:
        """Fill the `out` of every part. Parts may overlap, in the chunk but not in memory.

        Args:
            stretches: some of the ranges that `WantedBytes.stretches(unit_of(chunk))` returns: read only these; None: read all.

        Raises:
            CorruptCheckpointError: the file is missing or too short, a block does not match its digest, or a part lies outside of
                the chunk. Some parts may have been filled.
            OSError: another failure of the file system; it names the file.
        """
        assert chunk.raw, "an encoded chunk is read by its backend"
        self._or_disk(chunk, lambda: self._read(chunk, parts, stretches))

    def _read(
        self, chunk: ChunkExtent, parts: Sequence[WantedBox], stretches: Sequence[tuple[int, int]] | None
    ) -> None:
        wanted = WantedBytes(chunk, parts)
        if not wanted.spans:
            return
        if stretches is None:
            stretches = wanted.stretches(self.unit_of(chunk))
        if not all(is_on_host(span.part.out) for span in wanted.spans):
            self._read_for_devices(chunk, wanted, stretches)
            return
        _read_shared_bytes_once(wanted.spans)
        self._sweep(chunk, wanted.spans, stretches)

    def read_ahead(self, chunk: ChunkExtent, most_bytes: int) -> None:
        """Ask the kernel to read the first bytes of a chunk into its page cache, unless its file has been opened. Does not fail.

        It does not for a reader with a `read_at` of its own, nor for a file in memory, nor if the bytes seem to be there: to be asked
        for 8 MiB that are there takes the kernel 1 ms, to look at one byte 1 us.
        """
        num_bytes = min(chunk.length, most_bytes)
        if not self._is_read_through_cache(chunk) or chunk.file in self._files or num_bytes == 0:
            return
        with suppress(OSError, CorruptCheckpointError):  # which `read` finds, too
            fd = self._open(chunk.file, chunk.file)
            if not _is_cached(fd, chunk.offset + num_bytes - 1):
                os.posix_fadvise(fd, chunk.offset, num_bytes, os.POSIX_FADV_WILLNEED)

    def read_soon(self, ranges: Iterable[tuple[ChunkExtent, int, int]], num_requests: int) -> None:
        """Ask an object store for bytes [start, stop) of raw chunks, which will be read in this order. A folder's kernel reads ahead."""
        if isinstance(self._folder, ObjectFiles):
            at = ((run.file, run.offset + start, run.offset + stop) for run, start, stop in ranges)
            self._folder.read_soon(at, num_requests)

    def is_cached(self, chunk: ChunkExtent, stretches: Sequence[tuple[int, int]]) -> bool:
        """Whether the kernel seems to have some ranges of a raw chunk in its page cache: their last bytes, and one in each 2 MiB before.

        False for a reader with a `read_at` of its own, for a file in memory, and where the system cannot tell. Does not wait, and does
        not fail.
        """
        if not self._is_read_through_cache(chunk):
            return False
        with suppress(OSError, CorruptCheckpointError):  # which `read` finds, too
            fd = self._open(chunk.file, chunk.file)
            probes = (at for start, stop in stretches for at in (*range(start, stop, PROBED_BYTES), stop - 1))
            return all(_is_cached(fd, chunk.offset + at) for at in probes)
        return False

    def _is_read_through_cache(self, chunk: ChunkExtent) -> bool:
        """Whether reads of a chunk go through the kernel's page cache, and the kernel can be asked about it."""
        is_read_here = self._read_at is os.preadv and self._read_object is None
        return is_read_here and _CAN_READ_AHEAD and chunk.file not in self._held

    def unit_of(self, chunk: ChunkExtent) -> int:
        """Return the granularity of reads of a chunk, in bytes: a block under one digest, if digests are checked."""
        return chunk.block_bytes if self._verify else ALIGNMENT

    def fetch(self, chunk: ChunkExtent, start: int, memory: memoryview, name_of: Callable[[int, int], str]) -> None:
        """Read and check whole units of a chunk into intermediate memory.

        Args:
            start: the first byte, a multiple of the unit.
            memory: for the bytes, of their length.
            name_of: returns the name of the part that wants bytes [begin, end) of the chunk, for errors.

        Raises:
            CorruptCheckpointError, OSError: as for `read`.
        """
        assert chunk.raw and start % self.unit_of(chunk) == 0
        self._or_disk(chunk, lambda: self._fetch(chunk, start, memory, name_of))

    def _or_disk(self, chunk: ChunkExtent, read: Callable[[], None]) -> None:
        """Read; if the file's memory proves damaged, read once more from the disk."""

        def attempt() -> None:
            try:
                read()
            except BaseException:
                if chunk.file in self._files:
                    os.close(self._files.pop(chunk.file))
                raise

        self._held.or_disk(chunk.file, attempt)

    def _fetch(self, chunk: ChunkExtent, start: int, memory: memoryview, name_of: Callable[[int, int], str]) -> None:
        name = name_of(start, start + len(memory))
        fd = self._open(chunk.file, name)
        step = -(-HOT_BYTES // chunk.block_bytes) * chunk.block_bytes
        for at in range(0, len(memory), step):
            piece = memory[at : at + step]
            self._fill_checked(fd, chunk, start + at, [piece], name_of)
            self._progress(len(piece))

    def _read_for_devices(self, chunk: ChunkExtent, wanted: WantedBytes, stretches: Sequence[tuple[int, int]]) -> None:
        """Read for tensors on devices, through host memory: one slab is copied while the next one is read."""
        assert self._filling is not None, "a reader without a filling fills host tensors alone"
        for start, stop in _slabs(stretches, self.unit_of(chunk), self._slab_bytes):
            memory = self._filling.take(stop - start)
            self._fetch(chunk, start, memory_of(memory.numpy()), wanted.name_of)
            self._filling.place(wanted, start, stop, memory)

    def check(self, chunk: ChunkExtent, name: str) -> None:
        """Check the digests of a whole chunk: of an encoded one, before its backend decodes it.

        Without `verify` only check that the file is long enough, by reading its last byte.

        Raises:
            CorruptCheckpointError: as for `read`.
        """
        self._or_disk(chunk, lambda: self._check(chunk, name))

    def _check(self, chunk: ChunkExtent, name: str) -> None:
        fd = self._open(chunk.file, name)
        step = max(self._slab_bytes // chunk.block_bytes, 1) * chunk.block_bytes
        for start in range(0 if self._verify else max(chunk.length - 1, 0), chunk.length, step):
            stop = min(start + step, chunk.length)
            pieces = self._pieces(start, stop, ())
            self._fill_checked(fd, chunk, start, pieces, lambda begin, end: name)
            self._progress(stop - start)

    def _sweep(
        self, chunk: ChunkExtent, spans: Sequence[Span | TensorRun], stretches: Sequence[tuple[int, int]]
    ) -> None:
        """Read the slabs of some ranges, in ascending order, each for the spans that overlap it."""
        fd = self._open(chunk.file, spans[0].part.name)
        active: list[Span | TensorRun] = []
        coming = 0
        for start, stop in _slabs(stretches, self.unit_of(chunk), self._slab_bytes):
            while coming < len(spans) and spans[coming].start < stop:
                active.append(spans[coming])
                coming += 1
            active = [span for span in active if span.stop > start]
            pieces = self._pieces(start, stop, active)
            self._fill_checked(fd, chunk, start, pieces, partial(first_name, active or spans))
            for span in active:
                if isinstance(span, TensorRun):
                    span.place(start, stop, torch.from_numpy(self._scratch[: stop - start]))
                elif span.memory is None:
                    scatter(span, self._scratch, start, stop)
            self._progress(stop - start)

    def _pieces(self, start: int, stop: int, active: Sequence[Span | TensorRun]) -> list[memoryview]:
        """Return memory for the bytes [start, stop): the tensors' own where it is contiguous, scratch in between."""
        scratch = memory_of(self._scratch_of(stop - start))
        pieces = []
        at = start
        for span in active:
            if not isinstance(span.memory, memoryview):
                continue
            first, last = max(span.start, start), min(span.stop, stop)
            if at < first:
                pieces.append(scratch[at - start : first - start])
            pieces.append(span.memory[first - span.start : last - span.start])
            at = last
        if at < stop:
            pieces.append(scratch[at - start : stop - start])
        return pieces

    def _scratch_of(self, num_bytes: int) -> _Array:
        if len(self._scratch) < num_bytes:
            # torch aligns memory to 64 bytes. NumPy's begins 16 bytes past a page, where Linux copies half as fast.
            self._scratch = torch.empty(max(num_bytes, self._slab_bytes), dtype=torch.uint8, device="cpu").numpy()
        return self._scratch[:num_bytes]

    def _fill_checked(
        self, fd: int, chunk: ChunkExtent, start: int, pieces: Sequence[memoryview], name_of: Callable[[int, int], str]
    ) -> None:
        """Fill all of `pieces` with the chunk's bytes from `start` on, and check their digests, unless another rank of this host has."""
        num_bytes = sum(map(len, pieces))
        marks = self._marks(fd, chunk, start, num_bytes) if self._verify else ()
        self._fill(fd, chunk, start, pieces, name_of(start, start + num_bytes))
        if not self._verify:
            return
        is_unchanged = marks and marks == self._marks(fd, chunk, start, num_bytes)
        table = self._checked if is_unchanged and self._is_shared(fd, chunk, start + num_bytes - 1) else None
        if table is not None and table.has(marks):
            return
        self._check_blocks(chunk, start, pieces, name_of)
        if table is not None:
            table.add(marks)

    def _is_shared(self, fd: int, chunk: ChunkExtent, last: int) -> bool:
        """Whether bytes up to this one, which have been read, came from memory that all ranks of this host read: marks are for these."""
        return chunk.file in self._held or (self._is_read_through_cache(chunk) and _is_cached(fd, chunk.offset + last))

    def _fill(self, fd: int, chunk: ChunkExtent, start: int, pieces: Sequence[memoryview], name: str) -> None:
        """Fill all of `pieces` with the chunk's bytes from `start` on."""
        at = chunk.offset + start
        missing = list(pieces)
        is_held = chunk.file in self._held
        read_at = self._held.read_at(chunk.file) if is_held else self._read_at
        if self._read_object is not None and not is_held:
            read_at = partial(_read_from, self._read_object, chunk.file)
        while missing:
            try:
                got = read_at(fd, missing[:1024], at)
            except FileNotFoundError as error:  # an object is looked for when it is read
                raise self._missing(chunk.file, name) from error
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._root / chunk.file)) from error
            if got == 0:
                raise CorruptCheckpointError(
                    f"{name}: {self._root / chunk.file} ends at byte {at}, where bytes {chunk.offset} to {chunk.offset + chunk.length} "
                    "were saved", LOAD_EARLIER,
                    file=chunk.file,
                )
            at += got
            self.bytes_read += 0 if is_held else got
            missing = after(missing, got)

    def _marks(self, fd: int, chunk: ChunkExtent, start: int, num_bytes: int) -> Sequence[int]:
        """Return the marks of these bytes of the file as it is now; none if this host shares none of them."""
        if self._checked is None:
            return ()
        first = start // chunk.block_bytes
        return self._checked.of(fd, chunk, range(first, first - (-num_bytes // chunk.block_bytes)))

    def _check_blocks(
        self, chunk: ChunkExtent, start: int, pieces: Sequence[memoryview], name_of: Callable[[int, int], str]
    ) -> None:
        """Compare the digests of the blocks in `pieces`, which begin at byte `start` of the chunk."""
        stream = BlockDigests(chunk.block_bytes)
        for piece in pieces:
            stream.update(piece)
        for number, found in enumerate(stream.close(), start // chunk.block_bytes):
            if found != chunk.digests[number]:
                begin = number * chunk.block_bytes
                end = min(begin + chunk.block_bytes, chunk.length)
                raise CorruptCheckpointError(
                    f"{name_of(begin, end)}: bytes {chunk.offset + begin} to {chunk.offset + end} of "
                    f"{self._root / chunk.file} are not those that were saved", LOAD_EARLIER,
                    file=chunk.file,
                )

    def _open(self, file: str, name: str) -> int:
        """Return a descriptor of `file`, kept open while it is among the last `MAX_OPEN_FILES` used."""
        if file in self._files:
            self._files.move_to_end(file)
            return self._files[file]
        try:
            fd = self._held.open(file)
            if fd is None:
                fd = self._folder.open(file) if isinstance(self._folder, CheckpointFolder) else _OBJECT
        except (FileNotFoundError, NotADirectoryError) as error:
            raise self._missing(file, name) from error
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{name}: {error}", file=file) from error
        if self._in_order and _CAN_READ_AHEAD and file not in self._held and fd != _OBJECT:
            with suppress(OSError):  # a sandbox may refuse this call
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        if fd == _OBJECT:
            return fd
        if len(self._files) >= MAX_OPEN_FILES:
            os.close(self._files.popitem(last=False)[1])
        self._files[file] = fd
        return fd

    def _missing(self, file: str, name: str) -> CorruptCheckpointError:
        return CorruptCheckpointError(f"{name}: {self._root / file} is missing", LOAD_EARLIER, file=file)


def _read_from(
    read: Callable[[str, Sequence[memoryview], int], int], file: str, _: int, buffers: Sequence[memoryview], at: int
) -> int:
    return read(file, buffers, at)


def _is_cached(fd: int, at: int) -> bool:
    """Whether a byte of a file is in the page cache; False, too, where the file system cannot tell."""
    try:
        return os.preadv(fd, [bytearray(1)], at, os.RWF_NOWAIT) == 1
    except OSError:
        return False


def _read_shared_bytes_once(spans: Sequence[Span | TensorRun]) -> None:
    """Route overlapping spans through scratch: their bytes have two destinations. `spans` are sorted."""
    furthest = spans[0]
    for span in spans[1:]:
        if span.start < furthest.stop:
            span.memory = furthest.memory = None
        if span.stop > furthest.stop:
            furthest = span


def _slabs(stretches: Sequence[tuple[int, int]], unit: int, at_once: int) -> Iterator[tuple[int, int]]:
    """Yield ascending [start, stop) of whole units (a chunk's last may be short) that together make up the stretches."""
    slab_bytes = max(at_once // unit, 1) * unit
    for start, stop in stretches:
        for at in range(start, stop, slab_bytes):
            yield at, min(at + slab_bytes, stop)
