"""Weights by pipelined broadcasts of buckets, through torch.distributed and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ckpt.engine.base import CheckpointEngineRegistry
from ckpt.engine.members import Members
from ckpt.engine.update import Transport, Update
from ckpt.engine.versioned import VersionedEngine
from ckpt.engine.wire.buckets import Buckets
from ckpt.engine.wire.group import OwnGroup
from ckpt.engine.wire.layout import WeightLayout
from ckpt.engine.wire.parts import Messages
from ckpt.engine.wire.pool import ReceivedStream
from ckpt.engine.wire.transfer import IN_FLIGHT, Network, Transfer
from ckpt.errors import RankLeftError
from ckpt.ranks.topology import Topology


class BroadcastTransport(Transport):
    """Every owner of buckets has a group with all rollouts, and sends them there."""

    def __init__(self, members: Members, buckets: Buckets) -> None:
        self._members = members
        self._buckets = buckets
        self._groups: dict[str, OwnGroup] = {}
        self._network: Network | None = None
        self._messages = Messages(IN_FLIGHT)

    def join(self, topology: Topology) -> None:
        self._groups = {}  # `leave` does not come to an end where the thread is stuck

    def leave(self) -> None:
        for group in self._groups.values():
            group.close()
        self._groups = {}
        self._messages = Messages(IN_FLIGHT)

    def carry(self, update: Update) -> None:
        group, members = self.groups_of(update), self._groups_needed(update.layout)
        bucket_bytes = min(update.layout.bucket_bytes, update.layout.num_bytes)
        transfer = Transfer(
            rank=self._members.rank,
            update=update,
            groups=lambda: {owner: group(f"{owner}", ranks) for owner, ranks in members.items()},
            receivers=self._members.rollouts,
            buffers=self._buckets.on_device(bucket_bytes) if members else None,
            messages=self._messages,
            timeout_s=self._members.timeout_s,
        )
        transfer.finish(self.watched(transfer.start()))

    def reset(self, landing: ReceivedStream) -> None:
        # What others have not taken part in may still be under way here, and would write to memory and read from groups.
        groups, self._groups = self._groups, {}
        for group in groups.values():
            group.give_up()
        if self._network is not None:
            self._network.end()
        landing.let_go()
        self._messages = Messages(IN_FLIGHT)

    def watched(self, network: Network) -> Network:
        """Have `reset` wait a moment for the end of it."""
        self._network = network
        return network

    def groups_of(self, update: Update) -> Callable[[str, Sequence[int]], OwnGroup]:
        """Return what finds or makes the group of a name; all of its ranks call that, in one order, in the network's thread."""
        groups, members = self._groups, self._members
        store = members.store
        assert store is not None, "the ranks are joined"

        def group(name: str, ranks: Sequence[int]) -> OwnGroup:
            if name not in groups:
                unique, device = f"{update.connections}-{name}", self._buckets.device
                made = OwnGroup(store, unique, ranks, members.rank, device=device, timeout_s=members.timeout_s)
                if groups is not self._groups:
                    made.give_up()
                    raise RankLeftError("the update has failed")
                groups[name] = made
            return groups[name]

        return group

    def _groups_needed(self, layout: WeightLayout) -> dict[int, list[int]]:
        """Which ranks are in the group of each owner of a bucket with the rollouts; of those that this rank is in."""
        rank, rollouts = self._members.rank, self._members.rollouts
        owners = {layout.owner(bucket) for bucket in range(min(layout.num_buckets, len(layout.owners)))}
        members = {owner: sorted({owner, *rollouts}) for owner in sorted(owners)}
        return {owner: ranks for owner, ranks in members.items() if rank in ranks and len(ranks) > 1}


@CheckpointEngineRegistry.register("broadcast")
class BroadcastCheckpointEngine(VersionedEngine):
    """Every trainer sends the buckets that it owns to all rollouts at once; other trainers take no part in that.

    Device memory: `staging` or not, two buckets or one, on trainers and rollouts alike; none where the collectives are gloo's.

    Args: see `VersionedEngine`.
    """

    def __init__(self, bucket_size: int | None = None, **settings: Any) -> None:
        super().__init__(bucket_size, **settings)
        self.transport = BroadcastTransport(self.members, self.buckets)
