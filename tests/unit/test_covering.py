"""Fewer rows than the product, and yet every pair of values meets."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.covering import covering, rows, sampled

_AXES = st.lists(st.integers(1, 5), min_size=2, max_size=5).map(
    lambda sizes: {f"axis {n}": [f"{n}.{value}" for value in range(size)] for n, size in enumerate(sizes)}
)


@given(_AXES, st.sampled_from([1, 2]))
def test_every_choice_of_as_many_axes_as_asked_for_occurs(axes: dict[str, list[str]], strength: int) -> None:
    found = {chosen for row in rows(axes, strength) for chosen in itertools.combinations(row, strength)}
    wanted = {chosen for some in itertools.combinations(axes.values(), strength) for chosen in itertools.product(*some)}
    assert found == wanted


def test_rows_that_are_not_possible_are_left_out_and_all_others_are_in_the_product() -> None:
    def differ(*row: Any) -> bool:
        return len(set(row)) == len(row)

    axes = {"one": [1, 2, 3], "other": [1, 2, 3]}
    assert (
        sorted(rows(axes, 2, differ))
        == sorted(rows(axes, None, differ))
        == [(1, 2), (1, 3), (2, 1), (2, 3), (3, 1), (3, 2)]
    )


def test_what_only_a_run_of_everything_tries_is_marked_so() -> None:
    mark = covering({"backend": "abc", "setting": "xyz", "device": "12"}).mark
    names, params = mark.args
    full = [param for param in params if param.marks]
    assert names == ("backend", "setting", "device") and len(params) == 18 and len(full) == 9
    assert all(mark.name == "full" for param in full for mark in param.marks)
    assert sorted(param.values for param in params) == sorted(itertools.product("abc", "xyz", "12"))


def test_rows_behind_the_first_are_marked_and_keep_their_names_and_marks() -> None:
    skipped = pytest.param("c", 3, marks=pytest.mark.npu, id="third")
    _, params = sampled(("letter", "number"), [("a", 1), ("b", 2), skipped], 1).mark.args
    assert params[0].values == ("a", 1) and not params[0].marks
    assert [(param.values, param.id) for param in params[1:]] == [(("b", 2), None), (("c", 3), "third")]
    assert [[mark.name for mark in param.marks] for param in params[1:]] == [["full"], ["npu", "full"]]


def test_a_row_of_one_name_may_be_a_tuple() -> None:
    _, params = sampled("pair", [(1, 2), (3, 4)]).mark.args
    assert [param.values for param in params] == [((1, 2),), ((3, 4),)]
