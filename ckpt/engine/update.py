"""One update on one rank, and the protocols of a transport, which carries its bytes, and a sink, which loads its weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from ckpt.engine.base import NamedTensor, WeightVersion
from ckpt.engine.wire.delta import Changes
from ckpt.engine.wire.layout import WeightLayout, take_turns
from ckpt.engine.wire.pool import HostPool, ReceivedStream
from ckpt.ranks.topology import Topology


class Sink(Protocol):
    """Loads weights that have arrived: `ckpt.engine.live_model.LiveModel`, `InferenceOutlet`, or a class of the user's."""

    def check(self, layout: WeightLayout) -> None:
        """Raise if the weights do not fit. Called before a byte moves."""

    def load(self, weights: Iterable[NamedTensor], version: WeightVersion) -> None:
        """Load whole host tensors: all, or none. Should not fail for a layout that `check` has passed.

        It must not write to them, nor keep them: other rollouts of the host read the same memory, and the next update overwrites it.
        """


@dataclass
class Update:
    """One update under way on one rank.

    Attributes:
        layout, version: of the weights that are sent.
        digests: of each bucket, by number.
        block_bytes: size of the blocks that digests are of; None: of whole buckets.
        changes: the parts that travel; None: everything.
        pool: on a trainer, the buckets that it sends.
        receive_buffer: on a rollout, the memory that buckets arrive in.
        receivers: the rollouts that buckets are sent to; any other reads the memory of one of them, on its host.
        before: on a rollout, the memory with the version that `changes` is based on; None: the receive buffer.
        connections: name of the connections, equal on all ranks; another one after each update that failed.
        reload_began: time at which the consumer got the weights, by `time.perf_counter`.
        failure: the consumer's error.
        seconds: of this rank, by the field of `SyncReport`.
        open: the context of the update, while it is open; see `VersionedEngine`.
    """

    topology: Topology
    layout: WeightLayout
    version: WeightVersion
    digests: Mapping[int, str]
    block_bytes: int | None
    changes: Changes | None
    pool: HostPool | None
    receive_buffer: ReceivedStream | None
    receivers: Sequence[int]
    before: ReceivedStream | None
    connections: str
    reload_began: float | None = None
    failure: Exception | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    open: AbstractContextManager[Any] = field(default_factory=nullcontext)

    @property
    def arriving(self) -> ReceivedStream | None:
        """The receive buffer, on a rank that buckets are sent to."""
        return self.receive_buffer if self.topology.rank in self.receivers else None

    @property
    def sent_bytes(self) -> int:
        return self.layout.num_bytes if self.changes is None else self.changes.num_bytes

    def counted(self, weights: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """Yield the weights, and count each one that was loaded as progress."""
        for named in weights:
            yield named
            self.topology.progress()


class Transport(Protocol):
    """Carries buckets from the pools of trainers to the receive buffers of rollouts. One on each rank; called by the members' thread.

    join -> ready, for each layout -> carry -> ... -> reset, after a failure -> ready -> carry -> ... -> leave
    """

    def owners(self, topology: Topology, trainers: Sequence[int]) -> list[int]:
        """Return the ranks that send, in turn. A trainer that is none of them compares its digests with the first one's."""
        return take_turns(topology.nodes, trainers)

    def join(self, topology: Topology) -> None:
        """Connect ranks that have just joined. Collective; may have phases."""
        return

    def leave(self) -> None:
        """Disconnect. Local; other ranks may be gone."""
        return

    def ready(self, update: Update) -> None:
        """Prepare for a new layout, or for the first one after `reset`. Collective; may have phases."""
        return

    def carry(self, update: Update) -> None:
        """Bring each bucket to each rollout, and verify it there. Collective, within one phase.

        Raises:
            CorruptCheckpointError: a bucket arrived with other bytes.
            RankLeftError: another rank is gone.
        """

    def reset(self, receive_buffer: ReceivedStream) -> None:
        """Clean up after an update that failed, on any rank. Local; waits for no other rank.

        Args:
            receive_buffer: of this rank; dropped, if a transfer may still write to it.
        """
        return
