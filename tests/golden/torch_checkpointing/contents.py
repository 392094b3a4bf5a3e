"""The state that the golden checkpoints of torch_checkpointing hold: each rank builds it anew from formulas, without random numbers."""

from __future__ import annotations

from typing import Any

import torch

RANKS = 4
SHAPES = {"embed": (7, 5), "wide": (3, 10), "both": (8, 6), "strided": (10, 2), "few": (2, 3), "copied": (5,)}
"""Name of a tensor -> its shape; see `placed`."""


def numbers(name: str, first: int) -> torch.Tensor:
    """Exact in float32; neighbours differ."""
    shape = SHAPES[name]
    count = torch.Size(shape).numel()
    return (((torch.arange(count) * 37 + first * 11) % 251 - 125).float() / 8).reshape(shape)


def weights(first: int = 0) -> dict[str, torch.Tensor]:
    return {name: numbers(name, first + at) for at, name in enumerate(SHAPES)}


def state() -> dict[str, Any]:
    """All that is the same on all ranks, whole."""
    optimizer = {at: {"step": torch.tensor(7.0), "exp_avg": one} for at, one in enumerate(weights(9).values())}
    groups = [{"lr": 0.25, "betas": (0.9, 0.99), "params": [*range(len(SHAPES))]}]
    half = torch.nn.Parameter(torch.arange(6).reshape(2, 3).bfloat16())
    return {
        "model": {**weights(), "plain": torch.arange(3), "half": half, "turned": torch.arange(6.0).reshape(2, 3).t()},
        "optimizer": {"state": optimizer, "param_groups": groups},
        "step": 7,
        "run": {"epoch": 1, "losses": [0.5, float("nan"), None]},
    }


def own(rank: int) -> dict[str, Any]:
    """What each rank has of its own."""
    return {"rank": rank, "random": torch.arange(8, dtype=torch.uint8) + rank}


def raw(rank: int) -> bytes:
    return b"\0tokens of rank %d\xff" % rank


def placed(whole: Any, mesh: Any, path: tuple[Any, ...] = ()) -> Any:
    """The state with DTensors of a mesh of 2 x 2 in the place of the tensors with a name, or a position, of `SHAPES`."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    if isinstance(whole, dict):
        return {key: placed(value, mesh, (*path, key)) for key, value in whole.items()}
    names = [name for at, name in enumerate(SHAPES) if name in path or path[-2:] == (at, "exp_avg")]
    if not isinstance(whole, torch.Tensor) or not names:
        return whole
    placements = {
        "embed": [Replicate(), Shard(0)],
        "wide": [Shard(1), Replicate()],
        "both": [Shard(0), Shard(1)],
        "strided": [_StridedShard(0, split_factor=2), Shard(0)],
        "few": [Shard(0), Shard(0)],
        "copied": [Replicate(), Replicate()],
    }[names[0]]
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)
