"""Process groups of our own, beside torch's default one or without any: a trainer's is none of our business."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d


class OwnGroup:
    """Some ranks, with the collectives of one device. Each of them makes it, with the same arguments but for `rank`.

    Args:
        store: of all ranks of the engine.
        name: equal on all members; used once in this process and in this store.
        members: ranks of the engine, sorted; this one is among them.
        backends: as for `init_process_group`.
        timeout_s: of every collective.
    """

    def __init__(
        self, store: Store, name: str, members: Sequence[int], rank: int, *, backends: str, timeout_s: float
    ) -> None:
        self.members = tuple(members)
        # Torch's public calls know groups inside of the default one only. This is what they, and its users with the same
        # need, call beneath; a test says so if it goes.
        made: tuple[Any, Any] = distributed_c10d._new_process_group_helper(
            len(self.members),
            self.members.index(rank),
            [],
            backends,
            PrefixStore(name, store),
            group_name=distributed_c10d.GroupName(name),
            timeout=timedelta(seconds=timeout_s),
        )
        self._group = made[0]
        distributed_c10d._world.pg_group_ranks[self._group] = {index: index for index in range(len(self.members))}

    def broadcast(self, buffer: torch.Tensor, source: int) -> dist.Work:
        """Begin to fill `buffer` on all members with that of `source`, a rank of the engine; return what to wait for."""
        work: dist.Work = dist.broadcast(buffer, group=self._group, group_src=self.members.index(source), async_op=True)
        return work

    def all_reduce(self, tensor: torch.Tensor, op: Any) -> None:
        """Combine a tensor of all members in place."""
        dist.all_reduce(tensor, op, group=self._group)

    def barrier(self) -> None:
        """Wait for all members."""
        dist.barrier(group=self._group)

    def abort(self) -> None:
        """Give up what is under way, which the others may wait for in vain. Collectives that cannot be, end by their timeout."""
        with suppress(Exception):  # of a group that is broken
            self._group.abort()

    def close(self) -> None:
        """Leave. Nothing of it is under way any more."""
        with suppress(Exception):  # the others may have left, or broken it, before
            dist.destroy_process_group(self._group)
