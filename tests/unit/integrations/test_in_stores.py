"""Trainer and Accelerate with checkpoints in an object store. The oracle is the same program with a folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import ProjectConfiguration

from ckpt.catalog.catalog import catalog_at
from ckpt.errors import CheckpointExistsError, CheckpointNotFoundError, ConfigurationError
from ckpt.format.places import place_of
from tests.support.covering import sampled
from tests.support.object_server import ObjectServer
from tests.support.trainers import STEPS, Seen, Stopped, state_of, stop, trainer
from tests.support.values import same_values
from tests.unit.integrations.test_huggingface_accelerate import Program
from tests.unit.integrations.test_huggingface_trainer import BEST, Graded

ROOT = "s3://bucket/run"


@pytest.fixture(autouse=True)
def server() -> Iterator[ObjectServer]:
    with ObjectServer() as server, server.used():
        yield server
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def saved_in(root: str) -> list[str]:
    return [one.id.lstrip("0") for one in catalog_at(place_of(root)).committed()]


@sampled("mode", ["sync", "async"])
def test_a_trainer_goes_on_to_the_bit_from_a_store(tmp_path: Path, mode: str) -> None:
    options = {"folder": ROOT, "mode": mode, "format": "tensorstore"}
    straight, after = Seen(), Seen()
    whole = trainer(tmp_path / "whole", straight)
    whole.train()
    with pytest.raises(CheckpointNotFoundError, match=f"there is no checkpoint in {ROOT}"):
        trainer(tmp_path / "none", ckpt=options).train(resume_from_checkpoint=True)
    with pytest.raises(Stopped):
        trainer(tmp_path / "first", Seen(9, stop), ckpt=options).train()
    assert saved_in(ROOT) == ["4", "8"]
    with pytest.raises(CheckpointExistsError, match="ckpt={"):
        trainer(tmp_path / "anew", ckpt=options).train()
    resumed = trainer(tmp_path / "second", after, ckpt=options)
    resumed.train(resume_from_checkpoint="latest")
    assert after.losses == {step: straight.losses[step] for step in range(9, STEPS + 1)}
    assert same_values(state_of(resumed), state_of(whole))
    assert not [path for path in tmp_path.rglob("*") if "checkpoint-" in path.name and "whole" not in str(path)]
    again = trainer(tmp_path / "third", older := Seen(), ckpt=options | {"overwrite": True})
    again.train(resume_from_checkpoint=f"{ROOT}/checkpoint-00000004")
    assert older.losses == {step: straight.losses[step] for step in range(5, STEPS + 1)}


def test_the_best_checkpoint_in_a_store_is_loaded_at_the_end(tmp_path: Path) -> None:
    arguments = BEST | {"load_best_model_at_end": True, "save_total_limit": 1}
    in_folder = trainer(tmp_path / "folder", kind=Graded, **arguments)
    in_folder.train()
    one = trainer(tmp_path / "store", kind=Graded, ckpt={"folder": ROOT}, **arguments)
    one.train()
    assert saved_in(ROOT) == ["8", "20"]
    assert one.state.best_model_checkpoint == f"{ROOT}/checkpoint-00000008"
    assert same_values(one.model.state_dict(), in_folder.model.state_dict())


def test_an_output_dir_of_trainer_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=r"output_dir .*is a folder.*ckpt=\{'folder'"):
        trainer("s3://bucket/out").train()
    with pytest.raises(ConfigurationError, match=r"ckpt\['folder'\] is s4://x"):
        trainer(tmp_path, ckpt={"folder": "s4://x/y"})
    assert not (tmp_path / "s3:").exists()


def test_accelerate_saves_and_loads_addresses_and_numbers_them() -> None:
    project = ProjectConfiguration("s3://bucket/project", automatic_checkpoint_naming=True, total_limit=2)
    program = Program(project_config=project)
    with pytest.raises(CheckpointNotFoundError, match="s3://bucket/project/checkpoints"):
        program.accelerator.load_state()
    program.train(0, 4)
    assert [str(program.accelerator.save_state())[-12:] for _ in range(3)] == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    program.accelerator.save_state("s3://bucket/ignored")
    straight = program.train(4, 10)
    resumed = Program(seed=5, project_config=project)
    assert str(resumed.accelerator.find_latest()) == "s3://bucket/project/checkpoints/checkpoint_3"
    resumed.accelerator.load_state()
    assert resumed.train(4, 10) == straight
    assert resumed.accelerator.project_configuration.iteration == 4
    with pytest.raises(CheckpointNotFoundError):
        resumed.accelerator.load_state("s3://bucket/project/checkpoints/checkpoint_1")

    plain = Program()
    plain.train(0, 2)
    plain.accelerator.save_state("s3://bucket/plain")
    other = Program(seed=3)
    other.accelerator.load_state("s3://bucket/plain")
    assert torch.equal(other.model[0].weight, plain.model[0].weight)
    with pytest.raises(CheckpointExistsError):
        plain.accelerator.save_state("s3://bucket/plain")
