"""Layouts in which ranks hold parts of tensors: torch's FSDP2, DTensor tensor parallelism, and both together."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from ckpt.errors import ConfigurationError
from ckpt.ranks.topology import Topology
from ckpt.state.abilities import tied_names
from recipes.training.model import Step, member
from recipes.training.parallel.base import Arranged, Layout, backward_of
from recipes.training.parallel.gradients import sum_gradients


class FullySharded(Layout):
    """Every rank holds an equal part of every tensor, and its part of each batch: FSDP2.

    Args:
        dp: ranks that share a batch and the model; None: all.
    """

    name = "fsdp"
    axes = ("dp",)
    data_axes = ("dp",)

    def __init__(self, *, dp: int | None = None) -> None:
        super().__init__(dp=dp)

    def _arrange(self, step: Step, topology: Topology, device: torch.device) -> Arranged:
        shard(step.model, self.mesh(device, topology.world_size))
        return Arranged(step.model, backward_of(step))


class HybridSharded(FullySharded):
    """Several copies of the model, each fully sharded over its ranks: FSDP2 on a mesh of two axes.

    Args:
        dp: number of copies; None: ranks / fsdp.
        fsdp: ranks that share one copy; None: 2.
    """

    name = "hsdp"
    axes = ("dp", "fsdp")
    data_axes = ("dp", "fsdp")

    def __init__(self, *, dp: int | None = None, fsdp: int | None = None) -> None:
        Layout.__init__(self, dp=dp, fsdp=fsdp)


class _TensorParallel(Layout):
    """A layout with a tensor-parallel axis, over whose ranks layers are cut by a plan."""

    axes = ("dp", "tp")
    data_axes = ("dp",)
    needs = ("tensor_plan", "plan")

    def __init__(
        self, *, dp: int | None = None, tp: int | None = None, plan: Mapping[str, ParallelStyle] | None = None
    ) -> None:
        super().__init__(dp=dp, tp=tp)
        self.plan = plan

    def fit(self, model: nn.Module, num_ranks: int) -> None:
        super().fit(model, num_ranks)
        plan = self.plan_of(model, num_ranks)
        modules = dict(model.named_modules())
        for name in plan:
            if not any(fnmatchcase(module, name) for module in modules):
                raise ConfigurationError(
                    f"parallel={self.name}: the plan cuts {name}, and {type(model).__name__} has no such module: it has "
                    f"{', '.join(modules)[1:400]}"
                )
        for name, module in modules.items():
            if _own(module) and any(module.children()) and not any(fnmatchcase(name, cut) for cut in plan):
                raise ConfigurationError(
                    f"parallel={self.name}: {name or type(model).__name__} holds parameters beside modules of its own, and the plan does "
                    "not say how they are cut: name it in the plan, or move them into a module of their own"
                )

    def plan_of(self, model: nn.Module, num_ranks: int) -> Mapping[str, ParallelStyle]:
        """Return how the layers of a model are cut: by `parallel.plan`, or as the model says."""
        if self.plan is not None:
            return self.plan
        plan: Mapping[str, ParallelStyle] = model.tensor_plan(self.sizes(num_ranks)["tp"])  # type: ignore[operator]
        return plan


class TensorThenFullySharded(_TensorParallel):
    """Each layer is cut over neighbouring ranks (DTensor), and each rank's part is sharded again (FSDP2).

    Where both cut the same dimension, FSDP2 uses a strided placement: it cuts the rows of the tensor-parallel part.

    Args:
        dp: ranks that share a batch, and each tensor-parallel part of the model; None: ranks / tp.
        tp: ranks that share a layer; None: 2.
        plan: name of a module, `*` for a part of it -> how it is cut; None: as the model says, by `tensor_plan`.
    """

    name = "tp_fsdp"

    def _arrange(self, step: Step, topology: Topology, device: torch.device) -> Arranged:
        mesh = self.mesh(device, topology.world_size)
        cut_layers(step.model, mesh["tp"], self.plan_of(step.model, topology.world_size))
        shard(step.model, mesh["dp"])
        # The logits are a view of a DTensor's memory, which is not written to.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        return Arranged(step.model, backward_of(step))


class TensorAndDataParallel(_TensorParallel):
    """Each layer is cut over neighbouring ranks (DTensor); each copy has its part of each batch.

    Args:
        dp: number of copies; None: ranks / tp.
        tp: ranks that share a layer; None: 2.
        plan: name of a module, `*` for a part of it -> how it is cut; None: as the model says, by `tensor_plan`.
    """

    name = "ddp_tp"

    def _arrange(self, step: Step, topology: Topology, device: torch.device) -> Arranged:
        mesh = self.mesh(device, topology.world_size)
        cut_layers(step.model, mesh["tp"], self.plan_of(step.model, topology.world_size))
        plain = backward_of(step)

        def backward(batch: Any) -> torch.Tensor | None:
            loss = plain(batch)
            sum_gradients(step.model.parameters(), mesh.get_group("dp"), mean=True)
            return loss

        return Arranged(step.model, backward)


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard every tensor's first dimension over the mesh; FSDP2 gathers it block by block."""
    for block in member(model, "blocks"):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)  # with what is in no block, such as embeddings and the head, which may be tied
    if member(model, "train_step") is not None:
        register_fsdp_forward_method(model, "train_step")


def cut_layers(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, ParallelStyle]) -> None:
    """Cut the layers that a plan names over a mesh of one axis.

    Every parameter becomes a DTensor, also those that every rank holds whole, because an optimizer steps all of them together.
    """
    parallelize_module(model, mesh, dict(plan), src_data_rank=None)
    for alias, first in tied_names(model).items():
        (holder, _, name), (owner, _, original) = alias.rpartition("."), first.rpartition(".")
        setattr(model.get_submodule(holder), name, getattr(model.get_submodule(owner), original))
    for module in model.modules():
        if any(not isinstance(parameter, DTensor) for parameter in _own(module)):
            _hold_whole(module, mesh)


def _own(module: nn.Module) -> list[nn.Parameter]:
    return list(module.parameters(recurse=False))


def _hold_whole(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make a layer's parameters replicated DTensors; its inputs and outputs are plain tensors."""

    def enter(module: nn.Module, inputs: tuple[torch.Tensor, ...], mesh: DeviceMesh) -> tuple[DTensor, ...]:
        return tuple(DTensor.from_local(tensor, mesh, [Replicate()], run_check=False) for tensor in inputs)

    def leave(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> torch.Tensor:
        return output.to_local()

    distribute_module(module, mesh, None, enter, leave)  # type: ignore[arg-type]
