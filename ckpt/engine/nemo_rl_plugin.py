"""Plug-in for NeMo-RL: a refit transport, named by the path of its class.

    policy.generation.refit_transport="ckpt.engine.nemo_rl_plugin:RefitEngine"
    policy.generation.refit_cfg."ckpt.engine.nemo_rl_plugin:RefitEngine".timeout_s=120

Source of the interface: NeMo-RL's checkpoint-engine design, of 2026. Policy workers are trainers here, and generation workers rollouts.

Raises:
    ImportError: NeMo-RL is not installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine as NemoRlEngine

from ckpt.engine.base import MasterMetadata, NamedTensor
from ckpt.engine.broadcast import BroadcastCheckpointEngine
from ckpt.engine.stream import OpenUpdate, WeightStream
from ckpt.errors import ConfigurationError
from ckpt.memory.device import current_device


class RefitEngine(BroadcastCheckpointEngine, NemoRlEngine):  # type: ignore[misc]
    """Sends whole weights under their own names, so that the layouts and numbers of both sides may differ. On the worker's device.

    Args:
        bucket_size: in bytes, as NeMo-RL has computed it.
        settings: see `VersionedEngine`.

    Raises:
        ConfigurationError: a rollout's part of the experts alone is asked for.
    """

    def __init__(self, bucket_size: int, **settings: Any) -> None:
        for name in [name for name in settings if name.startswith("shard_")]:
            if settings.pop(name):
                raise ConfigurationError(f"{name}=true: this engine sends whole weights, which vLLM cuts; leave it out")
        super().__init__(bucket_size, device=current_device(), **settings)

    def prepare(self) -> list[Any] | None:  # type: ignore[override]
        """Return the address of a store, on the first worker of each side: which side that is, nobody says before."""
        self.members.is_master = not dist.is_initialized() or dist.get_rank() == 0
        meeting = super().prepare()
        return None if meeting is None else [*meeting]

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Join the other workers, through the store of the first policy worker."""
        self._meet(worker_rank, train_world_size, rollout_world_size, metadata)

    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """See `init_policy_process_group`."""
        self._meet(train_world_size + rollout_rank, train_world_size, rollout_world_size, metadata)

    def _meet(self, rank: int, num_trainers: int, num_rollouts: int, metadata: list[Any]) -> None:
        if not metadata or metadata[0] is None:
            raise ConfigurationError("the first policy worker has given no address: NeMo-RL lists the metadata of policy workers first")
        self.members.is_master = rank == 0
        self.init_process_group(rank, num_trainers, num_rollouts, MasterMetadata(*metadata[0]))

    def finalize(self) -> None:
        """Leave the other workers: NeMo-RL calls it when it shuts a synchronizer down, and prepares anew for the next one."""
        super().finalize()
        self.leave()

    def receive_weight_batches(self) -> WeightStream:
        """Return an async iterator over lists of weights, each of about a bucket's size. The update ends after the last one is loaded.

        A batch is valid until the next one is requested.
        """

        async def opened() -> OpenUpdate:
            update = await self._open_for_consumer(None)
            return replace(update, weights=self._batches(update.weights))

        return WeightStream(opened)

    def _batches(self, weights: Iterable[NamedTensor]) -> Iterator[Any]:
        is_reused = self.device.torch_device.type != "cpu"  # host memory has all weights at once
        batch: list[NamedTensor] = []
        num_bytes = 0
        for name, weight in weights:
            batch.append((name, weight.clone() if is_reused else weight))
            num_bytes += weight.nbytes
            if num_bytes >= self._bucket_bytes:
                yield batch
                batch, num_bytes = [], 0
        if batch:
            yield batch
