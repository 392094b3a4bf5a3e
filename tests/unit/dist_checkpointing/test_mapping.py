"""What a sharded tensor says of itself, and what it may not say."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from ckpt.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory, is_main_replica
from ckpt.errors import CheckpointError, ShapeMismatchError, ShardingError
from ckpt.format.box import Box
from ckpt.ranks.topology import Topology
from ckpt.state.sharded_tensor import ShardedTensor
from tests.support.ranks import run_ranks

PIECE = ShardedTensor("w", torch.arange(6.0).view(2, 3), torch.float32, (2, 3), (4, 9), (2, 3), (2, 3))
"""The chunk in row 1 and column 1 of 2 x 3 equal ones."""
RUN = replace(PIECE, data=torch.arange(4.0), flattened_range=slice(1, 5))


def told(tensor: ShardedTensor) -> dict[str, Any]:
    """All that a sharded tensor says, but its data."""
    return {name: value for name, value in vars(tensor).items() if name != "data"}


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """(chunk shape, chunks along each axis, prepended axes)"""
    local_shape = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
    prepended = draw(st.integers(0, 2))
    counts = tuple(draw(st.integers(1, 3)) for _ in range(prepended + len(local_shape)))
    return local_shape, counts, prepended


def global_index(local_shape: tuple[int, ...], counts: tuple[int, ...], prepended: int) -> torch.Tensor:
    shape = [side * count for side, count in zip((1,) * prepended + local_shape, counts, strict=True)]
    return torch.arange(float(math.prod(shape))).view(shape)


def chunks(local_shape: tuple[int, ...], counts: tuple[int, ...], prepended: int) -> list[ShardedTensor]:
    """All chunks of a grid; the values are the indices of a global arange."""
    index = global_index(local_shape, counts, prepended)
    found = []
    for numbers in product(*map(range, counts)):
        corner = [n * side for n, side in zip(numbers, (1,) * prepended + local_shape, strict=True)]
        slices = [slice(c, c + side) for c, side in zip(corner, (1,) * prepended + local_shape, strict=True)]
        data = index[tuple(slices)].reshape(local_shape).clone()
        offsets = [(axis, n, count) for axis, (n, count) in enumerate(zip(numbers, counts, strict=True)) if count > 1]
        found.append(ShardedTensor.from_rank_offsets("w", data, *offsets, prepend_axis_num=prepended))
    return found


def cut_in_runs(chunk: ShardedTensor, borders: list[int]) -> list[ShardedTensor]:
    assert chunk.data is not None
    edges = [0, *sorted(borders), chunk.data.numel()]
    flat = chunk.data.flatten()
    return [
        replace(chunk, data=flat[start:stop].clone(), flattened_range=slice(start, stop))
        for start, stop in pairwise(edges)
    ]


def assembled(pieces: list[ShardedTensor]) -> torch.Tensor:
    """What the pieces hold together, -1 where they have a hole; an element that two of them hold is refused."""
    made = torch.full(pieces[0].global_shape, -1.0)
    for piece in pieces:
        for box, values in piece.pieces():
            assert bool((made[box.slices] == -1).all()), f"{box} is held twice"
            made[box.slices] = values
    return made


@pytest.mark.parametrize(
    ("of", "changes", "error", "says"),
    [
        (PIECE, {"dtype": torch.float64}, ShapeMismatchError, "data has dtype torch.float32, dtype says torch.float64"),
        (PIECE, {"local_shape": (3, 2)}, ShapeMismatchError, r"data has shape \(2, 3\), local_shape says \(3, 2\)"),
        (PIECE, {"flattened_range": slice(0, 6)}, ShapeMismatchError, r"data of shape \(2, 3\) .* is for 1-D data"),
        (RUN, {"flattened_range": slice(1, 4)}, ShapeMismatchError, r"data has 4 elements, .*slice\(1, 4, None\) says 3"),
        (PIECE, {"global_offset": (2,)}, ShapeMismatchError, r"global_shape \(4, 9\) and global_offset \(2,\) differ"),
        (PIECE, {"prepend_axis_num": 1}, ShapeMismatchError, r"\(2, 3\) with 1 prepended axes and global_shape \(4, 9\) d"),
        (PIECE, {"global_offset": (1, 3)}, ShardingError, r"\(1, 3\) is not divisible by the chunk's shape \(2, 3\)"),
        (RUN, {"flattened_range": slice(1, 5, 1)}, ShardingError, r"slice\(1, 5, 1\) has a step"),
        (PIECE, {"axis_fragmentations": (2,)}, ShapeMismatchError, r"axis_fragmentations \(2,\) and global_shape"),
        (PIECE, {"axis_fragmentations": (2, 0)}, ShardingError, r"axis_fragmentations \(2, 0\) has a count below 1"),
        (RUN, {"flattened_range": slice(None, 4)}, ShardingError, "has an open end"),
        (RUN, {"flattened_range": slice(3, 7)}, ShardingError, r"is not a run of the 6 elements of local_shape \(2, 3\)"),
        (RUN, {"flattened_range": slice(5, 1)}, ShardingError, "is not a run of the 6 elements"),
        (PIECE, {"global_offset": (4, 3)}, ShardingError, r"\(2, 3\) at \(4, 3\) leaves the global shape \(4, 9\)"),
        (PIECE, {"global_offset": (-2, 3)}, ShardingError, "leaves the global shape"),
    ],
)  # fmt: skip
def test_fields_that_contradict_each_other_are_refused(
    of: ShardedTensor, changes: dict[str, Any], error: type[CheckpointError], says: str
) -> None:
    """S1.59: the eight consistency rules, and that a piece stays inside of its tensor, in one sentence that names the key."""
    with pytest.raises(error, match=f"^w: .*{says}"):
        replace(of, **changes)


def test_fields_are_checked_again_when_asked_after_a_change() -> None:
    """S1.59: attributes may be changed, as prefixes of keys are; `validate_metadata_integrity` then checks anew."""
    piece = replace(PIECE, key="layer")
    piece.validate_metadata_integrity()
    piece.dtype = torch.int32
    with pytest.raises(ShapeMismatchError, match="layer: data has dtype torch.float32, dtype says torch.int32"):
        piece.validate_metadata_integrity()


def test_the_fields_have_the_order_and_defaults_of_the_first_reference() -> None:
    """S1.59: a positional call written for Megatron-Core means the same here."""
    full = ShardedTensor(
        "w", None, torch.bfloat16, (2, 3), (5, 4, 3), (1, 2, 0), (5, 2, 1), (0, 1), 1, True, slice(2, 5)
    )
    assert told(full) == {
        "key": "w",
        "dtype": torch.bfloat16,
        "local_shape": (2, 3),
        "global_shape": (5, 4, 3),
        "global_offset": (1, 2, 0),
        "axis_fragmentations": (5, 2, 1),
        "replica_id": (0, 1),
        "prepend_axis_num": 1,
        "allow_shape_mismatch": True,
        "flattened_range": slice(2, 5),
    }
    assert (PIECE.replica_id, PIECE.prepend_axis_num, PIECE.allow_shape_mismatch, PIECE.flattened_range) == (
        0,
        0,
        False,
        None,
    )


def test_only_equal_chunks_have_offsets_divisible_by_their_shape() -> None:
    """S1.59: without axis_fragmentations pieces have any size; an empty chunk stands at 0, or anywhere where sizes differ."""
    anywhere = ShardedTensor.at("w", torch.arange(6.0).view(2, 3), (4, 9), (1, 5), replica_id=3)
    assert (anywhere.box, anywhere.axis_fragmentations, anywhere.replica_id) == (Box((1, 5), (2, 3)), None, 3)
    assert ShardedTensor.at("w", torch.zeros(0, 3), (4, 3), (3, 0)).box == Box((3, 0), (0, 3))
    assert ShardedTensor.from_rank_offsets("w", torch.zeros(0, 3), (0, 1, 2)).global_shape == (0, 3)
    with pytest.raises(ShardingError, match="not divisible"):
        replace(PIECE, data=None, local_shape=(0, 3))


def test_an_empty_range_may_be_said_to_lie_anywhere() -> None:
    """S1.59: Megatron's gated experts hold slice(-1, -1) of the half that they have nothing of."""
    nothing = ShardedTensor.from_rank_offsets_flat(
        "w", torch.Tensor(), (2, 3), (0, 1, 2), flattened_range=slice(-1, -1)
    )
    assert nothing.pieces() == []
    assert [c.tolist() for c in nothing.global_coordinates()] == [[], []]


def test_numbers_of_numpy_and_of_torch_become_plain_ones() -> None:
    """S1.59: shapes come from torch.Size and products from NumPy, and both are compared and written as JSON."""
    run = ShardedTensor(
        "w", None, torch.float32, torch.Size([2, 3]), tuple(np.array([4, 9])), list(np.array([2, 3])), [2, np.int64(3)],
        flattened_range=slice(np.int64(1), np.prod((1, 5))),
    )  # fmt: skip
    assert told(run) == told(RUN)
    assert {type(n) for n in (*run.local_shape, *run.global_shape, *run.box.offsets, run.flattened_range.start)} == {
        int
    }


def test_a_sharded_tensor_is_equal_to_itself_alone_and_shows_its_place() -> None:
    """S1.59: comparing fields would compare tensors; printing them would print them."""
    assert replace(PIECE) != PIECE
    assert "data=" not in repr(PIECE)
    assert "global_offset=(2, 3)" in repr(PIECE)


@given(grids())
def test_equal_chunks_make_up_their_tensor(grid: tuple[tuple[int, ...], tuple[int, ...], int]) -> None:
    """S1.60, S1.61: every element of a grid is where `from_rank_offsets` says, and `global_slice` finds it there."""
    index = global_index(*grid)
    found = chunks(*grid)
    assert torch.equal(assembled(found), index)
    for chunk in found:
        assert chunk.data is not None
        assert torch.equal(index[chunk.global_slice()], chunk.data)
        assert chunk.axis_fragmentations == grid[1]
        assert [
            n * side for n, side in zip(chunk.local_chunk_offset_in_global(), chunk.box.shape, strict=True)
        ] == list(chunk.global_offset)
        assert chunk.max_allowed_chunks() == chunk.box.shape


@given(grids(), st.data())
def test_runs_of_equal_chunks_make_up_their_tensor(
    grid: tuple[tuple[int, ...], tuple[int, ...], int], data: st.DataObject
) -> None:
    """S1.60, S1.61: so do flattened ranges, cut anywhere; coordinates say of every element where it is."""
    index = global_index(*grid)
    whole_chunks = chunks(*grid)
    borders = st.lists(st.integers(0, math.prod(grid[0])), max_size=3)
    found = [run for chunk in whole_chunks for run in cut_in_runs(chunk, data.draw(borders))]
    assert torch.equal(assembled(found), index)
    for run in found:
        assert run.data is not None
        assert len(run.pieces()) <= max(1, 2 * len(grid[0]) - 1)
        if grid[1]:  # without an axis there is no coordinate
            assert index.numpy()[run.global_coordinates()].tolist() == run.data.tolist()
        if grid[0]:
            inside = np.arange(math.prod(grid[0])).reshape(grid[0])[run.local_coordinates()]
            assert inside.tolist() == list(range(run.flattened_range.start, run.flattened_range.stop))


def test_a_piece_of_data_is_written_through() -> None:
    """S1.60: a box's tensor is a view of `data`, contiguous for a run, also of a parameter that autograd watches."""
    parameter = torch.nn.Parameter(torch.zeros(5))
    run = ShardedTensor.from_rank_offsets_flat("w", parameter, (3, 4), (1, 0, 2), flattened_range=slice(2, 7))
    for number, (_, values) in enumerate(run.pieces(), start=1):
        assert values.is_contiguous()
        values.fill_(number)
    assert parameter.tolist() == [1, 1, 2, 2, 2]
    column = torch.arange(6.0).view(2, 3)[:, 1]
    ((box, values),) = ShardedTensor.from_rank_offsets("w", column, (0, 2, 4), prepend_axis_num=1).pieces()
    assert (box, values.tolist(), values.data_ptr()) == (Box((2, 0), (1, 2)), [[1, 4]], column.data_ptr())


def test_without_data_there_is_a_place_and_nothing_to_write() -> None:
    """S1.60: `without_data` keeps everything else, and leaves the original as it is."""
    place = RUN.without_data()
    assert (told(place), place.data) == (told(RUN), None)
    assert RUN.data is not None
    with pytest.raises(ShardingError, match="^w has no data; give it a tensor, or call init_data"):
        place.pieces()


def test_data_are_made_in_the_shape_that_belongs_there() -> None:
    """S1.60: `init_data` gives memory where there is none, for a flattened range only as much as it needs."""
    piece, run = PIECE.without_data(), RUN.without_data()
    piece.init_data("cpu", torch.ones)
    run.init_data(torch.device("meta"))
    assert piece.data is not None
    assert run.data is not None
    assert piece.data.tolist() == [[1, 1, 1], [1, 1, 1]]
    assert (run.data.shape, run.data.dtype, run.data.device.type) == ((4,), torch.float32, "meta")
    assert run.data.untyped_storage().nbytes() == 16
    run.validate_metadata_integrity()
    had = PIECE.data
    PIECE.init_data("cpu", torch.ones)
    assert PIECE.data is had


def test_coordinates_are_of_runs_only() -> None:
    """S1.60: a chunk is a box and needs none."""
    for ask in (PIECE.local_coordinates, PIECE.global_coordinates):
        with pytest.raises(ShardingError, match=rf"w: {ask.__name__} is for a flattened tensor"):
            ask()


def test_a_grid_of_any_sizes_has_no_chunk_numbers_and_no_chunk_size() -> None:
    """S1.60: what cannot be known is refused, not guessed; the first piece has number 0 in any grid."""
    anywhere = ShardedTensor.at("w", torch.zeros(2, 3), (4, 9), (2, 3))
    with pytest.raises(
        ShardingError, match=r"w: the chunk at \(2, 3\) of a grid without axis_fragmentations has no number"
    ):
        anywhere.local_chunk_offset_in_global()
    with pytest.raises(ShardingError, match="w: axis_fragmentations is None"):
        anywhere.max_allowed_chunks()
    assert ShardedTensor.at("w", torch.zeros(2, 3), (4, 9), (0, 0)).local_chunk_offset_in_global() == (0, 0)


def test_chunks_that_do_not_divide_the_tensor_are_refused_unless_shapes_may_differ() -> None:
    """S1.60: a padded vocabulary (`allow_shape_mismatch`) is cut anyway."""
    odd = replace(PIECE, global_shape=(5, 9))
    with pytest.raises(
        ShardingError, match=r"w: global shape \(5, 9\) is not divisible by axis_fragmentations \(2, 3\)"
    ):
        odd.max_allowed_chunks()
    assert replace(odd, allow_shape_mismatch=True).max_allowed_chunks() == (2, 3)


@given(grids().filter(lambda grid: len(grid[0]) > 0), st.data())
def test_narrowed_on_all_ranks_the_chunks_make_up_the_narrowed_tensor(
    grid: tuple[tuple[int, ...], tuple[int, ...], int], data: st.DataObject
) -> None:
    """S1.60: `narrow` takes the same part of every chunk; shape and offset of the whole follow, with data or without."""
    local_shape, counts, prepended = grid
    dim = data.draw(st.integers(0, len(local_shape) - 1))
    start = data.draw(st.integers(0, local_shape[dim]))
    length = data.draw(st.integers(0, local_shape[dim] - start))
    narrowed = [one for chunk in chunks(*grid) for one in chunk.narrow(dim, start, length)]
    per_chunk = global_index(*grid).split(local_shape[dim], dim=dim + prepended)
    assert len(per_chunk) == counts[dim + prepended]
    wanted = torch.cat([part.narrow(dim + prepended, start, length) for part in per_chunk], dim=dim + prepended)
    assert torch.equal(assembled(narrowed), wanted)
    for chunk, one in zip(chunks(*grid), narrowed, strict=True):
        (place,) = chunk.without_data().narrow(dim - len(local_shape), start, length)
        assert (told(place), place.data) == (told(one), None)


@given(grids().filter(lambda grid: len(grid[0]) > 0), st.data())
def test_runs_narrowed_along_the_first_dimension_make_up_the_narrowed_tensor(
    grid: tuple[tuple[int, ...], tuple[int, ...], int], data: st.DataObject
) -> None:
    """S1.60: of a flattened range only what lies in those rows is left: a run again, or nothing and then no piece."""
    local_shape, _, prepended = grid
    start = data.draw(st.integers(0, local_shape[0]))
    length = data.draw(st.integers(0, local_shape[0] - start))
    borders = st.lists(st.integers(0, math.prod(local_shape)), max_size=3)
    found = []
    for chunk in chunks(*grid):
        for run in cut_in_runs(chunk, data.draw(borders)):
            narrowed = run.narrow(0, start, length)
            places = run.without_data().narrow(0, start, length)
            assert [told(one) for one in narrowed] == [told(one) for one in places]
            assert all(one.data is not None and one.data.numel() for one in narrowed)
            found += narrowed
    if length:
        per_chunk = global_index(*grid).split(local_shape[0], dim=prepended)
        wanted = torch.cat([part.narrow(prepended, start, length) for part in per_chunk], dim=prepended)
        assert torch.equal(assembled(found), wanted)
    else:
        assert found == []


def test_narrowing_says_views_and_examples() -> None:
    """S1.60: elements 5 to 9 of a chunk of 3 x 4, narrowed to its second row: elements 1 to 3 of that."""
    data = torch.arange(5.0, 10.0)
    run = ShardedTensor.from_rank_offsets_flat("w", data, (3, 4), (0, 1, 2), flattened_range=slice(5, 10))
    (row,) = run.narrow(0, 1, 1)
    assert (row.local_shape, row.global_shape, row.global_offset) == ((1, 4), (2, 4), (1, 0))
    assert (row.flattened_range, row.data.tolist()) == (slice(1, 4), [5, 6, 7])
    assert row.data.data_ptr() == data.data_ptr()
    assert run.narrow(0, 0, 1) == []


@pytest.mark.parametrize(
    ("of", "asked", "says"),
    [
        (PIECE, (2, 0, 1), r"there is no dim 2 to narrow in local_shape \(2, 3\)"),
        (PIECE, (-3, 0, 1), "there is no dim -3 to narrow"),
        (PIECE, (0, 1, 2), r"elements 1 to 3 of dim 0 are asked for, local_shape is \(2, 3\)"),
        (PIECE, (0, -1, 1), "elements -1 to 0 of dim 0 are asked for"),
        (PIECE, (0, 1, -1), "elements 1 to 0 of dim 0 are asked for"),
        (RUN, (1, 0, 2), "a flattened tensor is narrowed along dim 0 only, .* dim 1 is asked for"),
        (RUN.without_data(), (-1, 0, 2), "a flattened tensor is narrowed along dim 0 only"),
        (replace(PIECE, axis_fragmentations=None), (0, 0, 1), "chunks of length 2 along dim 0 need not divide the global"),
        (replace(PIECE, global_shape=(5, 9)), (0, 0, 1), "length 2 along dim 0 need not divide the global length 5 evenly"),
    ],
)  # fmt: skip
def test_what_cannot_be_narrowed_alike_on_all_ranks_is_refused(
    of: ShardedTensor, asked: tuple[int, int, int], says: str
) -> None:
    """S1.60: elements that are not there, a run that would fall apart, and chunks that may differ."""
    with pytest.raises(ShardingError, match=f"^w: .*{says}"):
        of.narrow(*asked)


def test_pieces_of_any_size_are_narrowed_where_they_are_not_cut() -> None:
    """S1.60: a dimension that every piece has whole is the same on all ranks."""
    piece = ShardedTensor.at("w", torch.arange(6.0).view(2, 3), (7, 3), (5, 0))
    (left,) = piece.narrow(1, 1, 2)
    assert (left.box, left.global_shape, left.data.tolist()) == (Box((5, 0), (2, 2)), (7, 2), [[1, 2], [4, 5]])


def test_rank_offsets_count_prepended_axes_first() -> None:
    """S1.61: the first axes may be ones that only the global tensor has, such as the layers of a stack."""
    data = torch.arange(6.0).view(2, 3)
    layer = ShardedTensor.from_rank_offsets(
        "w", data, (2, 1, 4), (0, 3, 5), replica_id=(0, 2), prepend_axis_num=1, allow_shape_mismatch=True
    )
    assert told(layer) == {
        "key": "w",
        "dtype": torch.float32,
        "local_shape": (2, 3),
        "global_shape": (5, 2, 12),
        "global_offset": (3, 0, 3),
        "axis_fragmentations": (5, 1, 4),
        "replica_id": (0, 2),
        "prepend_axis_num": 1,
        "allow_shape_mismatch": True,
        "flattened_range": None,
    }
    assert layer.data is data
    assert layer.global_slice() == (3, slice(0, 2), slice(3, 6))
    run = ShardedTensor.from_rank_offsets_flat(
        "w", data.flatten()[1:5], (2, 3), (2, 1, 4), (0, 3, 5), replica_id=(0, 2), prepend_axis_num=1,
        allow_shape_mismatch=True, flattened_range=slice(1, 5),
    )  # fmt: skip
    assert told(run) == {**told(layer), "flattened_range": slice(1, 5)}


@pytest.mark.parametrize(
    ("offsets", "says"),
    [
        ([(0, 0, 2), (0, 1, 2)], r"axis 0 is given twice in the rank offsets \(\(0, 0, 2\), \(0, 1, 2\)\)"),
        ([(0, 2, 2)], r"rank offset 2 of axis 0 is outside of 0\.\.1"),
        ([(0, -1, 2)], "rank offset -1 of axis 0 is outside"),
        ([(0, 0, 0)], "rank offset 0 of axis 0 is outside"),
        ([(1, 0, 2)], r"rank offset \(1, 0, 2\) names axis 1; the global tensor has 1 of them, counted from 0"),
        ([(-1, 0, 2)], r"rank offset \(-1, 0, 2\) names axis -1; the global tensor has 1 of them, counted from 0"),
    ],
)
def test_rank_offsets_that_make_no_sense_are_refused(offsets: list[tuple[int, int, int]], says: str) -> None:
    """S1.61: alike by both constructors."""
    with pytest.raises(ShardingError, match=f"^w: {says}"):
        ShardedTensor.from_rank_offsets("w", torch.zeros(2), *offsets)
    with pytest.raises(ShardingError, match=f"^w: {says}"):
        ShardedTensor.from_rank_offsets_flat("w", torch.zeros(1), (2,), *offsets, flattened_range=slice(0, 1))


def test_each_constructor_refuses_what_is_the_others() -> None:
    """S1.61: a range for the one, none or one that does not fit the data for the other."""
    with pytest.raises(
        ShardingError, match="^w: from_rank_offsets takes no flattened_range; use from_rank_offsets_flat"
    ):
        ShardedTensor.from_rank_offsets("w", torch.zeros(2), flattened_range=slice(0, 2))
    with pytest.raises(ShardingError, match="^w: from_rank_offsets_flat needs flattened_range"):
        ShardedTensor.from_rank_offsets_flat("w", torch.zeros(2), (2,))
    with pytest.raises(ShapeMismatchError, match=r"^w: data of shape \(2, 1\) comes with a flattened_range"):
        ShardedTensor.from_rank_offsets_flat("w", torch.zeros(2, 1), (2, 1), flattened_range=slice(0, 2))
    with pytest.raises(ShapeMismatchError, match="^w: data has 2 elements, .* says 1"):
        ShardedTensor.from_rank_offsets_flat("w", torch.zeros(2), (2, 3), flattened_range=slice(3, 4))


@pytest.mark.parametrize(
    ("replica_id", "main"), [(0, True), (1, False), ((0, 0, 0), True), ((0, 1), False), ((1, 0), False), ((), True)]
)
def test_the_main_replica_is_0_along_every_axis(replica_id: int | tuple[int, ...], main: bool) -> None:
    """S1.62."""
    assert is_main_replica(replica_id) is main


def test_errors_are_the_family_and_the_built_in_at_once() -> None:
    """S1.59: code that caught Megatron's CheckpointingException or a ValueError catches these."""
    with pytest.raises(CheckpointError):
        replace(PIECE, dtype=torch.int8)
    with pytest.raises(ValueError, match="use from_rank_offsets_flat"):
        ShardedTensor.from_rank_offsets("w", torch.zeros(2), flattened_range=slice(0, 2))


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (2, 2),
        (np.int64(0), 0),
        (torch.tensor(3), 3),
        (np.array(4), 4),
        (True, 1),
        ([0, 0], (0, 0)),
        ((0, np.int32(1)), (0, 1)),
        (torch.tensor([0, 2]), (0, 2)),
        (np.arange(3), (0, 1, 2)),
        (torch.Size([1]), (1,)),
        ((), ()),
    ],
)
def test_a_replica_id_of_any_librarys_numbers_is_kept_as_plain_ones(given: Any, kept: int | tuple[int, ...]) -> None:
    """S1.62: JSON and the comparison with other ranks take no others."""
    for made in (
        replace(PIECE, replica_id=given),
        ShardedObject("w", None, (1,), (0,), given),
        ShardedTensorFactory("w", None, lambda *_: None, lambda _: torch.zeros(1), given),
    ):
        numbers = made.replica_id if isinstance(made.replica_id, tuple) else (made.replica_id,)
        assert made.replica_id == kept
        assert type(made.replica_id) is type(kept)
        assert {type(number) for number in numbers} <= {int}


@pytest.mark.parametrize(
    "given", [0.0, None, "0", [0, "1"], [[0], [1]], {0}, torch.tensor(1.0), np.zeros(2), np.zeros((1, 2), int)]
)
def test_a_replica_id_that_is_no_whole_numbers_is_refused(given: Any) -> None:
    """S1.62: in a sentence that shows it, where it is given."""
    for make in (
        lambda: replace(PIECE, replica_id=given),
        lambda: ShardedObject("w", None, (1,), (0,), given),
        lambda: ShardedTensorFactory("w", None, lambda *_: None, lambda _: torch.zeros(1), given),
    ):
        with pytest.raises(
            ShardingError, match=r"(?s)^w: replica_id .* is neither a whole number nor a tuple of them; give 0"
        ):
            make()


def _give_a_dtensor(topology: Topology) -> list[str]:
    whole = distribute_tensor(torch.arange(6.0).view(2, 3), init_device_mesh("cpu", (topology.world_size,)), [Shard(0)])
    said = []
    for make in (
        lambda: ShardedTensor.from_rank_offsets("w", whole),
        lambda: ShardedTensor.at("w", whole, (2, 3), (0, 0)),
        lambda: replace(PIECE, data=torch.nn.Parameter(whole)),
    ):
        with pytest.raises(ShardingError) as refused:
            make()
        said.append(str(refused.value))
    local = ShardedTensor.at("w", whole.to_local(), (2, 3), (0, 0))
    assert torch.equal(local.pieces()[0][1], torch.arange(6.0).view(2, 3))
    return said


def test_a_dtensor_is_refused_as_a_piece_and_its_local_tensor_is_taken() -> None:
    """S1.59: its placements may contradict the given offset."""
    says = (
        "w: data is a DTensor, which has placements of its own; give its to_local(), or put the DTensor itself into a component "
        "of the coordinator"
    )
    assert run_ranks(1, _give_a_dtensor, process_group=True) == [[says] * 3]
