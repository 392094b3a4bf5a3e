"""The courier of one rank alone with itself: what runs beside what, and that slots bound everything."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch

from ckpt.errors import CorruptCheckpointError
from ckpt.loading.two_stage.slots import Slots
from ckpt.loading.two_stage.spread_blocks import ChunkRange, Spread, SpreadBlock
from ckpt.loading.two_stage.spread_worker import Hosts, SpreadWorker
from ckpt.ranks.topology import Topology

pytestmark = pytest.mark.usefixtures("collected")

SLOT = 64
PATIENCE_S = 20.0


class Ends:
    """Pieces of 64 bytes that hold their own number; what happens is noted, and may be made to wait."""

    def __init__(self) -> None:
        self.placed: dict[int, int] = {}
        self.own: list[ChunkRange] = []
        self.begun = [threading.Event() for _ in range(1000)]
        self.fails_at: int | None = None

    def fetch(self, piece: ChunkRange, memory: torch.Tensor) -> None:
        number = piece.start // SLOT
        self.begun[number].set()
        if number == self.fails_at:
            raise CorruptCheckpointError(f"piece {number} is damaged")
        memory.fill_(number % 256)

    def place(self, piece: ChunkRange, memory: torch.Tensor) -> None:
        assert memory.unique().numel() == 1
        self.placed[piece.start // SLOT] = int(memory[0])

    def read_own(self, pieces: Sequence[ChunkRange]) -> None:
        self.own += pieces


def courier(ends: Ends, parcels: int, slots: int) -> SpreadWorker:
    spread = Spread()
    spread.parcels = [
        SpreadBlock(n, 0, (0,), (ChunkRange(("f", 0), n * SLOT, (n + 1) * SLOT),)) for n in range(parcels)
    ]
    spread.own[0] = [ChunkRange(("a", 0), 0, 10), ChunkRange(("a", 0), 20, 30), ChunkRange(("b", 0), 0, 5)]
    return SpreadWorker(
        rank=0,
        spread=spread,
        hosts=Hosts([[0]]),
        slots=Slots(torch.empty(slots * SLOT, dtype=torch.uint8), SLOT, slots, 0),
        ends=ends,
        link=None,
        transport=None,
        topology=Topology.alone(),
    )


def test_the_next_parcel_is_read_while_one_is_put_in_place() -> None:
    """S1.55: storage does not stand still while tensors are filled."""
    ends = Ends()
    place = ends.place

    def place_slowly(piece: ChunkRange, memory: torch.Tensor) -> None:
        if piece.start == 0:
            assert ends.begun[1].wait(PATIENCE_S), "nothing is read as long as a parcel is put in place"
        place(piece, memory)

    ends.place = place_slowly  # type: ignore[method-assign]
    courier(ends, parcels=3, slots=2).run()
    assert ends.placed == {0: 0, 1: 1, 2: 2}


def test_no_more_parcels_are_under_way_than_there_are_slots() -> None:
    ends = Ends()
    place = ends.place
    begun_too_early = []

    def place_slowly(piece: ChunkRange, memory: torch.Tensor) -> None:
        number = piece.start // SLOT
        begun_too_early.append(ends.begun[number + 2].wait(0.02))
        place(piece, memory)

    ends.place = place_slowly  # type: ignore[method-assign]
    courier(ends, parcels=10, slots=2).run()
    assert ends.placed == {n: n for n in range(10)}
    assert not any(begun_too_early)


def test_what_one_rank_alone_wants_is_read_chunk_by_chunk_after_the_parcels() -> None:
    ends = Ends()
    courier(ends, parcels=1, slots=1).run()
    assert ends.own == [ChunkRange(("a", 0), 0, 10), ChunkRange(("a", 0), 20, 30), ChunkRange(("b", 0), 0, 5)]


def test_damage_is_raised_when_all_parcels_have_gone_their_way() -> None:
    ends = Ends()
    ends.fails_at = 1
    before = threading.active_count()
    one = courier(ends, parcels=4, slots=1)
    with pytest.raises(CorruptCheckpointError, match="piece 1 is damaged"):
        one.run()
    assert not ends.begun[2].is_set(), "nothing is read after damage"
    assert ends.placed in ({}, {0: 0})
    assert threading.active_count() == before


def test_whatever_ends_the_reader_is_raised_by_the_calling_thread() -> None:
    """Which would wait for it for ever, and say all the time that it moves."""
    ends = Ends()

    def ended(pieces: Sequence[ChunkRange]) -> None:
        raise SystemExit("enough")

    ends.read_own = ended  # type: ignore[method-assign]
    with pytest.raises(SystemExit, match="enough"):
        courier(ends, parcels=2, slots=1).run()


def test_an_interrupt_ends_both_threads() -> None:
    ends = Ends()

    def interrupted(piece: ChunkRange, memory: torch.Tensor) -> None:
        raise KeyboardInterrupt

    ends.place = interrupted  # type: ignore[method-assign]
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        courier(ends, parcels=10, slots=2).run()
    assert threading.active_count() == before


def test_an_interrupt_ends_a_reader_that_is_far_ahead() -> None:
    """It has more to say than a socket takes, and nobody listens any more."""
    ends = Ends()

    def interrupted(piece: ChunkRange, memory: torch.Tensor) -> None:
        ends.begun[600].wait(1.0)
        raise KeyboardInterrupt

    ends.place = interrupted  # type: ignore[method-assign]
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        courier(ends, parcels=700, slots=700).run()
    assert threading.active_count() == before
