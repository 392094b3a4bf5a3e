"""Save and load the part of a state dict that is not sharded, and ShardedObjects: as JSON and arrays, or from pickled files.

They are two small checkpoints, `common/` and `objects/`, below that of the tensors, whose manifest lists their manifests: every byte below
the folder has a digest. Nothing is pickled: a value that is neither a tensor nor plain (`ckpt.state.flatten`) is refused by name.
`common.pt` and the object files of Megatron-Core are read if the user allows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from ckpt.backends.zarr import ZarrBackend
from ckpt.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from ckpt.dist_checkpointing.folder.loading import load_state, state_keys
from ckpt.dist_checkpointing.folder.saving import save_state
from ckpt.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, StateDict, is_main_replica
from ckpt.dist_checkpointing.strategies.base import (
    DeclaredFormats,
    LoadCommonStrategy,
    SaveCommonStrategy,
    StrategyAction,
    register_default_strategy,
)
from ckpt.errors import ConfigurationError, CorruptCheckpointError, MissingStateError, logger_of
from ckpt.format.manifest import COMMON, MANIFEST_NAME, OBJECTS
from ckpt.format.places import Place, local_path, place_of
from ckpt.interop.megatron.layout import COMMON_STATE_FNAME as COMMON_STATE_FNAME
from ckpt.interop.megatron.zarr import load_megatron_common, load_megatron_object, megatron_objects
from ckpt.interop.unpickling import unknown_in
from ckpt.loading.report import some_of
from ckpt.ranks.default_topology import current_topology
from ckpt.ranks.merging import total
from ckpt.ranks.topology import Topology
from ckpt.state.sharing import SharingPattern
from ckpt.storage.checkpoint_files import files_below, is_folder
from ckpt.storage.metadata import parts_at
from ckpt.storage.stored import has_manifest, read_listed_file, read_manifest, require_place

logger = logger_of(__name__)


def register_default_common_strategies() -> None:
    """Register the strategies that write and read ("json", 1), and read ("torch", 1) with pickles refused."""
    register_default_strategy(StrategyAction.SAVE_COMMON, "json", 1, JsonSaveCommonStrategy())
    register_default_strategy(StrategyAction.LOAD_COMMON, "json", 1, JsonLoadCommonStrategy())
    register_default_strategy(StrategyAction.LOAD_COMMON, "torch", 1, TorchCommonLoadStrategy())


class JsonSaveCommonStrategy(SaveCommonStrategy):
    """Saves plain values as JSON, and tensors among them as arrays."""

    def __init__(self, backend: str = "json", version: int = 1) -> None:
        super().__init__(backend, version)

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def save_common(self, common_state_dict: StateDict, checkpoint_dir: Place) -> None:
        """Save rank 0's state dict; those of other ranks are ignored. Collective.

        Raises:
            ConfigurationError: it holds a value that is neither a tensor nor plain.
        """
        topology = current_topology()
        with topology.operation(f"save into {checkpoint_dir}"), topology.phase("common state"):
            if topology.is_lead:
                folder = place_of(checkpoint_dir) / COMMON
                alone = Topology.alone(topology.progress)
                save_state(folder, COMMON, common_state_dict, SharingPattern.GLOBAL, alone, ZarrBackend())

    def save_sharded_objects(self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: Place) -> None:
        """Save the objects of all ranks' main replicas, each under its unique key. Collective.

        Raises:
            ConfigurationError: one holds a value that is neither a tensor nor plain.
        """
        topology = current_topology()
        with topology.operation(f"save into {checkpoint_dir}"):
            with topology.phase("count objects") as phase:
                objects = {
                    leaf.unique_key: leaf.data
                    for leaf in nested_values(sharded_objects_state_dict)
                    if is_main_replica(leaf.replica_id)
                }
                phase.merge = {"objects": total(len(objects))}
            if phase.merged["objects"]:
                folder = place_of(checkpoint_dir) / OBJECTS
                save_state(folder, OBJECTS, objects, SharingPattern.PER_RANK, topology, ZarrBackend())


class JsonLoadCommonStrategy(DeclaredFormats, LoadCommonStrategy):
    """Loads checkpoints of `JsonSaveCommonStrategy`. Every rank reads for itself, without waiting for others."""

    backends = ("json",)
    versions = (1,)

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def load_common(self, checkpoint_dir: Place) -> StateDict:
        """Load the state dict that rank 0 saved.

        Raises:
            CorruptCheckpointError: it is missing or damaged.
        """
        with _naming(COMMON):
            folder = _below(place_of(checkpoint_dir), COMMON)
            return load_state(folder, COMMON, progress=current_topology().progress)

    def load_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: Place
    ) -> ShardedStateDict:
        """Replace every ShardedObject, in place, by the object saved under its unique key; return the state dict.

        Raises:
            MissingStateError: there is no such object.
        """
        wanted = sorted({leaf.unique_key for leaf in nested_values(sharded_objects_state_dict)})
        if not wanted:
            return sharded_objects_state_dict
        found: Mapping[Any, Any] = {}
        with _naming(OBJECTS):
            if _is_part(place_of(checkpoint_dir), OBJECTS):
                folder, topology = _below(place_of(checkpoint_dir), OBJECTS), current_topology()
                found = load_state(folder, OBJECTS, only=wanted, first=topology.rank, progress=topology.progress)
        _require_found(wanted, found, place_of(checkpoint_dir))
        dict_list_map_inplace(lambda one: found[one.unique_key], sharded_objects_state_dict)
        return sharded_objects_state_dict

    def load_sharded_metadata(self, checkpoint_dir: Place) -> ShardedStateDict:
        """Unique key -> ShardedObject without data, of all saved objects."""
        with _naming(OBJECTS):
            if not _is_part(place_of(checkpoint_dir), OBJECTS):
                return {}
            keys = state_keys(_below(place_of(checkpoint_dir), OBJECTS), OBJECTS)
        return {key: ShardedObject.empty_from_unique_key(key) for key in keys}


class TorchCommonLoadStrategy(DeclaredFormats, LoadCommonStrategy):
    """Loads `common.pt` and the object files of Megatron-Core: tensors, plain values and containers, no code.

    Args:
        allow_pickle: read these files, which are pickles; otherwise they are refused.
        unknown: for objects of other classes "refuse" refuses the file, "keep" puts an inert
            `ckpt.format.unknown.UnknownObject` in place of each.
    """

    backends = ("torch",)
    versions = (1,)

    def __init__(self, *, allow_pickle: bool = False, unknown: Literal["refuse", "keep"] = "refuse") -> None:
        self._allow_pickle = allow_pickle
        self._unknown = unknown

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def load_common(self, checkpoint_dir: Place) -> StateDict:
        """Load `common.pt`.

        Raises:
            ConfigurationError: pickles are not allowed, or it holds objects of unknown classes.
        """
        folder = local_path(checkpoint_dir, "checkpoint_dir")
        common = load_megatron_common(folder, allow_pickle=self._allow_pickle, unknown=self._unknown)
        if current_topology().is_lead:
            tell_of_unknown(common, folder)
        return common

    def load_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: Place
    ) -> ShardedStateDict:
        """Replace every ShardedObject, in place, by the contents of its file; return the state dict.

        Raises:
            MissingStateError: there is no such file.
            ConfigurationError: as `load_common`.
        """
        folder = local_path(checkpoint_dir, "checkpoint_dir")

        def load(one: ShardedObject) -> Any:
            found = load_megatron_object(folder, one.unique_key, allow_pickle=self._allow_pickle, unknown=self._unknown)
            tell_of_unknown({one.unique_key: found}, folder)
            return found

        dict_list_map_inplace(load, sharded_objects_state_dict)
        return sharded_objects_state_dict

    def load_sharded_metadata(self, checkpoint_dir: Place) -> ShardedStateDict:
        """Unique key -> ShardedObject without data, by the names of the files; none is opened."""
        return dict(megatron_objects(local_path(checkpoint_dir, "checkpoint_dir")))


class TorchCommonSaveStrategy(SaveCommonStrategy):
    """Megatron-Core's name of the strategy that writes `common.pt`. This library pickles nothing, so its constructor raises."""

    def __init__(self, backend: str = "torch", version: int = 1) -> None:
        super().__init__(backend, version)
        self.save_common({}, Path())

    def save_common(self, common_state_dict: StateDict, checkpoint_dir: Place) -> None:
        """Refuse.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            f"common strategy ({self.backend!r}, {self.version}) would write a pickle, which can run code when it is read; save with "
            "('json', 1), the default"
        )


def tell_of_unknown(value: Any, checkpoint_dir: Place) -> None:
    """Log a warning that names the unknown objects in a value that was unpickled."""
    unknown = unknown_in(value)
    if unknown:
        named = some_of([f"{path} ({name})" for path, name in unknown.items()])
        logger.warning("%s: in the place of objects of unknown classes are inert ones: %s", checkpoint_dir, named)


def _is_part(checkpoint_dir: Place, name: str) -> bool:
    """Whether the small checkpoint `name` is there, or listed in the manifest."""
    if parts := parts_at(checkpoint_dir):
        return name in parts
    if not isinstance(checkpoint_dir, Path):
        return has_manifest(checkpoint_dir / name)
    if (checkpoint_dir / name).is_dir():
        return True
    has_record = (checkpoint_dir / MANIFEST_NAME).is_file()
    return has_record and f"{name}/{MANIFEST_NAME}" in read_manifest(checkpoint_dir).files


def _below(checkpoint_dir: Place, name: str) -> Place:
    """The folder of the small checkpoint `name`. If there is a manifest above, its digest of that manifest must match; in an object store,
    and in a copy out of it, metadata.json says of which save it is."""
    folder = checkpoint_dir / name
    if not is_folder(folder):
        raise CorruptCheckpointError(f"{folder} is missing")
    with files_below(checkpoint_dir) as above:
        above.require_folder(name)
    if place := parts_at(checkpoint_dir).get(name):
        require_place(folder, read_manifest(folder), place)
    elif isinstance(checkpoint_dir, Path) and (checkpoint_dir / MANIFEST_NAME).is_file():
        read_listed_file(checkpoint_dir, read_manifest(checkpoint_dir), f"{name}/{MANIFEST_NAME}")
    return folder


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Prefix errors with the name of the small checkpoint: each has files of the same names, and so has the one above."""
    try:
        yield
    except CorruptCheckpointError as error:
        if str(error).startswith(f"{name}: "):
            raise
        raise CorruptCheckpointError(f"{name}: {error}") from error


def _require_found(wanted: list[str], found: Mapping[Any, Any], checkpoint_dir: Place) -> None:
    missing = [key for key in wanted if key not in found]
    if missing:
        raise MissingStateError(
            f"object {missing[0]} is asked for, and {checkpoint_dir} does not hold it"
            + (f", nor {len(missing) - 1} more" if len(missing) > 1 else "")
            + ". An object cannot be cut anew: ask for the shards that were saved, or leave it out."
        )
