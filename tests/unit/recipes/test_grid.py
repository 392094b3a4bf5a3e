"""The role of each rank in each layout: pure arithmetic, for any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor.parallel import RowwiseParallel

from ckpt.errors import ConfigurationError
from recipes.training.gpt import GPT
from recipes.training.parallel.accelerated import Accelerated
from recipes.training.parallel.base import Layout
from recipes.training.parallel.gradients import BUCKET_BYTES, _buckets
from recipes.training.parallel.pipeline import DataParallelPipeline, Pipeline
from recipes.training.parallel.replicated import DataParallel, Single
from recipes.training.parallel.sharded import FullySharded, HybridSharded, TensorAndDataParallel, TensorThenFullySharded

WITH_INNER_AXIS = (HybridSharded, TensorThenFullySharded, TensorAndDataParallel, DataParallelPipeline)
FLAT = (DataParallel, FullySharded, Accelerated, Pipeline)


def test_one_rank_can_use_every_layout_whose_inner_axis_it_is_told() -> None:
    assert Single().sizes(1) == {}
    assert all(list(layout().sizes(1).values()) == [1] for layout in FLAT)
    with pytest.raises(ConfigurationError, match=r"parallel=hsdp lays out 2 ranks \(dp 1 x fsdp 2\), but there are 1"):
        HybridSharded().check(1)
    assert HybridSharded(fsdp=1).sizes(1) == {"dp": 1, "fsdp": 1}


@pytest.mark.parametrize("layout", WITH_INNER_AXIS)
def test_an_inner_axis_has_two_ranks_and_the_outer_one_the_rest(layout: Any) -> None:
    outer, inner = layout.axes
    assert layout().sizes(8) == {outer: 4, inner: 2}
    assert layout(**{inner: 4}).sizes(8) == {outer: 2, inner: 4}
    assert layout(**{outer: 1, inner: 8}).sizes(8) == {outer: 1, inner: 8}


@pytest.mark.parametrize(
    ("layout", "num_ranks", "sentence"),
    [
        (
            DataParallel(dp=3),
            2,
            r"parallel=ddp lays out 3 ranks \(dp 3\), but there are 2: give launch.nproc_per_node=3, or ",
        ),
        (TensorThenFullySharded(), 3, r"parallel=tp_fsdp lays out 2 ranks \(dp 1 x tp 2\), but there are 3: "),
        (
            DataParallelPipeline(dp=2, pp=3),
            4,
            "sizes whose product is 4 with parallel.dp=<ranks> and parallel.pp=<ranks>",
        ),
        (Single(), 2, "parallel=single trains on one rank, but there are 2"),
    ],
    ids=lambda value: value.name if isinstance(value, Layout) else "",
)
def test_ranks_that_do_not_fill_the_grid_are_refused_with_what_would(
    layout: Layout, num_ranks: int, sentence: str
) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        layout.check(num_ranks)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: FullySharded(dp=0), "parallel.dp=0: expected at least 1"),
        (lambda: TensorAndDataParallel(tp=-2), "parallel.tp=-2: expected at least 1"),
        (lambda: Pipeline(microbatches=0), "parallel.microbatches=0: expected at least 1"),
    ],
)
def test_a_size_below_one_is_refused(make: Any, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        make()


@given(outer=st.integers(1, 5), inner=st.integers(1, 5), layout=st.sampled_from(WITH_INNER_AXIS))
def test_every_rank_is_in_one_instance_of_each_group_and_shares_follow_the_data_axes(
    outer: int, inner: int, layout: Any
) -> None:
    made: Layout = layout(**dict(zip(layout.axes, (outer, inner), strict=True)))
    num_ranks = outer * inner
    for axis, size in made.sizes(num_ranks).items():
        instances = made.instances(axis, num_ranks)
        assert sorted(rank for ranks in instances for rank in ranks) == list(range(num_ranks))
        assert {len(ranks) for ranks in instances} == {size}
    places = [made.position(rank, num_ranks) for rank in range(num_ranks)]
    assert len({tuple(place.items()) for place in places}) == num_ranks
    for rank, place in enumerate(places):
        share, count = made.share(rank, num_ranks)
        data = [place[axis] for axis in made.data_axes]
        assert 0 <= share < count
        assert [r for r in range(num_ranks) if made.share(r, num_ranks)[0] == share] == [
            r for r, other in enumerate(places) if [other[axis] for axis in made.data_axes] == data
        ]
    speakers = [made.share(rank, num_ranks)[0] for rank in range(num_ranks) if made.knows_loss(rank, num_ranks)]
    assert speakers == list(range(made.share(0, num_ranks)[1])), (
        "one rank speaks for each part, in the order of the parts"
    )


def test_neighbours_hold_parts_of_one_copy() -> None:
    assert TensorAndDataParallel().instances("tp", 4) == [[0, 1], [2, 3]]
    assert TensorAndDataParallel().instances("dp", 4) == [[0, 2], [1, 3]]
    assert DataParallelPipeline().instances("pp", 6) == [[0, 1], [2, 3], [4, 5]]


def test_ranks_that_cut_one_layer_drop_out_alike_and_all_others_do_not() -> None:
    assert [TensorThenFullySharded().stream(rank, 4) for rank in range(4)] == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert [DataParallelPipeline().stream(rank, 4) for rank in range(4)] == [(rank, 4) for rank in range(4)]
    assert [HybridSharded().stream(rank, 4) for rank in range(4)] == [(rank, 4) for rank in range(4)]


def test_the_last_stage_knows_the_loss() -> None:
    assert [Pipeline().knows_loss(rank, 3) for rank in range(3)] == [False, False, True]
    assert [DataParallelPipeline().knows_loss(rank, 4) for rank in range(4)] == [False, True, False, True]


def test_a_batch_is_cut_into_micro_batches_of_shares() -> None:
    assert DataParallel().num_parts(3) == 3
    assert Pipeline().num_parts(3) == 3
    assert DataParallelPipeline(microbatches=4).num_parts(4) == 8
    assert TensorThenFullySharded().num_parts(4) == 2


def test_a_model_that_cannot_be_cut_so_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="parallel.tp=3 cuts the model across its heads, .* their number, 4"):
        TensorThenFullySharded(tp=3).fit(GPT(), 3)
    with pytest.raises(ConfigurationError, match="parallel.pp=6 asks for more stages than the model has layers, 5"):
        Pipeline().fit(GPT(), 6)
    TensorAndDataParallel(tp=4).fit(GPT(), 4)
    Pipeline().fit(GPT(), 5)


def test_only_layouts_that_cut_inside_a_model_ask_it_how() -> None:
    for layout in (Single(), DataParallel(), Accelerated(), FullySharded(), HybridSharded(fsdp=1)):
        layout.fit(torch.nn.Linear(2, 2), 1)
    for layout, name, key in (
        (TensorThenFullySharded(tp=1), "tensor_plan", "plan"),
        (TensorAndDataParallel(tp=1), "tensor_plan", "plan"),
        (Pipeline(), "keep_stage", "stages"),
        (DataParallelPipeline(pp=1), "keep_stage", "stages"),
    ):
        said = rf"parallel={layout.name} cuts inside the model, and Linear has no {name} .* give parallel\.{key}\._target_="
        with pytest.raises(ConfigurationError, match=said):
            layout.fit(torch.nn.Linear(2, 2), 1)


def test_a_plan_that_names_no_module_or_leaves_half_a_module_out_is_refused() -> None:
    attention = torch.nn.MultiheadAttention(4, 2)
    with pytest.raises(ConfigurationError, match=r"the plan cuts outproj, and MultiheadAttention has no such module"):
        TensorAndDataParallel(tp=1, plan={"outproj": RowwiseParallel()}).fit(attention, 1)
    with pytest.raises(ConfigurationError, match=r"MultiheadAttention holds parameters beside modules of its own"):
        TensorAndDataParallel(tp=1, plan={"out_proj": RowwiseParallel()}).fit(attention, 1)
    TensorAndDataParallel(tp=1, plan={"0.*": RowwiseParallel()}).fit(torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2))), 1)


def test_gradients_travel_in_buckets_of_one_data_type_and_bounded_size() -> None:
    third = BUCKET_BYTES // 12 + 1  # float32 elements
    tensors = [torch.empty(third) for _ in range(4)] + [torch.empty(2, dtype=torch.bfloat16), torch.empty(2)]
    buckets = list(_buckets(tensors))
    assert [len(bucket) for bucket in buckets] == [2, 2, 1, 1]
