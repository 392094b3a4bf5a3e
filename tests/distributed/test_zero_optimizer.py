"""`ZeroRedundancyOptimizer`: each rank has the moments of a part of the parameters; its own state dict is that of all, on one rank."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from ckpt import Checkpointer
from ckpt.errors import ConfigurationError
from ckpt.ranks.topology import Topology
from tests.support.covering import sampled
from tests.support.ranks import run_ranks
from tests.support.states import same_bits

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # it scripts functions as it is imported
    from torch.distributed.optim import ZeroRedundancyOptimizer


def _made(seed: int) -> tuple[torch.nn.Module, Any, Any]:
    torch.manual_seed(seed)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2), torch.nn.Linear(2, 7)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def _train(model: torch.nn.Module, optimizer: Any, scheduler: Any, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.arange(6.0).view(2, 3) + step).square().sum().backward()
        optimizer.step()
        scheduler.step()


def _save(_: Topology, root: Path) -> list[torch.Tensor]:
    model, optimizer, scheduler = _made(0)
    _train(model, optimizer, scheduler, 3)
    with Checkpointer(root, model=model, optimizer=optimizer, scheduler=scheduler, save_rng=False) as run:
        run.save(3)
    _train(model, optimizer, scheduler, 5)
    return [tensor.clone() for tensor in model.state_dict().values()]


def _load(_: Topology, root: Path) -> tuple[list[torch.Tensor], float]:
    model, optimizer, scheduler = _made(1)
    with Checkpointer(root, model=model, optimizer=optimizer, scheduler=scheduler, save_rng=False) as run:
        run.restore()
        assert {group["lr"] for group in optimizer.param_groups} == {0.05}
    _train(model, optimizer, scheduler, 5)
    return [tensor.clone() for tensor in model.state_dict().values()], optimizer.param_groups[0]["lr"]


@sampled("ranks", [1, 2, 4])
def test_the_next_steps_are_equal_to_the_bit_on_any_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    want = run_ranks(2, _save, tmp_path, process_group=True)[0]
    for got, rate in run_ranks(ranks, _load, tmp_path, process_group=True):
        assert all(map(same_bits, got, want)) and rate == 0.00625


def _overlapped(_: Topology, root: Path) -> None:
    model = DistributedDataParallel(torch.nn.Linear(3, 5))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=0.1)
    with pytest.raises(ConfigurationError, match="overlap_with_ddp=False"):
        Checkpointer(root, model=model, optimizer=optimizer)


def test_one_that_steps_inside_of_the_backward_pass_is_refused(tmp_path: Path) -> None:
    run_ranks(2, _overlapped, tmp_path, process_group=True)
