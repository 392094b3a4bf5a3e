"""Trainers that describe themselves, in the newer and in the older form."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt import CheckpointCoordinator, SharingPattern, StateComponent
from ckpt.backends.zarr import ZarrBackend
from ckpt.errors import ConfigurationError
from ckpt.loading.direct import DirectLoad
from ckpt.ranks.topology import Topology
from ckpt.state.provider import Provider, components_of, groups_of
from ckpt.state.statefuls import OptimizerState, RNGState
from tests.support.ranks import run_threads
from tests.support.states import Held, cpu, same_bits

ALONE = Topology.alone()


class Trainer:
    """As in the third reference's examples: bare objects, the pattern beside each."""

    def __init__(self, seed: int, topology: Topology = ALONE) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.model = torch.nn.Linear(5, 3)
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, generator=generator)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1 * seed)
        self.lr_scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 10)
        self.data = Held({"left": [seed, topology.rank // 2]})
        self.topology = topology

    def train(self) -> None:
        self.model(torch.ones(1, 5)).square().sum().backward()
        self.optimizer.step()
        self.lr_scheduler.step()

    def get_state_components(self) -> list[StateComponent]:
        return [
            StateComponent(
                key="model",
                stateful=self.model,
                sharing_pattern=SharingPattern.REPLICATED,
                validate_replication=True,
            ),
            StateComponent(key="optimizer", stateful=self.optimizer, sharing_pattern=SharingPattern.REPLICATED),
            StateComponent(key="scheduler", stateful=self.lr_scheduler, sharing_pattern=SharingPattern.REPLICATED),
            StateComponent(
                key="dataset",
                stateful=self.data,
                sharing_pattern=SharingPattern.PER_GROUP,
                process_group_name="dp_group",
            ),
        ]

    def get_process_groups(self) -> dict[str, list[int]]:
        first = self.topology.rank // 2 * 2
        return {"dp_group": [first, first + 1]}


class OldTrainer:
    """The same without a word about ranks."""

    def __init__(self, **statefuls: Any) -> None:
        self.statefuls = statefuls

    def get_statefuls_for_save(self) -> Mapping[str, Any]:
        return self.statefuls

    def get_statefuls_for_load(self) -> Mapping[str, Any]:
        return self.statefuls


def coordinator_for(provider: Provider, root: Path, topology: Topology = ALONE, **options: Any) -> CheckpointCoordinator:  # fmt: skip
    return CheckpointCoordinator.for_provider(
        provider, topology, root, backend=ZarrBackend(), strategy=DirectLoad(), device=cpu(), **options
    )


def _save_and_load(topology: Topology, root: Path) -> None:
    trained, fresh = Trainer(1, topology), Trainer(2, topology)
    trained.train()
    path = coordinator_for(trained, root, topology).save_checkpoint(checkpoint_id="1", validate=True)
    coordinator_for(fresh, root, topology).load_checkpoint(path)
    assert same_bits(fresh.model.weight.detach(), trained.model.weight.detach())
    mine, theirs = (t.optimizer.state[t.model.weight]["exp_avg"] for t in (fresh, trained))
    assert same_bits(mine, theirs)
    assert fresh.lr_scheduler.state_dict() == trained.lr_scheduler.state_dict()
    assert fresh.data.loaded == {"left": [1, topology.rank // 2]}


def test_a_trainer_of_the_newer_form_is_saved_and_loaded_by_its_own_account(tmp_path: Path) -> None:
    trainer = Trainer(1)
    assert [component.pattern.value for component in components_of(trainer)] == ["replicated"] * 3 + ["per_group"]
    assert isinstance(components_of(trainer)[1].stateful, OptimizerState)
    assert groups_of(trainer) == {"dp_group": [0, 1]}
    run_threads(4, lambda topology: _save_and_load(topology, tmp_path))


def parts() -> dict[str, Any]:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    own = Held({"n": 3})
    own.sharing_pattern = SharingPattern.GLOBAL  # type: ignore[attr-defined]
    return {"model": model, "optimizer": optimizer, "rng": RNGState(cpu()), "generators": RNGState(cpu()), "data": own}


@pytest.mark.parametrize("form", [dict, OldTrainer])
def test_the_older_form_takes_its_patterns_from_the_objects_or_the_caller(tmp_path: Path, form: Any) -> None:
    saved, fresh = parts(), parts()
    components = components_of(form(**saved), legacy_pattern="global")
    assert {component.key: component.pattern.value for component in components} == {
        "model": "global",
        "optimizer": "global",
        "rng": "per_rank",
        "generators": "per_rank",
        "data": "global",
    }
    assert components_of(form(**saved))[0].pattern is SharingPattern.REPLICATED
    assert groups_of(form(**saved)) == {}
    coordinator_for(form(**saved), tmp_path).save_checkpoint(checkpoint_id="1")
    coordinator_for(form(**fresh), tmp_path).load_checkpoint()
    assert same_bits(fresh["model"].weight.detach(), saved["model"].weight.detach())
    buffers = (p["optimizer"].state[p["model"].weight]["momentum_buffer"] for p in (fresh, saved))
    assert same_bits(*buffers)
    assert fresh["data"].loaded == {"n": 3}


class Other(OldTrainer):
    def get_statefuls_for_load(self) -> Mapping[str, Any]:
        return {**self.statefuls, "model": Held({}), "more": Held({})}


class Neither:
    pass


@pytest.mark.parametrize(
    ("provider", "says"),
    [
        (Other(model=Held({}), x=Held({})), "Other gives other objects to load than to save under model, more"),
        (
            Neither(),
            "Neither does not say what it saves: it has neither get_state_components nor get_statefuls_for_save",
        ),
        ({"x": 3}, "component x: int has no state_dict/load_state_dict pair"),
        ({"x": Held({})}, "sharing_pattern=everywhere: expected one of"),
    ],
)
def test_a_trainer_that_does_not_say_what_it_saves_is_refused(provider: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        components_of(provider, legacy_pattern="everywhere" if "everywhere" in says else "global")


def test_an_optimizer_whose_parameters_no_component_holds_still_has_no_names(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match="without a name"):
        coordinator_for({"model": torch.nn.Linear(2, 2), "optimizer": optimizer}, tmp_path)
