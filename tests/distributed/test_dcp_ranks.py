"""`torch.distributed.checkpoint` with our writer and reader, on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import ckpt
from ckpt.integrations.dcp import CkptReader, CkptWriter
from ckpt.ranks.topology import Topology
from tests.support.ranks import run_ranks
from tests.support.states import random_bits


def _fsdp_program(topology: Topology, folder: Path, saves: bool) -> list[torch.Tensor]:
    """A program with DCP's own state dicts: train a step and save, or load what was saved; the whole tensors."""
    torch.manual_seed(topology.world_size)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (topology.world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 if saves else 0.5)
    model(torch.arange(14.0).reshape(2, 7)).sum().backward()
    optimizer.step()
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    if saves:
        dcp.save(states, storage_writer=CkptWriter(folder))
    else:
        dcp.load(states, storage_reader=CkptReader(folder, load="two-stage"))
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    assert optimizer.param_groups[0]["lr"] == 0.1
    moments = [one["exp_avg"] for one in optimizer.state.values()]
    return [one.detach().full_tensor() for one in [*model.parameters(), *moments]]


def test_fsdp2_saved_by_two_ranks_is_loaded_by_three_and_by_name(tmp_path: Path) -> None:
    saved = run_ranks(2, _fsdp_program, tmp_path / "saved", True, process_group=True)[0]
    for loaded in run_ranks(3, _fsdp_program, tmp_path / "saved", False, process_group=True):
        assert all(torch.equal(a, b) for a, b in zip(saved, loaded, strict=True))
    whole = ckpt.load(tmp_path / "saved")
    assert torch.equal(whole["model"]["0.weight"], saved[0])
    assert torch.equal(whole["optimizer"]["state"]["0.weight"]["exp_avg"], saved[4])


def _layouts(topology: Topology, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = random_bits((6, 10), torch.float32, 3)
    state = {
        "hsdp": distribute_tensor(whole, mesh, [Replicate(), Shard(0)]),
        "both": distribute_tensor(whole, mesh, [Shard(0), Shard(1)]),
        "plain": torch.arange(5) + 1,
        f"of rank {topology.rank}": torch.tensor([topology.rank]),
        "step": 9,
    }
    dcp.save(state, storage_writer=CkptWriter(folder, format="tensorstore"))
    into = {key: torch.zeros_like(one) if isinstance(one, torch.Tensor) else 0 for key, one in state.items()}
    into["hsdp"] = distribute_tensor(torch.zeros(6, 10), mesh, [Shard(1), Shard(0)])
    dcp.load(into, storage_reader=CkptReader(folder))
    assert torch.equal(into["hsdp"].full_tensor(), whole)
    assert torch.equal(into["both"].full_tensor(), whole)
    assert into["plain"].tolist() == [1, 2, 3, 4, 5]
    assert int(into[f"of rank {topology.rank}"]) == topology.rank
    assert into["step"] == 9
    future = dcp.async_save(state, storage_writer=CkptWriter(folder.with_name("async")))
    future.result()


def test_dtensors_of_any_layout_copies_and_keys_of_one_rank_are_kept(tmp_path: Path) -> None:
    run_ranks(4, _layouts, tmp_path / "saved", process_group=True)
    for folder in ("saved", "async"):
        loaded = ckpt.load(tmp_path / folder)
        assert torch.equal(loaded["both"], random_bits((6, 10), torch.float32, 3))
        assert [int(loaded[f"of rank {rank}"]) for rank in range(4)] == [0, 1, 2, 3]


def _uneven_rows(topology: Topology, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(torch.nn.Sequential(torch.nn.Linear(1, 7, bias=False)), mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    with pytest.raises(dcp.CheckpointException) as caught:
        dcp.save(dict(model.state_dict()), storage_writer=CkptWriter(folder))
    assert all("DCP's plan, which misplaces rows that FSDP" in str(error) for error, _ in caught.value.failures.values())


def test_rows_that_dcp_misplaces_are_refused(tmp_path: Path) -> None:
    run_ranks(6, _uneven_rows, tmp_path / "saved", process_group=True)
    assert not (tmp_path / "saved").exists()
