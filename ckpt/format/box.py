"""Boxes: rectangles of a global array, in elements, and their intersections. Pure."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, product
from typing import NamedTuple

from ckpt.errors import ShapeMismatchError


class Box(NamedTuple):
    """A rectangle of a global array: where it starts and how long its sides are, in elements.

    A 0-dim array has one box, `Box((), ())`, of one element.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into the global array."""
        return tuple(slice(o, o + n) for o, n in zip(self.offsets, self.shape, strict=True))

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    def relative_to(self, outer: Box) -> Box:
        """This box in the coordinates of `outer`, which contains it."""
        return Box(tuple(o - p for o, p in zip(self.offsets, outer.offsets, strict=True)), self.shape)

    def contains(self, inner: Box) -> bool:
        return all(
            o <= i and i + m <= o + n
            for o, n, i, m in zip(self.offsets, self.shape, inner.offsets, inner.shape, strict=True)
        )


def whole(shape: tuple[int, ...]) -> Box:
    """Return the box that covers an array of this shape."""
    return _whole(tuple(shape))


@lru_cache(maxsize=4096)
def _whole(shape: tuple[int, ...]) -> Box:
    """Cached: the tensors of a model have few distinct shapes."""
    return Box((0,) * len(shape), shape)


def cut_box(
    shape: tuple[int, ...], sides: Sequence[int], coordinate: Sequence[int], cuts: Sequence[tuple[int, int] | None]
) -> Box | None:
    """Return the box of an array that one rank of a mesh holds, whose axes cut it one after the other as `torch.chunk` does.

    Args:
        sides: ranks along each axis of the mesh.
        coordinate: of the rank in the mesh.
        cuts: for each axis of the mesh (dimension of the array, split factor); None: it does not cut. A split factor above 1 says that the
            axes after it have cut this dimension into so many parts before: FSDP cuts what tensor parallelism has left.

    Returns:
        None: what the rank holds lies apart, because axes before it have cut the parts.

    Example:
        >>> [cut_box((7,), (3, 2), (row, 0), ((0, 2), (0, 1))).shape for row in range(3)]
        [(2,), (2,), (0,)]
    """
    offsets, lengths = [0] * len(shape), list(shape)
    for dim in {cut[0] for cut in cuts if cut is not None}:
        order: list[int] = []  # of the axes
        for axis in reversed(range(len(cuts))):
            cut = cuts[axis]
            if cut is None or cut[0] != dim or sides[axis] == 1:
                continue
            before, parts = 0, 1
            while parts < cut[1] and before < len(order):
                parts *= sides[order[before]]
                before += 1
            if parts != cut[1]:
                return None
            order.insert(before, axis)
        for axis in order:
            length = -(-lengths[dim] // sides[axis])
            offset = min(coordinate[axis] * length, lengths[dim])
            offsets[dim] += offset
            lengths[dim] = min(length, lengths[dim] - offset)
    return Box(tuple(offsets), tuple(lengths))


def overlap(saved: Box, wanted: Box) -> Box | None:
    """Return the part of `wanted` that `saved` can supply, or None if they do not meet.

    Global coordinates throughout, in elements, not bytes. A side of length 0 meets nothing.

    Args:
        saved: box that one rank wrote; shape (s_0, ..., s_{n-1}).
        wanted: box that this rank needs; shape (w_0, ..., w_{n-1}), same n.

    Raises:
        ShapeMismatchError: the boxes differ in number of dimensions.

    Example:
        >>> overlap(Box((0, 0), (4, 5)), Box((3, 0), (3, 5)))
        Box(offsets=(3, 0), shape=(1, 5))

    Source: interval intersection dimension by dimension, as in torch.distributed.checkpoint.resharding.
    """
    if len(saved.shape) != len(wanted.shape):
        raise ShapeMismatchError(f"saved box {saved.shape} and wanted box {wanted.shape} differ in dimensions")
    if saved == wanted:
        return None if 0 in wanted.shape else wanted
    offsets = []
    shape = []
    for a, n, b, m in zip(saved.offsets, saved.shape, wanted.offsets, wanted.shape, strict=True):
        start = a if a > b else b
        stop = min(a + n, b + m)
        if stop <= start:
            return None
        offsets.append(start)
        shape.append(stop - start)
    return Box(tuple(offsets), tuple(shape))


def first_overlap(boxes: Collection[Box]) -> tuple[Box, Box] | None:
    """Find two of the boxes that overlap; None: no two do. All have one number of dimensions.

    Sweeps along the dimension in which the fewest boxes are open at once; only open boxes are compared.
    """
    dims = len(next(iter(boxes)).shape)
    if dims == 0:
        return None
    sweep = min(range(dims), key=lambda d: _most_open(boxes, d))
    open_boxes: list[tuple[int, int, Box]] = []
    for count, box in enumerate(sorted(boxes, key=lambda b: b.offsets[sweep])):
        while open_boxes and open_boxes[0][0] <= box.offsets[sweep]:
            heapq.heappop(open_boxes)
        for _, _, other in open_boxes:
            if overlap(other, box) is not None:
                return other, box
        heapq.heappush(open_boxes, (box.offsets[sweep] + box.shape[sweep], count, box))
    return None


def _most_open(boxes: Collection[Box], d: int) -> int:
    """The number of boxes that are open at once in a sweep along dimension `d`, at most."""
    borders = [(box.offsets[d], 1) for box in boxes] + [(box.offsets[d] + box.shape[d], -1) for box in boxes]
    return max(accumulate(step for _, step in sorted(borders)))


def num_chunks(shape: tuple[int, ...], grid: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of chunks along each dimension of an array under a regular `grid` (the chunk shape, sides >= 1)."""
    return tuple(-(-n // c) for n, c in zip(shape, grid, strict=True))


def chunk_box(shape: tuple[int, ...], grid: tuple[int, ...], number: int) -> Box:
    """Return the box of chunk `number` (row-major), clipped to the array: the last chunk of a dimension may be shorter."""
    counts = num_chunks(shape, grid)
    index = []
    for count in reversed(counts):
        number, at = divmod(number, count)
        index.append(at)
    offsets = tuple(i * c for i, c in zip(reversed(index), grid, strict=True))
    return Box(offsets, tuple(min(c, n - o) for c, n, o in zip(grid, shape, offsets, strict=True)))


def chunks_meeting(shape: tuple[int, ...], grid: tuple[int, ...], wanted: Box) -> Iterator[int]:
    """Yield, in row-major order, the numbers of the chunks that share an element with `wanted`."""
    counts = num_chunks(shape, grid)
    if 0 in wanted.shape or 0 in shape:
        return
    ranges = [range(o // c, -(-(o + n) // c)) for o, n, c in zip(wanted.offsets, wanted.shape, grid, strict=True)]
    for index in product(*ranges):
        number = 0
        for i, count in zip(index, counts, strict=True):
            number = number * count + i
        yield number


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[tuple[Box, int]]:
    """Cut a run of consecutive elements of an array, in row-major order, into boxes.

    The boxes come in the order of their elements, and each one's elements, in its own row-major order, are consecutive too: so
    the run, kept as one flat piece of memory, holds every box contiguously. Of n >= 1 dimensions there are at most 2n - 1.

    Args:
        shape: of the array; () has one element.
        start: the run's first element, counted from the array's first.
        stop: one past its last; equal to `start` for none.

    Returns:
        (box in the array's coordinates, its first element counted from `start`) per box; [] for an empty run.

    Raises:
        ShapeMismatchError: the run leaves the array.

    Example:
        >>> flat_boxes((3, 4), 2, 9)
        [(Box(offsets=(0, 2), shape=(1, 2)), 0), (Box(offsets=(1, 0), shape=(1, 4)), 2), (Box(offsets=(2, 0), shape=(1, 1)), 6)]
    """
    if start == stop:
        return []
    if not 0 <= start < stop <= math.prod(shape):
        raise ShapeMismatchError(f"elements {start} to {stop} are not a run of an array of shape {shape}")
    placed = []
    at = 0
    for box in _run(shape, start, stop):
        placed.append((box, at))
        at += box.num_elements
    return placed


def _run(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of a run that is not empty: the end of a first row, whole rows, the start of a last row."""
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, begins = divmod(start, row)
    last, ends = divmod(stop, row)
    if begins and first == last:
        yield from _in_row(first, shape, begins, ends)
        return
    if begins:
        yield from _in_row(first, shape, begins, row)
        first += 1
    if first < last:
        yield Box((first, *(0,) * len(shape[1:])), (last - first, *shape[1:]))
    if ends:
        yield from _in_row(last, shape, 0, ends)


def _in_row(number: int, shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    for box in _run(shape[1:], start, stop):
        yield Box((number, *box.offsets), (1, *box.shape))
