"""Checks before a save and a load, and the choice of a load's strategies. Names follow megatron.core.dist_checkpointing.validation."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ckpt.dist_checkpointing.dict_utils import nested_values
from ckpt.dist_checkpointing.mapping import CommonStateDict, ShardedStateDict
from ckpt.dist_checkpointing.state.common_state import compare_common
from ckpt.dist_checkpointing.state.global_metadata import (
    Column,
    Columns,
    GlobalMetadata,
    LocalMetadata,
    Sharded,
    column_of_json,
)
from ckpt.dist_checkpointing.state.integrity import check_sharding
from ckpt.dist_checkpointing.state.strictness import (
    CkptShardedMetadata,
    StrictHandling,
    adjust_non_strict_load,
    logger,
    maybe_report_missing_and_unexpected_keys,
    parse_strict_flag,
    validate_integrity_and_strict_load,
)
from ckpt.dist_checkpointing.strategies.base import (
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
    StrategyAction,
    get_default_strategy,
)
from ckpt.errors import CheckpointNotFoundError, ConfigurationError
from ckpt.format.manifest import digest_of
from ckpt.format.metadata import CONFIG_FNAME, maybe_load_config, other_format
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
