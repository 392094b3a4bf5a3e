"""Plain values, containers and their order, through a checkpoint, against what torch.save gives."""

from __future__ import annotations

import argparse
import io
import math
import types
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt
from ckpt import Checkpointer
from ckpt.format.dtypes import STORABLE
from ckpt.state.plain import filled
from tests.fidelity.same import same
from tests.fidelity.table import PLAIN, of_bits
from tests.support.covering import sampled


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
    with torch.no_grad():  # else torch 2.13 cannot load its own float8 tensors that require a gradient
        return torch.load(file, weights_only=False)


def through_checkpointer(value: Any, fresh: Any, root: Path) -> Any:
    with Checkpointer(root, own=Kept(value), save_rng=False) as saving:
        saving.save(1)
    own = Kept(fresh)
    with Checkpointer(root, own=own, save_rng=False) as loading:
        loading.restore()
    return own.value


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of all types and shapes: whole ones, views, with the dimensions in another order, with gradients, parameters."""
    dtype = draw(st.sampled_from(STORABLE))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    first = draw(st.integers(0, 4))
    made = of_bits(first + math.prod(shape), dtype)[first:].reshape(shape)
    match draw(st.sampled_from(["whole", "permuted", "slice", "expanded", "parameter", "gradient"])):
        case "permuted":
            return made.permute(draw(st.permutations(range(made.dim()))))
        case "slice" if made.dim():
            return made[draw(st.integers(0, 2)) :: draw(st.integers(1, 2))]
        case "expanded":
            return made.unsqueeze(0).expand(2, *shape)
        case "parameter":
            return torch.nn.Parameter(made, requires_grad=dtype.is_floating_point and draw(st.booleans()))
        case "gradient" if dtype.is_floating_point:
            return made.requires_grad_()
        case _:
            return made


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=4)
    | st.binary(max_size=4)
    | st.sampled_from(PLAIN)
)
keys = st.text(max_size=3) | st.integers(-3, 3) | st.none() | st.tuples(st.integers(0, 2), st.text(max_size=1))


NAMES = st.from_regex(r"[a-z]{1,3}", fullmatch=True)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named = st.dictionaries(st.text(max_size=3), inner, max_size=3)
    odd = st.dictionaries(keys, inner, max_size=3)
    attributes = st.dictionaries(NAMES, inner, max_size=3)
    return (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.lists(inner, max_size=3).map(lambda items: deque(items, 4))
        | named
        | odd
        | odd.map(OrderedDict)
        | st.tuples(odd, st.dictionaries(NAMES, scalars, max_size=2)).map(
            lambda given: filled(OrderedDict(given[0]), given[1])
        )
        | odd.map(lambda items: defaultdict(list, items))
        | st.dictionaries(st.text(max_size=3), st.integers(), max_size=3).map(Counter)
        | attributes.map(lambda items: argparse.Namespace(**items))
        | attributes.map(lambda items: types.SimpleNamespace(**items))
    )


states = st.dictionaries(st.text(max_size=3), st.recursive(scalars | tensors(), _containers, max_leaves=10), max_size=4)


@given(states, states)
@settings(max_examples=40)
def test_any_tree_comes_back_or_is_refused_before_anything_is_written(
    tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any], fresh: dict[str, Any]
) -> None:
    """Given to an object that holds another tree by then."""
    place = tmp_path_factory.mktemp("state")
    try:
        ckpt.save(state, place / "one")
    except ckpt.errors.CheckpointError as error:
        assert "have the joined key" in str(error)  # the one reason for such trees: "a.b" beside "a": {"b": ...}
        assert not (place / "one").exists()
        return
    want = as_torch_gives_it(state)
    assert same(ckpt.load(place / "one"), want)
    assert same(through_checkpointer(state, fresh, place), want)


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
@sampled("strict", [True, False])
def test_an_object_is_given_what_was_saved_whatever_it_holds_now(
    fresh: Any, saved: Any, strict: bool, tmp_path: Path
) -> None:
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


def test_the_layout_of_a_tensor_is_its_own(tmp_path: Path) -> None:
    state = {"columns": torch.arange(9.0).reshape(3, 3).T, "rows": torch.arange(9.0).reshape(3, 3)}
    ckpt.save(state, tmp_path / "given")
    assert same(ckpt.load(tmp_path / "given"), as_torch_gives_it(state))
    assert same(through_checkpointer(state, {}, tmp_path / "object"), as_torch_gives_it(state))


class Restarted(Kept):
    """A loader whose state is a generator's, too; asked for it before a load, it forgets what it is given."""

    asked = False

    def state_dict(self) -> Any:
        self.asked = True
        return super().state_dict()

    def load_state_dict(self, value: Any) -> None:
        if not self.asked:
            super().load_state_dict(value)


def test_a_fresh_object_is_not_asked_for_its_state_before_a_load(tmp_path: Path) -> None:
    state = {"position": 8, "generator": torch.arange(4)}
    with Checkpointer(tmp_path, data=Kept(state), save_rng=False) as saving:
        saving.save(1)
    fresh = Restarted({"position": 0, "generator": torch.zeros(4, dtype=torch.int64)})
    with Checkpointer(tmp_path, data=fresh, save_rng=False) as loading:
        loading.restore()
    assert same(fresh.value, state)
