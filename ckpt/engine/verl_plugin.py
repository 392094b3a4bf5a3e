"""Plug-in for verl: importing it registers the engines of this package in verl's registry.

    actor_rollout_ref.rollout.checkpoint_engine.backend=ckpt_kimi
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=ckpt.engine.verl_plugin
    +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.ckpt_kimi.timeout_s=120

The size of a bucket is verl's `update_weights_bucket_megabytes`; the other settings are keywords of `VersionedEngine`, under the engine's
name in `engine_kwargs`. Replicas that come or go need `rebuild_group=true`, as with verl's own engines.

Raises:
    ImportError: verl is not installed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from verl.checkpoint_engine.base import CheckpointEngine as VerlEngine
from verl.checkpoint_engine.base import CheckpointEngineRegistry as VerlRegistry

from ckpt.engine import CheckpointEngineRegistry
from ckpt.engine.base import NamedTensor
from ckpt.engine.versioned import VersionedEngine
from ckpt.errors import ConfigurationError
from ckpt.memory.device import current_device

NAMES = {"ckpt_broadcast": "broadcast", "ckpt_kimi": "kimi_ckpt_engine"}
"""{name in verl: name in this package}."""


def plug_in(registry: Any, base: type) -> None:
    """Register the engines in verl's registry; one whose package is missing with its import error.

    Args:
        registry: verl's `CheckpointEngineRegistry`.
        base: verl's `CheckpointEngine`.
    """
    for name, ours in NAMES.items():
        try:
            engine = CheckpointEngineRegistry.get(ours)
        except ConfigurationError as error:
            assert isinstance(error.__cause__, ImportError)
            registry.record_import_error(name, error.__cause__)
            continue
        registry.register(name)(_for_verl(engine, base))


def _for_verl(engine: type[Any], base: type) -> type:
    """Return an engine as verl constructs it: on the worker's device, with metrics under one prefix."""

    class Engine(engine, base):  # type: ignore[misc]
        def __init__(self, bucket_size: int, is_master: bool = False, **settings: Any) -> None:
            engine.__init__(self, bucket_size, is_master=is_master, device=current_device(), **settings)

        async def send_weights(self, weights: Iterable[NamedTensor], global_steps: int | None = None) -> dict[str, Any]:
            report = await engine.send_weights(self, weights, global_steps)
            return {f"weight_sync/{figure}": value for figure, value in report.items() if value is not None}

    assert issubclass(Engine, VersionedEngine)
    Engine.__name__ = Engine.__qualname__ = engine.__name__
    return Engine


plug_in(VerlRegistry, VerlEngine)
