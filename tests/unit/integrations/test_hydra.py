"""`ckpt.integrations.hydra`: an application's own config names the library's choices, with the recipes' keys and defaults."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from hydra.utils import instantiate
from omegaconf import OmegaConf

from ckpt import CheckpointCoordinator, Checkpointer, StateComponent
from ckpt.integrations.hydra import choices, register
from recipes.support import CONF

OWN = """\
defaults: [ckpt: zarr, strategy: direct, device: cpu, save: sync, checkpointer: default, coordinator: default, _self_]
coordinator: {output_dir: unset}
checkpointer: {every: 2}
"""
_OF_RECIPES = {"every", "keep_last", "keep_best", "keep_last_of", "on_sigterm", "_target_", "save"}
"""Keys of `save` that are no `SaveSettings`."""


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    store = ConfigStore.instance()
    before = dict(store.repo)
    register()
    yield
    store.repo = before


def app(folder: Path, *overrides: str) -> Any:
    (folder / "conf").mkdir(exist_ok=True)
    (folder / "conf" / "app.yaml").write_text(OWN)
    with initialize_config_dir(str(folder / "conf"), version_base="1.3"):
        return compose("app", list(overrides))


def own_keys(node: Any) -> dict[str, Any]:
    plain = OmegaConf.to_container(OmegaConf.create(node), resolve=False)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items() if key not in ("_convert_", "_partial_")}


def of_recipes(group: str, name: str) -> dict[str, Any]:
    return own_keys(OmegaConf.load(CONF / group / f"{name}.yaml"))


@pytest.mark.parametrize("group", ["ckpt", "strategy", "device"])
def test_a_group_has_the_choices_of_the_recipes_with_their_keys_and_defaults(group: str) -> None:
    files = {path.stem: of_recipes(group, path.stem) for path in (CONF / group).glob("*.yaml")}
    assert {name: own_keys(node) for name, node in choices()[group].items()} == files


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_settings_of_saves_are_those_of_the_recipes(mode: str) -> None:
    keys = own_keys(choices()["save"][mode])
    assert keys.pop("_target_") == "ckpt.saving.save_settings.SaveSettings"
    file = of_recipes("save", "default") | of_recipes("coordinator", "default")["saves"]
    ours = {key: value for key, value in file.items() if key not in _OF_RECIPES and "${" not in str(value)}
    assert ours | {"mode": mode} == {key: value for key, value in keys.items() if key in ours}
    assert keys.keys() == file.keys() - _OF_RECIPES


def test_the_coordinator_has_the_keys_and_defaults_of_the_recipes() -> None:
    """What the recipe refers to, or makes of its own keys, has the library's default."""
    keys, file = own_keys(choices()["coordinator"]["default"]), of_recipes("coordinator", "default")
    assert file.keys() <= keys.keys()
    plain = {key: value for key, value in file.items() if not isinstance(value, dict) and "${" not in str(value)}
    assert plain and plain == {key: keys[key] for key in plain}


@pytest.mark.parametrize("words", [[], ["ckpt=tensorstore", "strategy=two-stage", "save=async", "save.when_busy=skip"]])
def test_an_application_saves_and_restores_with_what_its_config_names(tmp_path: Path, words: list[str]) -> None:
    made = instantiate(app(tmp_path, *words).checkpointer)
    model = torch.nn.Linear(3, 1)
    with made(tmp_path / "run", model=model) as checkpointer:
        assert isinstance(checkpointer, Checkpointer)
        for step in (1, 2):
            checkpointer.step(step)
    saved = model.weight.detach().clone()
    torch.nn.init.zeros_(model.weight)
    with made(tmp_path / "run", model=model) as checkpointer:
        assert checkpointer.restore() == 2
    assert torch.equal(model.weight, saved)


def test_a_coordinator_gets_the_chosen_parts(tmp_path: Path) -> None:
    cfg = app(tmp_path, f"coordinator.output_dir={tmp_path / 'run'}", "save=async", "ckpt=kimi-engine")
    model = StateComponent("model", torch.nn.Linear(2, 2), "replicated")
    with instantiate(cfg.coordinator)([model], None, None) as coordinator:
        assert isinstance(coordinator, CheckpointCoordinator)
        coordinator.save_checkpoint(checkpoint_id="1")
    assert list((tmp_path / "run" / "checkpoint-1").rglob("*.safetensors"))


@pytest.mark.parametrize(
    "word", ["save.overlap=abc", "save.grace_s=soon", "ckpt.direct_io=7up", "checkpointer.every=abc", "ckpt.levl=3"]
)
def test_hydra_refuses_a_value_of_the_wrong_type_and_an_unknown_key(tmp_path: Path, word: str) -> None:
    with pytest.raises(HydraException) as told:
        app(tmp_path, word)
    assert word.split("=")[0].split(".")[1] in str(told.value)


def test_hydra_zen_takes_the_choices(tmp_path: Path) -> None:
    zen = pytest.importorskip("hydra_zen")
    nodes = choices()
    chosen = {"ckpt": "zarr", "strategy": "direct", "device": "cpu", "save": "async", "checkpointer": "default"}
    own = zen.make_config(**{group: nodes[group][name] for group, name in chosen.items()})
    with zen.instantiate(own).checkpointer(tmp_path / "run", model=torch.nn.Linear(2, 2)) as checkpointer:
        checkpointer.step(100)
    assert [saved.step for saved in checkpointer.list()] == [100]
