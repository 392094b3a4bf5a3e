"""Names of tensors have no parts of wrappers in them: what a wrapped model saves loads into a bare one, and the other way round."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ckpt import StateComponent
from ckpt.format.manifest import CheckpointManifest
from ckpt.ranks.topology import Topology
from ckpt.state.state_digest import state_digest
from ckpt.state.statefuls import ModelState, OptimizerState
from ckpt.state.wrappers import Unwrapping, saved_under
from ckpt.storage.stored import read_manifest
from tests.support.ranks import run_ranks
from tests.support.states import coordinator


class Net(nn.Module):
    """With a buffer, tied weights, and parts that are called like a wrapper's attribute."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.wte = nn.Embedding(4, 3)
        self.module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self._orig_mod = nn.Linear(3, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = self.wte.weight
        self.tied_names = {"head.weight": "wte.weight"}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self._orig_mod(self.module(self.wte(tokens))))
        return out


NAMES = list(Net().state_dict())


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def _parts_wrapped(net: Net) -> nn.Module:
    net.module[0] = checkpoint_wrapper(net.module[0])
    net._orig_mod = compiled(net._orig_mod)  # type: ignore[assignment]
    return net


WRAPPINGS: dict[str, Callable[[Net], nn.Module]] = {
    "compiled": compiled,
    "parts": _parts_wrapped,
    "all": lambda net: nn.DataParallel(compiled(checkpoint_wrapper(_parts_wrapped(net)))),
}


class Run:
    """A model that has made a step, as wrapped, and its optimizer."""

    def __init__(self, wrap: Callable[[Net], nn.Module] = lambda net: net, seed: int = 0) -> None:
        self.bare = Net(seed)
        self.module = wrap(self.bare)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.1 + seed)
        for parameter in self.module.parameters():
            parameter.grad = torch.ones_like(parameter) * (1 + seed)
        self.optimizer.step()
        self.model_state, self.optimizer_state = (
            ModelState(self.module),
            OptimizerState(self.optimizer, self.module),
        )

    def digest(self) -> str:
        states = {"model": self.model_state, "optimizer": self.optimizer_state}
        return state_digest(states, Topology.alone())

    def components(self) -> list[StateComponent]:
        return [
            StateComponent("model", self.model_state, "replicated"),
            StateComponent("optimizer", self.optimizer_state, "replicated"),
        ]

    def save(self, root: Path) -> CheckpointManifest:
        path = coordinator(Topology.alone(), root, self.components()).save_checkpoint(checkpoint_id="1")
        assert path is not None
        return read_manifest(Path(path))

    def load(self, root: Path) -> None:
        coordinator(Topology.alone(), root, self.components()).load_checkpoint()


def _tensors(manifest: CheckpointManifest, component: str) -> set[str]:
    return {name.removeprefix(f"{component}/") for name in manifest.arrays if name.startswith(f"{component}/")}


@pytest.mark.parametrize("name", WRAPPINGS)
def test_what_is_saved_wrapped_loads_bare_and_the_other_way_round(tmp_path: Path, name: str) -> None:
    wrapped, bare = Run(WRAPPINGS[name], seed=1), Run(seed=1)
    assert list(wrapped.model_state.state_dict()) == NAMES
    assert wrapped.digest() == bare.digest()
    by_wrapped, by_bare = wrapped.save(tmp_path / "wrapped"), bare.save(tmp_path / "bare")
    for component in ("model", "optimizer"):
        assert _tensors(by_wrapped, component) == _tensors(by_bare, component)
    for root, other in ((tmp_path / "wrapped", Run(seed=2)), (tmp_path / "bare", Run(WRAPPINGS[name], seed=2))):
        assert other.digest() != bare.digest()
        other.load(root)
        assert other.digest() == bare.digest()
        assert other.optimizer.param_groups[0]["lr"] == 1.1


class _AsBefore(ModelState):
    """As it was saved when wrappers had parts in names."""

    def state_dict(self) -> dict[str, Any]:
        return dict(self.module.state_dict())

    @property
    def tied_names(self) -> dict[str, str]:
        return {}


@pytest.mark.parametrize("wrap", [lambda net: net, compiled], ids=["bare", "compiled"])
def test_a_checkpoint_with_parts_of_wrappers_in_its_names_loads(
    tmp_path: Path, wrap: Callable[[Net], nn.Module]
) -> None:
    old = Run(compiled, seed=1)
    wanted = old.digest()
    old.model_state = _AsBefore(old.module)
    old.optimizer_state._names = {p: f"_orig_mod.{name}" for p, name in old.optimizer_state._names.items()}
    assert "model/_orig_mod._orig_mod.bias" in old.save(tmp_path / "root").arrays
    now = Run(wrap, seed=2)
    now.load(tmp_path / "root")
    assert now.digest() == wanted
    assert list(now.model_state.state_dict()) == NAMES, "the load is over"
    assert set(now.optimizer_state.state_dict()["state"]) == {n for n, _ in now.bare.named_parameters()}


def test_a_load_that_does_not_come_leaves_names_as_they_are(tmp_path: Path) -> None:
    old = Run(compiled)
    old.model_state = _AsBefore(old.module)
    manifest = old.save(tmp_path / "root")
    now = Run()
    now.model_state.prepare_from(
        {name: manifest.arrays[f"model/{name}"] for name in _tensors(manifest, "model")}, {}, {}
    )
    assert "_orig_mod.wte.weight" in now.model_state.state_dict()
    now.model_state.forget_prepared()
    assert list(now.model_state.state_dict()) == NAMES


def test_state_by_position_under_names_with_parts_of_wrappers_is_named_anew() -> None:
    old = Run(compiled)
    named = torch.optim.AdamW(old.module.named_parameters(), lr=0.1)
    named.load_state_dict(copy.deepcopy(old.optimizer.state_dict()))
    found = Run().optimizer_state.named_from_positions(named.state_dict())
    assert set(found["state"]) == {name for name, _ in Net().named_parameters()}


def test_names_that_could_be_meant_for_two_are_left_alone() -> None:
    assert saved_under(lambda: ["a"], ["module.a", "_orig_mod.a"]) == {}
    assert saved_under(lambda: ["module.a", "_orig_mod.a"], ["_fsdp_wrapped_module.a"]) == {}
    assert saved_under(lambda: ["a"], ["a", "module.a"]) == {}
    assert saved_under(lambda: ["module.a"], ["module.module.a"]) == {"module.a": "module.module.a"}
    assert saved_under(lambda: ["a"], [".".join(["module"] * 500 + ["a"])]) != {}


def in_ddp(topology: Topology, root: Path) -> list[str]:
    run = Run(nn.parallel.DistributedDataParallel)
    made = coordinator(topology, root, run.components())
    made.save_checkpoint(checkpoint_id="1")
    assert Unwrapping(run.module).inner is run.bare
    return list(run.model_state.state_dict())


def test_a_model_in_ddp_saves_the_names_of_the_bare_one(tmp_path: Path) -> None:
    assert run_ranks(2, in_ddp, tmp_path / "root", process_group=True) == [NAMES, NAMES]
    now, bare = Run(seed=2), Run()
    now.load(tmp_path / "root")
    assert now.digest() == bare.digest()
