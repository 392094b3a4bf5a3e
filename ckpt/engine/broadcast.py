"""Transport by pipelined broadcasts of buckets, with torch.distributed only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ckpt.engine.base import CheckpointEngineRegistry
from ckpt.engine.members import Members
from ckpt.engine.update import Transport, Update
from ckpt.engine.versioned import VersionedEngine
from ckpt.engine.wire.buffers import Buckets, Buffers
from ckpt.engine.wire.group import Groups, OwnGroup
from ckpt.engine.wire.layout import WeightLayout
from ckpt.engine.wire.pool import ReceivedStream
from ckpt.engine.wire.transfer import IN_FLIGHT, Network, Transfer
from ckpt.ranks.topology import Topology


class BroadcastTransport(Transport):
    """Broadcasts the buckets of each owner in its group with the rollouts that receive, one of a host that share its memory.

    Attributes:
        groups: of this rank; others after each failure. Names begin with `Update.connections`.
    """

    def __init__(self, members: Members, buckets: Buckets) -> None:
        self._members = members
        self._buckets = buckets
        self._network: Network | None = None
        self._begin()

    def _begin(self) -> None:
        self.groups = Groups(self._new_group)
        self._host_buffers = Buffers(torch.device("cpu"), 0, IN_FLIGHT)

    def join(self, topology: Topology) -> None:
        self._begin()  # `leave` may have been abandoned

    def leave(self) -> None:
        self.groups.close()
        self._begin()

    def carry(self, update: Update) -> None:
        members = self._groups_needed(update.layout, update.receivers)
        bucket_bytes = min(update.layout.bucket_bytes, update.layout.num_bytes)
        buffers = self._buckets.on_device(bucket_bytes) if members else None
        transfer = Transfer(update, self.groups, members, buffers or self._host_buffers)
        self._network = transfer.start()
        transfer.finish(self._network)

    def reset(self, receive_buffer: ReceivedStream) -> None:
        # A collective that other ranks did not join may still be under way here, with its memory and its group.
        self.groups.give_up()
        if self._network is not None:
            self._network.end()
        receive_buffer.let_go()
        self._begin()

    def _new_group(self, name: str, ranks: Sequence[int]) -> OwnGroup:
        members = self._members
        assert members.store is not None, "the ranks are joined"
        device = self._buckets.device
        return OwnGroup(members.store, name, ranks, members.rank, device=device, timeout_s=members.timeout_s)

    def _groups_needed(self, layout: WeightLayout, receivers: Sequence[int]) -> dict[int, list[int]]:
        """Return {owner: ranks of its group with the receivers}, of the groups that this rank is in."""
        rank = self._members.rank
        owners = {layout.owner(bucket) for bucket in range(min(layout.num_buckets, len(layout.owners)))}
        members = {owner: sorted({owner, *receivers}) for owner in sorted(owners)}
        return {owner: ranks for owner, ranks in members.items() if rank in ranks and len(ranks) > 1}


@CheckpointEngineRegistry.register("broadcast")
class BroadcastCheckpointEngine(VersionedEngine):
    """Each trainer broadcasts its buckets to all rollouts; other trainers take no part in that.

    Device memory: two buckets with `staging`, else one, on trainers and rollouts; none if the collectives are gloo's.

    Args: see `VersionedEngine`.
    """

    def __init__(self, bucket_size: int | None = None, **settings: Any) -> None:
        super().__init__(bucket_size, **settings)
        self.transport = BroadcastTransport(self.members, self.buckets)
