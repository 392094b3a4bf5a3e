"""Whatever a checkpoint holds for the objects of this package, one of our errors comes of it, never one of Python's."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import TensorDataset

from ckpt.errors import CheckpointError, CorruptCheckpointError
from ckpt.memory.device import Device
from ckpt.ranks.topology import Topology
from ckpt.state.sharing import StateComponent
from ckpt.state.statefuls import OptimizerState, RNGState
from recipes.training.callbacks import EarlyStop
from recipes.training.data import SampleLoader
from tests.support.crafts import spoil
from tests.support.states import Held, coordinator


def optimizer() -> OptimizerState:
    module = nn.Linear(2, 2)
    made = torch.optim.AdamW(module.parameters())
    module(torch.arange(2.0)).sum().backward()
    made.step()
    return OptimizerState(made, module)


def generators() -> RNGState:
    return RNGState(Device(type="cpu", collectives="gloo"), seed=1)


def batches() -> SampleLoader:
    return SampleLoader(TensorDataset(torch.arange(4)), 2, (0, 1), 1, torch.device("cpu"))


KINDS: dict[str, Callable[[], Any]] = {"optimizer": optimizer, "rng": generators, "dataset": batches, "stop": EarlyStop}


def saved_and_loaded(kind: str, state: dict[str, Any]) -> None:
    pattern = "per_rank" if kind in ("rng", "dataset") else "replicated"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        run = coordinator(Topology.alone(), root, [StateComponent(kind, Held(state), pattern)])
        run.save_checkpoint(checkpoint_id="1")
        coordinator(Topology.alone(), root, [StateComponent(kind, KINDS[kind](), pattern)]).load_checkpoint(root / "checkpoint-1")


anything = st.recursive(
    st.sampled_from([None, True, -1, 5, 1 << 63, 10**30, 0.5, float("nan"), "", "x", b"x", torch.arange(3), "weight"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["weight", "x", "lr", "cpu", 1]), inner, max_size=2),
    max_leaves=4,
)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_whatever_was_saved_only_our_errors_come_of_it(kind: str, data: st.DataObject) -> None:
    state = copy.deepcopy(KINDS[kind]().state_dict())
    spoil(state, anything, data)
    try:
        saved_and_loaded(kind, state)
    except CheckpointError as error:
        assert type(error) is not CheckpointError, error


@pytest.mark.parametrize(
    "groups",
    [5, "x", [1], [{"lr": 1, "params": ["weight"]}], {1: {"lr": 1}}, {"weight": None, "bias": {"lr": 1}}],
    ids=str,
)
def test_options_that_are_not_by_the_names_of_parameters_are_damage(groups: Any) -> None:
    state = optimizer().state_dict() | {"param_groups": groups}
    with pytest.raises(CorruptCheckpointError, match="the optimizer cannot load the saved state"):
        saved_and_loaded("optimizer", state)
