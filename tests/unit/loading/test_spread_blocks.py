"""Properties of the plan of a two-stage load: any chunks, any stretches, any ranks."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.loading.two_stage.spread_blocks import (
    PIECE_ALIGNMENT,
    ChunkRange,
    Spread,
    Want,
    first_wanted_bytes,
    part_of,
    plan_spread,
)

UNIT = 16
SLOT_BYTES = 4 * PIECE_ALIGNMENT


@st.composite
def _stretches(draw: st.DrawFn, length: int) -> tuple[tuple[int, int], ...]:
    """Ascending, apart, of whole units but for the end of the chunk."""
    borders = [*range(0, length, UNIT), length]
    picked = sorted(draw(st.sets(st.sampled_from(borders), max_size=6)))
    return tuple(zip(picked[::2], picked[1::2], strict=False))


@st.composite
def _wants(draw: st.DrawFn) -> list[tuple[list[Want], tuple[int, ...]]]:
    """Up to four different tables, shared out over up to six ranks."""
    chunks = draw(
        st.dictionaries(
            st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 3)),
            st.tuples(st.integers(1, 700), st.booleans()),
            max_size=4,
        )
    )
    owner = draw(st.lists(st.integers(0, 3), min_size=1, max_size=6))
    tables = []
    for number in sorted(set(owner)):
        rows = []
        for (file, offset), (length, whole) in sorted(chunks.items()):
            stretches = draw(_stretches(length))
            if stretches:
                rows.append(Want(file, offset, UNIT, whole, stretches))
        tables.append((rows, tuple(rank for rank, one in enumerate(owner) if one == number)))
    return tables


def _pieces_by_rank(spread: Spread) -> dict[int, list[ChunkRange]]:
    got: dict[int, list[ChunkRange]] = defaultdict(list)
    for rank, pieces in spread.own.items():
        got[rank] += pieces
    for block in spread.blocks:
        for rank in block.destinations:
            got[rank] += block.pieces
    return got


def _bytes_of(pieces: list[ChunkRange]) -> Counter[tuple[tuple[str, int], int]]:
    return Counter((piece.key, byte) for piece in pieces for byte in range(piece.start, piece.stop))


@pytest.mark.usefixtures("turns")
@given(_wants())
@settings(max_examples=25)
def test_every_rank_gets_each_byte_it_wants_once_and_no_other(wants: list[tuple[list[Want], tuple[int, ...]]]) -> None:
    got = _pieces_by_rank(plan_spread(wants, SLOT_BYTES))
    for rows, ranks in wants:
        wanted = [ChunkRange(want.key, start, stop) for want in rows for start, stop in want.stretches]
        for rank in ranks:
            assert _bytes_of(got[rank]) == _bytes_of(wanted)


@pytest.mark.usefixtures("turns")
@given(_wants())
@settings(max_examples=25)
def test_every_wanted_byte_is_read_once_in_the_group(wants: list[tuple[list[Want], tuple[int, ...]]]) -> None:
    spread = plan_spread(wants, SLOT_BYTES)
    read = [piece for pieces in spread.own.values() for piece in pieces]
    read += [piece for block in spread.blocks for piece in block.pieces]
    counted = _bytes_of(read)
    assert set(counted.values()) <= {1}
    wanted = [ChunkRange(want.key, a, b) for rows, _ in wants for want in rows for a, b in want.stretches]
    assert set(counted) == set(_bytes_of(wanted))


@pytest.mark.usefixtures("turns")
@given(_wants())
@settings(max_examples=25)
def test_every_wanted_byte_is_counted_by_one_rank(wants: list[tuple[list[Want], tuple[int, ...]]]) -> None:
    wanted = [ChunkRange(want.key, a, b) for rows, _ in wants for want in rows for a, b in want.stretches]
    ranks = [rank for _, some in wants for rank in some]
    assert sum(first_wanted_bytes(wants, rank) for rank in ranks) == len(_bytes_of(wanted))


@pytest.mark.usefixtures("turns")
@given(_wants())
@settings(max_examples=25)
def test_blocks_fit_travel_in_order_and_are_read_by_who_can(wants: list[tuple[list[Want], tuple[int, ...]]]) -> None:
    spread = plan_spread(wants, SLOT_BYTES)
    chunk_of = {want.key: want for rows, _ in wants for want in rows}
    decoder: dict[tuple[str, int], int] = {}
    for number, block in enumerate(spread.blocks):
        assert block.number == number
        assert 0 < block.num_bytes <= SLOT_BYTES
        ends = 0
        for at, piece in block.places():
            assert at % PIECE_ALIGNMENT == 0 and at >= ends and piece.start % UNIT == 0
            ends = at + piece.num_bytes
        assert ends <= block.num_bytes
        whole = [piece.key for piece in block.pieces if chunk_of[piece.key].whole]
        if whole:
            # Who decodes a chunk does it for all, and it must be one that knows where the chunk lies.
            assert decoder.setdefault(whole[0], block.reader) == block.reader
            assert any(block.reader in ranks for rows, ranks in wants for want in rows if want.key == whole[0])
        else:
            assert block.reader in block.destinations


@pytest.mark.usefixtures("turns")
@given(_wants(), st.lists(st.integers(0, 2), min_size=6, max_size=6))
@settings(max_examples=25)
def test_on_every_host_one_rank_has_a_block_and_the_others_take_it_from_there(
    wants: list[tuple[list[Want], tuple[int, ...]]], host_of: list[int]
) -> None:
    """The parts of all ranks agree: a block that one sends or gives, another receives or takes."""
    ranks = sorted(rank for _, some in wants for rank in some)
    hosts = [here for host in range(3) if (here := [rank for rank in ranks if host_of[rank] == host])]
    spread = plan_spread(wants, SLOT_BYTES)
    parts = {rank: part_of(spread, hosts, rank) for rank in ranks}
    for block in spread.blocks:
        for here in hosts:
            having = [rank for rank in here if block.number in parts[rank].takers]
            assert len(having) == any(rank in here for rank in (block.reader, *block.destinations))
            taken_by = {taker for rank in having for taker in parts[rank].takers[block.number]}
            assert taken_by == set(block.destinations) & set(here) - set(having)
        carrying = {rank for rank in ranks if block.number in parts[rank].network}
        holders = {rank for rank in ranks if block.number in parts[rank].takers}
        assert carrying == (holders if len(holders) > 1 else set())
    for rank, part in parts.items():
        gives = Counter({giver: sum(rank in some for some in parts[giver].takers.values()) for giver in ranks})
        assert part.sources == +gives


@pytest.mark.parametrize(
    "sizes", [[4096] * 40, [16] * 500 + [4096] * 30, [160] * 60 + [256] * 60], ids=["alike", "tail", "gaps"]
)
def test_ranks_that_want_the_same_read_equally_much(sizes: list[int]) -> None:
    rows = [Want(f"chunk-{n:03}", 0, UNIT, False, ((0, size),)) for n, size in enumerate(sizes)]
    spread = plan_spread([(rows, (0, 1, 2))], SLOT_BYTES)
    load = Counter(dict.fromkeys(range(3), 0))
    for block in spread.blocks:
        load[block.reader] += sum(piece.num_bytes for piece in block.pieces)
    assert sum(load.values()) == sum(sizes)
    assert max(load.values()) - min(load.values()) <= 2 * SLOT_BYTES


def test_each_rank_reads_one_stretch_and_all_read_at_a_time() -> None:
    rows = [Want(f"chunk-{n:02}", 0, UNIT, False, ((0, 4096),)) for n in range(40)]
    spread = plan_spread([(rows, (0, 1, 2))], SLOT_BYTES)
    assert [block.reader for block in spread.blocks[:6]] == [0, 1, 2, 0, 1, 2]
    of_rank = [
        [piece for block in spread.blocks if block.reader == rank for piece in block.pieces] for rank in range(3)
    ]
    in_turn = [(piece.key, piece.start) for pieces in of_rank for piece in pieces]
    assert in_turn == sorted(in_turn)


def test_who_has_much_of_its_own_reads_less_for_others() -> None:
    shared = Want("shared", 0, UNIT, False, ((0, 4096),))
    mine = Want("mine", 0, UNIT, False, ((0, 2048),))
    spread = plan_spread([([shared, mine], (0,)), ([shared], (1,))], SLOT_BYTES)
    read_by_0 = sum(piece.num_bytes for block in spread.blocks if block.reader == 0 for piece in block.pieces)
    assert spread.own == {0: [ChunkRange(("mine", 0), 0, 2048)]}
    assert read_by_0 == 1024


def test_small_pieces_travel_together() -> None:
    rows = [Want("packed", 64 * n, UNIT, False, ((0, 48),)) for n in range(100)]
    spread = plan_spread([(rows, (0, 1))], SLOT_BYTES)
    assert len(spread.blocks) == 25  # four pieces of 48 bytes, each taking 64, in every block
