"""Read chunks from storage into tensors. A direct load reads all that a rank wants, in the order in which it lies in storage.

Both strategies read the bytes of tensors by a `ChunkReader`: raw chunks by their byte ranges in files, encoded ones through the library of
their format. A direct load reads into tensors (`ChunkReader.read`), a two-stage load also into blocks that travel (`ChunkReader.fetch`).

Ranks of a host that want the same bytes come to them at about the same time. The kernel has read them ahead by then, once, so that the disk
works while ranks copy: within a file because it knows that the file is read in order (`ExtentReader`), and from file to file because
`DirectReading` asks for the next ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from threading import Event, Lock
from typing import Any

import torch

from ckpt.backends.base import Backend
from ckpt.format.box import Box, chunk_box, chunks_meeting
from ckpt.format.dtypes import raw_bytes, torch_dtype
from ckpt.format.gc_pause import gc_paused
from ckpt.format.records import BLOCK_BYTES, ChunkExtent
from ckpt.loading.strategy import ReadRequest, ReadStats, Stored, StoredPart, by_chunk, bytes_of
from ckpt.memory.copies import Filling
from ckpt.memory.device import Device
from ckpt.ranks.topology import Topology
from ckpt.storage.extents import PREADV, ExtentReader, ReadAt
from ckpt.storage.host_memory import MemoryUse, power_of_two
from ckpt.storage.objects.files import RANGE_BYTES, REQUESTS
from ckpt.storage.wanted_bytes import WantedBytes


class ChunkReader:
    """Reader of one rank for one load; one thread reads at a time. It keeps files and page-locked memory until `close`.

    Args:
        verify: compare block digests, where the checkpoint has any.
        slab_bytes: bytes asked for at once, and the memory for bytes that cannot be read into tensors as they are.
        progress: called with a number of bytes as they arrive.
        read_at: how bytes come from an open file.
        role: of the side streams that copy to devices; see `Filling`.
        in_order: chunks are read in storage order; see `ExtentReader`.
        num_requests: of `read_soon`, at a time.
    """

    def __init__(
        self,
        checkpoint: Stored,
        *,
        verify: bool,
        slab_bytes: int,
        progress: Callable[[int], None],
        read_at: ReadAt,
        role: str = "filling",
        in_order: bool = False,
        num_requests: int = REQUESTS,
    ) -> None:
        self._num_requests = num_requests
        self._checkpoint = checkpoint
        self._verify = verify and checkpoint.has_digests
        self.filling = Filling(slab_bytes, role)
        self._extents = ExtentReader(
            checkpoint.root,
            verify=self._verify,
            progress=progress,
            read_at=read_at,
            slab_bytes=slab_bytes,
            filling=self.filling,
            held=checkpoint.held,
            checked=checkpoint.checked,
            in_order=in_order,
        )
        self._decoded: tuple[ChunkExtent, torch.Tensor] | None = None
        self._bytes_unchecked = 0  # read by a format's library alone

    @property
    def bytes_read(self) -> int:
        """Bytes read from storage so far; bytes found in host memory do not count."""
        return self._extents.bytes_read + self._bytes_unchecked

    def read_ahead(self, parts: Sequence[StoredPart], most_bytes: int) -> None:
        """Have the kernel read the first bytes of a chunk that will be read soon, if its file is not open yet and all of it is wanted.

        Within an open file the kernel reads ahead by itself. Does not wait, and does not fail.
        """
        chunk = parts[0].chunk
        if not chunk.raw or sum([part.part.out.nbytes for part in parts]) >= chunk.length:
            self._extents.read_ahead(chunk, most_bytes)

    def read_soon(self, ranges: Iterable[tuple[StoredPart, int, int]]) -> None:
        """Tell which bytes [start, stop) of chunks will be read, in their order, so that an object store sends several at a time."""
        wanted = ((run.chunk, start, stop) for run, start, stop in ranges if run.chunk.raw)
        self._extents.read_soon(wanted, self._num_requests)

    def is_cached(self, chunk: ChunkExtent, ranges: Sequence[tuple[int, int]]) -> bool:
        """Whether the page cache of this host seems to have these bytes [start, stop) of a chunk, as they are wanted. Does not fail."""
        return chunk.raw and self._extents.is_cached(chunk, ranges)

    def ranges_of(self, parts: Sequence[StoredPart], most_bytes: int) -> list[tuple[int, int]] | None:
        """Return the bytes [start, stop) of a chunk that its parts want, cut into pieces that can be read apart; None: it is read whole.

        Args:
            most_bytes: of a piece, but at least a block.
        """
        chunk = parts[0].chunk
        if not chunk.raw:
            return None
        unit = self._extents.unit_of(chunk)
        step = max(most_bytes // unit, 1) * unit
        wanted = WantedBytes(chunk, [part.part for part in parts]).stretches(unit)
        return [(at, min(at + step, stop)) for start, stop in wanted for at in range(start, stop, step)]

    def read(self, parts: Sequence[StoredPart], ranges: Sequence[tuple[int, int]] | None = None) -> None:
        """Fill the parts of one chunk, on any device.

        Args:
            ranges: read these bytes [start, stop) of a raw chunk alone; None: all that the parts want.

        Raises:
            CorruptCheckpointError: bytes are missing or not as they were written.
            OSError: the file system failed.
        """
        if parts[0].chunk.raw:
            self._extents.read(parts[0].chunk, [part.part for part in parts], ranges)
            return
        self._check(parts[0])
        for part in parts:
            self._decode_part(part)

    def fetch(self, one: StoredPart, start: int, memory: torch.Tensor, name_of: Callable[[int, int], str]) -> None:
        """Read bytes of the chunk that a part lies in, from byte `start` on, into host memory. A decoded chunk is kept for the next call.

        Args:
            memory: flat uint8, as long as the bytes; of a raw chunk with digests, whole blocks.
            name_of: name of the tensor that wants the bytes [begin, end), for messages.

        Raises: as `read`.
        """
        if one.chunk.raw:
            flat: Any = memory.numpy()
            self._extents.fetch(one.chunk, start, memoryview(flat), name_of)
            return
        if self._decoded is None or self._decoded[0] is not one.chunk:
            self._decoded = one.chunk, self._decode_chunk(one)
        memory.copy_(self._decoded[1][start : start + len(memory)])

    def close(self) -> None:
        """Wait for copies to devices, close the files, and let go of all memory."""
        try:
            self.filling.close()
        finally:
            self._extents.close()
            self._decoded = None

    def _check(self, one: StoredPart) -> None:
        """Compare the digests of an encoded chunk; without `verify` only its presence and length."""
        self._extents.check(one.chunk, one.part.name)
        self._bytes_unchecked += 0 if self._verify else one.chunk.length

    def _decode_part(self, one: StoredPart) -> None:
        """Decode one part; a piece of a packed array is decoded flat, and cut here."""
        part = one.part
        is_box = one.source.shape == tuple(part.out.shape)
        if is_box and part.out.device.type == "cpu":
            self._checkpoint.decode(one, one.source, part.out)
            return
        host = torch.empty(one.source.shape, dtype=part.out.dtype, device="cpu")
        self._checkpoint.decode(one, one.source, host)
        self.filling.fill(part.out, host if is_box else host.view(part.region)[part.box.slices])

    def _decode_chunk(self, one: StoredPart) -> torch.Tensor:
        """All bytes of an encoded chunk, decoded, with the padding of a chunk at the array's edge."""
        self._check(one)
        array, box = one.array, _chunk_of(one)
        decoded = torch.empty(array.grid, dtype=torch_dtype(array.dtype), device="cpu")
        raw_bytes(decoded).zero_()  # torch has no zeros of float4
        inside = decoded[tuple(slice(0, side) for side in box.shape)]
        out = inside if inside.is_contiguous() else torch.empty(box.shape, dtype=inside.dtype, device="cpu")
        self._checkpoint.decode(one, box, out)
        if out is not inside:
            inside.copy_(out)
        return raw_bytes(decoded)


def _chunk_of(one: StoredPart) -> Box:
    """The box, in global coordinates, of the chunk that a part lies in."""
    array = one.array
    (number,) = chunks_meeting(array.shape, array.grid, one.source)
    return chunk_box(array.shape, array.grid, number)


AHEAD_BYTES = 32 << 20
"""Bytes behind the chunk that is read whose files the kernel is asked to read. 64 and 128 MiB are no faster, 16 MiB are slower."""

AHEAD_CHUNKS = 32
"""Such chunks at most: their files are open, and `extents.MAX_OPEN_FILES` can be."""


class DirectLoad:
    """Load without talking to other ranks. Hosts start at different places, so that a storage of many disks serves them side by side.

    Args:
        read_at: how bytes come from an open file.

    Attributes:
        in_flight_bytes: that a rank asks for at once: its memory for those that cannot be read into tensors as they are; for tensors on a
            device twice that, page-locked, and as much once on the device. At least a block is (4 MiB); an encoded chunk is decoded whole.
        num_requests: to an object store, at a time; each has such memory, and its answer.
    """

    in_flight_bytes = 8 << 20
    num_requests = REQUESTS

    def __init__(self, *, read_at: ReadAt = PREADV) -> None:
        self._read_at = read_at

    def memory_range(self, use: MemoryUse) -> tuple[int, int]:
        """See `ckpt.memory.budget.Limited`."""
        least, requests = _memories(use) * BLOCK_BYTES, self.num_requests if use.in_store else 1
        return least, max(least, requests * _memories(use) * self.in_flight_bytes)

    def limit_memory(self, num_bytes: int, use: MemoryUse) -> None:
        """See `ckpt.memory.budget.Limited`."""
        num_bytes //= _memories(use)
        self.in_flight_bytes = min(self.in_flight_bytes, power_of_two(num_bytes))
        self.num_requests = min(self.num_requests, num_bytes // max(self.in_flight_bytes, BLOCK_BYTES))

    def prepare(
        self, requests: Sequence[ReadRequest], checkpoint: Stored, topology: Topology, device: Device, *, verify: bool
    ) -> DirectReading:
        """See `LoadingStrategy.prepare`; there is nothing to agree on, so any rank may call it, anywhere."""
        is_near = isinstance(checkpoint.root, Path)
        readers = [
            ChunkReader(
                checkpoint,
                verify=verify,
                slab_bytes=self.in_flight_bytes,
                progress=topology.progress,
                read_at=self._read_at,
                role=f"filling {number}" if number else "filling",
                in_order=True,
            )
            for number in range(1 if is_near else self.num_requests)
        ]
        return DirectReading(requests, checkpoint, readers, topology.node_rank / len(topology.nodes))

    def bind(self, backend: Backend) -> None:
        """See `LoadingStrategy.bind`: nothing travels between ranks."""

    def close(self) -> None:
        """See `LoadingStrategy.close`: nothing is kept."""


def _memories(use: MemoryUse) -> int:
    """How many times a reader has the bytes that it asks for at once: to read into, twice for a device; and as the answer of a store."""
    return 1 + use.on_device + use.in_store


@dataclass(frozen=True, slots=True)
class DirectReading:
    """See `Reading`. It talks to no other rank.

    Attributes:
        readers: one, or of an object store one for each request in flight.
        start: the share of all bytes, in storage order, that is read after the rest.
    """

    requests: Sequence[ReadRequest]
    checkpoint: Stored
    readers: Sequence[ChunkReader]
    start: float

    @gc_paused()
    def run(self) -> ReadStats:
        """See `Reading.run`. Reads every wanted byte and closes the files."""
        chunks = by_chunk(self.requests, self.checkpoint)
        start = _chunk_at(chunks, self.start)
        order = chunks[start:] + chunks[:start]
        try:
            if len(self.readers) == 1:
                self._read_ahead_and_read(order, self.readers[0])
            else:
                self._read_side_by_side(order)
        finally:
            with ExitStack() as closing:
                for reader in self.readers:
                    closing.callback(reader.close)
        return ReadStats(sum(reader.bytes_read for reader in self.readers), bytes_of(self.requests))

    def _read_ahead_and_read(self, order: Sequence[Sequence[StoredPart]], reader: ChunkReader) -> None:
        ends = list(accumulate(parts[0].chunk.length for parts in order))
        next_ahead = 1  # the first chunk that the kernel has not been asked for
        for number, parts in enumerate(order):
            last = min(len(order), number + AHEAD_CHUNKS)
            while next_ahead < last and ends[next_ahead - 1] - ends[number] < AHEAD_BYTES:
                reader.read_ahead(order[next_ahead], AHEAD_BYTES)
                next_ahead += 1
            reader.read(parts)

    def _read_side_by_side(self, order: Sequence[Sequence[StoredPart]]) -> None:
        """Read with one thread for each reader: each waits for the way to the store and back, and then there are bytes at once."""
        pieces: Iterator[tuple[Sequence[StoredPart], Sequence[tuple[int, int]] | None]] = (
            (parts, stretch)
            for parts in order
            for stretch in _apart(self.readers[0].ranges_of(parts, RANGE_BYTES))
        )
        taking, failed = Lock(), Event()

        def run(reader: ChunkReader) -> None:
            while not failed.is_set():
                with taking:
                    piece = next(pieces, None)
                if piece is None:
                    return
                try:
                    reader.read(*piece)
                except BaseException:
                    failed.set()
                    raise

        with ThreadPoolExecutor(len(self.readers), thread_name_prefix="reader") as threads:
            for done in [threads.submit(run, reader) for reader in self.readers]:
                done.result()

    def close(self) -> None:
        """See `Reading.close`: `run` has closed the files."""


def _apart(ranges: Sequence[tuple[int, int]] | None) -> Iterator[Sequence[tuple[int, int]] | None]:
    """Yield the ranges one by one; None: the whole chunk."""
    if ranges is None:
        yield None
    else:
        yield from ([stretch] for stretch in ranges)


def _chunk_at(chunks: Sequence[Sequence[StoredPart]], share: float) -> int:
    """The first chunk after this share of all chunks' bytes. Shares are equal, so that hosts stay apart."""
    ends = list(accumulate(parts[0].chunk.length for parts in chunks))
    return bisect_right(ends, share * ends[-1]) if ends else 0
