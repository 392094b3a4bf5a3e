"""Squarified treemaps: a rectangle is divided into tiles whose areas are as given and whose sides are about as long as each other. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Tile(NamedTuple):
    """A rectangle on the page, in any unit."""

    x: float
    y: float
    width: float
    height: float


def squarified(sizes: Sequence[float], area: Tile) -> list[Tile]:
    """Divide an area into one tile for each size, in their order.

    Args:
        sizes: not negative, the greatest first.

    Example:
        >>> squarified([2, 1, 1], Tile(0, 0, 4, 2))
        [Tile(x=0, y=0, width=2.0, height=2.0), Tile(x=2.0, y=0, width=2.0, height=1.0), Tile(x=2.0, y=1.0, width=2.0, height=1.0)]

    Source: Bruls, Huizing, van Wijk, "Squarified Treemaps", 2000.
    """
    tiles: list[Tile] = []
    total = sum(sizes)
    scale = area.width * area.height / total if total > 0 else 0.0
    at = 0
    while at < len(sizes):
        side = min(area.width, area.height)
        num = _row_length(sizes, at, side, scale)
        row = sizes[at : at + num]
        thickness = sum(row) * scale / side if side > 0 else 0.0
        along = area.y if area.width >= area.height else area.x
        for size in row:
            length = size * scale / thickness if thickness > 0 else 0.0
            tiles.append(
                Tile(area.x, along, thickness, length)
                if area.width >= area.height
                else Tile(along, area.y, length, thickness)
            )
            along += length
        if area.width >= area.height:
            area = Tile(area.x + thickness, area.y, max(area.width - thickness, 0.0), area.height)
        else:
            area = Tile(area.x, area.y + thickness, area.width, max(area.height - thickness, 0.0))
        at += num
    return tiles


def _row_length(sizes: Sequence[float], at: int, side: float, scale: float) -> int:
    """How many sizes, from this one on, fill the next row: as many as do not make its longest tile longer."""
    total, worst, num = 0.0, float("inf"), 0
    for size in sizes[at:]:
        total += size
        row = total * scale
        if row <= 0 or size <= 0:  # tiles that nobody sees: all of them
            return len(sizes) - at if num == 0 else num
        greatest, least = sizes[at] * scale, size * scale
        ratio = max(side * side * greatest / (row * row), row * row / (side * side * least)) if side > 0 else 1.0
        if ratio > worst:
            break
        worst, num = ratio, num + 1
    return num
