"""The learning rate of a run by step."""

from __future__ import annotations

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

WARMUP_STEPS = 20


def inverse_square_root(optimizer: Optimizer, *, warmup_steps: int = WARMUP_STEPS) -> LambdaLR:
    """Return the schedule of `learning_rate_factor`."""
    # A plain function: of other callables LambdaLR saves the state.
    return LambdaLR(optimizer, lambda step: learning_rate_factor(step, warmup_steps))


def learning_rate_factor(step: int, warmup_steps: int = WARMUP_STEPS) -> float:
    """Return the factor of the learning rate: linear over the first steps, then an inverse square root. Any run can be prolonged."""
    return min((step + 1) / warmup_steps, math.sqrt(warmup_steps / (step + 1)))
