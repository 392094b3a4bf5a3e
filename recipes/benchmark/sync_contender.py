"""What the benchmark of weight updates asks of everybody who brings weights from trainers to rollouts."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt.memory.device import Device, wait_for
from ckpt.ranks.topology import Topology
from recipes.benchmark.sync_model import Row, Weights

Seconds = dict[str, float]
"""Of one rank: `offload_s`, `gather_s`, `transfer_s`, `reload_s`, as far as a contender has such a part."""


class Clock:
    """Seconds since it was last asked."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def lap(self) -> float:
        began, self._began = self._began, time.perf_counter()
        return self._began - began


@dataclass(frozen=True)
class UpdateEndpoints:
    """One rank's part in all updates, whoever brings them.

    Args:
        source: what a trainer publishes; None on a rollout.
        live: what a rollout holds; None on a trainer.
        rows: of both.
        trainers, rollouts: ranks of the topology.
        frozen: the share of the weights that does not change.
    """

    topology: Topology
    device: Device
    source: Weights | None
    live: Weights | None
    rows: Sequence[Row]
    trainers: range
    rollouts: range
    bucket_bytes: int
    timeout_s: float
    frozen: float


class Contender(ABC):
    """One way to update the rollouts. Every method is collective.

    Attributes:
        num_buckets: that travel in one update; None: they are none.
        sent_bytes: that the last update brought to the rollouts, once; None: all.
    """

    num_buckets: int | None = None
    sent_bytes: int | None = None

    def __init__(self, ends: UpdateEndpoints) -> None:
        self.ends = ends

    def get_ready(self) -> None:
        """Change what the trainers hold, and spoil what the rollouts do. Not timed."""
        if self.ends.source is not None:
            self.ends.source.change(self.ends.frozen)
        if self.ends.live is not None:
            self.ends.live.spoil()
        wait_for(self.ends.device.torch_device)

    @abstractmethod
    def update(self, step: int) -> Seconds:
        """Bring what the trainers hold to all rollouts; return when it is in this rank's memory, as far as it is one of these."""

    def held(self) -> dict[str, str]:
        """Digests by name: of all that this rank sent, or holds now. Those of one name are equal on all ranks that have it."""
        weights = self.ends.source if self.ends.source is not None else self.ends.live
        assert weights is not None, "a rank is a trainer or a rollout"
        return {"weights": weights.fingerprint()}

    @abstractmethod
    def close(self) -> None:
        """Leave the other ranks."""


def slowest(of_ranks: Sequence[Mapping[str, float]]) -> Seconds:
    """The largest of each part over all ranks that have it."""
    names = dict.fromkeys(name for seconds in of_ranks for name in seconds)
    return {name: max(seconds[name] for seconds in of_ranks if name in seconds) for name in names}
