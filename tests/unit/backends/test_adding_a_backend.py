"""The page docs/adding-a-backend.md: its backend keeps the contract, saves and loads, and is made by its config."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from ckpt import StateComponent
from ckpt.backends import registry
from ckpt.backends.base import Backend
from ckpt.catalog.verify import verify_checkpoint
from ckpt.ranks.topology import Topology
from tests.support.backend_contract import BackendContract
from tests.support.states import Held, coordinator, random_bits, same_bits

PAGE = Path(__file__).parents[3] / "docs" / "adding-a-backend.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module", autouse=True)
def bin_backend() -> Iterator[Any]:
    """The page's first block as the module that its config names."""
    module = ModuleType("bin_backend")
    sys.modules["bin_backend"] = module
    exec(blocks("python")[0], module.__dict__)
    yield module
    del sys.modules["bin_backend"]


class TestThePage(BackendContract):
    def make(self) -> Backend:
        made: Backend = sys.modules["bin_backend"].__dict__["BinBackend"]()
        return made

    def test_its_last_block_inherits_these_tests(self, bin_backend: Any) -> None:
        exec(blocks("python")[2], bin_backend.__dict__)
        assert issubclass(bin_backend.TestBin, BackendContract)
        assert isinstance(bin_backend.TestBin().make(), bin_backend.BinBackend)

    def test_it_is_registered(self, bin_backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(registry, "_STORES", dict(registry._STORES))
        exec(blocks("python")[1], bin_backend.__dict__)
        assert isinstance(registry.backend_of_store("bin"), bin_backend.BinBackend)

    def test_its_config_makes_a_backend_that_saves_and_loads(self, tmp_path: Path) -> None:
        backend = instantiate(OmegaConf.create(blocks("yaml")[0]))
        saved = {"w": random_bits((300, 100), torch.bfloat16, 1), "step": torch.tensor(7)}
        held = Held(saved)
        components = [StateComponent("model", held, "replicated")]
        checkpoints = coordinator(Topology.alone(), tmp_path, components, backend=backend)
        with checkpoints:
            path = checkpoints.save_checkpoint(checkpoint_id=1)
            held.state = {name: torch.zeros_like(value) for name, value in saved.items()}
            checkpoints.load_checkpoint()
        assert held.loaded is not None
        assert all(same_bits(held.loaded[name], value) for name, value in saved.items())
        assert verify_checkpoint(Path(path)) == []
