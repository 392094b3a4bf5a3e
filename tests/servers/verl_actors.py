"""verl's workers in Ray actors: trainers that hold a model by FSDP2, and rollouts that hold a module. For test_verl.py."""

from __future__ import annotations

from collections.abc import AsyncIterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig
from verl.workers.rollout import BaseRollout, RolloutReplica

from ckpt.format.digests import digest_of
from ckpt.format.dtypes import raw_bytes


def model(seed: int) -> torch.nn.Module:
    """Return a module whose weights are drawn by a seed; equal wherever it is made."""
    torch.manual_seed(seed)
    made = torch.nn.Sequential(torch.nn.Embedding(301, 64), torch.nn.Linear(64, 200), torch.nn.LayerNorm(200), torch.nn.Linear(200, 301))
    made[3].bfloat16()
    return made


def digests(module: torch.nn.Module) -> dict[str, str]:
    """Return a digest of the bits of each parameter."""
    return {name: digest_of(raw_bytes(one.detach().contiguous()).numpy()) for name, one in module.named_parameters()}


class Trainer(Worker):
    """A rank of the actor, as verl's own: it has the engine beside the model."""

    def __init__(self, config: CheckpointEngineConfig) -> None:
        super().__init__()
        initialize_global_process_group_ray(backend="gloo")
        import_external_libs(config.custom_backend_module)
        settings = dict(config.engine_kwargs.get(config.backend, {})) | ({"is_master": True} if dist.get_rank() == 0 else {})
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend, bucket_size=config.update_weights_bucket_megabytes << 20, **settings
        )
        self.model: Any = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, seed: int) -> None:
        """Hold the weights of a seed, sharded."""
        self.model = model(seed)
        for layer in self.model:
            fully_shard(layer)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        weights = ((name, one.detach().full_tensor()) for name, one in self.model.named_parameters())
        return await self.checkpoint_engine.send_weights(weights, global_steps=global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


class Module(BaseRollout):
    """An inference engine that is a module."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, None, device_mesh=None)
        self.module, self.step = model(0), -1

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: AsyncIterable[Any], wire_format: str = "named_tensors", **kwargs: Any) -> None:
        assert wire_format == "named_tensors"
        parameters = dict(self.module.named_parameters())
        with torch.no_grad():
            async for name, weight in weights:
                parameters.pop(name).copy_(weight)
        assert not parameters
        self.step = kwargs["global_steps"]


class Rollout(CheckpointEngineWorker):
    """verl's worker of a rollout, with such an engine."""

    def __init__(self, config: Any) -> None:
        super().__init__(config, None, Module(config))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def holds(self) -> tuple[int, dict[str, str]]:
        """Return the step, and the digests of the weights."""
        return self.server_adapter.step, digests(self.server_adapter.module)


class Replica(RolloutReplica):
    """A replica of one worker, without HTTP servers."""

    def get_ray_class_with_init_args(self) -> Any:
        raise NotImplementedError

    async def launch_servers(self) -> None: ...
