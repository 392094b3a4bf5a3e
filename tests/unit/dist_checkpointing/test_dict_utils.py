from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckpt.dist_checkpointing.dict_utils import (
    dict_list_map_inplace,
    dict_list_map_outplace,
    dict_map,
    dict_map_with_key,
    diff,
    extract_matching_values,
    inspect_types,
    map_reduce,
    merge,
    nested_items_iter,
    nested_values,
)
from ckpt.errors import CheckpointError
from ckpt.state.sharded_tensor import ShardedTensor
from tests.support.states import ALL_DTYPES, random_bits

Nested = dict[Any, Any] | list[Any]
leaves = st.integers(-9, 9) | st.text(max_size=2) | st.tuples(st.integers(0, 1))
keys = st.text("abc", min_size=1, max_size=2)
trees = st.recursive(
    leaves, lambda below: st.lists(below, max_size=3) | st.dictionaries(keys, below, max_size=3), max_leaves=12
).filter(lambda tree: isinstance(tree, dict | list))


def is_number(leaf: Any) -> bool:
    return isinstance(leaf, int)


def test_matching_leaves_and_the_others_keep_the_nesting() -> None:
    """S1.77"""
    state = {"a": 1, "b": {"c": "x", "d": [2, "y", [3]]}, "e": (4, "z")}
    assert extract_matching_values(state, is_number) == (
        {"a": 1, "b": {"d": [2, [3]]}},
        {"b": {"c": "x", "d": ["y"]}, "e": (4, "z")},
    )


def test_lists_as_dicts_still_say_where_everything_was() -> None:
    """S1.77"""
    state = ["x", 1, {"a": [2, "y"]}]
    matching, others = extract_matching_values(state, is_number, return_lists_as_dicts=True)
    assert matching == {1: 1, 2: {"a": {0: 2}}}
    assert others == {0: "x", 2: {"a": {1: "y"}}}


def test_an_empty_container_goes_to_the_others_and_in_a_list_is_asked_about() -> None:
    """S1.77"""
    assert extract_matching_values({"a": {}, "b": [], "c": 1}, is_number) == ({"c": 1}, {"a": {}, "b": []})
    assert extract_matching_values([1, [], {}], lambda leaf: True) == ([1, [], {}], [])


@given(tree=trees)
def test_the_two_parts_have_every_leaf_once_and_the_whole_is_left_as_it_was(tree: Nested) -> None:
    """S1.77"""
    before = copy.deepcopy(tree)
    matching, others = extract_matching_values(tree, is_number)
    assert tree == before
    assert [*nested_values(matching)] == [leaf for leaf in nested_values(tree) if is_number(leaf)]
    assert [leaf for leaf in nested_values(others) if leaf not in ([], {})] == [
        leaf for leaf in nested_values(tree) if not is_number(leaf)
    ]


@given(tree=trees)
def test_parts_with_lists_as_dicts_merge_back_to_the_whole(tree: Nested) -> None:
    """S1.77"""

    def as_dicts(x: Any) -> Any:
        if not isinstance(x, dict | list):
            return x
        return {key: as_dicts(value) for key, value in (x.items() if isinstance(x, dict) else enumerate(x))}

    matching, others = extract_matching_values(tree, is_number, return_lists_as_dicts=True)
    assert as_dicts(merge(matching, others)) == as_dicts(tree)


def test_only_dicts_and_lists_are_parted() -> None:
    with pytest.raises(CheckpointError, match="a tuple is given where a dict or list is split"):
        extract_matching_values((1, 2), is_number)  # type: ignore[call-overload]


def test_leaves_are_named_by_the_container_they_are_in() -> None:
    """S1.77"""
    inner = ["x"]
    state = {"a": 1, "b": {}, "c": [{"d": inner}, (2,)]}
    found = list(nested_items_iter(state))
    assert found == [(state, "a", 1), (inner, 0, "x"), (state["c"], 1, (2,))]
    assert found[1][0] is inner


def test_maps_in_place_change_the_containers_and_maps_out_of_place_do_not() -> None:
    """S1.77"""
    inner = [1, {"a": 2}]
    state = {"x": inner, "y": 3}
    assert dict_list_map_outplace(lambda leaf: leaf * 10, state) == {"x": [10, {"a": 20}], "y": 30}
    assert state == {"x": [1, {"a": 2}], "y": 3}
    assert dict_list_map_inplace(lambda leaf: leaf * 10, state) is state
    assert (state, inner) == ({"x": [10, {"a": 20}], "y": 30}, [10, {"a": 20}])
    dict_map(str, state)
    assert inner == ["10", {"a": "20"}]
    dict_map_with_key(lambda key, leaf: f"{key}={leaf}", state)
    assert state == {"x": ["0=10", {"a": "a=20"}], "y": "y=30"}


def test_a_leaf_alone_is_mapped_and_what_the_function_returns_is_not_looked_into() -> None:
    """S1.77"""
    assert dict_list_map_inplace(str, 1) == dict_list_map_outplace(str, 1) == "1"
    state: Nested = {"a": 1, "b": [2]}
    assert dict_list_map_inplace(lambda leaf: {"was": leaf}, state) == {"a": {"was": 1}, "b": [{"was": 2}]}


def test_a_container_that_stands_in_two_places_is_mapped_once() -> None:
    """S1.77: a prefix is not added twice because two names lead to one dictionary."""
    shared = {"w": 1}
    state = {"a": shared, "b": [shared]}
    dict_list_map_inplace(lambda leaf: leaf + 1, state)
    assert shared == {"w": 2}
    assert state["a"] is state["b"][0] is shared


def test_merge_fills_the_first_and_returns_it() -> None:
    """S1.77"""
    first: dict[str, Any] = {"a": {"b": 1}, "c": [{"d": 2}, {}]}
    assert merge(first, {"a": {"e": 3}, "c": [{"f": 4}, {"g": 5}], "h": 6}) is first
    assert first == {"a": {"b": 1, "e": 3}, "c": [{"d": 2, "f": 4}, {"g": 5}], "h": 6}


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ({"x": 0, "a": {"b": [{"c": "2"}]}}, "a.b.0.c is in both state dicts, as int and as str;"),
        ({"x": 0, "a": {"b": [{}, {}]}}, "a.b is a list of length 1 in one state dict and 2 in the other;"),
        ({"x": 0, "a": {"b": {0: {"d": 1}}}}, "a.b is in both state dicts, as list and as dict;"),
        ([], "the top level is in both state dicts, as dict and as list;"),
    ],
)
def test_a_merge_that_would_lose_a_value_names_the_place_and_changes_nothing(second: Any, says: str) -> None:
    """S1.77: conflicts name the path; no value is printed, for it may be a gigabyte of tensor."""
    first = {"a": {"b": [{"c": 1}]}}
    with pytest.raises(CheckpointError) as refused:
        merge(first, second)
    assert str(refused.value).startswith(says)
    assert first == {"a": {"b": [{"c": 1}]}}


def test_a_conflict_below_a_given_path_is_named_with_it() -> None:
    with pytest.raises(CheckpointError, match="model.w is in both state dicts, as Tensor and as Tensor"):
        merge({"w": torch.zeros(2)}, {"w": torch.zeros(2)}, key=("model",))


def test_groups_are_reduced_one_by_one() -> None:
    """S1.77"""
    assert map_reduce([3, 1, 3]) == {3: [3, 3], 1: [1]}
    assert map_reduce(range(10), key_fn=lambda x: x % 3, value_fn=lambda x: x * x, reduce_fn=sum) == {
        0: 0 + 9 + 36 + 81,
        1: 1 + 16 + 49,
        2: 4 + 25 + 64,
    }


def test_a_difference_is_named_by_its_path_in_either_side_or_both() -> None:
    """S1.77"""
    left = {"same": [1, (2, {"x": "y"})], "a": 1, "deep": {"list": [1, 2, 3], "tuple": (1, "b")}}
    right = {"same": [1, (2, {"x": "y"})], "b": 1, "deep": {"list": [1, 4], "tuple": (1, 2)}}
    assert diff(left, right) == (
        [("a",), ("deep", "list", 2)],
        [("b",)],
        [(("deep", "list", 1), int, int), (("deep", "tuple", 1), str, int)],
    )
    assert diff(left, right, prefix=("top",))[1] == [("top", "b")]


@given(tree=trees)
def test_nothing_differs_from_its_copy(tree: Nested) -> None:
    """S1.77"""
    assert diff(tree, copy.deepcopy(tree)) == ([], [], [])


@given(tree=trees, data=st.data())
def test_one_changed_leaf_is_the_one_difference(tree: Nested, data: st.DataObject) -> None:
    """S1.77"""
    other = copy.deepcopy(tree)
    places = list(nested_items_iter(other))
    if places:
        container, key, leaf = data.draw(st.sampled_from(places))
        container[key] = object()
        left, right, mismatch = diff(tree, other)
        assert (left, right) == ([], [])
        assert [(path[-1], kinds) for path, *kinds in mismatch] == [(key, [type(leaf), object])]


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_tensors_are_equal_bit_for_bit_or_not_at_all(dtype: torch.dtype) -> None:
    """S1.77: NaN equals the same NaN, another payload does not, nor do the two zeros."""
    tensor = random_bits((3, 5), dtype, 1)
    assert diff({"w": tensor}, {"w": tensor.clone()}) == ([], [], [])
    assert diff(tensor.T, tensor.T.contiguous()) == ([], [], [])
    flipped = tensor.clone()
    flipped.view(torch.uint8)[2, -1] ^= 1
    assert diff({"w": tensor}, {"w": flipped}) == ([], [], [(("w",), torch.Tensor, torch.Tensor)])


def test_zeros_of_two_signs_differ_in_tensors_and_shape_and_type_count() -> None:
    """S1.77"""
    zero = torch.zeros(4)
    for other in (-zero, zero.view(2, 2), zero.view(torch.int32), zero[:3], zero.to("meta")):
        assert diff(zero, other)[2] == [((), torch.Tensor, torch.Tensor)]
    assert diff(torch.view_as_complex(torch.ones(2, 2)).conj(), torch.tensor([1 - 1j, 1 - 1j])) == ([], [], [])


def test_arrays_are_compared_bit_for_bit_and_those_of_objects_one_by_one() -> None:
    """S1.77"""
    array = np.array([1.0, np.nan])
    assert diff(array, array.copy()) == ([], [], [])
    assert diff(array, array.astype(np.float32))[2] == [((), np.ndarray, np.ndarray)]
    objects = np.array([1, "a", None], dtype=object)
    other = objects.copy()
    other[1] = "b"
    assert diff(objects, other) == ([], [], [((1,), str, str)])
    assert diff(np.array({1: 2}, dtype=object), np.array({1: 2}, dtype=object)) == ([], [], [])


class Stubborn:
    """Refuses to be compared, like a tensor-like object of a library that is not there."""

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.zeros(2), 0),
        (torch.zeros(1), np.zeros(1)),
        (np.zeros(2), [0.0, 0.0]),
        ([1], (1,)),
        ({"a": 1}, [1]),
        (None, {}),
        ("1", 1),
        (Stubborn(), Stubborn()),
        (Stubborn(), 3),
        (np.zeros(3), "zeros"),
        (torch.zeros(2).to_sparse(), torch.zeros(2)),
        (ShardedTensor.from_rank_offsets("w", torch.zeros(2)), torch.zeros(2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_of_different_kinds_differ_and_nothing_is_raised(left: Any, right: Any) -> None:
    """S1.77"""
    assert diff({"v": left}, {"v": right}) == ([], [], [(("v",), type(left), type(right))])
    assert diff([right], [left]) == ([], [], [((0,), type(right), type(left))])


def test_equal_values_of_related_types_are_equal_and_so_is_a_nan_to_itself() -> None:
    """S1.77"""
    assert diff({"a": 1, "b": OrderedDict(x=1), "c": float("nan")}, {"a": 1.0, "b": {"x": 1}, "c": float("nan")}) == (
        [],
        [],
        [],
    )
    stubborn = Stubborn()
    assert diff([stubborn], [stubborn]) == ([], [], [])


def test_the_data_of_sharded_tensors_are_compared() -> None:
    """S1.77"""
    one, other = (ShardedTensor.from_rank_offsets("w", torch.arange(3.0) * n, (0, 0, 2)) for n in (1, 2))
    same = ShardedTensor.from_rank_offsets("w", torch.arange(3.0), (0, 0, 2))
    assert diff({"w": one}, {"w": same}) == ([], [], [])
    assert diff({"w": one}, {"w": other}) == ([], [], [(("w", ShardedTensor), torch.Tensor, torch.Tensor)])


def test_types_are_printed_as_a_tree(capsys: pytest.CaptureFixture[str]) -> None:
    """S1.77"""

    class Mute:
        def __str__(self) -> str:
            raise RuntimeError("no")

    inspect_types({"model": {"w": torch.zeros(2, 3, dtype=torch.bfloat16)}, "steps": [1, "x" * 50], "m": Mute()})
    assert capsys.readouterr().out.splitlines() == [
        "> model:",
        "    > w: Tensor bfloat16 [2, 3]",
        "> steps:",
        "    - 0: [int] 1",
        "    - 1: [str] " + "x" * 27 + "...",
        "> m: [Mute] (str() raised RuntimeError)",
    ]
    inspect_types([1], prefix=("a",), indent=2)
    assert capsys.readouterr().out == "  - 0: [int] 1\n"


def looped() -> dict[str, Any]:
    state: dict[str, Any] = {"a": [{}]}
    state["a"][0]["again"] = state["a"]
    return state


def deep() -> dict[str, Any]:
    state: dict[str, Any] = {"leaf": 1}
    for _ in range(20_000):
        state = {"a": state}
    return state


@pytest.mark.parametrize("make", [looped, deep])
@pytest.mark.parametrize(
    "call",
    [
        lambda state: extract_matching_values(state, is_number),
        lambda state: dict_list_map_outplace(str, state),
        lambda state: list(nested_values(state)),
        lambda state: diff(state, copy.copy(state)),
        inspect_types,
    ],
    ids=["extract", "outplace", "values", "diff", "inspect"],
)
def test_what_nests_without_end_is_refused_in_a_sentence(
    make: Callable[[], dict[str, Any]], call: Callable[[dict[str, Any]], Any]
) -> None:
    """S1.77"""
    with pytest.raises(CheckpointError, match="holds itself, or nests deeper than Python can follow"):
        call(make())
