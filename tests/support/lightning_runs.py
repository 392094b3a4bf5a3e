"""Trainings by Lightning, for tests: run on forked ranks (`tests.support.forked_ranks`), since its import takes long."""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from omegaconf import OmegaConf
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

import ckpt
from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.integrations.lightning import CkptCheckpointIO, CkptModelParallelStrategy, RandomStates
from ckpt.ranks.topology import Topology
from ckpt.saving.background import background
from ckpt.saving.manifest_writer import ManifestWriter
from ckpt.saving.save_settings import SaveSettings

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

BATCHES = 5
"""In an epoch."""


class Environment(LightningEnvironment):
    """The ranks of the process group that exists."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def local_rank(self) -> int:
        return dist.get_rank()


class Batches:
    """Random batches; each rank has its own. Keeps its position."""

    def __init__(self) -> None:
        self.num_drawn = 0

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(self.num_drawn % BATCHES, BATCHES):
            self.num_drawn += 1
            yield torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * self.num_drawn + dist.get_rank()))

    def state_dict(self) -> dict[str, int]:
        return {"num_drawn": self.num_drawn}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.num_drawn = state["num_drawn"]


class Module(LightningModule):
    """A model with dropout, and odd sizes, whose losses are kept by step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 5), nn.Dropout(0.5), nn.Linear(5, 3))
        self.losses: dict[int, float] = {}

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelStrategy) and not isinstance(self.net[0].weight, DTensor):
            for layer in (self.net[0], self.net[2], self.net):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch).square().mean()
        self.losses[self.global_step + 1] = loss.item()
        self.log("loss", loss.detach(), sync_dist=True)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val", self.net(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"},
        }


class Killed(Callback):
    """Kills this process when it begins the step after `step`."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def trainer_of(kind: str, steps: int, callbacks: list[Any], **options: Any) -> Trainer:
    """A trainer on all ranks.

    Args:
        kind: "ddp" or "fsdp".
        options: of `CkptCheckpointIO`.
    """
    world_size = dist.get_world_size()
    strategy = DDPStrategy() if kind == "ddp" else CkptModelParallelStrategy(world_size, 1)
    return Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, plugins=[Environment(), CkptCheckpointIO(**options)],
        max_steps=steps, callbacks=callbacks, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=any(isinstance(one, ModelCheckpoint) for one in callbacks), use_distributed_sampler=False,
    )  # fmt: skip


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def state_of(module: LightningModule, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Parameters, both moments and the learning rate; whole, and so collective."""
    tensors = [*module.parameters()]
    tensors += [one[name] for one in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq", "step")]
    return [*(whole(one).tolist() for one in tensors), optimizer.param_groups[0]["lr"]]


def train(
    kind: str, folder: Path, steps: int, options: dict[str, Any], kill_after: int | None = None, **of_saves: Any
) -> tuple[dict[int, float], list[Any], list[float]]:
    """Train up to a step, from the last checkpoint if there is one, with a save at every third step.

    Returns:
        loss by step; the state; the next random numbers.
    """
    seed_everything(3, verbose=False)
    module = Module()
    saves = ModelCheckpoint(folder, **{"every_n_train_steps": 3, "save_last": True, **of_saves})
    callbacks = [RandomStates(), saves, *([Killed(kill_after)] if kill_after is not None else [])]
    trainer = trainer_of(kind, steps, callbacks, **options)
    trainer.fit(module, Batches(), ckpt_path="last")
    return module.losses, state_of(module, trainer.optimizers[0]), torch.rand(3).tolist()


def loaded(kind: str, path: Path, steps: int) -> list[Any]:
    """Restore a checkpoint of the last step; the state."""
    module = Module()
    trainer = trainer_of(kind, steps, [RandomStates()])
    trainer.fit(module, Batches(), ckpt_path=path)
    assert module.losses == {}
    return state_of(module, trainer.optimizers[0])


def validated(kind: str, path: Path) -> float:
    """The loss on the same data of a model that is loaded without its optimizer."""
    module = Module()
    (found,) = trainer_of(kind, -1, []).validate(
        module, [torch.arange(14.0).reshape(2, 7)], ckpt_path=path, verbose=False
    )
    return found["val"]


class SavedAndChanged(Callback):
    """Saves after the second step, changes all state as soon as that returns, and ends the training. Nothing is written before."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.saved: list[Any] = []
        self.has_changed = threading.Event()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        if trainer.global_step == 2:
            optimizer = trainer.optimizers[0]
            self.saved = state_of(module, optimizer)
            background.in_background = lambda *_, **__: self.has_changed.wait()  # type: ignore[assignment]
            trainer.save_checkpoint(self.path)
            assert not self.path.exists()
            tensors = [*module.parameters(), *(one["exp_avg"] for one in optimizer.state.values())]
            for tensor in tensors:
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data.fill_(-1)
            optimizer.param_groups[0]["lr"] = -1
            self.has_changed.set()
            trainer.should_stop = True


def save_and_change(kind: str, path: Path, options: dict[str, Any]) -> list[Any]:
    """Save, change the state at once, and restore it into another trainer; the state at the save, and as it was restored."""
    callback = SavedAndChanged(path)
    trainer_of(kind, 5, [callback], **options).fit(Module(), Batches())
    return [callback.saved, loaded(kind, path, 2)]


def train_until_disk_is_full(kind: str, folder: Path, options: dict[str, Any], num_saves: int) -> str:
    """Train with a disk that has room for some saves; the sentence of the error that `fit` raises."""
    write, written = ManifestWriter.write, []

    def failing(self: ManifestWriter, checkpoint_id: str, record: Any) -> int:
        if len(written) == num_saves:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(checkpoint_id)
        return write(self, checkpoint_id, record)

    ManifestWriter.write = failing  # type: ignore[method-assign]
    try:
        train(kind, folder, 30, options, save_last=False)
    except CheckpointError as error:
        return str(error)
    return "it has not failed"


def train_by_epochs(folder: Path, epochs: int, of_saves: dict[str, Any]) -> dict[int, float]:
    """Train on shuffled data, with validation and a save after each epoch of 4 batches; loss by step."""
    seed_everything(4, verbose=False)
    module = Module()
    saves = ModelCheckpoint(folder, save_last=True, **of_saves)
    trainer = trainer_of("ddp", -1, [RandomStates(), saves])
    trainer.fit_loop.max_epochs = epochs
    data = torch.arange(70.0).reshape(10, 7).sin()
    trainer.fit(module, DataLoader(data, 3, shuffle=True), DataLoader(data, 5), ckpt_path="last")
    return module.losses


def names_and_state(kind: str, folder: Path, of_saves: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Train with a `ModelCheckpoint` of these options; the folder's names, and the state of the callback."""
    module, saves = Module(), ModelCheckpoint(folder, **of_saves)
    trainer_of(kind, 12, [saves]).fit(module, Batches())
    dist.barrier()  # rank 0 removes what was surplus while the others end
    return sorted(one.name for one in folder.iterdir()), saves.state_dict()


def from_torch_file(folder: Path) -> list[dict[int, float]]:
    """Train with Lightning's own files, and go on from one with ours; the losses of a straight run, and after that."""
    found = []
    for name, ios in (("straight", (None,)), ("changed", (TorchCheckpointIO(), None))):
        for io in ios:
            seed_everything(3, verbose=False)
            module, saves = Module(), ModelCheckpoint(folder / name, every_n_train_steps=3, save_last=True)
            trainer = trainer_of("ddp", 6 if io is not None else 9, [RandomStates(), saves])
            if io is not None:
                trainer.strategy.checkpoint_io = io
            trainer.fit(module, Batches(), ckpt_path="last", weights_only=False)
        found.append(module.losses)
    return found


def refusals(folder: Path) -> list[str]:
    """The sentences about what cannot be."""
    io, strategy = CkptCheckpointIO(), CkptModelParallelStrategy()
    file = folder / "notes.txt"
    file.write_text("mine")
    ckpt.save({"a": torch.ones(1)}, folder / "of another")

    class Odd:
        pass

    calls: list[Callable[[], object]] = [
        lambda: io.save_checkpoint({"state_dict": {}, "hyper_parameters": {"cfg": {"x": [Odd()]}}}, folder / "odd"),
        lambda: io.save_checkpoint({"state_dict": {}}, folder / "x", storage_options={"a": 1}),
        lambda: io.save_checkpoint({"state_dict": {}}, "hdfs://bucket/x"),
        lambda: io.load_checkpoint(folder / "nothing"),
        lambda: io.load_checkpoint(folder / "of another"),
        lambda: io.load_checkpoint(folder / "of another", map_location=lambda storage, _: storage),
        lambda: CkptCheckpointIO(mode=SaveSettings(mode="async", when_busy="skip")),
        lambda: CkptCheckpointIO(mode=SaveSettings(incremental=True)),
        lambda: CkptCheckpointIO(format="pt"),
        lambda: setattr(strategy, "checkpoint_io", AsyncCheckpointIO()),
        lambda: CkptModelParallelStrategy(save_distributed_checkpoint=False).setup_environment(),
        lambda: CkptCheckpointIO(mode=SaveSettings(mode="async", grace_s=60)),
        lambda: Trainer(
            accelerator="cpu",
            strategy=ModelParallelStrategy(1, 1),
            plugins=[Environment(), io],
            callbacks=[RandomStates()],
            logger=False,
        ).fit(Module(), Batches()),
    ]
    found = []
    for call in calls:
        try:
            call()
        except CheckpointError as error:
            found.append(f"{type(error).__name__}: {error}".replace(str(folder), "F"))
        else:
            found.append("nothing")
    (folder / "link").symlink_to("of another")
    for name in ("notes.txt", "", "nothing", "link"):
        io.remove_checkpoint(folder / name)
    return [*found, *sorted(one.name for one in folder.iterdir())]


class Ending(Callback):
    """Ends the training right after a save has begun: an error on the last rank, or SIGTERM to each."""

    def __init__(self, by: str) -> None:
        self.by = by

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 4 and self.by == "SIGTERM":
            os.kill(os.getpid(), signal.SIGTERM)
        elif trainer.global_step == 4 and dist.get_rank() == dist.get_world_size() - 1:
            raise ZeroDivisionError("of this rank alone")


def train_until_end(kind: str, folder: Path, by: str) -> str:
    """Train until it is ended, with a save in the background; the error that each rank gets."""
    saves = ModelCheckpoint(folder, every_n_train_steps=4)
    try:
        trainer_of(kind, 9, [saves, Ending(by)], mode="async").fit(Module(), Batches())
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return "it has not failed"


def save_outside_of_fit(kind: str, folder: Path) -> list[Any]:
    """Fit twice with one plugin, and save after each; what lies there as soon as the call returns, and as it is loaded."""
    module, found = Module(), []
    io = CkptCheckpointIO(mode="async")
    for steps in (2, 4):
        trainer = trainer_of(kind, steps, [ModelCheckpoint(folder / "own", every_n_train_steps=1, save_top_k=-1)])
        trainer.strategy.checkpoint_io = io
        trainer.fit(module, Batches())
        trainer.save_checkpoint(folder / f"{steps}.ckpt")
        found.append(sorted(one.name for one in folder.iterdir()))
        trainer.save_checkpoint(folder / f"{steps}.ckpt", weights_only=True)
        found.append(validated(kind, folder / f"{steps}.ckpt"))
    return [*found, sorted(one.name for one in (folder / "own").iterdir())]


def from_sharded_folder(folder: Path) -> tuple[list[Any], list[Any]]:
    """Train with Lightning's own `ModelParallelStrategy`, and load its checkpoint with ours; both states."""
    module = Module()
    trainer = Trainer(
        accelerator="cpu", devices=dist.get_world_size(), strategy=ModelParallelStrategy(dist.get_world_size(), 1),
        plugins=[Environment()], max_steps=2, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(module, Batches())
    trainer.save_checkpoint(folder)
    return state_of(module, trainer.optimizers[0]), loaded("fsdp", folder, 2)


def load_with_other_keys(kind: str, path: Path) -> list[str]:
    """Load a checkpoint into a module with one more layer, strictly, and not; what either does."""
    found = []
    for is_strict in (True, False):
        module = Module()
        module.extra = nn.Linear(2, 2)
        module.strict_loading = is_strict
        try:
            trainer_of(kind, -1, []).validate(module, [torch.ones(1, 7)], ckpt_path=path, verbose=False)
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            found.append(str(whole(module.net[0].weight).tolist()))
    return found


class HeldBack:
    """Holds back the writers of saves in the background, and makes them slow."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        background.in_background = self._wait

    def _wait(self, *_: Any, **__: Any) -> None:
        self.go_on.wait()
        time.sleep(0.1)


class LettingGo(Callback):
    """Lets the writers go on when the training has failed."""

    def __init__(self, held: HeldBack) -> None:
        self.held = held

    def on_exception(self, *_: Any) -> None:
        self.held.go_on.set()


def two_callbacks_of_one_name(folder: Path) -> list[Any]:
    """Train with two `ModelCheckpoint`s that choose the same names; what `fit` raises, and what is saved."""
    saves = [ModelCheckpoint(folder, every_n_train_steps=2, monitor=monitor) for monitor in (None, "loss")]
    try:
        trainer_of("ddp", 5, [*saves, LettingGo(HeldBack())], mode="async").fit(Module(), Batches())
    except CheckpointError as error:
        return [str(error), [one.name for one in folder.iterdir()]]
    return ["it has not failed"]


def inside_fit(step: int) -> dict[str, Any]:
    """A checkpoint as Lightning makes it in the middle of `fit`."""
    progress = {"epoch_progress": {"current": {"ready": 1, "completed": 0}}}
    return {"state_dict": {"a": torch.ones(3)}, "global_step": step, "loops": {"fit_loop": progress}}


def saves_that_are_waited_for(folder: Path) -> list[str]:
    """What is there when saves return, although writers are held back, or slow."""
    io, held, found = CkptCheckpointIO(mode="async"), HeldBack(), []

    def save(name: str, step: int) -> None:
        io.save_checkpoint(inside_fit(step), folder / name)
        found.extend([name] if (folder / name).exists() else [])

    save("inside.ckpt", 1)
    held.go_on.set()
    save("hpc_ckpt_1.ckpt", 1)
    io.teardown()
    for _ in range(2):
        save("after.ckpt", 1)
    held.go_on.clear()
    save("inside again.ckpt", 2)
    held.go_on.set()
    io.teardown()
    return [*found, *sorted(one.name for one in folder.iterdir())]


def save_after_an_error(kind: str, folder: Path) -> list[bool]:
    """Save after a `fit` that has failed, and after one that had nothing to do; whether it is there when the call returns."""
    background.in_background = lambda *_, **__: time.sleep(0.3)  # type: ignore[assignment]
    saves, found = ModelCheckpoint(folder, every_n_train_steps=4), []
    trainer = trainer_of(kind, 9, [saves, Ending("an error")], mode="async")
    try:
        trainer.fit(Module(), Batches())
    except ZeroDivisionError:
        trainer.save_checkpoint(folder / "after.ckpt")
        found.append((folder / "after.ckpt").exists())
    trainer = trainer_of(kind, 4, [], mode="async")
    trainer.fit(Module(), Batches(), ckpt_path=saves.best_model_path)
    trainer.save_checkpoint(folder / "done.ckpt")
    return [*found, (folder / "done.ckpt").exists()]


def save_by_signal(folder: Path) -> list[str]:
    """A handler that saves, as Lightning's for SLURM does, of a signal that comes during a save, and during the wait for one."""
    ios = {mode: CkptCheckpointIO(mode=mode) for mode in ("sync", "async")}
    write, signalled = ManifestWriter.write, []

    def handler(number: int, _: Any) -> None:
        io.save_checkpoint(inside_fit(9), folder / f"hpc_ckpt_{len(signalled)}.ckpt")

    def signalling(self: ManifestWriter, checkpoint_id: str, record: Any) -> int:
        if not checkpoint_id.startswith("hpc"):
            signalled.append(checkpoint_id)
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.1)
        return write(self, checkpoint_id, record)

    ManifestWriter.write = signalling  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, handler)
    for mode, io in ios.items():
        io.save_checkpoint(inside_fit(1), folder / f"{mode}.ckpt")
        io.teardown()
    assert signal.getsignal(signal.SIGUSR1) is handler
    return sorted(one.name for one in folder.iterdir())


class WithHyperparameters(Module):
    def __init__(self, folder: Path, device: Any, act: Any = None, cfg: Any = None, ignore: Sequence[str] = ()) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["ignore", *ignore])


def hyperparameters_kept(kind: str, folder: Path, ignore: Sequence[str]) -> Any:
    """Train with hyperparameters of many types; what a checkpoint has of them, or the error, and how many steps there were."""
    module = WithHyperparameters(folder, torch.device("cpu"), nn.GELU, OmegaConf.create({"a": 1}), ignore)
    callbacks = [ModelCheckpoint(folder, every_n_train_steps=2), *([RandomStates()] if kind == "ddp" else [])]
    trainer = trainer_of("fsdp" if kind == "fsdp" else "ddp", 2, callbacks)
    try:
        trainer.fit(module, Batches())
    except ConfigurationError as error:
        return str(error), len(module.losses)
    loaded = ckpt.load(trainer.checkpoint_callback.best_model_path, topology=Topology.alone())
    return loaded["trainer"]["hyper_parameters"]


def hyperparameters_in_a_container(folder: Path) -> str:
    module = Module()
    module.save_hyperparameters(OmegaConf.create({"a": 1}))
    try:
        trainer_of("ddp", 2, [RandomStates()]).fit(module, Batches())
    except ConfigurationError as error:
        return str(error)
    return "kept"


class PartlyUsed(Module):
    """With a layer that gets no gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 2)

    def configure_model(self) -> None:
        if not isinstance(self.unused.weight, DTensor):
            fully_shard(self.unused, mesh=self.device_mesh["data_parallel"])
        super().configure_model()


def resume_partly_used(folder: Path) -> list[Any]:
    """Train a module with an unused layer, without and with an interruption; the optimizers' states by size, and all losses."""
    found = []
    for name, parts in (("straight", (4,)), ("resumed", (2, 4))):
        losses: dict[int, float] = {}
        for steps in parts:
            seed_everything(3, verbose=False)
            module = PartlyUsed()
            saves = ModelCheckpoint(folder / name, every_n_train_steps=2, save_last=True)
            trainer = trainer_of("fsdp", steps, [RandomStates(), saves])
            trainer.fit(module, Batches(), ckpt_path="last")
            losses |= module.losses
        (optimizer,) = trainer.optimizers
        state = [[whole(one).tolist() for one in of_one.values()] for of_one in optimizer.state.values()]
        found.append([losses, state, [optimizer.state.get(one) for one in module.unused.parameters()]])
    return found


def validate_after_fit(folder: Path) -> list[Any]:
    """Validate a checkpoint of the weights with the trainer that has trained them; the optimizer's state before and after."""
    module, saves = Module(), ModelCheckpoint(folder, every_n_train_steps=2, save_weights_only=True)
    trainer = trainer_of("fsdp", 2, [saves])
    trainer.fit(module, Batches())
    before = state_of(module, trainer.optimizers[0])
    trainer.validate(module, [torch.ones(1, 7)], ckpt_path="best", verbose=False)
    return [before, state_of(module, trainer.optimizers[0])]


def one_plugin_for_two_strategies(folder: Path) -> bool:
    """Give a plugin to `CkptModelParallelStrategy`, and save with it on rank 0 alone, as DDP does."""
    strategy = CkptModelParallelStrategy()
    strategy.checkpoint_io = io = CkptCheckpointIO()
    if dist.get_rank() == 0:
        io.save_checkpoint({"state_dict": {"a": torch.ones(3)}}, folder / "x.ckpt")
        io.teardown()
    dist.barrier()
    return (folder / "x.ckpt").exists()
