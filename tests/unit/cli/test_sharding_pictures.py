"""Pictures of sharding: each index of a tensor is in the rectangle of the rank whose chunk holds it."""

from __future__ import annotations

import math
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from ckpt.cli.pages.sharding_pictures import MOST_CELLS, alike, picture_of
from ckpt.format.box import Box, chunks_meeting, num_chunks
from ckpt.format.manifest import ArrayEntry


def entry(shape: tuple[int, ...], grid: tuple[int, ...], owners: list[int]) -> ArrayEntry:
    """An array whose chunks, in row-major order, these ranks wrote."""
    runs: list[tuple[int, int, int]] = []
    for number, rank in enumerate(owners):
        if runs and runs[-1][0] == rank:
            runs[-1] = rank, runs[-1][1], runs[-1][2] + 1
        else:
            runs.append((rank, number, 1))
    return ArrayEntry("float32", shape, "zarr", "model/w", grid, tuple(runs))


@st.composite
def entries(draw: st.DrawFn) -> ArrayEntry:
    grid = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    shape = tuple(draw(st.integers(1, 8)) for _ in grid)
    total = math.prod(num_chunks(shape, grid))
    return entry(shape, grid, draw(st.lists(st.integers(0, 3), min_size=total, max_size=total)))


@given(entries())
def test_every_index_is_in_one_rectangle_of_the_ranks_that_wrote_there(array: ArrayEntry) -> None:
    assert array.grid is not None
    picture = picture_of(array)
    assert len(picture.dims) == min(2, len(array.shape))
    for place in product(*(range(array.shape[dim]) for dim in picture.dims)):
        (one,) = (
            one
            for one in picture.rectangles
            if all(low <= at <= high for at, (low, high) in zip(place, one.box, strict=True))
        )
        shown = dict(zip(picture.dims, place, strict=True))
        line = Box(
            tuple(shown.get(dim, 0) for dim in range(len(array.shape))),
            tuple(1 if dim in shown else side for dim, side in enumerate(array.shape)),
        )
        written_by = {array.writer_of(chunk) for chunk in chunks_meeting(array.shape, array.grid, line)}
        assert set(one.ranks) <= written_by
        assert set(one.ranks) == written_by or not picture.is_whole
    assert math.isclose(sum(one.width * one.height for one in picture.rectangles), 1)


def test_parts_of_the_picture_are_parts_of_the_tensor() -> None:
    """Rows 0-3 by rank 0, 4-7 by rank 1, 8-9 by rank 2."""
    rows = picture_of(entry((10, 3), (4, 3), [0, 1, 2]))
    assert [(one.ranks, one.box) for one in rows.rectangles] == [
        ((0,), ((0, 3), (0, 2))),
        ((1,), ((4, 7), (0, 2))),
        ((2,), ((8, 9), (0, 2))),
    ]
    assert [(one.x, one.y, one.width, one.height) for one in rows.rectangles] == [
        (0, 0, 1, 0.4),
        (0, 0.4, 1, 0.4),
        (0, 0.8, 1, 0.2),
    ]
    flat = picture_of(entry((10,), (4,), [0, 1, 2]))
    assert [(one.x, one.width, one.box) for one in flat.rectangles] == [
        (0, 0.4, ((0, 3),)),
        (0.4, 0.4, ((4, 7),)),
        (0.8, 0.2, ((8, 9),)),
    ]


def test_the_first_two_dimensions_that_are_cut_are_shown_with_all_ranks_behind() -> None:
    experts = picture_of(entry((4, 1, 6, 2), (2, 1, 3, 1), [0, 1, 2, 3, 4, 5, 6, 7]))
    assert experts.dims == (0, 2) and not experts.is_whole
    assert [one.ranks for one in experts.rectangles] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert picture_of(entry((1, 4, 1, 6), (1, 2, 1, 3), [0, 1, 2, 3])).is_whole


def test_a_tensor_of_any_number_of_chunks_has_a_picture_of_few_boxes() -> None:
    side = 10**12
    runs = ((0, 0, side * side // 2), (1, side * side // 2, side * side // 2))
    huge = picture_of(ArrayEntry("float32", (side, side), "zarr", "model/w", (1, 1), runs))
    assert [one.ranks for one in huge.rectangles] == [(0,), (1,)] and not huge.is_whole
    many = picture_of(entry((200, 200), (1, 1), [number % 7 for number in range(40_000)]))
    assert 0 < len(many.rectangles) <= MOST_CELLS**2
    deep = ArrayEntry("float32", (4,) * 30, "zarr", "model/w", (2,) * 30, ((0, 0, 2**29), (1, 2**29, 2**29)))
    assert picture_of(deep).rectangles


def test_tensors_that_are_cut_alike_share_a_picture_those_of_most_bytes_first() -> None:
    found = alike(
        {
            "model/a": entry((8, 3), (4, 3), [0, 1]),
            "model/b": entry((100, 50), (50, 50), [0, 1]),
            "model/c": entry((100, 50), (25, 50), [0, 0, 1, 1]),
            "model/d": entry((100, 200), (100, 100), [0, 1]),
            "model/whole": entry((100, 90), (100, 90), [0]),
            "model/alone": entry((100, 90), (50, 90), [1, 1]),
            "model/packed": ArrayEntry("float32", (3,), "zarr", packed_in=(0, 1)),
            "model/same": ArrayEntry("float32", (8, 3), alias_of="model/a"),
        }
    )
    assert [(one.names, one.ranks, one.dims) for one in found] == [
        (["model/d"], (0, 1), (1,)),
        (["model/b", "model/c", "model/a"], (0, 1), (0,)),
    ]
