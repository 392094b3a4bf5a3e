"""Plan a two-stage load: which rank reads which bytes for which ranks. Pure functions of the wants of all ranks: `plan_spread` is equal on
every rank, `part_of` picks the part of one.

    wants of all ranks --plan_spread--> own reads and blocks --part_of--> the part of one rank

The wants of a rank (`wants_of`) are the bytes that it wants of each chunk, a value that all ranks exchange, and the places of these bytes
in its tensors. A rank reads for itself what no other rank wants. Bytes that several ranks want are cut into blocks, and one of these ranks
reads each block. All ranks read about as many bytes, each in one contiguous range of the storage.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import torch

from ckpt.format.dtypes import item_bytes
from ckpt.format.gc_pause import gc_paused
from ckpt.format.records import ALIGNMENT, ChunkExtent
from ckpt.loading.direct import ChunkReader
from ckpt.loading.strategy import ReadRequest, Stored, StoredPart, by_chunk, bytes_of
from ckpt.storage.wanted_bytes import WantedBytes

ChunkKey = tuple[str, int]
"""File and offset: no two chunks share them."""


class Want(NamedTuple):
    """The bytes that a rank wants of one chunk. Travels as JSON.

    Attributes:
        unit: bytes that are read as one.
        whole: the chunk is decoded as one, by the rank that reads of it.
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


class ChunkRange(NamedTuple):
    """The bytes [start, stop) of one chunk."""

    key: ChunkKey
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class RankWants:
    """Everything that one rank wants.

    Attributes:
        parts: chunk -> parts of the requests in it.
        places: chunk -> where its bytes belong; not of chunks in `held`.
        wants: of the chunks that are read from storage, for all ranks to know.
        held: chunks that lie in memory of this host: this rank reads them itself, and no rank spreads them.
        devices: of the rank's tensors.
        num_bytes: that the requests want.
    """

    parts: Mapping[ChunkKey, Sequence[StoredPart]]
    places: Mapping[ChunkKey, WantedBytes]
    wants: Sequence[Want]
    held: Sequence[ChunkRange]
    devices: AbstractSet[torch.device]
    num_bytes: int

    def are_cached(self, reader: ChunkReader) -> bool:
        """Return whether the page cache of this host has all that is to be read from storage."""
        chunks = [self.parts[want.key][0].chunk for want in self.wants]
        return all(map(reader.is_cached, chunks, [want.stretches for want in self.wants]))

    def by_itself(self) -> RankWants:
        """Return the same, with nothing to spread: this rank reads all of it."""
        held = [*self.held, *(ChunkRange(want.key, 0, want.stretches[-1][1]) for want in self.wants)]
        return replace(self, places={}, wants=(), held=held)


@gc_paused()
def wants_of(requests: Sequence[ReadRequest], checkpoint: Stored, *, verify: bool) -> RankWants:
    """Find the chunks that requests want bytes of, and which bytes.

    Raises:
        CorruptCheckpointError: an index contradicts the manifest, or a part does not lie in its chunk.
    """
    parts = {(some[0].chunk.file, some[0].chunk.offset): some for some in by_chunk(requests, checkpoint)}
    places, wants, held = {}, [], []
    for key, some in parts.items():
        chunk = some[0].chunk
        if chunk.file in checkpoint.held:
            held.append(ChunkRange(key, 0, chunk.length))
            continue
        unit = chunk.block_bytes if chunk.raw and verify else ALIGNMENT
        if not chunk.raw:  # it travels decoded
            array = some[0].array
            chunk = ChunkExtent(*key, math.prod(array.grid) * item_bytes(array.dtype), ())
        places[key] = WantedBytes(chunk, [want.part for want in some])
        if stretches := places[key].stretches(unit):
            wants.append(Want(*key, unit, not some[0].chunk.raw, tuple(stretches)))
    devices = {request.out.device for request in requests}
    return RankWants(parts, places, wants, held, devices, bytes_of(requests))


Ranks = tuple[int, ...]

PIECE_ALIGNMENT = 64
"""Every piece begins at a multiple of it in its block, so that its elements can be used where they are."""


@dataclass(frozen=True, slots=True)
class SpreadBlock:
    """Bytes that travel together.

    Attributes:
        number: its place in the order in which all blocks travel.
        reader: the rank that reads it from storage.
        destinations: the ranks that want all of it, ascending; the reader need not be one of them where a chunk is decoded as one.
    """

    number: int
    reader: int
    destinations: Ranks
    pieces: tuple[ChunkRange, ...]

    def places(self) -> Iterator[tuple[int, ChunkRange]]:
        """Yield each piece, and the byte at which it begins in the memory that the block travels in."""
        at = 0
        for piece in self.pieces:
            yield at, piece
            at += _padded(piece.num_bytes)

    @property
    def num_bytes(self) -> int:
        """The bytes of memory it takes, padding included."""
        return sum(_padded(piece.num_bytes) for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Spread:
    """The reads and blocks of one group of ranks.

    Attributes:
        own: rank -> ranges that it reads for itself, in storage order.
        blocks: in the order in which they travel: the first of each reader, then the second of each; those of one reader in
            storage order.
    """

    own: Mapping[int, Sequence[ChunkRange]]
    blocks: Sequence[SpreadBlock]


@dataclass(frozen=True, slots=True)
class RankPart:
    """Everything that one rank does in one spread; known before a byte moves.

    Attributes:
        blocks: all blocks of the group, by number.
        own: ranges that this rank reads for itself.
        reads: blocks that it reads.
        network: number of each block that it sends to other hosts, or receives from one -> the ranks that receive it.
        takers: number of each block that passes through a slot of this rank -> the neighbours that take it from there.
        sources: neighbour -> how many blocks this rank takes from its slots.
        num_wanted: how many blocks this rank wants.
    """

    rank: int
    neighbours: Sequence[int]
    blocks: Sequence[SpreadBlock]
    own: Sequence[ChunkRange]
    reads: Sequence[SpreadBlock]
    network: Mapping[int, Sequence[int]]
    takers: Mapping[int, AbstractSet[int]]
    sources: Counter[int]
    num_wanted: int


def part_of(spread: Spread, hosts: Sequence[Sequence[int]], rank: int, held: Sequence[ChunkRange] = ()) -> RankPart:
    """Return the part of one rank. On every host, the ranks take a block from a slot of one of them: its reader, or its receiver.

    Args:
        hosts: the ranks of the group by host; a host of its own for every rank, where ranks share no memory.
        held: ranges in memory of this host that the rank reads for itself besides.
    """
    host_of = {member: (ranks, index) for ranks in hosts for index, member in enumerate(ranks)}

    def source(block: SpreadBlock, taker: int) -> int:
        """The rank on the taker's host whose slot it takes the block from."""
        (there, index), (here, _) = host_of[block.reader], host_of[taker]
        return block.reader if here is there else here[index % len(here)]

    neighbours = host_of[rank][0]
    network, takers = {}, {}
    sources: Counter[int] = Counter()
    for block in spread.blocks:
        receivers = sorted({source(block, taker) for taker in block.destinations} - {block.reader})
        if receivers and rank in (block.reader, *receivers):
            network[block.number] = receivers
        takers_here = set(block.destinations).intersection(neighbours)
        mine = source(block, rank)
        if mine == rank and (takers_here or block.reader == rank):
            takers[block.number] = takers_here - {rank}
        elif rank in takers_here:
            sources[mine] += 1
    return RankPart(
        rank,
        neighbours,
        spread.blocks,
        own=[*held, *spread.own.get(rank, ())],
        reads=[block for block in spread.blocks if block.reader == rank],
        network=network,
        takers=takers,
        sources=sources,
        num_wanted=sum(rank in block.destinations for block in spread.blocks),
    )


def plan_spread(wants: Sequence[tuple[Sequence[Want], Ranks]], slot_bytes: int) -> Spread:
    """Assign every wanted byte to the rank that reads it.

    Args:
        wants: a set of wants, and the ranks that have just these; every rank is there once.
        slot_bytes: the most bytes of a block; at least the largest unit, and a multiple of `PIECE_ALIGNMENT`.
    """
    own: dict[int, list[ChunkRange]] = defaultdict(list)
    load: dict[int, int] = defaultdict(int)
    shared: list[tuple[_Unread, int]] = []
    for key, unit, whole, segments in _segments(wants):
        candidates = tuple(sorted({rank for ranks, _, _ in segments for rank in ranks}))
        for ranks, start, stop in segments:
            if len(ranks) == 1 and (not whole or len(candidates) == 1):
                own[ranks[0]].append(ChunkRange(key, start, stop))
                load[ranks[0]] += stop - start
            else:
                shared.append((_Unread(candidates if whole else (), ranks, [ChunkRange(key, start, stop)]), unit))
    blocks = sorted(_packed(shared, slot_bytes), key=lambda one: (one.pieces[0].key, one.pieces[0].start))
    readers = _in_one_range(blocks, _balanced(blocks, load))
    turn: Counter[int] = Counter()
    travel: list[tuple[int, int, _Unread]] = []
    for reader, block in zip(readers, blocks, strict=True):
        travel.append((turn[reader], reader, block))
        turn[reader] += 1
    travel.sort(key=lambda one: one[:2])
    in_order = [
        SpreadBlock(number, reader, block.destinations, tuple(block.pieces))
        for number, (_, reader, block) in enumerate(travel)
    ]
    return Spread(own, in_order)


def first_wanted_bytes(wants: Sequence[tuple[Sequence[Want], Ranks]], rank: int) -> int:
    """Count the bytes that a rank wants and no rank below it does: of all ranks together, the bytes that any of them wants."""
    segments = chain.from_iterable(segments for *_, segments in _segments(wants))
    return sum(stop - start for ranks, start, stop in segments if ranks[0] == rank)


class _Unread(NamedTuple):
    """Bytes that several ranks want and no rank reads yet: a block, or parts of blocks to be.

    Attributes:
        decoders: the ranks that may decode the chunk, where that is done as one; else ().
    """

    decoders: Ranks
    destinations: Ranks
    pieces: list[ChunkRange]

    @property
    def num_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self.pieces)


def _balanced(blocks: Sequence[_Unread], load: dict[int, int]) -> list[int]:
    """Assign each block to the rank with the fewest bytes to read so far, of those that may read it; return the readers.

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


def _in_one_range(blocks: Sequence[_Unread], readers: Sequence[int]) -> list[int]:
    """Assign blocks with the same destinations anew: as many bytes to each reader, but contiguous, which disks read faster."""
    shares: dict[Ranks, Counter[int]] = defaultdict(Counter)
    for block, reader in zip(blocks, readers, strict=True):
        if not block.decoders:
            shares[block.destinations][reader] += block.num_bytes
    ends = {
        destinations: (sorted(share), list(accumulate(share[r] for r in sorted(share))))
        for destinations, share in shares.items()
    }
    before: Counter[Ranks] = Counter()
    assigned = []
    for block, reader in zip(blocks, readers, strict=True):
        if not block.decoders:
            ranks, until = ends[block.destinations]
            reader = ranks[bisect_right(until, before[block.destinations] + block.num_bytes // 2)]
            before[block.destinations] += block.num_bytes
        assigned.append(reader)
    return assigned


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
    """Fill blocks: the pieces of a block have the same destinations and, where a chunk is decoded as one, are of one chunk.

    Args:
        shared: bytes that several ranks want, each of one piece of any length, and the unit in which that may be cut.
    """
    filling: dict[tuple[Ranks, ChunkKey | None], _Unread] = {}
    free: Counter[tuple[Ranks, ChunkKey | None]] = Counter()
    for (decoders, destinations, (whole_piece,)), unit in shared:
        assert unit <= slot_bytes and slot_bytes % PIECE_ALIGNMENT == 0
        kind = destinations, whole_piece.key if decoders else None
        at = whole_piece.start
        while at < whole_piece.stop:
            missing = whole_piece.stop - at
            fits = missing if missing <= free[kind] else free[kind] // unit * unit
            if fits:
                filling[kind].pieces.append(ChunkRange(whole_piece.key, at, at + fits))
                free[kind] -= _padded(fits)
                at += fits
                continue
            if kind in filling:
                yield filling[kind]
            filling[kind], free[kind] = _Unread(decoders, destinations, []), slot_bytes
    yield from filling.values()


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // PIECE_ALIGNMENT) * PIECE_ALIGNMENT
