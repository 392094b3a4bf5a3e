"""Modules whose own code takes part in a load: hooks, `_load_from_state_dict`, `load_state_dict`, extra state."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckpt
from ckpt import Checkpointer
from ckpt.errors import CheckpointError
from tests.fidelity.same import same
from tests.support.covering import sampled


class Rotary(torch.nn.Module):
    """Derives a table from a parameter, after each load."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((3,), scale))
        self.calls: list[Any] = []
        self.derive()
        self.register_load_state_dict_post_hook(lambda module, keys: module.derive(keys))

    def derive(self, keys: Any = None) -> None:
        self.table = self.scale.detach() * 10
        if keys is not None:
            self.calls.append((list(keys.missing_keys), list(keys.unexpected_keys)))


class Renamed(torch.nn.Module):
    """Reads files in which the weight was `old`."""

    def __init__(self, begin: float = 0.0, *, saves_old: bool = False) -> None:
        super().__init__()
        self.new = torch.nn.Parameter(torch.arange(4.0) + begin)
        self.register_load_state_dict_pre_hook(self._rename)
        if saves_old:
            self.register_state_dict_post_hook(
                lambda module, state, prefix, _: state.update({f"{prefix}old": state.pop(f"{prefix}new")})
            )

    @staticmethod
    def _rename(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if f"{prefix}old" in state:
            state[f"{prefix}new"] = state.pop(f"{prefix}old")


class Doubling(torch.nn.Module):
    """Loads by a `_load_from_state_dict` of its own: it keeps twice what is saved."""

    def __init__(self, begin: float = 0.0) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.arange(3.0) + begin)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}half"] = self.w.detach() / 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        with torch.no_grad():
            self.w.copy_(state_dict[f"{prefix}half"] * 2)


class Counting(torch.nn.Linear):
    """Overrides `load_state_dict`."""

    loads = 0

    def __init__(self, begin: float = 0.0) -> None:
        super().__init__(2, 2)
        with torch.no_grad():
            self.weight.fill_(begin)

    def load_state_dict(self, *args: Any, **named: Any) -> Any:
        self.loads += 1
        return super().load_state_dict(*args, **named)


class Extra(torch.nn.Module):
    """Keeps tensors and plain values in its extra state."""

    def __init__(self, begin: float = 0.0) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(2) + begin)
        self.history: Any = {"amax": torch.arange(3.0) + begin, "steps": int(begin)}

    def get_extra_state(self) -> Any:
        return self.history

    def set_extra_state(self, state: Any) -> None:
        self.history = state


MODULES: dict[str, Callable[[float], torch.nn.Module]] = {
    "post hook": Rotary,
    "pre hook": Renamed,
    "_load_from_state_dict": Doubling,
    "load_state_dict": Counting,
    "extra state": Extra,
}


def seen(module: torch.nn.Module) -> Any:
    others = {name: vars(module).get(name) for name in ("table", "calls", "loads", "history")}
    return dict(module.state_dict()), others


@sampled("inside", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_given_what_torch_would_give_it(name: str, inside: bool, tmp_path: Path) -> None:
    def made(begin: float) -> tuple[torch.nn.Module, torch.nn.Module]:
        module = MODULES[name](begin)
        return module, torch.nn.Sequential(torch.nn.Linear(2, 2), module) if inside else module

    torch.manual_seed(0)
    _, saved = made(3.0)
    (own, whole), (oracle, whole_oracle) = made(0.0), made(0.0)
    file = io.BytesIO()
    torch.save(saved.state_dict(), file)
    file.seek(0)
    whole_oracle.load_state_dict(torch.load(file, weights_only=False))
    with Checkpointer(tmp_path, model=saved, save_rng=False) as saving:
        saving.save(1)
    with Checkpointer(tmp_path, model=whole, save_rng=False) as loading:
        loading.restore()
    assert same(seen(own), seen(oracle))
    assert same(dict(whole.state_dict()), dict(whole_oracle.state_dict()))


@pytest.mark.parametrize("strict", [True, False])
def test_a_pre_hook_that_renames_old_entries_gets_them(strict: bool, tmp_path: Path) -> None:
    old = Renamed(5, saves_old=True)
    with Checkpointer(tmp_path, model=torch.nn.Sequential(old), save_rng=False) as saving:
        saving.save(1)
    fresh = Renamed()
    with Checkpointer(tmp_path, model=torch.nn.Sequential(fresh), save_rng=False) as loading:
        loading.restore(strict=strict)
    assert same(fresh.new, old.new)


def test_a_file_whose_entries_no_hook_renames_is_refused_by_name_and_changes_nothing(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, model=Renamed(5, saves_old=True), save_rng=False) as saving:
        saving.save(1)
    module = torch.nn.Module()
    module.new = torch.nn.Parameter(torch.arange(4.0))
    with Checkpointer(tmp_path, model=module, save_rng=False) as loading, pytest.raises(CheckpointError, match="old"):
        loading.restore()
    assert same(module.new.detach(), torch.arange(4.0))


def test_a_quantized_weight_beside_a_hook_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    from ckpt.state import tensor_classes

    monkeypatch.setattr(tensor_classes, "_allowed", {TwoTensor})

    def made(begin: float) -> torch.nn.Module:
        module = Rotary(begin)
        module.two = torch.nn.Parameter(TwoTensor(torch.arange(3.0) + begin, torch.arange(3.0) * 10 + begin))
        return module

    saved, fresh = made(2.0), made(0.0)
    ckpt.save(saved.state_dict(), tmp_path / "given")
    with Checkpointer(tmp_path / "run", model=saved, save_rng=False) as saving:
        saving.save(1)
    with Checkpointer(tmp_path / "run", model=fresh, save_rng=False) as loading:
        loading.restore()
    assert same(dict(fresh.state_dict()), dict(saved.state_dict()))
    assert same(fresh.table, saved.table)
    again = made(0.0)
    again.load_state_dict(ckpt.load(tmp_path / "given"))
    assert same(dict(again.state_dict()), dict(saved.state_dict()))
