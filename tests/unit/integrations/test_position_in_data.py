"""The batches of a run that was stopped in the middle of an epoch and goes on with new objects, as docs/guides/frameworks.md tells them.

torchtitan's are in `tests/e2e/test_torchtitan.py`, TRL's in `test_trl.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ckpt import Checkpointer
from ckpt.integrations.huggingface import CkptTrainer
from ckpt.integrations.huggingface_accelerate import CkptAccelerator
from tests.support.trainers import Seen, Stopped, state_of, stop, trainer
from tests.support.values import same_values

SAMPLES, BATCH, STEPS = 20, 2, 26
"""10 batches in an epoch: the run ends in the third one."""
EPOCH = SAMPLES // BATCH
EVERY, STOPPED, SAVED = 7, 16, 14
"""It saves every 7 steps, and is stopped after step 16, in the second epoch: it goes on after step 14."""
BOUNDARY = 5, 12, 10
"""The same, but the last save is at the end of an epoch."""

torchdata = pytest.mark.skipif(
    importlib.util.find_spec("torchdata") is None, reason="torchdata is not installed: pip install -e '.[fidelity]'"
)


def stateful_loader(*arguments: Any, **options: Any) -> Any:
    return importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader(*arguments, **options)


def random_sampler(*arguments: Any, **options: Any) -> Any:
    return importlib.import_module("torchdata.stateful_dataloader.sampler").RandomSampler(*arguments, **options)


def samples() -> TensorDataset:
    return TensorDataset(torch.arange(SAMPLES * 4.0).reshape(SAMPLES, 4).cos(), torch.arange(SAMPLES))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))


def stateful(workers: int = 0) -> Any:
    """A loader that goes on to the bit, in the next epochs too.

    It has two generators: after a load a loader draws once more from its own, or once less, than without a stop.
    """
    sampler = random_sampler(data := samples(), generator=torch.Generator().manual_seed(0))
    return stateful_loader(data, batch_size=BATCH, sampler=sampler, generator=torch.Generator(), num_workers=workers)


# ---- An own loop


def own_loop(
    folder: Path, loader: Any, stop_at: int | None = None, every: int = EVERY
) -> tuple[dict[int, list[int]], list[Any]]:
    """Train with a `Checkpointer`, which has the loader, if that has a state; the samples of each step, and the last weights."""
    torch.manual_seed(0)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    data = loader if hasattr(loader, "state_dict") else None
    batches: dict[int, list[int]] = {}
    with Checkpointer(folder, model=net, optimizer=optimizer, data=data, every=every, save_at_end=False) as checkpoints:
        step = int(checkpoints.restore())
        while step not in (stop_at, STEPS):
            for inputs, numbers in loader:
                step += 1
                batches[step] = numbers.tolist()
                optimizer.zero_grad()
                net(inputs).square().mean().backward()
                optimizer.step()
                checkpoints.step(step)
                if step in (stop_at, STEPS):
                    break
    return batches, [parameter.tolist() for parameter in net.parameters()]


@torchdata
@pytest.mark.parametrize("stops", [(EVERY, STOPPED, SAVED), BOUNDARY], ids=["within an epoch", "at its end"])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
def test_an_own_loop_goes_on_with_the_next_batch_of_a_stateful_loader(
    tmp_path: Path, stops: tuple[int, int, int]
) -> None:
    every, stopped, saved = stops
    straight, weights = own_loop(tmp_path / "straight", stateful(), every=every)
    own_loop(tmp_path / "stopped", stateful(), stopped, every)
    resumed, again = own_loop(tmp_path / "stopped", stateful(), every=every)
    assert resumed == {step: straight[step] for step in range(saved + 1, STEPS + 1)}
    assert again == weights


def test_a_plain_loader_of_an_own_loop_begins_again(tmp_path: Path) -> None:
    own_loop(tmp_path, DataLoader(samples(), batch_size=BATCH), STOPPED)
    resumed, _ = own_loop(tmp_path, DataLoader(samples(), batch_size=BATCH))
    assert [resumed[SAVED + 1 + at] for at in range(3)] == [[0, 1], [2, 3], [4, 5]]


# ---- Trainer


class Recording(CkptTrainer):
    """Keeps the tokens of each step."""

    def training_step(self, model: Any, inputs: dict[str, Any], *rest: Any, **options: Any) -> torch.Tensor:
        self.__dict__.setdefault("batches", {})[self.state.global_step + 1] = inputs["input_ids"].tolist()
        return super().training_step(model, inputs, *rest, **options)


def test_trainer_goes_on_with_the_next_batch(tmp_path: Path) -> None:
    options = {"max_steps": 28, "save_steps": 4, "kind": Recording}  # 20 batches in an epoch
    straight = trainer(tmp_path / "straight", **options)
    straight.train()
    with pytest.raises(Stopped):
        trainer(tmp_path / "stopped", Seen(26, stop), **options).train(resume_from_checkpoint="latest")
    resumed = trainer(tmp_path / "stopped", **options)
    resumed.train(resume_from_checkpoint="latest")
    assert resumed.batches == {step: straight.batches[step] for step in range(25, 29)}
    assert same_values(state_of(resumed), state_of(straight))


# ---- Accelerate


@pytest.fixture
def _accelerate_anew() -> Iterator[None]:
    """Accelerate keeps its state in classes."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def accelerated(
    folder: Path, how: str, stop_at: int | None = None, every: int = EVERY
) -> tuple[dict[int, list[int]], list[Any]]:
    """Train with Accelerate, from the newest checkpoint if there is one, as `how` says; the samples of each step, and the last weights."""
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True)
    stateful = {"use_stateful_dataloader": True} if how == "use_stateful_dataloader=True" else {}
    accelerator = CkptAccelerator(
        cpu=True,
        project_config=project,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, **stateful),
    )
    set_seed(0)
    loader = DataLoader(samples(), batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(0))
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    progress = {"step": 0}
    accelerator.register_for_checkpointing(Progress(progress))
    if accelerator.find_latest() is not None:
        accelerator.load_state()
    batches: dict[int, list[int]] = {}
    for epoch in range(progress["step"] // EPOCH, STEPS // EPOCH + 1):
        loader.set_epoch(epoch)
        position = progress["step"] - epoch * EPOCH
        here = accelerator.skip_first_batches(loader, position) if how == "skip_first_batches" else loader
        for inputs, numbers in here:
            if progress["step"] in (stop_at, STEPS):
                break
            progress["step"] += 1
            batches[progress["step"]] = numbers.tolist()
            optimizer.zero_grad()
            accelerator.backward(net(inputs).square().mean())
            optimizer.step()
            if progress["step"] % every == 0:
                accelerator.save_state()
        if progress["step"] in (stop_at, STEPS):
            break
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return batches, [parameter.tolist() for parameter in net.parameters()]


class Progress:
    def __init__(self, progress: dict[str, int]) -> None:
        self.progress = progress

    def state_dict(self) -> dict[str, int]:
        return dict(self.progress)

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.progress.update(state)


@pytest.mark.usefixtures("_accelerate_anew")
@pytest.mark.parametrize("stops", [(EVERY, STOPPED, SAVED), BOUNDARY], ids=["within an epoch", "at its end"])
@pytest.mark.parametrize("how", ["skip_first_batches", pytest.param("use_stateful_dataloader=True", marks=torchdata)])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
def test_accelerate_goes_on_with_the_next_batch(tmp_path: Path, how: str, stops: tuple[int, int, int]) -> None:
    every, stopped, saved = stops
    straight, weights = accelerated(tmp_path / "straight", how, every=every)
    accelerated(tmp_path / "stopped", how, stopped, every)
    resumed, again = accelerated(tmp_path / "stopped", how, every=every)
    assert resumed == {step: straight[step] for step in range(saved + 1, STEPS + 1)}
    assert again == weights


@pytest.mark.usefixtures("_accelerate_anew")
def test_a_plain_loader_of_accelerate_begins_its_epoch_again(tmp_path: Path) -> None:
    straight, _ = accelerated(tmp_path / "straight", "plain")
    accelerated(tmp_path / "stopped", "plain", STOPPED)
    resumed, _ = accelerated(tmp_path / "stopped", "plain")
    first_of_epoch = SAVED - SAVED % EPOCH + 1
    assert [resumed[SAVED + 1 + at] for at in range(3)] == [straight[first_of_epoch + at] for at in range(3)]
    assert resumed[SAVED + 1] != straight[SAVED + 1]


# ---- Lightning


def lightning(
    folder: Path, loader: Callable[[], Iterable[Any]], stop_at: int | None = None, every: int = EVERY
) -> tuple[dict[int, list[int]], list[Any]]:
    """Train with Lightning, from the last checkpoint if there is one; the samples of each step, and the last weights."""
    from lightning import LightningModule, Trainer, seed_everything
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    from ckpt.integrations.lightning import CkptCheckpointIO, RandomStates

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()
            self.batches: dict[int, list[int]] = {}

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            inputs, numbers = batch
            self.batches[self.global_step + 1] = numbers.tolist()
            return self.net(inputs).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    class Stopping(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            if trainer.global_step == stop_at:
                raise Stopped

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seed_everything(0, verbose=False)
    module = Module()
    saves = ModelCheckpoint(folder, every_n_train_steps=every, save_last=True)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, plugins=[CkptCheckpointIO()], callbacks=[RandomStates(), saves, Stopping()],
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    try:
        trainer.fit(module, loader(), ckpt_path="last")
    except Stopped:
        assert stop_at is not None
    return module.batches, [parameter.tolist() for parameter in module.parameters()]


LIGHTNING = pytest.mark.filterwarnings("ignore")
"""Lightning warns of few workers, of no validation, and of a folder that exists."""


@LIGHTNING
@torchdata
@pytest.mark.parametrize("stops", [(EVERY, STOPPED, SAVED), BOUNDARY], ids=["within an epoch", "at its end"])
@pytest.mark.parametrize("workers", [0, 2])
def test_lightning_goes_on_with_the_next_batch_of_a_stateful_loader(
    tmp_path: Path, workers: int, stops: tuple[int, int, int]
) -> None:
    every, stopped, saved = stops
    loader = partial(stateful, workers)
    straight, weights = lightning(tmp_path / "straight", loader, every=every)
    lightning(tmp_path / "stopped", loader, stopped, every)
    resumed, again = lightning(tmp_path / "stopped", loader, every=every)
    assert resumed == {step: straight[step] for step in range(saved + 1, STEPS + 1)}
    assert again == weights


class Positioned:
    """A loader of one's own, with a state: what the handbook has for programs without torchdata."""

    def __init__(self) -> None:
        self.data, self.num_drawn = samples(), 0

    def __len__(self) -> int:
        return EPOCH

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        epoch, position = divmod(self.num_drawn, EPOCH)
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).reshape(EPOCH, BATCH)
        for numbers in itertools.islice(order, position, None):
            self.num_drawn += 1
            yield [column[numbers] for column in self.data.tensors]

    def state_dict(self) -> dict[str, int]:
        return {"num_drawn": self.num_drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_drawn = state["num_drawn"]


@LIGHTNING
def test_lightning_goes_on_with_the_next_batch_of_a_loader_that_keeps_its_position(tmp_path: Path) -> None:
    straight, weights = lightning(tmp_path / "straight", Positioned)
    lightning(tmp_path / "stopped", Positioned, STOPPED)
    resumed, again = lightning(tmp_path / "stopped", Positioned)
    assert resumed == {step: straight[step] for step in range(SAVED + 1, STEPS + 1)}
    assert again == weights


@LIGHTNING
def test_a_plain_loader_of_lightning_begins_again(tmp_path: Path) -> None:
    def loader() -> Any:
        return DataLoader(samples(), batch_size=BATCH)

    straight, _ = lightning(tmp_path / "straight", loader)
    lightning(tmp_path / "stopped", loader, STOPPED)
    resumed, _ = lightning(tmp_path / "stopped", loader)
    assert [resumed[SAVED + 1 + at] for at in range(3)] == [straight[1 + at] for at in range(3)]
    assert resumed[SAVED + 1] != straight[SAVED + 1]
