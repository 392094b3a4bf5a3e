"""Membership of updates while rollouts join and leave: epochs, the lead's calls, and the rendezvous of a job. Pure.

An epoch is the time between two changes of members. All epochs have the same trainers. Each rollout has a number, which is never reused
in the job, and in each epoch a rank of the engine: trainers first, then rollouts in the order in which they joined.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from ckpt.errors import CheckpointError, ConfigurationError, RankAbsentError
from ckpt.format import strict_json
from ckpt.format.strict_json import Digest


class Epoch(NamedTuple):
    """The members between two changes.

    Attributes:
        number: of the epoch; the founders' is 1.
        rollouts: their numbers, by rank of the engine.
        newcomers: rollouts that have not completed an update yet.
    """

    number: int
    num_trainers: int
    rollouts: tuple[int, ...]
    newcomers: tuple[int, ...] = ()

    @property
    def world_size(self) -> int:
        return self.num_trainers + len(self.rollouts)

    def rank_of(self, rollout: int) -> int:
        """Return the rank of a rollout in this epoch's engine."""
        return self.num_trainers + self.rollouts.index(rollout)

    def rollout_at(self, rank: int | None) -> int | None:
        """Return the number of the rollout with this rank; None: the rank is a trainer's, or out of range."""
        if rank is None or not self.num_trainers <= rank < self.world_size:
            return None
        return self.rollouts[rank - self.num_trainers]


def next_epoch(
    now: Epoch, *, proven: bool, ready: Collection[int], leaving: Collection[int], gone: Collection[int]
) -> Epoch:
    """Return the next epoch; `now` itself, if no rollout joins or leaves.

    Args:
        proven: an update of this epoch has succeeded, so it has no newcomers any more.
        ready: numbers of rollouts that wait to join.
        leaving: rollouts that want to leave.
        gone: rollouts that have died, or made an update fail.
    """
    out = {*leaving, *gone}
    staying = tuple(rollout for rollout in now.rollouts if rollout not in out)
    coming = tuple(sorted({*ready} - {*now.rollouts} - out))
    if staying + coming == now.rollouts:
        return now
    new = () if proven else tuple(newcomer for newcomer in now.newcomers if newcomer in staying)
    return Epoch(now.number + 1, now.num_trainers, staying + coming, new + coming)


def goes_on_after(error: CheckpointError, epoch: Epoch, *, proven: bool) -> bool:
    """Whether an update that failed by this error is made again, without the rollout that caused it. Equal on all ranks, as the error is.

    It is if a rank is gone, and if a newcomer made its first update fail, for whatever reason.
    """
    if isinstance(error, RankAbsentError):
        return True
    return not proven and epoch.rollout_at(error.rank) in epoch.newcomers


@dataclass(frozen=True, kw_only=True)
class Call:
    """The lead's call of all members to an update, or the last call, after which there are no updates.

    Attributes:
        number: of the call; members read calls in order.
        last_words: with the last call, JSON of the lead's for all rollouts, such as the digest of its weights.
        failure: the error that ended the job, as `ckpt.errors.describe` gives it.
    """

    number: int
    epoch: Epoch
    is_last: bool = False
    last_words: Any = None
    failure: dict[str, Any] | None = None

    def encode(self) -> bytes:
        # Not by msgspec, which refuses the names of files that are not UTF-8, and has no NaN.
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Call:
        return strict_json.convert(json.loads(data), cls)


@dataclass(frozen=True)
class News:
    """The newest version that all rollouts have, as the lead publishes it.

    Attributes:
        step, digest: see `ckpt.engine.base.WeightVersion`.
        layout: digest of its layout.
        buckets: digest of each bucket.
        peers: see `VersionedEngine.peers`.
    """

    step: int
    digest: str
    layout: str
    buckets: dict[int, str]
    peers: Any = None

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> News:
        return strict_json.decode(data, cls)


@dataclass(frozen=True)
class Rendezvous:
    """Address of a job that accepts rollouts, in a file of its run. Plain data: nothing in it is code, or names code to run.

    Attributes:
        address, port: of the first trainer's store.
        job: unique hex digits.
        facts: settings by which a rollout builds the same model: plain values, lists and dictionaries of them. No name in it begins
            with "_".
    """

    address: Annotated[str, Meta(pattern=r"\A[0-9A-Za-z.:%_-]{1,255}\Z")]
    port: Annotated[int, Meta(gt=0, lt=1 << 16)]
    job: Digest
    facts: Mapping[str, Any]

    def encode(self) -> bytes:
        return json.dumps(asdict(self), indent=2).encode() + b"\n"

    @classmethod
    def decode(cls, data: bytes, where: str) -> Rendezvous:
        """
        Raises:
            ConfigurationError: the data is not a rendezvous.
        """
        try:
            found = strict_json.convert(json.loads(data), cls)
            _require_names_of_data(found.facts, "facts")
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ConfigurationError(
                f"{where} is no rendezvous of a job that gives weights to rollouts: {error}"
            ) from error
        return found


def _require_names_of_data(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for name, field in value.items():
            if name.startswith("_"):
                raise ValueError(f"{where} holds {name!r}, which is no name of data")
            _require_names_of_data(field, f"{where}.{name}")
    elif isinstance(value, list):
        for item in value:
            _require_names_of_data(item, where)
