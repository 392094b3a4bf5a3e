"""Who writes which box, who reads which: pure functions of everybody's addresses, so every rank finds the same answer.

No files, no collectives, no torch. A save is planned from the address tables of all ranks: every shard is written exactly once,
by one of the ranks that hold it, balanced by bytes; every array gets one regular grid, and every chunk of it one writer. Where
shard borders cut through a chunk, the other holders send their slivers to its writer.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from ckpt.box import Box, chunk_box, chunks_meeting, num_chunks, overlap, whole
from ckpt.errors import ShapeMismatchError, ShardingError
from ckpt.mapping import Address

PACK_BELOW_BYTES = 64 << 10
"""Arrays whose global size is smaller share a packed array."""
CHUNK_MIN_BYTES = 1 << 20
CHUNK_MAX_BYTES = 64 << 20


_Part = tuple[Box, tuple[int, ...]]
"""A part of a chunk and the ranks that hold it."""
_Small = tuple[int, str, Box]
"""Bytes, array name and box of a packed leaf."""
_Work = dict[tuple[int, ...], list[tuple[int, Any]]]
"""Ranks that may do it -> (bytes, what)."""


@dataclass(frozen=True, slots=True)
class Table:
    """What a rank, or several ranks alike, contribute: the addresses of their tensors and the aliases among them."""

    addresses: tuple[Address, ...]
    aliases: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class ChunkTask:
    """One chunk this rank writes.

    Attributes:
        name: of the array.
        number: row-major chunk number.
        box: of the chunk, clipped to the array, in global coordinates.
        own: boxes of this rank's that supply it.
        slivers: (rank, box) of the parts that other ranks send first.
    """

    name: str
    number: int
    box: Box
    own: tuple[Box, ...]
    slivers: tuple[tuple[int, Box], ...] = ()


@dataclass(frozen=True, slots=True)
class PackTask:
    """One small box this rank writes into its packed array of the same component, prefix and data type."""

    name: str
    box: Box


@dataclass(frozen=True, slots=True)
class SliverTask:
    """One part of a chunk that this rank sends to the rank that writes the chunk."""

    to: int
    name: str
    number: int
    box: Box


@dataclass(slots=True)
class PlannedArray:
    """How one array of the checkpoint will be stored. `grid` is None for a packed one.

    Attributes:
        writers: rank that writes each chunk, by row-major number.
        packs: box -> the rank that writes it, of a packed array.
        cut: chunk number -> its parts and who holds them, for the chunks that no rank holds whole as one box.
    """

    dtype: str
    shape: tuple[int, ...]
    grid: tuple[int, ...] | None
    writers: list[int] = field(default_factory=list)
    packs: dict[Box, int] = field(default_factory=dict)
    cut: dict[int, list[_Part]] = field(default_factory=dict)

    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """The writers as runs (rank, first chunk, number of chunks)."""
        runs: list[tuple[int, int, int]] = []
        for number, rank in enumerate(self.writers):
            if runs and runs[-1][0] == rank:
                runs[-1] = (rank, runs[-1][1], runs[-1][2] + 1)
            else:
                runs.append((rank, number, 1))
        return tuple(runs)

    def sliver_sender(self, number: int, ranks: tuple[int, ...]) -> int:
        """Which holder of a part sends it: spread over the chunks, known to all without a word."""
        return ranks[number % len(ranks)]


@dataclass(slots=True)
class RankPlan:
    """What one rank does in a save, in this order: send slivers, receive them, write chunks, write packed boxes."""

    chunks: list[ChunkTask] = field(default_factory=list)
    packs: list[PackTask] = field(default_factory=list)
    sends: list[SliverTask] = field(default_factory=list)


@dataclass(slots=True)
class SavePlan:
    """The whole save, the same on every rank.

    Attributes:
        arrays: array name -> how it is stored, in the order of the tables.
        aliases: second name -> first name.
    """

    arrays: dict[str, PlannedArray]
    aliases: dict[str, str]

    @property
    def sends_slivers(self) -> bool:
        """Whether any chunk needs bytes of a rank that does not write it."""
        return any(
            array.writers[number] not in ranks
            for array in self.arrays.values()
            for number, parts in array.cut.items()
            for _, ranks in parts
        )

    def of_rank(self, rank: int) -> RankPlan:
        """What this rank does. Chunks and sends go by array and chunk number, so a receiver knows the order of a sender."""
        mine = RankPlan()
        for name, array in self.arrays.items():
            mine.packs += [PackTask(name, box) for box, writer in array.packs.items() if writer == rank]
            for number, writer in enumerate(array.writers):
                if writer == rank:
                    mine.chunks.append(self._chunk_task(name, number, rank))
            for number in sorted(array.cut):
                writer = array.writers[number]
                for part, ranks in array.cut[number]:
                    if writer not in ranks and array.sliver_sender(number, ranks) == rank:
                        mine.sends.append(SliverTask(writer, name, number, part))
        return mine

    def _chunk_task(self, name: str, number: int, rank: int) -> ChunkTask:
        array = self.arrays[name]
        assert array.grid is not None
        box = chunk_box(array.shape, array.grid, number)
        if number not in array.cut:
            return ChunkTask(name, number, box, (box,))
        parts = array.cut[number]
        own = tuple(part for part, ranks in parts if rank in ranks)
        slivers = tuple((array.sliver_sender(number, ranks), part) for part, ranks in parts if rank not in ranks)
        return ChunkTask(name, number, box, own, slivers)


def plan_save(
    tables: Sequence[Table],
    table_of_rank: Sequence[int],
    item_bytes: Callable[[str], int],
    *,
    pack_below_bytes: int = PACK_BELOW_BYTES,
    chunk_min_bytes: int = CHUNK_MIN_BYTES,
    chunk_max_bytes: int = CHUNK_MAX_BYTES,
) -> SavePlan:
    """Plan who writes what.

    Args:
        tables: the distinct tables; ranks that hold alike share one, so a replicated model is looked at once.
        table_of_rank: for every rank, which table is its own.
        item_bytes: data type name -> bytes of one element.

    Raises:
        ShardingError: the boxes of an array leave a hole or overlap without being equal.
        ShapeMismatchError: ranks disagree about the shape or the data type of an array.
    """
    plan = SavePlan({}, {})
    for alias, first in (pair for table in tables for pair in table.aliases):
        plan.aliases[alias] = first
    chunks: _Work = defaultdict(list)
    small: dict[tuple[str, str, tuple[int, ...]], list[tuple[int, str, Box]]] = defaultdict(list)
    for name, (address, holders) in _gather(tables, table_of_rank).items():
        dtype, shape = address.dtype, address.global_shape
        item = item_bytes(dtype)
        boxes = _tiles(name, shape, holders)
        if math.prod(shape) * item < pack_below_bytes:
            plan.arrays[name] = PlannedArray(dtype, shape, None)
            for box, ranks in boxes.items():
                small[name.partition("/")[0], dtype, ranks].append((box.num_elements * item, name, box))
            continue
        grid = choose_grid(shape, item, boxes, chunk_min_bytes, chunk_max_bytes)
        plan.arrays[name] = PlannedArray(dtype, shape, grid, [-1] * math.prod(num_chunks(shape, grid)))
        _queue_chunks(chunks, plan.arrays[name], boxes, item)
    load = [0] * len(table_of_rank)
    for (array, number), writer in _spread(chunks, load):
        array.writers[number] = writer
    for bundle, writer in _spread(_bundles(small, chunk_min_bytes), load):
        for _, name, box in bundle:
            plan.arrays[name].packs[box] = writer
    return plan


def choose_grid(
    shape: tuple[int, ...], item: int, boxes: Mapping[Box, object], min_bytes: int, max_bytes: int
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


def needed_chunks(shape: tuple[int, ...], grid: tuple[int, ...], wanted: Box) -> Iterator[tuple[int, Box, Box]]:
    """Yield (chunk number, its box, the part of it that is wanted) for a read, in storage order."""
    for number in chunks_meeting(shape, grid, wanted):
        box = chunk_box(shape, grid, number)
        part = overlap(box, wanted)
        assert part is not None
        yield number, box, part


def _gather(
    tables: Sequence[Table], table_of_rank: Sequence[int]
) -> dict[str, tuple[Address, dict[Box, list[tuple[int, ...]]]]]:
    """Array name -> (an address of it, {box: the rank sets that hold it}), checking that all agree on shape and type."""
    ranks_of: list[list[int]] = [[] for _ in tables]
    for rank, number in enumerate(table_of_rank):
        ranks_of[number].append(rank)
    arrays: dict[str, tuple[Address, dict[Box, list[tuple[int, ...]]]]] = {}
    for table, ranks in zip(tables, map(tuple, ranks_of), strict=True):
        for address in table.addresses:
            known = arrays.get(address.name)
            if known is None:
                arrays[address.name] = (address, {address.box: [ranks]})
                continue
            first, holders = known
            if (first.dtype, first.global_shape) != (address.dtype, address.global_shape):
                raise ShapeMismatchError(
                    f"{address.name} is {address.dtype} {list(address.global_shape)} on rank {ranks[0]} and {first.dtype} "
                    f"{list(first.global_shape)} on another; the ranks must agree on what they save under one name"
                )
            holders.setdefault(address.box, []).append(ranks)
    return arrays


def _tiles(name: str, shape: tuple[int, ...], holders: dict[Box, list[tuple[int, ...]]]) -> dict[Box, tuple[int, ...]]:
    """Check that the boxes make up the array exactly; return box -> sorted holders, empty boxes left out."""
    total = math.prod(shape)
    if total == 0:
        return {whole(shape): tuple(sorted({rank for sets in holders.values() for ranks in sets for rank in ranks}))}
    boxes = {
        box: sets[0] if len(sets) == 1 else tuple(sorted({rank for ranks in sets for rank in ranks}))
        for box, sets in holders.items()
        if box.num_elements
    }
    covered = sum(box.num_elements for box in boxes)
    meeting = _first_overlap(boxes) if len(boxes) > 1 else None
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
    return boxes


def _first_overlap(boxes: Mapping[Box, object]) -> tuple[Box, Box] | None:
    """Sweep along the first dimension that separates boxes; only boxes open at the same place are compared."""
    dims = len(next(iter(boxes)).shape)
    if dims == 0:
        return None
    sweep = max(range(dims), key=lambda d: len({box.offsets[d] for box in boxes}))
    open_boxes: list[tuple[int, int, Box]] = []
    for count, box in enumerate(sorted(boxes, key=lambda b: b.offsets[sweep])):
        while open_boxes and open_boxes[0][0] <= box.offsets[sweep]:
            heapq.heappop(open_boxes)
        for _, _, other in open_boxes:
            if overlap(other, box) is not None:
                return other, box
        heapq.heappush(open_boxes, (box.offsets[sweep] + box.shape[sweep], count, box))
    return None


def _queue_chunks(work: _Work, array: PlannedArray, boxes: Mapping[Box, tuple[int, ...]], item: int) -> None:
    """Queue every chunk with the ranks that may write it: all who hold all of it, else those who hold most."""
    assert array.grid is not None
    parts_of: dict[int, list[_Part]] = defaultdict(list)
    for held, ranks in boxes.items():
        for number, box, part in needed_chunks(array.shape, array.grid, held):
            if part == box:
                work[ranks].append((box.num_elements * item, (array, number)))
            else:
                parts_of[number].append((part, ranks))
    for number, parts in parts_of.items():
        array.cut[number] = parts
        held_elements: dict[int, int] = defaultdict(int)
        for part, ranks in parts:
            for rank in ranks:
                held_elements[rank] += part.num_elements
        most = max(held_elements.values())
        candidates = tuple(sorted(rank for rank, held in held_elements.items() if held == most))
        work[candidates].append((sum(part.num_elements for part, _ in parts) * item, (array, number)))


def _bundles(small: Mapping[tuple[str, str, tuple[int, ...]], Sequence[_Small]], bundle_bytes: int) -> _Work:
    """Queue small boxes in bundles, so that a reader of many small tensors needs few ranks' indexes, not all."""
    work: _Work = defaultdict(list)
    for (_, _, ranks), entries in small.items():
        bundle: list[_Small] = []
        size = 0
        for entry in entries:
            bundle.append(entry)
            size += entry[0]
            if size >= bundle_bytes:
                work[ranks].append((size, bundle))
                bundle, size = [], 0
        if bundle:
            work[ranks].append((size, bundle))
    return work


def _spread(work: _Work, load: list[int]) -> Iterator[tuple[Any, int]]:
    """Yield (work, rank): largest first, to the least loaded rank that may; the least flexible work is placed first.

    Args:
        load: bytes given to each rank so far; updated.
    """
    for candidates in sorted(work, key=lambda ranks: (len(ranks), ranks)):
        heap = [(load[rank], rank) for rank in candidates]
        heapq.heapify(heap)
        for num_bytes, item in sorted(work[candidates], key=lambda entry: -entry[0]):
            before, rank = heap[0]
            heapq.heapreplace(heap, (before + num_bytes, rank))
            load[rank] = before + num_bytes
            yield item, rank


def _split(
    shape: tuple[int, ...], grid: tuple[int, ...], bound: Sequence[bool], item: int, max_bytes: int
) -> tuple[int, ...]:
    """Cut chunks above `max_bytes` along their first dimensions; a dimension with borders only by a divisor of its side."""
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
