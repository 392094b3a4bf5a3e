"""Lightning: its Trainer saves and resumes with checkpoints of this package, under the paths that its callbacks choose.

    trainer = Trainer(plugins=[CkptCheckpointIO()], callbacks=[RandomStates(), ModelCheckpoint("checkpoints", save_last=True)])
    trainer.fit(module, ckpt_path="last")

`CkptCheckpointIO` is for one device and for DDP, where rank 0 saves. Where the ranks hold parts of the state, all save and load them with
`Trainer(strategy=CkptModelParallelStrategy(), plugins=[CkptCheckpointIO(...)])`, also on other numbers of ranks.

A checkpoint is a folder with the components "state_dict", "optimizer_states" and "trainer", which is the rest of Lightning's dictionary:
`ckpt.load(path)["state_dict"]` are the weights. Nothing is pickled.

For `import lightning`, not for the package `pytorch_lightning`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

import ckpt
from ckpt.backends.base import Backend
from ckpt.errors import ConfigurationError
from ckpt.format.manifest import MANIFEST_NAME
from ckpt.loading.loader import Loader
from ckpt.loading.strategy import LoadingStrategy
from ckpt.memory.device import device_of
from ckpt.ranks.default_topology import current_topology
from ckpt.ranks.topology import Topology
from ckpt.saving.arguments import as_backend, as_folder, as_strategy
from ckpt.saving.folder_saves import FolderSaves, as_folder_settings
from ckpt.saving.save_settings import SaveSettings
from ckpt.state.auto_sharing import AutoSharing
from ckpt.state.collect import RankState, collect
from ckpt.state.sharing import AUTO, SharingPattern, StateComponent
from ckpt.state.statefuls import Filled, Given, RNGState

MODEL, OPTIMIZERS, TRAINER = "state_dict", "optimizer_states", "trainer"
"""Components of a checkpoint; the first two are called as in Lightning's dictionary."""
_RANDOM_STATES = "ckpt.random_states"

_log = logging.getLogger("ckpt")


class CkptCheckpointIO(CheckpointIO):
    """Saves and loads the checkpoints of a Trainer: `Trainer(plugins=[CkptCheckpointIO()])`.

    A save replaces a checkpoint at its path, as `ModelCheckpoint(save_last=True)` needs it. Loads also read checkpoints that Lightning
    has saved as files before, by its own reader.

    Args:
        format: "zarr", "tensorstore", "kimi-engine", or a backend.
        load: "direct", "two-stage", or a loading strategy.
        mode: "sync", or "async" for saves that go on beside training, or `ckpt.saving.save_settings.SaveSettings`. The next save, or the
            end of `Trainer.fit`, raises the error of one that failed; a save outside of `fit` is waited for.

    In the background, `save_last=True` is a second save right after the first: training waits for the first, unless it is
    `SaveSettings(mode="async", when_busy="queue")`. Leave `save_last="link"` to "sync": a link leads nowhere until its save is
    committed, and after a kill Lightning would find no checkpoint.

    Attributes:
        ranks: returns those that save together; `CkptModelParallelStrategy` sets it.

    Raises:
        ConfigurationError: an argument is of a wrong type or value.
    """

    def __init__(
        self,
        *,
        format: Backend | str = "zarr",
        load: LoadingStrategy | str = "direct",
        mode: str | SaveSettings = "sync",
    ) -> None:
        self.ranks: Callable[[], Topology] = Topology.alone
        self._backend = as_backend(format)
        self._strategy = as_strategy(load)
        self._settings = as_folder_settings(mode)
        self._saves: _Saves | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Save a checkpoint. Lightning calls it on global rank 0; or it is collective over `ranks`.

        Raises:
            ConfigurationError: a value is neither a tensor nor plain, or `storage_options` are given.
            CheckpointError: see `FolderSaves.save`.
        """
        if storage_options is not None:
            raise ConfigurationError(
                "storage_options have no effect here: leave them out, or give CkptCheckpointIO a backend as format"
            )
        self._opened().save(checkpoint, as_folder("path", path))
        if not _is_inside_fit(checkpoint):
            self.teardown()

    def load_checkpoint(
        self, path: str | Path, map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint, with whole tensors. Collective over torch's default process group, if there is one.

        Args:
            path: of a checkpoint; or of a file, which Lightning's own reader loads.
            map_location: a device; None: the host.
            weights_only: for that reader. Our checkpoints hold nothing but tensors and plain values, whatever it is.

        Raises:
            CheckpointNotFoundError: there is no checkpoint.
            CorruptCheckpointError: bytes are missing or changed.
            ConfigurationError: it is a checkpoint, but none of Lightning's.
        """
        self._wait()
        folder = as_folder("path", path)
        if folder.is_file():
            given = {} if map_location is None else {"map_location": map_location}
            return TorchCheckpointIO().load_checkpoint(folder, **given, weights_only=weights_only)
        if map_location is not None and not isinstance(map_location, str | torch.device):
            raise ConfigurationError(
                f"map_location is a {type(map_location).__name__}; expected a device, or None for the host"
            )
        try:
            loaded = ckpt.load(folder, load=self._strategy, topology=current_topology())
        finally:
            self._strategy.close()
        if TRAINER not in loaded:
            raise ConfigurationError(
                f"{folder} is a checkpoint, but none of Lightning's: it holds {', '.join(map(str, loaded))}"
            )
        checkpoint = {**loaded.pop(TRAINER), **loaded}
        if OPTIMIZERS in loaded:
            checkpoint[OPTIMIZERS] = [loaded[OPTIMIZERS][str(n)] for n in range(len(loaded[OPTIMIZERS]))]
        if map_location is None:
            return checkpoint
        moved: dict[str, Any] = apply_to_collection(checkpoint, torch.Tensor, lambda one: one.to(map_location))
        return moved

    def load_in_place(
        self, path: Path, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, strict: bool
    ) -> dict[str, Any]:
        """Load a checkpoint into a model and optimizers that may hold parts of the tensors. Collective.

        Args:
            optimizers: without any, those of the checkpoint are not read.
            strict: keys on one side alone, and shapes that differ, are an error.

        Returns:
            the rest of the checkpoint.

        Raises:
            MissingStateError, ShapeMismatchError: the model or an optimizer does not fit.
            CheckpointError: as of `load_checkpoint`.
        """
        self._wait()
        into: dict[str, dict[str, Any]] = {MODEL: get_model_state_dict(model)}
        if optimizers:
            into[OPTIMIZERS] = _numbered([get_optimizer_state_dict(model, one) for one in optimizers])
        objects = {TRAINER: Given()} | {key: Filled(state) for key, state in into.items()}
        components = [StateComponent(key, one, AUTO) for key, one in objects.items()]
        device = device_of(model.parameters())
        loader = Loader(components, current_topology(), self._strategy, device, verify=True, allow_pickle=False)
        try:
            loader.load(path, strict=strict)
        finally:
            self._strategy.close()
        set_model_state_dict(model, objects[MODEL].loaded, options=StateDictOptions(strict=strict))
        for number, optimizer in enumerate(optimizers):
            set_optimizer_state_dict(model, optimizer, objects[OPTIMIZERS].loaded[str(number)])
        return objects[TRAINER].loaded

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint, or a link, once all saves that have begun are committed. What is no checkpoint stays, with a warning."""
        self._opened().folders.remove(as_folder("path", path))

    def teardown(self) -> None:
        """Wait for saves in the background, and release memory and threads.

        Raises:
            CheckpointError: one of them failed.
        """
        saves, self._saves = self._saves, None
        if saves is not None:
            saves.folders.close()

    def release(self) -> None:
        """Release memory and threads after an error, perhaps of this rank alone. Saves in the background end, and are not reported."""
        saves, self._saves = self._saves, None
        if saves is not None:
            saves.folders.release()

    def _opened(self) -> _Saves:
        if self._saves is None:
            self._saves = _Saves(self.ranks(), self._backend, self._settings)
        return self._saves

    def _wait(self) -> None:
        """Wait for saves in the background: the checkpoint to load may be among them."""
        if self._saves is not None:
            self._saves.folders.finalize(blocking=True)


class CkptModelParallelStrategy(ModelParallelStrategy):
    """`ModelParallelStrategy` (FSDP2, tensor parallelism, DTensors) whose ranks save and load their parts of one checkpoint.

    Other numbers of ranks, and other layouts, load it. The options are those of `Trainer(plugins=[CkptCheckpointIO(...)])`. As a mixin:
    `class Mine(CkptModelParallelStrategy, TheirModelParallelStrategy)`. A checkpoint of Lightning's own is loaded by its own reader.

    Buffers, which FSDP2 leaves to each rank, must be equal: use SyncBatchNorm, for example.

    Raises:
        ConfigurationError: the trainer's `CheckpointIO` is another one, or `save_distributed_checkpoint` is false.
    """

    _checkpoint_io: CheckpointIO | None

    @property
    def checkpoint_io(self) -> CkptCheckpointIO:
        if self._checkpoint_io is None:
            self.checkpoint_io = CkptCheckpointIO()
        assert isinstance(self._checkpoint_io, CkptCheckpointIO), "checked when it was set"
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        if not isinstance(io, CkptCheckpointIO):
            raise ConfigurationError(
                f"{type(self).__name__} saves by CkptCheckpointIO; found {type(io).__name__} in plugins"
            )
        io.ranks = current_topology
        self._checkpoint_io = io

    def setup_environment(self) -> None:
        if not self._save_distributed_checkpoint:
            raise ConfigurationError(
                f"{type(self).__name__}(save_distributed_checkpoint=False): every rank saves its part here; leave it out"
            )
        super().setup_environment()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's state dict, with tensors where they are: a save copies this rank's share of them."""
        assert self.model is not None
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return an optimizer's state dict by the names of the parameters, with tensors where they are."""
        assert self.model is not None
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        return get_optimizer_state_dict(self.model, optimizer)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save, at rank 0's path. Collective. See `CkptCheckpointIO.save_checkpoint`."""
        self.checkpoint_io.save_checkpoint(checkpoint, self.broadcast(filepath), storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load rank 0's path into model and optimizers. Collective. See `CkptCheckpointIO.load_in_place`."""
        path = Path(self.broadcast(checkpoint_path))
        if not self.broadcast((path / MANIFEST_NAME).exists()):
            return super().load_checkpoint(path, weights_only)
        assert self.model is not None and self.lightning_module is not None
        strict = self.lightning_module.strict_loading
        return self.checkpoint_io.load_in_place(path, self.model, self.optimizers, strict=strict)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove rank 0's path. All ranks call it."""
        self.checkpoint_io.remove_checkpoint(filepath)

    def on_exception(self, exception: BaseException) -> None:
        """Agree on nothing any more: the error may be this rank's alone."""
        super().on_exception(exception)
        self.checkpoint_io.release()

    def teardown(self) -> None:
        super().teardown()
        self.checkpoint_io.teardown()


class RandomStates(Callback):
    """Keeps the random generators of every rank (Python, NumPy, torch, its device) in the checkpoint, which Lightning does not.

    A run that draws random numbers in the training process, for dropout or to shuffle, goes on to the same bits with it: after a
    checkpoint of an epoch's end; and after one inside an epoch, if the data loader keeps its position (`state_dict`, `load_state_dict`).
    On another number of ranks all generators are seeded anew, from the saved run's seed and step.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, Any] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._loaded = None

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Collect the states of all ranks. Collective."""
        states: list[Any] = [_generators(trainer).state_dict()]
        if trainer.world_size > 1:
            own, states = states[0], [None] * trainer.world_size
            dist.all_gather_object(states, own)
        checkpoint[_RANDOM_STATES] = {"of_ranks": states, "is_inside_epoch": _is_inside_epoch(trainer)}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if trainer.state.fn != "fit":
            return
        self._loaded = checkpoint.get(_RANDOM_STATES)
        if self._loaded is None:
            _log.warning("%s holds no random states: it was saved without RandomStates()", trainer.ckpt_path)
        self._restore(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore again: what was set up since the load may have drawn numbers."""
        self._restore(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Inside an epoch, restore again: an iterator over the data has begun since, as it had before the save."""
        if self._loaded is not None and self._loaded["is_inside_epoch"]:
            self._restore(trainer)
        self._loaded = None

    def _restore(self, trainer: Trainer) -> None:
        if self._loaded is None:
            return
        generators, states = _generators(trainer), self._loaded["of_ranks"]
        if len(states) == trainer.world_size and generators.fits(states[trainer.global_rank]):
            generators.load_state_dict(states[trainer.global_rank])
        else:
            generators.load_changed(states)


class _Saves:
    """The saves of one `Trainer.fit`."""

    def __init__(self, topology: Topology, backend: Backend, settings: SaveSettings) -> None:
        self.folders = FolderSaves(topology, backend, settings)
        self._topology = topology
        self._parts = {MODEL: _Part(), OPTIMIZERS: _Part(), TRAINER: _Part()}
        components = [
            StateComponent(key, part, SharingPattern.GLOBAL if key == TRAINER else AUTO)
            for key, part in self._parts.items()
        ]
        self._sharing = AutoSharing(components, topology)

    def save(self, checkpoint: Mapping[str, Any], path: Path) -> None:
        """Save, or begin to. Collective."""

        def collected() -> RankState:
            with self._topology.phase("state"):
                given = _parts_of(checkpoint)
                for key, part in self._parts.items():
                    part.hold(given.get(key, {}))
            components = [one for one in self._sharing.settle() if one.key in given]
            with self._topology.phase("leaves"):
                return collect(components, self._topology)

        try:
            self.folders.save(path, collected)
        finally:
            for part in self._parts.values():
                part.hold({})


class _Part(Given):
    """A component's part of the checkpoint that is being saved."""

    def hold(self, state: Mapping[str, Any]) -> None:
        self._state = dict(state)


def _is_inside_fit(checkpoint: Mapping[str, Any]) -> bool:
    """Whether Lightning made it in the middle of `Trainer.fit`, which ends with `teardown`."""
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_progress", {}).get("current")
    return progress is not None and bool(progress["ready"] > progress["completed"])


def _parts_of(checkpoint: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return Lightning's dictionary as components."""
    rest = dict(checkpoint)
    parts = {MODEL: rest.pop(MODEL)} if MODEL in rest else {}
    if OPTIMIZERS in rest:
        parts[OPTIMIZERS] = _numbered(rest.pop(OPTIMIZERS))
    return parts | {TRAINER: rest}


def _numbered(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {str(number): state for number, state in enumerate(states)}


def _is_inside_epoch(trainer: Trainer) -> bool:
    """Whether a run that resumes here goes on with the epoch, if only to end it, or else begins the next one."""
    loop = trainer.fit_loop
    epochs, batches = (cast(Any, one.current) for one in (loop.epoch_progress, loop.epoch_loop.batch_progress))
    is_after_validation = epochs.processed < epochs.started and batches.completed == batches.processed
    return not trainer.is_last_batch or is_after_validation


def _generators(trainer: Trainer) -> RNGState:
    """The random generators of this rank."""
    device = device_of([torch.empty(0, device=trainer.strategy.root_device)])
    stream = trainer.global_rank, trainer.world_size
    return RNGState(device, seed=torch.initial_seed(), stream=stream, step=lambda: trainer.global_step)
