"""Layouts in which ranks hold parts of tensors: torch's FSDP2, DTensor tensor parallelism, and both together."""

from __future__ import annotations

import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from ckpt.errors import ConfigurationError
from ckpt.ranks.topology import Topology
from recipes.training.gpt import GPT
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

    def _arrange(self, model: GPT, topology: Topology, device: torch.device) -> Arranged:
        shard(model, self.mesh(device, topology.world_size))
        return Arranged(model, backward_of(model))


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
    """A layout with a tensor-parallel axis: heads, MLP columns and the vocabulary are cut over its ranks."""

    axes = ("dp", "tp")
    data_axes = ("dp",)

    def __init__(self, *, dp: int | None = None, tp: int | None = None) -> None:
        super().__init__(dp=dp, tp=tp)

    def fit(self, model: nn.Module, num_ranks: int) -> None:
        super().fit(model, num_ranks)
        assert isinstance(model, GPT)
        tp, heads = self.sizes(num_ranks)["tp"], model.size.heads
        if heads % tp:
            raise ConfigurationError(
                f"parallel.tp={tp} cuts the model across its heads, but does not divide their number, {heads}: give a divisor"
            )


class TensorThenFullySharded(_TensorParallel):
    """Each layer is cut over neighbouring ranks (DTensor), and each rank's part is sharded again (FSDP2).

    Where both cut the same dimension, FSDP2 uses a strided placement: it cuts the rows of the tensor-parallel part.

    Args:
        dp: ranks that share a batch, and each tensor-parallel part of the model; None: ranks / tp.
        tp: ranks that share a layer; None: 2.
    """

    name = "tp_fsdp"

    def _arrange(self, model: GPT, topology: Topology, device: torch.device) -> Arranged:
        mesh = self.mesh(device, topology.world_size)
        cut_layers(model, mesh["tp"])
        shard(model, mesh["dp"])
        # The logits are a view of a DTensor's memory, which is not written to.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        return Arranged(model, backward_of(model))


class TensorAndDataParallel(_TensorParallel):
    """Each layer is cut over neighbouring ranks (DTensor); each copy has its part of each batch.

    Args:
        dp: number of copies; None: ranks / tp.
        tp: ranks that share a layer; None: 2.
    """

    name = "ddp_tp"

    def _arrange(self, model: GPT, topology: Topology, device: torch.device) -> Arranged:
        mesh = self.mesh(device, topology.world_size)
        cut_layers(model, mesh["tp"])
        plain = backward_of(model)

        def backward(rows: torch.Tensor) -> torch.Tensor | None:
            loss = plain(rows)
            sum_gradients(model.parameters(), mesh.get_group("dp"), mean=True)
            return loss

        return Arranged(model, backward)


def shard(model: GPT, mesh: DeviceMesh) -> None:
    """Shard every tensor's first dimension over the mesh; FSDP2 gathers it block by block."""
    for block in model.h.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)  # with the embeddings and the head, which may be tied


def cut_layers(model: GPT, mesh: DeviceMesh) -> None:
    """Cut the layers over a mesh of one axis, as Megatron does: first by columns, then by rows, one all-reduce per half block.

    Every parameter becomes a DTensor, also those that every rank holds whole, because an optimizer steps all of them together.
    """
    for block in model.h.values():
        plan: dict[str, ParallelStyle] = {
            "attn.c_attn": ColwiseParallel(),
            "attn.c_proj": RowwiseParallel(),
            "mlp.c_fc": ColwiseParallel(),
            "mlp.c_proj": RowwiseParallel(),
        }
        parallelize_module(block, mesh, plan, src_data_rank=None)
        _hold_whole(block.ln_1, mesh)
        _hold_whole(block.ln_2, mesh)
    ends: dict[str, ParallelStyle] = {
        "wte": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    assert model.wte is not None and model.wpe is not None and model.ln_f is not None and model.lm_head is not None
    parallelize_module(model, mesh, ends, src_data_rank=None)
    if model.tied_names:
        model.lm_head.weight = model.wte.weight
    _hold_whole(model.wpe, mesh)
    _hold_whole(model.ln_f, mesh)


def _hold_whole(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make a layer's parameters replicated DTensors; its inputs and outputs are plain tensors."""

    def enter(module: nn.Module, inputs: tuple[torch.Tensor, ...], mesh: DeviceMesh) -> tuple[DTensor, ...]:
        return tuple(DTensor.from_local(tensor, mesh, [Replicate()], run_check=False) for tensor in inputs)

    def leave(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> torch.Tensor:
        return output.to_local()

    distribute_module(module, mesh, None, enter, leave)  # type: ignore[arg-type]
