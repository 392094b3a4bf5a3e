"""How the model is laid out over the ranks. One class per choice of `parallel=`; its keywords are the choice's keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckpt.errors import ConfigurationError
from ckpt.topology import Topology


class Layout(Protocol):
    """What the training recipe wants of a layout. Made before any rank starts, and again on every rank."""

    group_names: Sequence[str]
    """The process groups it makes, for components that are shared per group."""

    def check(self, num_ranks: int) -> None:
        """Refuse a number of ranks that the layout cannot use.

        Raises:
            ConfigurationError: naming the layout, the number of ranks and the way out.
        """

    def process_groups(self, topology: Topology) -> dict[str, Sequence[int]]:
        """Return, by name, the ranks of this rank's instance of each group."""

    def wrap(self, model: nn.Module, num_ranks: int) -> nn.Module:
        """Return what to call in a training step: `model`, arranged so that gradients come out right. Collective."""


class Single:
    """One rank holds everything."""

    group_names: Sequence[str] = ()

    def check(self, num_ranks: int) -> None:
        if num_ranks != 1:
            raise ConfigurationError(
                f"parallel=single trains on one rank, but there are {num_ranks}: choose parallel=ddp to use them all, "
                "or launch.nproc_per_node=1"
            )

    def process_groups(self, topology: Topology) -> dict[str, Sequence[int]]:
        return {}

    def wrap(self, model: nn.Module, num_ranks: int) -> nn.Module:
        return model


class DataParallel:
    """Every rank holds the whole model and takes its part of each batch: torch's DistributedDataParallel.

    Args:
        dp: how many ranks share a batch; None: all there are.
        exact_resume: keep the gradient buckets as they are from the first step on. By default torch rebuilds them after
            the first backward pass of each process, and then a resumed run on three or more ranks sums gradients in
            another order than the run it continues.
    """

    group_names: Sequence[str] = ("dp",)

    def __init__(self, *, dp: int | None = None, exact_resume: bool = True) -> None:
        if dp is not None and dp < 1:
            raise ConfigurationError(f"parallel.dp={dp}: expected at least 1, or null for all ranks")
        self.dp = dp
        self.exact_resume = exact_resume

    def check(self, num_ranks: int) -> None:
        if self.dp not in (None, num_ranks):
            raise ConfigurationError(
                f"parallel.dp={self.dp} asks for {self.dp} ranks, but there are {num_ranks}: "
                f"give launch.nproc_per_node={self.dp}, or parallel.dp=null"
            )

    def process_groups(self, topology: Topology) -> dict[str, Sequence[int]]:
        return {"dp": range(topology.world_size)}

    def wrap(self, model: nn.Module, num_ranks: int) -> nn.Module:
        if num_ranks == 1:
            return model
        if not self.exact_resume:
            return DistributedDataParallel(model)
        return DistributedDataParallel(
            _WithOneUnused(model), find_unused_parameters=True
        )  # which never rebuilds buckets


class _WithOneUnused(nn.Module):
    """A model beside a parameter that no step uses. Told to look for unused parameters, DDP warns if it finds none."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.unused = nn.Parameter(torch.zeros(1, device=next(model.parameters()).device))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model(*inputs)
        return out
