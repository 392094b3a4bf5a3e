"""Checkpoints of torch.distributed.checkpoint and safetensors files are loaded to the bit; hostile ones are refused, and run no code."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckpt
from ckpt import Checkpointer
from ckpt.errors import CheckpointNotFoundError, CorruptCheckpointError, MissingStateError
from ckpt.ranks.topology import Topology
from tests.support.bounded import little_memory
from tests.support.covering import sampled
from tests.support.dcp_runs import dcp_state, require_equal, run_of, save_by_dcp, tensors_of_all_kinds
from tests.support.ranks import run_ranks
from tests.support.states import same_bits


def test_a_state_dict_of_dcp_comes_back_as_it_was(tmp_path: Path) -> None:
    plain = {"step": 7, "names": ["a", "b"], "nested": {"pair": (1, 2.5), "none": None}}
    save_by_dcp(
        {"tensors": tensors_of_all_kinds(), "list": [torch.arange(3), {"deep": torch.ones(2)}], **plain}, tmp_path
    )
    loaded = ckpt.load(tmp_path, allow_pickle=True)
    for name, tensor in tensors_of_all_kinds().items():
        assert same_bits(loaded["tensors"][name], tensor), name
    assert torch.equal(loaded["list"][0], torch.arange(3)) and torch.equal(loaded["list"][1]["deep"], torch.ones(2))
    assert {key: loaded[key] for key in plain} == plain


@pytest.mark.parametrize("flat", [False, True])
def test_a_checkpointer_goes_on_from_what_dcp_saved(tmp_path: Path, flat: bool) -> None:
    saved, live = run_of(0), run_of(1)
    save_by_dcp(dcp_state(saved, flat=flat), tmp_path / "step-12")
    with Checkpointer(tmp_path / "own", **live, save_rng=False, allow_pickle=True) as checkpoints:
        assert checkpoints.restore(tmp_path / "step-12") == 12
    require_equal(live, saved)


def test_a_pickle_is_read_only_where_it_is_allowed(tmp_path: Path) -> None:
    save_by_dcp({"a": torch.ones(2)}, tmp_path)
    with pytest.raises(CheckpointNotFoundError, match=r"whose \.metadata is a pickle.* load with allow_pickle=True"):
        ckpt.load(tmp_path)


def _save_sharded(topology: Topology, folder: Path) -> dict[str, torch.Tensor]:
    run = run_of(0)
    fully_shard(run["model"], mesh=init_device_mesh("cpu", (topology.world_size,)))
    run["optimizer"] = torch.optim.AdamW(run["model"].parameters(), lr=0.1)
    run["model"](torch.ones(4, 6)).square().sum().backward()
    run["optimizer"].step()
    model, optimizer = get_state_dict(run["model"], run["optimizer"])
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
    return {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in model.items()}


def _load_sharded(topology: Topology, folder: Path, load: str) -> dict[str, torch.Tensor]:
    run = run_of(1)
    fully_shard(run["model"], mesh=init_device_mesh("cpu", (topology.world_size,)))
    optimizer = torch.optim.AdamW(run["model"].parameters(), lr=0.3)
    with Checkpointer(
        folder / "own", model=run["model"], optimizer=optimizer, save_rng=False, allow_pickle=True, load=load
    ) as checkpoints:
        checkpoints.restore(folder / "dcp")
    assert optimizer.param_groups[0]["lr"] == 0.1
    state = dict(run["model"].state_dict())
    for number, parameter in enumerate(run["model"].parameters()):
        state |= {f"{number}.{name}": tensor for name, tensor in optimizer.state[parameter].items()}
    return {name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor for name, tensor in state.items()}


@sampled("load", ["direct", "two-stage"])
def test_shards_that_dcp_saved_on_two_ranks_load_on_three(tmp_path: Path, load: str) -> None:
    saved, _ = run_ranks(2, _save_sharded, tmp_path / "dcp", process_group=True)
    on_three = run_ranks(3, _load_sharded, tmp_path, load, process_group=True)
    alone = ckpt.load(tmp_path / "dcp", allow_pickle=True)
    for loaded in on_three:
        for name, tensor in saved.items():
            assert same_bits(loaded[name], tensor), name
            assert same_bits(alone["model"][name], tensor), name
        assert torch.equal(loaded["0.exp_avg"], alone["optimizer"]["state"]["0.weight"]["exp_avg"])


# safetensors


def test_a_safetensors_file_comes_back_as_it_was(tmp_path: Path) -> None:
    tensors = {
        name: one
        for name, one in tensors_of_all_kinds().items()
        if not name.startswith(("complex128", "complex32", "float4_e2m1fn_x2[]"))
    }
    save_file(tensors, tmp_path / "weights.safetensors", metadata={"format": "pt"})
    loaded = ckpt.load(tmp_path / "weights.safetensors")
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same_bits(loaded[name], tensor), name


def test_a_model_in_several_files_is_loaded_into_the_model(tmp_path: Path) -> None:
    saved, live = run_of(0)["model"], run_of(1)["model"]
    state = saved.state_dict()
    files = {name: f"model-{1 + number % 2:05d}-of-00002.safetensors" for number, name in enumerate(state)}
    for file in set(files.values()):
        save_file({name: one for name, one in state.items() if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    with Checkpointer(tmp_path / "own", model=live, save_rng=False) as checkpoints:
        assert checkpoints.restore(tmp_path) == 0
    for name, tensor in state.items():
        assert same_bits(live.state_dict()[name], tensor), name


def test_what_safetensors_do_not_hold_is_missing(tmp_path: Path) -> None:
    run = run_of(0)
    save_file(run["model"].state_dict(), tmp_path / "model.safetensors")
    with (
        Checkpointer(tmp_path / "own", **run) as checkpoints,
        pytest.raises(MissingStateError, match="optimizer is not in the checkpoint"),
    ):
        checkpoints.restore(tmp_path)


def _with_header(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def changed(data: bytes) -> bytes:
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        return struct.pack("<Q", len(text)) + text + data[8 + length :]

    return changed


@pytest.mark.parametrize(
    "craft",
    [
        lambda data: data[:5],
        lambda data: data[:-1],
        lambda data: struct.pack("<Q", 1 << 60) + data[8:],
        lambda data: data[:8] + b"[" + data[9:],
        _with_header(lambda h: h["a"].update(dtype="F99")),
        _with_header(lambda h: h["a"].update(shape=[-2, -3])),
        _with_header(lambda h: h["a"].update(shape=[1 << 40])),
        _with_header(lambda h: h["a"].update(data_offsets=[0, 1 << 40])),
        _with_header(lambda h: h["a"].update(data_offsets=[-24, 0])),
        _with_header(lambda h: h["a"].pop("shape")),
    ],
)
def test_a_damaged_safetensors_file_is_refused(tmp_path: Path, craft: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(6.0).reshape(2, 3)}, path)
    path.write_bytes(craft(path.read_bytes()))
    with pytest.raises(CorruptCheckpointError, match=r"model\.safetensors"):
        ckpt.load(tmp_path)


def test_an_empty_tensor_whose_other_sides_overflow_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.empty(0, 2, 2)}, tmp_path / "model.safetensors")
    huge = _with_header(lambda h: h["a"].update(shape=[0, 1 << 40, 1 << 40]))
    (tmp_path / "model.safetensors").write_bytes(huge((tmp_path / "model.safetensors").read_bytes()))
    with pytest.raises(
        CorruptCheckpointError, match=r"no tensor has the shape of 'a', \[0, 1099511627776, 1099511627776\]"
    ):
        ckpt.load(tmp_path)


# hostile checkpoints of DCP


class _Runs:
    def __reduce__(self) -> Any:
        return os.system, ("touch ran",)


def _place(metadata: Metadata, name: str = "a") -> tuple[MetadataIndex, _StorageInfo]:
    return next((index, place) for index, place in metadata.storage_data.items() if index.fqn == name)


def _moved(name: str = "a", **changes: Any) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        index, place = _place(metadata, name)
        metadata.storage_data[index] = replace(place, **changes)

    return change


def _resized(metadata: Metadata) -> None:
    metadata.state_dict_metadata["a"].chunks[0].sizes = torch.Size([2, 2])


def _named_elsewhere(metadata: Metadata) -> None:
    metadata.storage_data.pop(_place(metadata)[0])


def _tree() -> Any:
    """A value of a few bytes that is a tree of 2^64 nodes, which nobody may walk or print."""
    made: Any = ()
    for _ in range(64):
        made = (made, made)
    return made


CRAFTS: dict[str, Callable[[Metadata], object]] = {
    "a path that leads out": _moved(relative_path="../secret.distcp"),
    "an absolute path": _moved(relative_path="/etc/passwd"),
    "a path that is no text": _moved(relative_path=7),
    "an offset past the end": _moved(offset=1 << 50),
    "a negative offset": _moved(offset=-5),
    "a length that cuts the archive": _moved(length=100),
    "no length": _moved(length=0),
    "a link": _moved(relative_path="link.distcp"),
    "a folder": _moved(relative_path="folder"),
    "a missing file": _moved(relative_path="__9_9.distcp"),
    "no place": _named_elsewhere,
    "a piece that is smaller than it says": _resized,
    "another type": lambda m: setattr(m.state_dict_metadata["a"].properties, "dtype", torch.int32),
    "pieces that do not cover it": lambda m: m.state_dict_metadata["a"].chunks.clear(),
    "pieces that overlap": lambda m: m.state_dict_metadata["a"].chunks.append(m.state_dict_metadata["a"].chunks[0]),
    "a value longer than its file": _moved("b", length=1 << 50),
    "a value at a negative offset": _moved("b", offset=-1),
    "a list in place of tensors": lambda m: setattr(m, "state_dict_metadata", ["a"]),
    "no places at all": lambda m: setattr(m, "storage_data", None),
    "a path of 100,000 steps": lambda m: setattr(m, "planner_data", {"a": ("x",) * 100_000}),
    "two values in the same bytes": lambda m: m.storage_data.update(dict.fromkeys(m.storage_data, _place(m)[1])),
    "a shape that its pieces do not fill": lambda m: setattr(m.state_dict_metadata["a"], "size", (10**9, 10**9)),
    "a piece that its archive does not hold": lambda m: (
        setattr(m.state_dict_metadata["a"], "size", (10**9, 10**9)),
        setattr(m.state_dict_metadata["a"].chunks[0], "sizes", (10**9, 10**9)),
    ),
    "a tree as a path": lambda m: setattr(m, "planner_data", {"a": (_tree(),)}),
    "a tree as a shape": lambda m: setattr(m.state_dict_metadata["a"], "size", _tree()),
    "a program": lambda m: setattr(m, "planner_data", {"a": _Runs()}),
    "a program as a place": lambda m: m.storage_data.update({_place(m)[0]: _Runs()}),
    "a program as a tensor": lambda m: m.state_dict_metadata.update({"a": _Runs()}),
}


@pytest.mark.parametrize("craft", CRAFTS)
def test_a_hostile_checkpoint_of_dcp_is_refused_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, craft: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "saved"
    save_by_dcp({"a": torch.arange(6.0).reshape(2, 3), "b": 1}, folder)
    save_by_dcp({"a": torch.arange(6.0).reshape(2, 3)}, tmp_path / "other")
    (tmp_path / "other" / "__0_0.distcp").rename(tmp_path / "secret.distcp")
    (folder / "link.distcp").symlink_to(tmp_path / "secret.distcp")
    (folder / "folder").mkdir()
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    CRAFTS[craft](metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpointError):
        ckpt.load(folder, allow_pickle=True)
    assert not (tmp_path / "ran").exists()


def test_twenty_names_of_one_repeated_element_are_refused(tmp_path: Path) -> None:
    save_by_dcp({f"w{n}": torch.ones(1) for n in range(20)}, tmp_path / "saved")
    repeated = torch.ones(1).expand(1 << 26)
    torch.save(repeated, tmp_path / "saved" / "repeated")
    metadata = pickle.loads((tmp_path / "saved" / ".metadata").read_bytes())
    length = (tmp_path / "saved" / "repeated").stat().st_size
    assert length < 4096
    for one in metadata.state_dict_metadata.values():
        one.size, one.chunks[0].sizes = repeated.shape, repeated.shape
    for case, shared in (("the same bytes", True), ("hold", False)):
        data = (tmp_path / "saved" / "repeated").read_bytes()
        (tmp_path / "saved" / "all").write_bytes(data * 20)
        for n, place in enumerate(metadata.storage_data.values()):
            place.relative_path, place.offset, place.length = "all", 0 if shared else n * len(data), length
        (tmp_path / "saved" / ".metadata").write_bytes(pickle.dumps(metadata))
        with little_memory(), pytest.raises(CorruptCheckpointError, match=case):
            ckpt.load(tmp_path / "saved", allow_pickle=True)


def test_many_values_deep_in_one_state_are_named_in_time(tmp_path: Path) -> None:
    """Their paths have few beginnings, and each is looked at once."""
    deep: dict[str, Any] = {f"w{n}": torch.ones(1) for n in range(3000)}
    for _ in range(100):
        deep = {"x": deep}
    torch.save({"model": deep}, tmp_path / "x.pt")
    found = ckpt.load(tmp_path / "x.pt", allow_pickle=True)["model"]
    for _ in range(100):
        found = found["x"]
    assert found.keys() == {f"w{n}" for n in range(3000)}


@pytest.mark.parametrize("data", [b"", b"\x80\x04.", b"\x80\x04K\x01.", b"garbage", pickle.dumps(_Runs())])
def test_a_pickle_that_is_no_metadata_is_refused_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    save_by_dcp({"a": torch.ones(2)}, tmp_path / "saved")
    (tmp_path / "saved" / ".metadata").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=r"\.metadata"):
        ckpt.load(tmp_path / "saved", allow_pickle=True)
    assert not (tmp_path / "ran").exists()
