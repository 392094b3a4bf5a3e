"""What the golden torch_dist checkpoints hold: formulas for all values, without Megatron-Core. `write.py` saves them, tests compare."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any

import torch

BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32
BUCKET = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0.exp_avg"


@dataclass(frozen=True)
class Cut:
    """How two ranks cut a tensor.

    Attributes:
        axis: that tensor-parallel ranks cut in two; None: both hold all of it.
        layers: the first axis counts stacked layers, each an object of its own.
        ranges: by rank, the runs of flattened elements that it holds of its chunk (of each layer); None: the chunk whole.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    axis: int | None = None
    layers: bool = False
    padded: bool = False
    ranges: tuple[tuple[tuple[int, int], ...], ...] | None = None


WHOLE_CHUNKS = {
    "embedding.word_embeddings.weight": Cut((16, 5), BFLOAT16, 0, padded=True),
    "decoder.layers.self_attention.linear_qkv.weight": Cut((3, 6, 4), BFLOAT16, 1, layers=True),
    "decoder.layers.mlp.linear_fc2.weight": Cut((3, 4, 10), FLOAT32, 2, layers=True),
    "decoder.layers.input_layernorm.weight": Cut((3, 7), BFLOAT16, layers=True),
    "decoder.final_layernorm.weight": Cut((7,), FLOAT32),
    "output_layer.bias": Cut((10,), FLOAT32, 0),
    "output_layer.ids": Cut((4, 6), torch.int64, 1),
    "optimizer.state.step": Cut((1,), FLOAT32),
}
RANGES = {
    "optimizer.state.exp_avg.output_layer.weight": Cut((6, 4), FLOAT32, ranges=(((0, 11),), ((11, 24),))),
    "optimizer.state.exp_avg_sq.output_layer.weight": Cut((5, 3, 4), FLOAT32, ranges=(((0, 23),), ((23, 60),))),
    "optimizer.state.exp_avg.decoder.linear_qkv": Cut((8, 6), FLOAT32, 1, ranges=(((0, 24),), ((0, 24),))),
    "optimizer.state.exp_avg.decoder.layers": Cut((3, 4, 5), FLOAT32, layers=True, ranges=(((0, 9),), ((9, 20),))),
    "optimizer.state.exp_avg.output_layer.bias": Cut((9,), FLOAT32, ranges=(((0, 4),), ((4, 9),))),
    BUCKET: Cut((80,), FLOAT32, 0, ranges=(((0, 11), (11, 40)), ((0, 33), (33, 40)))),
}
"""Of the distributed optimizer, of versions before 0.14."""


def values(key: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The whole tensor of a key. Exact in its data type, and neighbours differ."""
    index = torch.arange(math.prod(shape))
    seed = zlib.crc32(key.encode())
    return ((index * 37 + seed) % 251 - 125).to(dtype).div(8 if dtype.is_floating_point else 1).to(dtype).reshape(shape)


def random_state(rank: int) -> list[dict[str, Any]]:
    """Random state as Megatron-LM saves it."""
    return [
        {
            "random_rng_state": (3, (1, 2, rank), None),
            "torch_rng_state": torch.arange(rank, rank + 16, dtype=torch.uint8),
        }
    ]


def common() -> dict[str, Any]:
    """The plain part of the common state."""
    group = {"lr": 3e-4, "betas": (0.9, 0.95), "step": 7, "params": [0, 1]}
    return {
        "checkpoint_version": 3.0,
        "iteration": 7,
        "opt_param_scheduler": {"max_lr": 3e-4, "num_steps": 56},
        "optimizer": {"optimizer": {"param_groups": [group]}, "grad_scaler": {"scale": torch.tensor([65536.0])}},
        "tensor": values("common.tensor", (3, 4), BFLOAT16),
        "nested": {"list": [1, {"a": (1, 2)}, []], "none": None, "text": "Schlüssel"},
    }


ARGUMENTS = {"num_layers": 3, "params_dtype": BFLOAT16, "lr": 3e-4, "load": None}
"""Besides `model_type`, an enum of Megatron-Core."""
