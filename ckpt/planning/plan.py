"""Plan a save or a load: which rank writes and reads which box. Pure functions of all ranks' addresses, equal on every rank.

No files, no collectives, no torch. A save is planned from the address tables of all ranks: one of the holders writes each shard,
balanced by bytes; every array gets one regular grid, and every chunk one writer. Where shard borders cut through a chunk, the other
holders send their parts of it to the writer.

Ranks repeat each other, and so do the layers of a model. A table stores names apart from places, each once, so that common halves
are sent once and processed once. Arrays that are cut and held alike are planned once: the cost grows with the distinct places of a state
and with its chunks, not with ranks times tensors.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain, groupby, repeat
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ckpt.errors import ShapeMismatchError, ShardingError
from ckpt.format import strict_json
from ckpt.format.box import Box, chunk_box, chunks_meeting, first_overlap, num_chunks, overlap, whole

Ranks = tuple[int, ...]
Names = tuple[tuple[str, int], ...]
"""(Array name, number of its place), in the order of the state."""
Whereabouts = tuple[tuple[int, int], ...]
"""Positions of a name: (number of the list of names, number of the place that goes with it)."""


class LeafPlacement(NamedTuple):
    """An address without its name. Tensors that are cut alike share it."""

    dtype: str
    global_shape: tuple[int, ...]
    box: Box


@dataclass(frozen=True, slots=True)
class TablePart:
    """The tensors of one component on one rank, by name and by place.

    Ranks repeat each other in halves: a sharding neighbour has the same names at other places, another pipeline stage other names at
    the same places.

    Attributes:
        names: every tensor, with the number of its place.
        places: each once, in the order in which `names` first needs them.
    """

    names: Names
    places: tuple[LeafPlacement, ...]

    @classmethod
    def of(cls, addresses: Iterable[Address]) -> TablePart:
        places: dict[tuple[Any, ...], int] = {}
        names = tuple((address.name, places.setdefault(address[1:], len(places))) for address in addresses)
        return cls(names, tuple(LeafPlacement(*place) for place in places))


@dataclass(frozen=True, slots=True)
class Table:
    """The addresses and aliases of one rank, or of several ranks that hold alike."""

    parts: tuple[TablePart, ...]
    aliases: tuple[tuple[str, str], ...] = ()


def table_to_json(table: Table) -> list[Any]:
    """Split a table into pieces of JSON: the aliases, then for each component its names and its places."""
    pieces: list[Any] = [["aliases", table.aliases]]
    for part in table.parts:
        pieces.append(["names", [name for name, _ in part.names], [place for _, place in part.names]])
        pieces.append(["places", part.places])
    return pieces


def piece_from_json(tree: Any) -> tuple[Any, ...]:
    """Parse a piece of a table. The caller parses pieces that tables share once."""
    match tree:
        case ["names", names, places]:
            return tuple(zip(names, places, strict=True))
        case ["places", rows]:
            return strict_json.convert(rows, tuple[LeafPlacement, ...])
        case _:
            return tuple((alias, first) for alias, first in tree[1])


def table_of_pieces(pieces: Sequence[tuple[Any, ...]]) -> Table:
    """Join a table from its pieces, in the order of `table_to_json`."""
    aliases, *halves = pieces
    return Table(tuple(TablePart(*half) for half in zip(halves[::2], halves[1::2], strict=True)), aliases)


class Holdings:
    """The holders of each box, from the tables of all ranks.

    Attributes:
        where: array name -> its positions. Names with equal positions are cut and held alike.
    """

    def __init__(self, tables: Sequence[Table], table_of_rank: Sequence[int]) -> None:
        ranks_of: list[list[int]] = [[] for _ in tables]
        for rank, number in enumerate(table_of_rank):
            ranks_of[number].append(rank)
        by_names: dict[Names, dict[tuple[LeafPlacement, ...], list[int]]] = {}
        for table, ranks in zip(tables, ranks_of, strict=True):
            for part in table.parts:
                by_names.setdefault(part.names, {}).setdefault(part.places, []).extend(ranks)
        found: dict[str, list[tuple[int, int]]] = {}
        for number, names in enumerate(by_names):
            for name, place in names:
                found.setdefault(name, []).append((number, place))
        self.where: dict[str, Whereabouts] = {name: tuple(at) for name, at in found.items()}
        self._places = [
            [(places, tuple(sorted(ranks))) for places, ranks in by_places.items()] for by_places in by_names.values()
        ]

    def look_up(self, name: str) -> tuple[str, tuple[int, ...], dict[Box, Ranks]]:
        """Return data type, global shape, and box -> holding ranks, without the empty boxes of a larger array."""
        held = [(places[place], ranks) for number, place in self.where[name] for places, ranks in self._places[number]]
        (dtype, shape, _), first_ranks = held[0]
        holders: dict[Box, list[Ranks]] = {}
        for (other_dtype, other_shape, box), ranks in held:
            if (other_dtype, other_shape) != (dtype, shape):
                raise ShapeMismatchError(
                    f"{name} is {other_dtype} {list(other_shape)} on rank {ranks[0]} and {dtype} {list(shape)} on rank "
                    f"{first_ranks[0]}; all ranks must save the same data type and shape under one name"
                )
            if box.num_elements or 0 in shape:
                holders.setdefault(whole(shape) if 0 in shape else box, []).append(ranks)
        return dtype, shape, {box: _union(sets) for box, sets in holders.items()}


def _union(sets: Sequence[Ranks]) -> Ranks:
    return sets[0] if len(sets) == 1 else tuple(sorted({rank for ranks in sets for rank in ranks}))


class Address(NamedTuple):
    """The place of one rank's leaf in a global array. Sharing patterns compute it; plans see nothing else.

    The fourth part of an address, the replica id, is not stored: it is the position of a rank among those that hold an
    equal (name, box), and plan.py counts it there.

    Attributes:
        name: `<component>/<prefix><key>`, unique in a checkpoint.
        dtype: Zarr v3 data type name.
        global_shape: of the whole array, in elements.
        box: the part this rank holds, in global coordinates.
    """

    name: str
    dtype: str
    global_shape: tuple[int, ...]
    box: Box


PACK_BELOW_BYTES = 64 << 10
"""Arrays of smaller global size share a packed array."""
CHUNK_MIN_BYTES = 1 << 20
CHUNK_MAX_BYTES = 64 << 20

Value = TypeVar("Value")

_Part = tuple[Box, Ranks]
"""A part of a chunk, and its holders."""
_Borders = tuple[tuple[int, ...], int, tuple[Box, ...]]
"""Shape, bytes of an element, boxes: they determine the layout of an array."""


@dataclass(frozen=True, slots=True)
class ChunkTask:
    """One chunk that this rank writes.

    Attributes:
        name: of the array.
        number: row-major chunk number.
        box: of the chunk, clipped to the array, in global coordinates.
        own: parts of it that this rank holds.
        received_parts: (rank, box) of the parts that other ranks send before.
    """

    name: str
    number: int
    box: Box
    own: tuple[Box, ...]
    received_parts: tuple[tuple[int, Box], ...] = ()


class PackTask(NamedTuple):
    """One small box that this rank writes into one of its packed arrays, of equal component, prefix and data type."""

    name: str
    box: Box


@dataclass(frozen=True, slots=True)
class SendTask:
    """One part of a chunk that this rank sends to the rank that writes the chunk."""

    to: int
    name: str
    number: int
    box: Box


@dataclass(slots=True)
class PlannedArray:
    """The storage plan of one array. `grid` is None for a packed one.

    Attributes:
        writers: rank that writes each chunk, by row-major number.
        packs: box -> the rank that writes it, of a packed array.
        cut: chunk number -> its parts and their holders, for the chunks that no rank holds as one box; shared by arrays that are
            cut alike.
    """

    dtype: str
    shape: tuple[int, ...]
    grid: tuple[int, ...] | None
    writers: list[int] = field(default_factory=list)
    packs: dict[Box, int] = field(default_factory=dict)
    cut: Mapping[int, Sequence[_Part]] = field(default_factory=dict)

    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """Return the writers as runs (rank, first chunk, number of chunks)."""
        writers = np.asarray(self.writers, dtype=np.int64)
        starts = np.flatnonzero(np.diff(writers, prepend=-1))
        counts = np.diff(starts, append=len(writers))
        return tuple(zip(writers[starts].tolist(), starts.tolist(), counts.tolist(), strict=True))

    def part_sender(self, number: int, ranks: tuple[int, ...]) -> int:
        """Return the holder that sends a part: spread over the chunks, equal on all ranks without communication."""
        return ranks[number % len(ranks)]


@dataclass(slots=True)
class RankPlan:
    """The tasks of one rank in a save, in this order: send parts of chunks, receive them, write chunks, write packed boxes."""

    chunks: list[ChunkTask] = field(default_factory=list)
    packs: list[PackTask] = field(default_factory=list)
    sends: list[SendTask] = field(default_factory=list)


@dataclass(slots=True)
class SavePlan:
    """The plan of a whole save, equal on every rank.

    Attributes:
        arrays: array name -> storage plan, in the order of the tables.
        aliases: second name -> first name.
        sends_parts: whether any chunk needs bytes of a rank that does not write it.
    """

    arrays: dict[str, PlannedArray]
    aliases: dict[str, str]
    sends_parts: bool = False

    def of_rank(self, rank: int) -> RankPlan:
        """Return the tasks of a rank. Chunks and sends are ordered by array and chunk number, so a receiver knows the sender's order."""
        mine = RankPlan()
        for name, array in self.arrays.items():
            mine.packs += [PackTask(name, box) for box, writer in array.packs.items() if writer == rank]
            for number, writer in enumerate(array.writers):
                if writer == rank:
                    mine.chunks.append(self._chunk_task(name, number, rank))
            for number in sorted(array.cut):
                writer = array.writers[number]
                for part, ranks in array.cut[number]:
                    if writer not in ranks and array.part_sender(number, ranks) == rank:
                        mine.sends.append(SendTask(writer, name, number, part))
        return mine

    def _chunk_task(self, name: str, number: int, rank: int) -> ChunkTask:
        array = self.arrays[name]
        assert array.grid is not None
        box = chunk_box(array.shape, array.grid, number)
        if number not in array.cut:
            return ChunkTask(name, number, box, (box,))
        parts = array.cut[number]
        own = tuple(part for part, ranks in parts if rank in ranks)
        received_parts = tuple((array.part_sender(number, ranks), part) for part, ranks in parts if rank not in ranks)
        return ChunkTask(name, number, box, own, received_parts)


def plan_save(
    tables: Sequence[Table],
    table_of_rank: Sequence[int],
    item_bytes: Callable[[str], int],
    *,
    pack_below_bytes: int = PACK_BELOW_BYTES,
    chunk_min_bytes: int = CHUNK_MIN_BYTES,
    chunk_max_bytes: int = CHUNK_MAX_BYTES,
) -> SavePlan:
    """Plan a save: which rank writes each chunk and each small box.

    Args:
        tables: the distinct tables; ranks that hold alike share one.
        table_of_rank: for every rank, the number of its table.
        item_bytes: data type name -> bytes of one element.

    Raises:
        ShardingError: the boxes of an array leave a hole or overlap without being equal, or ranks disagree about a tie.
        ShapeMismatchError: ranks disagree about the shape or the data type of an array.
    """
    holdings = Holdings(tables, table_of_rank)
    plan = SavePlan({}, settled_aliases(tables, table_of_rank, holdings))
    layouts: dict[_Borders, _Layout] = {}
    kinds: dict[Whereabouts, _Kind] = {}
    small: _SmallBoxes = defaultdict(list)
    for name, at in holdings.where.items():
        if name in plan.aliases:
            continue
        if at not in kinds:
            dtype, shape, boxes = holdings.look_up(name)
            borders = shape, item_bytes(dtype), tuple(boxes)
            if borders not in layouts:
                _require_tiles(name, shape, boxes)
                layouts[borders] = _lay_out(borders, pack_below_bytes, chunk_min_bytes, chunk_max_bytes)
            kinds[at] = _Kind(dtype, shape, boxes, layouts[borders])
        kind = kinds[at]
        array = plan.arrays[name] = kind.add_array()
        if array.grid is None:
            for box, ranks in kind.boxes.items():
                num_bytes = box.num_elements * item_bytes(kind.dtype)
                small[name.partition("/")[0], kind.dtype, ranks].append((num_bytes, array, box))
    load = [0] * len(table_of_rank)
    _deal(_chunk_lots(kinds.values(), item_bytes), load)
    _deal(_bundles(small, chunk_min_bytes), load)
    plan.sends_parts = any(
        array.writers[number] not in ranks
        for array in plan.arrays.values()
        for number, parts in array.cut.items()
        for _, ranks in parts
    )
    return plan


def choose_grid(
    shape: tuple[int, ...], item: int, boxes: Collection[Box], min_bytes: int, max_bytes: int
) -> tuple[int, ...]:
    """Choose the chunk shape of an array that is cut into `boxes`.

    The borders of the boxes decide: if a common divisor of them gives chunks of at least `min_bytes`, or no more chunks than
    boxes, no chunk is ever cut. Otherwise the grid goes by size, about one chunk per box, and borders cut through chunks. Chunks
    larger than `max_bytes` are split further, along borders' divisors, so that writing and reading spread.

    Args:
        item: bytes of one element.
    """
    borders = [sorted({b.offsets[d] for b in boxes} - {0}) for d in range(len(shape))]
    aligned = tuple(reduce(math.gcd, cuts) if cuts else n for cuts, n in zip(borders, shape, strict=True))
    if math.prod(aligned) * item >= min_bytes or math.prod(num_chunks(shape, aligned)) <= len(boxes):
        return _split(shape, aligned, [bool(cuts) for cuts in borders], item, max_bytes)
    counts = [len(cuts) + 1 for cuts in borders]
    while True:
        grid = tuple(-(-n // count) for n, count in zip(shape, counts, strict=True))
        if math.prod(grid) * item >= min_bytes or max(counts) == 1:
            return _split(shape, grid, [False] * len(shape), item, max_bytes)
        longest = counts.index(max(counts))
        counts[longest] = -(-counts[longest] // 2)


def runs_of(values: Iterable[Value]) -> Iterator[tuple[Value, int, int]]:
    """Yield each run of equal values: (value, position of the first, number of values)."""
    first = 0
    for value, run in groupby(values):
        count = sum(1 for _ in run)
        yield value, first, count
        first += count


def half_tied(alias: str, first: str, tied_on: int, alone_on: int) -> ShardingError:
    """The refusal of a tensor that is a second name on one rank and a tensor of its own on another."""
    return ShardingError(
        f"{alias} is tied to {first} on rank {tied_on}, not on rank {alone_on}, which holds it as a tensor of its own; tie the "
        "two on all ranks or on none"
    )


def needed_chunks(shape: tuple[int, ...], grid: tuple[int, ...], wanted: Box) -> Iterator[tuple[int, Box, Box]]:
    """Yield (chunk number, its box, the part of it that is wanted) for a read, in storage order."""
    for number in chunks_meeting(shape, grid, wanted):
        box = chunk_box(shape, grid, number)
        part = overlap(box, wanted)
        assert part is not None
        yield number, box, part


@dataclass(frozen=True, slots=True)
class _Layout:
    """The chunks of an array and the boxes that they lie in, independent of the holders.

    Attributes:
        grid: None for a packed array, which has no chunks of its own.
        inside: (box, {elements of a chunk: the numbers of the chunks of that size that lie in the box}).
        cut: chunk number -> (part, the box it is a part of), for the chunks that lie in no single box.
    """

    grid: tuple[int, ...] | None
    inside: Sequence[tuple[Box, Mapping[int, Sequence[int]]]] = ()
    cut: Mapping[int, Sequence[tuple[Box, Box]]] = field(default_factory=dict)


class _Kind:
    """Arrays of equal type and shape that are cut alike and held by the same ranks."""

    def __init__(self, dtype: str, shape: tuple[int, ...], boxes: Mapping[Box, Ranks], layout: _Layout) -> None:
        self.dtype = dtype
        self.shape = shape
        self.boxes = boxes
        self.layout = layout
        self.arrays: list[PlannedArray] = []
        self.cut = {number: tuple((part, boxes[box]) for part, box in parts) for number, parts in layout.cut.items()}

    def add_array(self) -> PlannedArray:
        grid = self.layout.grid
        count = 0 if grid is None else math.prod(num_chunks(self.shape, grid))
        self.arrays.append(PlannedArray(self.dtype, self.shape, grid, [-1] * count, cut=self.cut))
        return self.arrays[-1]


@dataclass(frozen=True, slots=True)
class _Lot:
    """Pieces of work of equal size and with the same candidate ranks: some chunks of each of some arrays, or one bundle.

    Attributes:
        bundle: small boxes that are packed together and count as one piece.
    """

    num_bytes: int
    arrays: Sequence[PlannedArray] = ()
    numbers: Sequence[int] = ()
    bundle: Sequence[tuple[PlannedArray, Box]] = ()

    @property
    def num_pieces(self) -> int:
        return len(self.arrays) * len(self.numbers) + (1 if self.bundle else 0)

    def give(self, writers: Iterator[int]) -> None:
        """Take a writer for each piece."""
        for array in self.arrays:
            for number in self.numbers:
                array.writers[number] = next(writers)
        if self.bundle:
            writer = next(writers)
            for array, box in self.bundle:
                array.packs[box] = writer


_Work = dict[Ranks, list[_Lot]]
"""Candidate ranks -> work."""
_SmallBoxes = dict[tuple[str, str, Ranks], list[tuple[int, PlannedArray, Box]]]
"""Component, data type, holders -> (bytes, array, box) of each box to pack."""


def settled_aliases(tables: Sequence[Table], table_of_rank: Sequence[int], holdings: Holdings) -> dict[str, str]:
    """Return second name -> first name, after a check that all ranks agree on it.

    Ties are found by memory, and empty pieces have none: a rank may list a tied tensor without elements under its own name.
    """
    claims: dict[str, tuple[str, int]] = {}
    for number, table in enumerate(tables):
        for alias, first in table.aliases:
            known, known_on = claims.setdefault(alias, (first, table_of_rank.index(number)))
            if known != first:
                raise ShardingError(
                    f"{alias} is tied to {known} on rank {known_on} and to {first} on rank {table_of_rank.index(number)}; all "
                    "ranks must tie the same tensors"
                )
    for alias, (first, tied_on) in claims.items():
        boxes = holdings.look_up(alias)[2] if alias in holdings.where else {}
        if boxes:
            raise half_tied(alias, first, tied_on, min(ranks[0] for ranks in boxes.values()))
        if first in claims or first not in holdings.where:
            raise ShardingError(
                f"{alias} is tied to {first} on rank {tied_on}, but no rank gives {first} itself, so neither would be saved; "
                "save the rank that holds it too, or untie them"
            )
    return {alias: first for alias, (first, _) in claims.items()}


def _require_tiles(name: str, shape: tuple[int, ...], boxes: Mapping[Box, Ranks]) -> None:
    """Refuse boxes that do not tile the array exactly."""
    total = math.prod(shape)
    covered = sum(box.num_elements for box in boxes)
    meeting = first_overlap(boxes) if len(boxes) > 1 else None
    if meeting is not None:
        a, b = meeting
        raise ShardingError(
            f"{name}: rank {boxes[a][0]} holds {_show(a)} and rank {boxes[b][0]} holds {_show(b)}, which overlap without being "
            f"equal; the shards of one tensor must tile its global shape {list(shape)}"
        )
    if covered != total:
        raise ShardingError(
            f"{name}: the ranks hold {covered} of the {total} elements of global shape {list(shape)}; the shards of one tensor "
            "must tile it. A sharded component whose state is spread over ranks must be saved by all of them."
        )


def _lay_out(borders: _Borders, pack_below_bytes: int, min_bytes: int, max_bytes: int) -> _Layout:
    """Choose the grid, and assign its chunks to the boxes that contain them."""
    shape, item, boxes = borders
    total_bytes = math.prod(shape) * item
    if total_bytes == 0 or total_bytes < pack_below_bytes:
        return _Layout(None)
    grid = choose_grid(shape, item, boxes, min_bytes, max_bytes)
    inside = []
    cut: dict[int, list[tuple[Box, Box]]] = defaultdict(list)
    for box in boxes:
        numbers: dict[int, list[int]] = defaultdict(list)
        for number, chunk, part in needed_chunks(shape, grid, box):
            if part == chunk:
                numbers[chunk.num_elements].append(number)
            else:
                cut[number].append((part, box))
        inside.append((box, numbers))
    return _Layout(grid, inside, cut)


def _chunk_lots(kinds: Iterable[_Kind], item_bytes: Callable[[str], int]) -> _Work:
    """Return every chunk with its candidate writers: the ranks that hold all of it, else those that hold most."""
    work: _Work = defaultdict(list)
    for kind in kinds:
        item = item_bytes(kind.dtype)
        for box, numbers_of in kind.layout.inside:
            for num_elements, numbers in numbers_of.items():
                work[kind.boxes[box]].append(_Lot(num_elements * item, kind.arrays, numbers))
        for number, parts in kind.cut.items():
            num_bytes = sum(part.num_elements for part, _ in parts) * item
            work[_holding_most(parts)].append(_Lot(num_bytes, kind.arrays, [number]))
    return work


def _holding_most(parts: Sequence[_Part]) -> Ranks:
    held: dict[int, int] = defaultdict(int)
    for part, ranks in parts:
        for rank in ranks:
            held[rank] += part.num_elements
    most = max(held.values())
    return tuple(sorted(rank for rank, elements in held.items() if elements == most))


def _bundles(small: _SmallBoxes, bundle_bytes: int) -> _Work:
    """Bundle small boxes, so that a reader of many small tensors needs the indexes of few ranks."""
    work: _Work = defaultdict(list)
    for (_, _, ranks), entries in small.items():
        bundle: list[tuple[PlannedArray, Box]] = []
        size = 0
        for num_bytes, array, box in entries:
            bundle.append((array, box))
            size += num_bytes
            if size >= bundle_bytes:
                work[ranks].append(_Lot(size, bundle=bundle))
                bundle, size = [], 0
        if bundle:
            work[ranks].append(_Lot(size, bundle=bundle))
    return work


def _deal(work: _Work, load: list[int]) -> None:
    """Assign every piece to a candidate rank: largest first, to the least loaded.

    Work with few candidates comes before work with many, and much work before little, which then evens out the load. Each rank gets its
    pieces of one size in one run, so that the manifest has few runs of writers.

    Args:
        load: bytes given to each rank so far; updated.
    """
    total = {ranks: sum(lot.num_bytes * lot.num_pieces for lot in lots) for ranks, lots in work.items()}
    for candidates in sorted(work, key=lambda ranks: (len(ranks), -total[ranks], ranks)):
        heap = [(load[rank], rank) for rank in candidates]
        heapq.heapify(heap)
        lots = sorted(work[candidates], key=lambda lot: -lot.num_bytes)
        for num_bytes, alike in groupby(lots, key=lambda lot: lot.num_bytes):
            same_size = list(alike)
            shares: dict[int, int] = defaultdict(int)
            for _ in range(sum(lot.num_pieces for lot in same_size)):
                before, rank = heap[0]
                heapq.heapreplace(heap, (before + num_bytes, rank))
                shares[rank] += 1
            writers = chain.from_iterable(repeat(rank, count) for rank, count in shares.items())
            for lot in same_size:
                lot.give(writers)
        for num_bytes, rank in heap:
            load[rank] = num_bytes


def _split(
    shape: tuple[int, ...], grid: tuple[int, ...], bound: Sequence[bool], item: int, max_bytes: int
) -> tuple[int, ...]:
    """Split chunks above `max_bytes` along their first dimensions; a dimension with borders only by a divisor of its side."""
    sides = list(grid)
    for d, is_bound in enumerate(bound):
        parts = -(-math.prod(sides) * item // max_bytes)
        if parts <= 1:
            break
        if is_bound:
            divisors = (p for p in range(parts, min(4 * parts, sides[d]) + 1) if sides[d] % p == 0)
            parts = next(divisors, 1)
        sides[d] = max(1, -(-sides[d] // min(parts, sides[d])))
    return tuple(sides)


def _show(box: Box) -> str:
    return "[" + ", ".join(f"{s.start}:{s.stop}" for s in box.slices) + "]"
