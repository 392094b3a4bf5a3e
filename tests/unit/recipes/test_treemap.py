"""Treemaps: areas are as given, and tiles fill the area without a gap or an overlap."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.commands.treemap import Tile, divided

SIDES = st.floats(1, 2000)


@given(st.lists(st.integers(1, 10**12), max_size=30), SIDES, SIDES)
def test_tiles_divide_the_area_by_size(sizes: list[int], width: float, height: float) -> None:
    sizes.sort(reverse=True)
    tiles = divided(sizes, Tile(10, 20, width, height))
    assert len(tiles) == len(sizes)
    total, area = sum(sizes), width * height
    for size, tile in zip(sizes, tiles, strict=True):
        assert tile.width * tile.height == pytest.approx(size / total * area, rel=1e-6, abs=1e-6 * area)
        assert tile.x >= 10 - 1e-6 * width and tile.x + tile.width <= 10 + width * (1 + 1e-6)
        assert tile.y >= 20 - 1e-6 * height and tile.y + tile.height <= 20 + height * (1 + 1e-6)
    for one, other in combinations(tiles, 2):
        across = min(one.x + one.width, other.x + other.width) - max(one.x, other.x)
        down = min(one.y + one.height, other.y + other.height) - max(one.y, other.y)
        assert min(across / width, down / height) < 1e-6


def test_tiles_are_about_square() -> None:
    tiles = divided([6, 6, 4, 3, 2, 2, 1], Tile(0, 0, 6, 4))
    ratios = [max(tile.width, tile.height) / min(tile.width, tile.height) for tile in tiles]
    assert ratios[:2] == pytest.approx([1.5, 1.5], rel=1e-6)
    assert max(ratios) < 3


def test_twenty_thousand_tiles_are_no_work() -> None:
    tiles = divided([1.0] * 20_000, Tile(0, 0, 1080, 520))
    assert math.isclose(sum(tile.width * tile.height for tile in tiles), 1080 * 520, rel_tol=1e-6)
