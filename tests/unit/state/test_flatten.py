"""Nested state dicts, their leaves, and plain values as JSON."""

from __future__ import annotations

import argparse
import copy
import enum
import io
import json
import logging
import math
import pickle
import re
import sys
import types
from collections import OrderedDict
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.errors import ConfigurationError, CorruptCheckpointError, ShardingError
from ckpt.format.unknown import UnknownObject
from ckpt.interop.unpickling import unknown_in
from ckpt.state.flatten import flatten, path_from_json, path_to_json, unflatten
from ckpt.state.plain import from_json, to_json

scalars = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
    | st.complex_numbers(allow_nan=False)
)  # fmt: skip
plain_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=12,
)


def same(a: Any, b: Any) -> bool:
    """Equal values of equal types, all the way down."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@given(plain_values)
@settings(deadline=None)
def test_plain_values_come_back_from_json_with_their_types(value: Any) -> None:
    assert same(from_json(json.loads(json.dumps(to_json(value, "x")))), value)


def test_non_finite_floats_are_standard_json_and_come_back() -> None:
    text = json.dumps(to_json([math.inf, -math.inf, math.nan], "x"), allow_nan=False)
    back = from_json(json.loads(text))
    assert back[:2] == [math.inf, -math.inf]
    assert math.isnan(back[2])


@pytest.mark.parametrize("dtype", ["<u4", "<f8", "|b1", "<c16", "<i2"])
def test_numpy_arrays_and_scalars_come_back_bit_for_bit(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    back = from_json(json.loads(json.dumps(to_json(array, "x"))))
    assert back.dtype == array.dtype
    assert back.tobytes() == array.tobytes()
    one = array[1, 2]
    assert same(from_json(to_json(one, "x")), one)


def test_a_dictionary_that_looks_like_a_tag_is_not_taken_for_one() -> None:
    for value in ({"~float": "nan"}, {"~tuple": [1]}, {"~": 0, "x": 1}):
        assert same(from_json(json.loads(json.dumps(to_json(value, "x")))), value)


@pytest.mark.parametrize("kind", ["Fraction", "Decimal"])
def test_a_number_of_more_digits_than_were_written_is_refused_at_once(kind: str) -> None:
    """`Fraction("1e999999999")` takes minutes, and all memory."""
    with pytest.raises(CorruptCheckpointError, match="a plain value is invalid: .*1e999999999"):
        from_json({f"~{kind}": "1e999999999"})
    assert from_json({"~Decimal": "1E+999999999"}) == Decimal("1e999999999")


def test_a_value_that_would_need_pickle_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"dataset: worker\.fn is a builtins\.function.*nothing is pickled"):
        flatten({"worker": {"fn": lambda: None}}, "dataset")


def test_nested_tensors_get_joined_keys_and_return_to_their_places() -> None:
    state = {
        "state": {0: {"exp_avg": torch.arange(3), "step": torch.tensor(5)}, 1: {}},
        "groups": [{"lr": 0.1, "params": [0, 1]}],
        "history": [torch.arange(2), {"x": (torch.arange(4), "y")}],
    }
    leaves = flatten(state, "optimizer")
    assert sorted(leaves.tensors) == ["history.0", "history.1.x.0", "state.0.exp_avg", "state.0.step"]
    assert leaves.plain == {"state.1": {}, "groups": [{"lr": 0.1, "params": [0, 1]}], "history.1.x.1": "y"}
    back = unflatten({**leaves.tensors, **leaves.plain}, leaves.paths)
    assert back["state"][0]["exp_avg"] is state["state"][0]["exp_avg"]
    assert back["history"][1]["x"][0] is state["history"][1]["x"][0]
    assert type(back["history"][1]["x"]) is tuple
    assert back["groups"] == state["groups"]
    assert back["state"][1] == {}


def test_paths_survive_json() -> None:
    leaves = flatten({"a": [torch.arange(1)], 3: {"b.c": torch.arange(2)}}, "x")
    for key, path in leaves.paths.items():
        assert path_from_json(json.loads(json.dumps(path_to_json(path)))) == path, key


def test_two_leaves_with_one_joined_key_are_refused() -> None:
    with pytest.raises(ShardingError, match="'a.b'"):
        flatten({"a": {"b": 1}, "a.b": 2}, "model")


def test_mappings_of_other_kinds_are_entered_and_an_empty_state_is_empty() -> None:
    assert flatten(OrderedDict(w=torch.arange(2)), "m").tensors.keys() == {"w"}
    empty = flatten({}, "m")
    assert (empty.tensors, empty.plain) == ({}, {})


def test_plain_keys_of_any_kind_come_back_as_they_were() -> None:
    state = {("a", torch.bfloat16): {"w": torch.arange(3), True: 1, 1.5: [2, torch.ones(1)]}, None: (3,), 7: "x"}
    leaves = flatten(state, "m")
    paths = {key: path_from_json(json.loads(json.dumps(path_to_json(path)))) for key, path in leaves.paths.items()}
    back = unflatten({**leaves.tensors, **leaves.plain}, paths)
    assert set(back) == set(state)
    inner = state["a", torch.bfloat16]
    assert set(back["a", torch.bfloat16]) == set(inner)
    assert back["a", torch.bfloat16]["w"] is inner["w"]
    assert back["a", torch.bfloat16][1.5][1] is inner[1.5][1]
    assert (back[None], back[7]) == ((3,), "x")


def test_a_key_that_is_not_plain_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="key is a builtins.object"):
        flatten({object(): 2}, "m")


class Colour(enum.IntEnum):
    RED = 1
    CRIMSON = 1  # an alias


class Rights(enum.Flag):
    READ = 1
    WRITE = 2
    RUN = 4
    ALL = 7


class Model:
    class Kind(enum.Enum):
        A = "a"


class Bits(enum.IntFlag):
    A = 1


class Dropping(enum.Flag, boundary=enum.CONFORM):
    A = 1


@pytest.mark.parametrize(
    "value",
    [
        argparse.Namespace(lr=0.1, dtype=torch.bfloat16, deep=argparse.Namespace(a=(1,))),
        types.SimpleNamespace(a=None),
        torch.Size([2, 3]),
        {"b", "a"},
        frozenset({1, (2, "x")}),
        torch.float8_e4m3fn,
        argparse.Namespace(**{"lr": 1, "no name\n": 2}),
        Colour.RED,
        Colour.CRIMSON,
        Rights.READ,
        Rights.READ | Rights.WRITE,
        Rights.ALL,
        Rights(0),
        Model.Kind.A,
        Bits.A | 8,
        ~Bits.A,
    ],
)
def test_what_training_scripts_keep_beside_tensors_comes_back(value: Any) -> None:
    back = from_json(json.loads(json.dumps(to_json(value, "x"))))
    assert type(back) is type(value)
    assert back == value


def test_a_namespace_that_holds_tensors_is_taken_apart_and_made_again() -> None:
    """Megatron-Core's common state keeps the program's arguments in one; nothing else is entered for it."""
    tensor = torch.arange(3)
    deep = types.SimpleNamespace(t=tensor, self="x")
    state = {"args": argparse.Namespace(mask=tensor, lr=0.1, of=[deep, (1, tensor)]), "plain": argparse.Namespace(a=1)}
    leaves = flatten(state, "common")
    assert list(leaves.tensors) == ["args.mask", "args.of.0.t", "args.of.1.1"]
    assert leaves.plain == {"args.lr": 0.1, "args.of.0.self": "x", "args.of.1.0": 1, "plain": state["plain"]}
    paths = {key: path_from_json(json.loads(json.dumps(path_to_json(path)))) for key, path in leaves.paths.items()}
    back = unflatten({**leaves.tensors, **leaves.plain}, paths)
    assert type(back["args"]) is argparse.Namespace and type(back["args"].of[0]) is types.SimpleNamespace
    assert back["args"].mask is tensor and back["args"].of[0] == deep and back["args"].of[1] == (1, tensor)
    assert (back["args"].lr, back["plain"]) == (0.1, state["plain"])


@pytest.mark.parametrize("steps", [([0, "list"], ["x", "Namespace"]), (["x", "SimpleNamespace"], [0, "tuple"])])
def test_paths_that_make_one_value_a_list_and_a_namespace_are_refused(steps: tuple[list[Any], ...]) -> None:
    paths = {str(step): path_from_json(["a", step]) for step in steps}
    with pytest.raises(CorruptCheckpointError, match="a path in plain.json is invalid"):
        unflatten(dict.fromkeys(paths, 1), paths)


@pytest.mark.parametrize(
    "paths",
    [
        {"x": ("a",), "y": ("a", (0, "list"))},
        {"y": ("a", (0, "list")), "x": ("a",)},
        {"x": ("a",), "y": ("a", "b")},
        {"x": ("a", "b", "c"), "y": ("a", "b")},
        {"x": ("a",), "y": ("a",)},
    ],
)
def test_paths_that_lead_through_a_tensor_or_to_the_place_of_another_value_are_refused(paths: dict[str, Any]) -> None:
    tensor = torch.ones(3)
    with pytest.raises(CorruptCheckpointError, match="a path in plain.json is invalid"):
        unflatten({"x": tensor, "y": 7}, paths)
    assert tensor.tolist() == [1.0, 1.0, 1.0]


def test_bytes_in_memory_come_back_wherever_they_were_read_up_to() -> None:
    stream = io.BytesIO(b"\x00abc")
    stream.seek(2)
    assert from_json(json.loads(json.dumps(to_json(stream, "x")))).read() == b"\x00abc"


def test_a_set_has_the_same_json_in_every_process() -> None:
    assert to_json({"b", "a", "c"}, "x") == {"~set": ["a", "b", "c"]}


def test_a_namespace_takes_names_that_its_constructor_would_not() -> None:
    for made in (argparse.Namespace(), types.SimpleNamespace()):
        vars(made).update({"self": 1, "~x": (2,), 3: "three"})
        back = from_json(json.loads(json.dumps(to_json(made, "x"))))
        assert type(back) is type(made)
        assert same(vars(back), vars(made))


def local_enums() -> list[enum.Enum]:
    class Local(enum.Enum):
        A = 1

    class LocalFlag(enum.Flag):
        A = 1
        B = 2

    return [Local.A, LocalFlag.A | LocalFlag.B, enum.Enum("Colour", {"RED": 1}, module=__name__).RED]  # type: ignore[attr-defined]


def test_an_enum_member_that_no_load_would_find_is_refused_when_it_is_saved() -> None:
    """A class of a function, and one that another class of the module has the name of."""
    for member, named in zip(local_enums(), ("'A' of the enum .*Local", "3 of the enum .*LocalFlag", "'RED' of the enum Colour"),
                             strict=True):  # fmt: skip
        says = rf"^run: kind is {named}, which a load would not find under that name in module {__name__}; define the"
        with pytest.raises(ConfigurationError, match=says):
            flatten({"kind": member}, "run")


GONE = [
    ["this", "Zen", "A"],  # a module that nobody has imported
    [__name__, "Gone", "A"],
    [__name__, "Model.Gone", "A"],
    [__name__, "same", "A"],  # no enum
    [__name__, "Colour", "GONE"],
    [__name__, "Colour", 5],
    [__name__, "Rights", 8],  # a bit that is none
    [__name__, "Dropping", 3],  # a bit that the class would drop without a word
]


@pytest.mark.parametrize("place", GONE, ids=str)
def test_an_enum_member_that_is_not_there_is_stood_in_for_and_nothing_is_imported(place: list[Any]) -> None:
    """The rest comes back, and what is saved again is what was there."""
    stored = json.loads(json.dumps({"step": 7, "kinds": [{"~enum": place}, {"~enum": place}]}))
    back = from_json(stored)
    kind = back["kinds"][0]
    assert back["step"] == 7
    assert isinstance(kind, UnknownObject)
    assert (kind.name, kind.args, kind.state) == (f"{place[0]}.{place[1]}", (place[2],), None)
    assert unknown_in({"kind": kind}) == {"kind": kind.name}
    assert to_json(back, "x") == stored
    assert "this" not in sys.modules
    assert back["kinds"][1] is kind
    assert copy.deepcopy(kind) is kind
    assert pickle.loads(pickle.dumps(kind)) is kind


def test_a_member_that_stands_in_is_one_key_of_a_dictionary_however_often_it_is_met() -> None:
    place = json.dumps({"~enum": [__name__, "Gone", "KEY"]})
    paths = {"a": ((place, "key"), "a"), "b": ((place, "key"), "b")}
    (inner,) = unflatten({"a": 1, "b": 2}, paths).values()
    assert inner == {"a": 1, "b": 2}


def test_a_stand_in_is_warned_of_once_per_class_and_gives_way_to_the_class_that_is_there(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tags = [{"~enum": [__name__, "Late", name]} for name in ("A", "B", "A")]
    with caplog.at_level(logging.WARNING, "ckpt"):
        first = from_json(tags)
    (record,) = caplog.records
    assert record.name == "ckpt"
    assert record.getMessage().startswith(
        f"the checkpoint holds members of the enum Late of {__name__}, which this process does not"
    )
    late = enum.Enum("Late", "A B", module=__name__)  # type: ignore[misc]
    monkeypatch.setitem(globals(), "Late", late)
    assert from_json(tags) == [late["A"], late["B"], late["A"]]
    assert from_json(to_json(first, "x")) == [late["A"], late["B"], late["A"]]


def test_a_module_that_imports_for_an_attribute_is_not_asked_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = types.ModuleType("lazy_module")
    asked: list[str] = []
    monkeypatch.setattr(lazy, "__getattr__", asked.append, raising=False)
    monkeypatch.setitem(sys.modules, "lazy_module", lazy)
    assert isinstance(from_json({"~enum": ["lazy_module", "Kind", "A"]}), UnknownObject)
    assert asked == []


def test_an_empty_dictionary_of_one_rank_takes_nothing_away_from_what_others_have_there() -> None:
    empty: dict[str, int] = {}
    paths = {"state": ("state",), "state.w": ("state", "w")}
    for leaves in ({"state": empty, "state.w": 1}, {"state.w": 1, "state": empty}):
        assert unflatten(leaves, paths) == {"state": {"w": 1}}
    assert empty == {}
    assert unflatten({"state": empty}, paths) == {"state": {}}


@pytest.mark.parametrize(
    ("value", "way"),
    [
        ({"a": [1, {"b": object()}]}, "x.a[1].b"),
        (argparse.Namespace(sub=argparse.Namespace(v=(1, object()))), "x.sub.v[1]"),
        (object(), "x"),
    ],
)
def test_what_is_not_plain_is_named_with_the_way_to_it(value: Any, way: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^{re.escape(way)} is a builtins.object"):
        to_json(value, "x")


def test_an_object_that_gives_no_dictionary_gives_one_plain_value() -> None:
    leaves = flatten(None, "x")  # type: ignore[arg-type]
    assert (leaves.plain, leaves.paths, leaves.tensors) == ({"": None}, {"": ()}, {})
