"""Which rank wrote which box of a tensor, as rectangles to draw. Tensors that are cut alike share a picture. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

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
        look = len(entry.shape), picture.dims, tuple(one.look for one in picture.rectangles)
        ranks = tuple(sorted({rank for rank, _, _ in entry.writers}))
        found.setdefault(look, Alike(picture, ranks, _cut_dims(entry), [])).names.extend(names)
    for one in found.values():
        one.names.sort(key=lambda name: -entries[name].num_bytes)
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
    steps = [_spread(counts[dim], MOST_CELLS if len(dims) == 2 else MOST_CELLS**2) for dim in dims]
    hidden = [_spread(count, _MOST_BEHIND) if dim not in dims else [0] for dim, count in enumerate(counts)]
    num_hidden = math.prod(count for dim, count in enumerate(counts) if dim not in dims)
    behind = [at for at, _ in zip(product(*hidden), range(_MOST_BEHIND), strict=False)]
    cells = {
        place: _writers(entry, counts, dims, [step[at] for step, at in zip(steps, place, strict=True)], behind)
        for place in product(*(range(len(step)) for step in steps))
    }
    borders = [
        [
            min(step[at] * entry.grid[dim], entry.shape[dim]) if at < len(step) else entry.shape[dim]
            for at in range(len(step) + 1)
        ]
        for step, dim in zip(steps, dims, strict=True)
    ]
    rectangles = tuple(
        _rectangle(ranks, spans, borders) for ranks, spans in _merged(cells, [len(step) for step in steps])
    )
    is_whole = num_hidden == 1 and all(len(step) == counts[dim] for step, dim in zip(steps, dims, strict=True))
    return Picture(dims, rectangles, is_whole)


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


def _writers(
    entry: ArrayEntry, counts: Sequence[int], dims: Sequence[int], at: Sequence[int], behind: Iterable[Sequence[int]]
) -> tuple[int, ...]:
    """The ranks that wrote the chunks of one cell."""
    ranks = set()
    for one in behind:
        place = list(one)
        for dim, chunk in zip(dims, at, strict=True):
            place[dim] = chunk
        number = 0
        for chunk, count in zip(place, counts, strict=True):
            number = number * count + chunk
        ranks.add(entry.writer_of(number))
    return tuple(sorted(ranks))


_Span = tuple[int, int]


def _merged(
    cells: Mapping[tuple[int, ...], tuple[int, ...]], sides: Sequence[int]
) -> list[tuple[tuple[int, ...], list[_Span]]]:
    """Join neighbors of equal writers: along rows, then equal stretches of rows below each other."""
    rows = sides[0] if len(sides) == 2 else 1
    done: list[tuple[tuple[int, ...], list[_Span]]] = []
    open_: dict[tuple[_Span, tuple[int, ...]], int] = {}
    for row in range(rows):
        stretches: list[tuple[_Span, tuple[int, ...]]] = []
        for column in range(sides[-1]):
            ranks = cells[(row, column)] if len(sides) == 2 else cells[(column,)]
            if stretches and stretches[-1][1] == ranks:
                stretches[-1] = (stretches[-1][0][0], column + 1), ranks
            else:
                stretches.append(((column, column + 1), ranks))
        going_on = {stretch: open_.pop(stretch, row) for stretch in stretches}
        done += [(ranks, [(first, row), span]) for (span, ranks), first in open_.items()]
        open_ = going_on
    done += [(ranks, [(first, rows), span]) for (span, ranks), first in open_.items()]
    done.sort(key=lambda one: one[1])
    return done if len(sides) == 2 else [(ranks, spans[1:]) for ranks, spans in done]


def _rectangle(ranks: tuple[int, ...], spans: Sequence[_Span], borders: Sequence[Sequence[int]]) -> Rectangle:
    edges = [(border[first], border[last]) for (first, last), border in zip(spans, borders, strict=True)]
    parts = [(low / border[-1], (high - low) / border[-1]) for (low, high), border in zip(edges, borders, strict=True)]
    (y, height), (x, width) = parts if len(parts) == 2 else [(0.0, 1.0), parts[0]]
    return Rectangle(x, y, width, height, ranks, tuple((low, high - 1) for low, high in edges))
