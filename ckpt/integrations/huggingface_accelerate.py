"""Hugging Face Accelerate: `accelerator.save_state(folder)` and `load_state(folder)` save and load checkpoints of this package.

    from ckpt.integrations.huggingface_accelerate import CkptAccelerator as Accelerator

Accelerate's hooks can take over the weights alone: `save_state` writes optimizers, schedules, samplers, registered objects and random
generators as pickles after the last hook, into a folder that was there before the first one. So a save with hooks would be complete only
when more has been written than they know of. This is a subclass instead, that writes everything, once, and commits it by a rename.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import SeedableRandomSampler
from accelerate.utils import DistributedType

from ckpt.api.checkpointer import ProgramRNG, auto_components
from ckpt.backends.base import Backend
from ckpt.catalog.catalog import catalog_at
from ckpt.catalog.ledger import is_removable
from ckpt.errors import CheckpointNotFoundError, ConfigurationError
from ckpt.format.places import Place, place_of
from ckpt.loading.loader import Loader
from ckpt.loading.strategy import LoadingStrategy
from ckpt.memory.device import device_of
from ckpt.ranks.merging import most
from ckpt.ranks.topology import Topology
from ckpt.run.arguments import as_backend, as_location, as_run, as_strategy, as_topology
from ckpt.saving.new_folder import save_into_new_folder
from ckpt.saving.saver import SavedRun
from ckpt.state.abilities import refusing_state
from ckpt.state.collect import RankState, collect
from ckpt.state.pattern_check import AutoSharing
from ckpt.storage.checkpoint_files import names_below, same_place
from ckpt.storage.stored import has_manifest

_NUMBERED = re.compile(r"checkpoint_([0-9]{1,18})")
_OWN_FILES = "random_states_*.pkl"
"""In every folder that Accelerate itself has saved: one of each rank, perhaps on the disk of its node."""


class CkptAccelerator(Accelerator):
    """`accelerate.Accelerator` with checkpoints of this package.

    A checkpoint holds what `save_state` of Accelerate holds: models, optimizers, schedules, the gradient scaler, random generators of each
    rank, objects of `register_for_checkpointing`, `step`, and of data loaders the epoch, the seed of a seedable sampler, and the state of a
    stateful one. Of objects that differ between ranks, each rank's state is saved. Nothing is pickled.

    The position within an epoch is the program's, as ever: `skip_first_batches`; or the loader's, with
    `DataLoaderConfiguration(use_stateful_dataloader=True)`. Two things make the batches and the numbers drawn after
    it those of the run that was killed: `set_epoch` before each epoch, and a `DataLoader(generator=...)` of its own, since a loader draws
    from the default generator whenever it begins. Saves are synchronous; `ckpt.Checkpointer` takes prepared objects, too, and can save
    beside training.

    Args:
        format: "zarr", "tensorstore", "kimi-engine", or a backend.
        load: "direct", "two-stage", or a loading strategy.
        peft_base: how the model below the adapters of a PEFT model is saved: see `Checkpointer`.
        args, kwargs: of `Accelerator`.

    Raises:
        ConfigurationError: DeepSpeed, Megatron-LM, FSDP1 or XLA, whose state this package does not know.
    """

    def __init__(
        self,
        *args: Any,
        format: Backend | str = "zarr",
        load: LoadingStrategy | str = "direct",
        peft_base: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        require_covered(self)
        self._ckpt_peft_base = peft_base
        self._ckpt_backend = as_backend(format, "format")
        self._ckpt_strategy = as_strategy(load, "load")
        self._ckpt_known: _Known | None = None

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Place:
        """Save all state as a checkpoint in `output_dir`, which appears complete, by a rename. Collective.

        Args:
            output_dir: of a folder that does not exist, or is empty, or an address in an object store, such as s3://bucket/run/state. With
                `automatic_checkpoint_naming` it is `<project_dir>/checkpoints/checkpoint_<n>`, whatever is given here; n is greater than
                that of every checkpoint there, also of Accelerate's own, and at least `ProjectConfiguration.iteration`. `total_limit` of
                them stay, the new one always; those of Accelerate, and copies under another name, do not count and stay, too.
            safe_serialization: no effect: nothing is pickled.
            save_model_func_kwargs: refused; they are DeepSpeed's.

        Raises:
            CheckpointExistsError: something is at `output_dir` already.
            ConfigurationError: a hook of `register_save_state_pre_hook` is to write into a folder that is not there yet.
        """
        self._ckpt_require_no("save_state", self._save_model_state_pre_hook, save_model_func_kwargs)
        project = self.project_configuration
        if project.save_on_each_node:
            raise ConfigurationError(
                "save_on_each_node=True: all nodes save one checkpoint together, in a folder that they share"
            )
        named = self._ckpt_named(None if project.automatic_checkpoint_naming else output_dir)
        known = self._ckpt_objects()
        run = known.run
        path = named or self._ckpt_next(run.topology)

        def collected() -> RankState:
            components = known.sharing.settle()
            with run.topology.phase("leaves"):
                return collect(components, run.topology)

        save_into_new_folder(path, run.topology, run.backend, collected)
        project.iteration = project.iteration + 1 if named else _number(path) + 1
        if named is None and project.total_limit is not None:
            with run.topology.operation(f"save into {path}"), run.topology.phase("retain"):
                if run.topology.is_lead:
                    ledger = catalog_at(self._ckpt_root, run_id=str(self._ckpt_root))
                    for old in _own(self._ckpt_root)[: -max(project.total_limit, 1)]:
                        ledger.remove(old)
        return path

    def load_state(
        self, input_dir: str | None = None, load_kwargs: Mapping[str, Any] | None = None, **load_model_func_kwargs: Any
    ) -> None:
        """Load a checkpoint in place, random generators last. Collective.

        A program that both starts and resumes: `if accelerator.find_latest() is not None: accelerator.load_state()`.

        Args:
            input_dir: of a checkpoint; also one that Accelerate itself saved. None: the newest of `automatic_checkpoint_naming`. A
                checkpoint of that folder sets `ProjectConfiguration.iteration` to the number after it.
            load_kwargs, load_model_func_kwargs: passed on for a checkpoint that Accelerate itself saved, otherwise refused, but for
                `strict=False`: state that only this program has, or only the checkpoint, is left out.

        Raises:
            CheckpointNotFoundError: there is none.
            CorruptCheckpointError: bytes are missing or changed.
            CheckpointError: it does not fit the objects of this program.
        """
        given = self._ckpt_named(input_dir)
        run = self._ckpt_objects().run
        with run.topology.operation("load_state"), run.topology.phase("find") as phase:
            found = given or (self.find_latest() if run.topology.is_lead else None)
            if found is None and run.topology.is_lead:
                raise CheckpointNotFoundError(
                    f"there is no checkpoint in {self._ckpt_root} yet: a program that both starts and resumes calls load_state() only if "
                    "find_latest() is not None"
                )
            phase.from_lead = str(found)
        path = place_of(phase.from_lead)
        with run.topology.operation("load_state"), run.topology.phase("look") as phase:
            here = given or path  # each node may have its part of a checkpoint of Accelerate on a disk of its own
            phase.merge = {"is_accelerates": most(_is_accelerates(here))}
        if phase.merged["is_accelerates"]:
            super().load_state(str(here), load_kwargs, **load_model_func_kwargs)
        else:
            strict = load_model_func_kwargs.pop("strict", True)
            self._ckpt_require_no("load_state", self._load_model_state_pre_hook, load_kwargs, load_model_func_kwargs)
            loader = Loader(
                run.components, run.topology, self._ckpt_strategy, run.device, verify=True, allow_pickle=False
            )
            loader.load(path, strict=strict)
        is_in_root = self.project_dir is not None and same_place(path.parent, self._ckpt_root)
        if is_in_root and _NUMBERED.fullmatch(path.name):
            self.project_configuration.iteration = _number(path) + 1

    def find_latest(self) -> Place | None:
        """Return the newest checkpoint of `automatic_checkpoint_naming`, or None; also one of Accelerate's own. Not collective."""
        found = _numbered(self._ckpt_root)
        own = _own(self._ckpt_root)
        return next((folder for folder in reversed(found) if folder in own or _is_accelerates(folder)), None)

    @property
    def _ckpt_root(self) -> Place:
        if self.project_dir is None:
            raise ConfigurationError(
                "automatic_checkpoint_naming needs a folder: give ProjectConfiguration(project_dir=...)"
            )
        return as_location("project_dir", self.project_dir) / "checkpoints"

    def _ckpt_next(self, topology: Topology) -> Place:
        """The next folder of `automatic_checkpoint_naming`, as the lead sees it. Collective."""
        with topology.operation("save_state"), topology.phase("number") as phase:
            if topology.is_lead:
                least = max((_number(folder) + 1 for folder in _numbered(self._ckpt_root)), default=0)
                phase.from_lead = str(self._ckpt_root / f"checkpoint_{max(self.project_configuration.iteration, least)}")
        return place_of(phase.from_lead)

    def _ckpt_named(self, folder: str | None) -> Place | None:
        """The folder of a call; None: it is to be found, or numbered.

        Raises:
            ConfigurationError: none is named, and none can be found.
        """
        if self.project_configuration.automatic_checkpoint_naming and folder is None:
            return None
        if folder is None:
            raise ConfigurationError(
                "name a folder, or make the accelerator with ProjectConfiguration(automatic_checkpoint_naming=True)"
            )
        place = as_location("the folder of a state", folder)
        return place.expanduser() if isinstance(place, Path) else place

    def _ckpt_require_no(self, method: str, hooks: Mapping[Any, Any], *options: Mapping[str, Any] | None) -> None:
        names = [name for given in options for name in given or ()]
        if names:
            raise ConfigurationError(
                f"{method}({', '.join(names)}=...) has no effect on checkpoints of ckpt; leave it out"
            )
        if hooks:
            raise ConfigurationError(
                f"{method} calls no hooks: a checkpoint of ckpt is complete when its folder appears. Remove the hooks, and give "
                "register_for_checkpointing an object that holds what they saved"
            )

    def _ckpt_objects(self) -> _Known:
        """What is to be saved now. The sharing patterns of models and optimizers are found once."""
        kinds = {
            "model": self._models,
            "optimizer": [optimizer.optimizer for optimizer in self._optimizers],
            "scheduler": self._schedulers,
            "dataloader": self._dataloaders,
            "object": self._custom_objects,
            "scaler": [self.scaler] if self.scaler is not None else [],
        }
        named = {f"{kind}_{at}" if at else kind: thing for kind, ones in kinds.items() for at, thing in enumerate(ones)}
        known = self._ckpt_known
        if known is None or [*map(id, known.objects.values())] != [*map(id, named.values())]:
            device = device_of(parameter for model in self._models for parameter in model.parameters())
            own: dict[str, Any] = {n: _LoaderState(loader) for n, loader in named.items() if n.startswith("dataloader")}
            own["accelerator"] = _StepState(self)
            own["rng"] = ProgramRNG(device, seed=torch.initial_seed(), step=lambda: int(self.step))
            topology = as_topology(None)
            components = auto_components(named | own, {}, self._ckpt_peft_base, topology)
            run = as_run(components, None, topology, self._ckpt_backend, device)
            self._ckpt_known = known = _Known(named, run, AutoSharing(run.components, run.topology))
        return known

    def free_memory(self, *objects: Any) -> Any:
        """Release what was prepared: see `Accelerator.free_memory`."""
        self._ckpt_known = None
        return super().free_memory(*objects)


@dataclass(frozen=True, slots=True)
class _Known:
    """The objects of an accelerator by name, and how they are saved."""

    objects: Mapping[str, Any]
    run: SavedRun
    sharing: AutoSharing


def require_covered(accelerator: Any) -> None:
    """Refuse ways to train whose state this package does not know.

    Raises:
        ConfigurationError: DeepSpeed, Megatron-LM, FSDP1 or XLA.
    """
    kind = accelerator.distributed_type
    if kind is DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ConfigurationError(
            "FSDP1 keeps its state in flat parameters, which ckpt does not save; use fsdp_version=2"
        )
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA):
        raise ConfigurationError(
            f"ckpt does not save the state of {kind.value}; use DDP or FSDP2, or the checkpoints of {kind.value} itself"
        )


class _StepState:
    """`Accelerator.step`, the number of batches of gradients that are being added up."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step}

    @refusing_state("Accelerator")
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._accelerator.step = state_dict["step"]


class _LoaderState:
    """What Accelerate keeps of a prepared data loader; of a stateful one, its state."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"epoch": self._loader.iteration}
        if (sampler := _seedable(self._loader)) is not None:
            state["seed"] = sampler.initial_seed
        if self._loader.use_stateful_dataloader:
            state["loader"] = self._loader.state_dict()
        return state

    @refusing_state("the data loader")
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if (sampler := _seedable(self._loader)) is not None and "seed" in state_dict:
            sampler.initial_seed = state_dict["seed"]
        self._loader.set_epoch(state_dict["epoch"])
        if self._loader.use_stateful_dataloader:
            self._loader.load_state_dict(state_dict["loader"])


def _seedable(loader: Any) -> Any:
    """The sampler of a loader that draws its order from a seed and the epoch; None: it has no such one."""
    found = loader.sampler if isinstance(loader.sampler, SeedableRandomSampler) else loader.batch_sampler
    while found is not None and not isinstance(found, SeedableRandomSampler):
        found = getattr(found, "batch_sampler", None) or getattr(found, "sampler", None)
    return found


def _numbered(root: Place) -> list[Place]:
    """What has a number of automatic naming, the lowest first: checkpoints, and others. Without empty folders, whose place a save takes."""
    found = [root / name for name in names_below(root) if _NUMBERED.fullmatch(name)]
    return sorted((folder for folder in found if not (isinstance(folder, Path) and folder.is_dir()) or any(folder.iterdir())), key=_number)


def _is_accelerates(folder: Place) -> bool:
    """Whether Accelerate itself has saved a checkpoint, which it does in folders. Its random generators come last."""
    return isinstance(folder, Path) and any(folder.glob(_OWN_FILES)) and not has_manifest(folder)


def _own(root: Place) -> list[Place]:
    """The checkpoints of automatic naming, the oldest first, without links, copies and renamed ones, which are the user's."""
    return [folder for folder in _numbered(root) if is_removable(folder) and not (isinstance(folder, Path) and folder.is_symlink())]


def _number(path: Place) -> int:
    match = _NUMBERED.fullmatch(path.name)
    assert match is not None, "the name is that of a checkpoint"
    return int(match[1])
