"""Plans of made-up addresses: no files, no processes."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.errors import ShapeMismatchError, ShardingError
from ckpt.format.box import Box, chunk_box, num_chunks, whole
from ckpt.format.dtypes import item_bytes
from ckpt.planning.plan import Address, SavePlan, Table, TablePart, choose_grid, needed_chunks, plan_save
from tests.support.tilings import held


def table(*addresses: Address, aliases: tuple[tuple[str, str], ...] = ()) -> Table:
    return Table((TablePart.of(addresses),), aliases)


def tables_of(name: str, shape: tuple[int, ...], boxes: list[Box], dtype: str = "float32") -> list[Table]:
    return [table(Address(name, dtype, shape, box)) for box in boxes]


def cut(length: int, borders: list[int]) -> list[tuple[int, int]]:
    edges = [0, *sorted(borders), length]
    return list(pairwise(edges))


@st.composite
def tilings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Box]]:
    """A shape, and boxes that tile it as a grid of uneven cuts; some of them may be empty."""
    shape = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
    boxes = [Box((), ())]
    for length in shape:
        cuts = cut(length, draw(st.lists(st.integers(0, length), max_size=3)))
        boxes = [Box((*b.offsets, a), (*b.shape, z - a)) for b in boxes for a, z in cuts]
    return shape, boxes


def plan(tables: list[Table], table_of_rank: list[int], **sizes: int) -> SavePlan:
    return plan_save(tables, table_of_rank, item_bytes, **sizes)


@pytest.mark.usefixtures("turns")
@given(tilings(), st.sampled_from([0, 64, 4096]), st.sampled_from([8, 200, 1 << 20]), st.sampled_from([64, 1 << 20]))
@settings(max_examples=25)
def test_every_element_is_written_exactly_once_by_a_rank_that_has_it(
    tiling: tuple[tuple[int, ...], list[Box]], pack_below: int, chunk_min: int, chunk_max: int
) -> None:
    shape, boxes = tiling
    ranks = list(range(len(boxes)))
    made = plan(
        tables_of("model/w", shape, boxes), ranks,
        pack_below_bytes=pack_below, chunk_min_bytes=chunk_min, chunk_max_bytes=chunk_max,
    )  # fmt: skip
    written: Counter[tuple[int, ...]] = Counter()
    sent = {(send.to, rank, send.number, send.box) for rank in ranks for send in made.of_rank(rank).sends}
    for rank in ranks:
        mine = made.of_rank(rank)
        for task in mine.chunks:
            for box in task.own:
                assert boxes[rank].contains(box)
                written.update(_elements(box))
            for sender, box in task.received_parts:
                assert boxes[sender].contains(box)
                assert (rank, sender, task.number, box) in sent
                written.update(_elements(box))
        for task in mine.packs:
            assert boxes[rank].contains(task.box)
            written.update(_elements(task.box))
    assert written == Counter(_elements(whole(shape)))
    assert len(sent) == sum(len(task.received_parts) for rank in ranks for task in made.of_rank(rank).chunks)


@pytest.mark.usefixtures("turns")
@given(tilings(), st.sampled_from([8, 200, 1 << 20]), st.sampled_from([64, 1 << 20]))
@settings(max_examples=25)
def test_a_read_of_any_box_finds_each_of_its_elements_in_one_chunk(
    tiling: tuple[tuple[int, ...], list[Box]], chunk_min: int, chunk_max: int
) -> None:
    shape, boxes = tiling
    full = {box: None for box in boxes if box.num_elements}
    grid = choose_grid(shape, 4, full, chunk_min, chunk_max)
    for wanted in full:
        found: Counter[tuple[int, ...]] = Counter()
        for number, box, part in needed_chunks(shape, grid, wanted):
            assert box == chunk_box(shape, grid, number)
            assert box.contains(part)
            found.update(_elements(part))
        assert found == Counter(_elements(wanted))


def test_shard_borders_without_a_divisor_do_not_shatter_the_array() -> None:
    """GPT-2's vocabulary under tensor parallel 2 x FSDP 2: the greatest common divisor of the borders is 1."""
    edges = [0, 12565, 25129, 37694, 50257]
    boxes = [Box((a, 0), (z - a, 768)) for a, z in pairwise(edges)]
    made = plan(tables_of("model/wte", (50257, 768), boxes), [0, 1, 2, 3])
    array = made.arrays["model/wte"]
    assert array.grid == (12565, 768)
    assert array.runs() == ((0, 0, 1), (1, 1, 1), (2, 2, 1), (3, 3, 1))
    assert [(s.to, s.box.shape) for r in range(4) for s in made.of_rank(r).sends] == [(1, (1, 768)), (2, (1, 768))]


def test_even_shards_become_chunks_and_nothing_is_sent() -> None:
    boxes = [Box((16 * rank, 0), (16, 1024)) for rank in range(4)]
    made = plan(tables_of("model/w", (64, 1024), boxes), [0, 1, 2, 3])
    assert made.arrays["model/w"].grid == (16, 1024)
    assert not made.sends_parts


def test_replicas_share_the_writing_by_bytes() -> None:
    leaves = tuple(Address(f"model/{i}", "float32", (100 + i, 1000), whole((100 + i, 1000))) for i in range(40))
    made = plan([table(*leaves)], [0, 0, 0, 0])
    loads = [sum(task.box.num_elements for task in made.of_rank(rank).chunks) for rank in range(4)]
    assert sum(loads) == sum(math.prod(a.global_shape) for a in leaves)
    assert max(loads) < 1.05 * min(loads)


def test_a_large_replicated_array_is_split_so_that_all_replicas_write() -> None:
    shape = (50257, 768)
    made = plan([table(Address("model/w", "float32", shape, whole(shape)))], [0, 0, 0, 0], chunk_max_bytes=40 << 20)
    assert {rank for rank, _, _ in made.arrays["model/w"].runs()} == {0, 1, 2, 3}


def test_small_leaves_are_bundled_so_that_a_reader_needs_few_indexes() -> None:
    leaves = tuple(Address(f"model/{i}", "float32", (1000,), whole((1000,))) for i in range(1000))
    made = plan([table(*leaves)], [0] * 64)
    assert all(array.grid is None for array in made.arrays.values())
    assert len({rank for array in made.arrays.values() for rank in array.packs.values()}) == 4


@pytest.mark.parametrize(
    ("boxes", "what"),
    [
        ([Box((0,), (6,)), Box((5,), (5,))], "overlap"),
        ([Box((0,), (5,)), Box((6,), (4,))], "9 of the 10 elements"),
    ],
)
def test_shards_that_do_not_tile_are_refused_with_the_ranks_named(boxes: list[Box], what: str) -> None:
    with pytest.raises(ShardingError, match=what):
        plan(tables_of("model/w", (10,), boxes), [0, 1])


def test_overlaps_that_cancel_holes_are_still_found() -> None:
    boxes = [Box((0, 0), (2, 2)), Box((1, 1), (2, 2)), Box((0, 2), (1, 1))]  # 9 elements in a 3 x 3, two of them twice
    with pytest.raises(ShardingError, match="overlap"):
        plan(tables_of("model/w", (3, 3), boxes), [0, 1, 2])


def test_ranks_that_disagree_about_a_shape_or_type_are_refused() -> None:
    tables = [
        table(Address("model/w", "float32", (4,), whole((4,)))),
        table(Address("model/w", "bfloat16", (4,), whole((4,)))),
    ]
    with pytest.raises(ShapeMismatchError, match="model/w is bfloat16"):
        plan(tables, [0, 1])


def tensor(name: str, box: Box | None = None, shape: tuple[int, ...] = (200, 1000)) -> Address:
    return Address(name, "float32", shape, box or whole(shape))


TIED = (("model/b", "model/a"),)
TOP, REST, NOTHING = Box((0, 0), (150, 1000)), Box((150, 0), (50, 1000)), Box((200, 0), (0, 1000))


def test_a_tie_holds_where_a_rank_has_nothing_of_the_tensor_to_see_it_by() -> None:
    tables = [
        table(tensor("model/a", TOP), aliases=TIED),
        table(tensor("model/a", REST), aliases=TIED),
        table(tensor("model/a", NOTHING), tensor("model/b", NOTHING)),
    ]
    for order in ([0, 1, 2], [2, 0, 1]):
        made = plan([tables[number] for number in order], [0, 1, 2])
        assert list(made.arrays) == ["model/a"]
        assert made.aliases == {"model/b": "model/a"}
        tasks = [(task.name, task.box) for rank in range(3) for task in made.of_rank(rank).chunks]
        assert sorted(tasks, key=str) == [("model/a", TOP), ("model/a", REST)]


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        (
            [table(tensor("model/a"), aliases=TIED), table(tensor("model/a"), tensor("model/b"))],
            "model/b is tied to model/a on rank 0, not on rank 1, which holds it as a tensor of its own",
        ),
        (
            [table(tensor("model/a"), tensor("model/b")), table(tensor("model/a"), aliases=TIED)],
            "model/b is tied to model/a on rank 1, not on rank 0, which holds it as a tensor of its own",
        ),
        (
            [
                table(tensor("model/a"), tensor("model/c"), aliases=TIED),
                table(tensor("model/a"), tensor("model/c"), aliases=(("model/b", "model/c"),)),
            ],
            "model/b is tied to model/a on rank 0 and to model/c on rank 1",
        ),
        (
            [table(tensor("model/c")), table(tensor("model/c"), aliases=TIED)],
            "model/b is tied to model/a on rank 1, but no rank gives model/a itself",
        ),
    ],
)
def test_ties_that_the_ranks_do_not_share_are_refused_with_names_and_ranks(tables: list[Table], says: str) -> None:
    with pytest.raises(ShardingError, match=says):
        plan(tables, [0, 1])


def test_empty_and_zero_dimensional_arrays_are_planned() -> None:
    leaves = [Address(f"m/{i}", "int64", shape, whole(shape)) for i, shape in enumerate([(), (0,), (3, 0, 2)])]
    made = plan([table(*leaves)], [0, 0])
    tasks = [task for rank in range(2) for task in made.of_rank(rank).packs]
    assert sorted((task.name, task.box.shape) for task in tasks) == [("m/0", ()), ("m/1", (0,)), ("m/2", (3, 0, 2))]


def test_ranks_that_hold_nothing_of_an_array_are_fine() -> None:
    boxes = [Box((0, 0), (3, 70000)), Box((3, 0), (0, 70000)), Box((3, 0), (0, 70000))]
    made = plan(tables_of("model/w", (3, 70000), boxes), [0, 1, 2])
    assert [len(made.of_rank(rank).chunks) for rank in range(3)] == [1, 0, 0]


@st.composite
def held_states(draw: st.DrawFn) -> tuple[list[Table], dict[str, list[tuple[int, Box]]]]:
    """Tables of 1 to 5 ranks that hold up to three arrays, cut anywhere; and by array, the boxes and their holders."""
    world = draw(st.integers(1, 5))
    rows: list[list[Address]] = [[] for _ in range(world)]
    holders: dict[str, list[tuple[int, Box]]] = {}
    for name in ("m/0", "m/1", "m/2")[: draw(st.integers(1, 3))]:
        shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
        dtype = draw(st.sampled_from(["uint8", "float32", "complex128"]))
        holders[name] = [(rank, box) for rank, box in enumerate(draw(held(shape, world))) if box is not None]
        for rank, box in holders[name]:
            rows[rank].append(Address(name, dtype, shape, box))
    return [table(*addresses) for addresses in rows], holders


@pytest.mark.usefixtures("turns")
@settings(max_examples=25)
@given(held_states(), st.sampled_from([0, 200]), st.sampled_from([8, 200, 4096]), st.sampled_from([64, 1 << 20]))
def test_no_chunk_has_two_writers_and_a_writer_holds_what_it_writes_or_is_sent_it(
    state: tuple[list[Table], dict[str, list[tuple[int, Box]]]], pack_below: int, chunk_min: int, chunk_max: int
) -> None:
    tables, holders_of = state
    sizes = {"pack_below_bytes": pack_below, "chunk_min_bytes": chunk_min, "chunk_max_bytes": chunk_max}
    made = plan(tables, list(range(len(tables))), **sizes)
    distinct = list(dict.fromkeys(tables))
    assert plan(distinct, [distinct.index(one) for one in tables], **sizes) == made, "sharing a table changes nothing"
    tasks = {rank: made.of_rank(rank) for rank in range(len(tables))}
    chunks = Counter((task.name, task.number) for mine in tasks.values() for task in mine.chunks)
    assert chunks == Counter((n, i) for n, array in made.arrays.items() for i in range(len(array.writers)))
    sent = Counter((s.to, rank, s.name, s.number, s.box) for rank, mine in tasks.items() for s in mine.sends)
    wanted = Counter(
        (rank, at, t.name, t.number, box) for rank, m in tasks.items() for t in m.chunks for at, box in t.received_parts
    )
    assert sent == wanted
    for name, holders in holders_of.items():
        written: Counter[tuple[int, ...]] = Counter()
        for rank, mine in tasks.items():
            parts = [(rank, task.box) for task in mine.packs if task.name == name]
            for task in mine.chunks:
                if task.name == name:
                    parts += [*((rank, box) for box in task.own), *task.received_parts]
            for holder, part in parts:
                assert 0 in part.shape or any(at == holder and box.contains(part) for at, box in holders)
                written.update(_elements(part))
        assert written == Counter(_elements(whole(made.arrays[name].shape)))
        assert len(made.arrays[name].writers) <= most_chunks(made, name, holders, chunk_min, chunk_max)


def most_chunks(made: SavePlan, name: str, holders: list[tuple[int, Box]], chunk_min: int, chunk_max: int) -> float:
    """No more chunks than boxes, or each of them, clipped ones aside, of the smallest size or of 1/16 of the largest."""
    array = made.arrays[name]
    total = math.prod(array.shape) * item_bytes(array.dtype)
    clipped = 2 ** len(array.shape)  # a dimension's last chunk may be a thin one
    return max(len({box for _, box in holders}), clipped * total / chunk_min) + 16 * clipped * total / chunk_max


@given(st.lists(st.integers(1, 400), min_size=1, max_size=30), st.integers(1, 5))
def test_of_two_replicas_neither_writes_more_than_one_piece_more_than_the_other(rows: list[int], world: int) -> None:
    leaves = [tensor(f"m/{number}", shape=(count, 100)) for number, count in enumerate(rows)]
    sizes = {"pack_below_bytes": 20000, "chunk_min_bytes": 5000, "chunk_max_bytes": 40000}
    made = plan([table(*leaves)], [0] * world, **sizes)
    tasks = [made.of_rank(rank) for rank in range(world)]
    bundle = 5000 + 20000
    load = [4 * sum(task.box.num_elements for task in (*mine.chunks, *mine.packs)) for mine in tasks]
    assert sum(load) == 400 * sum(rows)
    assert max(load) - min(load) <= max(40000, bundle)


@pytest.mark.full
def test_a_million_addresses_are_planned_in_linear_time() -> None:
    def tables(world: int) -> list[Table]:
        return [
            table(*(Address(f"m/{i}", "float32", (64 * world, 128), Box((64 * r, 0), (64, 128))) for i in range(1000)))
            for r in range(world)
        ]

    made = plan(tables(1000), list(range(1000)))
    assert all(array.writers == list(range(1000)) for array in made.arrays.values())


def test_chunk_numbers_are_row_major_and_edge_chunks_are_clipped() -> None:
    assert num_chunks((5, 7), (2, 3)) == (3, 3)
    assert chunk_box((5, 7), (2, 3), 5) == Box((2, 6), (2, 1))
    assert chunk_box((), (), 0) == Box((), ())


def _elements(box: Box) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for offset, side in zip(box.offsets, box.shape, strict=True):
        found = [(*at, i) for at in found for i in range(offset, offset + side)]
    return found
