"""Who takes part in updates while rollouts come and go: epochs, the lead's calls, and where a job is found. Pure.

An epoch is the time between two changes of members. Trainers are the same in all of them; every rollout has a number that no other one
of the job ever had, and in each epoch a rank of the engine: trainers first, then rollouts in the order in which they came.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from ckpt.errors import CheckpointError, ConfigurationError, RankAbsentError
from ckpt.format.strict_json import Digest


class Epoch(NamedTuple):
    """The members, from one change to the next.

    Attributes:
        number: of the epoch; 1 is that of the founders.
        rollouts: their numbers, by rank of the engine.
        newcomers: those of them that have not ended an update with the others before.
    """

    number: int
    num_trainers: int
    rollouts: tuple[int, ...]
    newcomers: tuple[int, ...] = ()

    @property
    def world_size(self) -> int:
        return self.num_trainers + len(self.rollouts)

    def rank_of(self, rollout: int) -> int:
        """The rank of the engine that a rollout has in this epoch."""
        return self.num_trainers + self.rollouts.index(rollout)

    def rollout_at(self, rank: int | None) -> int | None:
        """The number of the rollout with this rank; None: it is a trainer's, or nobody's."""
        if rank is None or not self.num_trainers <= rank < self.world_size:
            return None
        return self.rollouts[rank - self.num_trainers]


def next_epoch(
    now: Epoch, *, proven: bool, ready: Collection[int], leaving: Collection[int], gone: Collection[int]
) -> Epoch:
    """Return the epoch behind this one; this one itself, if nobody comes or goes.

    Args:
        proven: an update of this epoch has ended well, so nobody in it is new any more.
        ready: numbers of rollouts that wait to come in.
        leaving: those that want to go.
        gone: those that have died, or that an update failed of.
    """
    out = {*leaving, *gone}
    staying = tuple(one for one in now.rollouts if one not in out)
    coming = tuple(sorted({*ready} - {*now.rollouts} - out))
    if staying + coming == now.rollouts:
        return now
    new = () if proven else tuple(one for one in now.newcomers if one in staying)
    return Epoch(now.number + 1, now.num_trainers, staying + coming, new + coming)


def goes_on_after(error: CheckpointError, epoch: Epoch, *, proven: bool) -> bool:
    """Whether an update that failed so may be made again, without the rollout that it failed of. Alike on all ranks, as the error is.

    It may where somebody is gone, and where the first update of a newcomer failed of that one, whatever it is that it cannot do.
    """
    if isinstance(error, RankAbsentError):
        return True
    return not proven and epoch.rollout_at(error.rank) in epoch.newcomers


def culprit(error: CheckpointError, epoch: Epoch) -> int | None:
    """The number of the rollout that an update failed of, as far as the error says."""
    return epoch.rollout_at(error.rank)


@dataclass(frozen=True, kw_only=True)
class Call:
    """What the lead says before each update: who makes it, or that there is none any more.

    Attributes:
        number: calls are made, and answered, one behind the other.
        last_words: there are no further updates; what the lead has to tell, as JSON, such as the digest of what it holds.
        failure: what ended the job, as `ckpt.errors.describe` gives it.
    """

    number: int
    epoch: Epoch
    is_last: bool = False
    last_words: Any = None
    failure: dict[str, Any] | None = None

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Call:
        return msgspec.json.decode(data, type=cls)


@dataclass(frozen=True)
class News:
    """What a job's lead tells of the newest version that all rollouts have.

    Attributes:
        step, digest: see `ckpt.engine.base.WeightVersion`.
        layout: digest of the layout in which it travelled.
        buckets: the digest of each of its buckets.
        peers: where another process could read the buckets, as the engine says it; None: nowhere.
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
        return msgspec.json.decode(data, type=cls)


@dataclass(frozen=True)
class Rendezvous:
    """Where a job that takes rollouts is to be found, as a file of its run says. Data alone: nothing in it is code, or names any to run.

    Attributes:
        address, port: of the first trainer's store.
        job: hex digits that no other job has.
        facts: what a rollout has to know of the job to have the same model: plain values, lists and dictionaries of them. No name
            in it begins with "_".
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
            ConfigurationError: it is not what `encode` makes.
        """
        try:
            found = msgspec.json.decode(data, type=cls)
            _require_names_of_data(found.facts, "facts")
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ConfigurationError(
                f"{where} is no rendezvous of a job that gives weights to rollouts: {error}"
            ) from error
        return found


def _require_names_of_data(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for name, one in value.items():
            if name.startswith("_"):
                raise ValueError(f"{where} holds {name!r}, which is no name of data")
            _require_names_of_data(one, f"{where}.{name}")
    elif isinstance(value, list):
        for one in value:
            _require_names_of_data(one, where)
