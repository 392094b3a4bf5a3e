"""What cannot be read of a file of another program does not spoil the rest: a strict load refuses it by name, others leave it out."""

from __future__ import annotations

import argparse
import collections
import datetime
import enum
import json
import logging
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file

import ckpt
from ckpt import Checkpointer
from ckpt.backends.zarr import ZarrBackend
from ckpt.errors import ConfigurationError, CorruptCheckpointError, MissingStateError
from ckpt.interop.importing import import_checkpoint
from ckpt.interop.opened import Opened
from ckpt.interop.registry import source_at
from ckpt.loading.direct import DirectLoad
from ckpt.ranks.topology import Topology
from tests.support.states import same_bits

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore:.*quantized:UserWarning"),
]
W = torch.arange(6.0).view(2, 3)
FLOAT4, E8M0 = torch.float4_e2m1fn_x2, torch.float8_e8m0fnu


class _Dict(dict[str, Any]):
    pass


class _List(list[Any]):
    pass


class _Set(set[Any]):
    pass


class _Color(enum.Enum):
    RED = 1


class _Access(enum.Flag):
    READ = 1
    WRITE = 2


def bytes_as(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.uint8).view(dtype).view(shape)


def raw_file(file: Path, **tensors: tuple[str, list[int], bytes]) -> Path:
    """A safetensors file of any data types: name -> type, shape, bytes."""
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return file


def test_safetensors_of_every_type_of_torch_come_back(tmp_path: Path) -> None:
    tensors = {
        "scales": bytes_as(E8M0, 2, 3), "packed": bytes_as(FLOAT4, 2, 4), "line": bytes_as(FLOAT4, 3),
        "fnuz": bytes_as(torch.float8_e4m3fnuz, 5), "fnuz 2": bytes_as(torch.float8_e5m2fnuz, 5), "w": W,
    }  # fmt: skip
    save_file(tensors, tmp_path / "a.safetensors")
    loaded = ckpt.load(tmp_path / "a.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(same_bits(loaded[name], one) for name, one in tensors.items())
    dcp.save({"model": tensors}, checkpoint_id=tmp_path / "dcp")
    loaded = ckpt.load(tmp_path / "dcp", allow_pickle=True)["model"]
    assert all(same_bits(loaded[name], one) for name, one in tensors.items())


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(2, 3))


RAW = {
    "x": ("F6_E2M3", [2, 4], bytes(range(6))),
    "half": ("F4", [2, 3], b"abc"),
    "w": ("F32", [2, 3], W.numpy().tobytes()),
}


def test_tensors_of_types_that_torch_lacks_are_refused_one_by_one(tmp_path: Path) -> None:
    file = raw_file(tmp_path / "a.safetensors", **RAW)
    said = r"x \(is of F6_E2M3 \[2, 4\], a data type that torch lacks\), half \(is of F4 \[2, 3\]"
    with pytest.raises(MissingStateError, match=said):
        ckpt.load(file)
    loaded = ckpt.load(file, strict=False)
    assert loaded.keys() == {"w"} and same_bits(loaded["w"], W)
    for strict in (True, False):
        model = _Model()
        with Checkpointer(tmp_path / f"run{strict}", model=model, save_rng=False) as checkpoints:
            if strict:
                with pytest.raises(MissingStateError, match=said):
                    checkpoints.restore(file)
            else:
                assert "x (is of F6_E2M3" in checkpoints.restore(file, strict=False).summary()
        assert same_bits(model.w.detach(), torch.zeros(2, 3) if strict else W)


def test_convert_carries_them_as_their_bytes_and_names_them(tmp_path: Path) -> None:
    file = raw_file(tmp_path / "a.safetensors", **RAW)
    source = source_at(file, Topology.alone(), DirectLoad())
    assert list(Opened(source).bytes_alone()) == ["state: x", "state: half"]
    import_checkpoint(source, tmp_path / "ours", Topology.alone(), ZarrBackend())
    loaded = ckpt.load(tmp_path / "ours")
    assert loaded["x"].tolist() == list(range(6)) and bytes(loaded["half"].tolist()) == b"abc"
    assert same_bits(loaded["w"], W)


@pytest.mark.parametrize(
    "odd", [("F33", [2], bytes(8)), ("F6_E2M3", [2, 4], bytes(5)), ("F4", [3], b"ab"), ("f8", [1], b"a")]
)
def test_a_type_whose_bytes_are_too_few_or_too_many_is_damage(
    tmp_path: Path, odd: tuple[str, list[int], bytes]
) -> None:
    with pytest.raises(CorruptCheckpointError, match=f"its header has '{odd[0]}'"):
        ckpt.load(raw_file(tmp_path / "a.safetensors", x=odd), strict=False)


ODD_TENSORS = {
    "sparse": (lambda: W.to_sparse(), "_rebuild_sparse_tensor"),
    "quantized": (lambda: torch.quantize_per_tensor(W, 0.1, 0, torch.qint8), "_rebuild_qtensor"),
    "without memory": (lambda: torch.empty(3, device="meta"), "_rebuild_meta_tensor"),
}


@pytest.mark.parametrize("kind", ODD_TENSORS)
def test_one_odd_tensor_of_torch_save_is_refused_by_name_and_else_left_out(tmp_path: Path, kind: str) -> None:
    make, made_by = ODD_TENSORS[kind]
    torch.save({"model": {"w": W, "odd": make()}, "rest": [make(), 1], "kept": (W, 2)}, tmp_path / "x.pt")
    with pytest.raises(MissingStateError, match=rf"model\.odd \(is made by .*{made_by}.*rest\.0 .*rest \(a part of it"):
        ckpt.load(tmp_path / "x.pt", allow_pickle=True)
    loaded = ckpt.load(tmp_path / "x.pt", allow_pickle=True, strict=False)
    assert loaded.keys() == {"model", "kept"} and loaded["model"].keys() == {"w"}
    assert loaded["kept"][1] == 2 and same_bits(loaded["kept"][0], W)
    model = _Model()
    with Checkpointer(tmp_path / "run", model=model, save_rng=False, allow_pickle=True) as checkpoints:
        with pytest.raises(MissingStateError, match=made_by):
            checkpoints.restore(tmp_path / "x.pt")
        checkpoints.restore(tmp_path / "x.pt", strict=False)
    assert same_bits(model.w.detach(), W)
    with pytest.raises(ConfigurationError, match=rf"state: model\.odd cannot be read \(is made by .*{made_by}"):
        Opened(source_at(tmp_path / "x.pt", Topology.alone(), DirectLoad(), allow_pickle=True)).every_tensor()


OBJECTS = {
    "omegaconf": (lambda: OmegaConf.create({"a": 1}), "DictConfig is not built"),
    "a dict subclass": (lambda: _Dict(a=W, b={"c": 1}), "_Dict is not built"),
    "a list subclass": (lambda: _List([1, W]), "_List is not built"),
    "a set subclass": (lambda: _Set([1]), "_Set is not built"),
    "a user's dictionary": (lambda: collections.UserDict(a=1), "UserDict is not built"),
    "a time zone": (lambda: datetime.UTC, "datetime.timezone is not plain"),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_one_object_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    make, said = OBJECTS[kind]
    state = {"model": {"w": W}, "args": {"odd": make(), "lr": 0.1}, "list": [make(), 1], "epoch": 3}
    torch.save(state, tmp_path / "x.pt")
    with caplog.at_level(logging.WARNING, "ckpt"):
        loaded = ckpt.load(tmp_path / "x.pt", allow_pickle=True)
    assert loaded.keys() == {"model", "args", "epoch"} and same_bits(loaded["model"]["w"], W)
    assert loaded["args"] == {"lr": 0.1} and loaded["epoch"] == 3
    assert "what is neither a tensor nor plain is left out: args.odd (" in caplog.text
    assert said in caplog.text and "list (" in caplog.text


@pytest.mark.parametrize("odd", [_List([1, 2]), _Set([1])], ids=str)
def test_one_object_of_dcp_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, odd: object
) -> None:
    dcp.save({"w": W, "odd": odd, "epoch": 3}, checkpoint_id=tmp_path / "x")
    with caplog.at_level(logging.WARNING, "ckpt"):
        loaded = ckpt.load(tmp_path / "x", allow_pickle=True)
    assert loaded.keys() == {"w", "epoch"} and same_bits(loaded["w"], W)
    assert "is left out: odd (" in caplog.text


def test_a_tensor_that_cannot_be_read_inside_of_a_value_of_dcp_is_refused(tmp_path: Path) -> None:
    dcp.save({"w": W, "pair": (W.to_sparse(), 1), "kept": (W, 2)}, checkpoint_id=tmp_path / "x")
    with pytest.raises(MissingStateError, match=r"pair\.\[0\] \(torch\._utils\._rebuild_sparse_tensor is not built\)"):
        ckpt.load(tmp_path / "x", allow_pickle=True)
    loaded = ckpt.load(tmp_path / "x", allow_pickle=True, strict=False)
    assert loaded.keys() == {"w", "kept"} and same_bits(loaded["kept"][0], W)


def test_containers_keep_their_types_when_a_part_is_left_out(tmp_path: Path) -> None:
    space = argparse.Namespace(d=collections.OrderedDict(z=1, odd=_Set([1]), a=2), lr=0.1)
    dcp.save({"w": W, "args": space}, checkpoint_id=tmp_path / "dcp")
    torch.save({"w": W, "args": space}, tmp_path / "x.pt")
    for name in ("dcp", "x.pt"):
        loaded = ckpt.load(tmp_path / name, allow_pickle=True)["args"]
        assert vars(loaded) == {"d": collections.OrderedDict(z=1, a=2), "lr": 0.1}
        assert type(loaded.d) is collections.OrderedDict and list(loaded.d) == ["z", "a"]


def test_a_deque_with_an_odd_part_is_left_out_whole(tmp_path: Path) -> None:
    torch.save({"w": W, "queue": collections.deque([1, {"x": W.to_sparse()}], 3), "n": 1}, tmp_path / "x.pt")
    with pytest.raises(MissingStateError, match=r"queue\.1\.x \(is made by .*queue \(a part of it is left out"):
        ckpt.load(tmp_path / "x.pt", allow_pickle=True)
    assert ckpt.load(tmp_path / "x.pt", allow_pickle=True, strict=False).keys() == {"w", "n"}


def test_a_component_of_which_nothing_can_be_read_is_refused(tmp_path: Path) -> None:
    torch.save({"model": {"w": W.to_sparse()}}, tmp_path / "x.pt")
    says = pytest.raises(MissingStateError, match=r"w \(is made by .*_rebuild_sparse_tensor")
    with Checkpointer(tmp_path / "run", model=_Model(), save_rng=False, allow_pickle=True) as checkpoints, says:
        checkpoints.restore(tmp_path / "x.pt")


def test_convert_leaves_objects_out_and_names_them(tmp_path: Path) -> None:
    torch.save({"w": W, "net": {"odd": _Dict(a=1), "lr": 0.1}, "list": [_Set([1])]}, tmp_path / "x.pt")
    source = source_at(tmp_path / "x.pt", Topology.alone(), DirectLoad(), allow_pickle=True)
    source.leaves_out_unknown = True  # type: ignore[attr-defined]
    import_checkpoint(source, tmp_path / "ours", Topology.alone(), ZarrBackend())
    assert [one.split(" (")[0] for one in source.left_out] == ["net.odd", "list.0", "list"]  # type: ignore[attr-defined]
    loaded = ckpt.load(tmp_path / "ours")
    assert loaded.keys() == {"w", "net"} and loaded["net"] == {"lr": 0.1}


def test_one_object_of_a_component_is_refused_by_name_and_else_left_out(tmp_path: Path) -> None:
    """The plain state of an object that a program gives."""

    class Notes:
        def __init__(self) -> None:
            self.given: dict[str, Any] = {}

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, given: dict[str, Any]) -> None:
            self.given = given

    torch.save({"model": {"w": W}, "notes": {"odd": _Dict(a=1), "lr": 0.1}}, tmp_path / "x.pt")
    notes = Notes()
    with Checkpointer(tmp_path / "run", model=_Model(), notes=notes, save_rng=False, allow_pickle=True) as checkpoints:
        with pytest.raises(MissingStateError, match=r"notes: does not fit: odd \(.*_Dict is not built\)"):
            checkpoints.restore(tmp_path / "x.pt")
        assert notes.given == {}
        checkpoints.restore(tmp_path / "x.pt", strict=False)
    assert notes.given == {"lr": 0.1}


def test_dates_devices_and_members_of_enums_are_read(tmp_path: Path) -> None:
    now = datetime.datetime(2026, 11, 27, 1, 2, 3, 4, datetime.UTC)
    state = {
        "w": W,
        "at": now,
        "on": now.date(),
        "took": datetime.timedelta(3),
        "device": torch.device("cpu"),
        "path": Path("a/b"),
        "color": _Color.RED,
        "may": _Access.READ | _Access.WRITE,
    }
    torch.save(state, tmp_path / "x.pt")
    _Access._value2member_map_.pop(3)  # as in a process that has not combined them
    state["may"] = _Access.READ | _Access.WRITE
    loaded = ckpt.load(tmp_path / "x.pt", allow_pickle=True)
    assert {key: loaded[key] for key in state if key != "w"} == {key: state[key] for key in state if key != "w"}


def test_a_dcp_tensor_of_a_type_that_is_not_read_is_refused_alone(tmp_path: Path) -> None:
    dcp.save({"model": {"w": W, "q": torch.quantize_per_tensor(W, 0.1, 0, torch.qint8)}}, checkpoint_id=tmp_path / "x")
    with pytest.raises(MissingStateError, match=r"model\.q \(is of qint8, which is not read here\)"):
        ckpt.load(tmp_path / "x", allow_pickle=True)
    assert ckpt.load(tmp_path / "x", allow_pickle=True, strict=False)["model"].keys() == {"w"}


def test_float4_and_powers_of_two_go_through_safetensors_and_back(tmp_path: Path) -> None:
    tensors = {"packed": bytes_as(FLOAT4, 2, 4), "scales": bytes_as(E8M0, 4)}
    ckpt.save({**tensors, "one": bytes_as(FLOAT4)}, tmp_path / "ours", format="kimi-engine")
    found = load_file(next((tmp_path / "ours/state").glob("*float4*.safetensors")))
    assert same_bits(found["packed"], tensors["packed"])
    loaded = ckpt.load(tmp_path / "ours")
    assert loaded["one"].shape == () and all(same_bits(loaded[name], one) for name, one in tensors.items())
