"""The machine's limits: the same bytes moved by bare system calls, memory copies, sockets and broadcasts."""

from __future__ import annotations

import mmap
import os
import socket
import socketserver
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from ckpt.format.dtypes import raw_bytes
from ckpt.ranks.addresses import LOOPBACK
from ckpt.storage.keeper.wire import receive_into, received
from recipes.benchmark.measuring import opened, sync_entries
from recipes.benchmark.places import Source, least_loaded, runs_of
from recipes.benchmark.workloads import Contender, Workload

CALL_BYTES = 8 << 20
CALL_BUFFERS = 1024  # IOV_MAX of Linux
BLOCK_BYTES = 4096
PART_BYTES = 64 << 20
_COUNT = struct.Struct("Q")
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


class Raw(Contender):
    """Every rank writes its part of the bytes to one file, with fsync, and reads the bytes that it holds, straight into place.

    Of equal boxes one rank writes, the one that has the least to write.
    """

    def __init__(self, workload: Workload) -> None:
        self.topology = workload.saved.topology
        mine, sources = workload.in_files(least_loaded)
        self.writes = [(offset, _bytes_of(workload.saved.places[place])) for place, offset in mine.items()]
        self._reads = {writer: sorted(_pieces(found), key=lambda piece: piece[0]) for writer, found in sources.items()}

    def save(self, folder: Path) -> None:
        with opened(folder / str(self.topology.rank), _NEW) as descriptor:
            for offset, views in _calls(self.writes):
                _move_all(os.pwritev, descriptor, views, offset)
            os.fsync(descriptor)
        sync_entries(folder, self.topology)

    def load(self, folder: Path) -> None:
        for writer, reads in self._reads.items():
            with opened(folder / str(writer)) as descriptor:
                for offset, views in _calls(reads):
                    _move_all(os.preadv, descriptor, views, offset)


class RawDirect(Raw):
    """The same writes past the page cache (O_DIRECT), from one aligned buffer that is used again and again.

    Raises:
        OSError: on `save`, where the file system does not take O_DIRECT.
    """

    measures = ("save",)

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        self._aligned = mmap.mmap(-1, CALL_BYTES)  # pages are aligned enough
        self._buffer = np.frombuffer(self._aligned, np.uint8)
        self._buffer[:] = 0  # touched before it is timed

    def save(self, folder: Path) -> None:
        size = sum(view.nbytes for _, view in self.writes)
        with opened(folder / str(self.topology.rank), _NEW | os.O_DIRECT) as descriptor:
            if size:
                os.posix_fallocate(descriptor, 0, _whole_blocks(size))
            written = 0
            for filled in self._fillings():
                written += os.write(descriptor, memoryview(self._aligned)[: _whole_blocks(filled)])
            assert written == _whole_blocks(size), "a file system writes whole blocks, or says why not"
            os.ftruncate(descriptor, size)
            os.fsync(descriptor)
        sync_entries(folder, self.topology)

    def _fillings(self) -> Iterator[int]:
        """Copy all bytes through the buffer; yield the number of bytes in it whenever it is full, and at the end."""
        filled = 0
        for _, view in self.writes:
            while view.nbytes:
                part = view[: CALL_BYTES - filled]
                self._buffer[filled : filled + part.nbytes] = part
                view, filled = view[part.nbytes :], filled + part.nbytes
                if filled == CALL_BYTES:
                    yield filled
                    filled = 0
        if filled:
            yield filled


class Memcpy(Contender):
    """Every rank copies as many bytes as it loads, all at once: the limit of a load from memory."""

    measures = ("load_warm",)
    fills = False

    def __init__(self, workload: Workload) -> None:
        self._views = [] if workload.loaded is None else [_bytes_of(t) for t in workload.loaded.places.values()]
        self._buffer = np.ones(PART_BYTES, np.uint8)  # touched: zeros would be mapped by the first copy

    def load(self, folder: Path) -> None:
        filled = 0
        for view in self._views:
            for part in _parts(view):
                filled = 0 if filled + part.nbytes > PART_BYTES else filled
                self._buffer[filled : filled + part.nbytes] = part
                filled += part.nbytes


class Broadcast(Contender):
    """Rank 0 broadcasts as many bytes as the whole state has to the ranks that load, by torch.distributed; nothing is read."""

    measures = ("load_warm",)
    fills = False

    def __init__(self, workload: Workload) -> None:
        device = workload.saved.device.torch_device
        self._group = None if workload.loaded is None else workload.loaded.group
        self._num_bytes = workload.state_bytes
        self._part = torch.zeros(min(PART_BYTES, self._num_bytes), dtype=torch.uint8, device=device)

    def load(self, folder: Path) -> None:
        for at in range(0, self._num_bytes, PART_BYTES):
            dist.broadcast(self._part[: self._num_bytes - at], src=0, group=self._group)


class HostCopies:
    """The limit of a load from hosts: as many bytes by copies of memory, and by plain sockets from the others. It makes no state."""

    def __init__(self) -> None:
        source = np.ones(PART_BYTES, np.uint8)  # touched, and larger than a cache
        self._source = [*_parts(source)]

    @contextmanager
    def serving(self) -> Iterator[int]:
        """Send as many bytes as anybody asks for, from a thread each, inside the block; yield the port."""
        source = self._source

        class Sending(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                (left,) = _COUNT.unpack(received(self.request, _COUNT.size))
                for part in cycle(source):
                    self.request.sendall(part[:left])
                    left -= min(left, part.nbytes)
                    if not left:
                        return

        with socketserver.ThreadingTCPServer((LOOPBACK, 0), Sending) as server:
            thread = threading.Thread(target=server.serve_forever, args=(0.05,))
            thread.start()
            try:
                yield server.server_address[1]
            finally:
                server.shutdown()
                thread.join()

    def fill(self, tensors: Iterable[torch.Tensor], num_here: int, there: Mapping[int, int]) -> None:
        """Fill tensors: the first bytes from memory, then those that others send.

        Args:
            there: port -> bytes.
        """
        parts = deque(part for tensor in tensors for part in _parts(_bytes_of(tensor)))
        source = cycle(self._source)
        for part in _taken(parts, num_here):
            part[:] = next(source)[: part.nbytes]
        for port, num_bytes in there.items():
            with socket.create_connection((LOOPBACK, port)) as link:
                link.sendall(_COUNT.pack(num_bytes))
                for part in _taken(parts, num_bytes):
                    receive_into(link, memoryview(part))


def takes_direct_writes(folder: Path, rank: int) -> bool:
    """Whether the folder's file system takes O_DIRECT."""
    probe = folder / f"direct-{rank}"
    try:
        with opened(probe, _NEW | os.O_DIRECT):
            return True
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return raw_bytes(tensor).numpy()


def _pieces(sources: Iterable[Source]) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the offset in the file, and the memory, of each run of bytes that is read."""
    for source in sources:
        memory = _bytes_of(source.tensor)
        for run in runs_of(source.saved, source.wanted, source.tensor.element_size()):
            yield source.location.offset + run.saved_at, memory[run.wanted_at : run.wanted_at + run.num_bytes]


def _calls(pieces: Iterable[tuple[int, np.ndarray]]) -> Iterator[tuple[int, list[np.ndarray]]]:
    """Yield the offset and the buffers of single calls: pieces that are contiguous in the file are joined, as far as a call goes.

    Args:
        pieces: offset in the file, and memory.
    """
    views: list[np.ndarray] = []
    start = end = 0
    for offset, piece in pieces:
        for view in _parts(piece):
            is_full = end - start + view.nbytes > CALL_BYTES or len(views) == CALL_BUFFERS
            if views and (offset != end or is_full):
                yield start, views
                views = []
            if not views:
                start = offset
            views.append(view)
            end = offset = offset + view.nbytes
    if views:
        yield start, views


def _move_all(
    call: Callable[[int, list[memoryview], int], int], descriptor: int, views: Sequence[np.ndarray], offset: int
) -> None:
    """Call `os.pwritev` or `os.preadv` until all buffers are through."""
    left = [memoryview(view) for view in views]
    while left:
        count = call(descriptor, left, offset)
        if count == 0:
            raise OSError(f"the file ends at byte {offset}")
        offset += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]


def _parts(view: np.ndarray) -> Iterator[np.ndarray]:
    return (view[at : at + CALL_BYTES] for at in range(0, view.nbytes, CALL_BYTES))


def _taken(parts: deque[np.ndarray], num_bytes: int) -> Iterator[np.ndarray]:
    """Take the first so many bytes."""
    while num_bytes:
        part = parts.popleft()
        if part.nbytes > num_bytes:
            parts.appendleft(part[num_bytes:])
        yield part[:num_bytes]
        num_bytes -= min(part.nbytes, num_bytes)


def _whole_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES
