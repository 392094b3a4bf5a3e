"""The run whose state the golden checkpoints of DCP hold: each rank builds it anew from formulas, without random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def numbers(count: int, first: int) -> torch.Tensor:
    """Exact in float32; neighbours differ."""
    return ((torch.arange(count) * 37 + first * 11) % 251 - 125).float() / 8


def run_of(ranks: int, *, filled: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its AdamW; of several ranks in FSDP2.

    Args:
        filled: with the values that are saved, the optimizer's state too; otherwise with ones, and no state.
    """
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 3, bias=False))
    if ranks > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25 if filled else 0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
            parameter.grad = torch.zeros_like(parameter)
        if filled:
            optimizer.step()  # makes the state
            for position, parameter in enumerate(model.parameters()):
                state = optimizer.state[parameter]
                for tensor, first in ((parameter, 0), (state["exp_avg"], 1), (state["exp_avg_sq"], 2)):
                    _fill(tensor, 3 * position + first)
                state["step"].fill_(7.0)
    return model, optimizer


def _fill(tensor: torch.Tensor, first: int) -> None:
    values = numbers(tensor.numel(), first).reshape(tensor.shape)
    if isinstance(tensor, DTensor):
        rows = values.chunk(tensor.device_mesh.size(), 0)
        rank = tensor.device_mesh.get_local_rank()
        tensor.to_local().copy_(rows[rank] if rank < len(rows) else values[:0])
    else:
        tensor.copy_(values)


def bits_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All tensors of the two, whole."""
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter
        found |= {f"{name}.{kind}": tensor for kind, tensor in optimizer.state[parameter].items()}
    return {key: one.full_tensor() if isinstance(one, DTensor) else one.detach() for key, one in found.items()}
