"""A rollout of a recipe: its model, and the version that it holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckpt.engine import LiveModel
from ckpt.engine.versioned import VersionedEngine
from ckpt.memory.device import Device
from ckpt.ranks.topology import Topology
from ckpt.state.digest import state_digest
from ckpt.state.statefuls import ModelState
from recipes.support.config import made


def live_model(node: Mapping[str, Any], engine: VersionedEngine, device: Device, *, seed: int) -> LiveModel:
    """Make the rollout's model, in the types in which its weights travel.

    Args:
        node: the job's `model`.
        seed: of the initial weights; it differs from the trainers', so that equal weights at the end were received.
    """
    model: torch.nn.Module = made(node, seed=seed)
    for name, parameter in model.eval().requires_grad_(False).named_parameters():
        parameter.data = parameter.to(engine.travels_as(name, parameter.dtype))
    return LiveModel(ModelState(model.to(device.torch_device)))


def held_by(live: LiveModel, rank: int, topology: Topology) -> dict[str, Any]:
    """Return the version that a rollout holds, and the digest of its own tensors."""
    with live.reading() as version:
        return {
            "rank": rank,
            "version": version.step if version else None,
            "digest": state_digest({"model": live}, topology),
        }
