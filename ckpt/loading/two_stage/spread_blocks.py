"""Who reads which bytes for whom: a pure function of what every rank wants, so every rank finds the same answer.

What one rank alone wants, it reads for itself. What several want is cut into blocks, and each block is read by one of
them, each rank in the end as many bytes as the others, and each in one stretch of the storage.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

Ranks = tuple[int, ...]
ChunkKey = tuple[str, int]
"""File and offset: no two chunks share them."""

PIECE_ALIGNMENT = 64
"""Every piece begins at a multiple of it in its block, so that its elements can be used where they are."""


@dataclass(frozen=True, slots=True)
class Want:
    """What a rank wants of one chunk.

    Attributes:
        unit: bytes that are read as one.
        whole: the chunk is decoded as one, by whoever reads of it.
        stretches: ascending [start, stop), of whole units but for the end of the chunk.
    """

    file: str
    offset: int
    unit: int
    whole: bool
    stretches: tuple[tuple[int, int], ...]

    @property
    def key(self) -> ChunkKey:
        return self.file, self.offset

    def to_json(self) -> list[object]:
        return [self.file, self.offset, self.unit, self.whole, self.stretches]

    @classmethod
    def from_json(cls, row: Sequence[object]) -> Want:
        file, offset, unit, whole, stretches = row
        assert isinstance(file, str) and isinstance(offset, int) and isinstance(unit, int)
        assert isinstance(stretches, list)
        return cls(file, offset, unit, bool(whole), tuple((start, stop) for start, stop in stretches))


@dataclass(frozen=True, slots=True)
class ChunkRange:
    """The bytes [start, stop) of one chunk."""

    key: ChunkKey
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class SpreadBlock:
    """Bytes that travel together.

    Attributes:
        number: its place in the order in which all blocks travel.
        reader: reads it from storage.
        destinations: who wants all of it, ascending; the reader need not be one of them where a chunk is decoded as one.
    """

    number: int
    reader: int
    destinations: Ranks
    pieces: tuple[ChunkRange, ...]

    def places(self) -> Iterator[tuple[int, ChunkRange]]:
        """Each piece, and where it begins in the memory that the block travels in."""
        at = 0
        for piece in self.pieces:
            yield at, piece
            at += _room(piece.num_bytes)

    @property
    def room(self) -> int:
        """The bytes of memory it takes."""
        return sum(_room(piece.num_bytes) for piece in self.pieces)


@dataclass(slots=True)
class Spread:
    """How everything that the ranks of one group want gets to them.

    Attributes:
        own: rank -> what it reads for itself, in storage order.
        blocks: in the order in which they travel: the first of each reader, then the second of each; each reader's as they lie in
            storage.
    """

    own: dict[int, list[ChunkRange]] = field(default_factory=lambda: defaultdict(list))
    blocks: list[SpreadBlock] = field(default_factory=list)


def plan_spread(wants: Sequence[tuple[Sequence[Want], Ranks]], slot_bytes: int) -> Spread:
    """Plan who reads what.

    Args:
        wants: what ranks want, and which ranks want just that; every rank is there once.
        slot_bytes: room of a block; at least the largest unit, and a multiple of `PIECE_ALIGNMENT`.
    """
    spread = Spread()
    load: dict[int, int] = defaultdict(int)
    shared: list[tuple[_Unread, int]] = []
    for key, unit, whole, segments in _segments(wants):
        anybody = tuple(sorted({rank for ranks, _, _ in segments for rank in ranks}))
        for ranks, start, stop in segments:
            if len(ranks) == 1 and (not whole or len(anybody) == 1):
                spread.own[ranks[0]].append(ChunkRange(key, start, stop))
                load[ranks[0]] += stop - start
            else:
                shared.append((_Unread(anybody if whole else (), ranks, [ChunkRange(key, start, stop)]), unit))
    blocks = sorted(_packed(shared, slot_bytes), key=lambda one: (one.pieces[0].key, one.pieces[0].start))
    readers = _in_one_stretch(blocks, _dealt(blocks, load))
    turn: Counter[int] = Counter()
    travel: list[tuple[int, int, _Unread]] = []
    for reader, block in zip(readers, blocks, strict=True):
        travel.append((turn[reader], reader, block))
        turn[reader] += 1
    travel.sort(key=lambda one: one[:2])
    spread.blocks = [
        SpreadBlock(number, reader, block.destinations, tuple(block.pieces))
        for number, (_, reader, block) in enumerate(travel)
    ]
    return spread


class _Unread(NamedTuple):
    """What several ranks want and nobody reads yet: a block, or what will be parts of some.

    Attributes:
        decoders: who may decode the chunk, all of it, where that is done as one; else nobody.
    """

    decoders: Ranks
    destinations: Ranks
    pieces: list[ChunkRange]

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)


def _dealt(blocks: Sequence[_Unread], load: dict[int, int]) -> list[int]:
    """Give each block to who has the fewest bytes to read so far, of those who may read it; return the readers.

    Args:
        load: bytes that each rank has to read so far; updated.
    """
    decoder: dict[ChunkKey, int] = {}
    readers = []
    for block in blocks:
        key = block.pieces[0].key
        reader = decoder.get(key) if block.decoders else None
        if reader is None:
            reader = min(block.decoders or block.destinations, key=lambda rank: (load[rank], rank))
        if block.decoders:
            decoder[key] = reader
        load[reader] += block.num_bytes
        readers.append(reader)
    return readers


def _in_one_stretch(blocks: Sequence[_Unread], readers: Sequence[int]) -> list[int]:
    """Deal the blocks that the same ranks want anew, each rank as many bytes, but in one stretch: disks like to be read so."""
    shares: dict[Ranks, Counter[int]] = defaultdict(Counter)
    for block, reader in zip(blocks, readers, strict=True):
        if not block.decoders:
            shares[block.destinations][reader] += block.num_bytes
    ends = {
        destinations: (sorted(share), list(accumulate(share[r] for r in sorted(share))))
        for destinations, share in shares.items()
    }
    before: Counter[Ranks] = Counter()
    dealt = []
    for block, reader in zip(blocks, readers, strict=True):
        if not block.decoders:
            ranks, until = ends[block.destinations]
            reader = ranks[bisect_right(until, before[block.destinations] + block.num_bytes // 2)]
            before[block.destinations] += block.num_bytes
        dealt.append(reader)
    return dealt


_Segment = tuple[Ranks, int, int]


def _segments(
    wants: Sequence[tuple[Sequence[Want], Ranks]],
) -> Iterator[tuple[ChunkKey, int, bool, list[_Segment]]]:
    """Yield every wanted chunk in storage order, cut where the ranks that want it change."""
    of_chunk: dict[ChunkKey, list[tuple[Want, Ranks]]] = defaultdict(list)
    for rows, ranks in wants:
        for want in rows:
            of_chunk[want.key].append((want, ranks))
    for key in sorted(of_chunk):
        asked = of_chunk[key]
        yield key, asked[0][0].unit, asked[0][0].whole, list(_cut(asked))


def _cut(asked: Sequence[tuple[Want, Ranks]]) -> Iterator[_Segment]:
    if len({want.stretches for want, _ in asked}) == 1:  # nearly always
        ranks = tuple(sorted(rank for _, some in asked for rank in some))
        for start, stop in asked[0][0].stretches:
            yield ranks, start, stop
        return
    turns: dict[int, set[int]] = defaultdict(set)  # border -> those of `asked` that begin or end there
    for number, (want, _) in enumerate(asked):
        for border in chain.from_iterable(want.stretches):
            turns[border] ^= {number}
    wanting: set[int] = set()
    for start, stop in pairwise(sorted(turns)):
        wanting ^= turns[start]
        if wanting:
            yield tuple(sorted(rank for number in wanting for rank in asked[number][1])), start, stop


def _packed(shared: Sequence[tuple[_Unread, int]], slot_bytes: int) -> Iterator[_Unread]:
    """Fill blocks: pieces of one block are wanted by the same ranks and, where a chunk is decoded as one, of one chunk.

    Args:
        shared: what several ranks want, each of one piece of any length, and the unit in which that may be cut.
    """
    filling: dict[tuple[Ranks, ChunkKey | None], _Unread] = {}
    room: Counter[tuple[Ranks, ChunkKey | None]] = Counter()
    for (decoders, destinations, (whole_piece,)), unit in shared:
        assert unit <= slot_bytes and slot_bytes % PIECE_ALIGNMENT == 0
        kind = destinations, whole_piece.key if decoders else None
        at = whole_piece.start
        while at < whole_piece.stop:
            missing = whole_piece.stop - at
            fits = missing if missing <= room[kind] else room[kind] // unit * unit
            if fits:
                filling[kind].pieces.append(ChunkRange(whole_piece.key, at, at + fits))
                room[kind] -= _room(fits)
                at += fits
                continue
            if kind in filling:
                yield filling[kind]
            filling[kind], room[kind] = _Unread(decoders, destinations, []), slot_bytes
    yield from filling.values()


def _room(num_bytes: int) -> int:
    return -(-num_bytes // PIECE_ALIGNMENT) * PIECE_ALIGNMENT
