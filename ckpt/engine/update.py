"""One update on one rank, what carries its bytes, and what takes its weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from ckpt.engine.base import NamedTensor, WeightVersion
from ckpt.engine.wire.delta import Changes
from ckpt.engine.wire.layout import WeightLayout, take_turns
from ckpt.engine.wire.pool import HostPool, ReceivedStream
from ckpt.ranks.topology import Topology


class Sink(Protocol):
    """What takes weights that have come: `ckpt.engine.live.LiveModel`, `InferenceOutlet`, or another of its kind."""

    def check(self, layout: WeightLayout) -> None:
        """Refuse what does not fit, before a byte moves."""

    def load(self, weights: Iterable[NamedTensor], version: WeightVersion) -> None:
        """Take whole tensors on the host, all at once. Does not fail for what `check` has passed, as far as that is in its hands."""


@dataclass
class Update:
    """One update under way on one rank.

    Attributes:
        layout, version: of what comes.
        digests: of every bucket, or of its blocks of `block_bytes`; None: as one.
        changes: what of it travels; None: everything.
        pool: of a trainer.
        landing: of a rollout.
        before: where a rollout has the version that `changes` begins from; None: where the buckets land.
        connections: equal on all ranks; another after each update that failed.
        reload_began: when the consumer got the weights, by the clock of `time.perf_counter`.
        failure: why it could not take them.
        seconds: of this rank, by the field of `SyncReport`.
        open: what ends it, behind the commit.
    """

    topology: Topology
    layout: WeightLayout
    version: WeightVersion
    digests: Mapping[int, str]
    block_bytes: int | None
    changes: Changes | None
    pool: HostPool | None
    landing: ReceivedStream | None
    before: ReceivedStream | None
    connections: str
    reload_began: float | None = None
    failure: Exception | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    open: AbstractContextManager[Any] = field(default_factory=nullcontext)

    @property
    def sent_bytes(self) -> int:
        return self.layout.num_bytes if self.changes is None else self.changes.num_bytes


class Transport(Protocol):
    """Carries buckets from the pools of trainers to the landings of rollouts. One on every rank; called by the members' thread.

    join -> ready, for each layout -> carry -> ... -> reset, after a failure -> ready -> carry -> ... -> leave
    """

    def owners(self, topology: Topology, trainers: Sequence[int]) -> list[int]:
        """The ranks that send, in turn. A trainer that is none of them stands for the first."""
        return take_turns(topology.nodes, trainers)

    def join(self, topology: Topology) -> None:
        """Get ready to carry bytes between ranks that have just joined. All ranks call it; it may have phases."""
        return

    def leave(self) -> None:
        """Let go of what is between the ranks; any may be gone."""
        return

    def ready(self, update: Update) -> None:
        """Get ready for a layout that is new, or for the first time. All ranks call it; it may have phases."""
        return

    def carry(self, update: Update) -> None:
        """Bring every bucket to every rollout, and verify it there. All ranks call it, within a phase.

        Raises:
            CorruptCheckpointError: a bucket has changed on the way.
            RankLeftError: another rank is gone.
        """

    def reset(self, landing: ReceivedStream) -> None:
        """Forget what a carry that failed, here or elsewhere, has left. Any rank may be gone; waits for none.

        Args:
            landing: of this rank; let go of, if something may still write to it.
        """
        return
