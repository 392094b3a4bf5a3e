"""Weights by pipelined broadcasts of buckets, through torch.distributed and nothing else."""

from __future__ import annotations

from torch._C._distributed_c10d import Store

from ckpt.engine.base import CheckpointEngineRegistry
from ckpt.engine.group import OwnGroup
from ckpt.engine.layout import WeightLayout
from ckpt.engine.pool import HostPool, Landing
from ckpt.engine.transfer import DeviceBuffers, Transfer
from ckpt.engine.versioned import Update, VersionedEngine


@CheckpointEngineRegistry.register("broadcast")
class BroadcastCheckpointEngine(VersionedEngine):
    """Every trainer sends the buckets that it owns to all rollouts at once; other trainers take no part in that.

    Device memory: `staging` or not, two buckets or one, on trainers and rollouts alike; none where the collectives are gloo's.

    Args: see `VersionedEngine`.
    """

    def _join_transport(self, store: Store) -> None:
        self._groups: dict[int, OwnGroup] = {}
        self._generation = 0

    def _leave_transport(self) -> None:
        for group in self._groups.values():
            group.close()
        self._groups = {}

    def _ready(self, layout: WeightLayout, pool: HostPool | None) -> None:
        self._make_groups(layout)

    def _make_groups(self, layout: WeightLayout) -> None:
        """A group for each owner of a bucket, made in one order on all ranks."""
        for owner in sorted({layout.owner(bucket) for bucket in range(min(layout.num_buckets, len(layout.owners)))}):
            members = sorted({owner, *self.rollouts})
            if owner not in self._groups and self.rank in members and len(members) > 1:
                name = f"{self._groups_name}-{self._generation}-{owner}"
                self._groups[owner] = OwnGroup(
                    self._store, name, members, self.rank, backends=self.device.backends, timeout_s=self.timeout_s
                )

    def _carry(self, update: Update, pool: HostPool | None, landing: Landing | None) -> None:
        layout, device = update.layout, self.device
        buffers = None
        if device.collectives != "gloo" and self._groups:
            largest = min(layout.bucket_bytes, layout.num_bytes)
            buffers = DeviceBuffers(device.torch_device, largest, self._halves)
        transfer = Transfer(
            rank=self.rank,
            topology=self._topology(),
            layout=layout,
            pool=pool,
            landing=landing,
            groups=self._groups,
            receivers=self.rollouts,
            digests=update.digests,
            buffers=buffers,
            timeout_s=self.timeout_s,
        )
        transfer.run()

    def _reset_transport(self) -> None:
        # What others have not taken part in may still be under way here, and would write to memory and read from groups.
        for group in self._groups.values():
            group.abort()
        self._groups = {}
        self._generation += 1
        self._landings[0].let_go()
