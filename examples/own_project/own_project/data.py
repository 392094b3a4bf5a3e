"""Points on spirals, and the number of the spiral of each."""

import math

import torch
from torch.utils.data import DataLoader, TensorDataset


def make_loader(*, points: int, classes: int, noise: float) -> DataLoader:
    """The recipe calls it on every rank, with the same random numbers, and takes from it the dataset and `shuffle`."""
    target = torch.arange(points) % classes
    radius = torch.rand(points)
    angle = 2 * math.pi * (radius + target / classes) + noise * torch.randn(points)
    inputs = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
    return DataLoader(TensorDataset(inputs, target), shuffle=True)
