"""One step of training that costs the same each time: compute, one small all-reduce, and a real optimizer's step."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ckpt.state.address import local_tensor
from ckpt.state.statefuls import OptimizerState
from recipes.benchmark.measuring import timed
from recipes.benchmark.workloads import State

_SIDE = 384
_PYTHON_LOOPS = 2000  # about a fifth of what the product takes: the interpreter is a part of every step
_REDUCED = 16384
_TRIAL_S = 0.25
_TRIALS = 5


class StepTimes(NamedTuple):
    """Begin and end of a step, by `time.perf_counter`; `wait_s` is spent in the hooks before the optimizer's step."""

    began: float
    ended: float
    wait_s: float


class TrainingStep:
    """Steps of all ranks together, on the state's own parameters and optimizer.

    Args:
        stepped_bytes: of parameters that one step changes on a rank; of a larger model it changes another part in each step.
    """

    def __init__(self, state: State, stepped_bytes: int) -> None:
        optimizer_state = state.statefuls["optimizer"]
        assert isinstance(optimizer_state, OptimizerState), "workloads have one"
        self._state = state
        self._optimizer = optimizer_state.optimizer
        self._group = state.group
        device = state.device.torch_device
        generator = torch.Generator().manual_seed(0)  # the same on all ranks: copies of a parameter stay equal
        self._factors = [torch.randn(_SIDE, _SIDE, generator=generator).to(device) for _ in range(2)]
        self._product = torch.empty(_SIDE, _SIDE, device=device)
        self._reduced = torch.zeros(_REDUCED, device=device)
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        values = torch.randn(max(local_tensor(p).numel() for p in parameters), generator=generator).to(device)
        self._turns = _in_turns(parameters, stepped_bytes)
        self._gradients = {p: _gradient(p, values) for p in parameters}
        self._number = 0
        self._units = 1

    def calibrate(self, step_s: float) -> float:
        """Make the compute of a step take about so long while all ranks do it; return its true length. Collective."""
        units, seconds = 1, self._trial(1)
        while seconds < _TRIAL_S:
            units, seconds = units * 2, self._trial(units * 2)
        for _ in range(2):  # the second time from about the right number
            units = max(1, round(units * step_s / seconds))
            seconds = statistics.median(self._trial(units) for _ in range(_TRIALS))
        self._units = units
        return seconds

    def __call__(self, *, done: bool = False) -> tuple[StepTimes, bool]:
        """Make one step; return its times, and whether all ranks said `done` when they came to the all-reduce. Collective."""
        began = time.perf_counter()
        self._compute(self._units)
        self._reduced[0] = float(done)
        dist.all_reduce(self._reduced, group=self._group)
        all_done = int(self._reduced[0].item()) == self._state.topology.world_size
        reduced = time.perf_counter()
        waited = self._optimize()
        return StepTimes(began, time.perf_counter(), waited - reduced), all_done

    def _compute(self, units: int) -> None:
        for _ in range(units):
            torch.mm(*self._factors, out=self._product)
            count = 0
            for number in range(_PYTHON_LOOPS):
                count += number & 1
        self._state.device.synchronize()

    def _optimize(self) -> float:
        """Step the optimizer, and return when all hooks before it were through: this one, added last, is called last."""
        turn = self._turns[self._number % len(self._turns)]
        self._number += 1
        for parameter in turn:
            parameter.grad = self._gradients[parameter]
        through: list[float] = []
        mark = self._optimizer.register_step_pre_hook(lambda *_: through.append(time.perf_counter()))
        self._optimizer.step()
        mark.remove()
        self._state.device.synchronize()
        for parameter in turn:
            parameter.grad = None
        return through[0]

    def _trial(self, units: int) -> float:
        """Seconds of the slowest rank for the compute alone."""
        return timed(partial(self._compute, units), self._state.topology, self._group)


def _in_turns(parameters: Sequence[torch.Tensor], stepped_bytes: int) -> list[list[torch.Tensor]]:
    """Deal the parameters out into as few parts as that takes, of about the same size."""
    sizes = {parameter: local_tensor(parameter).nbytes for parameter in parameters}
    turns: list[list[torch.Tensor]] = [[] for _ in range(max(1, math.ceil(sum(sizes.values()) / stepped_bytes)))]
    for parameter in sorted(parameters, key=lambda one: -sizes[one]):
        min(turns, key=lambda turn: sum(sizes[held] for held in turn)).append(parameter)
    return [turn for turn in turns if turn]


def _gradient(parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return a gradient for a parameter, in memory that all gradients share: an optimizer only reads it."""
    local = local_tensor(parameter)
    gradient = values[: local.numel()].view(local.shape)
    if not isinstance(parameter, DTensor):
        return gradient
    return DTensor.from_local(
        gradient,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
