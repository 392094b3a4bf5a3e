"""Where weights lie in the stream, and who sends what: any shapes, data types, bucket sizes and owners."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt.engine.wire.layout import ALIGNED, Weight, WeightLayout, aligned, first_names, take_turns
from ckpt.errors import ConfigurationError
from tests.support.states import ALL_DTYPES

SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)
WEIGHTS = st.lists(st.tuples(st.sampled_from(ALL_DTYPES), SHAPES), max_size=12)
OWNERS = st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True)
BUCKETS = st.integers(1, 20).map(lambda blocks: blocks * ALIGNED)


def layout_of(
    weights: Sequence[tuple[torch.dtype, tuple[int, ...]]], bucket_bytes: int, owners: Sequence[int]
) -> WeightLayout:
    layout = WeightLayout(bucket_bytes, owners)
    for number, (dtype, shape) in enumerate(weights):
        layout.add(f"w.{number}", dtype, shape)
    return layout


LAYOUTS = st.builds(layout_of, WEIGHTS, BUCKETS, OWNERS)


def bytes_in(layout: WeightLayout, weight: Weight, bucket: int) -> int:
    """By brute force."""
    start, stop = layout.extent(bucket)
    return len(range(max(start, weight.start), min(stop, weight.start + weight.num_bytes)))


@given(LAYOUTS)
def test_the_parts_of_all_owners_cover_every_byte_of_every_weight_once(layout: WeightLayout) -> None:
    for weight in layout.weights:
        parts = [part for owner in layout.owners for part in layout.parts(weight, owner)]
        covered = sorted((part.start, part.stop) for part in parts)
        assert sum(stop - start for start, stop in covered) == weight.num_bytes
        assert [0, *(stop for _, stop in covered)] == [*(start for start, _ in covered), weight.num_bytes]
        assert sorted(parts) == [*layout.parts(weight)]


@given(LAYOUTS)
def test_a_part_lies_in_its_bucket_at_whole_elements_and_nothing_lies_on_anything_else(layout: WeightLayout) -> None:
    taken: list[tuple[int, int, int]] = []
    for weight in layout.weights:
        for part in layout.parts(weight):
            assert part.start % weight.dtype.itemsize == part.stop % weight.dtype.itemsize == 0
            assert part.at % weight.dtype.itemsize == 0
            start, stop = layout.extent(part.bucket)
            assert part.start < part.stop and part.at >= 0 and part.at + part.stop - part.start <= stop - start
            assert start + part.at == weight.start + part.start
            taken.append((part.bucket, part.at, part.at + part.stop - part.start))
    for (bucket, _, stop), (next_bucket, start, _) in pairwise(sorted(taken)):
        assert bucket < next_bucket or stop <= start


@given(LAYOUTS)
def test_buckets_are_whole_but_for_the_last_and_none_is_empty(layout: WeightLayout) -> None:
    extents = [layout.extent(bucket) for bucket in range(layout.num_buckets)]
    assert all(stop - start == layout.bucket_bytes for start, stop in extents[:-1])
    assert all(0 < stop - start <= layout.bucket_bytes for start, stop in extents[-1:])
    assert sum(stop - start for start, stop in extents) == layout.num_bytes
    assert all(before[1] == after[0] for before, after in pairwise(extents))


@given(LAYOUTS)
def test_owners_differ_by_one_bucket_at_most(layout: WeightLayout) -> None:
    counts = [sum(layout.owner(bucket) == owner for bucket in range(layout.num_buckets)) for owner in layout.owners]
    assert max(counts) - min(counts) <= 1
    assert sum(counts) == layout.num_buckets


@given(LAYOUTS)
def test_the_weights_in_a_bucket_are_those_with_a_byte_in_it(layout: WeightLayout) -> None:
    for bucket in range(layout.num_buckets):
        assert layout.weights_in(bucket) == [
            weight.name for weight in layout.weights if bytes_in(layout, weight, bucket)
        ]


@given(LAYOUTS)
def test_every_weight_begins_at_a_multiple_of_256_bytes_behind_the_one_before(layout: WeightLayout) -> None:
    at = 0
    for weight in layout.weights:
        assert weight.start == at
        assert weight.num_bytes == math.prod(weight.shape) * weight.dtype.itemsize
        at += aligned(weight.num_bytes)
        assert at % 256 == 0 and at == weight.stop
    assert layout.num_bytes == at
    assert layout.payload_bytes == sum(weight.num_bytes for weight in layout.weights)


@given(WEIGHTS, BUCKETS, OWNERS)
def test_rows_make_the_same_layout_on_another_rank(
    weights: list[tuple[torch.dtype, tuple[int, ...]]], bucket_bytes: int, owners: list[int]
) -> None:
    layout = layout_of(weights, bucket_bytes, owners)
    layout.aliases = {"tied": "w.0"} if weights else {}
    again = WeightLayout.from_rows(json.loads(json.dumps(layout.as_rows())))
    assert (again.weights, again.owners, again.aliases, again.bucket_bytes) == (
        layout.weights,
        layout.owners,
        layout.aliases,
        layout.bucket_bytes,
    )
    assert again.digest() == layout.digest()


def test_the_digest_depends_on_names_types_shapes_order_aliases_and_the_cut() -> None:
    def digest(
        *weights: tuple[str, torch.dtype, tuple[int, ...]],
        bucket_bytes: int = 512,
        owners: Sequence[int] = (0, 1),
        aliases: dict[str, str] | None = None,
    ) -> str:
        layout = WeightLayout(bucket_bytes, owners, aliases)
        for weight in weights:
            layout.add(*weight)
        return layout.digest()

    a, b = ("a", torch.float32, (2, 3)), ("b", torch.float32, (2, 3))
    digests = [
        digest(a, b),
        digest(b, a),
        digest(a),
        digest(a, ("c", torch.float32, (2, 3))),
        digest(a, ("b", torch.int32, (2, 3))),
        digest(a, ("b", torch.float32, (3, 2))),
        digest(a, ("b", torch.float32, (6,))),
        digest(a, b, bucket_bytes=256),
        digest(a, b, owners=(1, 0)),
        digest(a, b, aliases={"c": "a"}),
        digest(a, b, aliases={"c": "b"}),
    ]
    assert len(set(digests)) == len(digests)
    assert digest(a, b) == digests[0]


def test_the_digest_follows_a_layout_that_grows() -> None:
    layout = WeightLayout(256, [0])
    layout.add("a", torch.float32, (2,))
    before = layout.digest()
    layout.add("b", torch.float32, (0,))
    assert layout.digest() != before


def test_a_weight_is_yielded_once() -> None:
    layout = WeightLayout(256, [0], {"head": "embed"})
    layout.add("embed", torch.float32, (2,))
    with pytest.raises(ConfigurationError, match="embed is yielded twice"):
        layout.add("embed", torch.float32, (2,))
    with pytest.raises(ConfigurationError, match="head is yielded, and tied_names says that it is embed"):
        layout.add("head", torch.float32, (2,))


def test_an_alias_stands_for_a_weight_that_is_there() -> None:
    layout = WeightLayout(256, [0], {"head": "embed"})
    layout.add("body", torch.float32, (2,))
    with pytest.raises(ConfigurationError, match="head is embed, which is not yielded"):
        layout.require_sources()
    layout.add("embed", torch.float32, (2,))
    layout.require_sources()


def test_a_type_without_a_name_is_refused_and_nothing_of_it_stays() -> None:
    layout = WeightLayout(256, [0])
    with pytest.raises(ConfigurationError, match="bits8"):
        layout.add("a", torch.bits8, (2,))
    assert layout.weights == [] and layout.num_buckets == 0
    layout.add("a", torch.float8_e4m3fn, (2,))


def test_an_alias_of_an_alias_is_one_of_the_first_name() -> None:
    assert first_names({"c": "b", "b": "a", "z": "y"}) == {"c": "a", "b": "a", "z": "y"}
    assert WeightLayout(256, [0], {"c": "b", "b": "a"}).aliases == {"c": "a", "b": "a"}


@pytest.mark.parametrize("aliases", [{"a": "a"}, {"a": "b", "b": "a"}, {"c": "a", "a": "b", "b": "a"}])
def test_aliases_of_each_other_are_refused(aliases: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="has a circle, a"):
        first_names(aliases)


NODES = st.lists(st.integers(0, 4), min_size=1, max_size=5)


@given(NODES, st.data())
def test_senders_take_turns_by_host_as_far_as_that_goes(sizes: list[int], data: st.DataObject) -> None:
    ranks = iter(range(sum(sizes)))
    nodes = [[next(ranks) for _ in range(size)] for size in sizes]
    senders = data.draw(st.lists(st.sampled_from(range(sum(sizes))), unique=True)) if sum(sizes) else []
    turns = take_turns(nodes, senders)
    assert sorted(turns) == sorted(senders)
    host_of = {rank: number for number, node in enumerate(nodes) for rank in node}
    most = max((sum(host_of[rank] == host for rank in senders) for host in range(len(nodes))), default=0)
    neighbours = sum(host_of[a] == host_of[b] for a, b in pairwise(turns))
    # The largest host has so many more than all the others together, that so many of its own come one behind the other.
    assert neighbours == max(0, most - (len(senders) - most) - 1)


def test_equal_hosts_come_in_rounds() -> None:
    assert take_turns([[0, 1, 2], [3, 4, 5]], range(6)) == [0, 3, 1, 4, 2, 5]
    assert take_turns([[0, 1, 2, 3]], range(3)) == [0, 1, 2]
    assert take_turns([[0, 1, 2], [3]], range(4)) == [0, 3, 1, 2]
