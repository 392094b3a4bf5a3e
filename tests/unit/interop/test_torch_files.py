"""Files of torch.save are loaded to the bit, whatever the strides of their tensors; hostile ones are refused, and run no code."""

from __future__ import annotations

import argparse
import io
import math
import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from fractions import Fraction
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt
from ckpt import Checkpointer
from ckpt.backends.zarr import ZarrBackend
from ckpt.errors import CheckpointNotFoundError, ConfigurationError, CorruptCheckpointError, MissingStateError
from ckpt.format.box import Box
from ckpt.format.dtypes import contiguous
from ckpt.interop.importing import import_checkpoint
from ckpt.interop.registry import source_at
from ckpt.interop.torch_save.reading import content_of, open_at
from ckpt.loading.direct import DirectLoad
from ckpt.loading.other_checkpoint import Encoded, FilePiece
from ckpt.ranks.topology import Topology
from tests.support.ranks import run_ranks
from tests.support.states import ALL_DTYPES, random_bits, same_bits
from tests.support.values import same_values


def run_of(seed: int) -> dict[str, Any]:
    """A model with tied weights and an optimizer, trained for a step."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Embedding(6, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 6, bias=False))
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, seed + 2)
    model(torch.arange(4)).square().sum().backward()
    optimizer.step()
    scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def views() -> dict[str, torch.Tensor]:
    """Tensors that do not lie row-major, or share memory."""
    base = torch.arange(60.0).reshape(3, 4, 5)
    numbers = torch.complex(base[0], -base[1])
    return {
        "whole": base,
        "transposed": base.permute(2, 0, 1),
        "sliced": base[:, 1:3, ::2],
        "channels_last": torch.arange(48).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
        "expanded": torch.ones(1).expand(5, 3),
        "flag": torch.tensor([[True, False], [True, True]]).T,
        "small": torch.arange(6.0).reshape(2, 3).to(torch.float8_e4m3fn).T,
        "conjugate": numbers.conj(),
        "negative": torch._neg_view(base[1].T),
        "double": numbers.to(torch.complex128).T,
        "scalar": base[1, 2, 3],
        "empty": base[:, :0].transpose(0, 2),
    }


def require_same(got: Any, wanted: Any, where: str = "") -> None:
    assert type(got) is type(wanted) or isinstance(wanted, OrderedDict | torch.Tensor), where
    if isinstance(wanted, torch.Tensor):
        assert same_bits(got, contiguous(wanted)), where
    elif isinstance(wanted, dict):
        assert got.keys() == wanted.keys(), where
        for key, one in wanted.items():
            require_same(got[key], one, f"{where}.{key}")
    elif isinstance(wanted, list | tuple):
        assert len(got) == len(wanted), where
        for at, one in enumerate(wanted):
            require_same(got[at], one, f"{where}[{at}]")
    else:
        assert np.array_equal(got, wanted), where


@pytest.mark.parametrize("load", ["direct", "two-stage"])
def test_a_nested_state_comes_back_as_it_was(tmp_path: Path, load: str) -> None:
    state = {
        "model": OrderedDict(a=torch.nn.Parameter(torch.ones(3)), b=torch.nn.Buffer(torch.zeros(2))),
        "kinds": {f"{d}{list(s)}": random_bits(s, d, 3) for d in ALL_DTYPES for s in [(), (0,), (5, 7)]},
        "views": views(),
        "optimizer": {"state": {0: {"step": torch.tensor(1.0)}, 5: {"x": 1}}, "param_groups": [{"betas": (0.9, 0.95)}]},
        "lists": [torch.arange(3), (torch.ones(2), {"deep": [torch.zeros(1)]}), {}],
        "empty": {},
        "plain": {"args": argparse.Namespace(lr=0.1), "rng": np.arange(5), "bytes": b"\xff", "set": {1, 2}, "n": -0.5},
        "types": [torch.bfloat16, torch.Size([2, 3]), 1 - 2j, None],
        "epoch": 7,
        3: {True: "x"},
    }
    torch.save(state, tmp_path / "any.name")
    require_same(ckpt.load(tmp_path / "any.name", allow_pickle=True, load=load), state)


def test_a_checkpointer_goes_on_from_it(tmp_path: Path) -> None:
    saved, live = run_of(0), run_of(1)
    torch.save({key: one.state_dict() for key, one in saved.items()} | {"scaler": {}}, tmp_path / "model.pt")
    (tmp_path / "link.pt").symlink_to(tmp_path / "model.pt")
    with Checkpointer(tmp_path / "own", **live, save_rng=False, allow_pickle=True) as checkpoints:
        checkpoints.restore(tmp_path / "link.pt")
    require_same(live["model"].state_dict(), saved["model"].state_dict())
    require_same(live["optimizer"].state_dict(), saved["optimizer"].state_dict())
    assert live["model"][2].weight is live["model"][0].weight
    assert live["scheduler"].state_dict() == saved["scheduler"].state_dict()


def test_weights_alone_are_the_model(tmp_path: Path) -> None:
    saved, live = run_of(0)["model"], run_of(1)["model"]
    torch.save(saved.state_dict(), tmp_path / "pytorch_model.bin")
    with Checkpointer(tmp_path / "own", model=live, save_rng=False, allow_pickle=True) as checkpoints:
        checkpoints.restore(tmp_path / "pytorch_model.bin")
    require_same(live.state_dict(), saved.state_dict())


def _load_on(topology: Topology, path: Path) -> dict[str, Any]:
    return ckpt.load(path, allow_pickle=True, load="two-stage", topology=topology)


def test_it_is_loaded_on_three_ranks(tmp_path: Path) -> None:
    torch.save(views(), tmp_path / "views.pt")
    for loaded in run_ranks(3, _load_on, tmp_path / "views.pt"):
        require_same(loaded, views())


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    """Row-major tensors are pieces of the file; others are copied box by box from the mapped file."""
    torch.save({"whole": torch.arange(6.0), "turned": torch.arange(6.0).reshape(2, 3).T}, tmp_path / "x.pt")
    tensors = content_of(tmp_path, "x.pt").tensors
    (piece,) = tensors["whole",].pieces()
    assert isinstance(piece, FilePiece)
    raw = (tmp_path / "x.pt").read_bytes()[piece.offset :][:24]
    assert np.frombuffer(raw, "<f4").tolist() == [0, 1, 2, 3, 4, 5]
    assert isinstance(tensors["turned",].pieces(), Encoded)


@pytest.mark.parametrize("in_dcp", [False, True])
def test_tensors_with_strides_of_dcp_are_read(tmp_path: Path, in_dcp: bool) -> None:
    if in_dcp:
        with pytest.warns(UserWarning):
            dcp.save(views(), checkpoint_id=tmp_path / "x", no_dist=True)
    else:
        torch.save(views(), tmp_path / "x")
    require_same(ckpt.load(tmp_path / "x", allow_pickle=True), views())


@st.composite
def _strided(draw: st.DrawFn) -> tuple[torch.Tensor, Box]:
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    dtype = draw(st.sampled_from([torch.int8, torch.bfloat16, torch.float32, torch.int64, torch.complex128]))
    tensor = random_bits(tuple(shape), dtype, 7).permute(draw(st.permutations(range(len(shape)))))
    for dim in range(tensor.dim()):
        start = draw(st.integers(0, tensor.shape[dim]))
        tensor = tensor[(slice(None),) * dim + (slice(start, None, draw(st.integers(1, 3))),)]
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(draw(st.integers(1, 3)), *tensor.shape)
    offsets = tuple(draw(st.integers(0, side)) for side in tensor.shape)
    box = tuple(draw(st.integers(0, side - at)) for side, at in zip(tensor.shape, offsets, strict=True))
    return tensor, Box(offsets, box)


@settings(max_examples=60, deadline=None)
@given(_strided())
def test_any_box_of_any_view_comes_back_to_the_bit(
    tmp_path_factory: pytest.TempPathFactory, one: tuple[torch.Tensor, Box]
) -> None:
    tensor, box = one
    folder = tmp_path_factory.mktemp("view")
    torch.save({"x": tensor}, folder / "x.pt")
    stored = content_of(folder, "x.pt").tensors["x",]
    assert stored.shape == tuple(tensor.shape)
    found = stored.pieces()
    if isinstance(found, Encoded):
        out = torch.zeros(box.shape, dtype=tensor.dtype)
        found.read(box, out)
    else:
        data = (folder / "x.pt").read_bytes()[found[0].offset :][: tensor.numel() * tensor.element_size()]
        whole = torch.zeros(tensor.shape, dtype=tensor.dtype)
        if data:
            whole = torch.frombuffer(bytearray(data), dtype=tensor.dtype).reshape(tensor.shape)
        out = whole[box.slices]
    assert same_bits(out, tensor[box.slices])


def test_a_pickle_is_read_only_where_it_is_allowed(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "x.pt")
    with pytest.raises(CheckpointNotFoundError, match=r"data\.pkl is a pickle.* load with allow_pickle=True"):
        ckpt.load(tmp_path / "x.pt")


class _Module(torch.nn.Linear):
    pass


class _Odd(torch.Tensor):
    pass


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "sparse": (lambda: {"x": torch.eye(3).to_sparse()}, r"x \(is made by .*sparse"),
    "without memory": (lambda: {"x": torch.empty(3, device="meta")}, r"x \(is made by .*meta"),
    "a subclass": (lambda: {"deep": [{"x": torch.ones(2).as_subclass(_Odd)}]}, r"deep\.0\.x \(is made by .*from_type"),
    "repeated without end": (
        lambda: {"x": torch.ones(1).expand(1 << 40)},
        r"x \(repeats its elements to 4398046511104",
    ),
    "repeated by several": (
        lambda: {"x": [torch.full((1,), float(at)).expand(1 << 27) for at in range(3)]},
        r"x\.2 \(repeats its elements to 536870912",
    ),
    "in a set": (lambda: {"x": {torch.ones(2)}}, r"x\.\[0\] \(torch\._utils.* is not built"),
    "no state dict": (lambda: torch.ones(3), "where a state dict should be"),
    "a module": (lambda: _Module(2, 2), "_Module, where a state dict should be"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_plain_tensor_is_refused_by_its_name(tmp_path: Path, case: str) -> None:
    make, sentence = REFUSED[case]
    torch.save(make(), tmp_path / "x.pt")
    with pytest.raises((ConfigurationError, MissingStateError), match=sentence):
        ckpt.load(tmp_path / "x.pt", allow_pickle=True)


def test_other_components_are_loaded_beside_one_that_is_refused(tmp_path: Path) -> None:
    saved, live = run_of(0)["model"], run_of(1)["model"]
    torch.save({"model": saved.state_dict(), "hidden": _Module(2, 2)}, tmp_path / "x.pt")
    with Checkpointer(tmp_path / "own", model=live, save_rng=False, allow_pickle=True) as checkpoints:
        checkpoints.restore(tmp_path / "x.pt")
    require_same(live.state_dict(), saved.state_dict())


def test_the_old_format_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2)}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(ConfigurationError, match=r"before 1\.6"):
        ckpt.load(tmp_path / "x.pt", allow_pickle=True)


# hostile files


class _Digits:
    def __reduce__(self) -> tuple[Any, ...]:
        return Fraction, ("1e999999999",)


def test_a_fraction_of_more_digits_than_were_written_is_not_built(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "odd": _Digits(), "half": Fraction(1, 2)}, tmp_path / "x.pt")
    assert ckpt.load(tmp_path / "x.pt", allow_pickle=True).keys() == {"w", "half"}


class _Runs:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


class _Made:
    """Pickles as a call of torch's functions that rebuild tensors."""

    def __init__(self, **changes: Any) -> None:
        given = {
            "storage": ("storage", torch.FloatStorage, "0", "cpu", 6),
            "first": 0,
            "shape": (2, 3),
            "stride": (3, 1),
        }
        self.given = given | changes

    def __reduce__(self) -> Any:
        one = self.given
        args = (_Stored(one["storage"]), one["first"], one["shape"], one["stride"], False, OrderedDict())
        return torch._utils._rebuild_tensor_v2, (*args, *([one["bits"]] if "bits" in one else []))


class _Stored:
    def __init__(self, given: Any) -> None:
        self.given = given


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.given if isinstance(obj, _Stored) else None


def _pickled(state: Any) -> bytes:
    data = io.BytesIO()
    _Pickler(data, protocol=2).dump(state)
    return data.getvalue()


def _storage(key: Any = "0", num: Any = 6, kind: Any = torch.FloatStorage, word: str = "storage") -> Any:
    return (word, kind, key, "cpu", num)


def _zip(state: Any, *, compressed: bool = False, twice: bool = False, order: bytes = b"little") -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x/data.pkl", state if isinstance(state, bytes) else _pickled(state))
        archive.writestr("x/byteorder", order)
        kind = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
        archive.writestr("x/data/0", np.arange(6, dtype="<f4").tobytes(), kind)
        archive.writestr("x/data/../secret", b"\0" * 24)
        archive.writestr("x/data/9", b"\0" * 8)
        if twice:
            archive.writestr("x/data/0 ", bytes(24))
    return file.getvalue().replace(b"x/data/0 ", b"x/data/9\0") if twice else file.getvalue()


def _circle() -> Any:
    made: list[Any] = [_Made()]
    made.append(made)
    return {"a": made}


def _laughs() -> Any:
    made: Any = [_Made()]
    for _ in range(64):
        made = [made, made]
    return {"a": made}


def _tree(node: Callable[[Any], Any] = lambda below: (below, below)) -> Any:
    """A value of a few bytes that is a tree of 2^64 nodes, which nobody may walk or print."""
    made: Any = ()
    for _ in range(64):
        made = node(made)
    return made


def _deep() -> bytes:
    return b"\x80\x02}X\x01\x00\x00\x00a" + b"]" * 100_000 + b"a" * 99_999 + b"s."


CRAFTS: dict[str, Callable[[], bytes]] = {
    "a path as the key of its memory": lambda: _zip({"a": _Made(storage=_storage("../secret"))}),
    "a number as the key": lambda: _zip({"a": _Made(storage=_storage(0))}),
    "a member that is not there": lambda: _zip({"a": _Made(storage=_storage("7"))}),
    "a member that is too short": lambda: _zip({"a": _Made(storage=_storage("9"))}),
    "no memory": lambda: _zip({"a": _Made(storage=_storage(word="module"))}),
    "memory of three words": lambda: _zip({"a": _Made(storage=("storage", torch.FloatStorage, "0"))}),
    "an offset past the end": lambda: _zip({"a": _Made(first=1)}),
    "a negative offset": lambda: _zip({"a": _Made(first=-1)}),
    "an offset that is no number": lambda: _zip({"a": _Made(first="0")}),
    "a negative stride": lambda: _zip({"a": _Made(first=5, stride=(-3, -1))}),
    "a stride past the end": lambda: _zip({"a": _Made(stride=(1 << 70, 1))}),
    "a negative shape": lambda: _zip({"a": _Made(shape=(-2, -3))}),
    "a shape that overflows": lambda: _zip({"a": _Made(shape=(1 << 40, 1 << 40), stride=(0, 0))}),
    "a shape that overflows and is empty": lambda: _zip({"a": _Made(shape=(0, 1 << 63), stride=(0, 0))}),
    "a shape and strides of other lengths": lambda: _zip({"a": _Made(stride=(1,))}),
    "too many dimensions": lambda: _zip({"a": _Made(shape=(1,) * 200, stride=(1,) * 200)}),
    "more elements than it says": lambda: _zip({"a": _Made(storage=_storage(num=5))}),
    "a number of elements that is none": lambda: _zip({"a": _Made(storage=_storage(num=6.0))}),
    "a wider type than its memory": lambda: _zip({"a": _Made(storage=_storage(kind=torch.DoubleStorage))}),
    "unknown bits": lambda: _zip({"a": _Made(bits={"surprise": True})}),
    "compressed memory": lambda: _zip({"a": _Made()}, compressed=True),
    "two members of one name": lambda: _zip({"a": _Made()}, twice=True).replace(b"x/data/9\0", b"x/data/9"),
    "a container in itself": lambda: _zip(_circle()),
    "containers without end": lambda: _zip(_laughs()),
    "namespaces without end": lambda: _zip({"a": _tree(lambda below: argparse.Namespace(x=below, y=below))}),
    "plain lists without end": lambda: _zip({"a": _tree(lambda below: [below, below])}),
    "long paths to many numbers": lambda: _zip(reduce(lambda below, _: {"a": below}, range(200), [0] * 100_000)),
    "a tree as its memory": lambda: _zip({"a": _Made(storage=_storage(word=_tree()))}),
    "a tree as the key of its memory": lambda: _zip({"a": _Made(storage=_storage(key=_tree()))}),
    "a tree as a number of elements": lambda: _zip({"a": _Made(storage=_storage(num=_tree()))}),
    "a tree as an offset": lambda: _zip({"a": _Made(first=_tree())}),
    "a tree as a shape": lambda: _zip({"a": _Made(shape=_tree())}),
    "a tree as bits": lambda: _zip({"a": _Made(bits=_tree())}),
    "containers of any depth": lambda: _zip(_deep()),
    "a program as a key": lambda: _zip(b"\x80\x02}cos\nsystem\nX\x09\x00\x00\x00touch ran\x85RK\x01s"),
    "no pickle": lambda: _zip(b"garbage"),
    "an empty pickle": lambda: _zip(b""),
    "cut off": lambda: _zip({"a": _Made()})[:-30],
    "cut short": lambda: _zip({"a": _Made()})[:80],
    "a header overwritten": lambda: (
        _zip({"a": _Made()}).replace(b"PK\x03\x04", b"PK\x07\x04").replace(b"PK\x07", b"PK\x03", 1)
    ),
}


@pytest.mark.parametrize("craft", CRAFTS)
def test_a_hostile_file_is_refused_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, craft: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.pt").write_bytes(CRAFTS[craft]())
    with pytest.raises(CorruptCheckpointError, match=r"x\.pt"):
        ckpt.load(tmp_path / "x.pt", allow_pickle=True)
    assert not (tmp_path / "ran").exists()


def test_the_crafts_differ_from_a_file_that_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(_zip({"a": _Made()}))
    assert ckpt.load(tmp_path / "x.pt", allow_pickle=True)["a"].tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("value", [_Runs(), [_Runs()], {"deep": (_Runs(), 1)}])
def test_a_program_is_left_out_by_its_name_and_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.pt").write_bytes(_zip({"a": _Made(), "b": value}))
    assert "b" not in ckpt.load(tmp_path / "x.pt", allow_pickle=True) or isinstance(value, dict)
    assert "posix.system is not built" in caplog.text
    assert not (tmp_path / "ran").exists()


def test_a_big_endian_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(_zip({"a": _Made()}, order=b"big"))
    with pytest.raises(ConfigurationError, match="big-endian"):
        ckpt.load(tmp_path / "x.pt", allow_pickle=True)


def test_a_file_that_is_cut_off_after_it_was_opened_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(40_000.0).reshape(200, 200).T}, tmp_path / "x.pt")
    opened = open_at(tmp_path / "x.pt")
    (tensor,) = opened.tensors.values()
    found = tensor.pieces()
    assert isinstance(found, Encoded)
    os.truncate(tmp_path / "x.pt", 100_000)
    with pytest.raises(CorruptCheckpointError, match=r"x\.pt was cut off"):
        found.read(Box((0, 0), (200, 200)), torch.empty(200, 200))


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"text", bytes(100)])
def test_other_files_are_not_taken_for_it(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(CheckpointNotFoundError):
        ckpt.load(tmp_path / "x.pt", allow_pickle=True)


def test_two_stage_loads_decode_parts_of_large_tensors(tmp_path: Path) -> None:
    from ckpt.interop.torch_save.archives import _grid

    assert _grid((), "float32") == ()
    assert _grid((0, 3), "float32") == (1, 3)
    for shape in [(10**9, 7), (3, 10**9), (1000, 1000, 1000)]:
        grid = _grid(shape, "float32")
        assert math.prod(grid) * 4 <= 16 << 20
        assert all(1 <= cut <= side for cut, side in zip(grid, shape, strict=True))


@pytest.mark.parametrize("state", [{}, {"a": {}}, {"a": None}, {None: torch.zeros(2)}, {"a": torch.empty(0)}])
def test_a_state_with_nothing_in_it_is_a_state_too(tmp_path: Path, state: dict[Any, Any]) -> None:
    torch.save(state, tmp_path / "a.pt")
    assert same_values(ckpt.load(tmp_path / "a.pt", allow_pickle=True), state)


def test_an_empty_state_is_imported_as_one(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "a.pt")
    source = source_at(tmp_path / "a.pt", Topology.alone(), DirectLoad(), allow_pickle=True)
    import_checkpoint(source, tmp_path / "b", Topology.alone(), ZarrBackend())
    assert ckpt.load(tmp_path / "b") == {}


@pytest.mark.parametrize("state", [[], (), None, 5, "x", torch.zeros(3), [torch.zeros(2)], ({"a": 1},)])
def test_what_is_no_state_is_refused_by_its_kind(tmp_path: Path, state: object) -> None:
    torch.save(state, tmp_path / "a.pt")
    with pytest.raises(ConfigurationError, match="where a state dict should be"):
        ckpt.load(tmp_path / "a.pt", allow_pickle=True)
