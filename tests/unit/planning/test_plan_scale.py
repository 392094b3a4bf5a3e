"""The plan of a large run: balanced, each byte once, and no larger than the state it plans. Nothing here looks at a clock."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from ckpt.format.dtypes import item_bytes
from ckpt.planning.plan import SavePlan, Table, piece_from_json, plan_save, table_of_pieces, table_to_json
from ckpt.state.collect import DistinctRanks, exchange_tables
from recipes.benchmark.plan_costs import RecordedTopology, SyntheticGPT, bytes_per_writer, record

# A thousandth of the real sizes, so that a rank writes as many chunks as of 64 MiB in a run of 10^12 parameters.
SIZES = {"pack_below_bytes": 2 << 10, "chunk_min_bytes": 4 << 10, "chunk_max_bytes": 32 << 10}


def run(dp: int, *, shard_optimizer: bool) -> SyntheticGPT:
    return SyntheticGPT(tp=4, pp=4, dp=dp, layers=16, width=512, vocab=256, shard_optimizer=shard_optimizer)


def plan_of(case: SyntheticGPT) -> SavePlan:
    tables = [case.table(rank) for rank in range(case.world_size)]
    distinct = list(dict.fromkeys(tables))
    number = {table: at for at, table in enumerate(distinct)}
    return plan_save(distinct, [number[table] for table in tables], item_bytes, **SIZES)


@pytest.mark.parametrize("shard_optimizer", [False, True])
def test_the_writers_of_a_large_run_are_equal_to_one_percent_and_write_each_byte_once(shard_optimizer: bool) -> None:
    case = run(4, shard_optimizer=shard_optimizer)
    made = plan_of(case)
    written = bytes_per_writer(made, case.world_size)
    arrays = made.arrays.values()
    assert sum(written) == sum(math.prod(array.shape) * item_bytes(array.dtype) for array in arrays)
    assert sum(written) == 14 * case.num_parameters + 4 * sum(name.endswith(".step") for name in made.arrays)
    mean = sum(written) / case.world_size
    assert 0.99 * mean < min(written) <= max(written) < 1.01 * mean
    assert not made.sends_parts
    assert sum(len(array.writers) for array in arrays) <= 2 * sum(written) / SIZES["chunk_max_bytes"] + len(arrays)


@pytest.mark.parametrize("shard_optimizer", [False, True])
def test_every_rank_finds_the_same_plan_in_what_is_exchanged(shard_optimizer: bool) -> None:
    case = run(2, shard_optimizer=shard_optimizer)
    tables = [case.table(rank) for rank in range(case.world_size)]
    distinct = DistinctRanks.of([str(tables.index(table)) for table in tables])
    recorded = record(case.world_size, lambda rank: exchange_tables(tables[rank.rank], distinct, rank), num_phases=2)
    for rank in (0, 7, case.world_size - 1):
        found, table_of_rank = exchange_tables(tables[rank], distinct, RecordedTopology(rank, case.world_size, recorded))
        assert [found[number] for number in table_of_rank] == tables
    assert plan_save(found, table_of_rank, item_bytes, **SIZES) == plan_of(case)


def test_what_is_exchanged_and_held_grows_with_the_state_not_with_ranks_times_tensors() -> None:
    few, many = run(1, shard_optimizer=True), run(8, shard_optimizer=True)
    pieces = {case: _pieces(case) for case in (few, many)}
    names = {case: [p for p in pieces[case] if p[0] == "names"] for case in (few, many)}
    assert names[few] == names[many], "eight times the ranks have no more names"
    assert sum(len(piece[1]) for piece in names[many]) <= len(plan_of(many).arrays) + 5, "only the tied embedding twice"
    places = [len(piece[1]) for piece in pieces[many] if piece[0] == "places"]
    kinds = max(places)
    assert kinds <= 25, "the layers of a stage share their places"
    assert len(places) <= 3 * (4 + 4 * 8), (
        "of model: by slice; of optimizer: by slice and replica; first, middle, last stage"
    )
    tables = [table_of_pieces([piece_from_json(p) for p in table_to_json(few.table(rank))]) for rank in range(16)]
    assert tables == [few.table(rank) for rank in range(16)]


def test_a_plan_holds_a_few_objects_per_array_however_many_ranks_there_are() -> None:
    few, many = (plan_of(run(dp, shard_optimizer=False)) for dp in (1, 8))
    assert _num_containers(many) == _num_containers(few) <= 6 * len(few.arrays)


def _pieces(case: SyntheticGPT) -> list[Any]:
    """The distinct pieces of all ranks' tables, as they travel."""
    found = {json.dumps(piece) for rank in range(case.world_size) for piece in table_to_json(case.table(rank))}
    return [json.loads(piece) for piece in sorted(found)]


def _num_containers(thing: Any, seen: set[int] | None = None) -> int:
    """How many objects that hold others a structure is made of, each counted once."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, str | int | float | None):
        return 0
    seen.add(id(thing))
    if dataclasses.is_dataclass(thing):
        children = [getattr(thing, field.name) for field in dataclasses.fields(thing)]
    else:
        children = [*thing, *thing.values()] if isinstance(thing, dict) else list(thing)
    return 1 + sum(_num_containers(child, seen) for child in children)


def test_the_counter_of_objects_counts_shared_ones_once() -> None:
    shared = (1, 2)
    assert _num_containers([shared, shared, {"a": Table(())}]) == 5
