"""Checks before a save and a load, and the choice of a load's strategies. Names follow megatron.core.dist_checkpointing.validation."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from ckpt.dist_checkpointing.common_state import compare_common
from ckpt.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from ckpt.dist_checkpointing.global_metadata import (
    Column,
    Columns,
    GlobalMetadata,
    LocalMetadata,
    Sharded,
    column_of_json,
)
from ckpt.dist_checkpointing.integrity import check_sharding, named_ranks
from ckpt.dist_checkpointing.mapping import CommonStateDict, ShardedBase, ShardedStateDict
from ckpt.dist_checkpointing.strategies.base import (
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
    StrategyAction,
    get_default_strategy,
)
from ckpt.errors import CheckpointNotFoundError, ConfigurationError, MissingStateError
from ckpt.format.manifest import digest_of
from ckpt.format.metadata import CONFIG_FNAME, maybe_load_config, other_format
from ckpt.loading.report import some_of
from ckpt.ranks.job import current_topology

__all__ = [
    "CkptShardedMetadata",
    "GlobalMetadata",
    "LocalMetadata",
    "StrictHandling",
    "adjust_non_strict_load",
    "compare_common",
    "determine_global_metadata",
    "logger",
    "maybe_report_missing_and_unexpected_keys",
    "parse_strict_flag",
    "validate_integrity_and_strict_load",
    "validate_sharded_objects_handling",
    "validate_sharding_integrity",
    "verify_checkpoint_and_load_strategy",
]

CkptShardedMetadata = Mapping[str, ShardedBase]
"""The tensors and objects of a checkpoint, without data, under whatever name; their `key` counts."""

logger = logging.getLogger(__name__)


class StrictHandling(Enum):
    """How a load takes keys that are missing or unexpected.

    All but the first look at the checkpoint's metadata before the load. Those that end in `_all` need to know what every rank
    requests, too, because a key is missing only if no rank wants it; they cost nothing more where `validate_access_integrity`
    exchanges that anyway.
    """

    ASSUME_OK_UNEXPECTED = "assume_ok_unexpected"
    """Nothing is looked at before; the strategy fails at an unexpected key."""
    LOG_UNEXPECTED = "log_unexpected"
    """Unexpected keys are left out, with a warning on every rank."""
    LOG_ALL = "log_all"
    """The same, and a warning of missing keys."""
    RAISE_UNEXPECTED = "raise_unexpected"
    """Unexpected keys are an error, before anything is loaded."""
    RAISE_ALL = "raise_all"
    """Unexpected and missing keys are."""
    RETURN_UNEXPECTED = "return_unexpected"
    """Unexpected keys are left out, and `load` returns them with what was loaded."""
    RETURN_ALL = "return_all"
    """The same, and it returns missing keys."""
    IGNORE_ALL = "ignore_all"
    """Unexpected keys are left out, and nothing is said."""

    @staticmethod
    def requires_explicit_ckpt_mismatch_check(val: StrictHandling) -> bool:
        """Whether requested keys are compared with the checkpoint's before the load."""
        return val is not StrictHandling.ASSUME_OK_UNEXPECTED

    @staticmethod
    def requires_global_app_metadata(val: StrictHandling) -> bool:
        """Whether that takes what all ranks request."""
        return val in _ALL

    @staticmethod
    def requires_returning_mismatch_keys(val: StrictHandling) -> bool:
        """Whether `load` returns missing and unexpected keys besides the state."""
        return val in (StrictHandling.RETURN_UNEXPECTED, StrictHandling.RETURN_ALL)


_ALL = (StrictHandling.LOG_ALL, StrictHandling.RAISE_ALL, StrictHandling.RETURN_ALL, StrictHandling.IGNORE_ALL)
_LOG = (StrictHandling.LOG_UNEXPECTED, StrictHandling.LOG_ALL)
_RAISE = (StrictHandling.RAISE_UNEXPECTED, StrictHandling.RAISE_ALL)


def parse_strict_flag(strict: str | StrictHandling) -> StrictHandling:
    """Return the member that a user means, by itself or by its string.

    Raises:
        ConfigurationError: there is no such member.
    """
    try:
        return StrictHandling(strict)
    except ValueError:
        known = ", ".join(one.value for one in StrictHandling)
        raise ConfigurationError(f"strict is {strict!r}; give one of {known}") from None


def validate_integrity_and_strict_load(
    sharded_state_dict: ShardedStateDict,
    strict: StrictHandling,
    validate_access_integrity: bool,
    local_metadata: LocalMetadata | None = None,
    global_metadata: GlobalMetadata | Sequence[LocalMetadata] | None = None,
    ckpt_sharded_metadata: CkptShardedMetadata | None = None,
) -> tuple[ShardedStateDict, set[str], set[str]]:
    """Compare what is requested with what the checkpoint holds, and what the ranks request with each other. Collective.

    Every rank raises what any rank has to raise, and every rank logs the same: what there is to say of all of them.

    Args:
        validate_access_integrity: make sure that together the ranks request every shard, each once: see `check_sharding`.
        local_metadata: what this rank requests; None: it is taken from the state dict.
        global_metadata: what all ranks request. May be None where neither `strict` nor `validate_access_integrity` needs it.
        ckpt_sharded_metadata: what the checkpoint holds. May be None where `strict` does not need it.

    Returns:
        (the state dict, without unexpected keys unless those are assumed away; missing keys, equal on all ranks; this rank's
        unexpected keys). Missing keys are empty where `strict` does not ask for them.

    Raises:
        MissingStateError: keys are missing or unexpected, and `strict` raises.
        ShardingError: the shards that the ranks request leave a hole or overlap.
        ConfigurationError: metadata are None that are needed.
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
        told = strict in (*_LOG, *_RAISE)
        phase.payload = [strict.value, sorted(missing), sorted(unexpected)] if told else [strict.value, [], []]
    flags, everybodys_missing, everybodys_unexpected = zip(*phase.payloads, strict=True)
    if len(set(flags)) > 1:
        raise ConfigurationError(f"strict differs between the ranks: {', '.join(flags)}, by rank; give the same on all")
    if any(everybodys_missing) or any(everybodys_unexpected):
        everything_missing = sorted({key for keys in everybodys_missing for key in keys})
        _report(everything_missing, everybodys_unexpected, raises=strict in _RAISE)
    if validate_access_integrity:
        assert global_metadata is not None, "all ranks have just agreed on that"
        check_sharding(global_metadata)
    return sharded_state_dict, missing, unexpected


def adjust_non_strict_load(
    sharded_state_dict: ShardedStateDict, sharded_keys_to_remove: Collection[str]
) -> ShardedStateDict:
    """Return a state dict without the ShardedBase objects of these keys; what is left of a list closes ranks."""
    gone = set(sharded_keys_to_remove)
    _, kept = extract_matching_values(sharded_state_dict, lambda x: isinstance(x, ShardedBase) and x.key in gone)
    return kept


def maybe_report_missing_and_unexpected_keys(
    missing_keys: Collection[str], unexpected_keys: Collection[str], raise_error: bool = True
) -> None:
    """Raise, or log as a warning, that keys are missing or unexpected; do nothing if there are none. Not collective.

    Raises:
        MissingStateError: there are some, and `raise_error`.
    """
    if missing_keys or unexpected_keys:
        _report(sorted(missing_keys), [sorted(unexpected_keys)], raises=raise_error)


def _misfits(
    strict: StrictHandling,
    local: LocalMetadata,
    everybodys: GlobalMetadata | Sequence[LocalMetadata] | None,
    checkpoint: CkptShardedMetadata | None,
) -> tuple[set[str], set[str]]:
    """Missing keys, if they are asked for, and this rank's unexpected ones."""
    if checkpoint is None:
        raise ConfigurationError(
            f"strict={strict.value} compares with the checkpoint and needs ckpt_sharded_metadata; get it by load_sharded_metadata"
        )
    saved = {one.key for one in checkpoint.values()}
    unexpected = {one.key for one in local} - saved
    if strict is StrictHandling.IGNORE_ALL or not StrictHandling.requires_global_app_metadata(strict):
        return set(), unexpected
    if everybodys is None:
        raise ConfigurationError(
            f"strict={strict.value} needs what all ranks request, global_metadata; get it by determine_global_metadata"
        )
    return saved - GlobalMetadata.of(everybodys).keys, unexpected


def _report(missing: Sequence[str], unexpected: Sequence[Sequence[str]], *, raises: bool) -> None:
    """Raise, or log as a warning.

    The words "Missing keys" and "Unexpected keys" are those of Megatron-Core's messages, for programs that search logs for them.

    Args:
        unexpected: by rank; where there is but one, it is not named.
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


def determine_global_metadata(sharded_state_dict: ShardedStateDict) -> tuple[list[Sharded], GlobalMetadata]:
    """Let every rank know what each of them holds. Collective.

    What several ranks say alike crosses once: first come digests, then each column from the lowest rank that has it.

    Args:
        sharded_state_dict: nested, of ShardedTensors and ShardedObjects alone.

    Returns:
        (what this rank holds, what every rank holds), without data.

    Raises:
        ConfigurationError: a rank gives something else; on every rank.
    """
    topology = current_topology()
    with topology.phase("metadata") as phase:
        mine = Columns.of(nested_values(sharded_state_dict))
        local = [one.without_data() for one in nested_values(sharded_state_dict)]
        phase.payload = [digest_of(json.dumps(column, separators=(",", ":")).encode()) for column in mine]
    digests: list[list[str]] = phase.payloads
    first_with: dict[str, int] = {}
    for rank, of_rank in enumerate(digests):
        for digest in of_rank:
            first_with.setdefault(digest, rank)
    with topology.phase("columns of metadata") as phase:
        said = zip(digests[topology.rank], mine, strict=True)
        phase.payload = {digest: column for digest, column in said if first_with[digest] == topology.rank}
    trees = {digest: tree for sent in phase.payloads for digest, tree in sent.items()}
    known: dict[tuple[int, str], Column] = {}
    for of_rank in digests:
        for number, digest in enumerate(of_rank):
            if (number, digest) not in known:
                known[number, digest] = column_of_json(trees[digest], number)
    return local, GlobalMetadata([Columns(*(known[at] for at in enumerate(of_rank))) for of_rank in digests])


def verify_checkpoint_and_load_strategy(
    checkpoint_dir: str | os.PathLike[str],
    sharded_strategy: LoadShardedStrategy | Format | None = None,
    common_strategy: LoadCommonStrategy | Format | None = None,
) -> tuple[LoadShardedStrategy, LoadCommonStrategy]:
    """Return the strategies that load a checkpoint, each checked against what the checkpoint says it was written by. Not collective.

    Args:
        sharded_strategy: or the format whose default one is meant; None: of the checkpoint's own.
        common_strategy: the same for everything that is not sharded.

    Raises:
        CheckpointNotFoundError: there is no distributed checkpoint.
        ConfigurationError: a strategy does not read the checkpoint's format, or there is none.
    """
    if not Path(checkpoint_dir).is_dir():
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
        sharded: LoadShardedStrategy = chosen_strategy(
            sharded_strategy or format_, LoadShardedStrategy, StrategyAction.LOAD_SHARDED, "sharded_strategy"
        )
        sharded.check_backend_compatibility(saved.sharded_backend)
    except ConfigurationError as error:
        other = other_format(checkpoint_dir)  # for which a program may have registered a strategy
        if other is None:
            raise
        raise ConfigurationError(other) from error
    format_ = saved.common_backend, saved.common_backend_version
    common: LoadCommonStrategy = chosen_strategy(
        common_strategy or format_, LoadCommonStrategy, StrategyAction.LOAD_COMMON, "common_strategy"
    )
    sharded.check_version_compatibility(saved.sharded_backend_version)
    common.check_backend_compatibility(saved.common_backend)
    common.check_version_compatibility(saved.common_backend_version)
    return sharded, common


def validate_sharded_objects_handling(
    sharded_strategy: SaveShardedStrategy | LoadShardedStrategy,
    common_strategy: SaveCommonStrategy | LoadCommonStrategy,
) -> None:
    """Make sure that one of two strategies handles ShardedObjects.

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
    """Make sure that the ranks' shards make up one state: see `check_sharding`, which raises on every rank alike.

    Args:
        global_metadata: equal on every rank.
        common_state_dict: compared with the other ranks', too (`compare_common`); the call is collective if one is given.

    Raises:
        ShardingError: it names the key, the ranks, and what overlaps or is missing.
    """
    if common_state_dict is not None:
        compare_common(common_state_dict)
    check_sharding(global_metadata)


def chosen_strategy(given: object, kind: type, action: StrategyAction, name: str) -> Any:
    """Return the strategy that a caller gives, or the registered one if a format is given.

    Args:
        given: an object of `kind`, or (backend, version).
        name: of the caller's argument, for the error.

    Raises:
        ConfigurationError: it is neither, or nobody registered a strategy for the format.
    """
    if isinstance(given, tuple):
        return get_default_strategy(action, *given)
    if not isinstance(given, kind):
        what = f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
        raise ConfigurationError(
            f"{name}: {what} is no {kind.__name__}; give an object of that class, or (backend, version) of a registered one"
        )
    return given
