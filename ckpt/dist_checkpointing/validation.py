"""Strategies of a load, and keys that only the checkpoint or only the program has. Names follow Megatron-Core.

*Missing* are keys of the checkpoint that nobody requests, *unexpected* are requested keys that the checkpoint does not have: as in
Megatron-Core, and the reverse of torch's `load_state_dict`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from pathlib import Path

from ckpt.dist_checkpointing.common_state import compare_common as compare_common
from ckpt.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from ckpt.dist_checkpointing.global_metadata import GlobalMetadata, LocalMetadata
from ckpt.dist_checkpointing.global_metadata import determine_global_metadata as determine_global_metadata
from ckpt.dist_checkpointing.integrity import check_sharding, named_ranks
from ckpt.dist_checkpointing.mapping import CommonStateDict, ShardedBase, ShardedStateDict
from ckpt.dist_checkpointing.strategies.base import (
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
    StrategyAction,
    chosen_strategy,
)
from ckpt.errors import CheckpointNotFoundError, ConfigurationError, MissingStateError, logger_of
from ckpt.format.places import ObjectPath, as_place
from ckpt.loading.report import some_of
from ckpt.ranks.default_topology import current_topology
from ckpt.ranks.merging import Alike, alike
from ckpt.storage.metadata import CONFIG_FNAME, maybe_load_config, other_format

CkptShardedMetadata = Mapping[str, ShardedBase]
"""Tensors and objects of a checkpoint, without data. Their `key` counts, not the mapping's."""

logger = logger_of(__name__)


class StrictHandling(Enum):
    """Treatment of missing and unexpected keys in a load.

    All but ASSUME_OK_UNEXPECTED read the checkpoint's metadata before the load. Those that end in `_ALL` also need the requests of
    every rank, because a key is missing only if no rank requests it; they cost nothing more where `validate_access_integrity`
    exchanges these anyway.

    Attributes:
        ASSUME_OK_UNEXPECTED: no check; the strategy fails at an unexpected key.
        LOG_UNEXPECTED: skip unexpected keys, with a warning on every rank.
        LOG_ALL: the same, and a warning about missing keys.
        RAISE_UNEXPECTED: fail on unexpected keys, before anything is loaded.
        RAISE_ALL: fail on unexpected and on missing keys.
        RETURN_UNEXPECTED: skip unexpected keys; `load` returns them besides the state.
        RETURN_ALL: the same, and `load` returns missing keys.
        IGNORE_ALL: skip unexpected keys silently.
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    LOG_UNEXPECTED = "log_unexpected"
    LOG_ALL = "log_all"
    RAISE_UNEXPECTED = "raise_unexpected"
    RAISE_ALL = "raise_all"
    RETURN_UNEXPECTED = "return_unexpected"
    RETURN_ALL = "return_all"
    IGNORE_ALL = "ignore_all"

    @staticmethod
    def requires_explicit_ckpt_mismatch_check(val: StrictHandling) -> bool:
        """Whether requested keys are compared with the checkpoint's before the load."""
        return val is not StrictHandling.ASSUME_OK_UNEXPECTED

    @staticmethod
    def requires_global_app_metadata(val: StrictHandling) -> bool:
        """Whether the comparison needs the requests of all ranks."""
        return val in _ALL

    @staticmethod
    def requires_returning_mismatch_keys(val: StrictHandling) -> bool:
        """Whether `load` returns missing and unexpected keys besides the state."""
        return val in (StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL)


_ALL = (StrictHandling.LOG_ALL, StrictHandling.RAISE_ALL, StrictHandling.RETURN_ALL, StrictHandling.IGNORE_ALL)
_LOG = (StrictHandling.LOG_UNEXPECTED, StrictHandling.LOG_ALL)
_RAISE = (StrictHandling.RAISE_UNEXPECTED, StrictHandling.RAISE_ALL)


def parse_strict_flag(strict: str | StrictHandling) -> StrictHandling:
    """Return the `StrictHandling` member for itself or its string.

    Raises:
        ConfigurationError: unknown string.
    """
    try:
        return StrictHandling(strict)
    except ValueError:
        known = ", ".join(choice.value for choice in StrictHandling)
        raise ConfigurationError(f"strict is {strict!r}; give one of {known}") from None


def validate_integrity_and_strict_load(
    sharded_state_dict: ShardedStateDict,
    strict: StrictHandling,
    validate_access_integrity: bool,
    local_metadata: LocalMetadata | None = None,
    global_metadata: GlobalMetadata | Sequence[LocalMetadata] | None = None,
    ckpt_sharded_metadata: CkptShardedMetadata | None = None,
) -> tuple[ShardedStateDict, set[str], set[str]]:
    """Compare requested keys with the checkpoint's, and the ranks' requests with each other. Collective.

    Errors and log lines are equal on all ranks and name the keys of all of them.

    Args:
        validate_access_integrity: check that the ranks together request every shard exactly once: see `check_sharding`.
        local_metadata: requests of this rank; None: those of the state dict.
        global_metadata: requests of all ranks. May be None where neither `strict` nor `validate_access_integrity` needs it.
        ckpt_sharded_metadata: contents of the checkpoint. May be None where `strict` does not need it.

    Returns:
        (the state dict, without unexpected keys except under ASSUME_OK_UNEXPECTED; missing keys, equal on all ranks; this rank's
        unexpected keys). Missing keys are empty where `strict` does not ask for them.

    Raises:
        MissingStateError: keys are missing or unexpected, and `strict` raises.
        ShardingError: the requested shards overlap or leave a gap.
        ConfigurationError: needed metadata are None, or `strict` differs between ranks.
    """
    topology = current_topology()
    missing: set[str] = set()
    unexpected: set[str] = set()
    with topology.phase("compare keys") as phase:
        if validate_access_integrity and global_metadata is None:
            raise ConfigurationError(
                "validate_access_integrity needs global_metadata; get it by determine_global_metadata"
            )
        if StrictHandling.requires_explicit_ckpt_mismatch_check(strict):
            missing, unexpected = _misfits(
                strict,
                [*nested_values(sharded_state_dict)] if local_metadata is None else local_metadata,
                global_metadata,
                ckpt_sharded_metadata,
            )
            sharded_state_dict = adjust_non_strict_load(sharded_state_dict, unexpected)
        if strict is StrictHandling.IGNORE_ALL:
            unexpected = set()
        is_reported = strict in (*_LOG, *_RAISE)
        phase.merge = {"strict": alike(strict.value)}
        phase.answer = lambda: _require_one_flag(phase.merged["strict"])
        if is_reported and (missing or unexpected):
            phase.payload = [sorted(missing), sorted(unexpected)]
    all_missing, all_unexpected = zip(*(payload or ([], []) for payload in phase.payloads), strict=True)
    if any(all_missing) or any(all_unexpected):
        keys_missing = sorted({key for keys in all_missing for key in keys})
        _report(keys_missing, all_unexpected, raises=strict in _RAISE)
    if validate_access_integrity:
        assert global_metadata is not None, "all ranks have just agreed on that"
        check_sharding(global_metadata)
    return sharded_state_dict, missing, unexpected


def _require_one_flag(strict: Alike) -> None:
    if not strict.is_alike:
        raise ConfigurationError(
            f"strict is {strict.value} on rank 0 and {strict.odd_value} on rank {strict.odd_rank}; give the same on all ranks"
        )


def adjust_non_strict_load(
    sharded_state_dict: ShardedStateDict, sharded_keys_to_remove: Collection[str]
) -> ShardedStateDict:
    """Return the state dict without the sharded values of these keys. Removed list elements leave no gap."""
    gone = set(sharded_keys_to_remove)
    _, kept = extract_matching_values(sharded_state_dict, lambda x: isinstance(x, ShardedBase) and x.key in gone)
    return kept


def maybe_report_missing_and_unexpected_keys(
    missing_keys: Collection[str], unexpected_keys: Collection[str], raise_error: bool = True
) -> None:
    """Raise or warn if there are missing or unexpected keys. Not collective.

    Raises:
        MissingStateError: there are some, and `raise_error`.
    """
    if missing_keys or unexpected_keys:
        _report(sorted(missing_keys), [sorted(unexpected_keys)], raises=raise_error)


def _misfits(
    strict: StrictHandling,
    local: LocalMetadata,
    all_ranks: GlobalMetadata | Sequence[LocalMetadata] | None,
    checkpoint: CkptShardedMetadata | None,
) -> tuple[set[str], set[str]]:
    """Return (missing keys if `strict` asks for them, unexpected keys of this rank)."""
    if checkpoint is None:
        raise ConfigurationError(
            f"strict={strict.value} compares with the checkpoint and needs ckpt_sharded_metadata; get it by load_sharded_metadata"
        )
    saved = {entry.key for entry in checkpoint.values()}
    unexpected = {leaf.key for leaf in local} - saved
    if strict is StrictHandling.IGNORE_ALL or not StrictHandling.requires_global_app_metadata(strict):
        return set(), unexpected
    if all_ranks is None:
        raise ConfigurationError(
            f"strict={strict.value} needs what all ranks request, global_metadata; get it by determine_global_metadata"
        )
    return saved - GlobalMetadata.of(all_ranks).keys, unexpected


def _report(missing: Sequence[str], unexpected: Sequence[Sequence[str]], *, raises: bool) -> None:
    """Raise or warn. "Missing keys" and "Unexpected keys" are Megatron-Core's words, for programs that search logs for them.

    Args:
        unexpected: by rank; a single rank is not named.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, keys in enumerate(unexpected):
        for key in keys:
            ranks_of.setdefault(key, []).append(rank)
    asked_by = {key: f" ({named_ranks(ranks)})" if len(unexpected) > 1 else "" for key, ranks in ranks_of.items()}
    parts = []
    if missing:
        parts.append(f"Missing keys (in the checkpoint, not requested): {some_of(missing)}")
    if asked_by:
        parts.append(
            f"Unexpected keys (requested, not in the checkpoint): {some_of([key + who for key, who in asked_by.items()])}"
        )
    differ = f"the sharded state dict and the checkpoint differ in their keys; {'; '.join(parts)}"
    if raises:
        raise MissingStateError(
            f"{differ}. Request what was saved, or load with strict=log_all to go on without these."
        )
    logger.warning("%s; the load goes on without these", differ)


Format = tuple[str, int]
"""A backend and the version of its format."""


def verify_checkpoint_and_load_strategy(
    checkpoint_dir: str | os.PathLike[str] | ObjectPath,
    sharded_strategy: LoadShardedStrategy | Format | None = None,
    common_strategy: LoadCommonStrategy | Format | None = None,
) -> tuple[LoadShardedStrategy, LoadCommonStrategy]:
    """Return the (sharded, common) strategies for a load, checked against the checkpoint's formats. Not collective.

    Args:
        sharded_strategy: an object, or the format whose default strategy to take; None: the checkpoint's own format.
        common_strategy: the same for the common state.

    Raises:
        CheckpointNotFoundError: the folder holds no complete distributed checkpoint.
        ConfigurationError: a strategy does not read the checkpoint's format, or none is registered.
    """
    place = as_place(checkpoint_dir, "checkpoint_dir")
    if isinstance(place, Path) and not place.is_dir():
        raise CheckpointNotFoundError(
            f"{checkpoint_dir} does not exist, or is no folder; give the folder of a checkpoint"
        )
    saved = maybe_load_config(checkpoint_dir)
    if saved is None:
        raise CheckpointNotFoundError(
            other_format(checkpoint_dir)
            or f"{checkpoint_dir} is not a distributed checkpoint: it has no {CONFIG_FNAME}, which is written last; take a checkpoint "
            "whose save has ended"
        )
    try:
        format_ = saved.sharded_backend, saved.sharded_backend_version
        sharded: LoadShardedStrategy = chosen_strategy(sharded_strategy or format_, StrategyAction.LOAD_SHARDED)
        sharded.check_backend_compatibility(saved.sharded_backend)
    except ConfigurationError as error:
        other = other_format(checkpoint_dir)  # a program may have registered a strategy for it, so ask only now
        if other is None:
            raise
        raise ConfigurationError(other) from error
    format_ = saved.common_backend, saved.common_backend_version
    common: LoadCommonStrategy = chosen_strategy(common_strategy or format_, StrategyAction.LOAD_COMMON)
    sharded.check_version_compatibility(saved.sharded_backend_version)
    common.check_backend_compatibility(saved.common_backend)
    common.check_version_compatibility(saved.common_backend_version)
    return sharded, common


def validate_sharded_objects_handling(
    sharded_strategy: SaveShardedStrategy | LoadShardedStrategy,
    common_strategy: SaveCommonStrategy | LoadCommonStrategy,
) -> None:
    """Check that one of the two strategies handles ShardedObjects.

    Raises:
        ConfigurationError: neither does.
    """
    if not (sharded_strategy.can_handle_sharded_objects or common_strategy.can_handle_sharded_objects):
        raise ConfigurationError(
            f"neither {type(sharded_strategy).__name__} nor {type(common_strategy).__name__} handles ShardedObjects; give a common "
            'strategy that does, such as the default of ("json", 1)'
        )


def validate_sharding_integrity(
    global_metadata: GlobalMetadata | Sequence[LocalMetadata], common_state_dict: CommonStateDict | None = None
) -> None:
    """Check that the ranks' shards form one state: see `check_sharding`.

    Args:
        global_metadata: equal on every rank.
        common_state_dict: if given, compared with the other ranks' (`compare_common`); the call is then collective.

    Raises:
        ShardingError: a shard overlaps another or is missing. Equal on every rank.
    """
    if common_state_dict is not None:
        compare_common(common_state_dict)
    check_sharding(global_metadata)
