"""Any state dict, through any two formats that `convert` reads and writes: equal in value, type, order and structure to what was put in."""

from __future__ import annotations

import argparse
import itertools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import ckpt
from ckpt import Checkpointer
from ckpt.cli.converting import ConvertKeys, LoadKeys, convert_on_ranks, run_of
from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.interop.comparing import Difference, compare
from ckpt.interop.registry import source_at
from ckpt.loading.direct import DirectLoad
from ckpt.ranks.topology import Topology
from tests.fidelity.same import same
from tests.fidelity.table import PLAIN
from tests.fidelity.test_kinds import as_torch_gives_it, keys, scalars
from tests.support.covering import and_in_full, sampled
from tests.support.dcp_runs import dcp_state, one_process_is_meant, require_equal, save_by_dcp
from tests.support.dcp_runs import run_of as trained

FORMATS = ("zarr", "tensorstore", "kimi-engine", "dcp", "torch")
PAIRS = list(itertools.product(FORMATS, repeat=2))


def convert(src: Path, dst: Path, to: str, component: str | None = None, **keys: Any) -> dict[str, Any]:
    wanted = ConvertKeys(
        src=str(src), dst=str(dst), to=to, component=component, load=LoadKeys(allow_pickle=True), **keys
    )
    return convert_on_ranks(run_of(wanted), Topology.alone())


def differences(a: Path, b: Path) -> list[Difference]:
    sources = (source_at(path, Topology.alone(), DirectLoad(), allow_pickle=True) for path in (a, b))
    return list(compare(*sources))


def tree() -> dict[str, Any]:
    """A state dict of every shape that has been lost in a conversion."""
    one = torch.arange(3.0)
    return {
        "z": 7, "name": "x", "none": None, "bare": torch.ones(2), "empty": {}, "no": [], "pair": (1, 2), "list": [1, {"a": 2}],
        "model": OrderedDict(w=torch.arange(6.0).reshape(2, 3), b=one.to(torch.bfloat16)),
        "optimizer_states": [{"state": {0: {"exp": one, "step": torch.tensor(2.0)}, 1: {}}, "param_groups": [{"betas": (0.9, 0.95)}]}],
        "tensors": [torch.zeros(1), torch.ones(2)], "tuple": (torch.ones(1), [torch.zeros(3)], {}), 3: {True: 1, None: one, (1, "x"): 2},
        "deep": {"x": {"ordered": OrderedDict(z=1, a=one), "table": defaultdict(list, b=[one], a=[2])}}, "a.b/../c": torch.zeros(0, 4),
        "space": argparse.Namespace(w=one, lr=0.1), "queue": deque([one, 1], 5), "types": [torch.float8_e4m3fn, torch.Size([2])],
    }  # fmt: skip


def require_same_through(state: Any, formats: Sequence[str], root: Path) -> None:
    """Convert what torch.save wrote through these formats, each read by `ckpt.load` and compared, and read the last one with torch."""
    torch.save(state, root / "start.pt")
    src = root / "start.pt"
    for number, to in enumerate((*formats, "torch")):
        convert(src, root / f"{number}", to)
        assert same(ckpt.load(root / f"{number}", allow_pickle=True), state), to
        assert differences(src, root / f"{number}") == []
        src = root / f"{number}"
    assert same(torch.load(src, weights_only=False), state)


@and_in_full(
    ("pair",),
    [(pair,) for pair in zip(FORMATS, (*FORMATS[1:], FORMATS[0]), strict=True)],
    [(pair,) for pair in PAIRS],
    ids="-".join,
)
def test_what_is_no_dictionary_keeps_its_form(pair: tuple[str, str], tmp_path: Path) -> None:
    state = tree()
    state["model"]._metadata = OrderedDict({"": {"version": 1}})
    state["tied"] = state["bare"]
    require_same_through(state, pair, tmp_path)


@pytest.mark.parametrize("to", FORMATS)
def test_parameters_and_what_is_tied_to_them_come_over(to: str, tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    state = {
        "weight": weight, "values": weight.data, "list": [weight, 1], "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "leaf": torch.ones(3, requires_grad=True),
    }  # fmt: skip
    require_same_through(state, (to,), tmp_path)
    found = ckpt.load(tmp_path / "0", allow_pickle=True)
    assert found["weight"].data_ptr() == found["values"].data_ptr()
    assert found["weight"] is found["list"][0]


def _everywhere(value: Any) -> dict[str, Any]:
    one = torch.arange(3.0)
    return {"z": value, "list": [value, {"in": value}], "beside": (one, value), "ordered": OrderedDict(x=value, t=one)}


def test_plain_values_come_over_wherever_they_are(tmp_path: Path) -> None:
    state = {f"{number}": _everywhere(value) for number, value in enumerate(PLAIN)}
    require_same_through(state, ("dcp", "zarr"), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("value", PLAIN, ids=lambda value: f"{type(value).__name__}-{value!r:.20}")
def test_a_plain_value_comes_over_wherever_it_is(value: Any, tmp_path: Path) -> None:
    require_same_through(_everywhere(value), ("dcp", "zarr"), tmp_path)


def _of_kind(given: tuple[torch.dtype, str]) -> torch.Tensor:
    tensor = torch.arange(6).to(given[0]).reshape(2, 3)
    is_float = tensor.is_floating_point()
    match given[1]:
        case "parameter":
            return torch.nn.Parameter(tensor, requires_grad=is_float)
        case "frozen":
            return torch.nn.Parameter(tensor, requires_grad=False)
        case "gradient" if is_float:
            return tensor.requires_grad_()
        case _:
            return tensor


dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])
tensors = st.tuples(dtypes, st.just("plain")).map(_of_kind)
any_tensors = st.tuples(dtypes, st.sampled_from(["plain", "parameter", "frozen", "gradient"])).map(_of_kind)
names = st.text(max_size=3) | st.sampled_from(["a.b", "a/b", "..", "", "model", "optimizer", "state", "step", "~tag"])


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    named, odd = st.dictionaries(names, inner, max_size=3), st.dictionaries(keys | names, inner, max_size=3)
    some = st.lists(inner, max_size=3)
    spaces = st.dictionaries(st.sampled_from(["a", "lr"]), inner).map(lambda items: argparse.Namespace(**items))
    return (
        some | some.map(tuple) | some.map(lambda items: deque(items, 4)) | named | odd | named.map(OrderedDict) | odd.map(OrderedDict)
        | odd.map(lambda items: defaultdict(list, items)) | spaces
    )  # fmt: skip


trees = st.recursive(scalars | any_tensors, _containers, max_leaves=10)
states = st.dictionaries(keys | names, trees, max_size=4)


@given(state=states | st.dictionaries(names, trees, max_size=4).map(OrderedDict), pair=st.sampled_from(PAIRS))
@settings(max_examples=15)
def test_any_tree_comes_over_or_is_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, state: dict[Any, Any], pair: tuple[str, str]
) -> None:
    _require_comes_over(tmp_path_factory.mktemp("tree"), state, pair)


@pytest.mark.full
@given(state=states | st.dictionaries(names, trees, max_size=4).map(OrderedDict), pair=st.sampled_from(PAIRS))
@settings(max_examples=200)
def test_many_more_trees_come_over_or_are_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory, state: dict[Any, Any], pair: tuple[str, str]
) -> None:
    _require_comes_over(tmp_path_factory.mktemp("tree"), state, pair)


def _require_comes_over(root: Path, state: dict[Any, Any], pair: tuple[str, str]) -> None:
    want = as_torch_gives_it(state)
    try:
        require_same_through(want, pair, root)
    except CheckpointError as error:
        assert "joined key" in str(error)  # the one reason: "a.b" beside "a": {"b": ...}
        assert len([path for path in root.iterdir() if not path.name.startswith(".")]) <= 2


@given(st.dictionaries(names, tensors, max_size=4))
@settings(max_examples=5)
def test_named_tensors_come_over_from_safetensors_and_back(
    tmp_path_factory: pytest.TempPathFactory, state: dict[str, torch.Tensor]
) -> None:
    _require_there_and_back(tmp_path_factory.mktemp("named"), state)


@pytest.mark.full
@given(st.dictionaries(names, tensors, max_size=4))
@settings(max_examples=60)
def test_many_more_named_tensors_come_over_from_safetensors_and_back(
    tmp_path_factory: pytest.TempPathFactory, state: dict[str, torch.Tensor]
) -> None:
    _require_there_and_back(tmp_path_factory.mktemp("named"), state)


def _require_there_and_back(root: Path, state: dict[str, torch.Tensor]) -> None:
    if not state:
        return
    save_file(state, root / "start.safetensors")
    for to in FORMATS:
        convert(root / "start.safetensors", root / to, to)
        found = ckpt.load(root / to, allow_pickle=True)
        assert found.keys() == state.keys() and all(same(found[name], one) for name, one in state.items())
        convert(root / to, root / f"{to}-back", "safetensors")
        again = ckpt.load(root / f"{to}-back")
        assert again.keys() == state.keys() and all(same(again[name], one) for name, one in state.items())


def test_safetensors_says_what_it_leaves_out(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2), "version": 3}, "step": 7}
    torch.save(state, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "ours", "zarr")
    for src in ("a.pt", "ours"):
        told = convert(tmp_path / src, tmp_path / f"{src}-all", "safetensors")
        assert told["held"]["left_out"] == ["model.version (no tensor)", "step (no tensor)"]
        told = convert(tmp_path / src, tmp_path / f"{src}-model", "safetensors", "model")
        assert told["held"]["left_out"] == ["version (no tensor)"]
        assert ckpt.load(tmp_path / f"{src}-model").keys() == {"w"}


def test_what_dcp_itself_has_saved_is_what_dcp_reads(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    one = torch.arange(3.0)
    state = {
        "z": 1,
        "tuple": (one, 2),
        "a": [{"x": one}, [one]],
        "model": {"w": one, "n": None},
        "step": one,
        "last": "x",
    }
    save_by_dcp(state, tmp_path / "dcp")
    with one_process_is_meant():
        dcp_to_torch_save(tmp_path / "dcp", tmp_path / "by torch.pt")
    want = torch.load(tmp_path / "by torch.pt", weights_only=False)
    assert same(ckpt.load(tmp_path / "dcp", allow_pickle=True), want)
    for to in FORMATS:
        convert(tmp_path / "dcp", tmp_path / f"as {to}", to)
        assert same(ckpt.load(tmp_path / f"as {to}", allow_pickle=True), want)


def test_two_entries_of_one_key_of_dcp_are_refused(tmp_path: Path) -> None:
    ckpt.save({"a": {True: 1, "True": 2}}, tmp_path / "ours")
    with pytest.raises(ConfigurationError, match=r"DCP joins keys by dots.*a\.True"):
        convert(tmp_path / "ours", tmp_path / "dcp", "dcp")
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]


def test_an_object_of_an_unknown_class_is_refused_by_its_name(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.ones(1)}, "net": [torch.nn.Linear(1, 1)]}, tmp_path / "a.pt")
    with pytest.raises(ConfigurationError, match=r"net\.0 cannot be read \(torch\.nn.*Linear is not built\)"):
        convert(tmp_path / "a.pt", tmp_path / "ours", "zarr")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_what_dcp_pickled_of_an_unknown_class_is_refused_or_named_among_what_is_left_out(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(1)}, "args": argparse.Namespace(lr=0.1, net=torch.nn.Linear(1, 1))}
    save_by_dcp(state, tmp_path / "dcp")
    with pytest.raises(
        ConfigurationError, match=r"args\.net cannot be read \(torch\.nn.*Linear is not built\): leave it out where"
    ):
        convert(tmp_path / "dcp", tmp_path / "ours", "zarr")
    told = convert(tmp_path / "dcp", tmp_path / "ours", "zarr", leave_out_unknown=True)
    assert told["held"]["left_out"] == ["args.net (torch.nn.modules.linear.Linear is not built)"]
    assert vars(ckpt.load(tmp_path / "ours")["args"]) == {"lr": 0.1}


@pytest.mark.parametrize("to", ["zarr", "dcp", "torch"])
@sampled("form", ["dcp", "torch"])
def test_a_run_goes_on_from_what_was_converted(form: str, to: str, tmp_path: Path) -> None:
    """A `Checkpointer` finds its components in one state dict."""
    saved, live = trained(0), trained(1)
    state = dcp_state(saved) if form == "dcp" else {key: one.state_dict() for key, one in saved.items()}
    if form == "dcp":
        save_by_dcp(state, tmp_path / "step-12")
    else:
        torch.save(state | {"epoch": 3}, tmp_path / "step-12")
    convert(tmp_path / "step-12", tmp_path / "12", to)
    with Checkpointer(tmp_path / "own", **live, save_rng=False, allow_pickle=True) as checkpoints:
        assert checkpoints.restore(tmp_path / "12") == 12
    require_equal(live, saved)


def test_an_object_is_given_the_bare_value_that_was_saved(tmp_path: Path) -> None:
    class Own:
        def state_dict(self) -> Any:
            return 0

        def load_state_dict(self, state: Any) -> None:
            self.state = state

    values = {"number": 7, "tensor": torch.ones(2), "list": [torch.zeros(1), 2]}
    torch.save({"model": {"w": torch.ones(1)}} | values, tmp_path / "step-1")
    convert(tmp_path / "step-1", tmp_path / "1", "zarr")
    for src in ("step-1", "1"):
        own = {key: Own() for key in values}
        with Checkpointer(tmp_path / "own", **own, save_rng=False, allow_pickle=True) as checkpoints:
            checkpoints.restore(tmp_path / src, strict=False)
        assert same({key: one.state for key, one in own.items()}, values)


one = torch.arange(2.0)
UNLIKE = {
    "a number and a dictionary with it": (
        {"step": 7},
        {"step": {"step": 7}},
        {("step", "only in a"), ("step.step", "only in b")},
    ),
    "a list and a tuple": ({"a": [one, 1]}, {"a": (one, 1)}, {("a", "container")}),
    "a dictionary and an OrderedDict": (
        {"a": {"x": one, "y": one}},
        {"a": OrderedDict(x=one, y=one)},
        {("a", "container")},
    ),
    "the roots": ({"a": one}, OrderedDict(a=one), {("", "container")}),
    "a key that is a number": ({"a": {1: one}}, {"a": {"1": one}}, {("a.1", "key")}),
    "a key with a dot": ({"a": {"b": one}}, {"a.b": one}, {("a", "key")}),
    "the order": ({"a": one, "b": 1, "c": 2}, {"a": one, "c": 2, "b": 1}, {("b", "order")}),
    "the order of tensors": ({"a": one, "b": one}, {"b": one, "a": one}, {("a", "order")}),
    "the order in a value": ({"a": [{"x": 1, "y": 2}]}, {"a": [{"y": 2, "x": 1}]}, {("a", "value")}),
    "a parameter and a tensor": ({"a": torch.nn.Parameter(one)}, {"a": one}, {("a", "class")}),
    "types": ({"a": [(1,)]}, {"a": [[1]]}, {("a", "value")}),
}


@pytest.mark.parametrize("case", UNLIKE)
@pytest.mark.parametrize("format", ["ours", "torch"])
def test_diff_tells_structure_type_and_order(case: str, format: str, tmp_path: Path) -> None:
    a, b, want = UNLIKE[case]
    for name, state in {"a": a, "b": b}.items():
        ckpt.save(state, tmp_path / name) if format == "ours" else torch.save(state, tmp_path / name)
    ckpt.save(a, tmp_path / "same") if format == "ours" else torch.save(a, tmp_path / "same")
    assert {(one.name, one.what) for one in differences(tmp_path / "a", tmp_path / "b")} == want
    assert differences(tmp_path / "a", tmp_path / "same") == []


def test_components_are_compared_with_those_in_one_state_dict(tmp_path: Path) -> None:
    run = trained(0)
    with Checkpointer(tmp_path / "own", model=run["model"], save_rng=False) as checkpoints:
        path = Path(checkpoints.save(1) or "")
    ckpt.save({"model": dict(run["model"].state_dict())}, tmp_path / "given")
    assert differences(path, tmp_path / "given") == []
    ckpt.save({"model": 7}, tmp_path / "number")
    assert ("", "only in b") in {(one.name, one.what) for one in differences(path, tmp_path / "number")}
