"""What happens where a load and a checkpoint do not hold the same keys.

*Missing* are keys of the checkpoint that nobody requests, *unexpected* are requested keys that the checkpoint does not have: as in
Megatron-Core, and the other way round than in torch's `load_state_dict`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from enum import Enum

from ckpt.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from ckpt.dist_checkpointing.mapping import ShardedBase, ShardedStateDict
from ckpt.dist_checkpointing.state.global_metadata import GlobalMetadata, LocalMetadata
from ckpt.dist_checkpointing.state.integrity import check_sharding, named_ranks
from ckpt.errors import ConfigurationError, MissingStateError
from ckpt.loading.report import some_of
from ckpt.ranks.job import current_topology

CkptShardedMetadata = Mapping[str, ShardedBase]
"""The tensors and objects of a checkpoint, without data, under whatever name; their `key` counts."""

logger = logging.getLogger("ckpt.dist_checkpointing.validation")
"""That of the module which callers know; `ckpt.dist_checkpointing.validation` has it too."""


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
