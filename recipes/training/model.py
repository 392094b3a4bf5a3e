"""What the recipes ask of a model: the Protocol `Model`, and how a batch becomes a loss. Every `torch.nn.Module` can be trained."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import nn

from ckpt.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


class Model(Protocol):
    """The members of a module that the recipes use. Each is optional, and has its default here.

    Attributes:
        loss: (output, target) -> the mean loss over the rows of a batch (inputs, target). Default: that of `loss=`.
        train_step: batch -> the mean loss over its rows, forward pass included. Default: `loss(self(inputs), target)`; of a batch that is a
            mapping `self(**batch).loss`, as the models of transformers have it.
        blocks: modules in the order of the forward pass; FSDP2 gathers one at a time. Default: none, so that it gathers the whole model.
        tensor_plan: ranks along `tp` -> {name of a module, `*` for one part of it: a `ParallelStyle`}. Default: that of `parallel.plan`;
            layouts with `tp` refuse a model without one.
        keep_stage: (number, count): delete all but one pipeline stage; what stays keeps its name, and `forward` then takes and returns
            hidden states. Default: that of `parallel.stages`; layouts with `pp` refuse a model without one.
    """

    loss: Callable[[Any, Any], torch.Tensor] | None = None
    train_step: Callable[[Any], torch.Tensor] | None = None
    blocks: Sequence[nn.Module] = ()
    tensor_plan: Callable[[int], Mapping[str, ParallelStyle]] | None = None
    keep_stage: Callable[[int, int], None] | None = None


def member(model: object, name: str) -> Any:
    """Return a member of `Model` that a model, or its class, has, or else the default."""
    own = getattr(model, name, None)
    return getattr(Model, name) if own is None else own


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside the block the generators of the CPU start from a seed; afterwards they are as before."""
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed % (1 << 32))
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


class Step(nn.Module):
    """A model and its loss as one module: forward takes a batch, and returns the mean loss over its rows.

    Args:
        loss: of the config, (output, target) -> mean loss; None: the model's own.

    Raises:
        ConfigurationError: no loss follows from the two, or two do.
    """

    def __init__(self, model: nn.Module, loss: Callable[[Any, Any], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.model = model
        self.loss = loss or member(model, "loss")
        self.has_own = member(model, "train_step") is not None
        kind = type(model).__name__
        if loss is not None and self.has_own:
            raise ConfigurationError(f"loss: {kind}.train_step computes the loss already: leave loss= out, or train_step")
        if self.loss is None and not self.has_own and not _returns_loss(model):
            raise ConfigurationError(
                f"model: {kind} has neither loss(output, target) nor train_step(batch): give loss=cross_entropy, mse or bce, or "
                "loss._target_=<function or class>"
            )

    def forward(self, batch: Any) -> torch.Tensor:
        if self.has_own:
            loss = self.model.train_step(batch)  # type: ignore[operator]
        elif self.loss is None:
            loss = getattr(self.model(**batch), "loss", None) if isinstance(batch, Mapping) else None
        else:
            inputs, target = pair_of(batch)
            loss = self.loss(self.model(**inputs) if isinstance(inputs, Mapping) else self.model(inputs), target)
        if not isinstance(loss, torch.Tensor) or loss.dim():
            raise ConfigurationError(
                f"model: {type(self.model).__name__} made {_described(loss)} of a batch, {_described(batch)}; expected a loss, a tensor of "
                "no dimensions: give a loss of (output, target) and batches (inputs, target), or the model a method train_step(batch)"
            )
        return loss


def pair_of(batch: Any) -> tuple[Any, Any]:
    """Return inputs and target of a batch.

    Raises:
        ConfigurationError: it is no pair.
    """
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ConfigurationError(
            f"data: a batch is {_described(batch)}; expected (inputs, target), or a model with a method train_step(batch)"
        )
    return batch[0], batch[1]


def _returns_loss(model: nn.Module) -> bool:
    """Whether a model computes its loss where it is given labels, as those of transformers do."""
    takes = inspect.signature(model.forward).parameters.values()
    return any(parameter.name == "labels" or parameter.kind is parameter.VAR_KEYWORD for parameter in takes)


def _described(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a mapping with {', '.join(map(str, value)) or 'nothing'}"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__} of {len(value)}" if isinstance(value, (tuple, list)) else f"a {type(value).__name__}"
