"""A classifier in plain torch. Of what the recipes ask of a model it has `loss`, and `blocks`, which FSDP2 gathers one at a time."""

import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self, *, classes: int, width: int, depth: int, dropout: float) -> None:
        super().__init__()
        self.enter = nn.Linear(2, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.leave = nn.Linear(width, classes)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        hidden = self.enter(points)
        for block in self.blocks:
            hidden = block(hidden)
        return self.leave(hidden)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target)


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.dropout(self.narrow(F.gelu(self.widen(self.norm(hidden)))))
