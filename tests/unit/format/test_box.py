"""Runs of elements, cut into boxes."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import ShapeMismatchError
from ckpt.format.box import Box, cut_box, first_overlap, flat_boxes, whole

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def runs(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    start, stop = sorted(draw(st.integers(0, math.prod(shape))) for _ in range(2))
    return shape, start, stop


@given(st.integers(0, 60), st.lists(st.integers(1, 5), min_size=1, max_size=3), st.booleans())
def test_what_the_ranks_of_a_mesh_hold_is_what_chunks_are(length: int, sides: list[int], is_strided: bool) -> None:
    cuts = [(0, math.prod(sides[axis + 1 :]) if is_strided else 1) for axis in range(len(sides))]
    for coordinate in product(*map(range, sides)):
        held = torch.arange(length)
        for axis in reversed(range(len(sides))) if is_strided else range(len(sides)):
            chunks = dict(enumerate(held.chunk(sides[axis])))
            held = chunks.get(coordinate[axis], held[:0])
        box = cut_box((length,), sides, coordinate, cuts)
        assert box is not None and whole((length,)).contains(box)
        assert torch.arange(length)[box.slices].tolist() == held.tolist()
    assert cut_box((length,), [2, 2], [0, 0], [(0, 1), (0, 2)]) is None, "the second axis cuts what the first has left into two"


@given(runs())
def test_the_boxes_are_the_run_element_for_element_and_few(run: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = run
    index = torch.arange(math.prod(shape)).view(shape)
    boxes = flat_boxes(shape, start, stop)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    at = 0
    for box, position in boxes:
        assert whole(shape).contains(box)
        assert 0 not in box.shape
        assert position == at
        assert index[box.slices].flatten().tolist() == list(range(start + at, start + at + box.num_elements))
        at += box.num_elements
    assert at == stop - start


def test_a_run_of_three_dimensions_is_five_boxes_at_worst() -> None:
    boxes = flat_boxes((4, 3, 5), 7, 53)
    assert [(box.offsets, box.shape, at) for box, at in boxes] == [
        ((0, 1, 2), (1, 1, 3), 0),
        ((0, 2, 0), (1, 1, 5), 3),
        ((1, 0, 0), (2, 3, 5), 8),
        ((3, 0, 0), (1, 1, 5), 38),
        ((3, 1, 0), (1, 1, 3), 43),
    ]


@pytest.mark.parametrize(
    ("shape", "start", "stop", "boxes"),
    [
        ((), 0, 1, [(Box((), ()), 0)]),
        ((1, 1, 1), 0, 1, [(Box((0, 0, 0), (1, 1, 1)), 0)]),
        ((5, 1, 1), 1, 4, [(Box((1, 0, 0), (3, 1, 1)), 0)]),
        ((1, 5), 2, 4, [(Box((0, 2), (1, 2)), 0)]),
        ((3, 4), 4, 12, [(Box((1, 0), (2, 4)), 0)]),
        ((3, 4), 5, 7, [(Box((1, 1), (1, 2)), 0)]),
    ],
)
def test_a_run_that_fills_whole_rows_or_stays_in_one_is_one_box(
    shape: tuple[int, ...], start: int, stop: int, boxes: list[tuple[Box, int]]
) -> None:
    assert flat_boxes(shape, start, stop) == boxes


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (3, 4)])
@pytest.mark.parametrize("at", [-1, 0, 1, 99])
def test_an_empty_run_is_no_box_wherever_it_is_said_to_lie(shape: tuple[int, ...], at: int) -> None:
    assert flat_boxes(shape, at, at) == []


@pytest.mark.parametrize(
    ("shape", "start", "stop"), [((3, 4), -1, 2), ((3, 4), 2, 13), ((3, 4), 5, 3), ((0,), 0, 1), ((), 0, 2)]
)
def test_a_run_that_leaves_the_array_is_refused(shape: tuple[int, ...], start: int, stop: int) -> None:
    with pytest.raises(ShapeMismatchError, match=rf"elements {start} to {stop} are not a run of an array of shape"):
        flat_boxes(shape, start, stop)


@pytest.mark.parametrize("dim", [0, 1])
def test_strips_beside_each_other_are_compared_with_few_others(dim: int) -> None:
    """Each begins further along both dimensions; along one of them, all of them are open at once."""
    num = 20_000  # seconds if each is compared with each of 1,000
    shape = (num, 1) if dim == 0 else (1, num)
    strips = [Box((at, at), shape) for at in range(num)]
    assert first_overlap(strips) is None
    twice = Box((num // 2, num // 2), (1, 1))
    assert first_overlap([*strips, twice]) == (strips[num // 2], twice)
