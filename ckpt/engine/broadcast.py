"""Weights by pipelined broadcasts of buckets, through torch.distributed and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch._C._distributed_c10d import Store

from ckpt.engine.base import CheckpointEngineRegistry
from ckpt.engine.versioned import Update, VersionedEngine
from ckpt.engine.wire.group import OwnGroup
from ckpt.engine.wire.layout import WeightLayout
from ckpt.engine.wire.parts import Messages
from ckpt.engine.wire.pool import HostPool, ReceivedStream
from ckpt.engine.wire.transfer import IN_FLIGHT, DeviceBuffers, Network, Transfer
from ckpt.errors import RankLeftError


@CheckpointEngineRegistry.register("broadcast")
class BroadcastCheckpointEngine(VersionedEngine):
    """Every trainer sends the buckets that it owns to all rollouts at once; other trainers take no part in that.

    Device memory: `staging` or not, two buckets or one, on trainers and rollouts alike; none where the collectives are gloo's.

    Args: see `VersionedEngine`.
    """

    def __init__(self, bucket_size: int | None = None, **settings: Any) -> None:
        super().__init__(bucket_size, **settings)
        self._groups: dict[str, OwnGroup] = {}
        self._network: Network | None = None
        self._messages = Messages(IN_FLIGHT)

    def close(self) -> None:
        """Leave the other ranks and let go of all memory."""
        super().close()
        self._messages = Messages(IN_FLIGHT)

    def _join_transport(self, store: Store) -> None:
        self._groups = {}

    def _leave_transport(self) -> None:
        for group in self._groups.values():
            group.close()
        self._groups = {}

    def _ready(self, layout: WeightLayout, pool: HostPool | None) -> None:
        """Groups are made by the thread that uses them: it may get stuck where a rank is gone."""

    def _group(self, groups: dict[str, OwnGroup], name: str, members: Sequence[int]) -> OwnGroup:
        """The group of that name; all members make it, in one order."""
        if name not in groups:
            assert self._store is not None, "the engine has joined"
            unique = f"{self._groups_name}-{self._generation}-{name}"
            made = OwnGroup(self._store, unique, members, self.rank, device=self.device, timeout_s=self.timeout_s)
            if groups is not self._groups:
                made.give_up()
                raise RankLeftError("the update has failed")
            groups[name] = made
        return groups[name]

    def _members(self, layout: WeightLayout) -> dict[int, list[int]]:
        """Who is in the group of each owner of a bucket with the rollouts; of those that this rank is in."""
        owners = {layout.owner(bucket) for bucket in range(min(layout.num_buckets, len(layout.owners)))}
        members = {owner: sorted({owner, *self.rollouts}) for owner in sorted(owners)}
        return {owner: ranks for owner, ranks in members.items() if self.rank in ranks and len(ranks) > 1}

    def _carry(self, update: Update, pool: HostPool | None, landing: ReceivedStream | None) -> None:
        layout, device, groups = update.layout, self.device, self._groups
        members, buffers = self._members(layout), None
        if device.collectives != "gloo" and members:
            buffers = DeviceBuffers(device.torch_device, min(layout.bucket_bytes, layout.num_bytes), self._halves)
        transfer = Transfer(
            rank=self.rank,
            topology=self._topology(),
            layout=layout,
            pool=pool,
            landing=landing,
            groups=lambda: {owner: self._group(groups, f"{owner}", ranks) for owner, ranks in members.items()},
            receivers=self.rollouts,
            digests=update.digests,
            buffers=buffers,
            messages=self._messages,
            timeout_s=self.timeout_s,
            block_bytes=self._block_bytes,
            changes=update.changes,
            before=self._before(landing) if update.changes is not None else None,
        )
        self._network = transfer.start()
        transfer.finish(self._network)

    def _reset_transport(self) -> None:
        # What others have not taken part in may still be under way here, and would write to memory and read from groups.
        groups, self._groups = self._groups, {}
        for group in groups.values():
            group.give_up()
        if self._network is not None:
            self._network.end()
        self.landings[0].let_go()
        self._messages = Messages(IN_FLIGHT)
