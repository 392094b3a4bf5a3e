"""Entry points: `save` and `load` of sharded state dicts, and a checkpoint's metadata. Names follow Megatron-Core.

A sharded state dict is nested; its ShardedTensors and ShardedObjects describe the pieces of one global state that this rank holds.
All other values are *common*: equal on all ranks, and saved by rank 0.

| step of `save` | writes |
|---|---|
| 1 apply factories, drop local objects | |
| 2 common state | `common/` |
| 3 ShardedObjects | `objects/` |
| 4 ShardedTensors | `sharded/`, `index-*.json`, `checkpoint_manifest.json` |
| 5 names of the formats | `metadata.json`; its presence marks the checkpoint as complete |
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ckpt.dist_checkpointing.dict_utils import extract_matching_values, merge
from ckpt.dist_checkpointing.folder.address import take_address
from ckpt.dist_checkpointing.folder.claim import SaveClaim, claimed
from ckpt.dist_checkpointing.folder.destination import take
from ckpt.dist_checkpointing.folder.saving import require_alike
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
    chosen_strategy,
    get_default_strategy,
)
from ckpt.dist_checkpointing.strategies.common import TorchCommonLoadStrategy, TorchCommonSaveStrategy
from ckpt.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from ckpt.dist_checkpointing.utils import split_for_load, split_for_save
from ckpt.dist_checkpointing.validation import (
    CkptShardedMetadata,
    StrictHandling,
    compare_common,
    determine_global_metadata,
    parse_strict_flag,
    validate_integrity_and_strict_load,
    validate_sharded_objects_handling,
    validate_sharding_integrity,
    verify_checkpoint_and_load_strategy,
)
from ckpt.errors import ConfigurationError, logger_of
from ckpt.format.places import Place, as_place, local_path
from ckpt.ranks.default_topology import current_topology, use_topology
from ckpt.ranks.merging import alike
from ckpt.ranks.topology import Topology
from ckpt.saving.background.async_utils import AsyncRequest
from ckpt.storage.metadata import TORCH_DIST, CheckpointingConfig, maybe_load_config

logger = logger_of(__name__)


def save(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | Place,
    sharded_strategy: SaveShardedStrategy | tuple[str, int] | None = None,
    common_strategy: SaveCommonStrategy | tuple[str, int] | None = None,
    validate_access_integrity: bool = True,
    async_sharded_save: bool = False,
    preprocess_common_before_consistancy_check: Callable[[CommonStateDict], StateDict] | None = None,
) -> AsyncRequest | None:
    """Save a sharded state dict into an existing folder, or to an address in an object store. Collective; fails on all ranks or on none.

    It becomes visible as a whole, at the end. What an interrupted save has left is removed first; other files in the folder stay.

    Args:
        sharded_state_dict: nested; not changed.
        sharded_strategy: an object, or (backend, version) of a registered one; None: ("zarr", 1).
        common_strategy: likewise; None: ("json", 1).
        validate_access_integrity: check that every shard and object has exactly one main replica, and warn if the ranks' common
            states differ.
        async_sharded_save: copy the tensors, and return the rest of the save as a request for the caller to schedule
            (`ckpt.saving.background.async_utils`). Its last finalizer writes metadata.json.
        preprocess_common_before_consistancy_check: returns the part of the common state that should be equal on all ranks; must
            not change its argument.

    Raises:
        CheckpointNotFoundError: the folder does not exist.
        FolderInUseError: another process saves there.
        CheckpointExistsError: it holds a checkpoint, or other files where a save puts its own.
        ConfigurationError: unknown strategy, one that cannot save asynchronously, or a value that is neither a tensor nor plain.
        ShardingError, ShapeMismatchError: the ranks' shards do not form global tensors.
    """
    topology, folder = current_topology(), as_place(checkpoint_dir, "checkpoint_dir")
    with topology.operation(f"save into {folder}"):
        with topology.phase("strategies") as phase:
            sharded, common = _sharded_saver(sharded_strategy), _common_saver(common_strategy)
            phase.merge = {
                "sharded_strategy": alike(sharded.described),
                "common_strategy": alike(common.described),
                "async_sharded_save": alike(async_sharded_save),
                "validate_access_integrity": alike(validate_access_integrity),
            }
            phase.answer = lambda: require_alike(phase.merged)
        claim = None
        try:
            with topology.phase("destination"):
                if async_sharded_save and not isinstance(sharded, AsyncSaveShardedStrategy):
                    raise ConfigurationError(
                        f"{sharded} saves before it returns: give async_sharded_save=False, or another strategy"
                    )
                tensors, common_state = split_for_save(sharded_state_dict)
                claim = _taken(folder, topology.progress) if topology.is_lead else None
        except BaseException:  # also that of another rank
            if claim is not None:
                claim.let_go()
            raise
        with claimed(claim):
            if validate_access_integrity:
                _, all_ranks = determine_global_metadata(tensors)
                with topology.phase("integrity"):
                    validate_sharding_integrity(all_ranks)
                compare_common(common_state, preprocess_common_before_consistancy_check)
            return _write(tensors, common_state, folder, sharded, common, claim, in_background=async_sharded_save)


def _taken(place: Place, progress: Callable[[], object]) -> SaveClaim:
    return take(place, progress) if isinstance(place, Path) else take_address(place, progress)


def _write(
    tensors: ShardedStateDict,
    common_state: StateDict,
    folder: Place,
    sharded: SaveShardedStrategy,
    common: SaveCommonStrategy,
    claim: SaveClaim | None,
    *,
    in_background: bool,
) -> AsyncRequest | None:
    """Write common state, objects, tensors and metadata.json into a folder that this save has claimed."""
    topology = current_topology()
    common.save_common(common_state, folder)
    if not sharded.can_handle_sharded_objects:
        validate_sharded_objects_handling(sharded, common)
        objects, tensors = extract_matching_values(tensors, lambda value: isinstance(value, ShardedObject))
        common.save_sharded_objects(objects, folder)
    config = CheckpointingConfig(sharded.backend, sharded.version, common.backend, common.version)
    if in_background:
        assert isinstance(sharded, AsyncSaveShardedStrategy)
        request = sharded.async_save(tensors, folder)
        request.add_finalize_fn(lambda: _complete(config, folder, topology, claim))
        if claim is not None:
            request.abandon_fns.append(claim.let_go)
        return request
    sharded.save(tensors, folder)
    _complete(config, folder, topology, claim)
    return None


def load(
    sharded_state_dict: ShardedStateDict,
    checkpoint_dir: str | Place,
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None,
    common_strategy: LoadCommonStrategy | tuple[str, int] | None = None,
    validate_access_integrity: bool = True,
    strict: str | StrictHandling = StrictHandling.ASSUME_OK_UNEXPECTED,
    *,
    allow_pickle: bool = False,
) -> StateDict | tuple[StateDict, set[str], set[str]]:
    """Load the state that a sharded state dict describes. Collective; fails on all ranks or on none.

    Args:
        sharded_state_dict: pieces of global tensors that this rank wants, sharded in any way. Not changed.
        sharded_strategy, common_strategy: an object, or (backend, version) of a registered one; None: of the checkpoint's formats.
        validate_access_integrity: check that the ranks together request every shard exactly once as main replica.
        strict: treatment of keys that are requested and not in the checkpoint (*unexpected*), or there and not requested
            (*missing*): Megatron-Core's words, the reverse of torch's.
        allow_pickle: read the pickles of a checkpoint that Megatron-Core wrote (common state, objects): tensors, plain values,
            containers, and classes given to `torch.serialization.add_safe_globals`. Objects of other classes become inert
            `UnknownObject`s, and a warning names them.

    Returns:
        the state dict, common state included; under a `strict` that returns keys, also the missing and the unexpected ones.

    Raises:
        CheckpointNotFoundError: the folder does not exist or holds no complete checkpoint.
        ConfigurationError: a strategy cannot read it; or it holds pickles and `allow_pickle` is False.
        MissingStateError, ShapeMismatchError, ShardingError: the requests do not fit the checkpoint.
        CorruptCheckpointError: bytes are missing or changed.
    """
    topology, folder = current_topology(), as_place(checkpoint_dir, "checkpoint_dir")
    with topology.operation(f"load of {folder}"):
        with topology.phase("common state"):
            handling = parse_strict_flag(strict)
            if allow_pickle and common_strategy in (None, ("torch", 1)):
                common_strategy = _of_pickles(folder) or common_strategy
            config = maybe_load_config(folder) if allow_pickle and sharded_strategy in (None, (TORCH_DIST, 1)) else None
            if config is not None and config.sharded_backend == TORCH_DIST:
                sharded_strategy = TorchDistLoadShardedStrategy(allow_pickle=True)
            sharded, common = verify_checkpoint_and_load_strategy(folder, sharded_strategy, common_strategy)
            state = common.load_common(folder)
            wanted, local, factories = split_for_load(sharded_state_dict)
            merge(state, local)
            saved = None
            if StrictHandling.requires_explicit_ckpt_mismatch_check(handling):
                saved = _sharded_metadata(folder, sharded, common)
        local_metadata, all_ranks = None, None
        if validate_access_integrity or StrictHandling.requires_global_app_metadata(handling):
            local_metadata, all_ranks = determine_global_metadata(wanted)
        wanted, missing, unexpected = validate_integrity_and_strict_load(
            wanted, handling, validate_access_integrity, local_metadata, all_ranks, saved
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


def load_common_state_dict(checkpoint_dir: str | Place, *, allow_pickle: bool = False) -> StateDict:
    """Load the common state. Any process, alone."""
    place = as_place(checkpoint_dir, "checkpoint_dir")
    _, strategy = verify_checkpoint_and_load_strategy(place, None, _of_pickles(place) if allow_pickle else None)
    return strategy.load_common(place)


def load_tensors_metadata(
    checkpoint_dir: str | Place, sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None
) -> CkptShardedMetadata:
    """Return the tensors of a checkpoint: key -> ShardedTensor of the whole, without data. Any process, alone."""
    place = as_place(checkpoint_dir, "checkpoint_dir")
    strategy, _ = verify_checkpoint_and_load_strategy(place, sharded_strategy)
    return strategy.load_tensors_metadata(place)


def load_sharded_metadata(
    checkpoint_dir: str | Place,
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None,
    common_strategy: LoadCommonStrategy | tuple[str, int] | None = None,
) -> CkptShardedMetadata:
    """Return the tensors by key and the objects by unique key, without data. Any process, alone."""
    place = as_place(checkpoint_dir, "checkpoint_dir")
    sharded, common = verify_checkpoint_and_load_strategy(place, sharded_strategy, common_strategy)
    return _sharded_metadata(place, sharded, common)


def load_plain_tensors(checkpoint_dir: str | Place) -> StateDict:
    """Load all tensors whole: key -> tensor, without the common state. Any process, alone."""
    with use_topology(Topology.alone()):
        place = as_place(checkpoint_dir, "checkpoint_dir")
        strategy, _ = verify_checkpoint_and_load_strategy(place)
        return strategy.load(strategy.load_tensors_metadata(place), place)


def remove_sharded_tensors(checkpoint_dir: str | Place, key_prefix: str) -> None:
    """Remove every tensor whose key starts with `key_prefix`; the rest stays a complete checkpoint. Collective."""
    topology = current_topology()
    with topology.operation(f"removal of {key_prefix}* from {checkpoint_dir}"):
        with topology.phase("look at the checkpoint"):
            local_path(checkpoint_dir, "checkpoint_dir")
            strategy, _ = verify_checkpoint_and_load_strategy(str(checkpoint_dir))
        strategy.remove_sharded_tensors(str(checkpoint_dir), key_prefix)


def _complete(config: CheckpointingConfig, folder: Place, topology: Topology, claim: SaveClaim | None) -> None:
    """Write metadata.json, the last step of a save. If another rank fails in it, the error says that the checkpoint is complete."""
    with topology.phase("complete") as phase:
        if claim is not None:
            claim.require()
            topology.require_awaited()
            claim.complete(config)
            phase.stands = f"{folder} is complete"
            claim.remove()


def _sharded_metadata(folder: Place, sharded: LoadShardedStrategy, common: LoadCommonStrategy) -> CkptShardedMetadata:
    found = dict(sharded.load_sharded_metadata(folder))
    if not sharded.can_handle_sharded_objects:
        validate_sharded_objects_handling(sharded, common)
        found |= common.load_sharded_metadata(folder)
    return found


def _of_pickles(folder: Place) -> LoadCommonStrategy | None:
    """Make the strategy that reads pickles, after the user allowed it; None: the common state is no pickle."""
    config = maybe_load_config(folder)
    is_pickled = config is not None and config.common_backend == "torch"
    return TorchCommonLoadStrategy(allow_pickle=True, unknown="keep") if is_pickled else None


def get_default_save_sharded_strategy(backend: str = "zarr", version: int = 1) -> SaveShardedStrategy:
    """Return the default `sharded_strategy` of `save`."""
    return get_default_strategy(StrategyAction.SAVE_SHARDED, backend, version)


def get_default_save_common_strategy(backend: str = "json", version: int = 1) -> SaveCommonStrategy:
    """Return the default `common_strategy` of `save`."""
    return get_default_strategy(StrategyAction.SAVE_COMMON, backend, version)


def get_default_load_sharded_strategy(checkpoint_dir: str | Place) -> LoadShardedStrategy:
    """Return the default `sharded_strategy` of `load` for a checkpoint."""
    return verify_checkpoint_and_load_strategy(checkpoint_dir)[0]


def _sharded_saver(given: object) -> SaveShardedStrategy:
    if isinstance(given, tuple) and given[:1] == ("torch_dist",):
        raise ConfigurationError(
            'sharded_strategy ("torch_dist", ...) is not offered; save with ("zarr", 1) or ("tensorstore", 1)'
        )
    strategy: SaveShardedStrategy = chosen_strategy(given or ("zarr", 1), StrategyAction.SAVE_SHARDED)
    return strategy


def _common_saver(given: object) -> SaveCommonStrategy:
    if isinstance(given, tuple) and given[:1] == ("torch",):
        TorchCommonSaveStrategy(*given)  # raises
    strategy: SaveCommonStrategy = chosen_strategy(given or ("json", 1), StrategyAction.SAVE_COMMON)
    return strategy
