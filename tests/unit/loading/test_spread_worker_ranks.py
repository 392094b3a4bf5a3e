"""Spread blocks between ranks that are threads, on made-up hosts: any wants, any hosts, any failures."""

from __future__ import annotations

import errno
import math
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.errors import CorruptCheckpointError, RankLeftError
from ckpt.format.box import Box, chunk_box, num_chunks
from ckpt.format.digests import BlockDigests
from ckpt.format.dtypes import item_bytes, torch_dtype
from ckpt.format.records import ALIGNMENT, ArraySpec, ChunkExtent
from ckpt.loading.direct import ChunkReader
from ckpt.loading.strategy import ReadRequest, StoredPart
from ckpt.loading.two_stage import slots as host_link
from ckpt.loading.two_stage.slots import DONE, MAX_SLOTS, READY, HostLink, Slots
from ckpt.loading.two_stage.spread_blocks import PIECE_ALIGNMENT, part_of, plan_spread, wants_of
from ckpt.loading.two_stage.spread_worker import TwoStageReading
from ckpt.memory.copies import Filling
from ckpt.planning.plan import needed_chunks
from ckpt.ranks.topology import Topology
from ckpt.storage.host_memory import NOTHING_HELD
from ckpt.storage.wanted_bytes import WantedBox
from tests.support.states import random_bits, same_bits

pytestmark = pytest.mark.usefixtures("collected")

PATIENCE_S = 5.0


@dataclass(frozen=True)
class Array:
    """An array of a made-up checkpoint; `packed`: it begins at this element of a 1-D chunk that holds other things too."""

    dtype: str
    shape: tuple[int, ...]
    grid: tuple[int, ...]
    encoded: bool = False
    packed: int | None = None


class Stock:
    """One file of chunks with something between them. See `ckpt.loading.strategy.Stored`. Encoded ones are inverted bytes."""

    has_digests = True
    held = NOTHING_HELD
    checked = None

    def __init__(self, root: Path, arrays: Sequence[Array], block_bytes: int) -> None:
        self.root = root
        self.arrays = arrays
        self.values = [random_bits(one.shape, torch_dtype(one.dtype), n) for n, one in enumerate(arrays)]
        self.decoded: Counter[tuple[str, int]] = Counter()
        self.read: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._chunks: dict[tuple[int, int], ChunkExtent] = {}
        with (root / "chunks").open("wb") as file:
            for n, one in enumerate(arrays):
                for number, data in enumerate(self._chunks_of(n)):
                    file.write(b"\xee" * 3)
                    stored = bytes(255 - byte for byte in data) if one.encoded else data
                    digests = BlockDigests(block_bytes)
                    digests.update(memoryview(stored))
                    self._chunks[n, number] = ChunkExtent(
                        "chunks", file.tell(), len(stored), digests.close(), block_bytes, raw=not one.encoded
                    )
                    file.write(stored)

    def _chunks_of(self, n: int) -> Iterator[bytes]:
        one, values = self.arrays[n], self.values[n]
        if one.packed is not None:
            before = random_bits((one.packed,), values.dtype, 99)
            yield _bytes_of(torch.cat([before, values.reshape(-1), before]))
            return
        for number in range(math.prod(num_chunks(one.shape, one.grid))):
            box = chunk_box(one.shape, one.grid, number)
            whole = torch.zeros(one.grid, dtype=values.dtype)
            whole[tuple(slice(0, side) for side in box.shape)] = values[box.slices]
            yield _bytes_of(whole)

    def parts(self, request: ReadRequest) -> Iterator[StoredPart]:
        n = int(request.name)
        one = self.arrays[n]
        if 0 in request.box.shape:
            return
        if one.packed is not None:
            count = math.prod(one.shape)
            part = WantedBox(one.packed * item_bytes(one.dtype), one.shape, request.box, request.out, request.label)
            spec = ArraySpec(request.name, one.dtype, (count + 2 * one.packed,), (count + 2 * one.packed,))
            yield StoredPart(self._chunks[n, 0], part, spec, "stock", Box((one.packed,), (count,)))
            return
        spec = ArraySpec(request.name, one.dtype, one.shape, one.grid)
        for number, box, wanted in needed_chunks(one.shape, one.grid, request.box):
            out = request.out[wanted.relative_to(request.box).slices]
            part = WantedBox(0, one.grid, wanted.relative_to(box), out, request.label)
            yield StoredPart(self._chunks[n, number], part, spec, "stock", wanted)

    def decode(self, stored: StoredPart, box: Box, out: torch.Tensor) -> None:
        with self._lock:
            self.decoded[stored.chunk.file, stored.chunk.offset] += 1
        n = int(stored.array.path)
        one, values = self.arrays[n], self.values[n]
        if one.packed is not None:
            before = random_bits((one.packed,), values.dtype, 99)
            values = torch.cat([before, values.reshape(-1), before])
        out.copy_(values[box.slices])

    def read_at(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        got = os.preadv(fd, buffers, offset)  # type: ignore[arg-type]  # it takes any buffers
        with self._lock:
            self.read.update(range(offset, offset + got))
        return got


def _bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


class Wires:
    """Carries blocks between threads as a network does: a sender waits until its block is taken."""

    def __init__(self) -> None:
        self._wires: dict[tuple[int, int], SimpleQueue[Any]] = defaultdict(SimpleQueue)

    def end(self, rank: int) -> Wire:
        return Wire(self._wires, rank)


@dataclass
class Wire:
    wires: dict[tuple[int, int], SimpleQueue[Any]]
    rank: int

    def begin(self, buffer: torch.Tensor, source: int, to: Sequence[int]) -> Callable[[], None]:
        """See `ckpt.loading.two_stage.network.Transport`. Nothing has come, and nothing has gone, before it is waited for."""
        if self.rank == source:
            taken = threading.Barrier(len(to) + 1)
            for rank in to:
                self.wires[source, rank].put((buffer, taken))
            return lambda: self._over(taken)

        def receive() -> None:
            sent, all_taken = self.wires[source, self.rank].get(timeout=PATIENCE_S)
            buffer.copy_(sent)
            self._over(all_taken)

        return receive

    def _over(self, taken: threading.Barrier) -> None:
        taken.wait(PATIENCE_S)


@dataclass
class Case:
    """A load, made up."""

    arrays: list[Array]
    hosts: list[list[int]]
    wanted: list[list[tuple[int, Box, bool]]]  # by rank: array, box, whether its memory has gaps
    block_bytes: int
    verify: bool
    slots: int
    spoil: Callable[[TwoStageReading], None] = field(default=lambda reading: None)
    patience_s: float = PATIENCE_S


def _out(shape: tuple[int, ...], dtype: torch.dtype, gaps: bool) -> torch.Tensor:
    room = torch.zeros((*shape, 2) if gaps else shape, dtype=dtype)
    return room[..., 0] if gaps else room


def _reader(stock: Stock, topology: Topology, verify: bool) -> ChunkReader:
    return ChunkReader(stock, verify=verify, slab_bytes=64, progress=topology.progress, read_at=stock.read_at)


def carry(case: Case, root: Path) -> tuple[Stock, list[list[ReadRequest]], list[Any]]:
    """Run all ranks; return the requests of each, and None or the error that it raised."""
    stock = Stock(root, case.arrays, case.block_bytes)
    requests = [
        [ReadRequest(str(n), f"t{n}", box, _out(box.shape, stock.values[n].dtype, gaps)) for n, box, gaps in wanted]
        for wanted in case.wanted
    ]
    world_size = len(requests)
    topology = Topology.alone()
    topology.timeout_s = case.patience_s
    wants_by_rank = [wants_of(mine, stock, verify=case.verify) for mine in requests]
    wants = [(one.wants, (rank,)) for rank, one in enumerate(wants_by_rank)]
    unit = max((want.unit for rows, _ in wants for want in rows), default=ALIGNMENT)
    slot_bytes = -(-unit // PIECE_ALIGNMENT) * PIECE_ALIGNMENT
    receiving = case.slots if len(case.hosts) > 1 else 0
    count = case.slots + receiving
    spread = plan_spread(wants, slot_bytes)
    wires = Wires()
    neighbours = {rank: here for here in case.hosts for rank in here}
    links = [HostLink(rank, count * slot_bytes) if len(neighbours[rank]) > 1 else None for rank in range(world_size)]
    readings = []
    for rank, link in enumerate(links):
        if link is not None:
            assert link.reach([(other, made.address) for other in neighbours[rank] if (made := links[other])])
        host = torch.zeros(count * slot_bytes, dtype=torch.uint8) if link is None else link.memory[rank]
        reading = TwoStageReading(
            part=part_of(spread, case.hosts, rank),
            slots=Slots(host, slot_bytes, case.slots, receiving),
            wants=wants_by_rank[rank],
            reader=_reader(stock, topology, case.verify),
            filling=Filling(64),
            link=link,
            transport=wires.end(rank) if len(case.hosts) > 1 else None,
            topology=topology,
            timers=defaultdict(list),
            give_up=lambda: None,
        )
        case.spoil(reading)
        readings.append(reading)
    with ThreadPoolExecutor(world_size) as ranks:
        futures = [ranks.submit(reading.run) for reading in readings]
        raised = [future.exception(10 * PATIENCE_S) for future in futures]
    return (
        stock,
        requests,
        [error and error.with_traceback(None) for error in raised],
    )  # which would hold what it has seen


@st.composite
def _arrays(draw: st.DrawFn) -> Array:
    dtype = draw(st.sampled_from(["float32", "uint8", "bfloat16", "complex128", "bool"]))
    dims = draw(st.integers(0, 3))
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=dims, max_size=dims)))
    grid = tuple(draw(st.integers(1, side + 2)) for side in shape)
    packed = draw(st.none() | st.integers(0, 9))
    return Array(dtype, shape, grid, draw(st.booleans()), packed)


@st.composite
def _boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    if draw(st.booleans()):
        return Box((0,) * len(shape), shape)
    borders = [sorted((draw(st.integers(0, side)), draw(st.integers(0, side)))) for side in shape]
    return Box(tuple(a for a, _ in borders), tuple(b - a for a, b in borders))


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    arrays = draw(st.lists(_arrays(), min_size=1, max_size=4))
    world_size = draw(st.integers(1, 6))
    node_of = draw(st.lists(st.integers(0, 2), min_size=world_size, max_size=world_size))
    hosts = [[rank for rank in range(world_size) if node_of[rank] == node] for node in sorted(set(node_of))]
    wanted = []
    for _ in range(world_size):
        mine = draw(st.lists(st.sampled_from(range(len(arrays))), max_size=5))
        wanted.append([(n, draw(_boxes(arrays[n].shape)), draw(st.booleans())) for n in mine])
    return Case(
        arrays, hosts, wanted, draw(st.sampled_from([16, 48, 64])), draw(st.booleans()), draw(st.integers(1, 3))
    )


def _held() -> tuple[int, int, int]:
    """Threads, open files and shared segments of this process."""
    maps = Path("/proc/self/maps").read_text()
    return threading.active_count(), len(os.listdir("/proc/self/fd")), maps.count("ckpt-in-flight")


def _require_bytes(stock: Stock, requests: Sequence[ReadRequest]) -> None:
    for one in requests:
        assert same_bits(one.out.contiguous(), stock.values[int(one.name)][one.box.slices].contiguous()), one.name


@pytest.mark.usefixtures("turns")
@given(_cases())
@settings(max_examples=20)
def test_every_rank_ends_with_its_bytes_and_each_is_read_once_and_nothing_is_left(case: Case) -> None:
    before = _held()
    with TemporaryDirectory() as root:
        stock, requests, raised = carry(case, Path(root))
    assert raised == [None] * len(requests)
    for mine in requests:
        _require_bytes(stock, mine)
    assert max(stock.read.values(), default=1) == 1
    assert _held() == before


@pytest.mark.usefixtures("turns")
@given(_cases(), st.integers(0, 5), st.sampled_from(["fetch", "place", "read"]), st.integers(0, 3))
@settings(max_examples=20)
def test_what_fails_on_one_rank_is_raised_there_and_keeps_nobody_waiting(
    case: Case, who: int, what: str, nth: int
) -> None:
    """A rank that cannot read or place goes on for the others, and raises when all blocks are exchanged."""
    failed = []

    def spoil(reading: TwoStageReading) -> None:
        rank = reading.part.rank
        if rank == who % len(case.wanted):
            _spoil(reading, what, nth, lambda: failed.append(rank), ValueError("as it was to be"))

    case.spoil = spoil
    before = _held()
    started = time.monotonic()
    with TemporaryDirectory() as root:
        _, _, raised = carry(case, Path(root))
    assert time.monotonic() - started < PATIENCE_S
    assert [rank for rank, error in enumerate(raised) if error is not None] == failed
    assert [str(error) for error in raised if error is not None] == ["as it was to be"] * len(failed)
    assert _held() == before


def _spoil(reading: TwoStageReading, what: str, nth: int, note: Callable[[], None], error: BaseException) -> None:
    """Let the nth call of this method raise."""
    calls = iter(range(1000))
    one: Any = reading.filling if what == "place" else reading.reader
    as_ever = getattr(one, what)

    def spoilt(*args: Any) -> None:
        if next(calls) == nth:
            note()
            raise error
        as_ever(*args)

    setattr(one, what, spoilt)


def _rows(num: int) -> Array:
    return Array("uint8", (num, 64), (num, 64))


def _all_of(array: int, num: int) -> tuple[int, Box, bool]:
    return array, Box((0, 0), (num, 64)), False


def test_a_rank_that_waits_for_one_that_fails_because_of_a_third_hears_of_it_at_once(tmp_path: Path) -> None:
    """Rank 0 and 1 share an array, rank 1 and 2 another; rank 0 is interrupted, and rank 2 has nothing to do with it."""
    gone = threading.Event()

    def spoil(reading: TwoStageReading) -> None:
        if reading.part.rank == 0:
            _spoil(reading, "place", 0, gone.set, KeyboardInterrupt())
        elif reading.part.rank == 1:
            fetch = reading.reader.fetch
            reading.reader.fetch = lambda *args: (gone.wait(PATIENCE_S), fetch(*args))[1]  # type: ignore[method-assign]

    wanted = [[_all_of(0, 40)], [_all_of(0, 40), _all_of(1, 40)], [_all_of(1, 40)]]
    case = Case([_rows(40), _rows(40)], [[0, 1, 2]], wanted, 64, True, 1, spoil)
    started = time.monotonic()
    _, _, raised = carry(case, tmp_path)
    assert [type(error) for error in raised] == [KeyboardInterrupt, RankLeftError, RankLeftError]
    assert str(raised[2]) == "rank 1 left before all blocks had been exchanged"
    assert time.monotonic() - started < PATIENCE_S / 2


def test_damage_that_a_rank_has_met_is_raised_even_if_its_neighbour_goes(tmp_path: Path) -> None:
    damaged = threading.Event()

    def spoil(reading: TwoStageReading) -> None:
        if reading.part.rank == 0:
            _spoil(reading, "fetch", 0, damaged.set, CorruptCheckpointError("piece 0 is damaged"))
        else:
            _spoil(reading, "place", 0, lambda: damaged.wait(PATIENCE_S), KeyboardInterrupt())

    case = Case([_rows(40)], [[0, 1]], [[_all_of(0, 40)]] * 2, 64, True, 1, spoil)
    _, _, raised = carry(case, tmp_path)
    assert [type(error) for error in raised] == [CorruptCheckpointError, KeyboardInterrupt]


@pytest.mark.parametrize("hosts", [[[0], [1]], [[0, 1]]])
def test_what_a_rank_reads_for_itself_may_take_longer_than_the_patience_with_others(
    tmp_path: Path, hosts: list[list[int]]
) -> None:
    """No rank is silent then: all blocks of the others have come."""

    def spoil(reading: TwoStageReading) -> None:
        read = reading.reader.read
        reading.reader.read = lambda *args: (time.sleep(1.0), read(*args))[1]  # type: ignore[method-assign]

    wanted = [[_all_of(0, 4), _all_of(1, 4)], [_all_of(0, 4), _all_of(2, 4)]]
    case = Case([_rows(4)] * 3, hosts, wanted, 64, True, 1, spoil, patience_s=0.4)
    stock, requests, raised = carry(case, tmp_path)
    assert raised == [None, None]
    for mine in requests:
        _require_bytes(stock, mine)


def test_a_rank_has_one_descriptor_on_its_way_to_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux limits descriptors in flight per user to the open files of a process: 64 ranks that send to all others need 2016."""
    lock = threading.Lock()
    under_way, most = 0, 0

    def counted(change: int, *args: Any) -> Any:
        nonlocal under_way, most
        with lock:
            under_way += max(change, 0)
            most = max(most, under_way)
        result = (send_fds if change > 0 else recv_fds)(*args)
        with lock:
            under_way += min(change, 0)
        return result

    send_fds, recv_fds = socket.send_fds, socket.recv_fds
    monkeypatch.setattr(socket, "send_fds", partial(counted, 1))
    monkeypatch.setattr(socket, "recv_fds", partial(counted, -1))
    links = [HostLink(rank, 64) for rank in range(12)]
    assert all(link.reach([(other.rank, other.address) for other in links]) for link in links)
    with ThreadPoolExecutor(len(links)) as ranks:
        list(ranks.map(lambda link: link.join(range(len(links)), Topology.alone()), links))
    assert under_way == 0
    assert most <= len(links)
    for link in links:
        link.memory[link.rank].fill_(link.rank)
    assert all(link.memory[rank][0] == rank for link in links for rank in range(len(links)))
    for link in links:
        link.close()


def test_all_that_two_ranks_may_have_said_of_their_slots_fits_a_socket() -> None:
    """Two ranks may be sending to each other, and neither receives then."""
    links = [HostLink(rank, 64) for rank in range(2)]
    links[1].reach([(0, links[0].address)])
    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(lambda link: link.join(range(2), Topology.alone()), links))
    links[0].sockets[1].setblocking(False)
    for slot in range(MAX_SLOTS):
        links[0].send(1, READY, slot, slot)
        links[0].send(1, DONE, slot, slot)
    for link in links:
        link.close()


_CALL = """
import socket, sys
for address in sys.argv[1:]:
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.connect(chr(0) + address)
    one.send(bytes(4))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_calls_of_other_users_are_turned_away() -> None:
    """They see the addresses in /proc/net/unix."""
    links = [HostLink(rank, 64) for rank in range(3)]
    addresses = [(link.rank, link.address) for link in links]
    python = shutil.which("python3", path="/usr/bin") or sys.executable  # one that other users may run
    subprocess.run([python, "-c", _CALL, *(address for _, address in addresses)], user=65534, check=True, timeout=20)
    assert all(link.reach(addresses) for link in links)
    with ThreadPoolExecutor(len(links)) as ranks:
        list(ranks.map(lambda link: link.join(range(len(links)), Topology.alone()), links))
    assert [sorted(link.sockets) for link in links] == [[1, 2], [0, 2], [0, 1]]
    for link in links:
        link.close()


def test_a_link_that_cannot_be_made_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(host_link, "mapped", refused)
    before = _held()
    for _ in range(3):
        with pytest.raises(OSError, match="too many open files"):
            HostLink(0, 64)
    assert _held() == before
