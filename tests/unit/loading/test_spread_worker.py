"""The worker of one rank that is alone: reading and placing overlap, and slots bound the memory."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from ckpt.errors import CorruptCheckpointError
from ckpt.format.records import ChunkExtent
from ckpt.loading.direct import ChunkReader
from ckpt.loading.strategy import StoredPart
from ckpt.loading.two_stage import spread_worker
from ckpt.loading.two_stage.slots import Slots
from ckpt.loading.two_stage.spread_blocks import ChunkRange, RankWants, Spread, SpreadBlock, part_of
from ckpt.loading.two_stage.spread_worker import STEPS, SpreadWorker, TwoStageReading
from ckpt.memory.copies import Filling
from ckpt.ranks.topology import Topology
from ckpt.storage.wanted_bytes import WantedBytes

pytestmark = pytest.mark.usefixtures("collected")

SLOT = 64
PATIENCE_S = 20.0


class FakeEndpoints:
    """Reads and places pieces of 64 bytes that hold their own number; notes what happens, and may be made to wait."""

    def __init__(self) -> None:
        self.placed: dict[int, int] = {}
        self.own: list[list[tuple[int, int]]] = []
        self.begun = [threading.Event() for _ in range(1000)]
        self.fails_at: int | None = None

    def fetch(self, part: StoredPart, start: int, memory: torch.Tensor, name_of: Callable[[int, int], str]) -> None:
        number = start // SLOT
        self.begun[number].set()
        if number == self.fails_at:
            raise CorruptCheckpointError(f"piece {number} is damaged")
        memory.fill_(number % 256)

    def place(self, wanted: WantedBytes, start: int, stop: int, memory: torch.Tensor) -> None:
        assert memory.unique().numel() == 1
        self.placed[start // SLOT] = int(memory[0])

    def read(self, parts: Sequence[StoredPart], ranges: list[tuple[int, int]]) -> None:
        self.own.append(ranges)


def reading(endpoints: FakeEndpoints, blocks: int, slots: int) -> TwoStageReading:
    travel = [SpreadBlock(n, 0, (0,), (ChunkRange(("f", 0), n * SLOT, (n + 1) * SLOT),)) for n in range(blocks)]
    own = [ChunkRange(("a", 0), 0, 10), ChunkRange(("a", 0), 20, 30), ChunkRange(("b", 0), 0, 5)]
    keys = {piece.key for piece in [*own, *(block.pieces[0] for block in travel)]}
    places = {key: WantedBytes(ChunkExtent(*key, 0, ()), []) for key in keys}
    return TwoStageReading(
        part=part_of(Spread({0: own}, travel), [[0]], rank=0),
        wants=RankWants({key: [cast(StoredPart, None)] for key in keys}, places, [], [], set(), 0),
        reader=cast(ChunkReader, endpoints),
        filling=cast(Filling, endpoints),
        slots=Slots(torch.empty(slots * SLOT, dtype=torch.uint8), SLOT, slots, 0),
        link=None,
        transport=None,
        topology=Topology.alone(),
        timers=defaultdict(list),
        give_up=lambda: None,
    )


def worker(endpoints: FakeEndpoints, blocks: int, slots: int) -> SpreadWorker:
    return SpreadWorker(reading(endpoints, blocks, slots), dict.fromkeys(STEPS, 0.0))


def test_the_next_block_is_read_while_one_is_put_in_place() -> None:
    """S1.55: storage is read while tensors are filled."""
    endpoints = FakeEndpoints()
    place = endpoints.place

    def place_slowly(wanted: WantedBytes, start: int, stop: int, memory: torch.Tensor) -> None:
        if start == 0:
            assert endpoints.begun[1].wait(PATIENCE_S), "nothing is read as long as a block is put in place"
        place(wanted, start, stop, memory)

    endpoints.place = place_slowly  # type: ignore[method-assign]
    worker(endpoints, blocks=3, slots=2).run()
    assert endpoints.placed == {0: 0, 1: 1, 2: 2}


def test_no_more_blocks_are_under_way_than_there_are_slots() -> None:
    endpoints = FakeEndpoints()
    place = endpoints.place
    begun_too_early = []

    def place_slowly(wanted: WantedBytes, start: int, stop: int, memory: torch.Tensor) -> None:
        number = start // SLOT
        begun_too_early.append(endpoints.begun[number + 2].wait(0.02))
        place(wanted, start, stop, memory)

    endpoints.place = place_slowly  # type: ignore[method-assign]
    worker(endpoints, blocks=10, slots=2).run()
    assert endpoints.placed == {n: n for n in range(10)}
    assert not any(begun_too_early)


def test_what_one_rank_alone_wants_is_read_chunk_by_chunk_after_the_blocks() -> None:
    endpoints = FakeEndpoints()
    worker(endpoints, blocks=1, slots=1).run()
    assert endpoints.own == [[(0, 10), (20, 30)], [(0, 5)]]


def test_damage_is_raised_when_all_blocks_have_gone_their_way() -> None:
    endpoints = FakeEndpoints()
    endpoints.fails_at = 1
    before = threading.active_count()
    one = worker(endpoints, blocks=4, slots=1)
    with pytest.raises(CorruptCheckpointError, match="piece 1 is damaged"):
        one.run()
    assert not endpoints.begun[2].is_set(), "nothing is read after damage"
    assert endpoints.placed in ({}, {0: 0})
    assert threading.active_count() == before


def test_whatever_ends_the_reader_is_raised_by_the_calling_thread() -> None:
    """Otherwise that thread would wait for ever, and report progress all the time."""
    endpoints = FakeEndpoints()

    def ended(parts: Sequence[StoredPart], ranges: list[tuple[int, int]]) -> None:
        raise SystemExit("enough")

    endpoints.read = ended  # type: ignore[method-assign]
    with pytest.raises(SystemExit, match="enough"):
        worker(endpoints, blocks=2, slots=1).run()


def test_a_device_that_fails_as_the_reader_begins_is_raised_by_the_calling_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lost() -> Callable[[], None]:
        def use() -> None:
            raise RuntimeError("the device is lost")

        return use

    monkeypatch.setattr(spread_worker, "same_device", lost)
    endpoints = FakeEndpoints()
    with pytest.raises(RuntimeError, match="the device is lost"):
        worker(endpoints, blocks=2, slots=1).run()
    assert not endpoints.begun[0].is_set(), "nothing is read"


def test_all_of_a_reading_is_closed_if_one_part_fails_and_the_link_first() -> None:
    """Neighbours that wait for a rank learn from its sockets that it has gone."""
    closed = []

    class Closing:
        def __init__(self, name: str, fails: bool = False) -> None:
            self.name, self.fails = name, fails

        def close(self) -> None:
            closed.append(self.name)
            if self.fails:
                raise RuntimeError("the device is lost")

    parts: Any = {name: Closing(name, name == "slots") for name in ("filling", "reader", "slots", "link")}
    with pytest.raises(RuntimeError, match="the device is lost"):
        replace(reading(FakeEndpoints(), blocks=1, slots=1), **parts).close()
    assert closed == ["link", "slots", "reader", "filling"]


def test_an_interrupt_ends_both_threads() -> None:
    endpoints = FakeEndpoints()

    def interrupted(wanted: WantedBytes, start: int, stop: int, memory: torch.Tensor) -> None:
        raise KeyboardInterrupt

    endpoints.place = interrupted  # type: ignore[method-assign]
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        worker(endpoints, blocks=10, slots=2).run()
    assert threading.active_count() == before


def test_an_interrupt_ends_a_reader_that_is_far_ahead() -> None:
    """It sends more wake-ups than a socket takes, and the calling thread has stopped to receive them."""
    endpoints = FakeEndpoints()

    def interrupted(wanted: WantedBytes, start: int, stop: int, memory: torch.Tensor) -> None:
        endpoints.begun[600].wait(1.0)
        raise KeyboardInterrupt

    endpoints.place = interrupted  # type: ignore[method-assign]
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        worker(endpoints, blocks=700, slots=700).run()
    assert threading.active_count() == before
