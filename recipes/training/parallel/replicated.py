"""Layouts in which every rank holds the whole model."""

from __future__ import annotations

from glob import escape
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckpt.errors import ConfigurationError
from ckpt.ranks.topology import Topology
from ckpt.state.statefuls import ModelState
from recipes.training.model import Step
from recipes.training.parallel.base import Arranged, Layout, backward_of


class Single(Layout):
    """One rank holds everything."""

    name = "single"
    axes = ()

    def __init__(self) -> None:
        super().__init__()

    def check(self, num_ranks: int) -> None:
        if num_ranks != 1:
            raise ConfigurationError(
                f"parallel=single trains on one rank, but there are {num_ranks}: choose parallel=ddp, or launch.nproc_per_node=1"
            )

    def _arrange(self, step: Step, topology: Topology, device: torch.device) -> Arranged:
        raise AssertionError("`check` refuses several ranks")


class DataParallel(Layout):
    """Every rank holds the whole model and its part of each batch: torch's DistributedDataParallel.

    Args:
        dp: ranks that share a batch; None: all.
        exact_resume: keep the gradient buckets of the first step. Otherwise torch rebuilds them after the first backward
            pass of each process, and a resumed run on three or more ranks sums gradients in another order than the run
            that it continues.
    """

    name = "ddp"
    axes = ("dp",)
    data_axes = ("dp",)

    def __init__(self, *, dp: int | None = None, exact_resume: bool = True) -> None:
        super().__init__(dp=dp)
        self.exact_resume = exact_resume

    def _arrange(self, step: Step, topology: Topology, device: torch.device) -> Arranged:
        if not self.exact_resume:
            return Arranged(step.model, backward_of(DistributedDataParallel(step)), state_of=ModelInDDP)
        # With find_unused_parameters DDP does not rebuild its buckets.
        wrapped = DistributedDataParallel(WithOneUnused(step), find_unused_parameters=True)
        return Arranged(step.model, backward_of(wrapped), state_of=ModelInDDP)


class ModelInDDP(ModelState):
    """A module that DDP wraps: it sends the buffers of rank 0, such as those of batch norm, to all at each forward pass."""

    @property
    def rank_private(self) -> list[str]:
        return [escape(name) for name, _ in self.module.named_buffers()]


class WithOneUnused(nn.Module):
    """A step and a parameter that it does not use: DDP warns if it looks for unused parameters and finds none."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.step = step
        self.unused = nn.Parameter(torch.zeros(1, device=next(step.parameters()).device))

    def forward(self, batch: Any) -> torch.Tensor:
        return self.step(batch)
