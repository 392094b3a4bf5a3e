"""A component that is each host's own, given to the training command by `_target_`."""

from __future__ import annotations

import os
from typing import Any

import torch


class NodeCache:
    """What a host has cached: equal on its ranks, different on other hosts and in other runs. Only a load makes it an old one.

    Args:
        model: of the run; not needed.
        made_in: names the run.
    """

    def __init__(self, model: torch.nn.Module, made_in: str) -> None:
        self.state = cache_of(made_in, int(os.environ.get("GROUP_RANK", 0)))

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


def cache_of(made_in: str, node: int) -> dict[str, Any]:
    """A small and a large tensor of random values, and where they come from."""
    generator = torch.Generator().manual_seed(sum(made_in.encode()) * 10 + node)
    return {
        "made_in": made_in,
        "node": node,
        "recent": torch.randn(50, generator=generator),
        "large": torch.randn(300, 200, generator=generator),
    }
