"""Checkpoint manager for torchtitan 0.3: its trainer saves and loads here, with the options of its own manager.

On the command line of any program of torchtitan:

    torchrun ... -m torchtitan.train ... --checkpoint.enable --override.imports ckpt.integrations.torchtitan.ckpt_manager

or, in a function that makes a config:

    checkpoint=CkptManager.Config(enable=True, interval=500, format="zarr"),

A checkpoint is `<dump_folder>/<folder>/step-<N>`, as torchtitan names it, or `<address>/step-<N>` in an object store, without fsspec, where
`checkpoint.folder` or `dump_folder` is an address such as s3://bucket/run. `ckpt.load` reads it, and so does `CkptReader`. Checkpoints that
torchtitan has saved by itself in the same folder, or at `initial_load_path`, are still loaded, and count for `keep_latest_k`. Links,
copies and renamed checkpoints in the folder do not count, stay, and are not searched for the newest.
"""

from __future__ import annotations

import logging
import re
import secrets
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torchtitan.components.checkpointer import AsyncMode, BaseCheckpointManager, CheckpointManager
from torchtitan.components.checkpointer.base import MODEL
from torchtitan.config.override import derive, override
from torchtitan.tools import filesystem
from torchtitan.tools.utils import GarbageCollection

from ckpt.catalog.catalog import catalog_at
from ckpt.catalog.committed import look, warned
from ckpt.catalog.ledger import is_removable
from ckpt.errors import CheckpointError, CheckpointExistsError, CheckpointNotFoundError, ConfigurationError
from ckpt.format.manifest import MANIFEST_NAME
from ckpt.format.places import ObjectPath, Place, is_address, place_of
from ckpt.integrations.dcp import CkptReader, CkptWriter
from ckpt.run.arguments import as_location, as_strategy, as_topology
from ckpt.storage.checkpoint_files import names_below

_STEP = re.compile(r"step-([0-9]+)")
_COMPLETE = (MANIFEST_NAME, ".metadata", "model.safetensors.index.json")
"""A folder with one of these is a checkpoint: of this package, of DCP, of Hugging Face."""

_log = logging.getLogger("ckpt")


class CkptManager(CheckpointManager):
    """Saves and loads the states of torchtitan's trainer. Every rank makes one; methods are collective.

    All options of torchtitan's `CheckpointManager` hold, but for `async_mode="async_with_pinned_mem"`. With `last_save_in_hf` and
    `initial_load_in_hf`, torchtitan itself writes and reads its safetensors. A step folder appears by a rename, complete, and is never
    overwritten. `keep_latest_k` does not count a save that is still in the background. Plain values must be equal on all ranks that have
    them: torchtitan alone would keep those of one rank. As there, random generators are not saved, and the position in the data fits the
    number of data-parallel ranks that saved it.

    Raises:
        ConfigurationError: an option is not supported.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        """The options of torchtitan's manager, and two more."""

        format: str = "zarr"
        """Storage format: zarr, tensorstore or kimi-engine."""

        load: str = "direct"
        """How ranks share a load: direct or two-stage."""

    folder: str  # of torchtitan's own

    def __init__(self, config: Config, **states: Any) -> None:
        self.enable = False  # `close` has nothing to do until all is made
        self.save_future: Future[Any] | None = None
        if config.enable and config.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM:
            raise ConfigurationError(
                "checkpoint.async_mode=async_with_pinned_mem hands the save to another process of DCP, which this manager cannot follow; "
                'choose "async" or "disabled"'
            )
        if config.enable:
            self._root = as_location("checkpoint.folder", filesystem.join(states.get("base_folder", ""), config.folder))
            self._load_strategy = as_strategy(config.load, "load")
            self._topology = as_topology(None)
            self._writer = CkptWriter(format=config.format, topology=self._topology)
        super().__init__(config, **states)

    def dcp_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        async_mode: AsyncMode,
        enable_garbage_collection: bool = False,
        to_hf: bool = False,
    ) -> Future[Any] | None:
        """Save. Called by torchtitan, which waits for the save before."""
        if to_hf:
            super().dcp_save(state_dict, checkpoint_id, async_mode, enable_garbage_collection, to_hf=True)
            return None
        if async_mode == AsyncMode.ASYNC:
            saving = state_dict_saver.async_save(
                state_dict, checkpoint_id=checkpoint_id, storage_writer=self._writer, process_group=self.pg
            )
            assert isinstance(saving, Future), "there is no stager"
            return saving
        state_dict_saver.save(state_dict, checkpoint_id=checkpoint_id, storage_writer=self._writer)
        if enable_garbage_collection:
            GarbageCollection.collect("GC collection invoked by checkpointer.")
        return None

    def dcp_load(self, state_dict: dict[str, Any], checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Load. Called by torchtitan. A checkpoint in a folder, or read by fsspec, that is not of this package is left to it.

        Raises:
            CheckpointNotFoundError: none is at an address in an object store.
        """
        with self._topology.operation(f"look into {checkpoint_id}"), self._topology.phase("look") as phase:
            in_store = is_address(checkpoint_id)
            if self._topology.is_lead and not from_hf and (in_store or "://" not in checkpoint_id):
                phase.from_lead = look(place_of(checkpoint_id)) is not None
                if in_store and not phase.from_lead:
                    raise CheckpointNotFoundError(f"there is no checkpoint at {checkpoint_id}")
        if not phase.from_lead:
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        reader = CkptReader(checkpoint_id, load=self._load_strategy, topology=self._topology)
        state_dict_loader.load(state_dict, storage_reader=reader)
        self.states[MODEL].load_state_dict(state_dict)

    def _load(self, step: int = -1) -> bool:
        """Load the step that the lead finds, on all ranks.

        What a killed save of torchtitan's own writers left of a newer step is set aside: DCP's, or that of `last_save_in_hf`, which would
        merge old shards into a new save.

        Raises:
            CheckpointExistsError: there is a newer checkpoint, which a save of this run would meet.
        """
        with self._topology.operation(f"look into {self._root}"), self._topology.phase("look") as phase:
            if self._topology.is_lead:
                phase.from_lead = self._find_load_step() if step == -1 else step
                newer = [path for number, path in self._steps() if number > phase.from_lead and not self.load_only]
                if own := [path for path in newer if _is_own(path)]:
                    raise CheckpointExistsError(
                        f"{own[0]} is newer than what is loaded, {'nothing' if phase.from_lead < 0 else f'step {phase.from_lead}'}, and "
                        "saves replace no folder: move it away, choose another checkpoint.folder with this one's step as "
                        "checkpoint.initial_load_path, or set checkpoint.load_only"
                    )
                for path in newer:
                    if not isinstance(path, Path) or path.is_symlink() or _is_complete(path):
                        _log.warning(
                            "%s is a copy, link or renamed checkpoint: a save of this step will be refused", path
                        )
                        continue
                    aside = path.rename(path.with_name(f"{path.name}.incomplete-{secrets.token_hex(4)}"))
                    _log.warning("%s is an incomplete checkpoint, and is now %s", path, aside)
        return self._load_at(phase.from_lead)

    def _load_at(self, step: int) -> bool:
        """Load a step, or what a run begins with. Where torchtitan would ask fsspec for an address, it is not asked."""
        begins_at = self.initial_load_path or ""
        if isinstance(self._root, Path) and not (step == -1 and is_address(begins_at)):
            return bool(super()._load(step))
        if step != -1 or is_address(begins_at):
            at = self._root / f"step-{step}" if step != -1 else as_location("checkpoint.initial_load_path", begins_at)
            model_only = step == 0 if step != -1 else self.initial_load_model_only
            self.dcp_load(self._states_to_load(model_only), str(at), from_hf=False, from_quantized=False)
            return True
        folder: str = self.folder
        self.folder = ""
        try:
            return bool(super()._load(-1))
        finally:
            self.folder = folder

    def _find_load_step(self, folder: str = "") -> int:
        own = [number for number, path in self._steps(folder) if _is_own(path)]
        return own[-1] if own else -1

    def _steps(self, folder: str = "") -> list[tuple[int, Place]]:
        """Every folder with the name of a step, the oldest first."""
        root = as_location("checkpoint.folder", folder) if folder else self._root
        found = [(int(match[1]), root / name) for name in names_below(root) if (match := _STEP.fullmatch(name))]
        return sorted(found, key=lambda one: one[0])

    def _purge_stale_checkpoints(self) -> None:
        in_store = isinstance(self._root, ObjectPath)  # of which torchtitan would ask fsspec
        if self.keep_latest_k > 0 and self._topology.is_lead if in_store else self._should_purge():
            catalog = catalog_at(self._root, run_id="purge", delete=lambda removed: self.purge_queue.put(str(removed)))
            with warned(f"old checkpoints in {self._root} cannot be removed", (OSError, CheckpointError)):
                for path in [path for _, path in self._steps() if _is_own(path)][: -self.keep_latest_k]:
                    catalog.remove(path)

    def _wait_for_saving(self) -> None:
        saving, self.save_future = self.save_future, None  # its error is raised once
        assert saving is not None, "torchtitan calls this for an unfinished save only"
        saving.result()

    def _close(self) -> None:
        try:
            self.maybe_wait_for_saving()
        finally:
            super()._close()


def _is_complete(step: Path) -> bool:
    return any((step / name).is_file() for name in _COMPLETE)


def _is_own(step: Place) -> bool:
    """Whether a folder is a complete checkpoint, and no link, copy or renamed one, which is the user's."""
    if isinstance(step, ObjectPath):
        return is_removable(step)
    return _is_complete(step) and not step.is_symlink() and (is_removable(step) or look(step) is None)


@override(target=BaseCheckpointManager.Config)  # type: ignore[untyped-decorator]
def ckpt_manager(config: BaseCheckpointManager.Config, **options: Any) -> CkptManager.Config:
    """Replace torchtitan's checkpoint manager in a config; for its `--override.imports`, where options can follow as JSON.

    Raises:
        ConfigurationError: the config has a manager that this one cannot replace.
    """
    if type(config) not in (CheckpointManager.Config, CkptManager.Config):
        raise ConfigurationError(
            f"checkpoint is a {type(config).__qualname__}, with options of its own; only torchtitan's CheckpointManager can be replaced"
        )
    return derive(config, CkptManager.Config, **options)
