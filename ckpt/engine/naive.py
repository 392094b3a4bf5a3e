"""Transport within one process: each rank is trainer and rollout, and has all weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckpt.engine.base import CheckpointEngineRegistry
from ckpt.engine.update import Transport, Update
from ckpt.engine.versioned import VersionedEngine
from ckpt.engine.wire.pool import digest_of_bucket
from ckpt.errors import ConfigurationError, CorruptCheckpointError
from ckpt.ranks.topology import Topology


class InProcessTransport(Transport):
    """Copies each bucket from the pool of a rank to its receive buffer."""

    def owners(self, topology: Topology, trainers: Sequence[int]) -> list[int]:
        return [0]  # each rank sends all buckets, and their digests are compared

    def carry(self, update: Update) -> None:
        assert update.pool is not None, "every rank is both trainer and rollout"
        layout, topology, receive_buffer = update.layout, update.topology, update.arriving
        if receive_buffer is None:
            return
        for bucket in range(layout.num_buckets):
            there = receive_buffer.bucket(bucket)
            there.copy_(update.pool.bucket(layout, bucket))
            if digest_of_bucket(there) != update.digests[bucket]:
                raise CorruptCheckpointError(
                    f"{layout.described(bucket)}, has changed in the host memory of rank {topology.rank}"
                )
            topology.progress()


@CheckpointEngineRegistry.register("naive")
class NaiveCheckpointEngine(VersionedEngine):
    """Each rank takes the weights of its own trainer, through its host memory; only agreements and digests travel between ranks.

    Args: see `VersionedEngine`; it is always colocated.

    Raises:
        ConfigurationError: with `delta`, for no byte leaves its process.
    """

    def __init__(self, bucket_size: int | None = None, **settings: Any) -> None:
        if settings.get("delta"):
            raise ConfigurationError(
                "delta=true: with the naive engine nothing travels that could be left out; leave it out, or choose another engine"
            )
        super().__init__(bucket_size, **(settings | {"colocated": True}))
        self.transport = InProcessTransport()
