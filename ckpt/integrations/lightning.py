"""Lightning: its Trainer saves and resumes with checkpoints of this package, under the paths that its callbacks choose.

    trainer = Trainer(plugins=[CkptCheckpointIO()], callbacks=[RandomStates(), ModelCheckpoint("checkpoints", save_last=True)])
    trainer.fit(module, ckpt_path="last")

`CkptCheckpointIO` is for one device and for DDP, where rank 0 saves. Where the ranks hold parts of the state, all save and load them with
`Trainer(strategy=CkptModelParallelStrategy(), plugins=[CkptCheckpointIO(...)])`, also on other numbers of ranks. No other strategy will do:
DeepSpeed, FSDP1 and Lightning's own `ModelParallelStrategy` go past a `CheckpointIO`, in part or wholly. `RandomStates` refuses them.

Hyperparameters (`save_hyperparameters`) must be plain values or tensors. Others are refused as training begins, on every rank, by
`RandomStates` or that strategy; without both, by the first save.

A checkpoint is a folder with the components "state_dict", "optimizer_states" and "trainer", which is the rest of Lightning's dictionary:
`ckpt.load(path)["state_dict"]` are the weights. Nothing is pickled.

For `import lightning`, not for the package `pytorch_lightning`.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
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
from ckpt.format.manifest import ArrayEntry
from ckpt.format.places import Place
from ckpt.loading.loader import Loader
from ckpt.loading.strategy import LoadingStrategy
from ckpt.memory.device import device_of
from ckpt.ranks.default_topology import current_topology
from ckpt.ranks.topology import Topology
from ckpt.run.arguments import as_backend, as_location, as_strategy
from ckpt.saving.new_folder import FolderSaves, as_folder_settings
from ckpt.saving.save_settings import SaveSettings, setting
from ckpt.state.collect import RankState, collect
from ckpt.state.flatten import flatten
from ckpt.state.pattern_check import AutoSharing
from ckpt.state.sharing import AUTO, SharingPattern, StateComponent
from ckpt.state.statefuls import Filled, Given, RNGState
from ckpt.storage.stored import has_manifest

MODEL, OPTIMIZERS, TRAINER = "state_dict", "optimizer_states", "trainer"
"""Components of a checkpoint; the first two are called as in Lightning's dictionary."""
_RANDOM_STATES = "ckpt.random_states"
_REQUEUED = "hpc_ckpt_"
"""Beginning of the names that Lightning saves under when SLURM is to requeue the job."""
_NOT_PUT_OFF = {signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF}

_log = logging.getLogger("ckpt")


@contextmanager
def _handlers_put_off() -> Iterator[None]:
    """Put off the program's signal handlers inside the block. One of them may save: Lightning's for SLURM does, wherever it interrupts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: set[int] = set()

    def note(number: int, _frame: FrameType | None) -> None:
        came.add(number)

    found = {number: signal.getsignal(number) for number in signal.valid_signals() - _NOT_PUT_OFF}
    handlers = {number: handler for number, handler in found.items() if callable(handler)}
    for signum in handlers:
        signal.signal(signum, note)
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        for number in came:
            signal.raise_signal(number)


class CkptCheckpointIO(CheckpointIO):
    """Saves and loads the checkpoints of a Trainer: `Trainer(plugins=[CkptCheckpointIO()])`.

    A save replaces a checkpoint at its path, as `ModelCheckpoint(save_last=True)` needs it. Loads also read checkpoints that Lightning
    has saved as files before, by its own reader.

    Args:
        format: "zarr", "tensorstore", "kimi-engine", or a backend.
        load: "direct", "two-stage", or a loading strategy.
        mode: "sync", or "async" for saves that go on beside training, or `ckpt.saving.save_settings.SaveSettings`. The next save, or the
            end of `Trainer.fit`, raises the error of one that failed. A save outside of `fit` is waited for, and so are the first one
            after another call of the trainer has ended, and those before SLURM requeues the job.

    In the background, `save_last=True` is a second save right after the first: training waits for the first, unless it is
    `SaveSettings(mode="async", when_busy="queue")`. Leave `save_last="link"` to "sync": a link leads nowhere until its save is
    committed, and after a kill Lightning would find no checkpoint. Lightning gives a checkpoint another name (`-v1`) where it finds one,
    and finds none that is still being saved: let the names of each `ModelCheckpoint` contain the step, and differ from the others'.

    Raises:
        ConfigurationError: an argument is of a wrong type or value, or has no effect.
    """

    def __init__(
        self,
        *,
        format: Backend | str = "zarr",
        load: LoadingStrategy | str = "direct",
        mode: str | SaveSettings = "sync",
    ) -> None:
        self._backend = as_backend(format, "format")
        self._strategy = as_strategy(load, "load")
        self._settings = as_folder_settings(mode)
        if self._settings.grace_s != SaveSettings().grace_s:
            raise ConfigurationError(
                setting("grace_s", f"{self._settings.grace_s:g}"),
                " has no effect: Lightning handles SIGTERM, and ends after the batch; leave it out",
            )
        self._saves: _Saves | None = None
        self._ended_at: int | None = -1  # the global step at which a call of the trainer has ended; None: not known yet

    @_handlers_put_off()
    def save_checkpoint(
        self,
        checkpoint: dict[str, Any],
        path: str | Path,
        storage_options: Any | None = None,
        *,
        topology: Topology | None = None,
    ) -> None:
        """Save a checkpoint. Lightning calls it on global rank 0; `CkptModelParallelStrategy` on all ranks: collective then.

        Args:
            topology: of the ranks that save together; None: this one alone.

        Raises:
            ConfigurationError: a value is neither a tensor nor plain, `storage_options` are given, or a save to this path at this step
                is unfinished.
            CheckpointError: see `FolderSaves.save`.
        """
        if storage_options is not None:
            raise ConfigurationError(
                "storage_options have no effect here: leave them out, or give CkptCheckpointIO a backend as format"
            )
        folder = as_location("path", path)
        self._opened(topology).save(checkpoint, folder)
        if self._is_over(checkpoint) or folder.name.startswith(_REQUEUED):
            self._close()

    @_handlers_put_off()
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
        folder = as_location("path", path)
        if isinstance(folder, Path) and folder.is_file():
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

    @_handlers_put_off()
    def load_in_place(
        self, path: Place, model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], *, strict: bool
    ) -> dict[str, Any]:
        """Load a checkpoint into a model and optimizers that may hold parts of the tensors. Collective.

        Args:
            optimizers: without any, those of the checkpoint are not read. Parameters without a state there, because they have had no
                gradient, have none afterwards.
            strict: keys on one side alone, and shapes that differ, are an error.

        Returns:
            the rest of the checkpoint.

        Raises:
            MissingStateError, ShapeMismatchError: the model or an optimizer does not fit.
            CheckpointError: as of `load_checkpoint`.
        """
        self._wait()
        objects = {TRAINER: Given(), MODEL: Filled(get_model_state_dict(model))}
        if optimizers:
            states = _numbered([get_optimizer_state_dict(model, each) for each in optimizers])
            objects[OPTIMIZERS] = _OptimizerStates(states)
        components = [StateComponent(key, thing, AUTO) for key, thing in objects.items()]
        device = device_of(model.parameters())
        loader = Loader(components, current_topology(), self._strategy, device, verify=True, allow_pickle=False)
        try:
            loader.load(path, strict=strict, leave_out=() if optimizers else [OPTIMIZERS])
        finally:
            self._strategy.close()
        set_model_state_dict(model, objects[MODEL].loaded, options=StateDictOptions(strict=strict))
        for number, optimizer in enumerate(optimizers):
            loaded = objects[OPTIMIZERS].loaded[str(number)]
            set_optimizer_state_dict(model, optimizer, loaded, options=StateDictOptions(strict=False))
        return objects[TRAINER].loaded

    @_handlers_put_off()
    def remove_checkpoint(self, path: str | Path, *, topology: Topology | None = None) -> None:
        """Remove a checkpoint, or a link, once all saves that have begun are committed. What is no checkpoint stays, with a warning.

        Args:
            topology: as of `save_checkpoint`.
        """
        self._opened(topology).folders.remove(as_location("path", path))

    @_handlers_put_off()
    def teardown(self) -> None:
        """Wait for saves in the background, and release memory and threads. Lightning calls it when `fit`, or another call, has ended.

        Raises:
            CheckpointError: one of them failed.
        """
        self._ended_at = None
        self._close()

    @_handlers_put_off()
    def release(self) -> None:
        """Release memory and threads after an error, perhaps of this rank alone. Saves in the background end; their errors are logged."""
        saves, self._saves = self._saves, None
        if saves is not None:
            saves.folders.release()

    def _opened(self, topology: Topology | None) -> _Saves:
        if self._saves is None:
            self._saves = _Saves(topology or Topology.alone(), self._backend, self._settings)
        return self._saves

    def _close(self) -> None:
        saves, self._saves = self._saves, None
        if saves is not None:
            saves.folders.close()

    def _is_over(self, checkpoint: Mapping[str, Any]) -> bool:
        """Whether Lightning may make no further call after this save. Saves after `teardown` may be of a `fit` that has not gone on yet."""
        step = checkpoint.get("global_step")
        if self._ended_at is None:
            self._ended_at = step
        return step == self._ended_at or not _is_inside_fit(checkpoint)

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
        self._checkpoint_io = io

    def setup_environment(self) -> None:
        if not self._save_distributed_checkpoint:
            raise ConfigurationError(
                f"{type(self).__name__}(save_distributed_checkpoint=False): every rank saves its part here; leave it out"
            )
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        assert self.lightning_module is not None
        _require_plain_hyperparameters(trainer, self.lightning_module)
        super().setup(trainer)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's state dict, with tensors where they are: a save copies this rank's part of them."""
        assert self.model is not None
        return get_model_state_dict(self.model)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return an optimizer's state dict by the names of the parameters, with tensors where they are."""
        assert self.model is not None
        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer._optimizer
        return get_optimizer_state_dict(self.model, optimizer)

    @_handlers_put_off()
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save, at rank 0's path. Collective. See `CkptCheckpointIO.save_checkpoint`."""
        path = self.broadcast(filepath)
        self.checkpoint_io.save_checkpoint(checkpoint, path, storage_options, topology=current_topology())

    @_handlers_put_off()
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load rank 0's path into the model, and for `fit` into the optimizers. Collective. See `CkptCheckpointIO.load_in_place`."""
        path = as_location("checkpoint_path", self.broadcast(checkpoint_path))
        if not self.broadcast(has_manifest(path)):
            return super().load_checkpoint(path, weights_only)
        assert self.model is not None and self.lightning_module is not None
        strict = self.lightning_module.strict_loading
        optimizers = self.optimizers if self.lightning_module.trainer.state.fn == "fit" else []
        return self.checkpoint_io.load_in_place(path, self.model, optimizers, strict=strict)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove rank 0's path. All ranks call it."""
        self.checkpoint_io.remove_checkpoint(filepath, topology=current_topology())

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

    Raises:
        ConfigurationError: from `setup`: the trainer has a `CkptCheckpointIO`, and a strategy that goes past it, or hyperparameters that
            are not plain.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, Any] | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._loaded = None
        strategy = trainer.strategy
        goes_past = isinstance(strategy, DeepSpeedStrategy | FSDPStrategy | ModelParallelStrategy)
        is_ours = isinstance(strategy, CkptModelParallelStrategy)
        if goes_past and not is_ours and isinstance(strategy.checkpoint_io, CkptCheckpointIO):
            raise ConfigurationError(
                f"{type(strategy).__name__} does not save by CkptCheckpointIO: use CkptModelParallelStrategy, DDP or one device, or leave "
                "the plugin out"
            )
        if isinstance(strategy.checkpoint_io, CkptCheckpointIO):
            _require_plain_hyperparameters(trainer, pl_module)

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
        self._steps: dict[Place, int | None] = {}

    def save(self, checkpoint: Mapping[str, Any], path: Place) -> None:
        """Save, or begin to. Collective."""
        step, unfinished = checkpoint.get("global_step"), self.folders.unfinished
        self._steps = {loop: self._steps.get(loop) for loop in unfinished}
        if step is not None and self._steps.get(path.absolute()) == step:
            raise ConfigurationError(
                f"{path} is to be saved twice at step {step}: two ModelCheckpoints have chosen one name, as Lightning finds no file "
                "until the first save is committed; give one of them a filename or dirpath of its own"
            )

        def collected() -> RankState:
            with self._topology.phase("state"):
                given = _parts_of(checkpoint)
                for key, part in self._parts.items():
                    part.hold(given.get(key, {}))
            components = [component for component in self._sharing.settle() if component.key in given]
            with self._topology.phase("leaves"):
                return collect(components, self._topology)

        try:
            self.folders.save(path, collected)
            self._steps[path.absolute()] = step
        finally:
            for part in self._parts.values():
                part.hold({})


class _Part(Given):
    """A component's part of the checkpoint that is being saved."""

    def hold(self, state: Mapping[str, Any]) -> None:
        self._state = dict(state)


class _OptimizerStates(Filled):
    """The state dicts of optimizers, by number. Torch makes a state for every parameter; saved are those of parameters with a gradient."""

    def prepare_to_load(self, saved: Mapping[str, ArrayEntry]) -> None:
        for number, optimizer in self._state.items():
            for name, state in [*optimizer["state"].items()]:
                wanted = flatten({number: {"state": {name: state}}}, OPTIMIZERS).tensors
                if wanted and saved.keys().isdisjoint(wanted):
                    del optimizer["state"][name]


def _is_inside_fit(checkpoint: Mapping[str, Any]) -> bool:
    """Whether Lightning made it in the middle of `Trainer.fit`, which ends with `teardown`, or after a `fit` that ended there."""
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_progress", {}).get("current")
    return progress is not None and bool(progress["ready"] > progress["completed"])


def _parts_of(checkpoint: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return Lightning's dictionary as components."""
    rest = dict(checkpoint)
    for kind in (LightningModule, LightningDataModule):
        _require_plain(kind.CHECKPOINT_HYPER_PARAMS_KEY, rest.get(kind.CHECKPOINT_HYPER_PARAMS_KEY, {}))
    parts = {MODEL: rest.pop(MODEL)} if MODEL in rest else {}
    if OPTIMIZERS in rest:
        parts[OPTIMIZERS] = _numbered(rest.pop(OPTIMIZERS))
    return parts | {TRAINER: rest}


def _require_plain_hyperparameters(trainer: Trainer, module: LightningModule) -> None:
    """Refuse hyperparameters that a save would refuse, before training.

    Raises:
        ConfigurationError: see `_require_plain`.
    """
    for hooked in (module, trainer.datamodule):
        if hooked is not None and trainer.state.fn == "fit":
            _require_plain(hooked.CHECKPOINT_HYPER_PARAMS_KEY, hooked.hparams)


def _require_plain(key: str, hyperparameters: Mapping[str, Any]) -> None:
    """Refuse hyperparameters that cannot be saved.

    Args:
        key: of all of them, in Lightning's dictionary.

    Raises:
        ConfigurationError: some are neither tensors nor plain; it names them.
    """
    if not isinstance(hyperparameters, dict):
        raise ConfigurationError(
            f"{key} are one {type(hyperparameters).__name__}, which is not kept: give a dictionary to self.save_hyperparameters, such as "
            "OmegaConf.to_container(config)"
        )
    refused: dict[str, ConfigurationError] = {}
    for name, value in hyperparameters.items():
        try:
            flatten({name: value}, key)
        except ConfigurationError as error:
            refused[name] = error
    if refused:
        first = next(iter(refused.values()))
        raise ConfigurationError(
            f"{first} To leave out what cannot be kept: self.save_hyperparameters(ignore={[*refused]})"
        )


def _numbered(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {str(number): state for number, state in enumerate(states)}


def _is_inside_epoch(trainer: Trainer) -> bool:
    """Whether a run that resumes here goes on with the epoch, if only to end it, or else begins the next one."""
    loop = trainer.fit_loop
    epochs, batches = (cast(Any, progress.current) for progress in (loop.epoch_progress, loop.epoch_loop.batch_progress))
    is_after_validation = epochs.processed < epochs.started and batches.completed == batches.processed
    return not trainer.is_last_batch or is_after_validation


def _generators(trainer: Trainer) -> RNGState:
    """The random generators of this rank."""
    device = device_of([torch.empty(0, device=trainer.strategy.root_device)])
    stream = trainer.global_rank, trainer.world_size
    return RNGState(device, seed=torch.initial_seed(), stream=stream, step=lambda: trainer.global_step)
