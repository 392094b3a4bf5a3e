"""Treemaps: a rectangle is divided into tiles whose areas are as given. Pure."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class Tile(NamedTuple):
    """A rectangle, in any unit."""

    x: float
    y: float
    width: float
    height: float


def divided(sizes: Sequence[float], area: Tile) -> list[Tile]:
    """Divide an area into one tile for each size, in their order: in two parts of about half the size, across its longer side, and so on.

    Args:
        sizes: positive. Tiles are closest to squares if the greatest is first.

    Example:
        >>> divided([2, 1, 1], Tile(0, 0, 4, 2))
        [Tile(x=0, y=0, width=2.0, height=2), Tile(x=2.0, y=0, width=2.0, height=1.0), Tile(x=2.0, y=1.0, width=2.0, height=1.0)]
    """
    if len(sizes) < 2:
        return [area] * len(sizes)
    sums = list(accumulate(sizes))
    half = sums[-1] / 2
    cut = max(1, bisect(sums[:-1], half))
    if cut < len(sizes) - 1 and sums[cut] - half < half - sums[cut - 1]:
        cut += 1
    part = sums[cut - 1] / sums[-1]
    x, y, width, height = area
    if width >= height:
        first, second = Tile(x, y, width * part, height), Tile(x + width * part, y, width * (1 - part), height)
    else:
        first, second = Tile(x, y, width, height * part), Tile(x, y + height * part, width, height * (1 - part))
    return divided(sizes[:cut], first) + divided(sizes[cut:], second)
