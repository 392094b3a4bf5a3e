"""Two checkpoints are compared bit by bit, whatever their formats, in bounded memory; `recipes.diff` says what it found."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import ckpt
from ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError
from ckpt.format.manifest import ArrayEntry
from ckpt.interop import comparing
from ckpt.interop.comparing import Difference, compare
from ckpt.interop.opened import slabs
from ckpt.interop.registry import source_at
from ckpt.loading.direct import DirectLoad
from ckpt.ranks.topology import Topology
from recipes.diff import main
from tests.support.covering import and_in_full
from tests.support.states import ALL_DTYPES, random_bits


def state() -> dict[str, Any]:
    tensors = {str(dtype): random_bits((40, 5), dtype, 1) for dtype in ALL_DTYPES}
    return {
        "tensors": tensors,
        "scalar": torch.tensor(3.0),
        "empty": torch.empty(0, 4),
        "step": 7,
        "nested": {"lr": 0.5},
    }


def compared(a: Path | str, b: Path | str, *, allow_pickle: bool = False) -> list[Difference]:
    opened = [source_at(Path(path), Topology.alone(), DirectLoad(), allow_pickle=allow_pickle) for path in (a, b)]
    return list(compare(*opened))


def differences(tmp_path: Path, changed: dict[str, Any]) -> list[Difference]:
    ckpt.save(state(), tmp_path / "a")
    ckpt.save(changed, tmp_path / "b", format="tensorstore")
    return compared(tmp_path / "a", tmp_path / "b")


def test_equal_states_in_two_formats_have_no_differences(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "_AT_ONCE_BYTES", 64)
    assert differences(tmp_path, state()) == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_state_of_dcp_and_one_of_safetensors_are_equal_to_ours(tmp_path: Path) -> None:
    ckpt.save(state(), tmp_path / "a")
    dcp.save(state(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert compared(tmp_path / "a", tmp_path / "dcp", allow_pickle=True) == []
    with pytest.raises(CheckpointNotFoundError, match="allow_pickle=True"):
        compared(tmp_path / "a", tmp_path / "dcp")
    weights = {"a": torch.arange(6.0), "b": torch.ones(2, 2, dtype=torch.bfloat16)}
    ckpt.save(weights, tmp_path / "weights")
    save_file(weights, tmp_path / "weights.safetensors")
    assert compared(tmp_path / "weights.safetensors", tmp_path / "weights") == []


@and_in_full(("dtype",), [(dtype,) for dtype in ALL_DTYPES[::4]], [(dtype,) for dtype in ALL_DTYPES], ids=str)
def test_one_changed_bit_is_found_in_any_type(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparing, "_AT_ONCE_BYTES", 100)
    changed = state()
    tensor = changed["tensors"][str(dtype)]
    if dtype == torch.bool:
        tensor[7, 3] = ~tensor[7, 3]
    else:
        tensor.view(torch.uint8)[7, 3 * tensor.element_size()] ^= 1
    (found,) = differences(tmp_path, changed)
    assert (found.component, found.name, found.what) == ("state", f"tensors.{dtype}", "bits")
    assert found.num_differ == 1
    assert found.largest is not None
    assert (
        found.largest > 0 or math.isnan(found.largest) or dtype in (torch.int64, torch.uint64)
    )  # beyond double precision


def test_norms_and_the_largest_difference_are_those_of_the_numbers(tmp_path: Path) -> None:
    a, b = torch.tensor([[3.0, 4.0], [0.0, -0.0]]), torch.tensor([[3.0, 1.5], [0.0, 0.0]])
    ckpt.save({"w": a}, tmp_path / "a")
    ckpt.save({"w": b}, tmp_path / "b")
    (found,) = compared(tmp_path / "a", tmp_path / "b")
    assert (found.a, found.b) == (5.0, math.sqrt(9 + 2.25))
    assert (found.num_differ, found.largest) == (2, 2.5)  # minus zero has other bits


def test_every_other_kind_of_difference_is_named(tmp_path: Path) -> None:
    changed = state()
    changed |= {"scalar": torch.tensor(3.0, dtype=torch.float64), "empty": torch.empty(4, 0), "step": 8, "more": 1}
    del changed["nested"], changed["tensors"]["torch.bool"]
    assert {(one.name, one.what, str(one.a), str(one.b)) for one in differences(tmp_path, changed)} == {
        ("scalar", "data type", "float32", "float64"),
        ("empty", "shape", "[0, 4]", "[4, 0]"),
        ("step", "value", "7", "8"),
        ("more", "only in b", "None", "1"),
        ("nested.lr", "only in a", "0.5", "None"),
        ("tensors.torch.bool", "only in a", "None", "None"),
    }


@pytest.mark.parametrize(("one", "other"), [(True, 1), (1, 1.0), (0.0, -0.0), ([False], [0]), ((2,), (2.0,))])
def test_plain_values_of_other_types_differ(tmp_path: Path, one: Any, other: Any) -> None:
    ckpt.save({"same": float("nan"), "value": one}, tmp_path / "a")
    ckpt.save({"same": float("nan"), "value": other}, tmp_path / "b")
    (found,) = compared(tmp_path / "a", tmp_path / "b")
    assert (found.name, found.what) == ("value", "value")


def test_components_and_copies_that_one_of_them_lacks_are_named(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    with ckpt.Checkpointer(tmp_path / "a", model=model) as one, ckpt.Checkpointer(tmp_path / "b", model=model, save_rng=False, more=model) as two:  # fmt: skip # noqa: E501
        paths = one.save(1), two.save(1)
    assert all(paths)
    found = [(one.component, one.what) for one in compared(*map(str, paths))]
    assert sorted(found) == [("more", "only in b"), ("rng", "only in a")]


def test_a_component_that_retention_has_removed_is_said_to_be(tmp_path: Path) -> None:
    with ckpt.Checkpointer(tmp_path, model=torch.nn.Linear(2, 1), keep_last_of={"rng": 1}) as checkpoints:
        older, newer = (str(checkpoints.save(step)) for step in (1, 2))
    assert [(one.component, one.name, one.what) for one in compared(older, newer)] == [("rng", "", "removed from a")]
    assert [(one.component, one.name, one.what) for one in compared(newer, older)] == [("rng", "", "removed from b")]


def test_a_damaged_checkpoint_is_not_compared(tmp_path: Path) -> None:
    ckpt.save({"a": torch.arange(1 << 16)}, tmp_path / "a")
    ckpt.save({"a": torch.arange(1 << 16)}, tmp_path / "b")
    (chunk,) = (path for path in (tmp_path / "b").rglob("c/0"))
    chunk.write_bytes(b"\1" + chunk.read_bytes()[1:])
    with pytest.raises(CorruptCheckpointError):
        compared(tmp_path / "a", tmp_path / "b")


@given(shape=st.lists(st.integers(0, 7), max_size=4), most=st.integers(1, 40))
@settings(max_examples=100)
def test_slabs_cover_each_element_once_and_fit(shape: list[int], most: int) -> None:
    entry = ArrayEntry("uint8", tuple(shape))
    counted = torch.zeros(shape, dtype=torch.int64)
    for box in slabs(entry, most):
        counted[box.slices] += 1
        assert box.num_elements <= most
    assert bool((counted == 1).all())


def run_diff(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["recipes.diff", *words])
    try:
        main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_the_command_exits_like_diff(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"a": 1.0, "b": 2.0}.items():
        ckpt.save({"w": torch.full((3,), value), "nan": torch.tensor(value / 2), "lr": value}, tmp_path / name)
    a, b = f"a={tmp_path / 'a'}", f"b={tmp_path / 'b'}"
    assert run_diff(monkeypatch, a, f"b={tmp_path / 'a'}") == 0
    assert capsys.readouterr().out.endswith("are equal\n")
    assert run_diff(monkeypatch, a, b) == 1
    shown = capsys.readouterr().out
    assert shown.startswith("3 differences in state\n")
    assert [line.split()[:4] for line in shown.splitlines() if " w " in line] == [["state", "w", "bits", "norm"]]
    assert run_diff(monkeypatch, a, b, "json=true") == 1
    told = json.loads(capsys.readouterr().out)
    assert told["equal"] is False
    assert {one["name"]: one["num_differ"] for one in told["differences"]} == {"w": 3, "nan": 1, "lr": None}
    assert run_diff(monkeypatch, a, f"b={tmp_path / 'nothing'}") == 2
    assert "is not a checkpoint" in capsys.readouterr().err
    assert run_diff(monkeypatch, a) == 2
    assert "no b is given" in capsys.readouterr().err
