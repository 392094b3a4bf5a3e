"""What the training recipe wants of a layout, and the grid of ranks that most of the answers follow from."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from ckpt.errors import ConfigurationError
from ckpt.ranks.topology import Topology
from recipes.training.gpt import GPT, next_token_loss

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Backward = Callable[[torch.Tensor], "torch.Tensor | None"]
"""Tokens (rows, context + 1) -> the mean loss over these rows, as far as this rank knows it, with all gradients made."""


@dataclass
class Arranged:
    """A model in its layout, on one rank.

    Attributes:
        module: what this rank trains and saves of the model, by the parameter names of the whole model.
        backward: forward and backward pass over this rank's rows of a batch. Collective.
        wrap_optimizer: what the layout makes of an optimizer over `module`'s parameters.
    """

    module: nn.Module
    backward: Backward
    wrap_optimizer: Callable[[Optimizer], Optimizer] = field(default=lambda optimizer: optimizer)


class Layout(ABC):
    """Ranks in a grid: neighbours differ in the last axis first. Made before any rank starts, and again on every rank.

    Args:
        sizes: ranks along each axis of `axes`; None: 2 along an inner axis, and what is left along the first.
    """

    name: ClassVar[str]
    """The choice of `parallel=`, for messages."""
    axes: ClassVar[tuple[str, ...]]
    """The process groups it makes, outermost first, for components that are shared per group."""
    data_axes: ClassVar[tuple[str, ...]] = ()
    """Along these each rank takes its own part of a batch; ranks that differ in others only train on equal rows."""
    cuts_model: ClassVar[bool] = True
    """Whether ranks hold parts of the model, which takes knowledge of it."""

    def __init__(self, **sizes: int | None) -> None:
        for axis, size in sizes.items():
            if size is not None and size < 1:
                raise ConfigurationError(f"parallel.{axis}={size}: expected at least 1, or null")
        self._wanted = sizes

    def sizes(self, num_ranks: int) -> dict[str, int]:
        """Return the ranks along each axis.

        Raises:
            ConfigurationError: this number of ranks cannot be laid out so; names it, the axes and the way out.
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
        """Refuse a number of ranks that the layout cannot use. See `sizes`."""
        self.sizes(num_ranks)

    def fit(self, model: nn.Module, num_ranks: int) -> None:
        """Refuse a model that cannot be laid out so.

        Raises:
            ConfigurationError: the layout knows where to cut a GPT, and this is none; or the layout's key and the model's
                number that do not go together.
        """
        if self.cuts_model and not isinstance(model, GPT):
            raise ConfigurationError(
                f"parallel={self.name} knows where to cut a recipes.training.gpt.GPT, but the model is a {type(model).__name__}: "
                "choose parallel=ddp, or model=gpt"
            )

    @abstractmethod
    def arrange(self, model: GPT, topology: Topology, device: torch.device) -> Arranged:
        """Lay the model out. Collective; every rank gives the same model, whole, on its device."""

    def position(self, rank: int, num_ranks: int) -> dict[str, int]:
        """Return a rank's place along each axis."""
        place = {}
        for axis, size in reversed(self.sizes(num_ranks).items()):
            rank, place[axis] = divmod(rank, size)
        return place

    def instances(self, axis: str, num_ranks: int) -> list[list[int]]:
        """Return the sets of ranks whose places differ along one axis only."""
        sets: dict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
        for rank in range(num_ranks):
            place = self.position(rank, num_ranks)
            sets[tuple((other, at) for other, at in place.items() if other != axis)].append(rank)
        return list(sets.values())

    def process_groups(self, topology: Topology) -> dict[str, Sequence[int]]:
        """Return, by name, the ranks of this rank's instance of each group."""
        return {
            axis: next(ranks for ranks in self.instances(axis, topology.world_size) if topology.rank in ranks)
            for axis in self.axes
        }

    def share(self, rank: int, num_ranks: int) -> tuple[int, int]:
        """Return (number, count): which of how many parts of each batch a rank trains on."""
        return self._number_along(self.data_axes, rank, num_ranks)

    def stream(self, rank: int, num_ranks: int) -> tuple[int, int]:
        """Return (number, count) of the stream of random numbers a rank draws from.

        Ranks that hold parts of one layer draw alike, for what they drop out is one activation; stages have other layers.
        """
        return self._number_along((*self.data_axes, "pp"), rank, num_ranks)

    def num_parts(self, num_ranks: int) -> int:
        """Return into how many equal parts a batch is cut."""
        return self.share(0, num_ranks)[1]

    def knows_loss(self, rank: int, num_ranks: int) -> bool:
        """Whether this rank speaks for its part of the batch. One rank does for each part."""
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


def backward_of(model: nn.Module) -> Backward:
    """Return the plain forward and backward pass of a module that takes tokens and returns logits."""

    def backward(rows: torch.Tensor) -> torch.Tensor:
        loss = next_token_loss(model(rows[:, :-1]), rows[:, 1:])
        loss.backward()
        return loss.detach()

    return backward
