"""States as programs of torch.distributed.checkpoint have them, saved by it, and compared to the bit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from tests.support.states import ALL_DTYPES, random_bits, same_bits

SHAPES = [(), (0,), (3,), (5, 7), (300, 200)]


@contextmanager
def one_process_is_meant() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def save_by_dcp(state: dict[str, Any], folder: Path) -> None:
    with one_process_is_meant():
        dcp.save(state, checkpoint_id=folder, no_dist=True)


def tensors_of_all_kinds() -> dict[str, torch.Tensor]:
    return {f"{d}{list(s)}".removeprefix("torch."): random_bits(s, d, 3) for d in ALL_DTYPES for s in SHAPES}


def run_of(seed: int) -> dict[str, Any]:
    """A model with an optimizer and a schedule, trained for a step."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * (seed + 1))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, seed + 2)
    model(torch.randn(5, 6)).square().sum().backward()
    optimizer.step()
    scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def dcp_state(run: dict[str, Any], *, flat: bool = False) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer = get_state_dict(run["model"], run["optimizer"], options=options)
    return {"model": model, "optimizer": optimizer, "scheduler": run["scheduler"].state_dict()}


def require_equal(left: dict[str, Any], right: dict[str, Any]) -> None:
    for name, tensor in left["model"].state_dict().items():
        assert same_bits(tensor, right["model"].state_dict()[name]), name
    mine, other = left["optimizer"].state_dict(), right["optimizer"].state_dict()
    assert mine["param_groups"] == other["param_groups"]
    for position, state in mine["state"].items():
        for name, tensor in state.items():
            assert same_bits(tensor, other["state"][position][name]), (position, name)
    assert left["scheduler"].state_dict() == right["scheduler"].state_dict()
