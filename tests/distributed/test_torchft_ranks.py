"""DTensors by `KeeperTransport`: a rank gets its part from the same rank of another group, on a mesh that equals its own."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from ckpt.integrations.torchft import KeeperTransport
from ckpt.ranks.topology import Topology
from tests.support.pace import patience
from tests.support.ranks import run_ranks
from tests.support.states import require_equal_states


def _trained(seed: int, num_tensor_parallel: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5), nn.LayerNorm(5))
    mesh = init_device_mesh("cpu", (4 // num_tensor_parallel, num_tensor_parallel), mesh_dim_names=("shard", "tensor"))
    if num_tensor_parallel > 1:
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(3, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def _parts(state: Any) -> Any:
    """A state with this rank's parts of DTensors, and what these are parts of."""
    if isinstance(state, DTensor):
        return [state.to_local(), state.device_mesh, state.placements, state.shape, state.stride()]
    if isinstance(state, dict):
        return {key: _parts(value) for key, value in state.items()}
    return state


def _send_and_receive(topology: Topology, folder: Path, num_tensor_parallel: int) -> None:
    timeout = timedelta(seconds=patience(20.0))
    model, optimizer = _trained(1, num_tensor_parallel)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    transport = KeeperTransport(path=folder)
    transport.send_checkpoint([1], 1, state, timeout)
    got = transport.recv_checkpoint(0, transport.metadata(), 1, timeout)
    transport.shutdown()
    assert any(isinstance(value, DTensor) for value in got["model"].values())
    require_equal_states(_parts(state), _parts(got))
    other, its_optimizer = _trained(2, num_tensor_parallel)
    other.load_state_dict(got["model"])
    its_optimizer.load_state_dict(got["optimizer"])
    require_equal_states(_parts(state), _parts({"model": other.state_dict(), "optimizer": its_optimizer.state_dict()}))


@pytest.mark.parametrize("num_tensor_parallel", [1, 2])
def test_the_dtensors_of_each_rank_arrive(tmp_path: Path, num_tensor_parallel: int) -> None:
    run_ranks(4, _send_and_receive, tmp_path, num_tensor_parallel, process_group=True)
