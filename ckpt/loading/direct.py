"""Direct loading: every rank reads the boxes it wants, straight into its tensors, in the order in which they lie in storage.

Ranks of a host that want the same bytes come to them at about the same time. The kernel has read them ahead by then, once, so that the disk
works while ranks copy: within a file because it knows that the file is read in order (`ExtentReader`), and from file to file because
`DirectReading` asks for the next ones.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from threading import Event, Lock

from ckpt.backends.base import Backend
from ckpt.format.gc_pause import gc_paused
from ckpt.format.records import BLOCK_BYTES
from ckpt.loading.chunk_reader import ChunkReader
from ckpt.loading.strategy import ReadRequest, ReadStats, Stored, StoredPart, by_chunk, bytes_of
from ckpt.memory.device import Device
from ckpt.ranks.topology import Topology
from ckpt.storage.extents import PREADV, ReadAt
from ckpt.storage.host_memory import MemoryUse, power_of_two
from ckpt.storage.objects.files import RANGE_BYTES, REQUESTS

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
