"""The machine's limits: the same bytes moved by bare system calls, memory copies and broadcasts."""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from ckpt.format.dtypes import raw_bytes
from recipes.benchmark.measuring import sync_entries
from recipes.benchmark.places import by_name, lay_out, least_laden, runs_of, sources_of
from recipes.benchmark.workloads import Contender, Workload

CALL_BYTES = 8 << 20
CALL_BUFFERS = 1024  # IOV_MAX of Linux
BLOCK_BYTES = 4096
PART_BYTES = 64 << 20
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


class Raw(Contender):
    """Every rank writes its part of the bytes to one file, with fsync, and reads what it holds, straight into place.

    Of equal boxes one rank writes, the one that has the least to write.
    """

    def __init__(self, workload: Workload) -> None:
        self.topology = workload.saved.topology
        layout = lay_out(workload.holdings, self.topology.world_size, least_laden)
        mine = [(lying.offset, place) for place, lying in layout.items() if lying.writer == self.topology.rank]
        self.writes = [_bytes_of(workload.saved.places[place]) for _, place in sorted(mine, key=lambda one: one[0])]
        self._reads: list[tuple[int, int, np.ndarray]] = []
        saved = by_name(layout)
        for place, tensor in ({} if workload.loaded is None else workload.loaded.places).items():
            memory = _bytes_of(tensor)
            for box, lying in sources_of(place, saved):
                for run in runs_of(box, place[1], tensor.element_size()):
                    view = memory[run.wanted_at : run.wanted_at + run.num_bytes]
                    self._reads.append((lying.writer, lying.offset + run.saved_at, view))
        turns = self.topology.world_size  # ranks begin at different files, so that a disk serves them side by side
        self._reads.sort(key=lambda read: ((read[0] - self.topology.rank) % turns, read[1]))

    def save(self, folder: Path) -> None:
        with _opened(folder / str(self.topology.rank), _NEW) as descriptor:
            for buffers in _calls(self.writes):
                _move_all(partial(os.writev, descriptor), buffers)
            os.fsync(descriptor)
        sync_entries(folder, self.topology)

    def load(self, folder: Path) -> dict[str, int]:
        for writer, of_file in itertools.groupby(self._reads, key=lambda read: read[0]):
            with _opened(folder / str(writer), os.O_RDONLY) as descriptor:
                for offset, views in _stretches((offset, view) for _, offset, view in of_file):
                    os.lseek(descriptor, offset, os.SEEK_SET)
                    for buffers in _calls(views):
                        _move_all(partial(os.readv, descriptor), buffers)
        return {}


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
        self._buffer[:] = 0  # touched before anybody looks at the clock

    def save(self, folder: Path) -> None:
        size = sum(view.nbytes for view in self.writes)
        with _opened(folder / str(self.topology.rank), _NEW | os.O_DIRECT) as descriptor:
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
        for view in self.writes:
            at = 0
            while at < view.nbytes:
                count = min(view.nbytes - at, CALL_BYTES - filled)
                self._buffer[filled : filled + count] = view[at : at + count]
                at, filled = at + count, filled + count
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

    def load(self, folder: Path) -> dict[str, int]:
        filled = 0
        for view in self._views:
            for at in range(0, view.nbytes, CALL_BYTES):
                part = view[at : at + CALL_BYTES]
                filled = 0 if filled + part.nbytes > PART_BYTES else filled
                self._buffer[filled : filled + part.nbytes] = part
                filled += part.nbytes
        return {}


class Broadcast(Contender):
    """Rank 0 sends as many bytes as the whole state has to all that load, by torch.distributed, and nothing is read."""

    measures = ("load_warm",)
    fills = False

    def __init__(self, workload: Workload) -> None:
        device = workload.saved.device.torch_device
        self._group = None if workload.loaded is None else workload.loaded.group
        self._num_bytes = workload.state_bytes
        self._part = torch.zeros(min(PART_BYTES, self._num_bytes), dtype=torch.uint8, device=device)

    def load(self, folder: Path) -> dict[str, int]:
        for at in range(0, self._num_bytes, PART_BYTES):
            dist.broadcast(self._part[: self._num_bytes - at], src=0, group=self._group)
        return {}


def takes_direct_writes(folder: Path, rank: int) -> bool:
    """Whether the folder's file system takes O_DIRECT."""
    probe = folder / f"direct-{rank}"
    try:
        with _opened(probe, _NEW | os.O_DIRECT):
            return True
    except OSError:
        return False
    finally:
        probe.unlink(missing_ok=True)


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    flat: np.ndarray = raw_bytes(tensor).numpy()
    return flat


def _calls(views: Iterable[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Cut the views, in their order, into the buffers of single calls."""
    buffers: list[np.ndarray] = []
    filled = 0
    for view in views:
        for at in range(0, view.nbytes, CALL_BYTES):
            part = view[at : at + CALL_BYTES]
            if filled + part.nbytes > CALL_BYTES or len(buffers) == CALL_BUFFERS:
                yield buffers
                buffers, filled = [], 0
            buffers.append(part)
            filled += part.nbytes
    if buffers:
        yield buffers


def _stretches(reads: Iterable[tuple[int, np.ndarray]]) -> Iterator[tuple[int, list[np.ndarray]]]:
    """Join what lies behind each other in the file."""
    start, end = 0, -1
    views: list[np.ndarray] = []
    for offset, view in reads:
        if offset != end and views:
            yield start, views
            views = []
        start = start if views else offset
        views.append(view)
        end = offset + view.nbytes
    if views:
        yield start, views


def _move_all(call: Callable[[list[memoryview]], int], buffers: Sequence[np.ndarray]) -> None:
    """Call `os.writev` or `os.readv` until all buffers are through."""
    left = [memoryview(buffer) for buffer in buffers]
    while left:
        count = call(left)
        if count == 0:
            raise OSError("a file has ended too early")
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]


def _whole_blocks(num_bytes: int) -> int:
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    descriptor = os.open(path, flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
