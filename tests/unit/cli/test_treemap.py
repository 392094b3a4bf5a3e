"""Treemaps: areas are as given, and tiles fill the area without a gap or an overlap."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.cli.pages.treemap import divided


@given(st.lists(st.integers(1, 10**12), max_size=30), st.floats(0.001, 1000))
def test_tiles_divide_the_area_by_size(sizes: list[int], ratio: float) -> None:
    sizes.sort(reverse=True)
    tiles = divided(sizes, ratio)
    assert len(tiles) == len(sizes)
    for size, tile in zip(sizes, tiles, strict=True):
        assert tile.width * tile.height == pytest.approx(size / sum(sizes), rel=1e-6)
        assert tile.x >= 0 and tile.x + tile.width <= 1 + 1e-6
        assert tile.y >= 0 and tile.y + tile.height <= 1 + 1e-6
    for one, other in combinations(tiles, 2):
        across = min(one.x + one.width, other.x + other.width) - max(one.x, other.x)
        down = min(one.y + one.height, other.y + other.height) - max(one.y, other.y)
        assert min(across, down) < 1e-6


def test_tiles_are_about_square() -> None:
    tiles = divided([6, 6, 4, 3, 2, 2, 1], 1.5)
    sides = [(1.5 * tile.width, tile.height) for tile in tiles]
    assert max(max(one) / min(one) for one in sides) < 3


def test_a_tile_beside_one_of_all_bytes_that_there_are_has_an_area() -> None:
    assert all(tile.width * tile.height > 0 for tile in divided([10**30, 10**30, 2, 1, 1], 2))


def test_twenty_thousand_tiles_are_no_work() -> None:
    tiles = divided([1] * 20_000, 2)
    assert math.isclose(sum(tile.width * tile.height for tile in tiles), 1, rel_tol=1e-6)
