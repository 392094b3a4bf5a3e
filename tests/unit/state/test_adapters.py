"""What a frozen base and an adapter of PEFT may be, and are refused for, on one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("peft")

import peft

from ckpt import Checkpointer, load_adapter
from ckpt.errors import CheckpointError, CheckpointNotFoundError, ConfigurationError
from ckpt.ranks.topology import Topology
from ckpt.state.adapters import CONFIG, DIGEST, AdapterState, BaseState, FrozenBase, adapter_states, with_adapters
from ckpt.state.sharing import StateComponent
from ckpt.state.state_digest import state_digest

pytestmark = pytest.mark.filterwarnings("ignore")


def adapted(config: Any = None, *layers: nn.Module) -> Any:
    torch.manual_seed(0)
    below = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3), *layers)
    return peft.get_peft_model(below, config or peft.LoraConfig(r=2, target_modules=["0"]))


def checkpointer(folder: Path, model: Any, **options: Any) -> Checkpointer:
    return Checkpointer(folder, model=model, on_sigterm=False, save_at_end=False, **{"peft_base": "frozen"} | options)


KEPT = {
    "dora": peft.LoraConfig(r=2, target_modules=["0", "2"], use_dora=True),
    "layer": peft.LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"]),
    "bias": peft.LoraConfig(r=2, target_modules=["0"], bias="all"),
    "ia3": peft.IA3Config(target_modules=["0", "2"], feedforward_modules=["2"]),
    "loha": peft.LoHaConfig(r=2, target_modules=["0"]),
    "vera": peft.VeraConfig(r=2, target_modules=["0"]),
}


@pytest.mark.parametrize("kind", KEPT)
def test_all_that_is_trained_is_saved_and_restored(tmp_path: Path, kind: str) -> None:
    trained, fresh = adapted(KEPT[kind]), adapted(KEPT[kind])
    with torch.no_grad():
        for number, value in enumerate(trained.parameters()):
            if value.requires_grad:
                value.add_(torch.arange(float(value.numel())).view(value.shape) + number)
    with checkpointer(tmp_path, trained) as checkpoints:
        checkpoints.save(1)
    with checkpointer(tmp_path, fresh) as checkpoints:
        assert checkpoints.restore() == 1
    assert fresh.state_dict().keys() == trained.state_dict().keys()
    assert all(torch.equal(value, trained.state_dict()[name]) for name, value in fresh.state_dict().items())


def test_an_adapter_whose_file_lacks_something_is_refused(tmp_path: Path) -> None:
    model = adapted(peft.AdaLoraConfig(init_r=2, target_r=1, total_step=9, target_modules=["0"]))
    with pytest.raises(ConfigurationError, match=r"adapter default \(ADALORA\): its file does not hold .*; save the model whole"):
        checkpointer(tmp_path, model)


def test_a_base_that_is_trained_or_changes_is_not_frozen(tmp_path: Path) -> None:
    model = adapted()
    with checkpointer(tmp_path, model) as checkpoints:
        model.train()(torch.ones(5, 4).cumsum(0))
        with pytest.raises(ConfigurationError, match=r"training changes 1.running_mean of the base; save it with peft_base=saved"):
            checkpoints.save(1)
    model.base_model.model[2].weight.requires_grad_()
    with pytest.raises(ConfigurationError, match=r"frozen, but 2.weight of the base is trained; .* peft_base=saved"):
        checkpointer(tmp_path, model)
    checkpointer(tmp_path, model, peft_base="saved").close()
    with pytest.raises(ConfigurationError, match="peft_base=ice: expected one of frozen, saved"):
        checkpointer(tmp_path, model, peft_base="ice")


def test_the_digest_of_a_base_does_not_depend_on_its_adapters() -> None:
    models = adapted(), adapted(KEPT["layer"]), adapted(KEPT["dora"]), adapted(KEPT["ia3"])
    digests = {state_digest({"base": BaseState(model, adapter_states(model))}, Topology.alone()) for model in models}
    assert digests == {state_digest({"base": models[0].unload()}, Topology.alone())}


def test_two_models_have_components_of_their_own_and_others_stay_as_they_are() -> None:
    model, topology = adapted(), Topology.alone()

    def keys(key: str, thing: Any, base: str | None = "frozen") -> list[str]:
        return [part.key for part in with_adapters(StateComponent(key, thing, "auto"), base, topology)]

    assert keys("model", model) == ["adapter-default", "base"]
    assert keys("reference", model) == ["reference-adapter-default", "reference-base"]
    assert keys("model", model, None) == keys("model", nn.Linear(2, 2)) == ["model"]


def test_a_folder_of_another_base_or_of_no_adapter_is_refused(tmp_path: Path) -> None:
    model = adapted()
    model.peft_config["default"].base_model_name_or_path = "hub/one"
    model.save_pretrained(str(tmp_path))
    model.peft_config["default"].base_model_name_or_path = "/disk/one"
    load_adapter(model, tmp_path)
    model.peft_config["default"].base_model_name_or_path = "hub/two"
    with pytest.raises(ConfigurationError, match="the adapter was trained on hub/one, and this run has hub/two"):
        load_adapter(model, tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": ["hub/two"]}))
    with pytest.raises(ConfigurationError, match=r"the adapter was trained on \['hub/two'\], and this run has hub/two"):
        load_adapter(model, tmp_path)
    with pytest.raises(ConfigurationError, match="adapter=third: the model has no such adapter; it has default"):
        load_adapter(model, tmp_path, "third")
    with pytest.raises(CheckpointNotFoundError, match=r"holds no adapter: it has no adapter_config.json"):
        load_adapter(model, tmp_path / "nothing")


CRAFTED: dict[str, dict[str, Any]] = {
    "number": {CONFIG: 5},
    "half": {CONFIG: "{"},
    "list": {CONFIG: "[1]"},
    "deep": {CONFIG: "[" * 99_999},
    "digest": {DIGEST: 5},
    "digest-and-source": {DIGEST: [], "source": {}},
}


@pytest.mark.parametrize("craft", CRAFTED)
def test_what_no_run_of_ours_has_written_beside_an_adapter_is_refused(
    tmp_path: Path, craft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    crafted = CRAFTED[craft]
    with checkpointer(tmp_path, adapted()) as checkpoints, monkeypatch.context() as patch:
        part = AdapterState if CONFIG in crafted else FrozenBase
        written = part.state_dict
        patch.setattr(part, "state_dict", lambda self: written(self) | crafted)
        checkpoints.save(1)
    model = adapted()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with checkpointer(tmp_path, model) as checkpoints, pytest.raises(CheckpointError, match="it is n"):
        checkpoints.restore(1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_only_what_the_optimizer_trains_is_said_not_to_change(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = adapted()
    model.add_adapter("other", KEPT["dora"])
    optimizer = torch.optim.SGD([value for value in model.parameters() if value.requires_grad], 0.1, momentum=0.5)
    with checkpointer(tmp_path, model, optimizer=optimizer, peft_base="saved") as checkpoints:
        for step in (1, 2):
            model(torch.ones(2, 4).cumsum(0)).square().sum().backward()
            optimizer.step()
            checkpoints.save(step)
        assert "bit for bit" not in caplog.text
        optimizer.zero_grad()
        checkpoints.save(3)
        assert "the same bits as checkpoint-00000002" in caplog.text


def test_a_prompt_is_computed_for_its_file(tmp_path: Path) -> None:
    from tests.support.peft_runs import base

    model = peft.get_peft_model(base(), peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    with pytest.raises(ConfigurationError, match=r"adapter default \(PROMPT_TUNING\): .* in its file is computed; save the model whole"):
        checkpointer(tmp_path, model)
