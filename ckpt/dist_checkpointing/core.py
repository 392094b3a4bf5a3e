"""`metadata.json`, which names the formats of a checkpoint. Re-exports `ckpt.format.metadata` under Megatron-Core's module name."""

from ckpt.format.metadata import (
    CheckpointingConfig,
    CheckpointingException,
    check_is_distributed_checkpoint,
    maybe_load_config,
    save_config,
)

__all__ = [
    "CheckpointingConfig",
    "CheckpointingException",
    "check_is_distributed_checkpoint",
    "maybe_load_config",
    "save_config",
]
