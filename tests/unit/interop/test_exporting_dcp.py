"""A checkpoint of any format is exported as one that torch.distributed.checkpoint loads to the bit, or nothing is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckpt
from ckpt import Checkpointer
from ckpt.errors import CheckpointExistsError, CorruptCheckpointError, StorageError
from ckpt.interop.dcp import writing as exporting_dcp
from ckpt.interop.dcp.writing import export_dcp
from ckpt.interop.opened import Opened
from ckpt.interop.registry import source_at
from ckpt.loading.direct import DirectLoad
from ckpt.ranks.topology import Topology
from tests.support.covering import sampled
from tests.support.dcp_runs import (
    dcp_state,
    one_process_is_meant,
    require_equal,
    run_of,
    save_by_dcp,
    tensors_of_all_kinds,
)
from tests.support.ranks import run_ranks
from tests.support.states import same_bits
from tests.support.values import same_values


def exported(src: Path, dst: Path, topology: Topology | None = None) -> None:
    topology = topology or Topology.alone()
    export_dcp(source_at(src, topology, DirectLoad(), allow_pickle=True), dst, topology)


def read_by_torch(folder: Path, file: Path) -> Any:
    with one_process_is_meant():
        dcp_to_torch_save(folder, file)
    return torch.load(file, weights_only=True)


@sampled("format", ["zarr", "kimi-engine"])
def test_torch_reads_every_tensor_and_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str) -> None:
    monkeypatch.setattr(exporting_dcp, "PIECE_BYTES", 20_000)
    plain = {"names": ["a", "b"], "none": None, "deep": {"list": [torch.arange(5), {"x": 3}]}}
    ckpt.save({"tensors": tensors_of_all_kinds(), **plain}, tmp_path / "ours", format=format)
    exported(tmp_path / "ours", tmp_path / "dcp")
    found = read_by_torch(tmp_path / "dcp", tmp_path / "all.pt")
    for name, tensor in tensors_of_all_kinds().items():
        assert same_bits(found["tensors"][name], tensor), name
    assert same_values({key: found[key] for key in plain}, plain)


def test_a_program_of_dcp_goes_on_from_what_a_checkpointer_saved(tmp_path: Path) -> None:
    saved, live = run_of(0), run_of(1)
    with Checkpointer(tmp_path / "own", **saved) as checkpoints:
        path = checkpoints.save(7)
    assert path is not None
    exported(Path(path), tmp_path / "dcp")
    state = dcp_state(live)
    with one_process_is_meant():
        dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    model, optimizer = live["model"], live["optimizer"]
    dcp.state_dict.set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    live["scheduler"].load_state_dict(state["scheduler"])
    require_equal(live, saved)


def test_copies_of_single_ranks_come_over_by_rank(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "own", model=torch.nn.Linear(2, 1)) as checkpoints:
        path = checkpoints.save(1)
    assert path is not None
    exported(Path(path), tmp_path / "dcp")
    found = ckpt.load(tmp_path / "dcp", allow_pickle=True)["rng"]
    assert same_values(
        found["rank-00000"], Opened(source_at(Path(path), Topology.alone(), DirectLoad())).state()["rng"]["rank-00000"]
    )


@pytest.mark.parametrize("kind", ["dcp", "safetensors"])
def test_another_programs_checkpoint_comes_over_under_its_own_names(tmp_path: Path, kind: str) -> None:
    state = {"model.w": torch.arange(6.0), "b": torch.ones(2, 2)}
    if kind == "dcp":
        save_by_dcp(state, tmp_path / "old")
    else:
        save_file(state, tmp_path / "old")
        (tmp_path / "old").rename(tmp_path / "old.safetensors")
    exported(tmp_path / ("old" if kind == "dcp" else "old.safetensors"), tmp_path / "dcp")
    assert same_values(read_by_torch(tmp_path / "dcp", tmp_path / "all.pt"), state)


def test_tensors_without_elements_come_over_wherever_they_stand(tmp_path: Path) -> None:
    state = {"a": torch.zeros(0, 3), "b": torch.ones(5), "c": torch.zeros(2, 0)}
    ckpt.save(state, tmp_path / "ours")
    exported(tmp_path / "ours", tmp_path / "dcp")
    assert same_values(read_by_torch(tmp_path / "dcp", tmp_path / "all.pt"), state)


def _export_on_ranks(topology: Topology, folder: Path) -> None:
    exported(folder / "ours", folder / "dcp", topology)


def test_several_ranks_write_a_share_each(tmp_path: Path) -> None:
    state = {"w": torch.randint(1 << 30, (64, 1 << 16)), "small": torch.arange(3), "step": 3}
    ckpt.save(state, tmp_path / "ours")
    run_ranks(2, _export_on_ranks, tmp_path, process_group=True)
    sizes = [file.stat().st_size for file in (tmp_path / "dcp").glob("*.distcp")]
    assert len(sizes) == 2 and min(sizes) > 8 << 20
    assert same_values(read_by_torch(tmp_path / "dcp", tmp_path / "all.pt"), state)


def test_a_damaged_source_is_not_exported(tmp_path: Path) -> None:
    ckpt.save({"w": torch.arange(1 << 16)}, tmp_path / "ours")
    (chunk,) = (tmp_path / "ours").rglob("c/0")
    chunk.write_bytes(b"\1" + chunk.read_bytes()[1:])
    with pytest.raises(CorruptCheckpointError):
        exported(tmp_path / "ours", tmp_path / "dcp")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours"]


def test_what_was_written_wrong_is_found_and_nothing_appears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt.save({"w": torch.ones(1 << 16)}, tmp_path / "ours")
    save = exporting_dcp.save

    def forgetful(*given: Any, **named: Any) -> None:
        save(*given, **named)
        file = Path(named["storage_writer"].path) / "__0_0.distcp"
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)

    monkeypatch.setattr(exporting_dcp, "save", forgetful)
    with pytest.raises(StorageError, match="dcp is not what is read back: w was changed"):
        exported(tmp_path / "ours", tmp_path / "dcp")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours"]


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    ckpt.save({"w": torch.ones(1)}, tmp_path / "ours")
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp" / "mine").touch()
    with pytest.raises(CheckpointExistsError):
        exported(tmp_path / "ours", tmp_path / "dcp")
