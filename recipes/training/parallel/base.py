"""The interface of a layout, and the grid of ranks on which it is built."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from ckpt.errors import ConfigurationError
from ckpt.ranks.topology import Topology
from ckpt.state.statefuls import ModelState
from recipes.training.model import Step, member

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Backward = Callable[[Any], "torch.Tensor | None"]
"""A batch -> the mean loss over its rows, or None on a rank without it; it also computes the gradients."""


@dataclass
class Arranged:
    """A model in its layout, on one rank.

    Attributes:
        module: this rank's part of the model, with the parameter names of the whole model.
        backward: forward and backward pass over this rank's part of a batch. Collective.
        wrap_optimizer: wraps an optimizer of `module`'s parameters.
        state_of: makes the component of `module`.
    """

    module: nn.Module
    backward: Backward
    wrap_optimizer: Callable[[Optimizer], Optimizer] = field(default=lambda optimizer: optimizer)
    state_of: Callable[[nn.Module], ModelState] = ModelState


class Layout(ABC):
    """Ranks in a grid, in row-major order: neighbours differ in the last axis. Made before ranks start, and again on each.

    Args:
        sizes: ranks along each axis of `axes`; None: 2 along an inner axis, the rest along the first.
    """

    name: ClassVar[str]
    """The value of `parallel=`, for messages."""
    axes: ClassVar[tuple[str, ...]]
    """The names of its process groups, outermost first, for components with a `process_group_name`."""
    data_axes: ClassVar[tuple[str, ...]] = ()
    """Ranks along these axes train on different parts of a batch; along the other axes on equal rows."""
    needs: ClassVar[tuple[str, str] | None] = None
    """The member of a `Model` that says how the layout cuts inside it, and the key that replaces it."""

    def __init__(self, **sizes: int | None) -> None:
        for axis, size in sizes.items():
            if size is not None and size < 1:
                raise ConfigurationError(f"parallel.{axis}={size}: expected at least 1, or null")
        self._wanted = sizes

    def sizes(self, num_ranks: int) -> dict[str, int]:
        """Return the ranks along each axis.

        Raises:
            ConfigurationError: the number of ranks is not the product of the axes.
        """
        inner = {axis: self._wanted.get(axis) or 2 for axis in self.axes[1:]}
        inside = math.prod(inner.values())
        outer = {axis: self._wanted.get(axis) or max(1, num_ranks // inside) for axis in self.axes[:1]}
        sizes = outer | inner
        product = math.prod(sizes.values())
        if product != num_ranks:
            shape = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
            raise ConfigurationError(
                f"parallel={self.name} lays out {product} ranks ({shape}), but there are {num_ranks}: give "
                f"launch.nproc_per_node={product}, or sizes whose product is {num_ranks} with "
                + " and ".join(f"parallel.{axis}=<ranks>" for axis in self.axes)
            )
        return sizes

    def check(self, num_ranks: int) -> None:
        """Refuse a number of ranks that the layout cannot use; see `sizes`."""
        self.sizes(num_ranks)

    def fit(self, model: nn.Module, num_ranks: int) -> None:
        """Refuse a model that the layout cannot cut.

        Raises:
            ConfigurationError: the model does not say how, or its size does not fit the layout's.
        """
        self.require_plan(model, type(model).__name__)

    def require_plan(self, model: object, kind: str) -> None:
        """Refuse a model, or its class, if the layout has to cut inside it, and neither it nor the config says how."""
        if self.needs is None:
            return
        name, key = self.needs
        if member(model, name) is None and getattr(self, key) is None:
            raise ConfigurationError(
                f"parallel={self.name} cuts inside the model, and {kind} has no {name} that says how: give "
                f"parallel.{key}._target_=<function>, the model that method, or parallel=fsdp, which needs neither"
            )

    def arrange(self, step: Step, topology: Topology, device: torch.device) -> Arranged:
        """Lay a model out. Collective; every rank passes the same whole model, on its device.

        One rank holds it whole in every layout, and has no process group.
        """
        if topology.world_size == 1:
            return Arranged(step.model, backward_of(step))
        return self._arrange(step, topology, device)

    @abstractmethod
    def _arrange(self, step: Step, topology: Topology, device: torch.device) -> Arranged:
        """Lay the model out over several ranks. See `arrange`."""

    def position(self, rank: int, num_ranks: int) -> dict[str, int]:
        """Return a rank's coordinate along each axis."""
        place = {}
        for axis, size in reversed(self.sizes(num_ranks).items()):
            rank, place[axis] = divmod(rank, size)
        return place

    def instances(self, axis: str, num_ranks: int) -> list[list[int]]:
        """Return the sets of ranks whose coordinates differ only along one axis."""
        sizes = self.sizes(num_ranks)
        grid = torch.arange(num_ranks).reshape(tuple(sizes.values()))
        sets: list[list[int]] = grid.movedim(self.axes.index(axis), -1).reshape(-1, sizes[axis]).tolist()
        return sets

    def process_groups(self, topology: Topology) -> dict[str, Sequence[int]]:
        """Return, by name, the ranks of this rank's instance of each group."""
        return {
            axis: next(ranks for ranks in self.instances(axis, topology.world_size) if topology.rank in ranks)
            for axis in self.axes
        }

    def share(self, rank: int, num_ranks: int) -> tuple[int, int]:
        """Return (number, count): the part of each batch that a rank trains on, and the number of parts."""
        return self._number_along(self.data_axes, rank, num_ranks)

    def stream(self, rank: int, num_ranks: int) -> tuple[int, int]:
        """Return (number, count) of a rank's stream of random numbers.

        Ranks that hold parts of one layer share a stream, because dropout is of one activation; pipeline stages do not.
        """
        return self._number_along((*self.data_axes, "pp"), rank, num_ranks)

    def num_parts(self, num_ranks: int) -> int:
        """Return the number of equal parts of a batch."""
        return self.share(0, num_ranks)[1]

    def knows_loss(self, rank: int, num_ranks: int) -> bool:
        """Whether this rank reports the loss of its part of the batch. One rank does so for each part."""
        inside = {axis: at for axis, at in self.position(rank, num_ranks).items() if axis not in self.data_axes}
        last = self.sizes(num_ranks).get("pp", 1) - 1
        return all(at == (last if axis == "pp" else 0) for axis, at in inside.items())

    def mesh(self, device: torch.device, num_ranks: int) -> DeviceMesh:
        """Return the grid as torch's device mesh. Collective."""
        from torch.distributed.device_mesh import init_device_mesh

        sizes = self.sizes(num_ranks)
        return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def _number_along(self, axes: Sequence[str], rank: int, num_ranks: int) -> tuple[int, int]:
        sizes, place = self.sizes(num_ranks), self.position(rank, num_ranks)
        number, count = 0, 1
        for axis in (axis for axis in self.axes if axis in axes):
            number, count = number * sizes[axis] + place[axis], count * sizes[axis]
        return number, count


def backward_of(step: Callable[[Any], torch.Tensor]) -> Backward:
    """Return the plain forward and backward pass of a step, which takes a batch and returns its mean loss."""

    def backward(batch: Any) -> torch.Tensor:
        loss = step(batch)
        loss.backward()
        return loss.detach()

    return backward
