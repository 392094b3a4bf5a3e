"""Who brings weights from trainers to rollouts: our engines, bare broadcasts of buckets, and one broadcast for each tensor."""

from __future__ import annotations

import asyncio
from collections import deque
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ckpt.engine import CheckpointEngineRegistry, LiveModel
from ckpt.engine.wire.layout import WeightLayout
from ckpt.engine.wire.transfer import IN_FLIGHT
from ckpt.format.dtypes import raw_bytes
from ckpt.format.manifest import digest_of
from ckpt.memory.device import wait_for
from recipes.benchmark.sync_contender import Clock, Contender, Seconds, UpdateEndpoints
from recipes.benchmark.sync_keys import OURS, PER_TENSOR, RAW, RAW_ALL, TUNED
from recipes.training.roles import join_engine


class Ours(Contender):
    """One of our engines."""

    def __init__(self, ends: UpdateEndpoints, name: str) -> None:
        super().__init__(ends)
        engine_name, settings = OURS[name]
        make = partial(
            CheckpointEngineRegistry.new,
            engine_name,
            ends.bucket_bytes,
            device=ends.device,
            timeout_s=ends.timeout_s,
            is_master=ends.topology.is_lead,
            **settings,
        )
        roles = {"trainer": len(ends.trainers), "rollout": len(ends.rollouts)}
        self._engine = join_engine(make, ends.topology, roles)
        self._live = None if ends.live is None else LiveModel(ends.live)

    def update(self, step: int) -> Seconds:
        if self._live is not None:
            report = asyncio.run(self._engine.receive_into(self._live, step))
        else:
            assert self.ends.source is not None, "who does not receive sends"
            report = asyncio.run(self._engine.send_weights(self.ends.source.tensors.items(), step))
        self.num_buckets, self.sent_bytes = report["num_buckets"], report["sent_bytes"]
        return {name: report[name] for name in ("offload_s", "gather_s", "transfer_s", "reload_s")}

    def close(self) -> None:
        self._engine.close()


class Raw(Contender):
    """Broadcasts of the same buckets from the same owners, out of memory and into memory that has been used before. That is all.

    Args:
        to_trainers: the others, too, receive every bucket, into memory that is used again.
    """

    def __init__(self, ends: UpdateEndpoints, *, to_trainers: bool) -> None:
        super().__init__(ends)
        rank, device = ends.topology.rank, ends.device.torch_device
        self._layout = WeightLayout(ends.bucket_bytes, list(ends.trainers))
        for name, dtype, shape in ends.rows:
            self._layout.add(name, dtype, shape)
        self.num_buckets = self._layout.num_buckets
        everybody = [*ends.trainers, *ends.rollouts]
        self._groups = {
            owner: dist.new_group(everybody if to_trainers else sorted({owner, *ends.rollouts}))
            for owner in ends.trainers
        }
        self._memory: dict[int, torch.Tensor] = {}
        passing = [torch.zeros(ends.bucket_bytes, dtype=torch.uint8, device=device) for _ in range(IN_FLIGHT + 1)]
        for bucket in range(self.num_buckets):
            owner = self._layout.owner(bucket)
            start, stop = self._layout.extent(bucket)
            if rank == owner or rank in ends.rollouts:
                generator = torch.Generator().manual_seed(bucket)
                self._memory[bucket] = torch.randint(256, (stop - start,), generator=generator, dtype=torch.uint8).to(
                    device
                )
            elif to_trainers:
                self._memory[bucket] = passing[bucket % len(passing)][: stop - start]

    def get_ready(self) -> None:
        ends = self.ends
        for memory in self._kept().values():
            if ends.topology.rank in ends.rollouts:
                memory.fill_(0xA5)
            else:
                memory.add_(1)
        wait_for(ends.device.torch_device)

    def update(self, step: int) -> Seconds:
        clock = Clock()
        coming: deque[Any] = deque()
        for bucket, memory in self._memory.items():
            owner = self._layout.owner(bucket)
            if len(coming) == IN_FLIGHT:
                coming.popleft().wait()
            coming.append(dist.broadcast(memory, src=owner, group=self._groups[owner], async_op=True))
        for work in coming:
            work.wait()
        wait_for(self.ends.device.torch_device)
        return {"transfer_s": clock.lap()}

    def held(self) -> dict[str, str]:
        return {str(bucket): digest_of(memory.cpu().numpy().data) for bucket, memory in self._kept().items()}

    def close(self) -> None:
        for group in self._groups.values():
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
        self._memory.clear()

    def _kept(self) -> dict[int, torch.Tensor]:
        """What this rank sends, or receives to keep."""
        rank, rollouts = self.ends.topology.rank, self.ends.rollouts
        return {
            bucket: memory
            for bucket, memory in self._memory.items()
            if rank in rollouts or rank == self._layout.owner(bucket)
        }


class PerTensor(Contender):
    """One broadcast for each tensor, from the first trainer into the live models: no version, nothing staged, nothing verified."""

    def __init__(self, ends: UpdateEndpoints) -> None:
        super().__init__(ends)
        self._group = dist.new_group([ends.trainers[0], *ends.rollouts])

    def update(self, step: int) -> Seconds:
        ends = self.ends
        if ends.topology.rank != ends.trainers[0] and ends.live is None:
            return {}
        weights = ends.live if ends.live is not None else ends.source
        assert weights is not None, "a rank is a trainer or a rollout"
        clock = Clock()
        for tensor in weights.tensors.values():
            dist.broadcast(raw_bytes(tensor), src=ends.trainers[0], group=self._group)
        wait_for(ends.device.torch_device)
        return {"transfer_s": clock.lap()}

    def close(self) -> None:
        if self._group is not dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(self._group)


def contender_of(name: str, ends: UpdateEndpoints) -> Contender:
    """Make a contender by its name. Collective."""
    if name in OURS:
        return Ours(ends, name)
    if name in (RAW, RAW_ALL):
        return Raw(ends, to_trainers=name == RAW_ALL)
    if name == PER_TENSOR:
        return PerTensor(ends)
    from recipes.benchmark.sync_reference import Reference  # its package may be missing

    return Reference(ends, is_tuned=name == TUNED)
