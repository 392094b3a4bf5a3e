"""Reductions of what ranks say: the same in whatever order, and in whatever groups, their parts are merged."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.ranks.merging import (
    Alike,
    Merged,
    alike,
    alike_by_name,
    ended,
    first,
    first_difference,
    least,
    merged,
    most,
    slowest,
    total,
)
from ckpt.ranks.topology import Topology
from tests.support.ranks import run_threads

NAMES = st.sampled_from(["a", "b", "c"])
SMALL = st.integers(-3, 3)


def _said(number: int, pair: list[int], by_name: dict[str, int]) -> dict[str, Merged]:
    return {
        "sum": total({"numbers": [number, 1], "names": by_name}),
        "most": most(pair),
        "least": least(number),
        "alike": alike(number),
        "names": alike_by_name(by_name),
        "first": first(by_name),
    }


SAID = st.lists(st.builds(_said, SMALL, st.lists(SMALL, min_size=2, max_size=2), st.dictionaries(NAMES, SMALL)), min_size=1, max_size=8)


@given(said=SAID, seed=st.integers(0, 1000))
def test_the_order_of_a_reduction_does_not_count_and_ranks_that_say_the_same_count_as_often(
    said: list[dict[str, Merged]], seed: int
) -> None:
    sent = [json.dumps(one) for one in said]
    in_order = ended(merged((json.loads(one), rank, 1) for rank, one in enumerate(sent)))
    once = [(json.loads(one), sent.index(one), sent.count(one)) for one in set(sent)]
    random.Random(seed).shuffle(once)
    assert ended(merged(once)) == in_order
    numbers = [one["least"].value for one in said]
    assert in_order["least"] == min(numbers) and in_order["most"] == max(one["most"].value for one in said)
    assert in_order["sum"]["numbers"] == [sum(numbers), len(said)]
    odd = next((rank for rank, number in enumerate(numbers) if number != numbers[0]), None)
    assert in_order["alike"] == Alike(numbers[0], odd, None if odd is None else numbers[odd])
    for name in {name for one in said for name in one["first"].value}:
        having = [(rank, one["first"].value[name]) for rank, one in enumerate(said) if name in one["first"].value]
        assert in_order["first"][name] == having[0]
        assert in_order["sum"]["names"][name] == sum(value for _, value in having)
        values = [value for _, value in having]
        assert in_order["names"][name].is_alike == (len(set(values)) == 1)


def test_the_first_difference_is_that_of_the_lowest_rank() -> None:
    said = [{"a": alike(1), "b": alike("x")}, {"a": alike(1), "b": alike("y")}, {"a": alike(2), "b": alike("y")}]
    found = ended(merged((one, rank, 1) for rank, one in enumerate(said)))
    assert first_difference(found) == ("b", 1, "y", "x")
    assert first_difference({"a": Alike(1, None, None)}) is None


def test_of_equally_slow_ranks_the_lowest_is_named() -> None:
    said = [{"s": slowest(seconds, rank)} for rank, seconds in enumerate([0.5, 2.0, 2.0])]
    assert ended(merged((one, rank, 1) for rank, one in enumerate(said)))["s"] == [2.0, -1]


# In phases


def _typed(topology: Topology) -> dict[str, Any]:
    with topology.operation("save of x"), topology.phase("collect") as phase:
        phase.to_lead = f"of {topology.rank}"
        phase.from_lead = {"path": topology.rank}
        phase.merge = {"bytes": total(2**topology.rank), "alike": alike(topology.rank // 2)}
        if topology.rank == 1:
            phase.payload = ["only mine"]
    return {
        "gathered": phase.gathered,
        "from_lead": phase.from_lead,
        "merged": phase.merged,
        "payloads": phase.payloads,
    }


def test_what_a_rank_says_reaches_those_who_need_it_and_nobody_else() -> None:
    for_all = {
        "from_lead": {"path": 0},
        "merged": {"bytes": 7, "alike": Alike(0, 2, 1)},
        "payloads": [None, ["only mine"], None],
    }
    on_lead, *others = run_threads(3, _typed)
    assert on_lead == for_all | {"gathered": ["of 0", "of 1", "of 2"]}
    assert others == [for_all | {"gathered": []}] * 2
    with Topology.alone() as alone, alone.phase("collect") as phase:
        phase.to_lead, phase.from_lead, phase.merge = 1, 2, {"n": total(3)}
    assert (phase.gathered, phase.from_lead, phase.merged, phase.payloads) == ([1], 2, {"n": 3}, [None])


def _answered(topology: Topology) -> Any:
    with topology.phase("collect") as phase:
        phase.to_lead = topology.rank
        phase.merge = {"n": total(1)}
        phase.answer = lambda: [sum(phase.gathered), phase.merged["n"]]
    return phase.from_lead, phase.merged if topology.rank else None


def test_the_lead_answers_from_what_all_have_said_and_only_its_answer_goes_down() -> None:
    assert run_threads(3, _answered) == [([3, 3], None), ([3, 3], {}), ([3, 3], {})]


def _refused(topology: Topology) -> tuple[str, int | None, str | None, bool]:
    def refuse() -> None:
        raise ConfigurationError(f"{phase.gathered} are not alike")

    with pytest.raises(ConfigurationError) as caught, topology.operation("save of x"), topology.phase("compare") as phase:
        phase.to_lead = topology.rank
        phase.answer = refuse
    with topology.phase("next"):
        pass
    return str(caught.value), caught.value.rank, caught.value.phase, isinstance(caught.value.__cause__, ConfigurationError)


def test_what_the_lead_raises_in_its_answer_all_ranks_raise() -> None:
    said = ("save of x: [0, 1] are not alike", None, "compare")
    assert run_threads(2, _refused) == [(*said, True), (*said, False)]


def _failing_before(topology: Topology) -> str:
    asked = []
    with pytest.raises(CheckpointError) as caught, topology.phase("compare") as phase:
        phase.answer = lambda: asked.append("answered")
        if topology.rank == 1:
            raise OSError("no")
    assert asked == [], "a phase that has failed asks for no answer"
    return str(caught.value)


def test_no_answer_is_made_of_a_phase_that_a_rank_has_failed() -> None:
    assert set(run_threads(2, _failing_before)) == {"phase compare failed on rank 1: OSError: no"}


def _no_json(topology: Topology) -> str:
    with pytest.raises(CheckpointError) as caught, topology.phase("compare") as phase:
        phase.from_lead = {1, 2}
    return str(caught.value)


def test_an_answer_that_is_no_json_fails_the_phase_on_all_ranks() -> None:
    (said,) = set(run_threads(2, _no_json))
    assert "set is not JSON serializable" in said
