"""docs/kept.md: it is what the tables say, and each of its rows is so."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import ckpt
from ckpt import Checkpointer
from ckpt.errors import ConfigurationError
from ckpt.state.plain import KINDS, NAMESPACES
from tests.fidelity.same import same
from tests.fidelity.table import PLAIN, Row, containers, refused, tensors, values
from tests.fidelity.test_kinds import Kept, as_torch_gives_it, through_checkpointer
from tests.support.covering import sampled
from tests.support.doc_scripts import doc_script

DOCS = Path(__file__).parents[2] / "docs"
ROWS = [*values(), *tensors(), *refused()]


def _params(rows: list[Row]) -> list[Any]:
    return [pytest.param(row, id=str(row)[:60]) for row in rows]


@pytest.fixture(scope="module")
def writer() -> ModuleType:
    return doc_script("write_kept")


def test_the_page_is_what_the_tables_say(writer: ModuleType) -> None:
    text = (DOCS / "kept.md").read_text()
    assert writer.page(text) == text, "run python docs/write_kept.py"


@pytest.mark.parametrize("row", _params([row for row in ROWS if not row.refused]))
def test_what_a_row_says_is_kept_comes_back_wherever_it_is(row: Row, tmp_path: Path) -> None:
    examples = row.made()
    assert examples
    for number, value in enumerate(examples):
        tensor = torch.arange(3.0)
        state = {
            "z": value,
            "list": [value, {"in": value}],
            "beside": [tensor, value],
            "ordered": OrderedDict(x=value, t=tensor),
        }
        want = as_torch_gives_it(state)
        assert same(want, state)
        assert same(through_checkpointer(state, {}, tmp_path / f"{number}-object"), want)
        ckpt.save(state, tmp_path / f"{number}-given")
        assert same(ckpt.load(tmp_path / f"{number}-given"), want)


def test_each_kind_has_examples() -> None:
    assert {one.type for one in KINDS} <= {type(value) for value in PLAIN}


@pytest.mark.parametrize("kind", containers(), ids=str)
def test_a_container_of_the_page_may_hold_tensors(kind: type[Any], tmp_path: Path) -> None:
    tensor = torch.arange(3.0)
    value = kind() if kind in NAMESPACES or issubclass(kind, dict) else kind([1, tensor])
    if kind in NAMESPACES:
        vars(value).update(a=1, t=tensor)
    elif isinstance(value, dict):
        value.update({"a": tensor, "b": 1})
    want = as_torch_gives_it({"x": [value]})
    assert same(through_checkpointer({"x": [value]}, {}, tmp_path), want)


@sampled("mode", ["sync", "async"])
@sampled("format", ["zarr", "tensorstore", "kimi-engine"])
@pytest.mark.parametrize("row", _params([row for row in ROWS if row.refused]))
def test_what_a_row_says_is_refused_is_refused_by_its_name(row: Row, format: str, mode: str, tmp_path: Path) -> None:
    examples = row.made()
    assert examples
    for value in examples:
        where = "own" if row.refused == "holds itself" else "own.*entry"
        says = pytest.raises(ConfigurationError, match=f"{where}.*({row.refused})")
        own = Kept({"deep": {"entry": value}})
        with says, Checkpointer(tmp_path, own=own, save_rng=False, format=format, mode=mode) as saving:
            saving.save(1)
        with pytest.raises(ConfigurationError, match=row.refused):
            ckpt.save({"deep": {"entry": value}}, tmp_path / "given")
    assert not [
        path.name
        for path in tmp_path.rglob("*")
        if (path.is_dir() and "checkpoint-" in path.name) or path.name == "given"
    ]


def test_one_tensor_under_two_names_comes_back_as_one_and_views_as_tensors_of_their_own(tmp_path: Path) -> None:
    one = torch.arange(3.0)
    state = {"a": one, "b": [one], "view": one[:2]}
    ckpt.save(state, tmp_path / "given")
    for loaded in (ckpt.load(tmp_path / "given"), through_checkpointer(state, {}, tmp_path / "object")):
        assert same(loaded, state)
        assert loaded["a"] is loaded["b"][0]
        assert loaded["a"].data_ptr() != loaded["view"].data_ptr()
