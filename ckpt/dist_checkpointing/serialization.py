"""Entry points of the first reference: `save` and `load` of sharded state dicts, and what one may ask of a checkpoint.

A sharded state dict is nested, and tells by ShardedTensors and ShardedObjects which pieces of one global state this rank holds.
Everything else in it is *common*: equal on all ranks, and saved by rank 0.

| step of `save` | writes |
|---|---|
| 1 apply factories, drop local objects | |
| 2 common state | `common/` |
| 3 ShardedObjects | `objects/` |
| 4 ShardedTensors | `sharded/`, `index-*.json`, `checkpoint_manifest.json` |
| 5 which strategies did it | `metadata.json`, whose presence says that all of it is there |
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from ckpt.dist_checkpointing.dict_utils import extract_matching_values, merge
from ckpt.dist_checkpointing.folder.destination import take
from ckpt.dist_checkpointing.folder.folder import require_alike
from ckpt.dist_checkpointing.folder.save_marker import SaveMarker, marked
from ckpt.dist_checkpointing.mapping import (
    CommonStateDict,
    ShardedObject,
    ShardedStateDict,
    StateDict,
    apply_factory_merges,
)
from ckpt.dist_checkpointing.strategies.base import (
    AsyncSaveShardedStrategy,
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
    StrategyAction,
    get_default_strategy,
)
from ckpt.dist_checkpointing.strategies.common import TorchCommonLoadStrategy, TorchCommonSaveStrategy
from ckpt.dist_checkpointing.utils import prepared_to_load, prepared_to_save
from ckpt.dist_checkpointing.validation import (
    CkptShardedMetadata,
    StrictHandling,
    chosen_strategy,
    compare_common,
    determine_global_metadata,
    parse_strict_flag,
    validate_integrity_and_strict_load,
    validate_sharded_objects_handling,
    validate_sharding_integrity,
    verify_checkpoint_and_load_strategy,
)
from ckpt.errors import ConfigurationError
from ckpt.format.metadata import CheckpointingConfig, maybe_load_config, save_config
from ckpt.format.names import local_path
from ckpt.ranks.job import current_topology, use_topology
from ckpt.ranks.topology import Topology
from ckpt.saving.background.async_utils import AsyncRequest

logger = logging.getLogger(__name__)


def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | Path,
    sharded_strategy: SaveShardedStrategy | tuple[str, int] | None = None,
    common_strategy: SaveCommonStrategy | tuple[str, int] | None = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[CommonStateDict], StateDict] | None = None,
) -> AsyncRequest | None:
    """Save a sharded state dict into a folder that exists. Collective; if it fails on one rank, it does on all.

    What an interrupted save has left in the folder is removed first; files of other people are left alone.

    Args:
        sharded_state_dict: nested; not changed.
        sharded_strategy: an object, or (backend, version) of a registered one; None: ("zarr", 1).
        common_strategy: likewise; None: ("json", 1).
        validate_access_integrity: make sure that every shard, and every object, has exactly one main replica, and warn where the
            ranks' common states differ.
        async_sharded_save: copy the tensors, and return the rest of the save as a request for the caller to schedule
            (`ckpt.saving.background.async_utils`). metadata.json is written by its last finalizer.
        preprocess_common_before_consistancy_check: returns what of the common state should be equal on all ranks; must not
            change it.

    Raises:
        CheckpointNotFoundError: the folder does not exist.
        CheckpointExistsError: it holds a checkpoint, or files of others where a save puts its own.
        ConfigurationError: no such strategy; or one that cannot save asynchronously; or a value that is neither a tensor nor plain.
        ShardingError, ShapeMismatchError: the ranks' shards do not make up global tensors.
    """
    topology, folder = current_topology(), local_path(checkpoint_dir, "checkpoint_dir")
    with topology.operation(f"save into {folder}"):
        with topology.phase("strategies") as phase:
            sharded, common = _sharded_saver(sharded_strategy), _common_saver(common_strategy)
            phase.payload = {
                "sharded_strategy": sharded.described,
                "common_strategy": common.described,
                "async_sharded_save": async_sharded_save,
                "validate_access_integrity": validate_access_integrity,
            }
        with topology.phase("destination"):
            require_alike(phase.payloads)
            if async_sharded_save and not isinstance(sharded, AsyncSaveShardedStrategy):
                raise ConfigurationError(
                    f"{sharded} saves before it returns: give async_sharded_save=False, or another strategy"
                )
            tensors, common_state = prepared_to_save(sharded_state_dict)
            mark = take(folder) if topology.is_lead else None
        with marked(mark):
            return _save_parts(
                tensors,
                common_state,
                folder,
                sharded,
                common,
                validate=validate_access_integrity,
                preprocess=preprocess_common_before_consistancy_check,
                in_background=async_sharded_save,
                mark=mark,
            )


def _save_parts(
    tensors: ShardedStateDict,
    common_state: StateDict,
    folder: Path,
    sharded: SaveShardedStrategy,
    common: SaveCommonStrategy,
    *,
    validate: bool,
    preprocess: Callable[[CommonStateDict], StateDict] | None,
    in_background: bool,
    mark: SaveMarker | None,
) -> AsyncRequest | None:
    """The steps of a save from the integrity check on, into a folder that is marked as this save's."""
    topology = current_topology()
    if validate:
        _, everybodys = determine_global_metadata(tensors)
        with topology.phase("integrity"):
            validate_sharding_integrity(everybodys)
        compare_common(common_state, preprocess)
    common.save_common(common_state, folder)
    if not sharded.can_handle_sharded_objects:
        validate_sharded_objects_handling(sharded, common)
        objects, tensors = extract_matching_values(tensors, lambda value: isinstance(value, ShardedObject))
        common.save_sharded_objects(objects, folder)
    config = CheckpointingConfig(sharded.backend, sharded.version, common.backend, common.version)
    if in_background:
        assert isinstance(sharded, AsyncSaveShardedStrategy)
        request = sharded.async_save(tensors, folder)
        request.add_finalize_fn(lambda: _complete(config, folder, topology, mark))
        if mark is not None:
            request.abandon_fns.append(mark.remove)
        return request
    sharded.save(tensors, folder)
    _complete(config, folder, topology, mark)
    return None


def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | Path,
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None,
    common_strategy: LoadCommonStrategy | tuple[str, int] | None = None,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    *,
    allow_pickle: bool = False,
) -> StateDict | tuple[StateDict, set[str], set[str]]:
    """Load the state that a sharded state dict describes. Collective; if it fails on one rank, it does on all.

    Args:
        sharded_state_dict: which piece of which global tensor goes where; cut as this run needs it, whoever saved it. Not changed.
        sharded_strategy, common_strategy: an object, or (backend, version) of a registered one; None: what the checkpoint asks for.
        validate_access_integrity: make sure that the ranks together ask for every shard exactly once as main replica.
        strict: what becomes of keys that are asked for and not in the checkpoint (*unexpected*), or there and not asked for
            (*missing*): the words are the first reference's, and the reverse of torch's.
        allow_pickle: a checkpoint that Megatron-Core wrote keeps its common state and objects in pickles: read them; tensors,
            plain values and containers. Instead of objects of other classes there are inert `UnknownObject`s, and a warning
            names them; what is given to `torch.serialization.add_safe_globals` is made.

    Returns:
        the state dict, common state included; under a `strict` that returns keys, also the missing and the unexpected ones.

    Raises:
        CheckpointNotFoundError: the folder does not exist or holds no complete checkpoint.
        ConfigurationError: a strategy cannot read it; or pickles would have to be read.
        MissingStateError, ShapeMismatchError, ShardingError: what is asked for does not fit what is there.
        CorruptCheckpointError: bytes are missing or not as they were written.
    """
    topology, folder = current_topology(), local_path(checkpoint_dir, "checkpoint_dir")
    with topology.operation(f"load of {folder}"):
        with topology.phase("common state"):
            handling = parse_strict_flag(strict)
            if allow_pickle and common_strategy in (None, ("torch", 1)) and _is_pickled(folder):
                common_strategy = _of_pickles()
            sharded, common = verify_checkpoint_and_load_strategy(str(folder), sharded_strategy, common_strategy)
            state = common.load_common(folder)
            wanted, local, factories = prepared_to_load(sharded_state_dict)
            merge(state, local)
            saved = None
            if StrictHandling.requires_explicit_ckpt_mismatch_check(handling):
                saved = _sharded_metadata(folder, sharded, common)
        local_metadata, everybodys = None, None
        if validate_access_integrity or StrictHandling.requires_global_app_metadata(handling):
            local_metadata, everybodys = determine_global_metadata(wanted)
        wanted, missing, unexpected = validate_integrity_and_strict_load(
            wanted, handling, validate_access_integrity, local_metadata, everybodys, saved
        )
        if not sharded.can_handle_sharded_objects:
            objects, wanted = extract_matching_values(wanted, lambda value: isinstance(value, ShardedObject))
            with topology.phase("objects"):
                validate_sharded_objects_handling(sharded, common)
                merge(state, common.load_sharded_objects(objects, folder))
        merge(state, sharded.load(wanted, folder))
        with topology.phase("merge"):
            apply_factory_merges(state, factories)
    if StrictHandling.requires_returning_mismatch_keys(handling):
        return state, missing, unexpected
    return state


def load_common_state_dict(checkpoint_dir: str | Path, *, allow_pickle: bool = False) -> StateDict:
    """Load what is not sharded. Any process, alone."""
    common = _of_pickles() if allow_pickle and _is_pickled(Path(checkpoint_dir)) else None
    _, strategy = verify_checkpoint_and_load_strategy(str(checkpoint_dir), None, common)
    return strategy.load_common(Path(checkpoint_dir))


def load_tensors_metadata(
    checkpoint_dir: str | Path, sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None
) -> CkptShardedMetadata:
    """Describe the tensors in a checkpoint: key -> ShardedTensor without data and uncut. Any process, alone."""
    strategy, _ = verify_checkpoint_and_load_strategy(str(checkpoint_dir), sharded_strategy)
    return strategy.load_tensors_metadata(Path(checkpoint_dir))


def load_sharded_metadata(
    checkpoint_dir: str | Path,
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None,
    common_strategy: LoadCommonStrategy | tuple[str, int] | None = None,
) -> CkptShardedMetadata:
    """Describe the tensors and objects in a checkpoint; objects go by their unique key. Any process, alone."""
    sharded, common = verify_checkpoint_and_load_strategy(str(checkpoint_dir), sharded_strategy, common_strategy)
    return _sharded_metadata(Path(checkpoint_dir), sharded, common)


def load_plain_tensors(checkpoint_dir: str | Path) -> StateDict:
    """Load all tensors whole: key -> tensor. The common state is not among them. Any process, alone."""
    with use_topology(Topology.alone()):
        strategy, _ = verify_checkpoint_and_load_strategy(str(checkpoint_dir))
        return strategy.load(strategy.load_tensors_metadata(Path(checkpoint_dir)), Path(checkpoint_dir))


def remove_sharded_tensors(checkpoint_dir: str | Path, key_prefix: str) -> None:
    """Remove every tensor whose key starts with `key_prefix`; what remains is a whole checkpoint. Collective."""
    topology = current_topology()
    with topology.operation(f"removal of {key_prefix}* from {checkpoint_dir}"):
        with topology.phase("look at the checkpoint"):
            strategy, _ = verify_checkpoint_and_load_strategy(str(checkpoint_dir))
        strategy.remove_sharded_tensors(str(checkpoint_dir), key_prefix)


def _complete(config: CheckpointingConfig, folder: Path, topology: Topology, mark: SaveMarker | None) -> None:
    """The last step of a save. Should another rank fail in it, the error says that the checkpoint is complete all the same."""
    with topology.phase("complete") as phase:
        if mark is not None:
            mark.require()
            topology.require_awaited()
            save_config(config, folder)
            phase.stands = f"{folder} is complete"
            mark.remove()


def _sharded_metadata(folder: Path, sharded: LoadShardedStrategy, common: LoadCommonStrategy) -> CkptShardedMetadata:
    found = dict(sharded.load_sharded_metadata(folder))
    if not sharded.can_handle_sharded_objects:
        validate_sharded_objects_handling(sharded, common)
        found |= common.load_sharded_metadata(folder)
    return found


def _is_pickled(folder: Path) -> bool:
    config = maybe_load_config(str(folder))
    return config is not None and config.common_backend == "torch"


def _of_pickles() -> LoadCommonStrategy:
    """What reads the pickles of a user who has allowed that."""
    return TorchCommonLoadStrategy(allow_pickle=True, unknown="keep")


def get_default_save_sharded_strategy(backend: str = "zarr", version: int = 1) -> SaveShardedStrategy:
    """The strategy that `save` takes when none is given."""
    return get_default_strategy(StrategyAction.SAVE_SHARDED, backend, version)


def get_default_save_common_strategy(backend: str = "json", version: int = 1) -> SaveCommonStrategy:
    """The strategy for the common state that `save` takes when none is given."""
    return get_default_strategy(StrategyAction.SAVE_COMMON, backend, version)


def get_default_load_sharded_strategy(checkpoint_dir: str | Path) -> LoadShardedStrategy:
    """The strategy that `load` takes for a checkpoint when none is given."""
    return verify_checkpoint_and_load_strategy(str(checkpoint_dir))[0]


def _sharded_saver(given: object) -> SaveShardedStrategy:
    if isinstance(given, tuple) and given[0] == "torch_dist":
        raise ConfigurationError(
            'sharded_strategy ("torch_dist", ...) is not offered; save with ("zarr", 1) or ("tensorstore", 1)'
        )
    strategy: SaveShardedStrategy = chosen_strategy(
        given or ("zarr", 1), SaveShardedStrategy, StrategyAction.SAVE_SHARDED, "sharded_strategy"
    )
    return strategy


def _common_saver(given: object) -> SaveCommonStrategy:
    if isinstance(given, tuple) and given[0] == "torch":
        TorchCommonSaveStrategy(*given)  # raises
    strategy: SaveCommonStrategy = chosen_strategy(
        given or ("json", 1), SaveCommonStrategy, StrategyAction.SAVE_COMMON, "common_strategy"
    )
    return strategy
