"""What the golden fsdp_dtensor checkpoint holds: formulas for all values, without Megatron-Core. `write.py` saves them, tests compare."""

from __future__ import annotations

import argparse
import math
import zlib
from typing import Any

import torch

SHAPES = {
    "embedding.word_embeddings.weight": (7, 4),
    "decoder.layers.0.mlp.linear_fc1.weight": (9, 4),
    "decoder.layers.0.mlp.linear_fc1.bias": (9,),
    "decoder.final_layernorm.weight": (1,),
}
UNEVEN = {7: (5, 2), 9: (8, 1), 1: (1, 0)}
"""Rows of the first side -> how many of them each of two ranks holds: Megatron-FSDP cuts its buffers, not each tensor, in equal parts."""


def values(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The whole tensor of a key. Exact in its data type, and neighbours differ."""
    seed = zlib.crc32(key.encode())
    return (((torch.arange(math.prod(shape)) * 37 + seed) % 251 - 125) / 8).to(dtype).reshape(shape)


def tensors() -> dict[tuple[str, ...], torch.Tensor]:
    """Path -> whole tensor, of the model and the optimizer."""
    found = {("model", f"module.{name}"): values(name, shape, torch.bfloat16) for name, shape in SHAPES.items()}
    for name, shape in SHAPES.items():
        found["optimizer", "state", f"module.{name}", "exp_avg"] = values(f"exp_avg.{name}", shape, torch.float32)
    return found


def plain() -> dict[str, Any]:
    """The rest of the state."""
    return {
        "args": argparse.Namespace(num_layers=1, lr=3e-4, params_dtype=torch.bfloat16, load=None),
        "checkpoint_version": 3.0,
        "iteration": 7,
        "opt_param_scheduler": {"max_lr": 3e-4, "num_steps": 56},
        "num_floating_point_operations_so_far": 10**15,
    }


def param_to_group_meta() -> dict[str, dict[str, Any]]:
    """The optimizer's options of each parameter."""
    return {f"module.{name}": {"lr": 3e-4, "betas": (0.9, 0.95), "step": 7} for name in SHAPES}
