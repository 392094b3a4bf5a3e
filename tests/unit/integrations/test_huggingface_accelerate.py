"""Accelerate with checkpoints of this package, in one process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import ckpt
from ckpt.errors import CheckpointExistsError, CheckpointNotFoundError, ConfigurationError, CorruptCheckpointError
from ckpt.integrations.huggingface_accelerate import CkptAccelerator
from tests.support.states import Held


@pytest.fixture(autouse=True)
def _a_process_of_its_own() -> Iterator[None]:
    """Accelerate keeps its state in classes."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(100.0)


class Program:
    """Two models, one of them trained with a schedule over shuffled batches, and an object of its own."""

    def __init__(self, kind: type[Accelerator] = CkptAccelerator, *, seed: int = 0, **options: Any) -> None:
        torch.manual_seed(seed)
        loading = DataLoaderConfiguration(use_seedable_sampler=True)
        self.accelerator = kind(cpu=True, gradient_accumulation_steps=2, dataloader_config=loading, **options)
        self.held = Held({"best": seed})
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        loader = DataLoader(
            TensorDataset(torch.arange(80.0).reshape(20, 4)), batch_size=2, shuffle=True, generator=torch.Generator()
        )
        self.accelerator.prepare(DataLoader(Endless(), batch_size=2))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        prepared = self.accelerator.prepare(model, optimizer, loader, scheduler, nn.Linear(2, 2))
        self.model, self.optimizer, self.loader, self.scheduler, self.other = prepared
        self.accelerator.register_for_checkpointing(self.held)

    def train(self, begin: int, end: int) -> list[float]:
        """Losses of batches of the second epoch."""
        self.loader.set_epoch(1)
        losses = []
        for (batch,) in self.accelerator.skip_first_batches(self.loader, begin):
            with self.accelerator.accumulate(self.model):
                loss = self.model(batch).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
            if begin + len(losses) == end:
                break
        return losses


def test_a_program_goes_on_to_the_bit_within_an_epoch(tmp_path: Path) -> None:
    program = Program(format="tensorstore", load="two-stage")
    program.train(0, 4)
    program.accelerator.save_state(str(tmp_path / "saved"))
    straight = program.train(4, 10)
    program.accelerator.save_state(str(tmp_path / "later"))
    program.accelerator.load_state(str(tmp_path / "saved"))
    assert program.train(4, 10) == straight
    resumed = Program(seed=7, format="tensorstore", load="two-stage")
    resumed.accelerator.load_state(str(tmp_path / "saved"))
    assert resumed.accelerator.step == 4
    assert resumed.train(4, 10) == straight
    assert resumed.held.loaded == {"best": 0}
    assert torch.equal(resumed.other.weight, program.other.weight)
    resumed.accelerator.load_state(str(tmp_path / "later"))
    assert torch.equal(resumed.model[0].weight, program.model[0].weight)
    assert resumed.accelerator.free_memory() == []
    assert set(ckpt.load(resumed.accelerator.save_state(str(tmp_path / "none")))) == {"object", "accelerator", "rng"}
    saved = ckpt.load(tmp_path / "saved")
    assert set(saved) == {
        "model",
        "model_1",
        "optimizer",
        "scheduler",
        "dataloader",
        "dataloader_1",
        "object",
        "accelerator",
        "rng",
    }
    assert (saved["dataloader"], saved["dataloader_1"]) == ({"epoch": 0}, {"epoch": 1, "seed": 0})
    endings = {path.suffix for path in (tmp_path / "saved").rglob("*") if path.is_file()}
    assert not endings & {".bin", ".pkl", ".safetensors", ".pt"}, "nothing of Accelerate's own"


def test_checkpoints_are_numbered_and_the_newest_ones_stay(tmp_path: Path) -> None:
    project = {"automatic_checkpoint_naming": True, "total_limit": 2}
    program = Program(project_config=ProjectConfiguration(str(tmp_path), **project))
    assert program.accelerator.find_latest() is None
    with pytest.raises(CheckpointNotFoundError, match=r"no checkpoint in .* yet: .* only if find_latest\(\) is not None$"):
        program.accelerator.load_state()
    for _ in range(3):
        path = program.accelerator.save_state()
    root = tmp_path / "checkpoints"
    assert sorted(one.name for one in root.iterdir()) == ["checkpoint_1", "checkpoint_2"]
    assert program.accelerator.find_latest() == path == root / "checkpoint_2"
    (root / "checkpoint_9").mkdir()  # as Accelerate leaves it when it is killed
    program = Program(project_config=ProjectConfiguration(str(tmp_path), **project))
    program.accelerator.load_state()
    assert program.accelerator.save_state() == root / "checkpoint_3"


def test_a_numbered_save_is_newer_than_all_there_and_stays(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"

    def program(limit: int) -> CkptAccelerator:
        project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=limit)
        accelerator = CkptAccelerator(cpu=True, project_config=project)
        accelerator.register_for_checkpointing(Held({}))
        return accelerator

    one = program(2)
    for _ in range(3):
        one.save_state()
    another = program(2)
    another.load_state(str(root / "checkpoint_1"))
    assert another.save_iteration == 2, "the folder of its own, before it has looked for newer ones"
    assert another.save_state() == root / "checkpoint_3"
    assert program(2).save_state() == root / "checkpoint_4", "of a process that has loaded nothing"
    assert sorted(path.name for path in root.iterdir()) == ["checkpoint_3", "checkpoint_4"]
    assert program(0).save_state() == root / "checkpoint_5"
    assert [path.name for path in root.iterdir()] == ["checkpoint_5"], "one stays, as in Accelerate"


def _project(root: Path) -> ProjectConfiguration:
    return ProjectConfiguration(str(root), automatic_checkpoint_naming=True, total_limit=1)


def test_a_run_goes_on_in_the_folder_of_a_run_with_accelerate_and_leaves_its_checkpoints(tmp_path: Path) -> None:
    """Accelerate itself refuses a number that is taken; and its `total_limit` would delete whatever is there."""
    root = tmp_path / "checkpoints"
    own = Accelerator(cpu=True, project_config=ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True))
    own.register_for_checkpointing(held := Held({"a": 0}))
    for number in range(2):
        held.state = {"a": number}
        own.save_state()
    (root / "checkpoint_5").mkdir()
    (root / "checkpoint_5" / "model.safetensors").write_bytes(b"killed")
    (root / "checkpoint_7").write_text("a file")
    others = sorted(root.rglob("*"))

    accelerator = CkptAccelerator(cpu=True, project_config=_project(tmp_path))
    accelerator.register_for_checkpointing(held := Held({}))
    accelerator.load_state()
    assert held.loaded == {"a": 1}, "the newest that is complete"
    assert accelerator.save_iteration == 2
    assert accelerator.save_state() == root / "checkpoint_8"
    assert accelerator.save_state() == root / "checkpoint_9"
    assert not (root / "checkpoint_8").exists()
    assert [one for one in others if not one.exists()] == []
    again = CkptAccelerator(cpu=True, project_config=_project(tmp_path))
    again.register_for_checkpointing(Held({}))
    again.load_state()
    assert again.save_iteration == 10


def test_a_copy_under_another_number_is_neither_counted_nor_removed(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    accelerator = CkptAccelerator(cpu=True, project_config=_project(tmp_path))
    accelerator.register_for_checkpointing(Held({"a": 1}))
    accelerator.save_state()
    shutil.copytree(root / "checkpoint_0", root / "checkpoint_3")
    (root / "checkpoint_4").symlink_to("checkpoint_3")
    (root / f"checkpoint_{'9' * 5000}"[:200]).mkdir()
    assert accelerator.save_state() == root / "checkpoint_5"
    assert accelerator.save_state() == root / "checkpoint_6"
    names = sorted(one.name for one in root.iterdir() if len(one.name) < 20)
    assert names == ["checkpoint_3", "checkpoint_4", "checkpoint_6"]


def test_a_copy_and_a_renamed_checkpoint_are_neither_counted_nor_removed_nor_saved_over(tmp_path: Path) -> None:
    project = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=1)
    program, root = Program(project_config=project), tmp_path / "checkpoints"
    program.accelerator.save_state()
    shutil.copytree(root / "checkpoint_0", root / "checkpoint_1")
    shutil.copytree(root / "checkpoint_0", root / "checkpoint_best")
    (root / "checkpoint_0").rename(root / "checkpoint_3")
    assert program.accelerator.find_latest() is None
    for number in (4, 5):
        assert program.accelerator.save_state() == root / f"checkpoint_{number}"
    left = ["checkpoint_1", "checkpoint_3", "checkpoint_5", "checkpoint_best"]
    assert sorted(path.name for path in root.iterdir()) == left


def test_a_state_of_accelerate_on_the_disks_of_its_nodes_is_known_by_all_ranks(tmp_path: Path) -> None:
    own = Accelerator(cpu=True)
    own.register_for_checkpointing(Held({"a": 1}))
    own.save_state(str(tmp_path))
    (tmp_path / "random_states_0.pkl").rename(tmp_path / "random_states_8.pkl")  # as on the second node
    accelerator = CkptAccelerator(cpu=True)
    accelerator.register_for_checkpointing(held := Held({}))
    accelerator.load_state(str(tmp_path))
    assert held.loaded == {"a": 1}


def test_a_state_that_accelerate_has_saved_is_loaded(tmp_path: Path) -> None:
    program = Program(Accelerator)
    program.train(0, 4)
    program.accelerator.save_state(str(tmp_path))
    straight = program.train(4, 10)
    resumed = Program(seed=7)
    resumed.loader.batch_sampler.sampler.initial_seed = 0  # which Accelerate does not keep
    resumed.accelerator.load_state(str(tmp_path))
    assert resumed.train(4, 10) == straight


def test_what_cannot_be_done_is_refused(tmp_path: Path) -> None:
    accelerator = Program().accelerator
    with pytest.raises(ConfigurationError, match="name a folder, or make the accelerator with"):
        accelerator.save_state()
    with pytest.raises(ConfigurationError, match=r"save_state\(exclude_frozen_parameters=...\) has no effect"):
        accelerator.save_state(str(tmp_path / "a"), exclude_frozen_parameters=True)
    with pytest.raises(ConfigurationError, match=r"load_state\(map_location=...\) has no effect"):
        accelerator.load_state(str(tmp_path / "a"), map_location="cpu")
    with pytest.raises(CheckpointNotFoundError):
        accelerator.load_state(str(tmp_path / "a"))
    with pytest.raises(ConfigurationError, match="all nodes save one checkpoint together"):
        Program(project_config=ProjectConfiguration(save_on_each_node=True)).accelerator.save_state(str(tmp_path / "a"))
    with pytest.raises(ConfigurationError, match="automatic_checkpoint_naming needs a folder"):
        Program(project_config=ProjectConfiguration(automatic_checkpoint_naming=True)).accelerator.save_state()
    path = accelerator.save_state(str(tmp_path / "a"))
    with pytest.raises(CheckpointExistsError, match="holds a checkpoint already"):
        accelerator.save_state(str(tmp_path / "a"))
    file = next((path / "model").rglob("c/0*"))
    file.write_bytes(bytes(len(file.read_bytes())))
    with pytest.raises(CorruptCheckpointError):
        accelerator.load_state(str(path))
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: None)
    accelerator.register_load_state_pre_hook(lambda models, folder: None)
    with pytest.raises(ConfigurationError, match="save_state calls no hooks"):
        accelerator.save_state(str(tmp_path / "b"))
    with pytest.raises(ConfigurationError, match="load_state calls no hooks"):
        accelerator.load_state(str(path))
    assert not (tmp_path / "b").exists()
