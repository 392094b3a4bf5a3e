"""Weights that stay in their process: trainer and rollout are one, and each has all of them."""

from __future__ import annotations

from typing import Any

from torch._C._distributed_c10d import Store

from ckpt.engine.base import CheckpointEngineRegistry
from ckpt.engine.versioned import Update, VersionedEngine
from ckpt.engine.wire.layout import WeightLayout
from ckpt.engine.wire.pool import HostPool, ReceivedStream, digest_of_bucket
from ckpt.errors import ConfigurationError, CorruptCheckpointError
from ckpt.ranks.topology import Topology


@CheckpointEngineRegistry.register("naive")
class NaiveCheckpointEngine(VersionedEngine):
    """Every rank takes the weights from its own trainer, through its host memory; only verdicts and digests travel.

    Args: see `VersionedEngine`; it is always colocated.

    Raises:
        ConfigurationError: `delta`, where no byte leaves its process.
    """

    def __init__(self, bucket_size: int | None = None, **settings: Any) -> None:
        if settings.get("delta"):
            raise ConfigurationError(
                "delta=true: with the naive engine nothing travels that could be left out; leave it out, or choose another engine"
            )
        super().__init__(bucket_size, **(settings | {"colocated": True}))

    def _owners(self, topology: Topology) -> list[int]:
        self._sends_as = 0  # each is the owner of all, and the digests of all are compared
        return [0]

    def _join_transport(self, store: Store) -> None:
        """There is none."""

    def _leave_transport(self) -> None:
        """There is none."""

    def _ready(self, layout: WeightLayout, pool: HostPool | None) -> None:
        """There is nothing to get ready."""

    def _reset_transport(self) -> None:
        """Nothing is under way."""

    def _carry(self, update: Update, pool: HostPool | None, landing: ReceivedStream | None) -> None:
        assert pool is not None and landing is not None, "every rank is both"
        layout, topology = update.layout, self._topology()
        for bucket in range(layout.num_buckets):
            there = landing.bucket(bucket)
            there.copy_(pool.bucket(layout, bucket))
            if digest_of_bucket(there) != update.digests[bucket]:
                raise CorruptCheckpointError(
                    f"bucket {bucket} of {layout.num_buckets}, with {', '.join(layout.weights_in(bucket)[:3])}, has changed in the host "
                    f"memory of rank {self.rank}"
                )
            topology.progress()
