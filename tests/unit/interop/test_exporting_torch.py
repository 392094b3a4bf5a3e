"""A checkpoint of any format is exported as a file that torch.load reads to the bit, or nothing is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import Checkpointer
from ckpt.errors import CheckpointExistsError, CorruptCheckpointError, StorageError
from ckpt.interop.new_files import WrittenRun
from ckpt.interop.registry import source_at
from ckpt.interop.torch_save import writing as exporting_torch
from ckpt.interop.torch_save.writing import export_torch
from ckpt.loading.direct import DirectLoad
from ckpt.ranks.topology import Topology
from tests.support.dcp_runs import run_of, save_by_dcp, tensors_of_all_kinds
from tests.support.states import same_bits
from tests.support.values import same_values


def exported(src: Path, dst: Path, topology: Topology | None = None) -> None:
    topology = topology or Topology.alone()
    export_torch(source_at(src, topology, DirectLoad(), allow_pickle=True), dst, topology)


def test_torch_loads_every_tensor_and_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting_torch, "PIECE_BYTES", 20_000)
    plain = {"names": ["a", "b"], "pair": (1, 2.5), "none": None, "deep": {"list": [torch.arange(5), {"x": 3}]}}
    ckpt.save({"tensors": tensors_of_all_kinds(), **plain}, tmp_path / "ours")
    exported(tmp_path / "ours", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    for name, tensor in tensors_of_all_kinds().items():
        assert same_bits(found["tensors"][name], tensor), name
    assert same_values({key: found[key] for key in plain}, plain)
    mapped = torch.load(tmp_path / "all.pt", weights_only=True, mmap=True)
    assert same_values(mapped["deep"], plain["deep"])
    assert same_values(ckpt.load(tmp_path / "all.pt", allow_pickle=True), ckpt.load(tmp_path / "ours"))


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    weight = torch.arange(12.0).reshape(3, 4)
    torch.save({"model": {"embedding": weight, "head": weight, "w": torch.ones(2)}}, tmp_path / "old.pt")
    exported(tmp_path / "old.pt", tmp_path / "new.pt")
    found = torch.load(tmp_path / "new.pt", weights_only=True)["model"]
    assert torch.equal(found["head"], weight) and torch.equal(found["w"], torch.ones(2))
    assert found["embedding"].data_ptr() == found["head"].data_ptr()


def test_a_run_goes_on_from_the_file_of_what_a_checkpointer_saved(tmp_path: Path) -> None:
    saved, live = run_of(0), run_of(1)
    with Checkpointer(tmp_path / "own", **saved) as checkpoints:
        path = checkpoints.save(7)
    assert path is not None
    exported(Path(path), tmp_path / "7.pt")
    live["model"].load_state_dict(torch.load(tmp_path / "7.pt", weights_only=False)["model"])
    assert same_values(dict(live["model"].state_dict()), dict(saved["model"].state_dict()))
    live["scheduler"] = None
    with Checkpointer(tmp_path / "new", **live, save_rng=False, allow_pickle=True) as again:
        again.restore(tmp_path / "7.pt")
    mine, other = live["optimizer"].state_dict(), saved["optimizer"].state_dict()
    assert same_values(mine["state"], other["state"])
    assert mine["param_groups"][0]["lr"] == other["param_groups"][0]["lr"]


def test_a_checkpoint_of_dcp_becomes_one_file(tmp_path: Path) -> None:
    state = {"a": torch.arange(6).reshape(2, 3), "step": 7}
    save_by_dcp(state, tmp_path / "dcp")
    exported(tmp_path / "dcp", tmp_path / "all.pt")
    assert same_values(torch.load(tmp_path / "all.pt", weights_only=True), state)


def test_a_damaged_source_is_not_exported(tmp_path: Path) -> None:
    ckpt.save({"w": torch.arange(1 << 16)}, tmp_path / "ours")
    (chunk,) = (tmp_path / "ours").rglob("c/0")
    chunk.write_bytes(b"\1" + chunk.read_bytes()[1:])
    with pytest.raises(CorruptCheckpointError):
        exported(tmp_path / "ours", tmp_path / "all.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours"]


def test_what_was_written_wrong_is_found_and_nothing_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt.save({"w": torch.ones(1 << 16)}, tmp_path / "ours")
    write = exporting_torch.write_pieces

    def forgetful(*args: Any) -> list[WrittenRun]:
        runs = write(*args)
        with runs[0].path.open("r+b") as stream:
            stream.seek(runs[0].start)
            stream.write(b"\xff")
        return runs

    monkeypatch.setattr(exporting_torch, "write_pieces", forgetful)
    with pytest.raises(StorageError, match=r"all\.pt is not what is read back: bytes .* of all\.pt were changed"):
        exported(tmp_path / "ours", tmp_path / "all.pt")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours"]


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    ckpt.save({"w": torch.ones(1)}, tmp_path / "ours")
    (tmp_path / "all.pt").touch()
    with pytest.raises(CheckpointExistsError):
        exported(tmp_path / "ours", tmp_path / "all.pt")
