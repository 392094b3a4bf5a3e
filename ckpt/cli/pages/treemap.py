"""Treemaps: a rectangle is divided into tiles whose areas are as given. Pure."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple


class Tile(NamedTuple):
    """A rectangle, in parts from 0 to 1 of the sides of the treemap."""

    x: float
    y: float
    width: float
    height: float


_WHOLE = Tile(0, 0, 1, 1)


def divided(sizes: Sequence[int], ratio: float, area: Tile = _WHOLE) -> list[Tile]:
    """Divide an area into one tile for each size, in their order: in two parts of about half the size, across its longer side, and so on.

    Args:
        sizes: positive. Tiles are closest to squares if the greatest is first.
        ratio: width of the treemap to its height.

    Example:
        >>> divided([2, 1, 1], 1.5)
        [Tile(x=0, y=0, width=0.5, height=1), Tile(x=0.5, y=0, width=0.5, height=0.5), Tile(x=0.5, y=0.5, width=0.5, height=0.5)]
    """
    if len(sizes) < 2:
        return [area] * len(sizes)
    sums = list(accumulate(sizes))
    cut = bisect(sums[:-1], sums[-1] // 2) or 1
    part, rest = sums[cut - 1] / sums[-1], (sums[-1] - sums[cut - 1]) / sums[-1]  # 1 - part may be 0
    x, y, width, height = area
    if width * ratio >= height:
        first, second = Tile(x, y, width * part, height), Tile(x + width * part, y, width * rest, height)
    else:
        first, second = Tile(x, y, width, height * part), Tile(x, y + height * part, width, height * rest)
    return divided(sizes[:cut], ratio, first) + divided(sizes[cut:], ratio, second)
