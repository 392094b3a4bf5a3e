"""The contenders of measure=sync: our engines, bare broadcasts of buckets, and one broadcast for each tensor."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ckpt.engine import CheckpointEngineRegistry, LiveModel
from ckpt.engine.wire.layout import WeightLayout
from ckpt.engine.wire.transfer import IN_FLIGHT
from ckpt.format.digests import digest_of
from ckpt.format.dtypes import raw_bytes
from ckpt.memory.device import Device, wait_for
from ckpt.ranks.topology import Topology
from recipes.benchmark.weights import NamedTensors, Row
from recipes.training.roles import join_engine

OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "kimi": ("kimi_ckpt_engine", {}),
    "broadcast": ("broadcast", {}),
    "kimi/delta": ("kimi_ckpt_engine", {"delta": True}),
}
"""Engine and its settings, by contender."""

CONTENDERS = {
    "the machine": ("raw", "raw-all"),
    "others": ("reference", "reference/tuned", "per-tensor"),
    "ours": OURS,
}

PARTS = {"offload": "offload_s", "gather": "gather_s", "transfer": "transfer_s", "reload": "reload_s"}

Seconds = dict[str, float]
"""Of one rank: the `PARTS` of an update, as far as a contender has them."""


class Stopwatch:
    """A stopwatch: each lap begins where the last one ended."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    def lap(self) -> float:
        began, self._began = self._began, time.perf_counter()
        return self._began - began


@dataclass(frozen=True)
class UpdateEndpoints:
    """One rank's part in the updates, the same for all contenders.

    Args:
        weights: published by a trainer, held by a rollout.
        rows: of the weights.
        trainers, rollouts: ranks of the topology.
        frozen: the share of the weights that does not change.
    """

    topology: Topology
    device: Device
    weights: NamedTensors
    rows: Sequence[Row]
    trainers: range
    rollouts: range
    bucket_bytes: int
    timeout_s: float
    frozen: float

    @property
    def is_trainer(self) -> bool:
        return self.topology.rank in self.trainers


class Contender(ABC):
    """One way to update the rollouts. Every method is collective.

    Attributes:
        num_buckets: that travel in one update; None: it has no buckets.
        sent_bytes: that the last update brought to the rollouts, once; None: all.
    """

    num_buckets: int | None = None
    sent_bytes: int | None = None

    def __init__(self, ends: UpdateEndpoints) -> None:
        self.ends = ends

    def prepare(self) -> None:
        """Change the trainers' weights, and overwrite the rollouts'. Not timed."""
        if self.ends.is_trainer:
            self.ends.weights.change(self.ends.frozen)
        else:
            self.ends.weights.overwrite()
        wait_for(self.ends.device.torch_device)

    @abstractmethod
    def update(self, step: int) -> Seconds:
        """Bring the trainers' weights to all rollouts; a rollout returns when they are in its memory."""

    def digests(self) -> dict[str, str]:
        """Return digests by name of all that this rank sent, or holds now. Those of one name are equal on all ranks that have it."""
        return {"weights": self.ends.weights.fingerprint()}

    @abstractmethod
    def close(self) -> None:
        """Leave the other ranks."""


class Ours(Contender):
    """One of our engines."""

    def __init__(self, ends: UpdateEndpoints, name: str) -> None:
        super().__init__(ends)
        engine_name, settings = OURS[name]
        common = {"device": ends.device, "timeout_s": ends.timeout_s, "is_master": ends.topology.is_lead}
        make = partial(CheckpointEngineRegistry.new, engine_name, ends.bucket_bytes, **common, **settings)
        roles = {"trainer": len(ends.trainers), "rollout": len(ends.rollouts)}
        self._engine = join_engine(make, ends.topology, roles)
        self._live = LiveModel(ends.weights)

    def update(self, step: int) -> Seconds:
        if self.ends.is_trainer:
            report = asyncio.run(self._engine.send_weights(self.ends.weights.tensors.items(), step))
        else:
            report = asyncio.run(self._engine.receive_into(self._live, step))
        self.num_buckets, self.sent_bytes = report["num_buckets"], report["sent_bytes"]
        return {part: report[part] for part in PARTS.values()}

    def close(self) -> None:
        self._engine.close()


class Raw(Contender):
    """Broadcasts of the same buckets from the same owners, between memory that has been used before: the limit of an update.

    Args:
        to_trainers: the other trainers, too, receive every bucket, into memory that is used again.
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
        self._memory: dict[int, torch.Tensor] = {}  # of all buckets that this rank sends or receives
        self._kept: dict[int, torch.Tensor] = {}  # those that it sends, or receives as a rollout
        passing = [torch.zeros(ends.bucket_bytes, dtype=torch.uint8, device=device) for _ in range(IN_FLIGHT + 1)]
        for bucket in range(self.num_buckets):
            start, stop = self._layout.extent(bucket)
            if rank == self._layout.owner(bucket) or not ends.is_trainer:
                generator = torch.Generator().manual_seed(bucket)
                bits = torch.randint(256, (stop - start,), generator=generator, dtype=torch.uint8)
                self._memory[bucket] = self._kept[bucket] = bits.to(device)
            elif to_trainers:
                self._memory[bucket] = passing[bucket % len(passing)][: stop - start]

    def prepare(self) -> None:
        for memory in self._kept.values():
            if self.ends.is_trainer:
                memory.add_(1)
            else:
                memory.fill_(0xA5)
        wait_for(self.ends.device.torch_device)

    def update(self, step: int) -> Seconds:
        stopwatch = Stopwatch()
        coming: deque[Any] = deque()
        for bucket, memory in self._memory.items():
            owner = self._layout.owner(bucket)
            if len(coming) == IN_FLIGHT:
                coming.popleft().wait()
            coming.append(dist.broadcast(memory, src=owner, group=self._groups[owner], async_op=True))
        for work in coming:
            work.wait()
        wait_for(self.ends.device.torch_device)
        return {"transfer_s": stopwatch.lap()}

    def digests(self) -> dict[str, str]:
        return {str(bucket): digest_of(memory.cpu().numpy().data) for bucket, memory in self._kept.items()}

    def close(self) -> None:
        for group in self._groups.values():
            dist.destroy_process_group(group)
        self._memory.clear()
        self._kept.clear()


class PerTensor(Contender):
    """One broadcast for each tensor, from the first trainer into the live models, without versions, staging or digests."""

    def __init__(self, ends: UpdateEndpoints) -> None:
        super().__init__(ends)
        self._group = dist.new_group([ends.trainers[0], *ends.rollouts])

    def update(self, step: int) -> Seconds:
        ends = self.ends
        sender = ends.trainers[0]
        if ends.is_trainer and ends.topology.rank != sender:
            return {}
        stopwatch = Stopwatch()
        for tensor in ends.weights.tensors.values():
            dist.broadcast(raw_bytes(tensor), src=sender, group=self._group)
        wait_for(ends.device.torch_device)
        return {"transfer_s": stopwatch.lap()}

    def close(self) -> None:
        dist.destroy_process_group(self._group)
