"""Shards that make up one state pass; whatever is missing, there twice, shifted or said differently is found and named."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from ckpt.dist_checkpointing.global_metadata import Columns, GlobalMetadata, Sharded
from ckpt.dist_checkpointing.integrity import _first_fault, _hole_at, check_sharding, named_ranks
from ckpt.dist_checkpointing.mapping import ReplicaId, ShardedObject
from ckpt.errors import ShardingError
from ckpt.format.box import Box, overlap
from ckpt.state.sharded_tensor import ShardedTensor
from tests.support.tilings import cuts

Held = list[list[Sharded]]
shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)


def piece(
    shape: Sequence[int], offset: Sequence[int], sides: Sequence[int], replica_id: ReplicaId = 0
) -> ShardedTensor:
    data = torch.empty(tuple(sides), device="meta")
    return ShardedTensor.at("w", data, tuple(shape), tuple(offset), replica_id).without_data()


def spread(shards: Sequence[Sharded], num_ranks: int, seed: int) -> Held:
    """Hand shards out to ranks at random, and to other ranks copies that are not main."""
    chance = random.Random(seed)
    held: Held = [[] for _ in range(num_ranks)]
    for shard in shards:
        first, *others = chance.sample(range(num_ranks), chance.randint(1, num_ranks))
        held[first].append(replace(shard, replica_id=chance.choice([0, (0, 0)])))
        for number, rank in enumerate(others, 1):
            held[rank].append(replace(shard, replica_id=chance.choice([number, (0, number)])))
    return held


@st.composite
def grids(draw: st.DrawFn) -> list[ShardedTensor]:
    """The chunks of a regular grid, with prepended axes at times."""
    sides = draw(st.lists(st.integers(1, 3), max_size=2))
    prepended = draw(st.integers(0, 2))
    counts = draw(st.lists(st.integers(1, 3), min_size=len(sides) + prepended, max_size=len(sides) + prepended))
    data = torch.empty(sides, device="meta")
    return [
        ShardedTensor.from_rank_offsets(
            "w", data, *((axis, n, counts[axis]) for axis, n in enumerate(number)), prepend_axis_num=prepended
        ).without_data()
        for number in product(*map(range, counts))
    ]


@st.composite
def flattened(draw: st.DrawFn) -> list[ShardedTensor]:
    """The chunks of a regular grid, each cut in runs, some of them empty."""
    runs = []
    for chunk in draw(grids()):
        size = math.prod(chunk.local_shape)
        ends = [0, *sorted(draw(st.lists(st.integers(0, size), max_size=3))), size]
        runs += [replace(chunk, flattened_range=slice(a, b)) for a, b in pairwise(ends)]
    return runs


@st.composite
def irregular(draw: st.DrawFn) -> list[ShardedTensor]:
    shape = draw(shapes)
    return [piece(shape, box.offsets, box.shape) for box in draw(cuts(shape, 6))]


@st.composite
def objects(draw: st.DrawFn) -> list[ShardedObject]:
    shape = draw(shapes)
    return [ShardedObject("w", None, shape, number) for number in product(*map(range, shape))]


def num_elements(shard: Sharded) -> int:
    if isinstance(shard, ShardedObject):
        return 1
    run = shard.flattened_range
    return math.prod(shard.local_shape) if run is None else run.stop - run.start


def other_places(shard: ShardedTensor) -> list[tuple[int, ...]]:
    rooms = [range(n - s + 1) for n, s in zip(shard.global_shape, shard.local_shape, strict=True)]
    return [place for place in product(*rooms) if place != shard.global_offset]


def other_starts(run: ShardedTensor) -> list[int]:
    assert run.flattened_range is not None
    room = math.prod(run.local_shape) - num_elements(run)
    return [start for start in range(room + 1) if start != run.flattened_range.start]


states = grids() | flattened() | irregular() | objects()


@given(shards=states, num_ranks=st.integers(1, 5), seed=st.integers(0, 99))
def test_shards_that_make_up_the_whole_pass_whoever_holds_them(
    shards: list[Sharded], num_ranks: int, seed: int
) -> None:
    """S1.72"""
    check_sharding(spread(shards, num_ranks, seed))


@given(shards=states, num_ranks=st.integers(1, 5), seed=st.integers(0, 99), data=st.data())
def test_a_shard_without_a_main_replica_is_found(
    shards: list[Sharded], num_ranks: int, seed: int, data: st.DataObject
) -> None:
    """S1.72: dropped altogether, or left with copies that are not main."""
    lost = data.draw(st.sampled_from([n for n, shard in enumerate(shards) if num_elements(shard)]))
    held = spread([shard for n, shard in enumerate(shards) if n != lost], num_ranks, seed)
    if data.draw(st.booleans()):
        held[data.draw(st.integers(0, num_ranks - 1))].append(replace(shards[lost], replica_id=1))
    assume(any(held))
    with pytest.raises(ShardingError, match=r"^w: no rank has the main replica of|^w: elements \d+ to \d+ of"):
        check_sharding(held)


@given(shards=states, num_ranks=st.integers(1, 5), seed=st.integers(0, 99), data=st.data())
def test_a_shard_with_two_main_replicas_is_found(
    shards: list[Sharded], num_ranks: int, seed: int, data: st.DataObject
) -> None:
    """S1.72"""
    held = spread(shards, num_ranks, seed)
    twice = data.draw(st.sampled_from([shard for shard in shards if num_elements(shard)]))
    held[data.draw(st.integers(0, num_ranks - 1))].append(twice)
    with pytest.raises(ShardingError, match=r"^w: .* (has 2 main replicas|are in the flattened ranges of two)"):
        check_sharding(held)


@given(shards=irregular(), num_ranks=st.integers(1, 4), seed=st.integers(0, 99), data=st.data())
def test_a_shard_at_another_place_is_found(
    shards: list[ShardedTensor], num_ranks: int, seed: int, data: st.DataObject
) -> None:
    """S1.72: it leaves a hole and overlaps another one, or has its box."""
    moves = [(at, place) for at, shard in enumerate(shards) if num_elements(shard) for place in other_places(shard)]
    if not moves:  # one shard, which fills the whole
        return
    at, place = data.draw(st.sampled_from(moves))
    held = spread([*shards[:at], replace(shards[at], global_offset=place), *shards[at + 1 :]], num_ranks, seed)
    with pytest.raises(ShardingError, match="^w: .*(overlap in|no rank has the main replica|has 2 main replicas)"):
        check_sharding(held)


@given(runs=flattened(), num_ranks=st.integers(1, 4), seed=st.integers(0, 99), data=st.data())
def test_a_flattened_range_at_another_place_is_found(
    runs: list[ShardedTensor], num_ranks: int, seed: int, data: st.DataObject
) -> None:
    """S1.72"""
    moves = [(at, start) for at, run in enumerate(runs) if num_elements(run) for start in other_starts(run)]
    if not moves:
        return
    at, start = data.draw(st.sampled_from(moves))
    run = replace(runs[at], flattened_range=slice(start, start + num_elements(runs[at])))
    with pytest.raises(ShardingError, match=r"^w: elements \d+ to \d+ of the shard"):
        check_sharding(spread([*runs[:at], run, *runs[at + 1 :]], num_ranks, seed))


@given(data=st.data(), shape=shapes)
def test_the_first_fault_is_the_first_element_that_is_not_in_exactly_one_box(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    """S1.72: held against counting every element."""
    some = data.draw(st.lists(st.sampled_from([*_boxes(shape)]), max_size=5))
    boxes = data.draw(st.permutations([*some, *data.draw(cuts(shape, 4))][: data.draw(st.integers(0, 7))]))
    count = dict.fromkeys(product(*map(range, shape)), 0)
    for box in boxes:
        for point in product(*(range(s.start, s.stop) for s in box.slices)):
            count[point] += 1
    wrong = next((point for point, n in count.items() if n != 1), None)
    found = _first_fault(shape, boxes)
    if wrong is None:
        assert found is None
        return
    assert found == (Box(wrong, (1,) * len(shape)), count[wrong] > 1)
    if count[wrong] == 0:
        hole = _hole_at(found[0], shape, boxes)
        assert hole.contains(found[0])
        assert all(overlap(box, hole) is None for box in boxes)


def _boxes(shape: tuple[int, ...]) -> list[Box]:
    sides = [[(a, n) for a in range(length) for n in range(1, length - a + 1)] for length in shape]
    return [Box(tuple(a for a, _ in some), tuple(n for _, n in some)) for some in product(*sides)]


def said(held: Held) -> str:
    with pytest.raises(ShardingError) as refused:
        check_sharding(held)
    return str(refused.value)


def rows(number: int, count: int, replica_id: ReplicaId = 0, **changes: object) -> ShardedTensor:
    """Two rows of three, of `count` times two."""
    data = torch.empty(2, 3, device="meta")
    made = ShardedTensor.from_rank_offsets("w", data, (0, number, count), replica_id=replica_id)
    return replace(made, data=None, **changes)


def flat(start: int, stop: int, replica_id: ReplicaId = 0) -> ShardedTensor:
    return rows(0, 1, replica_id, flattened_range=slice(start, stop))


def test_errors_name_the_ranks_and_what_is_missing_or_there_twice() -> None:
    """S1.72"""
    assert said([[rows(0, 2)], [rows(0, 2)], [rows(1, 2)]]) == (
        "w: the shard [0:2, 0:3] of the global shape [4, 3] has 2 main replicas, on ranks 0-1; give all but one another replica_id "
        "than 0"
    )
    assert said([[rows(0, 2)], [rows(1, 2, 1)], [rows(1, 2, (0, 2))]]) == (
        "w: no rank has the main replica of the shard [2:4, 0:3] of the global shape [4, 3]; it is on ranks 1-2 under other "
        "replica ids. One rank must give it, with replica_id 0."
    )
    assert said([[rows(0, 3)], [rows(2, 3)]]) == (
        "w: no rank has the main replica of the shard [2:4, 0:3] of the global shape [6, 3]; the rest of w is on ranks 0-1. One rank "
        "must give it, with replica_id 0."
    )
    assert said([[piece((6,), (0,), (4,))], [], [piece((6,), (3,), (3,))]]) == (
        "w: the shards [0:4] of rank 0 and [3:6] of rank 2, main replicas both, overlap in [3:4] of the global shape [6]; every "
        "element must have one main replica"
    )
    assert said([[flat(0, 4), flat(5, 6)], [flat(4, 5, 1)]]) == (
        "w: elements 4 to 5 of the shard [0:2, 0:3] of the global shape [2, 3] are in no main replica's flattened range; the others "
        "are on rank 0, and together they must fill it"
    )
    assert said([[flat(0, 4)], [flat(3, 6)]]) == (
        "w: elements 3 to 4 of the shard [0:2, 0:3] of the global shape [2, 3] are in the flattened ranges of two main replicas, on "
        "ranks 0-1; such ranges must not overlap"
    )
    empty = replace(rows(1, 2), flattened_range=slice(0, 0))
    assert said([[replace(rows(0, 2), flattened_range=slice(0, 6))], [empty]]).endswith(
        "[2:4, 0:3] of the global shape [4, 3]; the rest of w is on ranks 0-1. One rank must give it, with replica_id 0."
    )
    grid = [[ShardedObject("rng", None, (2, 2), number)] for number in [(0, 0), (0, 1), (1, 1)]]
    assert said(grid) == (
        "rng: no rank has the main replica of the object [1:2, 0:1] of the global shape [2, 2]; the rest of rng is on ranks 0-2. One "
        "rank must give it, with replica_id 0."
    )


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (replace(rows(1, 2), dtype=torch.bfloat16), "has dtype bfloat16 on rank 2, and has dtype float32 on rank 0"),
        (rows(1, 3), "has global_shape [6, 3] on rank 2, and has global_shape [4, 3] on rank 0"),
        (
            piece((4, 3), (2, 0), (2, 3)),
            "has axis_fragmentations None on rank 2, and has axis_fragmentations [2, 1] on",
        ),
        (rows(1, 2, local_shape=(1, 3)), "has local_shape [1, 3] on rank 2, and has local_shape [2, 3] on rank 0"),
        (
            rows(1, 2, flattened_range=slice(0, 6)),
            "has a flattened_range on rank 2, and has no flattened_range on rank 0",
        ),
        (ShardedObject("w", None, (1,), (0,)), "is a ShardedObject on rank 2, and is a ShardedTensor on rank 0"),
    ],
)
def test_ranks_that_describe_a_key_differently_are_told_in_what(other: Sharded, says: str) -> None:
    """S1.72: also where the piece in question is no main replica."""
    for replica_id in (0, 3):
        held: Held = [[rows(0, 2)], [rows(1, 2)], [replace(other, replica_id=replica_id)]]
        assert said(held).startswith(f"w {says}")


def test_shards_of_any_size_need_not_be_of_one_shape_but_those_of_a_grid_must_make_it_up() -> None:
    """S1.72: axis_fragmentations None is an irregular grid."""
    check_sharding([[piece((5, 2), (0, 0), (3, 2))], [piece((5, 2), (3, 0), (2, 1)), piece((5, 2), (3, 1), (2, 1))]])
    uneven = rows(0, 2, global_shape=(5, 3), allow_shape_mismatch=True)
    assert said([[uneven]]).startswith(
        "w: [2, 1] shards of shape [2, 3] along the axes do not make up the global shape [5, 3]"
    )


def test_a_state_without_elements_needs_a_main_replica_all_the_same() -> None:
    """S1.72: somebody has to say that it is there."""
    data = torch.empty(0, 3, device="meta")
    empty = [ShardedTensor.from_rank_offsets("w", data, (0, number, 2)).without_data() for number in range(2)]
    check_sharding([[empty[0]], [empty[1]]])
    check_sharding([[piece((0, 3), (0, 0), (0, 3))], [replace(empty[0], key="v")]])
    assert "no rank has the main replica of the shard [0:0, 0:3]" in said([[replace(empty[0], replica_id=1)]])


def test_an_empty_range_may_be_anywhere() -> None:
    """S1.72: Megatron's experts give slice(-1, -1) for a half that they do not hold."""
    check_sharding([[flat(0, 4)], [flat(-1, -1)], [flat(4, 6), flat(2, 2)]])


def test_a_tensor_without_dimensions_has_one_main_replica() -> None:
    """S1.72"""
    step = piece((), (), ())
    check_sharding([[step], [replace(step, replica_id=1)]])
    assert "has 2 main replicas, on ranks 0-1" in said([[step], [step]])
    assert "has 2 main replicas, all of them on rank 0" in said([[step, step], []])
    assert "no rank has the main replica of the shard []" in said([[replace(step, replica_id=(1, 0))]])


def test_keys_do_not_mix_and_no_keys_at_all_are_fine() -> None:
    check_sharding([])
    check_sharding([[], []])
    check_sharding([[rows(0, 2), replace(rows(1, 2), key="v")], [rows(1, 2), replace(rows(0, 2), key="v")]])


def test_an_object_whose_grid_is_not_known_is_refused() -> None:
    """S1.63: the last side is not in a unique key of old."""
    old = ShardedObject.empty_from_unique_key("rng/shard_0.0_1")
    assert said([[old]]).startswith("rng: global_shape [1, -1] has an unknown side")


@given(shards=states, num_ranks=st.integers(1, 4), seed=st.integers(0, 99))
def test_the_pieces_come_out_of_their_columns_as_they_went_in(shards: list[Sharded], num_ranks: int, seed: int) -> None:
    """S1.72: what the ranks exchange is all of it."""
    held = spread(shards, num_ranks, seed)
    made = GlobalMetadata.of(held)
    assert len(made) == num_ranks
    assert [[vars(one) for one in local] for local in made] == [[vars(one) for one in local] for local in held]
    assert made.keys == {one.key for local in held for one in local}
    assert GlobalMetadata.of(made) is made


def test_equal_copies_on_more_ranks_cost_next_to_nothing_and_more_shards_cost_in_proportion() -> None:
    """S1.72: 3,000 keys of 8 shards on 512 ranks are looked at in the time of 24,000 shards."""
    keys = [f"layers.{n}.w" for n in range(3000)]
    data = torch.empty(2, 3, device="meta")
    one = [ShardedTensor.from_rank_offsets("", data, (0, n, 8)).without_data() for n in range(8)]
    mine = Columns.of(one[:1])
    numbers = tuple([0] * len(keys))
    at_home = (tuple(keys), tuple(range(len(keys))))
    parts = [Columns.of([shard]) for shard in one]
    forms = (mine.layouts[0], numbers)
    places = [(part.positions[0], numbers) for part in parts]
    replicas = [((copy,), numbers) for copy in range(64)]
    held = GlobalMetadata([Columns(at_home, forms, places[r % 8], replicas[r // 8]) for r in range(512)])
    began = time.process_time()
    check_sharding(held)
    assert time.process_time() - began < 10  # 0.3 s on a machine that has nothing else to do
    broken = [*held.columns[:7], Columns(at_home, forms, places[7], replicas[1]), *held.columns[8:]]
    with pytest.raises(ShardingError, match=r"layers.0.w: no rank has the main replica of the shard \[14:16, 0:3\]"):
        check_sharding(GlobalMetadata(broken))


def test_ranks_are_written_in_runs_and_long_lists_are_cut() -> None:
    assert named_ranks([4]) == "rank 4"
    assert named_ranks([7, 1, 2, 2, 3]) == "ranks 1-3, 7"
    assert named_ranks(range(0, 100, 2)) == "ranks 0, 2, 4, 6, 8, 10, 12, 14, ..."
