"""Plain values, containers and their order, through a checkpoint, against what torch.save gives."""

from __future__ import annotations

import argparse
import io
import math
import types
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt
from ckpt import Checkpointer
from ckpt.errors import ConfigurationError
from ckpt.state.plain import KINDS
from tests.fidelity.same import same


class Kept:
    """An object that gives one value, and takes one."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


def as_torch_gives_it(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_checkpointer(value: Any, fresh: Any, root: Path) -> Any:
    with Checkpointer(root, own=Kept(value), save_rng=False) as saving:
        saving.save(1)
    own = Kept(fresh)
    with Checkpointer(root, own=own, save_rng=False) as loading:
        loading.restore()
    return own.value


PLAIN = [
    None, True, 7, -(2**70), 1.5, math.inf, -0.0, "text", "\ud800", b"\x00\xff", bytearray(b"ab"), 1 + 2j, range(1, 9, 2), (1, (2,)),
    [1, [2.0]], {"b": 1, "a": 2}, {3: 1, True: 2, None: 3, (1, "x"): 4}, {"~tag": 1}, OrderedDict(b=1, a=2), Counter("abracadabra"),
    Counter({30: 1, 80: 2}),
    defaultdict(list, b=[1], a=[2]), defaultdict(None, a=1), deque([1, 2, 3], 5), deque(["a"]), {1, 2}, frozenset({"x"}),
    argparse.Namespace(lr=0.1, b=2), types.SimpleNamespace(z=1, a=2), io.BytesIO(b"12"), Decimal("1.10"), Fraction(1, 3),
    uuid.UUID(int=5), Path("runs/one"), PurePosixPath("a/b"), PureWindowsPath("c:/x"), datetime(2026, 1, 2, 3, 4, 5, 6),
    datetime(2026, 1, 2, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=timezone(timedelta(hours=-3))), date(2026, 1, 2), time(3, 4, 5),
    timedelta(1, 2, 3), np.arange(6, dtype=np.int16).reshape(2, 3), np.array(["a", "bcd"]), np.array([b"x", b"yz"]),
    np.array(["2026-01-01", "NaT"], dtype="datetime64[D]"), np.float64(1.5), np.int8(3), np.bool_(True), np.str_("text"),
    np.datetime64("2026-01-01T00:00"), np.timedelta64(3, "s"), torch.Size([2, 3]), torch.bfloat16, torch.strided,
    torch.device("cuda", 1), torch.device("cpu"),
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: f"{type(value).__name__}-{value!r:.20}")
def test_a_plain_value_comes_back_wherever_it_is(value: Any, tmp_path: Path) -> None:
    tensor = torch.arange(3.0)
    state = {"z": value, "list": [value, {"in": value}], "beside": [tensor, value], "ordered": OrderedDict(x=value, t=tensor)}
    want = as_torch_gives_it(state)
    assert same(want, state)
    assert same(through_checkpointer(state, {}, tmp_path), want)
    ckpt.save(state, tmp_path / "given")
    assert same(ckpt.load(tmp_path / "given"), want)


def test_each_kind_of_the_table_is_tried() -> None:
    tried = {type(value) for value in PLAIN}
    assert {one.type for one in KINDS} <= tried


tensors = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool]).map(lambda dtype: torch.arange(3).to(dtype))
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4) | st.binary(max_size=4)
keys = st.text(max_size=3) | st.integers(-3, 3) | st.none() | st.tuples(st.integers(0, 2), st.text(max_size=1))


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(st.text(max_size=3), inner, max_size=3)
    odd = st.dictionaries(keys, inner, max_size=3)
    return (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(lambda items: deque(items, 4))
        | named
        | odd
        | odd.map(OrderedDict)
        | odd.map(lambda items: defaultdict(list, items))
        | st.dictionaries(st.text(max_size=3), st.integers(), max_size=3).map(Counter)
        | st.dictionaries(st.from_regex(r"[a-z]{1,3}", fullmatch=True), inner, max_size=3).map(lambda items: argparse.Namespace(**items))
    )


states = st.dictionaries(st.text(max_size=3), st.recursive(scalars | tensors, _containers, max_leaves=10), max_size=4)


@given(states)
@settings(max_examples=60)
def test_any_tree_comes_back_or_is_refused_before_anything_is_written(
    tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]
) -> None:
    place = tmp_path_factory.mktemp("state") / "one"
    try:
        ckpt.save(state, place)
    except ckpt.errors.CheckpointError as error:
        assert "have the joined key" in str(error)  # the one reason for such trees: "a.b" beside "a": {"b": ...}
        assert not place.exists()
        return
    assert same(ckpt.load(place), as_torch_gives_it(state))


class Bytes(bytes):
    pass


class Items(list[Any]):
    pass


class Table(dict[str, Any]):
    pass


Pair = namedtuple("Pair", "a b")
loop: list[Any] = []
loop.append(loop)
REFUSED = [
    (Bytes(b"x"), "Bytes"), (Items([1]), "Items"), (Items([torch.ones(1)]), "Items"), (Table(a=1), "Table"),
    (Pair(1, torch.ones(1)), "Pair"),
    (np.ma.array([1]), "MaskedArray"), (np.array([object()]), "array of object"), (defaultdict(lambda: 1, a=2), "defaultdict"),
    (types.MappingProxyType({"a": 1}), "mappingproxy"), ({torch.ones(1)}, "a tensor inside of a set"), (loop, "holds itself"),
    (datetime(2026, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC")), "time zone"), (object(), "builtins.object"), (len, "builtin_function"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "named"), REFUSED, ids=[named for _, named in REFUSED])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_cannot_be_kept_is_refused_by_its_name(value: Any, named: str, mode: str, tmp_path: Path) -> None:
    own = Kept({"deep": {"entry": value}})
    says = pytest.raises(ConfigurationError, match=f"own.*(deep|nested).*{named}|{named}")
    with Checkpointer(tmp_path, own=own, save_rng=False, mode=mode) as saving, says:
        saving.save(1)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("checkpoint-")] == []


@pytest.mark.parametrize(
    ("fresh", "saved"),
    [
        ({"t": torch.zeros(2)}, {"t": torch.arange(5.0)}),
        ({"t": torch.zeros(5)}, {"t": torch.arange(5)}),
        ({"l": [torch.zeros(1)] * 3}, {"l": [torch.ones(1)]}),
        ({"l": [torch.zeros(1)]}, {"l": []}),
        ({"l": []}, {"l": [torch.ones(1), 2]}),
        ({"t": None}, {"t": torch.ones(2)}),
        ({"t": torch.zeros(2)}, {"t": None}),
        ({"d": {"a": 1, "b": torch.zeros(1)}}, {"d": {"c": 2}}),
        ({"d": {"a": torch.zeros(1)}}, {"d": torch.ones(1)}),
        ({"d": torch.ones(1)}, {"d": {"a": torch.zeros(1)}}),
        ({"a": 1, "more": torch.ones(1)}, {"a": 2}),
        ({}, {"a": 2}),
        ({"a": 2}, {}),
        (None, {"a": (torch.ones(1),)}),
        ({"a": 1}, None),
        (None, np.arange(3)),
        ({"a": 1}, [1, torch.ones(2)]),
        ({"t": torch.arange(6.0).reshape(2, 3)}, {"t": torch.arange(6.0)}),
    ],
    ids=repr,
)
@pytest.mark.parametrize("strict", [True, False])
def test_an_object_is_given_what_was_saved_whatever_it_holds_now(fresh: Any, saved: Any, strict: bool, tmp_path: Path) -> None:
    """Replay buffers, histories, caches: they grow, shrink and change their types."""
    with Checkpointer(tmp_path, own=Kept(saved), other=Kept({"x": 1}), save_rng=False) as saving:
        saving.save(1)
    own = Kept(fresh)
    with Checkpointer(tmp_path, own=own, other=Kept({"x": 0}), save_rng=False) as loading:
        loading.restore(strict=strict)
    want = as_torch_gives_it(saved)
    if not strict and isinstance(fresh, dict) and isinstance(want, dict) and want:
        want = want | {key: value for key, value in fresh.items() if key not in want}
    assert same(own.value, want)
