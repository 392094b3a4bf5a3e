"""Which rank wrote which box of a tensor, as rectangles to draw. Tensors that are cut alike share a picture. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice, product

from ckpt.format.box import num_chunks
from ckpt.format.manifest import ArrayEntry

MOST_CELLS = 48
"""Along each side of a picture. Of a tensor of more chunks a picture shows some, evenly spread."""
_MOST_DRAWN = 400
_MOST_BEHIND = 32
"""Chunks behind a cell, along the dimensions that a picture does not show, that are looked at."""


@dataclass(frozen=True)
class Rectangle:
    """Cells that the same ranks wrote.

    Attributes:
        x, y, width, height: parts of the whole picture, from 0 to 1.
        ranks: one, or several where the dimensions that are not shown are cut as well.
        box: first and last index along each dimension that is shown.
    """

    x: float
    y: float
    width: float
    height: float
    ranks: tuple[int, ...]
    box: tuple[tuple[int, int], ...]

    @property
    def look(self) -> tuple[object, ...]:
        """What the eye tells apart."""
        return self.ranks, *(round(side, 2) for side in (self.x, self.y, self.width, self.height))


@dataclass(frozen=True)
class Picture:
    """The picture of a tensor.

    Attributes:
        dims: that it shows, from top to bottom and from left to right; one: from left to right.
        is_whole: whether it shows all cuts: no other dimension is cut, and no chunk is left out.
    """

    dims: tuple[int, ...]
    rectangles: tuple[Rectangle, ...]
    is_whole: bool


@dataclass
class Alike:
    """Tensors whose pictures are equal but for their lengths, those of most bytes first.

    Attributes:
        ranks: that wrote them.
        dims: that are cut among them.
    """

    picture: Picture
    ranks: tuple[int, ...]
    dims: tuple[int, ...]
    names: list[str]


def alike(entries: Mapping[str, ArrayEntry]) -> list[Alike]:
    """Draw the arrays that several ranks wrote, one picture for all that are cut alike: those of most bytes first."""
    by_cut: dict[object, list[str]] = {}
    for name, entry in entries.items():
        if _is_cut(entry):
            assert entry.grid is not None
            by_cut.setdefault((num_chunks(entry.shape, entry.grid), entry.writers), []).append(name)
    by_bytes = sorted(by_cut.values(), key=lambda names: -_num_bytes(names, entries))
    found: dict[object, Alike] = {}
    for names in by_bytes[:_MOST_DRAWN]:
        entry = entries[max(names, key=lambda name: entries[name].num_bytes)]
        picture = picture_of(entry)
        look = len(entry.shape), picture.dims, tuple(rectangle.look for rectangle in picture.rectangles)
        ranks = tuple(sorted({rank for rank, _, _ in entry.writers}))
        found.setdefault(look, Alike(picture, ranks, _cut_dims(entry), [])).names.extend(names)
    for group in found.values():
        group.names.sort(key=lambda name: -entries[name].num_bytes)
    return sorted(found.values(), key=lambda one: -_num_bytes(one.names, entries))


def _num_bytes(names: Iterable[str], entries: Mapping[str, ArrayEntry]) -> int:
    return sum(entries[name].num_bytes for name in names)


def _is_cut(entry: ArrayEntry) -> bool:
    """Whether several ranks wrote chunks of it."""
    return (
        entry.grid is not None and 0 not in entry.shape and any(run[0] != entry.writers[0][0] for run in entry.writers)
    )


def _cut_dims(entry: ArrayEntry) -> tuple[int, ...]:
    assert entry.grid is not None
    return tuple(dim for dim, count in enumerate(num_chunks(entry.shape, entry.grid)) if count > 1)


def picture_of(entry: ArrayEntry) -> Picture:
    """Draw an array that several ranks wrote: its first two dimensions that are cut, or one and its neighbor."""
    assert entry.grid is not None
    counts = num_chunks(entry.shape, entry.grid)
    dims = shown_dims(counts)
    strides = [math.prod(counts[dim + 1 :]) for dim in range(len(counts))]
    hidden = [
        [chunk * strides[dim] for chunk in _spread(count, _MOST_BEHIND)]
        for dim, count in enumerate(counts)
        if dim not in dims
    ]
    behind = [sum(place) for place in islice(product(*hidden), _MOST_BEHIND)]
    steps = [_spread(counts[dim], MOST_CELLS if len(dims) == 2 else MOST_CELLS**2) for dim in dims]
    rows, columns = ([[0]] + [[chunk * strides[dim] for chunk in step] for step, dim in zip(steps, dims, strict=True)])[-2:]
    cells = {
        (row, column): tuple(sorted({entry.writer_of(above + left + number) for number in behind}))
        for (row, above), (column, left) in product(enumerate(rows), enumerate(columns))
    }
    borders = [
        [*(chunk * entry.grid[dim] for chunk in step), entry.shape[dim]] for step, dim in zip(steps, dims, strict=True)
    ]
    is_whole = all(dim in dims or count == 1 for dim, count in enumerate(counts)) and len(cells) == math.prod(counts)
    return Picture(dims, tuple(_rectangle(ranks, spans, borders) for ranks, spans in _merged(cells)), is_whole)


def shown_dims(counts: Sequence[int]) -> tuple[int, ...]:
    """Return the one or two dimensions that a picture shows, in order: those that are cut come first.

    Example:
        >>> shown_dims((4,)), shown_dims((1, 2)), shown_dims((1, 3, 1, 2)), shown_dims((2, 1, 1))
        ((0,), (0, 1), (1, 3), (0, 1))
    """
    by_cut = sorted(range(len(counts)), key=lambda dim: (counts[dim] == 1, dim))
    return tuple(sorted(by_cut[:2]))


def _spread(count: int, most: int) -> list[int]:
    """All chunk numbers along a dimension, or `most` of them, evenly spread."""
    return list(range(count)) if count <= most else [at * count // most for at in range(most)]


def _merged(cells: dict[tuple[int, int], tuple[int, ...]]) -> Iterator[tuple[tuple[int, ...], tuple[range, range]]]:
    """Join neighbors of equal writers: along rows, then equal stretches of rows below each other."""
    while cells:
        (row, column), ranks = next(iter(cells.items()))
        right = next(at for at in count(column) if cells.get((row, at)) != ranks)
        below = next(at for at in count(row) if any(cells.get((at, at_column)) != ranks for at_column in range(column, right)))
        rows, columns = range(row, below), range(column, right)
        for place in product(rows, columns):
            del cells[place]
        yield ranks, (rows, columns)


def _rectangle(ranks: tuple[int, ...], spans: tuple[range, range], borders: Sequence[Sequence[int]]) -> Rectangle:
    edges = [(border[span.start], border[span.stop]) for span, border in zip(spans[-len(borders) :], borders, strict=True)]
    parts = [(low / border[-1], (high - low) / border[-1]) for (low, high), border in zip(edges, borders, strict=True)]
    (y, height), (x, width) = [(0.0, 1.0), *parts][-2:]
    return Rectangle(x, y, width, height, ranks, tuple((low, high - 1) for low, high in edges))
